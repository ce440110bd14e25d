package download

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

func quiet() *log.Logger { return log.New(io.Discard, "", 0) }

type dialer struct{ to string }

func (d *dialer) dial(ctx context.Context, network, _ string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, network, d.to)
}

func TestRead(t *testing.T) {
	const size = 100 << 10
	for _, c := range []struct {
		name   string
		plan   func(int, *http.Request) fault
		limit  int64
		digest func(content) Digest
		fails  func(error) bool
	}{
		{name: "at once"},
		{name: "with a digest", digest: func(c content) Digest { return SHA256("sha256:" + strings.ToUpper(c.sum(t))) }},
		{name: "after faults", plan: first(3, fault{reset: true, after: 1000})},
		{name: "after a 503", plan: first(3, fault{status: 503})},
		{name: "after a wrong byte", plan: first(1, fault{flip: true, after: 5}), digest: func(c content) Digest { return SHA256(c.sum(t)) }},
		{name: "too long", limit: size - 1, fails: func(err error) bool { return errors.Is(err, ErrTooLong) }},
		{name: "404", plan: always(fault{status: 404}), fails: hasStatus(404)},
		{name: "wrong", digest: func(content) Digest { return SHA256(strings.Repeat("0", 64)) }, fails: is[*ChecksumError]},
		{name: "500 for ever", plan: always(fault{status: 500}), fails: is[*RetryError]},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := newOrigin(t, size, c.plan)
			options := hasty()
			options.AllowHTTP = true
			d := Document{URL: o.URL + "/list?token=geheim", Limit: c.limit, Header: http.Header{"Authorization": {"Bearer x"}}}
			if c.digest != nil {
				d.Digest = c.digest(o.content)
			}
			a, err := newClient(t, options).Read(testContext(t), d)
			if c.fails != nil {
				if err == nil || !c.fails(err) || strings.Contains(err.Error(), "geheim") {
					t.Fatal(err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			want := make([]byte, size)
			if _, err := o.content.ReadAt(want, 0); err != nil || string(want) != string(a.Body) || a.Header.Get("ETag") != o.etag {
				t.Errorf("%d bytes, %v, %v", len(a.Body), a.Header, err)
			}
			if got := o.requests()[0].authorization; got != "Bearer x" {
				t.Errorf("asked with %q", got)
			}
		})
	}
	if _, err := newClient(t, hasty()).Read(testContext(t), Document{URL: "http://host/x"}); !errors.Is(err, ErrInsecure) {
		t.Error(err)
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	client := newClient(t, Options{})
	for text, want := range map[string]time.Duration{
		"":                              0,
		"7":                             7 * time.Second,
		" 120 ":                         2 * time.Minute,
		"121":                           2 * time.Minute,
		"99999999999999999":             2 * time.Minute,
		"99999999999999999999999":       0,
		"-5":                            0,
		"soon":                          0,
		"Wed, 02 Jan 2030 03:04:35 GMT": 30 * time.Second,
		"Wed, 02 Jan 2030 03:04:00 GMT": 0,
		"Wed, 02 Jan 2031 03:04:00 GMT": 2 * time.Minute,
	} {
		err := &StatusError{Code: 429, Header: http.Header{"Retry-After": {text}}}
		if got := client.retryAfter(err, now); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

func TestPause(t *testing.T) {
	client := newClient(t, Options{Backoff: time.Second, MaxBackoff: 10 * time.Second})
	for failures, most := range map[int]time.Duration{1: time.Second, 2: 2 * time.Second, 4: 8 * time.Second, 5: 10 * time.Second, 99: 10 * time.Second} {
		different := map[time.Duration]bool{}
		for range 100 {
			wait := client.pause(failures)
			different[wait] = true
			if wait < most/2 || wait > most {
				t.Errorf("after %d: %s", failures, wait)
			}
		}
		if len(different) < 50 {
			t.Errorf("after %d: only %d different pauses", failures, len(different))
		}
	}
}

// TestRate: a bound can't be broken, however fast the machine is. (How close to it a
// download comes depends on the machine, and is measured elsewhere.)
func TestRate(t *testing.T) {
	const size = 400 << 10
	for name, change := range map[string]func(*Options){
		"in all":   func(o *Options) { o.Rate = 1 << 20 },
		"per host": func(o *Options) { o.HostRate = 1 << 20 },
	} {
		t.Run(name, func(t *testing.T) {
			o := newOrigin(t, size, nil)
			options := hasty()
			change(&options)
			f := o.file(t)
			began := time.Now()
			if _, err := newClient(t, options).Fetch(testContext(t), f); err != nil {
				t.Fatal(err)
			}
			if took, least := time.Since(began), 350*time.Millisecond; took < least {
				t.Errorf("took %s, which is less than %s", took, least)
			}
			o.content.same(t, f.Path)
		})
	}
}

// TestRateIsNotTheServersFault: a bound below what a server must bring is kept, and
// nobody is blamed.
func TestRateIsNotTheServersFault(t *testing.T) {
	o := newOrigin(t, 100<<10, nil)
	options := hasty()
	options.Rate, options.MinRate, options.MinRateWindow = 200<<10, 100<<20, 100*time.Millisecond
	f := o.file(t)
	f.Notice = func(n Notice) {
		if is[*SlowError](n.Err) {
			t.Error(n.Err)
		}
	}
	if _, err := newClient(t, options).Fetch(testContext(t), f); err != nil {
		t.Fatal(err)
	}
}

// TestWith: a registry's round tripper earns itself a token, and the download does not
// know of it.
func TestWith(t *testing.T) {
	o := newOrigin(t, 9<<20, nil)
	o.plan = func(n int, r *http.Request) fault {
		if r.Header.Get("Authorization") != "Bearer earned" {
			return fault{status: 401}
		}
		return fault{}
	}
	client := newClient(t, hasty())
	f := o.file(t)
	if _, err := client.Fetch(testContext(t), f); !hasStatus(401)(err) {
		t.Fatal(err)
	}
	if _, err := client.With(func(next http.RoundTripper) http.RoundTripper { return earning{next} }).Fetch(testContext(t), f); err != nil {
		t.Fatal(err)
	}
	o.content.same(t, f.Path)
}

type earning struct{ next http.RoundTripper }

func (e earning) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer earned")
	return e.next.RoundTrip(r)
}
