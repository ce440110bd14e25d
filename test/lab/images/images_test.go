package images

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func program(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func get(t *testing.T, url string) (int, []byte, http.Header) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, raw, resp.Header
}

// A node resolves a tag, reads the configuration, and unpacks the layer whose
// checksum the manifest names.
func TestPull(t *testing.T) {
	source := program(t, "a program")
	r, err := NewRegistry(t.TempDir(), []Image{{
		Reference: "docker.io/org/name:v1", Program: "name", StandIn: true, Entrypoint: []string{"/usr/bin/name"}, User: "65532",
		Files: []File{{Path: "/usr/bin/name", Source: source}, {Path: "/tmp/", Mode: 0o1777}, {Path: "/bin/sh", Link: "busybox"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(r)
	defer server.Close()
	code, raw, header := get(t, server.URL+"/v2/docker.io/org/name/manifests/v1")
	if code != http.StatusOK {
		t.Fatalf("the manifest: %d %s", code, raw)
	}
	if digest := header.Get("Docker-Content-Digest"); digest != r.Served()[0].Digest || !r.Served()[0].StandIn {
		t.Errorf("the registry says %s, the list %+v", digest, r.Served()[0])
	}
	var manifest struct {
		Config struct{ Digest string }
		Layers []struct {
			Digest string
			Size   int
		}
	}
	if err := json.Unmarshal(raw, &manifest); err != nil || len(manifest.Layers) != 1 {
		t.Fatalf("%v: %s", err, raw)
	}
	_, raw, _ = get(t, server.URL+"/v2/docker.io/org/name/blobs/"+manifest.Config.Digest)
	var config struct {
		Architecture string
		Config       struct {
			User       string
			Entrypoint []string
			Labels     map[string]string
		}
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	if err := json.Unmarshal(raw, &config); err != nil {
		t.Fatal(err)
	}
	if config.Config.User != "65532" || config.Config.Entrypoint[0] != "/usr/bin/name" || config.Architecture != "amd64" ||
		config.Config.Labels["dev.llmbox.lab.stand-in"] != "true" || config.RootFS.DiffIDs[0] != manifest.Layers[0].Digest {
		t.Errorf("the configuration is %s", raw)
	}
	_, raw, _ = get(t, server.URL+"/v2/docker.io/org/name/blobs/"+manifest.Layers[0].Digest)
	sum := sha256.Sum256(raw)
	if "sha256:"+hex.EncodeToString(sum[:]) != manifest.Layers[0].Digest || len(raw) != manifest.Layers[0].Size {
		t.Error("the layer is not what the manifest says")
	}
	// A download that was cut off goes on.
	req := httptest.NewRequest(http.MethodGet, "/v2/docker.io/org/name/blobs/"+manifest.Layers[0].Digest, nil)
	req.Header.Set("Range", "bytes=700-")
	rest := httptest.NewRecorder()
	r.ServeHTTP(rest, req)
	if rest.Code != http.StatusPartialContent || !bytes.Equal(rest.Body.Bytes(), raw[700:]) {
		t.Errorf("from byte 700 on: %d, %d bytes of %d", rest.Code, rest.Body.Len(), len(raw))
	}
	entries := map[string]*tar.Header{}
	layer := tar.NewReader(strings.NewReader(string(raw)))
	for {
		h, err := layer.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		entries[h.Name] = h
	}
	for name, mode := range map[string]int64{"usr/": 0o755, "usr/bin/": 0o755, "usr/bin/name": 0o755, "tmp/": 0o1777, "bin/sh": 0o777} {
		if h := entries[name]; h == nil || h.Mode != mode || h.Uid != 0 {
			t.Errorf("%s is %+v", name, h)
		}
	}
}

func TestSameBytesTwice(t *testing.T) {
	source := program(t, "a program")
	var digests []string
	for range 2 {
		l, err := newLayer([]File{{Path: "/a/b/c", Source: source}, {Path: "/a/b/d", Content: "x"}})
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, l.digest.String())
	}
	if digests[0] != digests[1] {
		t.Errorf("the same files make %s and %s", digests[0], digests[1])
	}
}

// What is not there says so in the registry's own words: a node then tells the user.
func TestMissing(t *testing.T) {
	r, err := NewRegistry(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(r)
	defer server.Close()
	for path, want := range map[string]string{
		"/v2/docker.io/org/name/manifests/v1":                            "NAME_UNKNOWN",
		"/v2/docker.io/org/name/blobs/sha256:" + strings.Repeat("0", 64): "BLOB_UNKNOWN",
	} {
		if code, raw, _ := get(t, server.URL+path); code != http.StatusNotFound || !strings.Contains(string(raw), want) {
			t.Errorf("%s: %d %s", path, code, raw)
		}
	}
}

func TestPush(t *testing.T) {
	r, err := NewRegistry(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(r)
	defer server.Close()
	sum := sha256.Sum256([]byte("blob"))
	digest := "sha256:" + hex.EncodeToString(sum[:])
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/v2/a/b/blobs/uploads/?digest="+digest, strings.NewReader("blob"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if code, raw, _ := get(t, server.URL+"/v2/a/b/blobs/"+digest); resp.StatusCode != http.StatusCreated || code != http.StatusOK || string(raw) != "blob" {
		t.Errorf("pushed %d, pulled %d %q", resp.StatusCode, code, raw)
	}
}

// The catalogue names what upstream names: nothing in a chart may be changed for it.
func TestAvailable(t *testing.T) {
	dir := t.TempDir()
	all, err := Catalogue(dir, filepath.Join(dir, "llmbox"), "1.2.3")
	if err != nil {
		t.Fatal(err)
	}
	there, lacking := Available(all)
	for _, i := range there {
		if i.Program != "busybox of Debian" {
			t.Errorf("%s is there without its program", i.Reference)
		}
	}
	if missing := lacking["ghcr.io/llmbox-dev/llmbox:1.2.3"]; len(missing) != 1 {
		t.Errorf("llmbox's image lacks %v", missing)
	}
	for _, i := range all {
		host, _, _ := strings.Cut(i.Reference, "/")
		if !slices.Contains([]string{"docker.io", "ghcr.io", "quay.io", "registry.k8s.io", "nvcr.io", "reg.kyverno.io"}, host) {
			t.Errorf("%s comes from a registry that no node mirrors", i.Reference)
		}
	}
}
