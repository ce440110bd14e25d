// Package weights brings a model's files onto a disk in the layout of the Hugging Face
// cache (blobs, snapshots, refs), so that a model server finds them with HF_HOME and
// without a network. They come from the hub, from a mirror that speaks as it does, or
// from such a cache in another directory; each is verified by the checksum that names
// it. It must not know a cluster, charts, or how progress is shown.
package weights

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/llmbox-dev/llmbox/internal/download"
)

const (
	defaultEndpoint = "https://huggingface.co"
	defaultRevision = "main"
	// filesAtATime bounds the files under way: the connections are shared, and small
	// files cost the time of an answer each.
	filesAtATime = 6
	// sharedDirMode lets the model server, which is another user, keep its own files
	// beside the weights.
	sharedDirMode = 0o2775
)

// The ways in which a source can refuse for good.
var (
	// ErrNoAccess means that a model is not public, and that the token, if there is one,
	// does not open it.
	ErrNoAccess = errors.New("the hub gives no access: it is not a public model, and either there is no token or the token's owner has not accepted the model's licence")
	// ErrNoModel means that the source has no such model or revision.
	ErrNoModel = errors.New("the hub knows no such model or revision")
	// ErrToken means that a token can't be one.
	ErrToken   = errors.New("that is no Hugging Face token: it is one word that begins with hf_")
	errListing = errors.New("the hub's list of files makes no sense")
)

// Options say which weights are wanted, from where, and where they go.
type Options struct {
	// Model and Revision (default main) name them on the hub.
	Model, Revision string
	// Dir is what the reader has as HF_HOME.
	Dir string
	// Source is the base URL of the hub (default https://huggingface.co) or of a mirror, or
	// the absolute path of another HF_HOME. Token, if any, is shown to the URL's host and
	// to no other.
	Source, Token string
	// Download are the rules for the way out; its headers are added to.
	Download download.Options
	// UID and GID own what is written; 0 leaves it to whoever runs this.
	UID, GID int
	// Notice hears of what is tried again; may be nil.
	Notice func(text string)
}

// Progress is how far a download has come.
type Progress struct {
	// Done of Total are bytes.
	Done, Total int64
	// Rate is in bytes a second.
	Rate float64
	// File is one that is under way.
	File string
}

// Weights are a model's files at one commit, whether they are there already or not.
type Weights struct {
	// Commit is what the revision is.
	Commit string
	// Bytes are those of all files.
	Bytes int64
	// Files is how many there are, LeftOut how many of the repository are not wanted.
	Files, LeftOut int
	// Complete says that everything was there and verified when it was looked at.
	Complete bool

	o     Options
	repo  string // of the cache, below Dir
	files []hubFile
	from  source

	mu    sync.Mutex
	done  int64
	under map[string]download.Progress
}

// source is where files come from.
type source interface {
	// list names the commit and its files.
	list(ctx context.Context) (listing, error)
	// fetch brings one file's content to a path below root.
	fetch(ctx context.Context, w *Weights, root *os.Root, blob string, f hubFile, progress func(download.Progress)) error
	close()
}

// Open finds out what the weights are: gated, unknown or misspelt ones are refused here,
// before the first byte. Weights at a commit that a former call has completed are found
// without asking anybody.
func Open(ctx context.Context, o Options) (*Weights, error) {
	if o.Source == "" {
		o.Source = defaultEndpoint
	}
	if o.Revision == "" {
		o.Revision = defaultRevision
	}
	if err := checkNames(o); err != nil {
		return nil, err
	}
	w := &Weights{o: o, repo: "hub/models--" + strings.ReplaceAll(o.Model, "/", "--"), under: map[string]download.Progress{}}
	if known, err := w.readManifest(); err == nil && w.present(known.Siblings) {
		w.take(known)
		w.Complete = true
		return w, nil
	}
	var err error
	if path.IsAbs(o.Source) {
		w.from, err = newCacheSource(o)
	} else {
		w.from, err = newHubSource(o)
	}
	if err != nil {
		return nil, err
	}
	list, err := w.from.list(ctx)
	if err != nil {
		w.from.close()
		return nil, fmt.Errorf("listing the files of %s at %s: %w", o.Model, o.Revision, err)
	}
	w.take(list)
	return w, nil
}

