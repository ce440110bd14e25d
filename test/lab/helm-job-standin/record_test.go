package main

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"io"
	"testing"
)

func pack(t *testing.T, raw string) []byte {
	t.Helper()
	var zipped bytes.Buffer
	w := gzip.NewWriter(&zipped)
	if _, err := io.WriteString(w, raw); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return []byte(base64.StdEncoding.EncodeToString(zipped.Bytes()))
}

// A record comes back with the other status and everything else, numbers included.
func TestWithStatus(t *testing.T) {
	changed, err := withStatus(pack(t, `{"name":"thing","version":12345678901234567890,"info":{"status":"pending-install","description":"<under way>"},"new":{"a":[1,2]}}`), "failed")
	if err != nil {
		t.Fatal(err)
	}
	packed, err := base64.StdEncoding.DecodeString(string(changed))
	if err != nil {
		t.Fatal(err)
	}
	r, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	var back struct {
		Name    string
		Version json.Number
		Info    struct{ Status, Description string }
		New     struct{ A []int }
	}
	if err := json.NewDecoder(r).Decode(&back); err != nil {
		t.Fatal(err)
	}
	if back.Name != "thing" || back.Version != "12345678901234567890" || back.Info.Status != "failed" ||
		back.Info.Description != "<under way>" || len(back.New.A) != 2 {
		t.Errorf("it came back as %+v", back)
	}
	for _, broken := range []string{"?", "YWJj", "", string(pack(t, "{}"))} {
		if _, err := withStatus([]byte(broken), "failed"); err == nil {
			t.Errorf("%q passed for a record", broken)
		}
	}
}
