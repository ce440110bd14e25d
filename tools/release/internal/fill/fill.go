// Package fill writes into a script what only a release knows: its address, its version
// and the key that signs it.
package fill

import (
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"
)

// Values are what a release knows.
type Values struct {
	// URL is empty where whoever publishes doesn't say; scripts then read it from their
	// environment.
	URL     string
	Version string
	// Key is the public key in PEM, empty where nobody signs.
	Key string
}

// ErrNothing is said of a file that has no place for any value.
var ErrNothing = errors.New("nothing in it is for a release to fill in")

// Script fills in the places of a script: lines of the form release_NAME=”.
func Script(script string, v Values) (string, error) {
	if err := v.check(); err != nil {
		return "", err
	}
	places := 0
	for _, place := range []struct{ name, value string }{
		{"release_url", v.URL}, {"release_version", v.Version}, {"release_key", strings.TrimSpace(v.Key)},
		{"LLMBOX_URL", v.URL}, {"LLMBOX_VERSION", v.Version},
	} {
		line := regexp.MustCompile(`(?m)^( +)` + place.name + `=''$`)
		found := line.FindAllStringIndex(script, -1)
		if len(found) > 1 {
			return "", fmt.Errorf("it has %d places for %s", len(found), place.name)
		}
		places += len(found)
		script = line.ReplaceAllString(script, "${1}"+place.name+"='"+strings.ReplaceAll(place.value, "$", "$$")+"'")
	}
	if places == 0 {
		return "", ErrNothing
	}
	return script, nil
}

// check refuses what would end the quotes that a value stands in.
func (v Values) check() error {
	if v.URL != "" {
		at, err := url.Parse(v.URL)
		if err != nil {
			return err
		}
		if at.Scheme != "https" || at.Host == "" || at.RawQuery != "" || strings.ContainsAny(v.URL, "'\n\\ ") {
			return fmt.Errorf("%q is no https address that releases could lie under", v.URL)
		}
	}
	for _, value := range []string{v.Version, v.Key} {
		if strings.ContainsAny(value, `'\`) {
			return errors.New("a quote or a backslash has no place in a version or a key")
		}
	}
	return nil
}
