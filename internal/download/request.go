package download

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// parseURL accepts what may be asked for.
func parseURL(text string, insecure bool) (*url.URL, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil || !web(u):
		return nil, fmt.Errorf("%q is no http or https URL", withoutQuery(text))
	case u.Scheme == "http" && !insecure:
		return nil, fmt.Errorf("%s: %w", redact(u), ErrInsecure)
	}
	u.Fragment = ""
	return u, nil
}

func withoutQuery(text string) string {
	text, _, _ = strings.Cut(text, "?")
	if scheme, rest, ok := strings.Cut(text, "://"); ok {
		if at := strings.LastIndex(rest, "@"); at >= 0 {
			rest = rest[at+1:]
		}
		return scheme + "://" + rest
	}
	return text
}

// get sends a request and follows redirects. Login data in the first URL stays with it.
func (c *Client) get(ctx context.Context, first *url.URL, header http.Header, insecure bool) (*http.Response, error) {
	at, seen := *first, map[string]bool{}
	for {
		seen[at.String()] = true
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "", nil)
		if err != nil {
			return nil, err
		}
		// Never shared with the next hop: a round tripper may have added to it.
		req.Header = header.Clone()
		target := at
		if target.User != nil {
			password, _ := target.User.Password()
			req.SetBasicAuth(target.User.Username(), password)
			target.User = nil
		}
		req.URL, req.Host = &target, target.Host
		resp, err := c.next.RoundTrip(req)
		if err != nil {
			if cause := context.Cause(ctx); cause != nil {
				return nil, cause
			}
			return nil, fmt.Errorf("asking %s: %w", redact(&target), explain(err, &target, nil))
		}
		resp.Request = req // of the last hop, as for net/http
		switch resp.StatusCode {
		default:
			return resp, nil
		case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		}
		discard(resp)
		location := resp.Header.Get("Location")
		next, err := target.Parse(location)
		refuse := func(reason RedirectReason) error {
			return &RedirectError{URL: redact(&target), To: withoutQuery(location), Reason: reason}
		}
		if err != nil || location == "" || !web(next) {
			return nil, refuse(RedirectInvalid)
		}
		next.User, next.Fragment = nil, ""
		switch {
		case seen[next.String()]:
			return nil, refuse(RedirectLoop)
		case len(seen) > c.options.Redirects:
			return nil, refuse(RedirectLimit)
		case next.Scheme == "http" && !insecure:
			return nil, refuse(RedirectInsecure)
		}
		at = *next
	}
}

// discard closes an answer in a way that its connection can be used again.
func discard(resp *http.Response) {
	if resp.Body == nil {
		return
	}
	if resp.ContentLength <= drainBytes {
		_, _ = io.CopyN(io.Discard, resp.Body, drainBytes)
	}
	_ = resp.Body.Close()
}

// refusal is the error of an answer that is none of those wanted.
func refusal(resp *http.Response) error {
	discard(resp)
	return &StatusError{URL: redact(resp.Request.URL), Code: resp.StatusCode, Header: resp.Header}
}

// broken is the error of a body that did not come to its end.
func broken(err error, resp *http.Response) error {
	if is[*StallError](err) || is[*SlowError](err) {
		return err // it says where
	}
	return fmt.Errorf("receiving %s: %w", redact(resp.Request.URL), explain(err, resp.Request.URL, nil))
}

// retryAfter is what the server asks for, bounded; 0 where it asks for nothing.
func (c *Client) retryAfter(err error, now time.Time) time.Duration {
	var status *StatusError
	if !errors.As(err, &status) {
		return 0
	}
	var wait time.Duration
	text := strings.TrimSpace(status.Header.Get("Retry-After"))
	if seconds, err := strconv.ParseUint(text, 10, 63); err == nil {
		wait = c.options.MaxRetryAfter
		if seconds < uint64(c.options.MaxRetryAfter/time.Second)+1 {
			wait = time.Duration(seconds) * time.Second // #nosec G115 -- bounded by the line before
		}
	} else if at, err := http.ParseTime(text); err == nil {
		wait = at.Sub(now)
	}
	return min(max(wait, 0), c.options.MaxRetryAfter)
}

