package k3s

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// The identity of the record.
const (
	recordAPIVersion = "llmbox.dev/v1alpha1"
	recordKind       = "K3s"
)

// ErrRecord means that the record is damaged or of a newer llmbox.
var ErrRecord = errors.New("not a record of k3s")

// Record is what llmbox knows about the k3s that it put on a machine: what is its
// own, so that it removes nothing else, and what k3s read when it last started, so
// that it restarts it only for a reason. It holds no secrets.
type Record struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Binary     Binary `json:"binary"`
	// Pending is a binary that is about to be put in place.
	Pending *Binary `json:"pending,omitempty"`
	// Adopted says that k3s was there before llmbox, which runs it and does not own it.
	Adopted  bool   `json:"adopted,omitempty"`
	Role     Role   `json:"role,omitempty"`
	DataDir  string `json:"dataDir,omitempty"`
	NodeName string `json:"nodeName,omitempty"`
	Init     Init   `json:"init,omitempty"`
	// Hook is run before each start.
	Hook []string `json:"hook,omitempty"`
	// Files are those that llmbox wrote, with the hash of what it wrote.
	Files map[string]string `json:"files,omitempty"`
	// Before are paths that were there before llmbox and stay when it goes.
	Before []string `json:"before,omitempty"`
	// Kernel are the settings that the kubelet changes, by their keys, as they were before
	// llmbox; Tables the tables of nftables ("family name") that were there, null where
	// nobody could tell.
	Kernel map[string]string `json:"kernel,omitempty"`
	Tables []string          `json:"tables"`
	// Started is what k3s read when llmbox last started it.
	Started *Started `json:"started,omitempty"`
	// First and Last are when llmbox first and last worked on this k3s.
	First time.Time `json:"first"`
	Last  time.Time `json:"last"`
}

// Binary is a k3s binary.
type Binary struct {
	Path    string `json:"path,omitempty"`
	Version string `json:"version,omitempty"`
	SHA256  string `json:"sha256,omitempty"`
	Source  Source `json:"source,omitempty"`
}

// Started is a process with what it read.
type Started struct {
	BootID string `json:"bootID"`
	PID    int    `json:"pid"`
	Start  uint64 `json:"start"`
	Inputs Inputs `json:"inputs"`
}

// owns says whether a binary with that hash is one that llmbox put there.
func (r *Record) owns(at, sum string) bool {
	if sum == "" || r.Adopted {
		return false
	}
	return r.Binary.Path == at && r.Binary.SHA256 == sum || r.Pending != nil && r.Pending.Path == at && r.Pending.SHA256 == sum
}

// Record reads the record; a machine without one has an empty one.
func (m *Machine) Record(ctx context.Context) (*Record, error) {
	data, present, err := m.read(ctx, m.recordFile())
	if err != nil {
		return nil, err
	}
	if !present {
		return &Record{APIVersion: recordAPIVersion, Kind: recordKind}, nil
	}
	var r Record
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("reading %s: %w: %w", m.recordFile(), ErrRecord, err)
	}
	if r.APIVersion != recordAPIVersion || r.Kind != recordKind {
		return nil, fmt.Errorf("reading %s: %w: it says %q, %q", m.recordFile(), ErrRecord, r.APIVersion, r.Kind)
	}
	return &r, nil
}

// Empty says whether llmbox has nothing to do with a k3s here.
func (r *Record) Empty() bool {
	return r.Binary == (Binary{}) && r.Pending == nil && !r.Adopted && len(r.Files) == 0 && r.Started == nil
}

func (m *Machine) save(ctx context.Context, r *Record) error {
	r.Last = time.Now().UTC().Truncate(time.Second)
	if r.First.IsZero() {
		r.First = r.Last
	}
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("writing the record: %w", err)
	}
	const mode = 0o600
	return m.write(ctx, m.recordFile(), mode, append(data, '\n'))
}

// clone is a copy to compare with later.
func (r *Record) clone() *Record {
	c := *r
	c.Files, c.Before = maps.Clone(r.Files), slices.Clone(r.Before)
	c.Kernel, c.Tables = maps.Clone(r.Kernel), slices.Clone(r.Tables)
	return &c
}

func (r *Record) wrote(name, sum string) {
	if r.Files == nil {
		r.Files = map[string]string{}
	}
	r.Files[name] = sum
}
