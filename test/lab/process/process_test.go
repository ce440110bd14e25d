package process

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestKillEndsOneAndSaysNothing(t *testing.T) {
	g := NewGroup()
	t.Cleanup(func() { _ = g.Stop(time.Second) })
	log := filepath.Join(t.TempDir(), "log")
	start := func(name string, args ...string) *Child {
		t.Helper()
		c, err := g.Start(Spec{Name: name, Path: "/bin/sh", Args: args, Dir: "/", Log: log})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	long := start("long", "-c", "exec sleep 60")
	if err := g.Kill(long); err != nil {
		t.Fatal(err)
	}
	if _, there := g.PIDs()["long"]; there {
		t.Error("it is still one of the group")
	}
	short := start("short", "-c", "echo said; exit 3")
	select {
	case c := <-g.Died():
		if c != short {
			t.Errorf("%s is said to have died; it was killed on purpose", c.Name)
		}
		if err := c.DiedError(); err.Error() != "short ended early (exit status 3); the last lines of its log:\n  said" {
			t.Errorf("it says %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("nobody is said to have died")
	}
}

func TestOutputGoesWhereItIsSent(t *testing.T) {
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = out.Close() }()
	g := NewGroup()
	c, err := g.Start(Spec{Name: "speaker", Path: "/bin/sh", Args: []string{"-c", "echo one; echo two >&2"}, Dir: "/", Output: out})
	if err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	raw, err := os.ReadFile(out.Name())
	if err != nil || string(raw) != "one\ntwo\n" {
		t.Errorf("%q, %v", raw, err)
	}
	if err := c.DiedError(); err.Error() != "speaker ended early (it exited without an error)" {
		t.Errorf("it says %v", err)
	}
}
