package weights

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"regexp"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/download"
)

// maxListingBytes bounds a repository's list of files.
const maxListingBytes = 64 << 20

var (
	modelPattern  = regexp.MustCompile(`^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$`)
	sha1Pattern   = regexp.MustCompile(`^[0-9a-f]{40}$`)
	sha256Pattern = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// listing is a repository at a commit, in the hub's words.
type listing struct {
	SHA      string    `json:"sha"`
	Siblings []hubFile `json:"siblings"`
}

type hubFile struct {
	Name   string `json:"rfilename"`
	Size   int64  `json:"size"`
	BlobID string `json:"blobId"`
	LFS    *struct {
		SHA256 string `json:"sha256"`
	} `json:"lfs"`
}

// blob is the file's name in the cache: its checksum.
func (f hubFile) blob() string {
	if f.LFS != nil {
		return f.LFS.SHA256
	}
	return f.BlobID
}

// digest is blob as what the content is verified by.
func (f hubFile) digest() download.Digest {
	if f.LFS != nil {
		return download.SHA256(f.LFS.SHA256)
	}
	return download.GitBlob(f.BlobID, f.Size)
}

// check refuses names that lead out of the snapshot and files that could not
// be verified.
func (f hubFile) check() error {
	known := f.LFS != nil && sha256Pattern.MatchString(f.LFS.SHA256) || f.LFS == nil && sha1Pattern.MatchString(f.BlobID)
	switch {
	case !fs.ValidPath(f.Name) || f.Name == "." || strings.ContainsAny(f.Name, "\\\x00"):
		return fmt.Errorf("%w: file name %q", errListing, f.Name)
	case f.Size < 0 || !known:
		return fmt.Errorf("%w: no size or checksum for %q", errListing, f.Name)
	}
	return nil
}

// wanted leaves out copies of the weights in formats that the model server does
// not read where it has safetensors.
func wanted(all []hubFile) []hubFile {
	safe := false
	for _, f := range all {
		safe = safe || strings.HasSuffix(f.Name, ".safetensors")
	}
	var out []hubFile
	for _, f := range all {
		base, ext := path.Base(f.Name), path.Ext(f.Name)
		other := strings.HasPrefix(f.Name, "original/") || ext == ".bin" && strings.HasPrefix(base, "pytorch_model") ||
			ext == ".pt" || ext == ".pth" || ext == ".h5" || ext == ".msgpack" || ext == ".onnx" || ext == ".gguf"
		if !safe || !other {
			out = append(out, f)
		}
	}
	return out
}

// check refuses a list that is not one of a commit, or leads out of the cache.
func (l listing) check() error {
	if !sha1Pattern.MatchString(l.SHA) || len(l.Siblings) == 0 {
		return fmt.Errorf("%w: no commit or no files", errListing)
	}
	for _, f := range l.Siblings {
		if err := f.check(); err != nil {
			return err
		}
	}
	return nil
}

// hubSource is the hub, or a mirror that speaks as it does.
type hubSource struct {
	o        Options
	endpoint string
	host     string
	client   *download.Client
}

func newHubSource(o Options) (*hubSource, error) {
	h := &hubSource{o: o, endpoint: strings.TrimSuffix(o.Source, "/")}
	hub, err := url.Parse(h.endpoint)
	if err != nil || hub.Host == "" {
		return nil, fmt.Errorf("the source %q is neither a URL nor the absolute path of a directory", o.Source)
	}
	h.host = hub.Host
	rules := o.Download
	// Who names a plain http endpoint has chosen it.
	rules.AllowHTTP = rules.AllowHTTP || hub.Scheme == "http"
	if o.Token != "" {
		rules.Headers = append(rules.Headers[:len(rules.Headers):len(rules.Headers)], download.Bearer(hub.Scheme+"://"+hub.Host, o.Token))
	}
	if h.client, err = download.New(rules); err != nil {
		return nil, fmt.Errorf("preparing the download: %w", err)
	}
	return h, nil
}

func (h *hubSource) close() { h.client.CloseIdle() }

func (h *hubSource) list(ctx context.Context) (listing, error) {
	var list listing
	answer, err := h.client.Read(ctx, download.Document{
		URL:   h.endpoint + "/api/models/" + h.o.Model + "/revision/" + url.PathEscape(h.o.Revision) + "?blobs=true",
		Limit: maxListingBytes,
	})
	if err != nil {
		return list, h.refused(err)
	}
	if err := json.Unmarshal(answer.Body, &list); err != nil {
		return list, fmt.Errorf("%w: %w", errListing, err)
	}
	return list, list.check()
}

func (h *hubSource) fetch(ctx context.Context, w *Weights, root *os.Root, blob string, f hubFile, progress func(download.Progress)) error {
	_, err := h.client.Fetch(ctx, download.File{
		URLs: []string{h.endpoint + "/" + h.o.Model + "/resolve/" + w.Commit + "/" + (&url.URL{Path: f.Name}).EscapedPath()},
		Root: root, Path: blob, Digest: f.digest(), Size: f.Size,
		Notice: w.notice, Progress: progress,
	})
	if err != nil {
		return h.refused(err)
	}
	return nil
}

// refused says what the hub means by a status; storage to which it redirects means
// nothing by it.
func (h *hubSource) refused(err error) error {
	var status *download.StatusError
	if !errors.As(err, &status) {
		return err
	}
	if u, bad := url.Parse(status.URL); bad != nil || u.Host != h.host {
		return err
	}
	switch status.Code {
	case http.StatusUnauthorized, http.StatusForbidden:
		return fmt.Errorf("%w (HTTP %d %s)", ErrNoAccess, status.Code, status.Header.Get("X-Error-Code"))
	case http.StatusNotFound:
		return fmt.Errorf("%w (HTTP 404 %s)", ErrNoModel, status.Header.Get("X-Error-Code"))
	}
	return err
}

// link puts the file into the snapshot.
func link(root *os.Root, repo, commit string, f hubFile) error {
	name := repo + "/snapshots/" + commit + "/" + f.Name
	target := strings.Repeat("../", 2+strings.Count(f.Name, "/")) + "blobs/" + f.blob()
	if have, err := root.Readlink(name); err == nil && have == target {
		return nil
	}
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return root.Symlink(target, name)
}

// refer records which commit the revision is.
func refer(root *os.Root, repo, revision, commit string) error {
	name := repo + "/refs/" + revision
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	if err := root.WriteFile(name+".incomplete", []byte(commit), 0o644); err != nil {
		return err
	}
	return root.Rename(name+".incomplete", name)
}
