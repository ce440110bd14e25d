// Package record keeps what repairs changed on a machine: what was written, installed
// and set, with what was there before, so that it can be named and undone. It must
// not know how anything is repaired.
package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// DefaultFile is where the record lies on a machine.
const DefaultFile = "/var/lib/llmbox/repairs.json"

// The identity of the record.
const (
	recordVersion = "llmbox.dev/v1alpha1"
	recordKind    = "Repairs"
)

const (
	// recordLimit bounds in bytes what is read as a record; the largest that can be
	// written has some CDI specifications of FileLimit.
	recordLimit = 8 << 20
	// FileLimit bounds in bytes the content of a file from before.
	FileLimit = 256 << 10
	// mostEntries bounds each list in it.
	mostEntries = 512
)

// ErrRecord means that a record is damaged or somebody else's.
var ErrRecord = errors.New("not a record of repairs")

// Record is what repairs changed on this machine, kept so that it can be named and
// undone. It holds no secrets.
type Record struct {
	APIVersion string     `json:"apiVersion"`
	Kind       string     `json:"kind"`
	Repairs    []Repaired `json:"repairs"`

	file    string
	version string
	now     func() time.Time
}

// State is how far a repair came.
type State string

// The states. Started is also what remains of one that was cut off.
const (
	Started State = "started"
	Done    State = "done"
	Failed  State = "failed"
)

// Repaired is one repair with all that it changed, over all runs.
type Repaired struct {
	Name     string   `json:"name"`
	Title    string   `json:"title"`
	Findings []string `json:"findings,omitempty"`
	State    State    `json:"state"`
	// Version is llmbox's at the last run.
	Version string    `json:"version"`
	First   time.Time `json:"first"`
	Last    time.Time `json:"last"`
	Undo    []string  `json:"undo,omitempty"`
	// Commands are those that were run, as they would be typed.
	Commands []string  `json:"commands,omitempty"`
	Files    []File    `json:"files,omitempty"`
	Packages []Package `json:"packages,omitempty"`
	Settings []Changed `json:"settings,omitempty"`
	Error    string    `json:"error,omitempty"`
}

// File is a file or link that was written.
type File struct {
	Path string `json:"path"`
	// Before is how it was before llmbox first wrote it.
	Before Before `json:"before"`
	// SHA256 is of what llmbox wrote last; empty for a link and for a file that
	// another program wrote.
	SHA256 string `json:"sha256,omitempty"`
}

// The states of a path before it was written.
const (
	BeforeAbsent = "absent"
	BeforeFile   = "file"
	BeforeLink   = "link"
)

// Before is what stood at a path.
type Before struct {
	State   string      `json:"state"`
	Mode    fs.FileMode `json:"mode,omitempty"`
	Content []byte      `json:"content,omitempty"`
	Target  string      `json:"target,omitempty"`
}

// Package is a package that came or was brought up to date. Before is empty where it
// was not there.
type Package struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	Before  string `json:"before,omitempty"`
}

// Changed is a kernel setting with its value from before.
type Changed struct {
	Key    string `json:"key"`
	Value  string `json:"value"`
	Before string `json:"before,omitempty"`
}

// Open reads the record of a machine, or begins one where there is none. One
// that can't be read is an error and is left as it is. Version is llmbox's own.
func Open(file, version string) (*Record, error) {
	r := &Record{APIVersion: recordVersion, Kind: recordKind}
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0) // #nosec G304 -- the caller's own record
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("opening the record of repairs: %w", err)
	default:
		r, err = Read(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, fmt.Errorf("opening %s: %w", file, err)
		}
	}
	r.file, r.version, r.now = file, version, time.Now
	return r, nil
}

