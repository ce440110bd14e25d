package weights

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/llmbox-dev/llmbox/internal/download"
)

// errCarried means that files which came with their list are not whole.
var errCarried = errors.New("it did not come with the list of files")

// Blob is one file's content.
type Blob struct {
	// Path is where it lies below Dir, Name its name in the cache.
	Path, Name string
}

// Blobs are the contents of all files, wherever they have arrived.
func (w *Weights) Blobs() []Blob {
	out := make([]Blob, 0, len(w.files))
	for _, f := range w.files {
		out = append(out, Blob{Path: w.repo + "/blobs/" + f.blob(), Name: f.blob()})
	}
	return out
}

// Listing names the files, so that Known can take them where somebody carried them.
func (w *Weights) Listing() (json.RawMessage, error) {
	return json.Marshal(listing{SHA: w.Commit, Siblings: w.files})
}

// Known are weights whose files are carried to Options.Dir by somebody else, by the list
// that Listing gave. Nobody is asked; Fetch puts the snapshot together.
func Known(o Options, raw []byte) (*Weights, error) {
	var list listing
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("%w: %w", errListing, err)
	}
	if err := list.check(); err != nil {
		return nil, err
	}
	o.Revision = list.SHA
	if err := checkNames(o); err != nil {
		return nil, err
	}
	w := &Weights{
		o: o, repo: "hub/models--" + strings.ReplaceAll(o.Model, "/", "--"), under: map[string]download.Progress{}, from: carried{},
	}
	w.take(list)
	if known, err := w.readManifest(); err == nil && w.present(known.Siblings) {
		w.Complete = true
	}
	return w, nil
}

// carried is the source of what has to be there already.
type carried struct{}

func (carried) list(context.Context) (listing, error) { return listing{}, fs.ErrNotExist }

func (carried) fetch(context.Context, *Weights, *os.Root, string, hubFile, func(download.Progress)) error {
	return errCarried
}

func (carried) close() {}