// pause grows with the number of failures; a random half keeps boxes that failed
// together from coming back together.
func (c *Client) pause(failures int) time.Duration {
	wait := c.options.Backoff << min(max(failures-1, 0), 20)
	if wait <= 0 || wait > c.options.MaxBackoff {
		wait = c.options.MaxBackoff
	}
	return wait/2 + rand.N(wait/2+1) // #nosec G404 -- nothing is to be kept secret
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}

// Notice is something that went wrong and is tried again.
type Notice struct {
	// URL is where, without its query; empty where no server is to blame.
	URL string
	Err error
	// Wait is how long until then.
	Wait time.Duration
}

// Document is something small that is wanted in memory: a list, a checksum file.
type Document struct {
	URL string
	// Header is sent along, to the URL's origin alone.
	Header http.Header
	// Limit bounds its length (default 1 MiB).
	Limit int64
	// Digest is checked where it is not empty.
	Digest Digest
	// Notice hears of each failure that is tried again; it may be nil.
	Notice func(Notice)
}

// Answer is a document that arrived.
type Answer struct {
	Body   []byte
	Header http.Header
	// URL is where it came from in the end, without its query.
	URL string
}

// Read brings a document, with the same patience as Fetch.
func (c *Client) Read(ctx context.Context, d Document) (Answer, error) {
	orDefault(&d.Limit, 1<<20)
	if err := d.Digest.check(); err != nil {
		return Answer{}, err
	}
	u, err := parseURL(d.URL, c.options.AllowHTTP || d.Digest.strong())
	if err != nil {
		return Answer{}, err
	}
	if len(d.Header) > 0 {
		o := origin(u)
		c = c.With(func(next http.RoundTripper) http.RoundTripper { return originOnly{o, d.Header, next} })
	}
	for tries := 1; ; tries++ {
		answer, err := c.readOnce(ctx, u, d)
		switch {
		case err == nil:
			return answer, nil
		case context.Cause(ctx) != nil:
			return Answer{}, context.Cause(ctx)
		case final(err) || errors.Is(err, ErrTooLong):
			return Answer{}, err
		case tries >= c.options.Tries || is[*ChecksumError](err) && tries > 1:
			return Answer{}, &RetryError{Tries: tries, Err: err}
		}
		wait := max(c.pause(tries), c.retryAfter(err, time.Now()))
		if d.Notice != nil {
			d.Notice(Notice{URL: redact(u), Err: err, Wait: wait})
		}
		if err := sleep(ctx, wait); err != nil {
			return Answer{}, err
		}
	}
}

func (c *Client) readOnce(ctx context.Context, u *url.URL, d Document) (Answer, error) {
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-ctx.Done():
		return Answer{}, context.Cause(ctx)
	}
	header := http.Header{"Accept-Encoding": {"identity"}}
	resp, err := c.get(ctx, u, header, c.options.AllowHTTP || d.Digest.strong())
	if err != nil {
		return Answer{}, err
	}
	if resp.StatusCode != http.StatusOK {
		return Answer{}, refusal(resp)
	}
	defer func() { _ = resp.Body.Close() }()
	at := redact(resp.Request.URL)
	if encoding := resp.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		return Answer{}, &EncodingError{URL: at, Encoding: encoding}
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, d.Limit+1))
	switch {
	case err != nil:
		return Answer{}, broken(err, resp)
	case int64(len(body)) > d.Limit:
		return Answer{}, fmt.Errorf("%s: %w (%d bytes)", at, ErrTooLong, d.Limit)
	}
	if d.Digest != (Digest{}) {
		h := d.Digest.hash()
		_, _ = h.Write(body)
		if err := d.Digest.compare(h, at); err != nil {
			return Answer{}, err
		}
	}
	return Answer{Body: body, Header: resp.Header, URL: at}, nil
}

// originOnly adds headers to requests to one origin.
type originOnly struct {
	origin string
	header http.Header
	next   http.RoundTripper
}

func (o originOnly) RoundTrip(req *http.Request) (*http.Response, error) {
	if origin(req.URL) == o.origin {
		req = req.Clone(req.Context())
		for name, values := range o.header {
			req.Header[http.CanonicalHeaderKey(name)] = values
		}
	}
	return o.next.RoundTrip(req)
}
