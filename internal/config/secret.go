package config

import (
	"strings"
)

// secretPattern matches what issuers of tokens mark as theirs. Nothing that a
// configuration legitimately holds looks like this.
var secretPattern = pattern(`\b(hf_[A-Za-z0-9]{16,}|hvs\.[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|dckr_pat_[A-Za-z0-9_-]{16,}|nvapi-[A-Za-z0-9_-]{30,}|sk-[A-Za-z0-9_-]{32,})|-----BEGIN [A-Z ]*PRIVATE KEY-----`)

func looksLikeSecret(text string) bool { return secretPattern().MatchString(text) }

func secretError(place, path string) *Error {
	fix := "put it into a Secret and name that in the chart's values"
	switch {
	case strings.HasPrefix(path, "components"):
	case strings.HasPrefix(path, "registries"):
		fix = "put it into a file (chmod 600) and name that: secrets.registryAuthFile: /path"
	default:
		fix = "put it into a file (chmod 600) and name that: secrets.hfTokenFile: /path, or --hf-token-file /path"
	}
	return &Error{Place: place, Path: path, Problem: "holds what looks like a secret", Fix: fix, Kind: ErrSecret}
}
