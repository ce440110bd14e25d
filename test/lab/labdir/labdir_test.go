package labdir

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

func TestCreateRefusesWhatIsNotALab(t *testing.T) {
	dir := t.TempDir()
	keep := filepath.Join(dir, "precious")
	if err := os.WriteFile(keep, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(dir); !errors.Is(err, ErrNotLab) {
		t.Errorf("got %v, want ErrNotLab", err)
	}
	if _, err := os.Stat(keep); err != nil {
		t.Errorf("the file is gone: %v", err)
	}
}

func TestCreateTakesAnEmptyDirectoryAndClosesIt(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	d, err := Create(dir)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := Create(dir); !errors.Is(err, ErrInUse) {
		t.Errorf("a second holder got %v, want ErrInUse", err)
	}
	if err := d.Close(false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory is still there: %v", err)
	}
}

// leave makes a directory as a killed supervisor leaves it.
func leave(t *testing.T, dir string, change func(*State)) {
	t.Helper()
	d, err := Create(dir)
	if err != nil {
		t.Fatal(err)
	}
	d.state.Supervisor = Process{Name: "supervisor"}
	change(&d.state)
	if err := d.save(); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(true); err != nil {
		t.Fatal(err)
	}
}

func sleeper(t *testing.T) (*exec.Cmd, Process) {
	t.Helper()
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	p, err := Identify("sleep", cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return cmd, p
}

func TestClearKillsOnlyTheRecordedProcess(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*State, Process)
		dies   bool
	}{
		{"recorded process", func(s *State, p Process) { s.Children = []Process{p} }, true},
		{"same id, other start time", func(s *State, p Process) {
			p.StartTicks++
			s.Children = []Process{p}
		}, false},
		{"before a reboot", func(s *State, p Process) {
			s.BootID = "another"
			s.Children = []Process{p}
		}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "lab")
			_, p := sleeper(t)
			leave(t, dir, func(s *State) { tt.change(s, p) })
			if err := Clear(dir); err != nil {
				t.Fatal(err)
			}
			if p.Alive() == tt.dies {
				t.Errorf("alive afterwards: %v", p.Alive())
			}
			if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the directory is still there: %v", err)
			}
		})
	}
}

func TestCreateClearsALeftover(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "lab")
	leave(t, dir, func(*State) {})
	old := filepath.Join(dir, "old")
	if err := os.WriteFile(old, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := Create(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close(false) }()
	if _, err := os.Stat(old); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the leftover's files are still there: %v", err)
	}
}

func TestClearADirectoryKilledBeforeItsFirstState(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, lockName), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Clear(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory is still there: %v", err)
	}
}

func TestReadRefusesAnothersState(t *testing.T) {
	dir := t.TempDir()
	raw, err := json.Marshal(State{Kind: "something else"})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, stateName), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(dir); !errors.Is(err, ErrNotLab) {
		t.Errorf("got %v, want ErrNotLab", err)
	}
	if err := Stop(dir, time.Second); !errors.Is(err, ErrNotLab) {
		t.Errorf("got %v, want ErrNotLab", err)
	}
}

func TestAZombieIsGone(t *testing.T) {
	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := Process{Name: "true", PID: cmd.Process.Pid}
	deadline := time.Now().Add(5 * time.Second)
	for {
		if _, err := startTicks(procDir, p.PID); errors.Is(err, fs.ErrNotExist) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("a process that ended and was not waited for counts as alive")
		}
		time.Sleep(10 * time.Millisecond)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
}
