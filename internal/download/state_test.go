package download

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestSpans(t *testing.T) {
	const size = 64
	random := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		var s spans
		var bits [size]bool
		for range random.IntN(12) {
			a, b := random.Int64N(size), random.Int64N(size+1)
			s = s.add(span{a, b})
			for i := a; i < b; i++ {
				bits[i] = true
			}
		}
		if !s.valid(size) {
			t.Fatalf("%v", s)
		}
		var covered [size]bool
		for _, x := range s {
			for i := x.start; i < x.end; i++ {
				covered[i] = true
			}
		}
		if covered != bits {
			t.Fatalf("%v is not %v", s, bits)
		}
		prefix := int64(slices.Index(bits[:], false))
		if prefix < 0 {
			prefix = size
		}
		var total int64
		for _, b := range bits {
			if b {
				total++
			}
		}
		if s.prefix() != prefix || s.total() != total {
			t.Fatalf("%v: prefix %d, total %d", s, s.prefix(), s.total())
		}
		gap, open := s.gap(size)
		if open != (total < size) {
			t.Fatalf("%v: gap %v, %v", s, gap, open)
		}
		if open {
			end := prefix
			for end < size && !bits[end] {
				end++
			}
			if gap != (span{prefix, end}) {
				t.Fatalf("%v: gap %v", s, gap)
			}
		}
	}
}

func newKeeper(t *testing.T, boot string) (*keeper, string) {
	t.Helper()
	path := t.TempDir()
	dir, err := os.OpenRoot(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dir.Close() })
	return &keeper{dir: dir, name: "state", boot: boot}, filepath.Join(path, "state")
}

func TestState(t *testing.T) {
	k, path := newKeeper(t, "this boot")
	if _, err := k.load(); !errors.Is(err, errState) {
		t.Fatal(err)
	}
	s := state{Size: 1000, Digest: "sha256:x", Sources: []sourceState{{URL: "https://host/x", validator: validator{ETag: `"a"`}}}, Synced: spans{{0, 100}}}
	steps := []struct {
		do   func() error
		want spans
	}{
		{func() error { return k.save(s, spans{{0, 150}}, 1) }, spans{{0, 150}}},
		{func() error { return k.note(spans{{0, 150}, {300, 400}, {500, 600}}, 2) }, spans{{0, 150}, {300, 400}, {500, 600}}},
		{func() error { return k.note(spans{{0, 700}}, 3) }, spans{{0, 700}}}, // shorter than what was there
		{func() error { return k.note(spans{{0, 650}}, 2) }, spans{{0, 700}}}, // late
		{func() error { return k.save(s, spans{{0, 600}}, 2) }, spans{{0, 700}}},
		{func() error { return k.save(s, spans{{0, 800}}, 4) }, spans{{0, 800}}},
	}
	for i, step := range steps {
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		got, err := k.load()
		if err != nil || !slices.Equal(got.trusted(), step.want) || got.Size != 1000 || got.Sources[0].ETag != `"a"` {
			t.Fatalf("step %d: %+v, %v", i, got, err)
		}
		other, err := parseStateFile(path, "another boot")
		if err != nil || !slices.Equal(other.trusted(), s.Synced) {
			t.Fatalf("step %d, after a boot: %+v, %v", i, other, err)
		}
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	begin := bytes.IndexByte(raw, '\n') + 1
	if begin%stateBlock != 0 {
		t.Errorf("the second line begins at %d", begin)
	}
	// Whatever a crash leaves of the second line, the first one holds.
	for n := begin; n < len(raw); n++ {
		got, err := parseState(raw[:n], "this boot")
		if err != nil || n < len(raw)-1 && !slices.Equal(got.trusted(), s.Synced) {
			t.Fatalf("cut at %d: %+v, %v", n, got, err)
		}
		torn := bytes.Clone(raw)
		torn[n] ^= 0x15
		if got, err := parseState(torn, "this boot"); err != nil || n < len(raw)-1 && len(got.handed) > 0 {
			t.Fatalf("torn at %d: %+v, %v", n, got, err)
		}
	}
	for n := range begin - 1 {
		torn := bytes.Clone(raw)
		torn[n] ^= 0x15
		if got, err := parseState(torn, "this boot"); err == nil {
			t.Fatalf("spoiled at %d: %+v", n, got)
		}
	}
	if err := k.close(false); err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) > 0 {
		t.Errorf("left %v (%v)", entries, err)
	}
}

// FuzzState: whatever is read, what it says can be relied on is within the file.
func FuzzState(f *testing.F) {
	add := func(s state, r recent) {
		one, err := seal(s)
		if err != nil {
			f.Fatal(err)
		}
		two, err := seal(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(append(append(line(one), two...), '\n'))
	}
	add(state{Version: 1, Size: 10, Synced: spans{{0, 5}}}, recent{"boot", spans{{0, 7}, {8, 10}}})
	add(state{Version: 1, Size: -1}, recent{"boot", spans{{0, 7}}})
	add(state{Version: 1, Size: 10, Synced: spans{{5, 4}}}, recent{})
	add(state{Version: 1, Size: 10, Synced: spans{{0, 11}}}, recent{})
	add(state{Version: 2}, recent{})
	f.Add([]byte("00000000 {}\n"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, raw []byte) {
		// The checksum of what is there, too, or nothing would come past it.
		variants := [][]byte{raw}
		if one, two, ok := bytes.Cut(raw, []byte{'\n'}); ok && len(one) > 9 && len(two) > 9 {
			variants = append(variants, slices.Concat(resealed(one), []byte{'\n'}, resealed(two), []byte{'\n'}))
		}
		for _, v := range variants {
			s, err := parseState(v, "boot")
			if err != nil {
				if !errors.Is(err, errState) {
					t.Errorf("%T: %v", err, err)
				}
				continue
			}
			if !s.trusted().valid(s.Size) {
				t.Errorf("%+v", s)
			}
		}
	})
}

func resealed(line []byte) []byte {
	text := bytes.TrimRight(line[9:], " \n")
	return fmt.Appendf(nil, "%08x %s", crc32.ChecksumIEEE(text), text)
}

func FuzzContentRange(f *testing.F) {
	for _, text := range []string{"bytes 0-9/10", "bytes 5-5/*", "bytes */7", "bytes 9-1/10", "", "bytes 0-9223372036854775807/9223372036854775807", "items 0-1/2", "bytes -1-2/3"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		start, end, total, ok := contentRange(text)
		if total < -1 || ok && (start < 0 || end <= start || total >= 0 && end > total) {
			t.Errorf("%q: %d %d %d", text, start, end, total)
		}
	})
}
