package download

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

var (
	// ErrInsecure means that a file would come over plain HTTP with nothing to verify it by.
	ErrInsecure = errors.New("plain HTTP without a SHA-256 to verify by: name an https URL, or the checksum")
	// ErrNoLength means that an answer ends with its connection: whether it was cut can't
	// be told.
	ErrNoLength = errors.New("the server gives no length, and neither size nor checksum is known")
	// ErrTooLong means that a document is longer than it may be.
	ErrTooLong = errors.New("the answer is longer than expected")
)

// StatusError is an HTTP status that is not a success.
type StatusError struct {
	URL  string
	Code int
	// Proxy is set where the answer came from the proxy.
	Proxy string
	// Header is that of the answer.
	Header http.Header
}

func (e *StatusError) Error() string {
	status := strings.TrimSpace(fmt.Sprintf("%d %s", e.Code, http.StatusText(e.Code)))
	if e.Code == http.StatusProxyAuthRequired || e.Proxy != "" {
		by := "the proxy"
		if e.Proxy != "" {
			by += " " + e.Proxy
		}
		if e.Code == http.StatusProxyAuthRequired {
			return fmt.Sprintf("%s wants a login for %s (%s): give it as http://USER:PASSWORD@HOST:PORT", by, e.URL, status)
		}
		return fmt.Sprintf("%s refuses %s (%s): let it pass there, or except the host by NO_PROXY", by, e.URL, status)
	}
	text := fmt.Sprintf("%s answered %s", e.URL, status)
	switch e.Code {
	case http.StatusUnauthorized:
		text += ": it wants a token or login, or does not know the one it was given"
	case http.StatusForbidden:
		text += ": the token or login has no access, or a proxy or firewall refuses"
	case http.StatusNotFound, http.StatusGone:
		text += ": there is no such file; check name and version"
	case http.StatusTooManyRequests:
		text += ": too many requests; wait, or give a token"
	}
	return text
}

// ChecksumError is a complete file with the wrong content; it was deleted.
type ChecksumError struct {
	URL, Algorithm, Want, Got string
}

func (e *ChecksumError) Error() string {
	return fmt.Sprintf("%s has %s %s and should have %s: it was deleted; compare with the checksum that its author publishes, or name another mirror",
		e.URL, e.Algorithm, e.Got, e.Want)
}

// SizeError is a file of another size than expected.
type SizeError struct {
	URL       string
	Want, Got int64
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("%s has %d bytes and should have %d: check name and version, or name another mirror", e.URL, e.Got, e.Want)
}

// SpaceError is a file system or a quota with too little space.
type SpaceError struct {
	Path string
	// Need is what the file still takes and Free what is there, in bytes; Need is 0
	// where the file's size is not known.
	Need, Free int64
	// Quota is set where it is a quota that is used up: Free does not count then.
	Quota bool
	Err   error
}

// Missing is what has to be freed, as far as it is known, and 0 otherwise.
func (e *SpaceError) Missing() int64 {
	if e.Quota || e.Need <= e.Free {
		return 0
	}
	return e.Need - e.Free
}

func (e *SpaceError) Error() string {
	what := "its file system"
	if e.Quota {
		what = "the disk quota"
	}
	text := fmt.Sprintf("no space for %s: %s is full", e.Path, what)
	switch {
	case e.Quota && e.Need > 0:
		text += fmt.Sprintf(", it needs %d bytes (%s) more", e.Need, human(e.Need))
	case e.Need > 0:
		text += fmt.Sprintf(", it needs %d bytes (%s) and %d are free: %d (%s) are missing", e.Need, human(e.Need), e.Free, e.Missing(), human(e.Missing()))
	}
	return text + "; free some and run again"
}

func (e *SpaceError) Unwrap() error { return e.Err }

// RedirectReason says what is wrong with a redirect.
type RedirectReason string

// What can be wrong with a redirect.
const (
	RedirectLoop     RedirectReason = "it leads back to where it came from"
	RedirectLimit    RedirectReason = "there are too many in a row"
	RedirectInsecure RedirectReason = "it leads from https to plain http, and there is no SHA-256 to verify by"
	RedirectInvalid  RedirectReason = "it names no http or https address"
)

// RedirectError is a redirect that is not followed.
type RedirectError struct {
	URL, To string
	Reason  RedirectReason
}

func (e *RedirectError) Error() string {
	return fmt.Sprintf("the redirect of %s to %q is not followed: %s", e.URL, e.To, e.Reason)
}

// RangeError is an answer with another range than was asked for.
type RangeError struct {
	URL, Asked, Got string
}

func (e *RangeError) Error() string {
	return fmt.Sprintf("%s was asked for %s and sent %s", e.URL, e.Asked, e.Got)
}

// ChangedError is a file that is not the same as at the beginning of its download.
type ChangedError struct {
	URL, Before, Now string
}

func (e *ChangedError) Error() string {
	return fmt.Sprintf("%s changed while it was downloaded, from %s to %s", e.URL, e.Before, e.Now)
}

// EncodingError is an answer in an encoding that nobody asked for.
type EncodingError struct {
	URL, Encoding string
}

func (e *EncodingError) Error() string {
	return fmt.Sprintf("%s comes encoded as %q, which was not asked for: a proxy or cache on the way changes it", e.URL, e.Encoding)
}