// Read reads a record strictly: unknown fields, anything behind it, and
// whatever llmbox would not have written are errors.
func Read(from io.Reader) (*Record, error) {
	data, err := io.ReadAll(io.LimitReader(from, recordLimit+1))
	if err != nil {
		return nil, fmt.Errorf("reading the record of repairs: %w", err)
	}
	if len(data) > recordLimit {
		return nil, fmt.Errorf("reading the record of repairs: %w: more than %d bytes", ErrRecord, recordLimit)
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	var r Record
	if err := decoder.Decode(&r); err != nil {
		return nil, fmt.Errorf("reading the record of repairs: %w: %w", ErrRecord, err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("reading the record of repairs: %w: something follows it", ErrRecord)
	}
	if why := r.wrong(); why != "" {
		return nil, fmt.Errorf("reading the record of repairs: %w: %s", ErrRecord, why)
	}
	return &r, nil
}

// wrong says what llmbox would not have written.
func (r *Record) wrong() string {
	if r.APIVersion != recordVersion || r.Kind != recordKind {
		return fmt.Sprintf("%q %q", r.APIVersion, r.Kind)
	}
	if len(r.Repairs) > mostEntries {
		return "too many repairs"
	}
	names := map[string]bool{}
	for _, d := range r.Repairs {
		switch {
		case !word(d.Name):
			return fmt.Sprintf("%q is no name of a repair", d.Name)
		case names[d.Name]:
			return d.Name + " is there twice"
		case d.State != Started && d.State != Done && d.State != Failed:
			return fmt.Sprintf("%s is in state %q", d.Name, d.State)
		case max(len(d.Findings), len(d.Undo), len(d.Commands), len(d.Files), len(d.Packages), len(d.Settings)) > mostEntries:
			return d.Name + " has too many entries"
		}
		names[d.Name] = true
		for _, f := range d.Files {
			if why := f.wrong(); why != "" {
				return d.Name + ": " + why
			}
		}
		for _, q := range d.Packages {
			if !word(q.Name) {
				return fmt.Sprintf("%s: %q is no name of a package", d.Name, q.Name)
			}
		}
		for _, s := range d.Settings {
			if !word(s.Key) {
				return fmt.Sprintf("%s: %q is no kernel setting", d.Name, s.Key)
			}
		}
	}
	return ""
}

func (f File) wrong() string {
	if !path.IsAbs(f.Path) || path.Clean(f.Path) != f.Path || !utf8.ValidString(f.Path) || strings.ContainsRune(f.Path, 0) {
		return fmt.Sprintf("%q is no clean absolute path", f.Path)
	}
	b := f.Before
	switch {
	case b.State == BeforeAbsent && b.Mode == 0 && b.Content == nil && b.Target == "":
	case b.State == BeforeFile && b.Mode == b.Mode.Perm() && b.Target == "" && len(b.Content) <= FileLimit:
	case b.State == BeforeLink && b.Mode == 0 && b.Content == nil && b.Target != "":
	default:
		return f.Path + " has no clear state from before"
	}
	return ""
}

// word says whether a name is of the characters that names of repairs, packages and
// settings have.
func word(s string) bool {
	if s == "" || len(s) > 256 {
		return false
	}
	return !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune(".-_+:/", r)
	})
}

// Begin finds or makes the entry of a repair that is about to start.
func (r *Record) Begin(name, title string, findings, undo []string) *Repaired {
	i := slices.IndexFunc(r.Repairs, func(d Repaired) bool { return d.Name == name })
	if i < 0 {
		r.Repairs = append(r.Repairs, Repaired{Name: name, First: r.now().UTC().Truncate(time.Second)})
		i = len(r.Repairs) - 1
	}
	d := &r.Repairs[i]
	d.Title, d.State, d.Version, d.Error = title, Started, r.version, ""
	d.Last = r.now().UTC().Truncate(time.Second)
	d.Findings = union(d.Findings, findings)
	d.Undo = union(d.Undo, undo)
	return d
}

func union(a, b []string) []string {
	for _, s := range b {
		if !slices.Contains(a, s) && len(a) < mostEntries {
			a = append(a, s)
		}
	}
	return a
}

// Ran notes a command that is about to be run.
func (d *Repaired) Ran(command string) { d.Commands = union(d.Commands, []string{command}) }

// Wrote notes a file that is about to be written. What stood there before the first
// time stays what stood there before.
func (d *Repaired) Wrote(name string, before Before, sum string) {
	for i := range d.Files {
		if d.Files[i].Path == name {
			d.Files[i].SHA256 = sum
			return
		}
	}
	d.Files = append(d.Files, File{Path: name, Before: before, SHA256: sum})
}

// Installed notes a package that came or was brought up to date.
func (d *Repaired) Installed(name, version, before string) {
	for i := range d.Packages {
		if d.Packages[i].Name == name {
			d.Packages[i].Version = version
			return
		}
	}
	d.Packages = append(d.Packages, Package{Name: name, Version: version, Before: before})
}

// Set notes a kernel setting that is about to change.
func (d *Repaired) Set(key, value, before string) {
	for i := range d.Settings {
		if d.Settings[i].Key == key {
			d.Settings[i].Value = value
			return
		}
	}
	d.Settings = append(d.Settings, Changed{Key: key, Value: value, Before: before})
}

// Save writes the record for root alone, all at once.
func (r *Record) Save() (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("writing the record of repairs: %w", err)
		}
	}()
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	dir := filepath.Dir(r.file)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	// CreateTemp makes it 0600.
	file, err := os.CreateTemp(dir, ".repairs-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = file.Close()
			_ = os.Remove(file.Name())
		}
	}()
	if _, err = file.Write(append(data, '\n')); err != nil {
		return err
	}
	if err = file.Sync(); err != nil {
		return err
	}
	if err = file.Close(); err != nil {
		return err
	}
	if err = os.Rename(file.Name(), r.file); err != nil {
		return err
	}
	return SyncDir(dir)
}

// SyncDir makes a rename in a directory last.
func SyncDir(dir string) error {
	d, err := os.Open(dir) // #nosec G304 -- the directory of a file just written
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
