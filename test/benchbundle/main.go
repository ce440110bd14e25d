// Benchbundle makes a bundle by llmbox and an archive by `tar | zstd -T0` of the same
// data, in turn, and says how near llmbox comes. Both are synced before they are done.
// llmbox besides asks a registry what its images are, hashes everything that it packs,
// and looks whether what it has downloaded is still what it was; tar and zstd do not.
//
// The data is what a bundle holds: layers, that are compressed already (noise), weights
// (normally distributed numbers in bfloat16), and programs (this one). Everything is on
// the disk when the clock starts, as after a download.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/llmbox-dev/llmbox/internal/bundle"
	"github.com/llmbox-dev/llmbox/internal/download"
)

const (
	mib    = 1 << 20
	commit = "0123456789abcdef0123456789abcdef01234567"
	arch   = "amd64"
	// The shares of layers and weights in percent; programs are the rest.
	layerShare, weightShare = 45, 45
	imageCount, layerCount  = 4, 3
	weightCount             = 4
)

// job is what a child that makes a bundle is told.
type job struct {
	Registry string               `json:"registry"`
	Out      string               `json:"out"`
	Program  string               `json:"program"`
	K3s      string               `json:"k3s"`
	Work     string               `json:"work"`
	Images   []string             `json:"images"`
	Weights  []bundle.WeightsFile `json:"weights"`
}

// run is one archive.
type run struct {
	Program      string  `json:"program"`
	WallSeconds  float64 `json:"wall_seconds"`
	CPUSeconds   float64 `json:"cpu_seconds"`
	MaxRSSBytes  int64   `json:"max_rss_bytes"`
	ArchiveBytes int64   `json:"archive_bytes"`
}

