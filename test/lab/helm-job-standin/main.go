// Command helm-job-standin takes the place of klipper-helm's entry script in the image
// that helm-controller's Jobs run. Helm itself is real: the helm beside it is compiled
// from upstream's module, and this program only chooses what to ask of it, after the
// arguments, environment, files and exit status that k3s-io/klipper-helm (file `entry`)
// and helm-controller (pkg/controllers/chart) agree on.
//
// It must not know what is installed. It does not convert releases that use APIs which
// Kubernetes no longer serves, as the plugin mapkubeapis does, and it mends records of
// the Secret driver alone.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
)

func main() {
	// Helm that is cut off leaves a release pending: the pod's grace period is for it
	// to finish. Programs started from here inherit this.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM)
	e := entry{
		env: os.Getenv, root: "/", out: os.Stderr,
		terminationLog: "/dev/termination-log",
		helm:           runHelm,
		setStatus:      markInCluster,
	}
	for _, v := range []string{"SSL_CERT_FILE", "HELM_TLS_CA_CERT"} {
		if err := os.Setenv(v, "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	code, err := e.run(context.Background(), os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// runHelm runs the helm of the image and returns its exit status.
func runHelm(ctx context.Context, stdin io.Reader, stdout io.Writer, args ...string) (int, error) {
	cmd := exec.CommandContext(ctx, "helm", args...) // #nosec G204 -- the image's own helm
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, os.Stderr
	err := cmd.Run()
	var ended *exec.ExitError
	if errors.As(err, &ended) {
		if ended.ExitCode() < 0 {
			// By a signal: what a shell would report.
			if s, ok := ended.Sys().(syscall.WaitStatus); ok {
				return 128 + int(s.Signal()), nil
			}
		}
		return ended.ExitCode(), nil
	}
	if err != nil {
		return 1, fmt.Errorf("running helm %s: %w", strings.Join(args, " "), err)
	}
	return 0, nil
}
