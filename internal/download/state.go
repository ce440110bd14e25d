package download

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
)

const (
	stateVersion = 1
	// stateBlock is what disks write at once; the second line begins a new one, so
	// that overwriting it can't harm the first.
	stateBlock = 4 << 10
	// stateLimit bounds what is read of a state file.
	stateLimit = 1 << 20
)

// state is what is known of a part file.
type state struct {
	Version int           `json:"version"`
	Size    int64         `json:"size"` // -1: not known
	Digest  string        `json:"digest,omitempty"`
	Sources []sourceState `json:"sources,omitempty"`
	Synced  spans         `json:"synced"`
	handed  spans         // to the kernel, in this boot
}

// sourceState is a URL without its query, and the file's validator there.
type sourceState struct {
	URL string `json:"url"`
	validator
}

// validator tells whether two answers are of the same file.
type validator struct {
	ETag     string `json:"etag,omitempty"`
	Modified string `json:"modified,omitempty"`
}

func (v validator) known() bool { return v != validator{} }

// strong validators can be used for If-Range.
func (v validator) condition() string {
	if v.ETag != "" && !strings.HasPrefix(v.ETag, "W/") {
		return v.ETag
	}
	if v.ETag == "" {
		return v.Modified
	}
	return ""
}

// differs compares what both know.
func (v validator) differs(w validator) bool {
	if v.ETag != "" && w.ETag != "" {
		return v.ETag != w.ETag
	}
	return v.Modified != "" && w.Modified != "" && v.Modified != w.Modified
}

func (v validator) String() string {
	if v.ETag != "" {
		return "ETag " + v.ETag
	}
	return "Last-Modified " + v.Modified
}

// recent is the second line.
type recent struct {
	Boot   string `json:"boot"`
	Handed spans  `json:"handed"`
}

// trusted are the bytes of the part file that can be relied on.
func (s state) trusted() spans {
	out := append(spans(nil), s.Synced...)
	for _, x := range s.handed {
		out = out.add(x)
	}
	return out
}

var errState = errors.New("not a state of a download")

// parseState reads a state file; what was handed to the kernel counts in the same boot.
func parseState(raw []byte, boot string) (state, error) {
	first, second, _ := bytes.Cut(raw, []byte{'\n'})
	var s state
	if err := unseal(first, &s); err != nil {
		return state{}, err
	}
	if s.Version != stateVersion || s.Size < -1 || !s.Synced.valid(s.Size) {
		return state{}, fmt.Errorf("%w: version %d, size %d", errState, s.Version, s.Size)
	}
	// A torn second line is what a crash of the machine leaves.
	second, _, _ = bytes.Cut(second, []byte{'\n'})
	var r recent
	if err := unseal(second, &r); err == nil && boot != "" && r.Boot == boot && r.Handed.valid(s.Size) {
		s.handed = r.Handed
	}
	return s, nil
}

// unseal reads a line CRC JSON.
func unseal(line []byte, into any) error {
	sum, text, ok := bytes.Cut(bytes.TrimRight(line, " "), []byte{' '})
	want, err := strconv.ParseUint(string(sum), 16, 32)
	if !ok || err != nil || len(sum) != 8 || uint64(crc32.ChecksumIEEE(text)) != want {
		return fmt.Errorf("%w: its checksum is wrong", errState)
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("%w: %w", errState, err)
	}
	return nil
}

func seal(value any) ([]byte, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "%08x %s", crc32.ChecksumIEEE(text), text), nil
}

// line pads a sealed line to whole blocks.
func line(sealed []byte) []byte {
	sealed = append(sealed, bytes.Repeat([]byte{' '}, stateBlock-1-len(sealed)%stateBlock)...)
	return append(sealed, '\n')
}

// keeper writes the state file.
type keeper struct {
	dir        *os.Root
	name, boot string

	mu   sync.Mutex
	file *os.File
	at   int64 // where the second line begins
	long int   // what it had at most
	// The newest that was noted.
	handed spans
	seen   uint64
}

// load returns the state that is there; none is not an error.
func (k *keeper) load() (state, error) {
	file, err := k.dir.Open(k.name)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return state{}, errState
		}
		return state{}, err
	}
	defer func() { _ = file.Close() }()
	raw, err := io.ReadAll(io.LimitReader(file, stateLimit))
	if err != nil {
		return state{}, err
	}
	return parseState(raw, k.boot)
}

// save puts a new state file in place. What it names as synced must be on disk.
func (k *keeper) save(s state, handed spans, seq uint64) (err error) {
	s.Version = stateVersion
	sealed, err := seal(s)
	if err != nil {
		return err
	}
	first := line(sealed)
	temp := k.name + ".new"
	if err := remove(k.dir, temp); err != nil {
		return err
	}
	file, err := k.dir.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = file.Close()
			_ = k.dir.Remove(temp)
		}
	}()
	if _, err = file.Write(first); err != nil {
		return err
	}
	if err = file.Sync(); err != nil {
		return err
	}
	// Until here, the other goroutine goes on noting in the old file.
	k.mu.Lock()
	defer k.mu.Unlock()
	old := k.file
	if old != nil && seq < k.seen {
		handed, seq = k.handed, k.seen
	}
	at, long := k.at, k.long
	k.file, k.at, k.long = file, int64(len(first)), 0
	if err = k.write(handed, seq); err == nil {
		err = k.dir.Rename(temp, k.name)
	}
	if err != nil {
		k.file, k.at, k.long = old, at, long
		return err
	}
	if old != nil {
		_ = old.Close()
	}
	return nil
}

// note says what was handed to the kernel.
func (k *keeper) note(handed spans, seq uint64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.file == nil || seq < k.seen {
		return nil
	}
	return k.write(handed, seq)
}

func (k *keeper) write(handed spans, seq uint64) error {
	if k.boot == "" {
		return nil
	}
	second, err := seal(recent{k.boot, handed})
	if err != nil {
		return err
	}
	k.long, k.handed, k.seen = max(k.long, len(second)), handed, seq
	second = append(second, bytes.Repeat([]byte{' '}, k.long-len(second))...)
	_, err = k.file.WriteAt(append(second, '\n'), k.at)
	return err
}

// close forgets the file, and removes it where it is not needed any more.
func (k *keeper) close(needed bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	var err error
	if k.file != nil {
		err = k.file.Close()
		k.file, k.handed, k.seen = nil, nil, 0
	}
	if needed {
		return err
	}
	return errors.Join(err, remove(k.dir, k.name), remove(k.dir, k.name+".new"))
}

func remove(dir *os.Root, name string) error {
	if err := dir.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// bootID names this boot; empty where nobody knows.
func bootID() string {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(raw))
}
