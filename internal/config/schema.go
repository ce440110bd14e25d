package config

import (
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// shape is what a value must look like.
type shape int

const (
	shapeSection shape = iota // fixed keys
	shapeNamed                // any key, each value of one schema
	shapeString
	shapeBool
	shapeInt
	shapeStrings
	shapeFree // any mapping: chart values
)

// String says it as a person would.
func (s shape) String() string {
	switch s {
	case shapeSection, shapeNamed, shapeFree:
		return "a mapping"
	case shapeString:
		return "a string"
	case shapeBool:
		return "true or false"
	case shapeInt:
		return "a whole number"
	case shapeStrings:
		return "a list of strings"
	}
	return "a value"
}

// schema describes one key; it is built from the Go type, so the two can't differ.
type schema struct {
	shape     shape
	index     int // position among its siblings, for order
	fields    []field
	elem      *schema // of shapeNamed
	record    bool
	noRecord  bool
	immutable bool
}

type field struct {
	name   string // key in the file
	goName string
	owner  string // Go type that declares it
	schema *schema
}

func boxSchema() *schema { return schemaOf(reflect.TypeFor[Box]()) }

func schemaOf(t reflect.Type) *schema {
	switch t.Kind() {
	case reflect.Struct:
		s := &schema{shape: shapeSection}
		for i := range t.NumField() {
			f := t.Field(i)
			sub := schemaOf(f.Type)
			sub.index = i
			for _, word := range strings.Split(f.Tag.Get("box"), ",") {
				switch word {
				case "record":
					sub.record = true
				case "norecord":
					sub.noRecord = true
				case "immutable":
					sub.immutable = true
				}
			}
			s.fields = append(s.fields, field{name: f.Tag.Get("yaml"), goName: f.Name, owner: t.Name(), schema: sub})
		}
		return s
	case reflect.Map:
		if t.Elem().Kind() == reflect.Interface {
			return &schema{shape: shapeFree}
		}
		return &schema{shape: shapeNamed, elem: schemaOf(t.Elem())}
	case reflect.Slice:
		return &schema{shape: shapeStrings}
	case reflect.Bool:
		return &schema{shape: shapeBool}
	case reflect.Int:
		return &schema{shape: shapeInt}
	default:
		return &schema{shape: shapeString}
	}
}

func (s *schema) leaf() bool { return s.shape != shapeSection && s.shape != shapeNamed }

func (s *schema) child(key string) *schema {
	if s.shape == shapeNamed {
		return s.elem
	}
	for _, f := range s.fields {
		if f.name == key {
			return f.schema
		}
	}
	return nil
}

func (s *schema) keys() []string {
	var keys []string
	for _, f := range s.fields {
		keys = append(keys, f.name)
	}
	return keys
}

// find follows a path; nil when it leads nowhere.
func (s *schema) find(path []string) *schema {
	at := s
	for _, key := range path {
		if at = at.child(key); at == nil {
			return nil
		}
	}
	return at
}

// anyName stands for the free key of a shapeNamed in listed paths.
const anyName = "NAME"

// leaves calls visit for each leaf in order, with anyName for free keys.
func (s *schema) leaves(visit func(path []string, f field)) {
	s.walk(nil, field{}, visit)
}

func (s *schema) walk(path []string, at field, visit func([]string, field)) {
	switch s.shape {
	case shapeSection:
		for _, f := range s.fields {
			f.schema.walk(append(slices.Clone(path), f.name), f, visit)
		}
	case shapeNamed:
		s.elem.walk(append(slices.Clone(path), anyName), at, visit)
	default:
		visit(path, at)
	}
}

// order makes a key by which paths sort as the schema lists them.
func (s *schema) order(path []string) string {
	var b strings.Builder
	at := s
	for _, key := range path {
		next := at.child(key)
		if next == nil {
			break
		}
		if at.shape == shapeSection {
			b.WriteString(strconv.Itoa(1000 + next.index))
		} else {
			b.WriteString(key)
		}
		b.WriteByte(0)
		at = next
	}
	return b.String()
}

// elsewhere finds the first leaf or section named key anywhere in the schema.
func (s *schema) elsewhere(key string) string {
	found := ""
	var visit func(*schema, []string)
	visit = func(at *schema, path []string) {
		for _, f := range at.fields {
			here := append(slices.Clone(path), f.name)
			if found == "" && strings.EqualFold(f.name, key) {
				found = formatPath(here)
			}
			visit(f.schema, here)
		}
		if at.elem != nil {
			visit(at.elem, append(slices.Clone(path), anyName))
		}
	}
	visit(s, nil)
	return found
}

// formatPath writes a path as "a.b"; a key with a dot or bracket in it goes into
// brackets: registries.mirrors[docker.io].endpoints.
func formatPath(path []string) string {
	var b strings.Builder
	for i, key := range path {
		switch {
		case isIndex(key):
			b.WriteString(key)
		case key == "" || strings.ContainsAny(key, ".[]"):
			b.WriteString("[" + key + "]")
		case i > 0:
			b.WriteString("." + key)
		default:
			b.WriteString(key)
		}
	}
	return b.String()
}

func isIndex(key string) bool {
	inner, open := strings.CutPrefix(key, "[")
	inner, closed := strings.CutSuffix(inner, "]")
	_, err := strconv.Atoi(inner)
	return open && closed && err == nil
}

// splitPath undoes formatPath.
func splitPath(text string) []string {
	var path []string
	for text != "" {
		if strings.HasPrefix(text, "[") {
			end := strings.IndexByte(text, ']')
			if end < 0 {
				return append(path, text)
			}
			path = append(path, text[1:end])
			text = strings.TrimPrefix(text[end+1:], ".")
			continue
		}
		end := strings.IndexAny(text, ".[")
		if end < 0 {
			return append(path, text)
		}
		path = append(path, text[:end])
		text = strings.TrimPrefix(text[end:], ".")
	}
	return path
}

// Field describes one key of the configuration.
type Field struct {
	// Path is the key, with NAME for a free one: "components.NAME.mode".
	Path string
	// Type is "string", "whole number", "true or false", "list of strings", "mapping".
	Type string
	// Default is the value without any choice, "" when there is none.
	Default string
	// Env is the variable that sets it, "" when only a file can; Aliases are
	// shorter ones.
	Env     string
	Aliases []string
	// Immutable: fixed by the first install. Recorded: kept for the next run
	// even when it is a default. OneRun: never kept.
	Immutable, Recorded, OneRun bool

	owner, goName string
}

// Fields lists every key in order.
func Fields() []Field {
	root := boxSchema()
	defaults := Defaults()
	var all []Field
	root.leaves(func(path []string, f field) {
		one := Field{
			Path: formatPath(path), Type: strings.TrimPrefix(f.schema.shape.String(), "a "),
			Env: envName(root, path), Immutable: f.schema.immutable, Recorded: f.schema.record, OneRun: f.schema.noRecord,
			owner: f.owner, goName: f.goName,
		}
		if e, ok := defaults.entries[one.Path]; ok {
			one.Default = display(e.value)
		}
		for alias, target := range envAliases() {
			if target == one.Path {
				one.Aliases = append(one.Aliases, alias)
			}
		}
		slices.Sort(one.Aliases)
		all = append(all, one)
	})
	return all
}
