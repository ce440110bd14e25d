package gpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// envScript has this test program be a shell that runs the value.
const envScript = "LLMBOX_TEST_SCRIPT"

func TestMain(m *testing.M) {
	if body, ok := os.LookupEnv(envScript); ok {
		err := syscall.Exec("/bin/sh", []string{"sh", "-c", body}, os.Environ())
		fmt.Fprintln(os.Stderr, err)
		os.Exit(99)
	}
	os.Exit(m.Run())
}

// helper is no NVML child: it is this test program, run as one.
func helper(t *testing.T) []byte {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// quick are options with no real waiting, an empty host and a helper that does what
// the script says; none without a script.
func quick(t *testing.T, script string) Options {
	t.Helper()
	o := Options{
		Root: t.TempDir(), SlowAfter: time.Minute, HangAfter: time.Minute, FilesAfter: 10 * time.Second,
	}
	if script != "" {
		o.Helper, o.Environment = helper(t), []string{envScript + "=" + script}
	}
	return o
}

func TestAskEndings(t *testing.T) {
	const good = `{"schema":1,"source":"nvml","nvml":{"ending":"ok","elapsed_ms":0},"devices":[]}`
	tests := []struct {
		name   string
		script string
		// program is run as it is, instead of a script.
		program string
		want    NVMLEnding
		detail  string
	}{
		{"answers", "echo '" + good + "'", "", NVMLEnding{Ending: EndingOK}, ""},
		{"absent", "", "", NVMLEnding{Ending: EndingHelperAbsent}, "carries no NVML helper"},
		{"not a program", "", "\x7fELF but no more", NVMLEnding{Ending: EndingNotStarted}, "needs glibc " + GlibcFloor},
		{"no interpreter", "", "#!/nonexistent/ld-linux.so.2\n", NVMLEnding{Ending: EndingNotStarted}, "no such file"},
		{
			"loader refuses", "echo \"libc.so.6: version 'GLIBC_2.99' not found\" >&2; exit 1", "",
			NVMLEnding{Ending: EndingNotStarted}, "GLIBC_2.99",
		},
		{
			"symbol missing", "echo nvmlDeviceGetName 3 >&3; echo 'symbol lookup error: undefined symbol: nvmlDeviceGetName' >&2; exit 127", "",
			NVMLEnding{Ending: EndingMissingSymbol, LastCall: "nvmlDeviceGetName"}, "undefined symbol",
		},
		{
			"fails", "echo nvmlInit_v2 >&3; echo no space left >&2; exit 1", "",
			NVMLEnding{Ending: EndingError, LastCall: "nvmlInit_v2"}, "exit 1: no space left",
		},
		{
			"dies", "echo nvmlInit_v2 >&3; echo nvmlDeviceGetName 3 >&3; kill -BUS $$", "",
			NVMLEnding{Ending: EndingKilled, Signal: "SIGBUS", LastCall: "nvmlDeviceGetName"},
			"killed by SIGBUS in nvmlDeviceGetName for GPU 3",
		},
		{"talks nonsense", "echo hello", "", NVMLEnding{Ending: EndingBadAnswer}, "invalid character"},
		{"says nothing", ":", "", NVMLEnding{Ending: EndingBadAnswer}, "EOF"},
		{"says it twice", "echo '" + good + "'; echo '" + good + "'", "", NVMLEnding{Ending: EndingBadAnswer}, "something follows"},
		{
			"never stops writing", "exec head -c 5000000 /dev/zero", "",
			NVMLEnding{Ending: EndingBadAnswer}, fmt.Sprintf("more than %d bytes", MaxAnswer),
		},
		{
			"knows of a newer schema", `echo '{"schema":99,"source":"nvml","nvml":{"ending":"ok","elapsed_ms":0},"devices":[]}'`, "",
			NVMLEnding{Ending: EndingBadAnswer}, "schema 99",
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			o := quick(t, test.script)
			if test.program != "" {
				o.Helper = []byte(test.program)
			}
			report := Ask(context.Background(), o)
			got := report.NVML
			if !strings.Contains(got.Detail, test.detail) {
				t.Errorf("detail %q: want %q in it", got.Detail, test.detail)
			}
			if strings.ContainsAny(got.Detail, "\n\r") || len(got.Detail) > 500 {
				t.Errorf("detail is not one short line: %q", got.Detail)
			}
			got.Detail, got.ElapsedMS = "", 0
			if got != test.want {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
			if report.Schema != ReportSchema || report.Devices == nil || report.Source == "" {
				t.Errorf("not a whole report: %+v", report)
			}
		})
	}
}

// A helper that answers nothing is told of once, then killed, with all that it
// started.
func TestAskHang(t *testing.T) {
	t.Parallel()
	o := quick(t, "echo nvmlInit_v2 >&3; sleep 600 & sleep 600")
	o.SlowAfter, o.HangAfter = 100*time.Millisecond, time.Second
	var told []time.Duration
	o.OnSlow = func(waited time.Duration) { told = append(told, waited) }
	began := time.Now()
	report := Ask(context.Background(), o)
	if report.NVML.Ending != EndingTimeout || !report.NVML.Slow || report.NVML.LastCall != "nvmlInit_v2" {
		t.Errorf("got %+v", report.NVML)
	}
	if len(told) != 1 || told[0] != o.SlowAfter {
		t.Errorf("told %v that it is slow, want once", told)
	}
	if report.NVML.ElapsedMS < 1000 {
		t.Errorf("elapsed %d ms, it waited a second", report.NVML.ElapsedMS)
	}
	if took := time.Since(began); took > time.Minute {
		t.Errorf("took %s", took)
	}
}

// What a helper leaves behind holds its pipes open, but not us.
func TestAskOrphan(t *testing.T) {
	t.Parallel()
	answer := `{"schema":1,"source":"nvml","nvml":{"ending":"ok","elapsed_ms":0},"driver":"1.2","devices":[]}`
	o := quick(t, "sleep 60 & echo '"+answer+"'")
	began := time.Now()
	report := Ask(context.Background(), o)
	if report.NVML.Ending != EndingOK || report.Driver != "1.2" {
		t.Errorf("got %+v", report)
	}
	if took := time.Since(began); took > 50*time.Second {
		t.Errorf("waited %s for somebody else's process", took)
	}
}

func TestAskCancelled(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(context.Background())
	o := quick(t, "echo nvmlInit_v2 >&3; exec sleep 600")
	o.SlowAfter = 200 * time.Millisecond
	o.OnSlow = func(time.Duration) { cancel() }
	report := Ask(ctx, o)
	if report.NVML.Ending != EndingError || !strings.Contains(report.NVML.Detail, "stopped before") {
		t.Errorf("got %+v", report.NVML)
	}
}

// stuck is a process in the uninterruptible sleep that a broken driver causes: the
// signal is taken, nothing happens. No test can make a real one.
type stuck struct{ killed chan struct{} }

func (s stuck) Kill() error {
	close(s.killed)
	return nil
}

func (s stuck) Wait() (*os.ProcessState, error) { select {} }

func TestRunUnkillable(t *testing.T) {
	t.Parallel()
	s := stuck{killed: make(chan struct{})}
	r := run{
		path: "/bin/true", name: "stuck", progress: true, slowAfter: time.Minute, hangAfter: 100 * time.Millisecond, limit: 100,
		start: func(*exec.Cmd) (process, error) { return s, nil },
	}
	began := time.Now()
	out := r.do(context.Background())
	if took := time.Since(began); took > killGrace+time.Minute {
		t.Errorf("waited %s for a process that does not die", took)
	}
	if !out.timedOut || !out.abandoned {
		t.Errorf("got %+v", out)
	}
	select {
	case <-s.killed:
	default:
		t.Error("it was not even tried")
	}
}

// A program file that somebody still writes to is tried again.
func TestRunBusyFile(t *testing.T) {
	t.Parallel()
	tries := 0
	r := run{
		path: "/bin/true", name: "true", slowAfter: time.Minute, hangAfter: time.Minute, limit: 100,
		start: func(cmd *exec.Cmd) (process, error) {
			if tries++; tries < 3 {
				return nil, &os.PathError{Op: "fork/exec", Path: cmd.Path, Err: syscall.ETXTBSY}
			}
			if err := cmd.Start(); err != nil {
				return nil, err
			}
			return group{cmd.Process}, nil
		},
	}
	if out := r.do(context.Background()); out.startErr != nil || out.exit != 0 || tries != 3 {
		t.Errorf("%d tries, got %+v", tries, out)
	}
}

// Where a program in memory may not be run, a file in a private directory is, and is
// gone afterwards.
func TestRunTemporaryFile(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	var ran string
	r := run{
		program: helper(t), name: "helper", environment: []string{envScript + "=echo yes"}, slowAfter: time.Minute, hangAfter: time.Minute, limit: 100,
		start: func(cmd *exec.Cmd) (process, error) {
			if strings.HasPrefix(cmd.Path, "/proc/") {
				return nil, &os.PathError{Op: "fork/exec", Path: cmd.Path, Err: syscall.EACCES}
			}
			ran = cmd.Path
			info, err := os.Stat(filepath.Dir(cmd.Path))
			if err != nil {
				return nil, err
			}
			if info.Mode().Perm() != 0o700 {
				return nil, fmt.Errorf("the directory has mode %o", info.Mode().Perm())
			}
			if err := cmd.Start(); err != nil {
				return nil, err
			}
			return group{cmd.Process}, nil
		},
	}
	out := r.do(context.Background())
	if out.startErr != nil || string(out.stdout) != "yes\n" {
		t.Fatalf("got %+v", out)
	}
	if !strings.HasPrefix(ran, dir) {
		t.Errorf("ran %s, want one under %s", ran, dir)
	}
	if _, err := os.Stat(ran); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", ran, err)
	}
}

