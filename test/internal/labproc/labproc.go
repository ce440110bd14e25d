// Package labproc runs bin/llmbox-lab for the programs under test/ that need a
// cluster of their own. It knows how a lab is started and stopped, and nothing
// of what is installed in it.
package labproc

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"
)

// startTimeout bounds the start of a lab; stopTimeout its end.
const (
	startTimeout = 4 * time.Minute
	stopTimeout  = 30 * time.Second
)

// Options say which lab is wanted.
type Options struct {
	// Program is llmbox-lab.
	Program string
	// Dir is where the lab's directory is made, and Name what it is called.
	Dir, Name string
	// GatewayPort is the loopback port of the gateway's stand-in.
	GatewayPort int
	// Delays is a file of pod start-up delays; empty takes the lab's own.
	Delays string
	// Machine asks for an empty machine to install on, with root's rights, and Model for
	// what its model hub offers.
	Machine bool
	Model   string
	// Args are further flags of llmbox-lab start.
	Args []string
	// Log gets what the lab says.
	Log io.Writer
}

// Lab is a running lab.
type Lab struct {
	// Kubeconfig reaches its API server as an administrator.
	Kubeconfig string `json:"kubeconfig"`
	// GatewayPort is where its gateway answers.
	GatewayPort int `json:"gateway_port"`
	// APIPort leads to port 6443 of a machine.
	APIPort int `json:"api_port"`
	// Dir is the lab's directory, Hub where a machine finds the model hub.
	Dir string `json:"dir"`
	Hub string `json:"hub"`
	// PIDs are its processes; "node" is in the network that machines are plugged into.
	PIDs map[string]int `json:"pids"`
	// Machines are those to install on.
	Machines []Machine `json:"machines"`

	lifeline io.Closer
	ended    chan error
	process  *exec.Cmd
}

// Machine is an empty machine.
type Machine struct {
	Name string `json:"name"`
	// Root is where its disk lies.
	Root string `json:"root"`
}

// Start starts a lab that ends with this process, however that ends.
func Start(ctx context.Context, o Options) (*Lab, error) {
	args := []string{"start", "--lifeline", "--timeout", startTimeout.String(),
		"--dir", filepath.Join(o.Dir, o.Name), "--gateway-port", strconv.Itoa(o.GatewayPort)}
	if o.Delays != "" {
		args = append(args, "--delays", o.Delays)
	}
	if o.Machine {
		args = append(args, "--size", "machine", "--model", o.Model)
	}
	args = append(args, o.Args...)
	process := exec.Command(o.Program, args...) // #nosec G204 -- the project's own program
	process.Stderr = o.Log
	lifeline, err := process.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("starting the lab: %w", err)
	}
	stdout, err := process.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("starting the lab: %w", err)
	}
	if err := process.Start(); err != nil {
		return nil, fmt.Errorf("starting the lab: %w", err)
	}
	lab := &Lab{lifeline: lifeline, process: process, ended: make(chan error, 1)}
	line := make(chan error, 1)
	go func() {
		raw, err := bufio.NewReader(stdout).ReadBytes('\n')
		if err == nil {
			err = json.Unmarshal(raw, lab)
		}
		line <- err
		lab.ended <- process.Wait()
	}()
	select {
	case err = <-line:
	case <-ctx.Done():
		err = ctx.Err()
	case <-time.After(startTimeout + stopTimeout):
		err = fmt.Errorf("the lab did not come up within %s", startTimeout)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("starting the lab: %w", err), lab.Stop())
	}
	return lab, nil
}

// Stop ends the lab and waits until it is gone.
func (l *Lab) Stop() error {
	err := l.lifeline.Close()
	select {
	case <-l.ended:
	case <-time.After(stopTimeout):
		err = errors.Join(err, errors.New("the lab did not end by itself"), l.process.Process.Kill())
	}
	if err != nil {
		return fmt.Errorf("stopping the lab: %w", err)
	}
	return nil
}

// FreePort finds a loopback port that nobody listens on.
func FreePort(ctx context.Context) (int, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("looking for a free port: %w", err)
	}
	address, ok := listener.Addr().(*net.TCPAddr)
	if err := listener.Close(); err != nil {
		return 0, fmt.Errorf("looking for a free port: %w", err)
	}
	if !ok {
		return 0, errors.New("looking for a free port: not a TCP address")
	}
	return address.Port, nil
}

// Commit names the checked-out commit, with "-dirty" where what is installed, or
// the lab it is installed in, differs from it. Tests may differ.
func Commit(ctx context.Context) (string, error) {
	head, err := exec.CommandContext(ctx, "git", "rev-parse", "--short", "HEAD").Output()
	if err != nil {
		return "", fmt.Errorf("asking git for the commit: %w", err)
	}
	differs, err := exec.CommandContext(ctx, "git", "status", "--porcelain", "--",
		":/go.mod", ":/cmd", ":/internal", ":/embed", ":/test/lab", ":(exclude,top)*_test.go", ":(exclude,top)*/testdata/*").Output()
	if err != nil {
		return "", fmt.Errorf("asking git for changes: %w", err)
	}
	commit := string(bytes.TrimSpace(head))
	if len(bytes.TrimSpace(differs)) > 0 {
		commit += "-dirty"
	}
	return commit, nil
}

// Root finds the clone's root from the working directory upwards.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("reading the working directory: %w", err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "embed", "components.yaml")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("run it in a clone of the project")
		}
		dir = parent
	}
}
