package programs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func builder(t *testing.T, modules string) (*Builder, *[]string) {
	t.Helper()
	said := &[]string{}
	return &Builder{
		Modules: modules,
		Cache:   t.TempDir(),
		Every:   time.Second,
		Tick:    func(string, ...any) {},
		Say:     func(format string, a ...any) { *said = append(*said, fmt.Sprintf(format, a...)) },
	}, said
}

func program(module string) Program {
	return Program{Name: "prog", Module: module, Package: "example.invalid/" + module, LDFlags: "-s -w -X main.version=v7"}
}

func TestBuildOnceThenFromTheCache(t *testing.T) {
	modules := t.TempDir()
	if err := os.CopyFS(modules, os.DirFS(filepath.Join("testdata", "modules"))); err != nil {
		t.Fatal(err)
	}
	b, said := builder(t, modules)
	built, err := b.Build(t.Context(), program("good"))
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), built).Output(); err != nil || string(out) != "v7" {
		t.Errorf("the program said %q, %v: the linker flags are lost", out, err)
	}
	again, err := b.Build(t.Context(), program("good"))
	if err != nil || again != built {
		t.Errorf("the second build gave %q, %v", again, err)
	}
	if last := (*said)[len(*said)-1]; !strings.Contains(last, "already") {
		t.Errorf("the second build said %q", last)
	}

	for name, change := range map[string]func(*Program) error{
		"pins": func(*Program) error {
			return os.WriteFile(filepath.Join(modules, "good", "go.sum"), []byte("\n"), 0o600)
		},
		"flags": func(p *Program) error {
			p.LDFlags = "-s"
			return nil
		},
	} {
		p := program("good")
		if err := change(&p); err != nil {
			t.Fatal(err)
		}
		other, err := b.Build(t.Context(), p)
		if err != nil || other == built {
			t.Errorf("with other %s the build gave %q, %v", name, other, err)
		}
	}
}

func TestFailedAndInterruptedBuildsLeaveNothing(t *testing.T) {
	for _, tt := range []struct {
		name, module, want string
		interrupt          bool
	}{
		{"does not compile", "broken", "undefinedFunction", false},
		{"interrupted", "good", "context canceled", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b, _ := builder(t, filepath.Join("testdata", "modules"))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			say := b.Say
			b.Say = func(format string, a ...any) {
				say(format, a...)
				if tt.interrupt {
					// The first line comes when the compiler is about to start.
					time.AfterFunc(50*time.Millisecond, cancel)
				}
			}
			_, err := b.Build(ctx, program(tt.module))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error naming %q", err, tt.want)
			}
			err = filepath.WalkDir(b.Cache, func(path string, e fs.DirEntry, err error) error {
				if err == nil && e.Type().IsRegular() && !strings.HasSuffix(path, ".lock") {
					err = fmt.Errorf("%s is left", path)
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

func TestLinkReplacesAnOlderProgram(t *testing.T) {
	cache, dir := t.TempDir(), filepath.Join(t.TempDir(), "lab")
	for i, content := range []string{"old", "new", "new"} {
		built := filepath.Join(cache, content)
		if err := os.WriteFile(built, []byte(content), 0o755); err != nil { // #nosec G306 -- a program
			t.Fatal(err)
		}
		if err := Link(built, dir, "prog"); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(dir, "prog")) // #nosec G304 -- test directory
		if err != nil || string(got) != content {
			t.Errorf("step %d: %q, %v", i, got, err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("%d files in the directory, %v", len(entries), err)
	}
}

func TestFindNamesWhatIsMissing(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "there"), nil, 0o755); err != nil { // #nosec G306 -- a program
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "no-program"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Find(dir, "there"); err != nil {
		t.Error(err)
	}
	_, err := Find(dir, "there", "no-program", "absent")
	if !errors.Is(err, ErrMissing) {
		t.Fatalf("got %v, want ErrMissing", err)
	}
	for _, want := range []string{"no-program", "absent", "llmbox-lab build"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in %v", want, err)
		}
	}
}

func TestEveryProgramHasItsModule(t *testing.T) {
	for _, p := range All() {
		dir := filepath.Join("..", "modules", p.Module)
		if strings.HasSuffix(p.Package, "/test/lab/modules/"+p.Module) {
			// Put together here: the module is the program.
			if raw, err := os.ReadFile(filepath.Join(dir, "main.go")); err != nil || !strings.Contains(string(raw), "\nfunc main()") {
				t.Errorf("%s: its module is no program: %v", p.Name, err)
			}
			continue
		}
		raw, err := os.ReadFile(filepath.Join(dir, "tools.go"))
		if err != nil {
			t.Errorf("%s: %v", p.Name, err)
			continue
		}
		if !strings.Contains(string(raw), `_ "`+p.Package+`"`) {
			t.Errorf("%s: its module does not pin %s", p.Name, p.Package)
		}
	}
}

// What upstream's image holds beside the program goes the same way as the program.
func TestFilesBesideTheProgram(t *testing.T) {
	modules := t.TempDir()
	if err := os.CopyFS(modules, os.DirFS(filepath.Join("testdata", "modules"))); err != nil {
		t.Fatal(err)
	}
	b, _ := builder(t, modules)
	p := program("good")
	p.Files = []string{"go.mod", "assets"}
	if _, err := b.Build(t.Context(), p); err == nil {
		t.Fatal("a folder that is not there was collected")
	}
	if err := os.MkdirAll(filepath.Join(modules, "good", "assets", "state"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(modules, "good", "assets", "state", "0100.yaml"), []byte("kind: A"), 0o600); err != nil {
		t.Fatal(err)
	}
	built, err := b.Build(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	out := t.TempDir()
	for range 2 {
		if err := Link(built, out, p.Name); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"go.mod", "assets/state/0100.yaml"} {
		if _, err := os.Stat(filepath.Join(out, Files(p.Name), name)); err != nil {
			t.Error(err)
		}
	}
}
