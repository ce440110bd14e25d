package incluster

import (
	"context"
	"crypto/sha1" // #nosec G505 -- git names its blobs so
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"regexp"
	"strings"
	"time"
)

const (
	defaultEndpoint = "https://huggingface.co"
	maxListingBytes = 64 << 20
	maxTries        = 8 // in a row without a single new byte
)

// The ways in which the hub can refuse for good.
var (
	ErrNoAccess = errors.New("the hub gives no access: it is not a public model, and either there is no token or the token's owner has not accepted the model's licence")
	ErrNoModel  = errors.New("the hub knows no such model or revision")
	errListing  = errors.New("the hub's list of files makes no sense")
	errCorrupt  = errors.New("the file does not have the checksum that the hub lists")
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

type download struct {
	DownloadOptions
	hub         *hubTransport
	client      *http.Client
	root        *os.Root
	repo        string // of the cache, below root
	done, total int64
	received    int64 // from the network, in this run
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

// hash computes blob from the content.
func (f hubFile) hash() hash.Hash {
	if f.LFS != nil {
		return sha256.New()
	}
	h := sha1.New() // #nosec G401 -- git names its blobs so
	_, _ = fmt.Fprintf(h, "blob %d\x00", f.Size)
	return h
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
	d := &download{DownloadOptions: opts, repo: "hub/models--" + strings.ReplaceAll(opts.Model, "/", "--")}
	if d.Endpoint = strings.TrimSuffix(d.Endpoint, "/"); d.Endpoint == "" {
		d.Endpoint = defaultEndpoint
	}
	if d.Revision == "" {
		d.Revision = "main"
	}
	if d.pause == 0 {
		d.pause, d.stall = time.Second, time.Minute
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
	d.hub = &hubTransport{hub: hub, token: d.Token, next: http.DefaultTransport}
	d.client = &http.Client{Transport: d.hub}
	if err := os.MkdirAll(d.Dir, 0o755); err != nil { // #nosec G301 -- the model server has another user
		return fmt.Errorf("making the cache directory: %w", err)
	}
	if d.root, err = os.OpenRoot(d.Dir); err != nil {
		return fmt.Errorf("opening the cache directory: %w", err)
	}
	defer func() { _ = d.root.Close() }()
	return d.run(ctx)
}

func (d *download) run(ctx context.Context) error {
	var list listing
	err := d.retry(ctx, func() (err error) { list, err = d.list(ctx); return err })
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
		if err := d.retry(ctx, func() error { return d.fetch(ctx, list.SHA, f) }); err != nil {
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

func (d *download) list(ctx context.Context) (listing, error) {
	var list listing
	ctx, cancel := context.WithTimeout(ctx, 2*d.stall)
	defer cancel()
	resp, err := d.get(ctx, d.Endpoint+"/api/models/"+d.Model+"/revision/"+url.PathEscape(d.Revision)+"?blobs=true", 0)
	if err != nil {
		return list, err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxListingBytes)).Decode(&list); err != nil {
		return list, fmt.Errorf("decoding the answer: %w", brief(err))
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

// fetch brings one file into blobs.
func (d *download) fetch(ctx context.Context, commit string, f hubFile) (err error) {
	final := d.repo + "/blobs/" + f.blob()
	if info, err := d.root.Stat(final); err == nil && info.Size() == f.Size {
		d.done += f.Size
		return nil
	}
	part := final + ".incomplete"
	file, err := d.root.OpenFile(part, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return permanent{err}
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	sum := f.hash()
	have, err := io.Copy(sum, file)
	if err != nil {
		return permanent{err}
	}
	again := func(reason error) error { // from the first byte
		return errors.Join(reason, file.Truncate(0))
	}
	if have > f.Size {
		return again(errCorrupt)
	}
	if have < f.Size {
		if have, err = d.receive(ctx, commit, f, file, sum, have); err != nil {
			return err
		}
	}
	if have != f.Size || hex.EncodeToString(sum.Sum(nil)) != f.blob() {
		return again(errCorrupt)
	}
	if err := file.Sync(); err != nil {
		return permanent{err}
	}
	if err := d.root.Rename(part, final); err != nil {
		return permanent{err}
	}
	d.done += f.Size
	return nil
}

// receive appends the bytes from have on to file and sum.
func (d *download) receive(ctx context.Context, commit string, f hubFile, file *os.File, sum hash.Hash, have int64) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watchdog := time.AfterFunc(d.stall, func() { cancel(fmt.Errorf("nothing arrived for %s", d.stall)) })
	defer watchdog.Stop()
	address := d.Endpoint + "/" + d.Model + "/resolve/" + commit + "/" + (&url.URL{Path: f.Name}).EscapedPath()
	resp, err := d.get(ctx, address, have)
	if err != nil {
		return have, errors.Join(err, context.Cause(ctx))
	}
	defer func() { _ = resp.Body.Close() }()
	switch {
	case resp.StatusCode == http.StatusPartialContent && !strings.HasPrefix(resp.Header.Get("Content-Range"), fmt.Sprintf("bytes %d-", have)),
		resp.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		return have, errors.Join(errors.New("the hub sent another part than was asked for"), file.Truncate(0))
	case resp.StatusCode == http.StatusOK && have > 0: // it does not know parts
		if _, err := io.CopyN(io.Discard, &watched{resp.Body, watchdog, d.stall}, have); err != nil {
			return have, errors.Join(brief(err), context.Cause(ctx))
		}
	}
	at := d.done + have
	body := &watched{io.LimitReader(resp.Body, f.Size-have+1), watchdog, d.stall}
	n, err := io.Copy(io.MultiWriter(file, sum, progress{d, f.Name, &at}), body)
	d.received += n
	var pathErr *fs.PathError
	switch {
	case errors.As(err, &pathErr): // the disk's, not the network's
		return have, permanent{err}
	case err != nil:
		return have, errors.Join(brief(err), context.Cause(ctx))
	case have+n < f.Size:
		return have, io.ErrUnexpectedEOF
	}
	return have + n, nil
}

// link puts the file into the snapshot.
func (d *download) link(commit string, f hubFile) error {
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
func (d *download) refer(commit string) error {
	name := d.repo + "/refs/" + d.Revision
	if err := d.root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	if err := d.root.WriteFile(name+".incomplete", []byte(commit), 0o644); err != nil {
		return err
	}
	return d.root.Rename(name+".incomplete", name)
}

func (d *download) say(format string, args ...any) {
	d.told = time.Now()
	_, _ = fmt.Fprintf(d.Out, format+"\n", args...)
}

func size(n int64) string { return fmt.Sprintf("%.2f GB", float64(n)/1e9) }
