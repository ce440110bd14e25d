// Command vllm-sim takes the place of vLLM: the OpenAI routes, health and metrics of
// `vllm serve`, with loading, latency and queue that a table of numbers decides.
//
// It takes vLLM's arguments and ignores what has no meaning without a model. It loads
// no weights, needs no GPU and says nothing of how fast or how good a model is. Its
// answers are a fixed sentence, and say so.
//
// Environment (all optional), for tests:
//
//	VLLM_SIM_LOAD_SECONDS            from start until the server listens (default 2)
//	VLLM_SIM_PREFILL_SECONDS         until the first token (default 0.02)
//	VLLM_SIM_TOKEN_SECONDS           between tokens (default 0.005)
//	VLLM_SIM_MAX_RUNNING             requests at work, the rest waits (default: --max-num-seqs, or 16)
//	VLLM_SIM_NEEDS_WEIGHTS           "0": do not look for the model's snapshot in HF_HOME
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	log.SetFlags(log.LstdFlags | log.Lmicroseconds)
	o, err := parse(os.Args[1:], os.Getenv)
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
		err = run(ctx, o)
		stop()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "vllm-sim:", err)
		os.Exit(1)
	}
}

// options are what of vLLM's arguments and the environment matters here.
type options struct {
	model      string
	served     []string
	revision   string
	host       string
	port       int
	maxLen     int
	shutdown   time.Duration
	load       time.Duration
	prefill    time.Duration
	perToken   time.Duration
	maxRunning int
	drafts     bool   // speculative decoding is on
	weights    string // HF_HOME; empty: do not look
}

// parse reads `serve MODEL --flag value --flag=value …`.
func parse(args []string, env func(string) string) (options, error) {
	o := options{port: 8000, maxLen: 8192, maxRunning: 16}
	if len(args) == 0 || args[0] != "serve" {
		return o, fmt.Errorf("it knows only `serve`, not %q", args)
	}
	args = args[1:]
	for i := 0; i < len(args); i++ {
		name, value, inline := strings.Cut(args[i], "=")
		if !strings.HasPrefix(name, "--") {
			if o.model == "" {
				o.model = args[i]
			}
			continue
		}
		var values []string
		if inline {
			values = []string{value}
		} else {
			for i+1 < len(args) && !strings.HasPrefix(args[i+1], "--") {
				i++
				values = append(values, args[i])
			}
		}
		value = ""
		if len(values) > 0 {
			value = values[0]
		}
		var err error
		switch name {
		case "--model":
			o.model = value
		case "--served-model-name":
			o.served = values
		case "--revision":
			o.revision = value
		case "--host":
			o.host = value
		case "--port":
			o.port, err = strconv.Atoi(value)
		case "--max-model-len":
			o.maxLen, err = strconv.Atoi(value)
		case "--max-num-seqs":
			o.maxRunning, err = strconv.Atoi(value)
		case "--speculative-config":
			o.drafts = true
		case "--shutdown-timeout":
			o.shutdown, err = seconds(value)
		}
		if err != nil {
			return o, fmt.Errorf("argument %s: %w", name, err)
		}
	}
	if o.model == "" {
		return o, errors.New("no model is named")
	}
	if len(o.served) == 0 {
		o.served = []string{o.model}
	}
	o.load, o.prefill, o.perToken = 2*time.Second, 20*time.Millisecond, 5*time.Millisecond
	for name, to := range map[string]*time.Duration{
		"VLLM_SIM_LOAD_SECONDS": &o.load, "VLLM_SIM_PREFILL_SECONDS": &o.prefill, "VLLM_SIM_TOKEN_SECONDS": &o.perToken,
	} {
		if text := env(name); text != "" {
			d, err := seconds(text)
			if err != nil {
				return o, fmt.Errorf("%s: %w", name, err)
			}
			*to = d
		}
	}
	if text := env("VLLM_SIM_MAX_RUNNING"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return o, fmt.Errorf("VLLM_SIM_MAX_RUNNING: %q is not a number above 0", text)
		}
		o.maxRunning = n
	}
	if env("VLLM_SIM_NEEDS_WEIGHTS") != "0" && !strings.HasPrefix(o.model, "/") {
		o.weights = env("HF_HOME")
	}
	return o, nil
}

func seconds(text string) (time.Duration, error) {
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || f < 0 {
		return 0, fmt.Errorf("%q is not a number of seconds", text)
	}
	return time.Duration(f * float64(time.Second)), nil
}

func run(ctx context.Context, o options) error {
	log.Printf("vllm-sim, a stand-in for vLLM: model %s, served as %s", o.model, strings.Join(o.served, ", "))
	if err := findWeights(o); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(o.load):
	}
	e := newEngine(o)
	l, err := net.Listen("tcp", net.JoinHostPort(o.host, strconv.Itoa(o.port)))
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	server := &http.Server{Handler: e.routes(), ReadHeaderTimeout: 10 * time.Second}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(l) }()
	log.Printf("listening on %s", l.Addr())
	select {
	case err := <-failed:
		return fmt.Errorf("serving: %w", err)
	case <-ctx.Done():
	}
	// As vLLM: nobody new is let in, and what runs gets the time it was promised.
	running, waiting := e.load()
	log.Printf("told to end; %d running, %d waiting, %s to finish", running, waiting, o.shutdown)
	end, cancel := context.WithTimeout(context.Background(), o.shutdown)
	defer cancel()
	if err := server.Shutdown(end); err != nil {
		e.abort()
		log.Printf("requests aborted: %v", err)
		return server.Close()
	}
	log.Print("all requests ended")
	return nil
}

// findWeights looks for the model where the hub's library would: a reference that
// names a snapshot, and a file of weights in it that can be read.
func findWeights(o options) error {
	if o.weights == "" {
		return nil
	}
	repo := filepath.Join(o.weights, "hub", "models--"+strings.ReplaceAll(o.model, "/", "--"))
	revision := o.revision
	if revision == "" {
		revision = "main"
	}
	commit := revision
	if raw, err := os.ReadFile(filepath.Join(repo, "refs", revision)); err == nil { // #nosec G304 -- our own volume
		commit = strings.TrimSpace(string(raw))
	}
	files, err := filepath.Glob(filepath.Join(repo, "snapshots", commit, "*.safetensors"))
	if err != nil {
		return fmt.Errorf("looking for the weights: %w", err)
	}
	if len(files) == 0 {
		return fmt.Errorf("no weights of %s at %s below %s, and the hub is offline", o.model, revision, repo)
	}
	for _, f := range files {
		in, err := os.Open(f) // #nosec G304 -- our own volume
		if err != nil {
			return fmt.Errorf("reading the weights: %w", err)
		}
		if err := in.Close(); err != nil {
			return fmt.Errorf("reading the weights: %w", err)
		}
		log.Printf("weights: %s", f)
	}
	return nil
}
