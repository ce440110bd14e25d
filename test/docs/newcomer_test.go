package docs

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/test/internal/cleanroot"
)

// step is a line of README's blocks, and what a newcomer sees on a machine without a GPU.
type step struct {
	typed string
	code  int
	says  string
	// elsewhere names what runs it, where a newcomer's machine is not for it.
	elsewhere string
}

// steps are README's lines in their order. One that README gets is one that is missing
// here until it says what comes of it.
func steps() []step {
	return []step{
		{typed: "make rehearse", says: "gates were answered by rehearsal actors"},
		{typed: "make test", elsewhere: ".ci/run, with Chromium, busybox and curl"},
		{typed: "make build"},
		{typed: "bin/llmbox plan --gpu l4", says: "envoy-gateway"},
		{typed: "bin/llmbox plan --gpu h100 --model Qwen/Qwen3-32B", says: "Qwen/Qwen3-32B"},
		{typed: "bin/llmbox models --gpu l4", says: "Qwen"},
		{typed: "sudo bin/llmbox preflight", code: 3, says: "gpu.present"},
		// The next block is for a GPU machine: this one is told that it is none.
		{typed: "sudo bin/llmbox preflight", code: 3, says: "gpu.present"},
		{typed: "sudo bin/llmbox install", code: 3, says: "gpu.present"},
		{typed: `sudo bin/llmbox chat "Hello"`, code: 2, says: "no usable kubeconfig"},
		{typed: "sudo bin/llmbox uninstall", says: "There is no box on this machine"},
	}
}

var stepLine = regexp.MustCompile(`^(make|(sudo )?bin/llmbox) `)

// readmeLines are what README's blocks have one type.
func readmeLines(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, one := range blocks(t, filepath.Join(root, "README.md")) {
		if stepLine.MatchString(one.text) {
			out = append(out, strings.TrimSpace(tail.ReplaceAllString(one.text, "")))
		}
	}
	return out
}

// No line of README's blocks is missing from the steps, and their order is README's.
func TestReadmeIsWhatANewcomerTypes(t *testing.T) {
	var want []string
	for _, s := range steps() {
		want = append(want, s.typed)
	}
	if got := readmeLines(t); !slices.Equal(got, want) {
		t.Errorf("README has one type %q, the steps are %q", got, want)
	}
}

// newcomer is a machine with Go and what README names, and somebody on it who is not root
// and may use sudo.
type newcomer struct {
	root cleanroot.Root
	env  []string
}

const newcomersNumber = 1000

func newNewcomer(t *testing.T) *newcomer {
	t.Helper()
	lower := os.Getenv("LLMBOX_NEWCOMER_ROOT")
	if lower == "" {
		t.Skip("LLMBOX_NEWCOMER_ROOT names no clean root: make newcomer makes one")
	}
	if os.Getuid() != 0 {
		t.Skip("needs root: it makes a machine of namespaces")
	}
	disk := os.Getenv("LLMBOX_NEWCOMER_DISK")
	if disk == "" {
		disk = t.TempDir()
	}
	n := &newcomer{root: cleanroot.Root{Lower: lower, Disk: disk}}
	if _, err := os.Stat(filepath.Join(disk, "laid")); err == nil {
		t.Logf("%s was visited before: caches and the clone are there", disk)
	} else {
		n.furnish(t)
	}
	setting := func(name string) string {
		out, err := exec.CommandContext(t.Context(), "go", "env", name).Output()
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(out))
	}
	n.root.Mounts = "mkdir -p usr/local/go && mount --bind -o ro " + setting("GOROOT") + " usr/local/go"
	n.env = []string{"PATH=/usr/local/go/bin:" + cleanroot.Path, "HOME=/home/ops", "LANG=C.UTF-8", "GOTOOLCHAIN=local"}
	if os.Getenv("LLMBOX_NEWCOMER_MODULES") == "here" {
		// What would be downloaded is on this machine already.
		n.root.Mounts += " && mkdir -p usr/local/modules && mount --bind -o ro " + setting("GOMODCACHE") + " usr/local/modules"
		n.env = append(n.env, "GOMODCACHE=/usr/local/modules", "GOPROXY=off", "GOSUMDB=off")
		return n
	}
	for _, name := range []string{"GOPROXY", "GOSUMDB"} {
		n.env = append(n.env, name+"="+setting(name))
	}
	return n
}

