package config

import (
	"errors"
	"strings"
)

// ErrImmutable marks a value that the first install fixed and that now differs.
var ErrImmutable = errors.New("value is fixed by the first install")

// ErrSecret marks a secret that stands where only its file may be named.
var ErrSecret = errors.New("secret in the configuration")

// Error is one thing that is wrong with the configuration.
type Error struct {
	// Place is where the value stands: "FILE:LINE", "env NAME", "flag --NAME".
	Place string
	// Path is the key, such as "gateway.port"; empty for the file as a whole.
	Path string
	// Problem says what is wrong, without ever quoting a secret.
	Problem string
	// Fix says what to write instead.
	Fix string
	// Kind is one of this package's error values, or nil.
	Kind error
}

// Error implements error.
func (e *Error) Error() string {
	var parts []string
	for _, part := range []string{e.Place, e.Path, e.Problem} {
		if part != "" {
			parts = append(parts, part)
		}
	}
	text := strings.Join(parts, ": ")
	if e.Fix != "" {
		text += "; " + e.Fix
	}
	return text
}

// Unwrap gives the kind, for errors.Is.
func (e *Error) Unwrap() error { return e.Kind }

// Problems lists every *Error in err's tree, in order.
func Problems(err error) []*Error {
	if err == nil {
		return nil
	}
	var many interface{ Unwrap() []error }
	if errors.As(err, &many) {
		var all []*Error
		for _, one := range many.Unwrap() {
			all = append(all, Problems(one)...)
		}
		return all
	}
	var e *Error
	if errors.As(err, &e) {
		return []*Error{e}
	}
	return nil
}

// problems collects errors so that a person sees all of them at once.
type problems []error

func (p *problems) add(e *Error) { *p = append(*p, e) }

func (p problems) join() error { return errors.Join(p...) }
