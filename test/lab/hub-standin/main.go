// Command hub-standin takes the place of the Hugging Face hub on a machine without a
// way out: it lists one model's files and hands them out. The weights are a few
// zero bytes; nothing could be served with them.
package main

import (
	"bytes"
	"crypto/sha1" // #nosec G505 -- git names its blobs so
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net/http"
	"strings"
	"time"
)

type file struct {
	Name   string `json:"rfilename"`
	Size   int    `json:"size"`
	BlobID string `json:"blobId"`
	LFS    *lfs   `json:"lfs,omitempty"`

	content []byte
}

type lfs struct {
	SHA256 string `json:"sha256"`
	Size   int    `json:"size"`
}

func main() {
	listen := flag.String("listen", "127.0.0.1:8500", "`address` to listen on")
	model := flag.String("model", "", "the one `model` that is offered, such as Qwen/Qwen3-0.6B")
	weights := flag.Int("weights-bytes", 1<<20, "size of the file of weights")
	flag.Parse()
	// A commit that no repository has: forty zeros but for the end.
	const commit = "0000000000000000000000000000000000005711"
	files := []file{
		text("config.json", `{"architectures":["StandInForCausalLM"],"model_type":"stand-in","max_position_embeddings":8192}`),
		text("tokenizer_config.json", `{"model_max_length":8192}`),
		large("model.safetensors", make([]byte, *weights)),
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/models/", func(w http.ResponseWriter, r *http.Request) {
		rest := strings.TrimPrefix(r.URL.Path, "/api/models/"+*model)
		if rest != "" && !strings.HasPrefix(rest, "/revision/") {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"sha": commit, "siblings": files})
	})
	mux.HandleFunc("GET /", func(w http.ResponseWriter, r *http.Request) {
		name, ok := strings.CutPrefix(r.URL.Path, "/"+*model+"/resolve/"+commit+"/")
		for _, f := range files {
			if ok && f.Name == name {
				w.Header().Set("ETag", `"`+f.blob()+`"`)
				w.Header().Set("X-Repo-Commit", commit)
				http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(f.content))
				return
			}
		}
		http.NotFound(w, r)
	})
	server := &http.Server{Addr: *listen, Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	log.Fatal(server.ListenAndServe())
}

func (f file) blob() string {
	if f.LFS != nil {
		return f.LFS.SHA256
	}
	return f.BlobID
}

func text(name, content string) file {
	h := sha1.New() // #nosec G401 -- git names its blobs so
	_, _ = fmt.Fprintf(h, "blob %d\x00%s", len(content), content)
	return file{Name: name, Size: len(content), BlobID: hex.EncodeToString(h.Sum(nil)), content: []byte(content)}
}

func large(name string, content []byte) file {
	f := text(name, string(content))
	sum := sha256.Sum256(content)
	f.LFS = &lfs{SHA256: hex.EncodeToString(sum[:]), Size: len(content)}
	return f
}