// furnish puts a user and a repository of HEAD on the machine.
func (n *newcomer) furnish(t *testing.T) {
	t.Helper()
	lower := func(name string) string {
		data, err := os.ReadFile(filepath.Join(n.root.Lower, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range []struct {
		name, content string
		mode          os.FileMode
		owner         int
	}{
		{"etc/passwd", lower("etc/passwd") + "ops:x:1000:1000::/home/ops:/bin/bash\n", 0o644, 0},
		{"etc/group", lower("etc/group") + "ops:x:1000:\n", 0o644, 0},
		{"etc/shadow", lower("etc/shadow") + "ops:!:20000:0:99999:7:::\n", 0o600, 0},
		{"etc/sudoers.d/ops", "ops ALL=(ALL) NOPASSWD:ALL\n", 0o440, 0},
		{"etc/hosts", "127.0.0.1 localhost " + name + "\n", 0o644, 0},
		{"home/ops/.profile", "", 0o644, newcomersNumber},
		{"srv/README", "the repository is beside it\n", 0o644, newcomersNumber},
	} {
		if err := n.root.Lay(file.name, []byte(file.content), file.mode, file.owner); err != nil {
			t.Fatal(err)
		}
	}
	bare := filepath.Join(n.root.Disk, "laid/srv/llmbox.git")
	if out, err := exec.CommandContext(t.Context(), "git", "clone", "--quiet", "--bare", root, bare).CombinedOutput(); err != nil {
		t.Fatalf("cloning the repository: %v\n%s", err, out)
	}
	err = filepath.WalkDir(bare, func(at string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(at, newcomersNumber, newcomersNumber)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// types has the newcomer type a line, and says how it ended, what was printed and how long
// it took. Only make, which fetches modules, is given a network.
func (n *newcomer) types(t *testing.T, dir, line string) (code int, printed string, took time.Duration) {
	t.Helper()
	var flags []string
	if !strings.HasPrefix(line, "make ") {
		flags = append(flags, "--net")
	}
	words, err := n.root.Command(newcomersNumber, flags...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 80*time.Minute)
	defer cancel()
	words = append(words, "/bin/bash", "-c", `cd "$1" && eval "$2"`, "bash", dir, line)
	cmd := exec.CommandContext(ctx, words[0], words[1:]...)
	cmd.Env = n.env
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, 10*time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	began := time.Now()
	err = cmd.Run()
	took = time.Since(began)
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), took
}

// A newcomer clones the repository and types README's blocks, line for line, on a machine
// that has nothing but what README asks for. Each ends as it is to end there.
func TestNewcomer(t *testing.T) {
	n := newNewcomer(t)
	began := time.Now()
	_, err := os.Stat(n.root.Written("home/ops/llmbox"))
	fresh := err != nil
	if fresh {
		code, out, took := n.types(t, "/home/ops", "git clone --quiet file:///srv/llmbox.git llmbox")
		if code != 0 {
			t.Fatalf("cloning: exit %d\n%s", code, out)
		}
		t.Logf("%8.1f s  git clone", took.Seconds())
	}
	for i, s := range steps() {
		if s.elsewhere != "" {
			t.Logf("        --  %s: %s", s.typed, s.elsewhere)
			continue
		}
		code, out, took := n.types(t, "/home/ops/llmbox", s.typed)
		t.Logf("%8.1f s  %s", took.Seconds(), s.typed)
		if code != s.code || !strings.Contains(out, s.says) {
			t.Errorf("step %d, %s: exit %d, wanted %d and %q\n%s", i+1, s.typed, code, s.code, s.says, last(out))
		}
		if i == 0 && fresh {
			t.Logf("%8.1f s  from the clone to the end of the first rehearsal", time.Since(began).Seconds())
		}
	}
	// What the machine was asked to do without being able to has left nothing of it.
	changes, err := n.root.Changes()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range changes {
		if !slices.ContainsFunc([]string{"/home/ops/", "/tmp/", "/usr/local/"}, func(dir string) bool { return strings.HasPrefix(name, dir) }) {
			t.Errorf("left on the machine: %s", name)
		}
	}
}

// last is the end of what was printed.
func last(out string) string {
	lines := strings.Split(strings.TrimRight(out, "\n"), "\n")
	return fmt.Sprintf("…\n%s", strings.Join(lines[max(0, len(lines)-30):], "\n"))
}
