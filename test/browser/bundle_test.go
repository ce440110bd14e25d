package browser

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/test/browser/chromium"
)

// box is a box of which everything that comes from outside tries to get into the page.
func box(t *testing.T) string {
	t.Helper()
	const hostile = `<script>window.pwned=1</script><img src=x onerror=pwned=1>` + "\u202e" + `"'>{{.}}`
	dir := t.TempDir()
	for name, text := range map[string]string{
		"manifest.yaml":        "apiVersion: llmbox.dev/v1alpha1\nkind: Snapshot\ntime: \"2026-06-15T12:00:00Z\"\nversion: test\nroot: true\nunreadable: {\"host/etc/shadow\": permission denied}\n",
		"host/etc/hostname":    "gpu-box-1\n",
		"host/etc/os-release":  "ID=ubuntu\nPRETTY_NAME=\"Ubuntu 24.04 LTS <b>x</b>\"\n",
		"commands/dmesg.txt":   "exit=0\n[1.0] NVRM: Xid (PCI:0000:00:1e): 79, pid=1, name=x, GPU has fallen off the bus.\n",
		"gpu.json":             `{"schema":1,"source":"nvml","nvml":{"ending":"ok","elapsed_ms":12},"driver":"580.95.05","cuda":"13.0","devices":[{"index":0,"name":"NVIDIA A10 <script>window.pwned=1</script>","pci_bus":"0000:00:1e.0","memory":{"total_bytes":24152899584,"used_bytes":20000000000,"free_bytes":4152899584,"reserved_bytes":0},"processes":[{"pid":7,"name":"VLLM::EngineCore"}]}]}`,
		"cluster/events.json":  `{"items":[{"metadata":{"namespace":"llm","name":"a"},"involvedObject":{"kind":"Pod","namespace":"llm","name":"model-server-0123456789-abcde"},"type":"Warning","reason":"Failed","message":"<script>window.pwned=1</script> a_very_long_word_without_any_break_0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789","lastTimestamp":"2026-06-15T11:59:00Z","count":9}]}`,
		"logs/llm/p/vllm.log":  "torch.OutOfMemoryError: CUDA out of memory. " + hostile + "\n",
		"probes/endpoint.json": `{"url":"http://x","status":503,"with_key":true,"stage":"http","error":"<b>no</b>","elapsed_ms":1}`,
	} {
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// bundlePage has the product write a bundle and takes the page out of it.
func bundlePage(ctx context.Context, t *testing.T) string {
	t.Helper()
	bundle := filepath.Join(t.TempDir(), "bundle.tar.gz")
	argv := []string{"support-bundle", "--snapshot", box(t), "--file", bundle}
	cmd := exec.CommandContext(ctx, "go", append([]string{"run", "./cmd/llmbox"}, argv...)...)
	if binary := os.Getenv("LLMBOX"); binary != "" {
		cmd = exec.CommandContext(ctx, binary, argv...) // #nosec G204 -- the binary under test
	}
	cmd.Dir = filepath.Join("..", "..")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("writing the bundle: %v\n%s", err, out)
	}
	file, err := os.Open(bundle)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	archive := tar.NewReader(unzipped)
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			t.Fatal("no index.html in the bundle")
		}
		if err != nil {
			t.Fatal(err)
		}
		if header.Name != "index.html" {
			continue
		}
		page := filepath.Join(t.TempDir(), "index.html")
		data, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(page, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return page
	}
}

func TestBundleInABrowser(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	page := bundlePage(ctx, t)
	browser, err := chromium.Start(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer browser.Close()
	for name, size := range map[string]chromium.Size{
		"1280":      {Width: 1280, Height: 900},
		"1280-dark": {Width: 1280, Height: 900, Dark: true},
		"390":       {Width: 390, Height: 844, Mobile: true},
		"print":     {Width: 794, Height: 1123, Print: true},
	} {
		t.Run(name, func(t *testing.T) {
			var scripts, findings, events, gpus, small, outside int64
			var pwned bool
			visit, err := browser.Open(page, size,
				value(`document.scripts.length + document.images.length`, &scripts),
				value(`"pwned" in window`, &pwned),
				value(`document.querySelectorAll("#findings .finding").length`, &findings),
				value(`document.querySelectorAll("#events .event").length`, &events),
				value(`document.querySelectorAll("#gpus .gpu").length`, &gpus),
				value(`[...document.querySelectorAll("main *")].filter(e => e.innerText && parseFloat(getComputedStyle(e).fontSize) < `+smallest(size)+`).length`, &small),
				value(`[...document.querySelectorAll("main *")].filter(e => e.getBoundingClientRect().right > innerWidth + 0.5).length`, &outside),
			)
			if err != nil {
				t.Fatal(err)
			}
			keep(t, "bundle-"+name, visit.PNG)
			for _, line := range visit.Console {
				t.Errorf("on the console: %s", line)
			}
			for _, url := range visit.Requests {
				t.Errorf("request: %s", url)
			}
			if visit.ScrollWidth > visit.ClientWidth || outside > 0 {
				t.Errorf("%d wide in a window of %d, %d elements stick out", visit.ScrollWidth, visit.ClientWidth, outside)
			}
			if scripts != 0 || pwned {
				t.Errorf("%d scripts or images, foreign code ran: %v", scripts, pwned)
			}
			if findings == 0 || events != 1 || gpus != 1 || small > 0 {
				t.Errorf("%d findings, %d events, %d GPUs, %d elements too small to read", findings, events, gpus, small)
			}
		})
	}
}
