package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// OriginKind sorts origins by what they mean for the next run.
type OriginKind int

// The kinds, strongest first.
const (
	FromFlag OriginKind = iota + 1
	FromEnv
	FromFile
	FromRecord
	FromComputation
	FromDefault
)

// Origin says where a value came from.
type Origin struct {
	Kind OriginKind
	Text string
}

// String is the origin as a person reads it.
func (o Origin) String() string { return o.Text }

// Flag is the origin of a value given as --name.
func Flag(name string) Origin { return Origin{FromFlag, "flag --" + name} }

// Computed is the origin of a value llmbox worked out.
func Computed(reason string) Origin { return Origin{FromComputation, "computed: " + reason} }

func envOrigin(name string) Origin { return Origin{FromEnv, "env " + name} }

func defaultOrigin() Origin { return Origin{FromDefault, "default"} }

type entry struct {
	path   []string
	value  any // string, bool, int, []string or map[string]any
	origin Origin
}

// Layer holds the values of one source by their paths. The zero value is empty.
type Layer struct {
	entries map[string]entry
}

// Len counts the values.
func (l Layer) Len() int { return len(l.entries) }

// Get gives a value of this layer alone.
func (l Layer) Get(path string) (any, bool) {
	e, ok := l.entries[path]
	return e.value, ok
}

// Without is the layer without some of its values.
func (l Layer) Without(paths ...string) Layer {
	var out Layer
	for path, e := range l.entries {
		if !slices.Contains(paths, path) {
			out.put(e)
		}
	}
	return out
}

func (l *Layer) put(e entry) {
	if l.entries == nil {
		l.entries = map[string]entry{}
	}
	l.entries[formatPath(e.path)] = e
}

// Set puts a typed value (string, bool, int, []string, map[string]any) at a path.
func (l *Layer) Set(path string, value any, origin Origin) error {
	segments, at, err := locate(path, origin)
	if err != nil {
		return err
	}
	fits := false
	switch at.shape {
	case shapeString:
		_, fits = value.(string)
	case shapeBool:
		_, fits = value.(bool)
	case shapeInt:
		_, fits = value.(int)
	case shapeStrings:
		_, fits = value.([]string)
	case shapeFree:
		_, fits = value.(map[string]any)
	}
	if !fits {
		return &Error{Place: origin.Text, Path: path, Problem: fmt.Sprintf("must be %s, not a %T", at.shape, value)}
	}
	if err := checkText(value, path, origin.Text); err != nil {
		return err
	}
	l.put(entry{segments, value, origin})
	return nil
}

// SetString puts the text of a flag or a variable at a path, read by the type the
// path has. Lists are separated by commas, or written like [a, b].
func (l *Layer) SetString(path, raw string, origin Origin) error {
	segments, at, err := locate(path, origin)
	if err != nil {
		return err
	}
	value, problem := parseText(at.shape, raw)
	if problem != "" {
		return &Error{Place: origin.Text, Path: path, Problem: problem, Fix: textFix(at.shape)}
	}
	if err := checkText(value, path, origin.Text); err != nil {
		return err
	}
	l.put(entry{segments, value, origin})
	return nil
}

func locate(path string, origin Origin) ([]string, *schema, error) {
	root := boxSchema()
	segments := splitPath(path)
	at := root
	for i, key := range segments {
		next := at.child(key)
		if next == nil {
			return nil, nil, unknownKey(root, at, segments[:i], key, origin.Text)
		}
		at = next
	}
	if !at.leaf() || len(segments) == 0 {
		return nil, nil, &Error{Place: origin.Text, Path: path, Problem: "is a section, not a value",
			Fix: "set one of its keys: " + strings.Join(at.keys(), ", ")}
	}
	return segments, at, nil
}

