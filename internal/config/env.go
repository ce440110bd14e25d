package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
)

const envPrefix = "LLMBOX_"

// ForeignEnv lists variables with llmbox's prefix that are no configuration: they
// belong to a command line, to a secret, or to the installing script.
func ForeignEnv() []string {
	return []string{
		"LLMBOX_CONFIG", "LLMBOX_CONTEXT", "LLMBOX_HF_TOKEN", "LLMBOX_INSTALL_DIR", "LLMBOX_KUBECONFIG",
		"LLMBOX_LAB", "LLMBOX_LOG_FILE", "LLMBOX_NO_COLOR", "LLMBOX_OUTPUT", "LLMBOX_VERSION", "LLMBOX_YES",
	}
}

// envAliases gives short names to what is set most.
func envAliases() map[string]string {
	return map[string]string{
		"LLMBOX_MODEL":         "model.name",
		"LLMBOX_HF_TOKEN_FILE": "secrets.hfTokenFile",
	}
}

// Env reads LLMBOX_* out of an environment ("NAME=value"). An unknown name is an
// error, an empty value counts as not set.
func Env(environ []string) (Layer, error) {
	root := boxSchema()
	known := map[string]string{} // name → path
	var componentKeys []string
	root.leaves(func(path []string, _ field) {
		name := envName(root, path)
		switch {
		case name == "":
		case path[0] == "components":
			componentKeys = append(componentKeys, path[len(path)-1])
		default:
			known[name] = formatPath(path)
		}
	})
	aliases := envAliases()
	maps.Copy(known, aliases)
	foreign := ForeignEnv()

	var layer Layer
	var found problems
	setBy := map[string]string{} // path → variable
	sorted := slices.Sorted(slices.Values(environ))
	for _, pair := range sorted {
		name, value, _ := strings.Cut(pair, "=")
		if !strings.HasPrefix(name, envPrefix) || value == "" || slices.Contains(foreign, name) {
			continue
		}
		origin := envOrigin(name)
		path, ok := known[name]
		if !ok {
			path, ok = componentPath(name, componentKeys)
		}
		if !ok {
			found.add(unknownEnv(name, slices.Concat(slices.Collect(maps.Keys(known)), foreign)))
			continue
		}
		if first, twice := setBy[path]; twice {
			if before, err := valueText(layer, path); err || before != value {
				found.add(&Error{Place: origin.Text, Path: path, Problem: "is also set by " + first + ", differently", Fix: "unset one of the two"})
			}
			continue
		}
		setBy[path] = name
		if err := layer.SetString(path, value, origin); err != nil {
			found = append(found, err)
		}
	}
	if err := found.join(); err != nil {
		return Layer{}, err
	}
	return layer, nil
}

func valueText(l Layer, path string) (text string, absent bool) {
	e, ok := l.entries[path]
	return display(e.value), !ok
}

// componentPath reads LLMBOX_COMPONENTS_EXTERNAL_SECRETS_MODE.
func componentPath(name string, keys []string) (string, bool) {
	rest, ok := strings.CutPrefix(name, envPrefix+"COMPONENTS_")
	if !ok {
		return "", false
	}
	for _, key := range keys {
		component, ok := strings.CutSuffix(rest, "_"+envWord(key))
		if ok && component != "" {
			return formatPath([]string{"components", strings.ToLower(strings.ReplaceAll(component, "_", "-")), key}), true
		}
	}
	return "", false
}

func unknownEnv(name string, known []string) *Error {
	e := &Error{Place: "env " + name, Problem: "unknown variable", Fix: "unset it; the names stand in the configuration reference"}
	slices.Sort(known)
	if near := nearest(name, known); near != "" && near != name {
		e.Fix = fmt.Sprintf("did you mean %s?", near)
	}
	return e
}

// envName is the variable for a path, "" where only a file can hold the value.
func envName(root *schema, path []string) string {
	if at := root.find(path); at == nil || at.shape == shapeFree || path[0] == "registries" || path[0] == "apiVersion" || path[0] == "kind" {
		return ""
	}
	var words []string
	for _, key := range path {
		words = append(words, envWord(key))
	}
	return envPrefix + strings.Join(words, "_")
}

// envWord turns rateLimit into RATE_LIMIT.
func envWord(key string) string {
	var b strings.Builder
	var before rune
	for _, c := range key {
		if unicode.IsUpper(c) && (unicode.IsLower(before) || unicode.IsDigit(before)) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToUpper(c))
		before = c
	}
	return b.String()
}
