package bundle

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/llmbox-dev/llmbox/internal/download"
)

// mirror is a registry below a path of a server, and what it was asked.
type mirror struct {
	*httptest.Server
	inner http.Handler
	// below takes the place of /v2; login is asked for where it is set.
	below, login string
	// pings says that it answers to the question that is about no image.
	pings bool

	mu    sync.Mutex
	asked []string
}

func newMirror(t *testing.T, below, login string, pings bool) *mirror {
	t.Helper()
	m := &mirror{inner: registry.New(registry.Logger(log.New(io.Discard, "", 0))), below: below, login: login, pings: pings}
	m.Server = httptest.NewServer(m)
	t.Cleanup(m.Close)
	return m
}

func (m *mirror) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m.mu.Lock()
	m.asked = append(m.asked, r.Method+" "+r.URL.Path)
	m.mu.Unlock()
	rest, below := strings.CutPrefix(r.URL.Path, m.below+"/")
	if !below || rest == "" && !m.pings {
		http.NotFound(w, r)
		return
	}
	if m.login != "" && r.Header.Get("Authorization") != "Basic "+base64.StdEncoding.EncodeToString([]byte(m.login)) {
		w.Header().Set("WWW-Authenticate", `Basic realm="mirror"`)
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	r.URL.Path, r.URL.RawPath = "/v2/"+rest, ""
	m.inner.ServeHTTP(w, r)
}

// holds puts an image in.
func (m *mirror) holds(t *testing.T, repository string) v1.Image {
	t.Helper()
	image, err := random.Image(2048, 2)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", "amd64"
	if image, err = mutate.ConfigFile(image, config); err != nil {
		t.Fatal(err)
	}
	inside := httptest.NewServer(m.inner)
	defer inside.Close()
	tag, err := name.NewTag(strings.TrimPrefix(inside.URL, "http://")+"/"+repository+":1", name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(tag, image); err != nil {
		t.Fatal(err)
	}
	return image
}

func createFrom(t *testing.T, r *Registries, references ...string) (*Manifest, error) {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	if err := os.WriteFile(program, []byte("a program"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := Parts{Version: "1.2.3", Architecture: "amd64", LLMBox: program, K3s: program, K3sName: "k3s", Work: filepath.Join(dir, "work")}
	for _, reference := range references {
		p.Images = append(p.Images, Wanted{Reference: reference, Group: GroupFirst})
	}
	var out bytes.Buffer
	m, _, err := Create(t.Context(), p, r, &out, nil)
	if err == nil {
		if err := verify(out.Bytes()); err != nil {
			t.Errorf("the bundle is refused: %v", err)
		}
	}
	return m, err
}

func newRegistries(t *testing.T) *Registries {
	t.Helper()
	client, err := download.New(download.Options{AllowHTTP: true, Tries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.CloseIdle)
	return &Registries{Client: client, Architecture: "amd64", Mirrors: map[string][]string{}, Credentials: map[string]authn.AuthConfig{}}
}

// Mirrors are asked as k3s asks them: what stands in the URL takes the place of /v2.
func TestMirrorBelowAPath(t *testing.T) {
	for _, tt := range []struct {
		name, url, below, login string
		pings                   bool
	}{
		{"nothing", "", "/v2", "", true},
		{"a slash", "/", "/v2", "", true},
		{"the path that there is anyway", "/v2", "/v2", "", true},
		{"below it", "/v2/docker.io", "/v2/docker.io", "", true},
		{"below it, and no answer without an image", "/v2/docker.io", "/v2/docker.io", "", false},
		{"elsewhere", "/artifacts/api/docker/hub/v2/", "/artifacts/api/docker/hub/v2", "", true},
		{"elsewhere, with a login", "/hub", "/hub", "user:secret", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newMirror(t, tt.below, tt.login, tt.pings)
			want, err := m.holds(t, "org/name").Digest()
			if err != nil {
				t.Fatal(err)
			}
			r := newRegistries(t)
			r.Mirrors["docker.io"] = []string{m.URL + tt.url}
			if user, password, ok := strings.Cut(tt.login, ":"); ok {
				r.Credentials[strings.TrimPrefix(m.URL, "http://")] = authn.AuthConfig{Username: user, Password: password}
			}
			made, err := createFrom(t, r, "docker.io/org/name:1")
			if err != nil {
				t.Fatalf("%v; it was asked %q", err, m.asked)
			}
			if got := made.Images[0].Digest; got != want.String() {
				t.Errorf("the image is %s, want %s", got, want)
			}
			for _, a := range m.asked {
				if path := strings.Fields(a)[1]; !strings.HasPrefix(path, tt.below+"/") {
					t.Errorf("it was asked for %s", path)
				}
			}
		})
	}
}

// A blob that is not what it was when it was fetched is found when it is written, and the
// next run fetches it anew.
func TestBlobThatChangedIsFetchedAnew(t *testing.T) {
	m := newMirror(t, "/v2", "", true)
	image := m.holds(t, "org/name")
	layers, err := image.Layers()
	if err != nil {
		t.Fatal(err)
	}
	layer, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	size, err := layers[0].Size()
	if err != nil {
		t.Fatal(err)
	}
	r := newRegistries(t)
	r.Mirrors["docker.io"] = []string{m.URL}
	work := t.TempDir()
	program := filepath.Join(work, "program")
	blob := filepath.Join(work, "blobs", layer.Hex)
	if err := errors.Join(os.WriteFile(program, []byte("a program"), 0o600), os.MkdirAll(filepath.Dir(blob), 0o750), os.WriteFile(blob, make([]byte, size), 0o600)); err != nil {
		t.Fatal(err)
	}
	p := Parts{
		Version: "1.2.3", Architecture: "amd64", LLMBox: program, K3s: program, K3sName: "k3s", Work: work,
		Images: []Wanted{{Reference: "docker.io/org/name:1", Group: GroupFirst}},
	}
	if _, _, err := Create(t.Context(), p, r, io.Discard, nil); !errors.Is(err, ErrTampered) {
		t.Fatal(err)
	}
	before := len(m.asked)
	var out bytes.Buffer
	if _, _, err := Create(t.Context(), p, r, &out, nil); err != nil {
		t.Fatal(err)
	}
	if err := verify(out.Bytes()); err != nil {
		t.Error(err)
	}
	var blobs []string
	for _, a := range m.asked[before:] {
		// This registry refuses a range that leads beyond the end, and is asked once more.
		if strings.Contains(a, "/blobs/") && !slices.Contains(blobs, a) {
			blobs = append(blobs, a)
		}
	}
	if want := fmt.Sprintf("GET /v2/org/name/blobs/%s", layer); len(blobs) != 1 || blobs[0] != want {
		t.Errorf("it asks for %q, want %q alone", blobs, want)
	}
}
