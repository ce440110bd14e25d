package actors

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/json"
	"k8s.io/client-go/dynamic"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// str, integer, truth, sub, items and texts read a path of a decoded object;
// what is absent or of another type reads as zero.

func at(m map[string]any, path ...string) any {
	var v any = m
	for _, p := range path {
		next, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = next[p]
	}
	return v
}

func str(m map[string]any, path ...string) string {
	s, _ := at(m, path...).(string)
	return s
}

func integer(m map[string]any, path ...string) int64 {
	switch v := at(m, path...).(type) {
	case int64:
		return v
	case float64:
		return int64(v)
	case int:
		return int64(v)
	}
	return 0
}

func truth(m map[string]any, path ...string) bool {
	b, _ := at(m, path...).(bool)
	return b
}

func sub(m map[string]any, path ...string) map[string]any {
	s, _ := at(m, path...).(map[string]any)
	return s
}

func items(m map[string]any, path ...string) []map[string]any {
	var out []map[string]any
	switch v := at(m, path...).(type) {
	case []any:
		for _, i := range v {
			if o, ok := i.(map[string]any); ok {
				out = append(out, o)
			}
		}
	case []map[string]any:
		out = v
	}
	return out
}

func texts(m map[string]any, path ...string) []string {
	var out []string
	switch v := at(m, path...).(type) {
	case []any:
		for _, i := range v {
			if s, ok := i.(string); ok {
				out = append(out, s)
			}
		}
	case []string:
		out = v
	}
	return out
}

// first is the first value that is not empty.
func first(values ...string) string {
	return cmp.Or(values...)
}

// firstOf is the first map that is not empty.
func firstOf(maps ...map[string]any) map[string]any {
	for _, m := range maps {
		if len(m) > 0 {
			return m
		}
	}
	return nil
}

// union merges label maps, later ones winning.
func union(maps ...map[string]any) map[string]any {
	out := map[string]any{}
	for _, m := range maps {
		for k, v := range m {
			out[k] = v
		}
	}
	return out
}

func compare(pairs ...string) int {
	for i := 0; i+1 < len(pairs); i += 2 {
		if c := strings.Compare(pairs[i], pairs[i+1]); c != 0 {
			return c
		}
	}
	return 0
}

// normal turns Go literals into what a decoder would have made of them.
func normal(m map[string]any) (*unstructured.Unstructured, error) {
	raw, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encoding object: %w", err)
	}
	out := map[string]any{}
	if err := json.Unmarshal(raw, &out); err != nil {
		return nil, fmt.Errorf("decoding object: %w", err)
	}
	return &unstructured.Unstructured{Object: out}, nil
}

// edited applies edit to a copy of the object, or of one field of it, and
// returns nil when that changed nothing.
func edited(o *unstructured.Unstructured, field string, edit func(map[string]any)) (*unstructured.Unstructured, error) {
	copied := o.DeepCopy()
	part := copied.Object
	if field != "" {
		part = sub(copied.Object, field)
		if part == nil {
			part = map[string]any{}
		}
		copied.Object[field] = part
	}
	edit(part)
	copied, err := normal(copied.Object)
	if err != nil {
		return nil, err
	}
	if field == "" && reflect.DeepEqual(copied.Object, o.Object) || field != "" && reflect.DeepEqual(copied.Object[field], o.Object[field]) {
		return nil, nil
	}
	return copied, nil
}

func digest(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:8])
}

func mergePatch(ctx context.Context, client dynamic.ResourceInterface, name string, patch map[string]any, subresources ...string) (*unstructured.Unstructured, error) {
	raw, err := json.Marshal(patch)
	if err != nil {
		return nil, fmt.Errorf("encoding patch: %w", err)
	}
	return client.Patch(ctx, name, types.MergePatchType, raw, metav1.PatchOptions{}, subresources...)
}

// withActor adds an actor to the value of the annotation.
func withActor(value, name string) (string, bool) {
	if value == "" {
		return name, true
	}
	if slices.Contains(strings.Split(value, ", "), name) {
		return value, false
	}
	return value + ", " + name, true
}

func annotate(m map[string]any, name string) {
	u := unstructured.Unstructured{Object: m}
	annotations := u.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[Annotation], _ = withActor(annotations[Annotation], name)
	// SetAnnotations wants decoder types all the way down; metadata may be a literal.
	out := map[string]any{}
	for k, v := range annotations {
		out[k] = v
	}
	meta := sub(m, "metadata")
	if meta == nil {
		meta = map[string]any{}
		m["metadata"] = meta
	}
	meta["annotations"] = out
}

// condition is one entry of a conditions list. generation 0 leaves
// observedGeneration out, for kinds that have none.
type condition struct {
	kind, status, reason, message string
	generation                    int64
}

func yes(kind, reason, message string, generation int64) condition {
	return condition{kind, "True", reason, message, generation}
}

func no(kind, reason, message string, generation int64) condition {
	return condition{kind, "False", reason, message, generation}
}

// conditions merges wanted into an old list: others stay, and a transition
// time moves only with its status.
func conditions(old any, wanted ...condition) []any {
	list, _ := old.([]any)
	out := slices.Clone(list)
	for _, w := range wanted {
		now := time.Now().UTC().Format(time.RFC3339)
		entry := map[string]any{"type": w.kind, "status": w.status, "reason": w.reason, "message": w.message, "lastTransitionTime": now}
		if w.generation != 0 {
			entry["observedGeneration"] = w.generation
		}
		place := slices.IndexFunc(out, func(v any) bool {
			m, _ := v.(map[string]any)
			return str(m, "type") == w.kind
		})
		if place < 0 {
			out = append(out, entry)
			continue
		}
		before, _ := out[place].(map[string]any)
		if str(before, "status") == w.status && str(before, "lastTransitionTime") != "" {
			entry["lastTransitionTime"] = before["lastTransitionTime"]
		}
		out[place] = entry
	}
	return out
}

// isTrue says whether a condition of an object stands at True.
func isTrue(m map[string]any, kind string, path ...string) bool {
	for _, c := range items(m, path...) {
		if str(c, "type") == kind {
			return str(c, "status") == "True"
		}
	}
	return false
}

// owner is an ownerReference as controllers write it.
func owner(o *unstructured.Unstructured) []any {
	return []any{map[string]any{
		"apiVersion": o.GetAPIVersion(), "kind": o.GetKind(), "name": o.GetName(), "uid": string(o.GetUID()),
		"controller": true, "blockOwnerDeletion": true,
	}}
}

// selects says whether a metav1.LabelSelector matches; nil matches nothing.
func selects(selector map[string]any, set map[string]string) bool {
	if selector == nil {
		return false
	}
	raw, err := json.Marshal(selector)
	if err != nil {
		return false
	}
	var typed metav1.LabelSelector
	if err := json.Unmarshal(raw, &typed); err != nil {
		return false
	}
	s, err := metav1.LabelSelectorAsSelector(&typed)
	return err == nil && s.Matches(labels.Set(set))
}