func parseText(want shape, raw string) (any, string) {
	switch want {
	case shapeBool:
		switch raw {
		case "true":
			return true, ""
		case "false":
			return false, ""
		}
		return nil, fmt.Sprintf("must be true or false, not %s", quoteShort(raw))
	case shapeInt:
		n, err := strconv.Atoi(raw)
		if err != nil {
			return nil, fmt.Sprintf("must be a whole number, not %s", quoteShort(raw))
		}
		return n, ""
	case shapeStrings:
		if strings.HasPrefix(strings.TrimSpace(raw), "[") {
			var list []string
			if err := yaml.Unmarshal([]byte(raw), &list); err != nil {
				return nil, "can't be read as a list"
			}
			return list, ""
		}
		list := []string{}
		for _, item := range strings.Split(raw, ",") {
			if item = strings.TrimSpace(item); item != "" {
				list = append(list, item)
			}
		}
		return list, ""
	case shapeFree:
		return nil, "can't be given as text"
	}
	return raw, ""
}

func textFix(want shape) string {
	switch want {
	case shapeStrings:
		return `write it as a,b or ["a", "b"]`
	case shapeFree:
		return "put it into the configuration file"
	}
	return ""
}

// checkText refuses what no value may hold: secrets, control characters, and
// white space around the text, which comes from pasting and is never meant.
func checkText(value any, path, place string) error {
	var found error
	eachString(value, func(text string) {
		if found != nil {
			return
		}
		if looksLikeSecret(text) {
			found = secretError(place, path)
		} else if _, free := value.(map[string]any); !free {
			if e := checkString(text, path, place); e != nil {
				found = e
			}
		}
	})
	return found
}

func checkString(text, path, place string) *Error {
	for _, r := range text {
		if unicode.IsControl(r) {
			return &Error{Place: place, Path: path, Problem: fmt.Sprintf("holds a control character (%U)", r), Fix: "remove it"}
		}
		if r == '\u00a0' || r == '\u200b' || r == '\ufeff' {
			return &Error{Place: place, Path: path, Problem: fmt.Sprintf("holds an invisible character (%s)", runeName(r)), Fix: "remove it, or type a plain space"}
		}
	}
	if strings.TrimSpace(text) != text {
		return &Error{Place: place, Path: path, Problem: "has white space around it", Fix: "remove it"}
	}
	return nil
}

func eachString(value any, visit func(string)) {
	switch v := value.(type) {
	case string:
		visit(v)
	case []string:
		for _, s := range v {
			visit(s)
		}
	case []any:
		for _, item := range v {
			eachString(item, visit)
		}
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			visit(key)
			eachString(v[key], visit)
		}
	}
}

// Defaults is the weakest layer.
func Defaults() Layer {
	var l Layer
	flatten(boxSchema(), reflect.ValueOf(defaultBox()), nil, func(path []string, value any) {
		l.put(entry{path, value, defaultOrigin()})
	})
	return l
}

// flatten gives the leaves that say something: booleans always, others unless zero.
func flatten(s *schema, v reflect.Value, path []string, visit func([]string, any)) {
	switch s.shape {
	case shapeSection:
		for i, f := range s.fields {
			flatten(f.schema, v.Field(i), append(slices.Clone(path), f.name), visit)
		}
	case shapeNamed:
		for _, key := range v.MapKeys() {
			flatten(s.elem, v.MapIndex(key), append(slices.Clone(path), key.String()), visit)
		}
	case shapeBool:
		visit(path, v.Bool())
	default:
		if !v.IsZero() {
			visit(path, v.Interface())
		}
	}
}

// display writes a value on one line.
func display(value any) string {
	switch v := value.(type) {
	case string:
		return v
	case []string:
		return strings.Join(v, ",")
	case nil:
		return ""
	}
	return fmt.Sprint(value)
}

// quoteShort quotes a value for an error, unless it could be a secret or is long.
func quoteShort(text string) string {
	if looksLikeSecret(text) {
		return "what looks like a secret"
	}
	if r := []rune(text); len(r) > 40 {
		text = string(r[:40]) + "…"
	}
	return strconv.Quote(text)
}
