package incluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"
)

// hubTransport shows the token to the hub's own host and to no other, however
// a request got there: the hub redirects to storage whose hosts change, some of
// them below its own domain.
type hubTransport struct {
	hub   *url.URL
	token string
	next  http.RoundTripper
}

func (t *hubTransport) isHub(u *url.URL) bool {
	return u.Scheme == t.hub.Scheme && u.Host == t.hub.Host
}

func (t *hubTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Del("Authorization")
	if t.token != "" && t.isHub(req.URL) {
		req.Header.Set("Authorization", "Bearer "+t.token)
	}
	return t.next.RoundTrip(req)
}

// permanent is an error that trying again does not mend.
type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// get asks for an address from byte `from` on. The answer is 200, 206 or 416.
func (d *download) get(ctx context.Context, address string, from int64) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, permanent{err}
	}
	req.Header.Set("User-Agent", "llmbox")
	// Compressed on the way, sizes and parts would mean something else.
	req.Header.Set("Accept-Encoding", "identity")
	if from > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", from))
	}
	resp, err := d.client.Do(req)
	if err != nil {
		return nil, brief(err)
	}
	switch resp.StatusCode {
	case http.StatusOK, http.StatusPartialContent, http.StatusRequestedRangeNotSatisfiable:
		return resp, nil
	}
	_ = resp.Body.Close()
	// From storage a refusal only means that the redirect is too old.
	if d.hub.isHub(resp.Request.URL) {
		switch resp.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden:
			return nil, permanent{fmt.Errorf("%w (HTTP %d %s)", ErrNoAccess, resp.StatusCode, resp.Header.Get("X-Error-Code"))}
		case http.StatusNotFound:
			return nil, permanent{fmt.Errorf("%w (HTTP 404 %s)", ErrNoModel, resp.Header.Get("X-Error-Code"))}
		}
	}
	return nil, fmt.Errorf("HTTP %d from %s", resp.StatusCode, resp.Request.URL.Host)
}

// retry repeats step until it succeeds, fails for good, or has failed maxTries
// times without anything new having arrived.
func (d *download) retry(ctx context.Context, step func() error) error {
	corrupt, tries, wait, received := 0, 0, d.pause, d.received
	for {
		err := step()
		if errors.Is(err, errCorrupt) {
			corrupt++
		}
		if d.received > received {
			tries, wait, received = 0, d.pause, d.received
		}
		tries++
		var final permanent
		if err == nil || errors.As(err, &final) || errors.Is(err, errListing) || corrupt > 1 || tries >= maxTries || ctx.Err() != nil {
			return err
		}
		d.say("trying again in %s: %s", wait, oneLine([]byte(err.Error())))
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(wait):
		}
		wait = min(2*wait, time.Minute)
	}
}

// watched puts the watchdog off whenever something arrives.
type watched struct {
	from     io.Reader
	watchdog *time.Timer
	stall    time.Duration
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.from.Read(p)
	if n > 0 {
		w.watchdog.Reset(w.stall)
	}
	return n, err
}

// progress says from time to time how far a long file is.
type progress struct {
	d    *download
	name string
	at   *int64 // bytes of all files
}

func (p progress) Write(b []byte) (int, error) {
	*p.at += int64(len(b))
	if time.Since(p.d.told) >= 15*time.Second {
		p.d.say("%s of %s: %s", size(*p.at), size(p.d.total), p.name)
	}
	return len(b), nil
}
