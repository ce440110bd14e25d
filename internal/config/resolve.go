package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// Source is one settled value and where it came from.
type Source struct {
	Path   string `json:"path"`
	Value  any    `json:"value"`
	Origin string `json:"source"`

	kind OriginKind
	path []string
}

// Kind says what sort of source the value has.
func (s Source) Kind() OriginKind { return s.kind }

// Text is the value on one line.
func (s Source) Text() string { return display(s.Value) }

// Asked says whether this run was told the value: by a flag, the environment or a file.
func (s Source) Asked() bool { return s.kind == FromFlag || s.kind == FromEnv || s.kind == FromFile }

// Sources lists every settled value, in the order of the reference.
type Sources []Source

// Find gives the source of one path.
func (s Sources) Find(path string) (Source, bool) {
	for _, one := range s {
		if one.Path == path {
			return one, true
		}
	}
	return Source{}, false
}

// Origin says where a value came from, "default" where nothing set it.
func (s Sources) Origin(path string) string {
	if one, ok := s.Find(path); ok {
		return one.Origin
	}
	return defaultOrigin().Text
}

// Resolve settles every value: of the layers, strongest first, the first that
// has one gives it. Lists and chart values are taken whole, never merged.
func Resolve(layers ...Layer) (Box, Sources, error) {
	settled := map[string]entry{}
	for _, l := range layers {
		for path, e := range l.entries {
			if _, have := settled[path]; !have {
				settled[path] = e
			}
		}
	}
	root := boxSchema()
	var box Box
	sources := make(Sources, 0, len(settled))
	for path, e := range settled {
		if err := assign(reflect.ValueOf(&box).Elem(), root, e.path, e.value); err != nil {
			return Box{}, nil, fmt.Errorf("settling %s: %w", path, err)
		}
		sources = append(sources, Source{Path: path, Value: e.value, Origin: e.origin.Text, kind: e.origin.Kind, path: e.path})
	}
	slices.SortFunc(sources, func(a, b Source) int {
		return strings.Compare(root.order(a.path), root.order(b.path))
	})
	return box, sources, nil
}

// assign puts value at path below v.
func assign(v reflect.Value, s *schema, path []string, value any) error {
	if len(path) == 0 {
		given := reflect.ValueOf(clone(value))
		if !given.IsValid() || !given.Type().AssignableTo(v.Type()) {
			return fmt.Errorf("a %T where %s belongs", value, s.shape)
		}
		v.Set(given)
		return nil
	}
	switch s.shape {
	case shapeSection:
		for i, f := range s.fields {
			if f.name == path[0] {
				return assign(v.Field(i), f.schema, path[1:], value)
			}
		}
	case shapeNamed:
		if v.IsNil() {
			v.Set(reflect.MakeMap(v.Type()))
		}
		key := reflect.ValueOf(path[0])
		// Elements of a map can't be set in place.
		elem := reflect.New(v.Type().Elem()).Elem()
		if old := v.MapIndex(key); old.IsValid() {
			elem.Set(old)
		}
		if err := assign(elem, s.elem, path[1:], value); err != nil {
			return err
		}
		v.SetMapIndex(key, elem)
		return nil
	}
	return fmt.Errorf("no key %q", path[0])
}

// clone keeps a Box from sharing lists and maps with the layers it came from.
func clone(value any) any {
	switch v := value.(type) {
	case []string:
		return slices.Clone(v)
	case []any:
		out := make([]any, len(v))
		for i, item := range v {
			out[i] = clone(item)
		}
		return out
	case map[string]any:
		out := maps.Clone(v)
		for key, item := range out {
			out[key] = clone(item)
		}
		return out
	}
	return value
}
