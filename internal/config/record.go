package config

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// Record writes the choices of this run for the next one: everything that was
// asked for, and those defaults that a later llmbox must not change under a
// running box. Values that belong to one run (paths of secrets, of a binary) are
// left out. What was recorded before stays unless something stronger replaced it.
func Record(sources Sources) ([]byte, error) {
	root := boxSchema()
	doc := &yaml.Node{Kind: yaml.MappingNode}
	putNode(doc, []string{"apiVersion"}, scalarNode(APIVersion))
	putNode(doc, []string{"kind"}, scalarNode(Kind))
	for _, s := range sources {
		at := root.find(s.path)
		if at == nil || at.noRecord {
			continue
		}
		if !at.record && (s.kind == FromDefault || s.kind == FromComputation) {
			continue
		}
		node, err := valueNode(s.Value)
		if err != nil {
			return nil, fmt.Errorf("recording %s: %w", s.Path, err)
		}
		putNode(doc, s.path, node)
	}
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	if err := encoder.Encode(doc); err != nil {
		return nil, fmt.Errorf("recording the configuration: %w", err)
	}
	if err := encoder.Close(); err != nil {
		return nil, fmt.Errorf("recording the configuration: %w", err)
	}
	return out.Bytes(), nil
}

// ParseRecorded reads what Record wrote. No bytes mean no earlier run.
func ParseRecorded(name string, data []byte) (Layer, error) {
	if len(bytes.TrimSpace(data)) == 0 {
		return Layer{}, nil
	}
	return parse(name, data, FromRecord)
}

func scalarNode(text string) *yaml.Node {
	n := &yaml.Node{}
	n.SetString(text)
	return n
}

// valueNode writes maps in the order of their keys, so that equal choices give
// equal bytes.
func valueNode(value any) (*yaml.Node, error) {
	switch v := value.(type) {
	case string:
		return scalarNode(v), nil
	case []string:
		n := &yaml.Node{Kind: yaml.SequenceNode}
		for _, item := range v {
			n.Content = append(n.Content, scalarNode(item))
		}
		return n, nil
	case map[string]any:
		n := &yaml.Node{Kind: yaml.MappingNode}
		for _, key := range slices.Sorted(maps.Keys(v)) {
			item, err := valueNode(v[key])
			if err != nil {
				return nil, err
			}
			n.Content = append(n.Content, scalarNode(key), item)
		}
		return n, nil
	case []any:
		n := &yaml.Node{Kind: yaml.SequenceNode}
		for _, one := range v {
			item, err := valueNode(one)
			if err != nil {
				return nil, err
			}
			n.Content = append(n.Content, item)
		}
		return n, nil
	case float64:
		// The encoder would write 1e+06 without a point, which reads back as text.
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!float", Value: floatText(v)}, nil
	}
	n := &yaml.Node{}
	if err := n.Encode(value); err != nil {
		return nil, err
	}
	return n, nil
}

func floatText(v float64) string {
	text := strconv.FormatFloat(v, 'f', -1, 64)
	if !slices.Contains([]byte(text), '.') {
		text += ".0"
	}
	return text
}

func putNode(mapping *yaml.Node, path []string, value *yaml.Node) {
	for len(path) > 1 {
		var next *yaml.Node
		for i := 0; i+1 < len(mapping.Content); i += 2 {
			if mapping.Content[i].Value == path[0] {
				next = mapping.Content[i+1]
			}
		}
		if next == nil {
			next = &yaml.Node{Kind: yaml.MappingNode}
			mapping.Content = append(mapping.Content, scalarNode(path[0]), next)
		}
		mapping, path = next, path[1:]
	}
	mapping.Content = append(mapping.Content, scalarNode(path[0]), value)
}

// CheckImmutable refuses values that differ from what the first install fixed.
// The errors are *Error with ErrImmutable in their tree.
func CheckImmutable(sources Sources, recorded Layer) error {
	root := boxSchema()
	var found problems
	for _, s := range sources {
		at := root.find(s.path)
		before, was := recorded.entries[s.Path]
		if at == nil || !at.immutable || !was || sameValue(before.value, s.Value) {
			continue
		}
		fixed, now := display(before.value), s.Text()
		found.add(&Error{Place: s.Origin, Path: s.Path, Kind: ErrImmutable,
			Problem: fmt.Sprintf("was fixed to %s by the first install and can't become %s", fixed, now),
			Fix:     fmt.Sprintf("leave it at %s, or start over: `llmbox uninstall`, then install with the new value", fixed)})
	}
	return found.join()
}

// sameValue compares ranges and paths by what they mean.
func sameValue(a, b any) bool {
	ta, tb := display(a), display(b)
	if ta == tb {
		return true
	}
	pa, errA := netip.ParsePrefix(ta)
	pb, errB := netip.ParsePrefix(tb)
	if errA == nil && errB == nil {
		return pa.Masked() == pb.Masked()
	}
	return filepath.IsAbs(ta) && filepath.IsAbs(tb) && filepath.Clean(ta) == filepath.Clean(tb)
}
