// Benchdownload downloads the same file by llmbox's downloader, by curl and by aria2c,
// from a server on this machine to the same disk, in turn. llmbox checks the SHA-256 and
// syncs the file before it is done, so the others are followed by sha256sum and sync.
//
// It has two settings: one stream at full speed, and sixteen connections of which each
// is capped, with a delay before each answer and once more for a new connection. Delay
// and cap are made by the server; a real link has lost packets and slow starts besides.
package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/time/rate"

	"github.com/llmbox-dev/llmbox/internal/download"
)

const (
	manyConnections = 16
	mib             = 1 << 20
)

type setting struct {
	Name        string `json:"name"`
	Connections int    `json:"connections"`
	DelayMillis int64  `json:"delay_ms"`
	// CapBytes is what one connection brings at most in a second; 0: no cap.
	CapBytes int64 `json:"cap_bytes_per_second"`
}

// run is one download, verified and synced.
type run struct {
	Setting      string  `json:"setting"`
	Program      string  `json:"program"`
	WallSeconds  float64 `json:"wall_seconds"`
	CPUSeconds   float64 `json:"cpu_seconds"`
	MaxRSSBytes  int64   `json:"max_rss_bytes"`
	BytesASecond float64 `json:"bytes_per_second"`
}

type report struct {
	Time      string    `json:"time"`
	SizeBytes int64     `json:"size_bytes"`
	Settings  []setting `json:"settings"`
	Runs      []run     `json:"runs"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := bench(ctx, os.Args[1:]); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "benchdownload:", err)
		stop()
		os.Exit(1)
	}
}

func bench(ctx context.Context, args []string) error {
	if len(args) > 0 {
		switch args[0] {
		case "serve":
			return serve(ctx, args[1:])
		case "fetch":
			return fetch(ctx, args[1:])
		}
	}
	flags := flag.NewFlagSet("benchdownload", flag.ContinueOnError)
	size := flags.Int64("mib", 1024, "size of the file in MiB")
	rounds := flags.Int("rounds", 5, "how often each program downloads it")
	dir := flags.String("dir", os.TempDir(), "where the file goes")
	capMiB := flags.Int64("cap", 12, "cap of one connection in MiB a second, in the second setting")
	delay := flags.Duration("delay", 100*time.Millisecond, "delay of an answer, in the second setting")
	out := flags.String("json", "", "file for the figures")
	if err := flags.Parse(args); err != nil {
		return err
	}
	for _, program := range []string{"curl", "aria2c", "sha256sum", "sync"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%w (Debian: apt-get install curl aria2 coreutils)", err)
		}
	}
	base, err := os.MkdirTemp(*dir, "benchdownload-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(base) }()
	source := filepath.Join(base, "source")
	sum, err := fill(source, *size*mib)
	if err != nil {
		return err
	}
	r := report{Time: time.Now().UTC().Format(time.RFC3339), SizeBytes: *size * mib, Settings: []setting{
		{Name: "one stream", Connections: 1},
		{Name: "delay and cap", Connections: manyConnections, DelayMillis: delay.Milliseconds(), CapBytes: *capMiB * mib},
	}}
	for _, s := range r.Settings {
		runs, err := measure(ctx, s, source, sum, *rounds)
		if err != nil {
			return err
		}
		r.Runs = append(r.Runs, runs...)
		tell(os.Stdout, s, runs)
	}
	if *out == "" {
		return nil
	}
	raw, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(*out, append(raw, '\n'), 0o600)
}

// fill makes the file and leaves it in the page cache.
func fill(path string, size int64) (sum string, err error) {
	file, err := os.Create(path) // #nosec G304 -- in a directory of our own
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	h := sha256.New()
	noise := rand.NewChaCha8([32]byte{1})
	if _, err := io.CopyN(io.MultiWriter(file, h), noise, size); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), file.Sync()
}

func measure(ctx context.Context, s setting, source, sum string, rounds int) (runs []run, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	// A process of its own, so that its work is nobody's CPU time.
	server := exec.CommandContext(ctx, self, "serve", source, strconv.FormatInt(s.DelayMillis, 10), strconv.FormatInt(s.CapBytes, 10)) // #nosec G204 -- this program
	server.Stderr = os.Stderr
	address, err := server.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := server.Start(); err != nil {
		return nil, err
	}
	defer func() { _ = server.Process.Kill(); _ = server.Wait() }()
	var url string
	if _, err := fmt.Fscanln(address, &url); err != nil {
		return nil, fmt.Errorf("starting the server: %w", err)
	}
	info, err := os.Stat(source)
	if err != nil {
		return nil, err
	}
	target := filepath.Join(filepath.Dir(source), "target")
	connections := strconv.Itoa(s.Connections)
	verified := [][]string{{"sha256sum", target}, {"sync", target}}
	programs := []struct {
		name     string
		commands [][]string
	}{
		{"llmbox", [][]string{{self, "fetch", url, target, sum, connections}}},
		{"curl", append([][]string{{"curl", "--silent", "--fail", "--output", target, url}}, verified...)},
		{"aria2c", append([][]string{{"aria2c", "--quiet", "--allow-overwrite=true", "--file-allocation=falloc",
			"--max-connection-per-server=" + connections, "--split=" + connections, "--min-split-size=1M",
			"--dir=" + filepath.Dir(target), "--out=" + filepath.Base(target), url}}, verified...)},
	}
	for round := range rounds {
		for i := range programs {
			p := programs[(i+round)%len(programs)] // nobody is always the first
			if p.name == "curl" && s.Connections > 1 {
				continue // it has one connection a file
			}
			one, err := timed(ctx, p.commands, sum)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.name, err)
			}
			one.Setting, one.Program = s.Name, p.name
			one.BytesASecond = float64(info.Size()) / one.WallSeconds
			runs = append(runs, one)
			if err := os.Remove(target); err != nil {
				return nil, err
			}
		}
	}
	return runs, nil
}

// timed runs commands in a row and adds up what they took.
func timed(ctx context.Context, commands [][]string, sum string) (run, error) {
	var r run
	began := time.Now()
	for _, args := range commands {
		cmd := exec.CommandContext(ctx, args[0], args[1:]...) // #nosec G204 -- the programs to compare
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return run{}, fmt.Errorf("%s: %w", filepath.Base(args[0]), err)
		}
		if args[0] == "sha256sum" && (len(out) < len(sum) || string(out[:len(sum)]) != sum) {
			return run{}, errors.New("the wrong file")
		}
		r.CPUSeconds += (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
		if usage, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
			r.MaxRSSBytes = max(r.MaxRSSBytes, usage.Maxrss<<10)
		}
	}
	r.WallSeconds = time.Since(began).Seconds()
	return r, nil
}

// tell prints medians, and how near llmbox is to the better one of the others.
func tell(w io.Writer, s setting, runs []run) {
	_, _ = fmt.Fprintf(w, "%s (connections %d, delay %d ms, cap %d MiB/s)\n", s.Name, s.Connections, s.DelayMillis, s.CapBytes/mib)
	wall := map[string]float64{}
	for _, program := range []string{"llmbox", "curl", "aria2c"} {
		var mine []run
		for _, r := range runs {
			if r.Program == program {
				mine = append(mine, r)
			}
		}
		if len(mine) == 0 {
			continue
		}
		median := func(of func(run) float64) float64 {
			slices.SortFunc(mine, func(a, b run) int { return cmp.Compare(of(a), of(b)) })
			return of(mine[len(mine)/2])
		}
		wall[program] = median(func(r run) float64 { return r.WallSeconds })
		size := mine[0].BytesASecond * mine[0].WallSeconds
		_, _ = fmt.Fprintf(w, "  %-8s %7.2f s  %7.1f MB/s  CPU %5.2f s/GB  memory %5.1f MB\n", program, wall[program], size/wall[program]/1e6,
			median(func(r run) float64 { return r.CPUSeconds })/size*1e9, median(func(r run) float64 { return float64(r.MaxRSSBytes) })/1e6)
	}
	best := wall["aria2c"]
	if curl, ok := wall["curl"]; ok {
		best = min(best, curl)
	}
	_, _ = fmt.Fprintf(w, "  llmbox is at %.2f of the best of the others\n", best/wall["llmbox"])
}

// fetch is llmbox's side, in a process of its own.
func fetch(ctx context.Context, args []string) error {
	if len(args) != 4 {
		return errors.New("usage: fetch URL TARGET SHA256 CONNECTIONS")
	}
	connections, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	client, err := download.New(download.Options{Connections: connections})
	if err != nil {
		return err
	}
	_, err = client.Fetch(ctx, download.File{URLs: args[:1], Path: args[1], Digest: download.SHA256(args[2])})
	return err
}

// serve offers a file until it is killed, and prints where.
func serve(ctx context.Context, args []string) error {
	if len(args) != 3 {
		return errors.New("usage: serve FILE DELAY_MS CAP_BYTES")
	}
	delay, err := strconv.ParseInt(args[1], 10, 64)
	if err != nil {
		return err
	}
	limit, err := strconv.ParseInt(args[2], 10, 64)
	if err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	if _, err := fmt.Printf("http://%s/file\n", listener.Addr()); err != nil {
		return err
	}
	wait := time.Duration(delay) * time.Millisecond
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(wait)
		w.Header().Set("ETag", `"bench"`)
		http.ServeFile(w, r, args[0])
	})}
	if limit > 0 {
		listener = capped{listener, limit, wait}
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	return server.Serve(listener)
}

// capped makes connections that are slow.
type capped struct {
	net.Listener
	limit int64
	delay time.Duration
}

func (c capped) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &cappedConn{Conn: conn, limiter: rate.NewLimiter(rate.Limit(c.limit), 64<<10), delay: c.delay}, nil
}

type cappedConn struct {
	net.Conn
	limiter *rate.Limiter
	delay   time.Duration // before the first byte
}

func (c *cappedConn) Read(p []byte) (int, error) {
	time.Sleep(c.delay)
	c.delay = 0
	return c.Conn.Read(p)
}

func (c *cappedConn) Write(p []byte) (int, error) {
	written := 0
	for written < len(p) {
		n := min(len(p)-written, 64<<10)
		if err := c.limiter.WaitN(context.Background(), n); err != nil {
			return written, err
		}
		n, err := c.Conn.Write(p[written : written+n])
		written += n
		if err != nil {
			return written, err
		}
	}
	return written, nil
}