type report struct {
	Time      string  `json:"time"`
	DataBytes int64   `json:"data_bytes"`
	Runs      []run   `json:"runs"`
	Speed     float64 `json:"speed_of_llmbox_over_tar_and_zstd"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := bench(ctx, os.Args[1:]); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "benchbundle:", err)
		stop()
		os.Exit(1)
	}
}

func bench(ctx context.Context, args []string) (err error) {
	if len(args) == 2 && args[0] == "create" {
		return create(ctx, args[1])
	}
	flags := flag.NewFlagSet("benchbundle", flag.ContinueOnError)
	size := flags.Int64("mib", 2048, "size of the data in MiB")
	rounds := flags.Int("rounds", 5, "how often each archive is made")
	dir := flags.String("dir", os.TempDir(), "where data and archives go")
	out := flags.String("json", "", "file for the figures")
	if err := flags.Parse(args); err != nil {
		return err
	}
	for _, program := range []string{"tar", "zstd", "sync"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%w (Debian: apt-get install tar zstd coreutils)", err)
		}
	}
	base, err := os.MkdirTemp(*dir, "benchbundle-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(base)) }()
	j, bytes, err := prepare(ctx, base, *size*mib)
	if err != nil {
		return err
	}
	r := report{Time: time.Now().UTC().Format(time.RFC3339), DataBytes: bytes}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	told := filepath.Join(base, "job.json")
	raw, err := json.Marshal(j)
	if err != nil {
		return err
	}
	if err := os.WriteFile(told, raw, 0o600); err != nil {
		return err
	}
	programs := []struct{ name, line string }{
		{"llmbox", `exec "$1" create "$2"`},
		{"tar|zstd", `set -o pipefail; tar -C "$3" -cf - . | zstd -q -f -T0 -o "$4" && sync "$4"`},
	}
	for round := range *rounds {
		for i := range programs {
			p := programs[(i+round)%len(programs)] // nobody is always the first
			one, err := timed(ctx, "bash", "-c", p.line, "bash", self, told, filepath.Join(base, "data"), j.Out)
			if err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
			info, err := os.Stat(j.Out)
			if err != nil {
				return err
			}
			one.Program, one.ArchiveBytes = p.name, info.Size()
			r.Runs = append(r.Runs, one)
			if p.name == "llmbox" && round == 0 {
				if err := verify(ctx, j.Out); err != nil {
					return err
				}
			}
			if err := os.Remove(j.Out); err != nil {
				return err
			}
		}
	}
	tell(os.Stdout, &r)
	if *out == "" {
		return nil
	}
	if raw, err = json.MarshalIndent(r, "", "  "); err != nil {
		return err
	}
	return os.WriteFile(*out, append(raw, '\n'), 0o600)
}

func timed(ctx context.Context, name string, args ...string) (run, error) {
	cmd := exec.CommandContext(ctx, name, args...) // #nosec G204 -- the programs to compare
	cmd.Stderr = os.Stderr
	began := time.Now()
	if err := cmd.Run(); err != nil {
		return run{}, err
	}
	r := run{WallSeconds: time.Since(began).Seconds(), CPUSeconds: (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()}
	if usage, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		r.MaxRSSBytes = usage.Maxrss << 10
	}
	return r, nil
}

// tell prints medians and the ratio of the speeds.
func tell(w io.Writer, r *report) {
	_, _ = fmt.Fprintf(w, "%.2f GB of layers, weights and programs\n", float64(r.DataBytes)/1e9)
	wall := map[string]float64{}
	for _, program := range []string{"llmbox", "tar|zstd"} {
		var mine []run
		for _, one := range r.Runs {
			if one.Program == program {
				mine = append(mine, one)
			}
		}
		slices.SortFunc(mine, func(a, b run) int { return cmp.Compare(a.WallSeconds, b.WallSeconds) })
		m := mine[len(mine)/2]
		wall[program] = m.WallSeconds
		_, _ = fmt.Fprintf(w, "  %-8s %7.2f s  %7.1f MB/s  CPU %6.2f s  memory %6.1f MB  archive %.1f %%\n", program, m.WallSeconds,
			float64(r.DataBytes)/m.WallSeconds/1e6, m.CPUSeconds, float64(m.MaxRSSBytes)/1e6, 100*float64(m.ArchiveBytes)/float64(r.DataBytes))
	}
	r.Speed = wall["tar|zstd"] / wall["llmbox"]
	_, _ = fmt.Fprintf(w, "  llmbox has %.2f of the speed of tar | zstd -T0\n", r.Speed)
}

func verify(ctx context.Context, name string) error {
	file, err := os.Open(name) // #nosec G304 -- in a directory of our own
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	reader, err := bundle.NewReader(file)
	if err != nil {
		return err
	}
	defer reader.Close()
	return reader.Each(ctx, nil, nil)
}

// create is llmbox's side, in a process of its own.
func create(ctx context.Context, told string) error {
	raw, err := os.ReadFile(told) // #nosec G304 -- in a directory of our own
	if err != nil {
		return err
	}
	var j job
	if err := json.Unmarshal(raw, &j); err != nil {
		return err
	}
	client, err := download.New(download.Options{AllowHTTP: true})
	if err != nil {
		return err
	}
	p := bundle.Parts{
		Version: "1.0.0", Architecture: arch, LLMBox: j.Program, K3s: j.K3s, K3sName: "k3s", K3sVersion: "v1.0.0", Work: j.Work,
		Model: &bundle.Model{Name: "org/model", Commit: commit, Listing: json.RawMessage(`{}`)}, Files: j.Weights,
	}
	for _, image := range j.Images {
		p.Images = append(p.Images, bundle.Wanted{Reference: image, Group: bundle.GroupFirst})
	}
	out, err := os.Create(j.Out)
	if err != nil {
		return err
	}
	_, _, err = bundle.Create(ctx, p, &bundle.Registries{
		Client: client, Architecture: arch, Mirrors: map[string][]string{"docker.io": {j.Registry}},
	}, out, nil)
	return errors.Join(err, out.Sync(), out.Close())
}

// prepare makes the data, the way a bundle finds it, and a registry that names it.
func prepare(ctx context.Context, base string, size int64) (job, int64, error) {
	data := filepath.Join(base, "data")
	j := job{
		Out: filepath.Join(base, "archive.zst"), Work: data,
		Program: filepath.Join(data, "programs", "llmbox"), K3s: filepath.Join(data, "programs", "k3s"),
	}
	for _, dir := range []string{"blobs", "programs", "weights"} {
		if err := os.MkdirAll(filepath.Join(data, dir), 0o700); err != nil {
			return job{}, 0, err
		}
	}
	var total int64
	source := rand.NewChaCha8([32]byte{3})
	documents := map[string][]byte{"/v2/": []byte("{}")}
	for i := range imageCount {
		name := fmt.Sprintf("org/image%d", i)
		var layers []descriptor
		for range layerCount {
			n := size * layerShare / 100 / imageCount / layerCount
			sum, err := keep(filepath.Join(data, "blobs"), io.LimitReader(source, n))
			if err != nil {
				return job{}, 0, err
			}
			total += n
			layers = append(layers, descriptor{"application/vnd.oci.image.layer.v1.tar+gzip", "sha256:" + sum, n})
		}
		config := []byte(`{"architecture":"` + arch + `","os":"linux","name":"` + name + `"}`)
		sum, err := keep(filepath.Join(data, "blobs"), bytes.NewReader(config))
		if err != nil {
			return job{}, 0, err
		}
		raw, err := json.Marshal(map[string]any{
			"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": layers,
			"config": descriptor{"application/vnd.oci.image.config.v1+json", "sha256:" + sum, int64(len(config))},
		})
		if err != nil {
			return job{}, 0, err
		}
		documents["/v2/"+name+"/manifests/1"] = raw
		j.Images = append(j.Images, "docker.io/"+name+":1")
	}
	for range weightCount {
		n := size * weightShare / 100 / weightCount
		sum, err := keep(filepath.Join(data, "weights"), io.LimitReader(&numbers{r: rand.New(source)}, n))
		if err != nil {
			return job{}, 0, err
		}
		total += n
		j.Weights = append(j.Weights, bundle.WeightsFile{At: filepath.Join(data, "weights", sum), Blob: sum})
	}
	for _, name := range []string{j.Program, j.K3s} {
		n := size * (100 - layerShare - weightShare) / 100 / 2
		if err := programs(name, n); err != nil {
			return job{}, 0, err
		}
		total += n
	}
	registry, err := serve(ctx, documents)
	j.Registry = registry
	return j, total, err
}

type descriptor struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
	Size      int64  `json:"size"`
}

// keep writes a file and gives it its SHA-256 as name.
func keep(dir string, from io.Reader) (sum string, err error) {
	file, err := os.CreateTemp(dir, "new-")
	if err != nil {
		return "", err
	}
	h := sha256.New()
	buffered := bufio.NewWriterSize(file, mib)
	_, err = io.Copy(io.MultiWriter(buffered, h), from)
	if err = errors.Join(err, buffered.Flush(), file.Sync(), file.Close()); err != nil {
		return "", err
	}
	sum = hex.EncodeToString(h.Sum(nil))
	return sum, os.Rename(file.Name(), filepath.Join(dir, sum))
}

// numbers are weights as models have them.
type numbers struct {
	r *rand.Rand
}

func (n *numbers) Read(p []byte) (int, error) {
	const deviation, half = 0.02, 16
	p = p[:max(len(p)&^1, min(len(p), 1))]
	if len(p) == 1 {
		p[0] = 0
		return 1, nil
	}
	for i := 0; i < len(p); i += 2 {
		binary.LittleEndian.PutUint16(p[i:], uint16(math.Float32bits(float32(n.r.NormFloat64()*deviation))>>half)) // #nosec G115 -- the upper half
	}
	return len(p), nil
}

// programs repeats this program, each time with another beginning so that no copy is
// within reach of the one before.
func programs(name string, size int64) (err error) {
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	file, err := os.Create(name) // #nosec G304 -- in a directory of our own
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Sync(), file.Close()) }()
	for size > 0 {
		n, err := file.Write(self[:min(int64(len(self)), size)])
		if err != nil {
			return err
		}
		size -= int64(n)
	}
	return nil
}

// serve answers for a registry until the context ends.
func serve(ctx context.Context, documents map[string][]byte) (string, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		content, ok := documents[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		if strings.Contains(r.URL.Path, "/manifests/") {
			w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
		}
		_, _ = w.Write(content)
	})}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	go func() { _ = server.Serve(listener) }()
	return "http://" + listener.Addr().String(), nil
}