func checkNames(o Options) error {
	switch {
	case !modelPattern.MatchString(o.Model):
		return fmt.Errorf("%q is not a model's name on the hub", o.Model)
	case !fs.ValidPath(o.Revision) || o.Revision == ".":
		return fmt.Errorf("%q is not a revision", o.Revision)
	case o.Token != "" && strings.ContainsFunc(o.Token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return ErrToken
	}
	return nil
}

func (w *Weights) take(list listing) {
	w.Commit, w.files = list.SHA, wanted(list.Siblings)
	w.Files, w.LeftOut = len(w.files), len(list.Siblings)-len(w.files)
	for _, f := range w.files {
		w.Bytes += f.Size
	}
}

// Close gives up what Open opened.
func (w *Weights) Close() {
	if w.from != nil {
		w.from.close()
	}
}

// Fetch brings what is missing, verified, and makes the snapshot visible last. It goes
// on where an earlier call stopped. Progress is called from one goroutine at a time.
func (w *Weights) Fetch(ctx context.Context, progress func(Progress)) error {
	if w.Complete {
		return nil
	}
	if err := os.MkdirAll(w.o.Dir, 0o755); err != nil { // #nosec G301 -- the model server has another user
		return fmt.Errorf("making the cache directory: %w", err)
	}
	root, err := os.OpenRoot(w.o.Dir)
	if err != nil {
		return fmt.Errorf("opening the cache directory: %w", err)
	}
	defer func() { _ = root.Close() }()
	if err := root.MkdirAll(w.repo+"/blobs", 0o755); err != nil {
		return fmt.Errorf("making the cache directory: %w", err)
	}
	if err := w.own(root); err != nil {
		return fmt.Errorf("handing the cache directory to the model server: %w", err)
	}
	ticking, stop := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { w.watch(ticking, progress) })
	group, fetching := errgroup.WithContext(ctx)
	group.SetLimit(filesAtATime)
	for _, f := range w.files {
		group.Go(func() error {
			if err := w.fetch(fetching, root, f); err != nil {
				return fmt.Errorf("downloading %s: %w", f.Name, err)
			}
			return nil
		})
	}
	err = group.Wait()
	stop()
	watching.Wait()
	if err != nil {
		return err
	}
	for _, f := range w.files {
		if err := link(root, w.repo, w.Commit, f); err != nil {
			return fmt.Errorf("linking %s: %w", f.Name, err)
		}
	}
	if w.o.Revision != w.Commit {
		if err := refer(root, w.repo, w.o.Revision, w.Commit); err != nil {
			return fmt.Errorf("recording %s: %w", w.o.Revision, err)
		}
	}
	if err := w.own(root); err != nil {
		return fmt.Errorf("handing the weights to the model server: %w", err)
	}
	if err := w.writeManifest(root); err != nil {
		return fmt.Errorf("noting that the weights are complete: %w", err)
	}
	w.Complete = true
	if progress != nil {
		progress(Progress{Done: w.Bytes, Total: w.Bytes})
	}
	return nil
}

// fetch brings one file into blobs. One that is there was verified when it came.
func (w *Weights) fetch(ctx context.Context, root *os.Root, f hubFile) error {
	blob := w.repo + "/blobs/" + f.blob()
	if info, err := root.Lstat(blob); err == nil && info.Mode().IsRegular() && info.Size() == f.Size {
		w.arrived(f)
		return nil
	}
	err := w.from.fetch(ctx, w, root, blob, f, func(p download.Progress) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.under[f.Name] = p
	})
	if err != nil {
		return err
	}
	w.arrived(f)
	return nil
}

func (w *Weights) arrived(f hubFile) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.under, f.Name)
	w.done += f.Size
}

// watch tells how far all files have come.
func (w *Weights) watch(ctx context.Context, progress func(Progress)) {
	if progress == nil {
		return
	}
	const every = time.Second
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			progress(w.now())
		}
	}
}

func (w *Weights) now() Progress {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := Progress{Done: w.done, Total: w.Bytes}
	for name, u := range w.under {
		p.Done += u.Done
		p.Rate += u.Rate
		if p.File == "" || name < p.File {
			p.File = name
		}
	}
	return p
}

// notice hands on what is tried again.
func (w *Weights) notice(n download.Notice) {
	if w.o.Notice != nil {
		w.o.Notice(fmt.Sprintf("trying again in %s: %s", n.Wait, strings.Join(strings.Fields(n.Err.Error()), " ")))
	}
}

// own gives what was written to the model server's user.
func (w *Weights) own(root *os.Root) error {
	if w.o.UID == 0 && w.o.GID == 0 {
		return nil
	}
	for _, dir := range []string{".", "hub"} {
		if err := root.Chmod(dir, sharedDirMode|fs.ModeSetgid); err != nil {
			return err
		}
		if err := root.Chown(dir, w.o.UID, w.o.GID); err != nil {
			return err
		}
	}
	return fs.WalkDir(root.FS(), w.repo, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return root.Lchown(name, w.o.UID, w.o.GID)
	})
}

// manifestName is where it is kept which files make a commit whole: outside of what
// the hub's own tools look through.
func (w *Weights) manifestName(commit string) string {
	return "llmbox/" + strings.ReplaceAll(w.o.Model, "/", "--") + "@" + commit + ".json"
}

func (w *Weights) readManifest() (listing, error) {
	var list listing
	if !sha1Pattern.MatchString(w.o.Revision) {
		return list, fs.ErrNotExist // a branch moves
	}
	root, err := os.OpenRoot(w.o.Dir)
	if err != nil {
		return list, err
	}
	defer func() { _ = root.Close() }()
	raw, err := root.ReadFile(w.manifestName(w.o.Revision))
	if err != nil {
		return list, err
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return list, err
	}
	return list, list.check()
}

func (w *Weights) writeManifest(root *os.Root) error {
	raw, err := json.Marshal(listing{SHA: w.Commit, Siblings: w.files})
	if err != nil {
		return err
	}
	name := w.manifestName(w.Commit)
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	if err := root.WriteFile(name+".incomplete", raw, 0o644); err != nil {
		return err
	}
	return root.Rename(name+".incomplete", name)
}

// present says whether every file is where a reader looks for it.
func (w *Weights) present(files []hubFile) bool {
	for _, f := range files {
		at := filepath.Join(w.o.Dir, filepath.FromSlash(w.repo), "snapshots", w.o.Revision, filepath.FromSlash(f.Name))
		if info, err := os.Stat(at); err != nil || info.Size() != f.Size {
			return false
		}
	}
	return true
}

// Host is whom a source's token is for; empty for a directory.
func Host(source string) string {
	if source == "" {
		source = defaultEndpoint
	}
	u, err := url.Parse(source)
	if err != nil {
		return ""
	}
	return u.Host
}