// StallError is a connection on which nothing arrives any more.
type StallError struct {
	URL   string
	After time.Duration
}

func (e *StallError) Error() string {
	return fmt.Sprintf("nothing came from %s for %s", e.URL, e.After)
}

// Timeout says that it is one.
func (*StallError) Timeout() bool { return true }

// SlowError is a connection that is too slow to wait for.
type SlowError struct {
	URL string
	// Rate and Min are bytes a second over Window.
	Rate, Min int64
	Window    time.Duration
}

func (e *SlowError) Error() string {
	return fmt.Sprintf("%s sent %d bytes a second for %s, at least %d are wanted", e.URL, e.Rate, e.Window, e.Min)
}

// Timeout says that it is one.
func (*SlowError) Timeout() bool { return true }

// CertificateError is a server that can't prove who it is.
type CertificateError struct {
	Host string
	Err  error
}

func (e *CertificateError) Error() string {
	text := fmt.Sprintf("the certificate of %s can't be verified: %v", e.Host, e.Err)
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(e.Err, new(x509.UnknownAuthorityError)):
		text += "; where a proxy or mirror has a CA of its own, give that CA's certificate as a PEM file"
	case errors.As(e.Err, &invalid) && invalid.Reason == x509.Expired:
		text += "; check this machine's clock"
	}
	return text
}

func (e *CertificateError) Unwrap() error { return e.Err }

// ProxyError is a proxy that can't be reached.
type ProxyError struct {
	Proxy string
	Err   error
}

func (e *ProxyError) Error() string {
	return fmt.Sprintf("reaching the proxy %s: %v; check HTTP_PROXY, HTTPS_PROXY and NO_PROXY", e.Proxy, e.Err)
}

func (e *ProxyError) Unwrap() error { return e.Err }

// RetryError is a failure that did not go away.
type RetryError struct {
	// Tries is how often in a row nothing came.
	Tries int
	Err   error
}

func (e *RetryError) Error() string {
	return fmt.Sprintf("%v (given up after %d tries without progress)", e.Err, e.Tries)
}

func (e *RetryError) Unwrap() error { return e.Err }

// MirrorsError is a file that none of its URLs gives.
type MirrorsError struct{ Errs []error }

func (e *MirrorsError) Error() string {
	texts := make([]string, len(e.Errs))
	for i, err := range e.Errs {
		texts[i] = err.Error()
	}
	return "no mirror has it: " + strings.Join(texts, "; ")
}

func (e *MirrorsError) Unwrap() []error { return e.Errs }

// diskError marks what no other connection mends.
type diskError struct{ error }

func (e diskError) Unwrap() error { return e.error }

// plain takes the mark off.
func plain(err error) error {
	var marked diskError
	if errors.As(err, &marked) {
		return marked.error
	}
	return err
}

// retryable marks what is worth another try although its status says no.
type retryable struct{ error }

func (e retryable) Unwrap() error { return e.error }

// unasked marks a range that nobody asked for: there is no simpler question left.
type unasked struct{ error }

func (e unasked) Unwrap() error { return e.error }

var (
	// errSingle asks for a pass with one stream.
	errSingle = errors.New("ranges are not honoured")
	// errStartOver means that what has arrived can't be continued.
	errStartOver = errors.New("the connection was cut, and the server says nothing by which the rest could be recognised")
)

// final says whether a URL need not be tried again.
func final(err error) bool {
	if is[retryable](err) {
		return false
	}
	var status *StatusError
	if errors.As(err, &status) {
		switch status.Code {
		case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
			return false
		}
		return status.Code < 500 || status.Code == http.StatusNotImplemented
	}
	return is[unasked](err) || is[*RedirectError](err) || is[*CertificateError](err) || is[*SizeError](err) || is[*EncodingError](err) ||
		errors.Is(err, http.ErrSchemeMismatch) || is[tls.RecordHeaderError](err) || // no TLS there
		errors.Is(err, ErrInsecure) || errors.Is(err, ErrNoLength)
}

func is[E error](err error) bool {
	var e E
	return errors.As(err, &e)
}

// explain gives an error of net/http a type and takes the URL out of it, whose query
// may be a signature.
func explain(err error, to, proxy *url.URL) error {
	var outer *url.Error
	if errors.As(err, &outer) {
		err = outer.Err
	}
	var op *net.OpError
	var certificate *tls.CertificateVerificationError
	switch {
	case is[*StatusError](err):
		return err
	case errors.As(err, &op) && op.Op == "proxyconnect":
		e := &ProxyError{Err: op.Err}
		if proxy != nil {
			e.Proxy = redact(proxy)
		}
		return e
	case errors.As(err, &certificate):
		return &CertificateError{Host: to.Host, Err: certificate.Err}
	}
	return err
}

// redact is the URL as it may be shown and stored.
func redact(u *url.URL) string {
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path, RawPath: u.RawPath}).String()
}

func human(n int64) string {
	const units = "kMGTPE"
	value, unit := float64(n), ""
	for i := 0; value >= 1000 && i < len(units); i++ {
		value, unit = value/1000, units[i:i+1]
	}
	if unit == "" {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %sB", value, unit)
}
