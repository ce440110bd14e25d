package config

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// FuzzParse holds that no input makes the reader panic, that every refusal says
// where and why, and that what is accepted survives being recorded.
func FuzzParse(f *testing.F) {
	for _, pattern := range []string{"testdata/parse/*.yaml", "testdata/validate/*.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			f.Fatal(err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		layer, err := Parse("f.yaml", data)
		if err != nil {
			all := Problems(err)
			if len(all) == 0 {
				t.Fatalf("%T without a problem: %v", err, err)
			}
			for _, e := range all {
				if e.Place == "" || e.Problem == "" {
					t.Fatalf("not whole: %+v", e)
				}
				if looksLikeSecret(e.Error()) {
					t.Fatalf("quotes a secret: %v", e)
				}
			}
			return
		}
		box, sources, err := Resolve(layer, Defaults())
		if err != nil {
			t.Fatalf("accepted but does not settle: %v", err)
		}
		// Any verdict will do; it must be reached.
		_ = Validate(box, sources, Known{Components: []string{"keda"}})
		record, err := Record(sources)
		if err != nil {
			t.Fatalf("recording: %v", err)
		}
		recorded, err := ParseRecorded("record", record)
		if err != nil {
			t.Fatalf("the record can't be read: %v\n%s", err, record)
		}
		again, sources2, err := Resolve(recorded, Defaults())
		if err != nil {
			t.Fatal(err)
		}
		record2, err := Record(sources2)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(record, record2) {
			t.Fatalf("recording twice differs:\n%s\n%s", record, record2)
		}
		again.K3s.BinaryPath, again.Secrets, again.APIVersion, again.Kind = box.K3s.BinaryPath, box.Secrets, box.APIVersion, box.Kind
		if a, b := fmt.Sprintf("%#v", box), fmt.Sprintf("%#v", again); a != b {
			t.Fatalf("recorded differently:\n%s\n%s\n%s", a, b, record)
		}
	})
}
