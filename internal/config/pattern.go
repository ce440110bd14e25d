package config

import (
	"regexp"
	"sync"
)

// pattern compiles on first use: a dozen expressions compiled before main cost every
// command, even those that read no configuration, more than it takes to say the
// version.
func pattern(expr string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })
}
