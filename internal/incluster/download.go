package incluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"regexp"
	"strings"
	"time"

	"github.com/llmbox-dev/llmbox/internal/download"
)

const (
	defaultEndpoint = "https://huggingface.co"
	maxListingBytes = 64 << 20
	sayEvery        = 15 * time.Second
)

// The ways in which the hub can refuse for good.
var (
	ErrNoAccess = errors.New("the hub gives no access: it is not a public model, and either there is no token or the token's owner has not accepted the model's licence")
	ErrNoModel  = errors.New("the hub knows no such model or revision")
	errListing  = errors.New("the hub's list of files makes no sense")
)

var (
	modelPattern  = regexp.MustCompile(`^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$`)
	sha1Pattern   = regexp.MustCompile(`^[0-9a-f]{40}$`)
	sha256Pattern = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// DownloadOptions say what to download where.
type DownloadOptions struct {
	// Model and Revision (default main) name it on the hub.
	Model, Revision string
	// Dir is what the reader has as HF_HOME.
	Dir string
	// Endpoint is the hub's base URL (default https://huggingface.co). Token, if
	// any, is shown to its host and to no other.
	Endpoint, Token string
	// Out receives lines of progress.
	Out io.Writer

	// pause is the first wait before trying again, stall the longest silence.
	pause, stall time.Duration
}

type hubDownload struct {
	DownloadOptions
	client      *download.Client
	host        string
	root        *os.Root
	repo        string // of the cache, below root
	done, total int64
	told        time.Time
}

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

// Download brings a model's files into the layout of the hub's cache (blobs,
// snapshots, refs), goes on where an earlier run stopped, and verifies each
// file's checksum. The reference that makes a snapshot visible comes last.
func Download(ctx context.Context, opts DownloadOptions) error {
	d := &hubDownload{DownloadOptions: opts, repo: "hub/models--" + strings.ReplaceAll(opts.Model, "/", "--")}
	if d.Endpoint = strings.TrimSuffix(d.Endpoint, "/"); d.Endpoint == "" {
		d.Endpoint = defaultEndpoint
	}
	if d.Revision == "" {
		d.Revision = "main"
	}
	hub, err := url.Parse(d.Endpoint)
	switch {
	case err != nil || hub.Host == "":
		return fmt.Errorf("the endpoint %q is not a URL", d.Endpoint)
	case !modelPattern.MatchString(d.Model):
		return fmt.Errorf("%q is not a model's name on the hub", d.Model)
	case !fs.ValidPath(d.Revision) || d.Revision == ".":
		return fmt.Errorf("%q is not a revision", d.Revision)
	}
	d.host = hub.Host
	// Who names a plain http endpoint has chosen it.
	o := download.Options{Backoff: d.pause, StallTimeout: d.stall, AllowHTTP: hub.Scheme == "http"}
	if d.Token != "" {
		o.Headers = append(o.Headers, download.Bearer(hub.Scheme+"://"+hub.Host, d.Token))
	}
	if d.client, err = download.New(o); err != nil {
		return fmt.Errorf("preparing the download: %w", err)
	}
	defer d.client.CloseIdle()
	if err := os.MkdirAll(d.Dir, 0o755); err != nil { // #nosec G301 -- the model server has another user
		return fmt.Errorf("making the cache directory: %w", err)
	}
	if d.root, err = os.OpenRoot(d.Dir); err != nil {
		return fmt.Errorf("opening the cache directory: %w", err)
	}
	defer func() { _ = d.root.Close() }()
	return d.run(ctx)
}

func (d *hubDownload) run(ctx context.Context) error {
	list, err := d.list(ctx)
	if err != nil {
		return fmt.Errorf("listing the files of %s at %s: %w", d.Model, d.Revision, err)
	}
	files := wanted(list.Siblings)
	for _, f := range files {
		d.total += f.Size
	}
	d.say("%s at %s: %d files, %s (%d left out)", d.Model, list.SHA, len(files), size(d.total), len(list.Siblings)-len(files))
	if err := d.root.MkdirAll(d.repo+"/blobs", 0o755); err != nil {
		return fmt.Errorf("making the cache directory: %w", err)
	}
	for i, f := range files {
		if err := d.fetch(ctx, list.SHA, f); err != nil {
			return fmt.Errorf("downloading %s: %w", f.Name, err)
		}
		if err := d.link(list.SHA, f); err != nil {
			return fmt.Errorf("linking %s: %w", f.Name, err)
		}
		d.say("%d of %d files, %s of %s: %s", i+1, len(files), size(d.done), size(d.total), f.Name)
	}
	if d.Revision == list.SHA {
		return nil
	}
	if err := d.refer(list.SHA); err != nil {
		return fmt.Errorf("recording %s: %w", d.Revision, err)
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

func (d *hubDownload) list(ctx context.Context) (listing, error) {
	var list listing
	answer, err := d.client.Read(ctx, download.Document{
		URL:   d.Endpoint + "/api/models/" + d.Model + "/revision/" + url.PathEscape(d.Revision) + "?blobs=true",
		Limit: maxListingBytes, Notice: d.notice,
	})
	if err != nil {
		return list, d.refused(err)
	}
	if err := json.Unmarshal(answer.Body, &list); err != nil {
		return list, fmt.Errorf("%w: %w", errListing, err)
	}
	if !sha1Pattern.MatchString(list.SHA) || len(list.Siblings) == 0 {
		return list, fmt.Errorf("%w: no commit or no files", errListing)
	}
	for _, f := range list.Siblings {
		if err := f.check(); err != nil {
			return list, err
		}
	}
	return list, nil
}

// fetch brings one file into blobs. One that is there was verified when it came.
func (d *hubDownload) fetch(ctx context.Context, commit string, f hubFile) error {
	blob := d.repo + "/blobs/" + f.blob()
	if info, err := d.root.Lstat(blob); err == nil && info.Mode().IsRegular() && info.Size() == f.Size {
		d.done += f.Size
		return nil
	}
	_, err := d.client.Fetch(ctx, download.File{
		URLs: []string{d.Endpoint + "/" + d.Model + "/resolve/" + commit + "/" + (&url.URL{Path: f.Name}).EscapedPath()},
		Root: d.root, Path: blob, Digest: f.digest(), Size: f.Size,
		Notice: d.notice,
		Progress: func(p download.Progress) {
			if time.Since(d.told) >= sayEvery {
				d.say("%s of %s at %s a second: %s", size(d.done+p.Done), size(d.total), size(int64(p.Rate)), f.Name)
			}
		},
	})
	if err != nil {
		return d.refused(err)
	}
	d.done += f.Size
	return nil
}

// refused says what the hub means by a status; storage to which it redirects means
// nothing by it.
func (d *hubDownload) refused(err error) error {
	var status *download.StatusError
	if !errors.As(err, &status) {
		return err
	}
	if u, bad := url.Parse(status.URL); bad != nil || u.Host != d.host {
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

func (d *hubDownload) notice(n download.Notice) {
	d.say("trying again in %s: %s", n.Wait, oneLine([]byte(n.Err.Error())))
}

// link puts the file into the snapshot.
func (d *hubDownload) link(commit string, f hubFile) error {
	name := d.repo + "/snapshots/" + commit + "/" + f.Name
	target := strings.Repeat("../", 2+strings.Count(f.Name, "/")) + "blobs/" + f.blob()
	if have, err := d.root.Readlink(name); err == nil && have == target {
		return nil
	}
	if err := d.root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	if err := d.root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return d.root.Symlink(target, name)
}

// refer records which commit the revision is.
func (d *hubDownload) refer(commit string) error {
	name := d.repo + "/refs/" + d.Revision
	if err := d.root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	if err := d.root.WriteFile(name+".incomplete", []byte(commit), 0o644); err != nil {
		return err
	}
	return d.root.Rename(name+".incomplete", name)
}

func (d *hubDownload) say(format string, args ...any) {
	d.told = time.Now()
	_, _ = fmt.Fprintf(d.Out, format+"\n", args...)
}

func size(n int64) string { return fmt.Sprintf("%.2f GB", float64(n)/1e9) }
