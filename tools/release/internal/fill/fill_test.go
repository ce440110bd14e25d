package fill

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const key = "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE\n-----END PUBLIC KEY-----\n"

// The scripts of the project have the places, and are scripts afterwards.
func TestScripts(t *testing.T) {
	values := Values{URL: "https://releases.example/llmbox", Version: "v1.2.3", Key: key}
	for name, want := range map[string][]string{
		"install.sh":      {"release_url='https://releases.example/llmbox'", "release_version='v1.2.3'", "release_key='-----BEGIN PUBLIC KEY-----\nMFkw"},
		"brev.sh":         {"release_url='https://releases.example/llmbox'", "release_version='v1.2.3'"},
		"cloud-init.yaml": {"LLMBOX_URL='https://releases.example/llmbox'", "LLMBOX_VERSION='v1.2.3'"},
	} {
		t.Run(name, func(t *testing.T) {
			script, err := os.ReadFile(filepath.Join("../../../../scripts", name))
			if err != nil {
				t.Fatal(err)
			}
			got, err := Script(string(script), values)
			if err != nil {
				t.Fatal(err)
			}
			for _, line := range want {
				if strings.Count(got, line) != 1 {
					t.Errorf("%q is there %d times", line, strings.Count(got, line))
				}
			}
			// Beside the places nothing changes.
			for _, line := range want {
				name, _, _ := strings.Cut(line, "=")
				got = strings.Replace(got, line[:strings.Index(line, "'")+1]+valueOf(name, values)+"'", name+"=''", 1)
			}
			if got != string(script) {
				t.Error("more than the places has changed")
			}
			if strings.HasSuffix(name, ".sh") {
				file := filepath.Join(t.TempDir(), name)
				filled, err := Script(string(script), values)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, []byte(filled), 0o644); err != nil {
					t.Fatal(err)
				}
				if out, err := exec.CommandContext(t.Context(), "sh", "-n", file).CombinedOutput(); err != nil {
					t.Errorf("%v\n%s", err, out)
				}
			}
		})
	}
}

func valueOf(name string, v Values) string {
	switch name {
	case "release_key":
		return strings.TrimSpace(v.Key)
	case "release_url", "LLMBOX_URL":
		return v.URL
	}
	return v.Version
}

func TestRefused(t *testing.T) {
	const place = "    release_url=''\n"
	for name, test := range map[string]struct {
		script string
		values Values
		want   string
	}{
		"plain http":       {place, Values{URL: "http://releases.example"}, "no https address"},
		"a quote":          {place, Values{URL: "https://releases.example/'; rm -rf /; '"}, "no https address"},
		"a quoted version": {place, Values{Version: "v1'"}, "a quote"},
		"two places":       {place + place, Values{URL: "https://releases.example"}, "2 places"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Script(test.script, test.values); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want something about %q", err, test.want)
			}
		})
	}
	if _, err := Script("#!/bin/sh\n", Values{}); !errors.Is(err, ErrNothing) {
		t.Errorf("a script without places: %v", err)
	}
}