// The child gets no more of the environment than it needs: a library path of the
// user's shell, such as CUDA's stubs, would lead it astray.
func TestAskEnvironment(t *testing.T) {
	t.Setenv("LD_LIBRARY_PATH", "/usr/local/cuda/lib64/stubs")
	t.Setenv("HF_TOKEN", "hf_secret")
	o := quick(t, "echo nvmlInit_v2 >&3; env >&2; exit 1")
	o.Library = "/opt/libnvidia-ml.so.1"
	detail := Ask(context.Background(), o).NVML.Detail
	for _, foreign := range []string{"LD_LIBRARY_PATH", "HF_TOKEN", "HOME="} {
		if strings.Contains(detail, foreign) {
			t.Errorf("%s is handed on: %s", foreign, detail)
		}
	}
	if !strings.Contains(detail, EnvLibrary+"=/opt/libnvidia-ml.so.1") {
		t.Errorf("no %s in %s", EnvLibrary, detail)
	}
}

func TestAskSMI(t *testing.T) {
	smi := func(t *testing.T, body string) string {
		t.Helper()
		path := filepath.Join(t.TempDir(), "nvidia-smi")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+body+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	tests := []struct {
		name, body string
		source     Source
		detail     string
	}{
		{"answers", "echo '<nvidia_smi_log><driver_version>570.1</driver_version></nvidia_smi_log>'", SourceSMI, ""},
		{"fails", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", SourceNone, "exit 18: Failed to initialize NVML"},
		{"hangs", "exec sleep 600", SourceNone, "no answer within"},
		{"dies", "kill -SEGV $$", SourceNone, "killed by SIGSEGV"},
		{"talks nonsense", "echo 'nothing'", SourceNone, "reading nvidia-smi's XML"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			o := quick(t, "")
			o.SMI = smi(t, test.body)
			o.SMIAfter = 30 * time.Second
			if test.name == "hangs" {
				o.SMIAfter = 300 * time.Millisecond
			}
			report := Ask(context.Background(), o)
			if report.Source != test.source || !strings.Contains(report.Errors["nvidia-smi"], test.detail) {
				t.Errorf("source %s, errors %v", report.Source, report.Errors)
			}
		})
	}
	t.Run("not there", func(t *testing.T) {
		t.Parallel()
		o := quick(t, "")
		o.SMI = filepath.Join(t.TempDir(), "nvidia-smi")
		if report := Ask(context.Background(), o); len(report.Errors) != 0 {
			t.Errorf("errors %v", report.Errors)
		}
	})
	t.Run("not asked after a hang", func(t *testing.T) {
		t.Parallel()
		o := quick(t, "exec sleep 600")
		o.HangAfter = 200 * time.Millisecond
		mark := filepath.Join(t.TempDir(), "asked")
		o.SMI = smi(t, "touch '"+mark+"'")
		Ask(context.Background(), o)
		if _, err := os.Stat(mark); !errors.Is(err, os.ErrNotExist) {
			t.Error("nvidia-smi was asked")
		}
	})
}

// A driver that hangs can block a read of its files for ever; a FIFO without a
// writer blocks the same way.
func TestAskBlockedFile(t *testing.T) {
	t.Parallel()
	o := quick(t, "")
	o.FilesAfter = 300 * time.Millisecond
	fifo := filepath.Join(o.Root, "proc/driver/nvidia/version")
	if err := os.MkdirAll(filepath.Dir(fifo), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	report := Ask(context.Background(), o)
	if took := time.Since(began); took > time.Minute {
		t.Errorf("took %s", took)
	}
	if !strings.Contains(report.Errors["/proc/driver/nvidia"], "no answer within") || report.Source != SourceNone {
		t.Errorf("got %+v", report)
	}
}
