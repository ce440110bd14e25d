package repair

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/llmbox-dev/llmbox/internal/repair/record"
)

// scriptVariable turns the test binary into the programs that a script describes.
const scriptVariable = "LLMBOX_TEST_PROGRAMS"

// scene is what fake programs of a machine do.
type scene struct {
	// Root is the machine's root, Log where each call is noted.
	Root string `json:"root,omitempty"`
	Log  string `json:"log,omitempty"`
	// Programs are the names that exist.
	Programs []string `json:"programs"`
	// Calls are tried in order; the first that matches is played. A program that no
	// call matches ends well and says nothing.
	Calls []call `json:"calls"`
}

// call is one way in which a program is called.
type call struct {
	// When is the beginning of the command line.
	When string `json:"when"`
	// Has and Lacks are paths under the root on which it depends.
	Has   string `json:"has,omitempty"`
	Lacks string `json:"lacks,omitempty"`
	Out   string `json:"out,omitempty"`
	Exit  int    `json:"exit,omitempty"`
	// Write are files that it writes; Sysctl applies the file named last.
	Write  map[string]string `json:"write,omitempty"`
	Sysctl bool              `json:"sysctl,omitempty"`
	// Environment prints the program's environment.
	Environment bool `json:"environment,omitempty"`
	// Hang waits for ever.
	Hang bool `json:"hang,omitempty"`
}

// lockVariable turns the test binary into a program that holds a lock until it is
// told to end.
const lockVariable = "LLMBOX_TEST_LOCK"

func holdLock(name string) int {
	file, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return 99
	}
	if err := unix.FcntlFlock(file.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		return 99
	}
	fmt.Println("held")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

// actOut is a fake program.
func actOut(script string) int {
	raw, err := os.ReadFile(script)
	if err != nil {
		fmt.Println(err)
		return 99
	}
	var s scene
	if err := json.Unmarshal(raw, &s); err != nil {
		fmt.Println(err)
		return 99
	}
	line := strings.Join(append([]string{filepath.Base(os.Args[0])}, os.Args[1:]...), " ")
	log, err := os.OpenFile(s.Log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		fmt.Println(err)
		return 99
	}
	_, err = fmt.Fprintln(log, line)
	if err != nil || log.Close() != nil {
		return 99
	}
	exists := func(name string) bool {
		_, err := os.Lstat(filepath.Join(s.Root, name))
		return err == nil
	}
	for _, c := range s.Calls {
		if !strings.HasPrefix(line, c.When) || c.Has != "" && !exists(c.Has) || c.Lacks != "" && exists(c.Lacks) {
			continue
		}
		if c.Hang {
			time.Sleep(time.Hour)
		}
		fmt.Print(c.Out)
		if c.Environment {
			fmt.Println(strings.Join(os.Environ(), "\n"))
		}
		for name, content := range c.Write {
			if err := put(filepath.Join(s.Root, name), content); err != nil {
				fmt.Println(err)
				return 99
			}
		}
		if c.Sysctl {
			raw, err := os.ReadFile(filepath.Join(s.Root, os.Args[len(os.Args)-1]))
			if err != nil {
				fmt.Println(err)
				return 1
			}
			for l := range strings.Lines(string(raw)) {
				key, value, ok := strings.Cut(l, " = ")
				if !ok {
					continue
				}
				if err := put(filepath.Join(s.Root, settingPath(key)), value); err != nil {
					return 99
				}
			}
		}
		return c.Exit
	}
	return 0
}

func put(name, content string) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return err
	}
	return os.WriteFile(name, []byte(content), 0o600)
}

// stage is a machine in a directory with fake programs.
type stage struct {
	t       *testing.T
	root    string
	log     string
	options Options
}

// setUp builds a machine whose programs play a script of testdata/programs.
func setUp(t *testing.T, script string) *stage {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata/programs", script+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var s scene
	if err := yaml.UnmarshalStrict(raw, &s); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	st := &stage{t: t, root: filepath.Join(dir, "root"), log: filepath.Join(dir, "calls")}
	s.Root, s.Log = st.root, st.log
	bin := filepath.Join(dir, "bin")
	for _, d := range []string{st.root, bin} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range s.Programs {
		if err := os.Symlink(self, filepath.Join(bin, p)); err != nil {
			t.Fatal(err)
		}
	}
	encoded, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "script.json")
	if err := os.WriteFile(file, encoded, 0o600); err != nil {
		t.Fatal(err)
	}
	st.options = Options{Root: st.root, Directories: []string{bin}, Environment: []string{scriptVariable + "=" + file}}
	return st
}

// calls are the command lines so far.
func (s *stage) calls() []string {
	s.t.Helper()
	raw, err := os.ReadFile(s.log)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(raw)), "\n")
}

// called says whether a command line began so.
func (s *stage) called(prefix string) bool {
	return slices.ContainsFunc(s.calls(), func(c string) bool { return strings.HasPrefix(c, prefix) })
}

func (s *stage) write(name, content string) {
	s.t.Helper()
	if err := put(filepath.Join(s.root, name), content); err != nil {
		s.t.Fatal(err)
	}
}

func (s *stage) read(name string) string {
	s.t.Helper()
	raw, err := os.ReadFile(filepath.Join(s.root, name))
	if err != nil {
		return "(" + err.Error() + ")"
	}
	return string(raw)
}

func (s *stage) recordFile() string { return filepath.Join(s.root, record.DefaultFile) }

func (s *stage) record() *record.Record {
	s.t.Helper()
	r, err := record.Open(s.recordFile(), "v0.1.0")
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}
