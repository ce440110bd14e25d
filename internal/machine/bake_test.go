package machine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/llmbox-dev/llmbox/internal/bake"
	"github.com/llmbox-dev/llmbox/internal/bundle"
	"github.com/llmbox-dev/llmbox/internal/config"
)

// TestBake makes an image twice, and has the first boot of it find everything by the
// beginning of the bundle alone.
func TestBake(t *testing.T) {
	root, self := t.TempDir(), filepath.Join(t.TempDir(), "llmbox")
	if err := os.WriteFile(self, []byte("the program"), 0o700); err != nil { // #nosec G306 -- a program
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "etc/machine-id"), []byte("0123456789abcdef0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	content := map[string][]byte{"llmbox": []byte("the program"), "k3s/k3s": []byte("k3s"), "k3s/sha256sum-amd64.txt": []byte("sums")}
	m := &bundle.Manifest{Format: bundle.Format, Version: "1.2.3", Architecture: "amd64", K3s: bundle.K3s{Version: "v1.36.4+k3s1"}}
	for _, e := range []bundle.Entry{{Path: "llmbox", Kind: bundle.KindLLMBox}, {Path: "k3s/k3s", Kind: bundle.KindK3s}, {Path: "k3s/sha256sum-amd64.txt", Kind: bundle.KindK3sSums}} {
		e.Size, e.SHA256 = int64(len(content[e.Path])), fmt.Sprintf("%x", sha256.Sum256(content[e.Path]))
		m.Entries = append(m.Entries, e)
	}
	packed := &bytes.Buffer{}
	digest, err := bundle.Write(t.Context(), packed, m, func(e bundle.Entry) (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content[e.Path])), nil
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	h := New(Options{Root: root, Version: "1.2.3", Executable: self})
	box := config.Box{Paths: config.Paths{Data: StateDir, Log: "/var/log/llmbox"}, K3s: config.K3s{DataDir: "/var/lib/rancher/k3s"}}
	if found, err := h.LookAtBaked(box); err != nil || found.Clean() {
		t.Fatalf("a machine with an id is clean: %v, %v", found, err)
	}
	read := func(raw []byte) *bundle.Reader {
		t.Helper()
		b, err := bundle.NewReader(bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(b.Close)
		return b
	}
	for again := range 2 {
		release, err := h.Lock("bake", "")
		if err != nil {
			t.Fatal(err)
		}
		brought, err := h.Bake(t.Context(), Baking{Box: box, Bundle: read(packed.Bytes()), Config: []byte("model: {}\n"), Args: []string{"--port", "8081"}}, func(int64, string) {})
		if err != nil {
			t.Fatal(err)
		}
		if again == 1 && brought.Written != 0 {
			t.Errorf("baked again, it wrote %d bytes", brought.Written)
		}
		if err := h.Forget(); err != nil {
			t.Fatal(err)
		}
		release()
		found, err := h.LookAtBaked(box)
		if err != nil || !found.Clean() {
			t.Fatalf("it is not clean: %v, %v", found.Problems, err)
		}
	}
	if why, err := h.Serves(context.Background(), box); err != nil || why != "" {
		t.Errorf("it serves: %q, %v", why, err)
	}
	head, err := os.ReadFile(filepath.Join(root, bake.HeadFile))
	if err != nil {
		t.Fatal(err)
	}
	short := read(head)
	if short.Digest() != digest {
		t.Errorf("the beginning has another digest")
	}
	brought, err := h.Unpack(t.Context(), Want{Box: box}, short, func(int64, string) {})
	if err != nil || brought.Written != 0 {
		t.Fatalf("the first boot does not find it: %v, %v", brought, err)
	}
	// Where a part is missing, the beginning does not do.
	if err := os.Remove(brought.K3s); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Unpack(t.Context(), Want{Box: box}, read(head), func(int64, string) {}); err == nil {
		t.Error("it takes the beginning of a bundle for the whole")
	}
	for _, failure := range []string{"no GPU", ""} {
		if err := h.EndFirstBoot(failure); err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]bool{bake.FailedFile: failure != "", bake.UnitLink: failure != "", bake.ReadyFile: failure == ""} {
			if _, err := os.Lstat(filepath.Join(root, name)); (err == nil) != want {
				t.Errorf("after %q: %s: %v", failure, name, err)
			}
		}
	}
	if err := os.WriteFile(filepath.Join(root, StateDir, choicesFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if why, err := h.Serves(context.Background(), box); err != nil || why == "" {
		t.Errorf("a box is taken for none: %v", err)
	}
}
