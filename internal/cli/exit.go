package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/chart"
	"github.com/llmbox-dev/llmbox/internal/cluster"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/installer/helmchart"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/machine"
	"github.com/llmbox-dev/llmbox/internal/model"
)

// The exit codes; docs/exit-codes.md explains them.
const (
	exitDone        = 0
	exitFailed      = 1
	exitUsage       = 2
	exitCheckFailed = 3
	exitWarnings    = 4
	exitNotReady    = 5
	exitLocked      = 6
	exitInterrupted = 130
)

// usageError marks what the person can mend by typing something else, and what.
type usageError struct {
	error
	fix string
}

func (e usageError) Unwrap() error { return e.error }

// Fix is what to type instead.
func (e usageError) Fix() string { return e.fix }

// helpOf names the help of a command.
func helpOf(cmd *cobra.Command) string { return cmd.CommandPath() + " --help shows what can be said" }

// exitCode maps an error to its code; the most telling cause decides.
func exitCode(err error) int {
	var usage usageError
	var cfg *config.Error
	var capability *model.CapabilityError
	var memory *model.MemoryError
	var first firstBootError
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &first):
		return first.code
	case errors.Is(err, installer.ErrInterrupted), errors.Is(err, context.Canceled):
		return exitInterrupted
	case errors.Is(err, installer.ErrLocked), errors.Is(err, machine.ErrLocked):
		return exitLocked
	case errors.As(err, &usage), errors.As(err, &cfg),
		errors.Is(err, chart.ErrValues), errors.Is(err, chart.ErrRender), errors.Is(err, chart.ErrLoad),
		errors.Is(err, component.ErrCycle), errors.Is(err, component.ErrUnknownNeed),
		errors.Is(err, component.ErrNeedOff), errors.Is(err, component.ErrDuplicate),
		errors.Is(err, cluster.ErrNoKubeconfig), errors.Is(err, k3s.ErrSetting):
		return exitUsage
	case errors.Is(err, installer.ErrCheckFailed), errors.Is(err, installer.ErrOlder), errors.Is(err, cluster.ErrUnreachable),
		errors.Is(err, cluster.ErrUnauthorized), errors.Is(err, cluster.ErrForbidden),
		errors.Is(err, helmchart.ErrNoController),
		errors.Is(err, k3s.ErrForeign), errors.Is(err, k3s.ErrRuntime), errors.Is(err, k3s.ErrNoAddress), errors.Is(err, k3s.ErrVersion),
		errors.As(err, &capability), errors.As(err, &memory):
		return exitCheckFailed
	case errors.Is(err, errWarnings):
		return exitWarnings
	case errors.Is(err, installer.ErrNotReady), errors.Is(err, helmchart.ErrStuck):
		return exitNotReady
	default:
		return exitFailed
	}
}

// fixFor finds the way out of an error: its own, or that of its kind.
func fixFor(err error) string {
	var own interface{ Fix() string }
	switch {
	case errors.As(err, &own):
		return own.Fix()
	case errors.Is(err, cluster.ErrNoKubeconfig):
		return "llmbox install --kubeconfig FILE [--context NAME], or set KUBECONFIG"
	case errors.Is(err, cluster.ErrUnauthorized):
		return "the credentials in the kubeconfig are wrong or have expired: fetch new ones, then kubectl --kubeconfig FILE auth whoami"
	case errors.Is(err, cluster.ErrUnreachable):
		return "check that the address in the kubeconfig answers: kubectl --kubeconfig FILE --request-timeout=10s get --raw /readyz"
	case errors.Is(err, cluster.ErrForbidden):
		return "use credentials bound to the ClusterRole cluster-admin, or ask whoever runs the cluster for them"
	case errors.Is(err, machine.ErrLocked):
		return "wait for the other run to end; it gives the machine back however it ends"
	case errors.Is(err, installer.ErrLocked):
		return "wait for the other run to end; a run that died frees the lock within 15 seconds"
	case errors.Is(err, component.ErrNeedOff):
		return "switch the needed component back on, set it to external if the cluster has its own, or switch off what needs it"
	case errors.Is(err, chart.ErrValues):
		return "correct components.NAME.values; the values each chart knows are in its values.yaml: docs/components.md"
	case errors.Is(err, chart.ErrRender), errors.Is(err, chart.ErrLoad):
		return "correct components.NAME.chart or components.NAME.values; helm template CHART shows the same error"
	case errors.Is(err, installer.ErrNotReady):
		return "run llmbox install again: it goes on where it was; llmbox status shows what is not ready"
	default:
		return ""
	}
}

// foldLines makes one line of a message that a library spread over several.
func foldLines(s string) string {
	lines := strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' })
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(slices.DeleteFunc(lines, func(l string) bool { return l == "" }), "; ")
}

// printError says what went wrong and how to go on, on stderr. Errors of the
// configuration come one by one with their places.
func (a *app) printError(err error) {
	if problems := config.Problems(err); len(problems) > 0 {
		for _, p := range problems {
			_, _ = fmt.Fprintln(a.env.Stderr, "error:", p.Error())
		}
		return
	}
	_, _ = fmt.Fprintln(a.env.Stderr, "error:", foldLines(err.Error()))
	if fix := fixFor(err); fix != "" {
		_, _ = fmt.Fprintln(a.env.Stderr, "  fix:", fix)
	}
}
