package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/llmbox-dev/llmbox/internal/doctor"
	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/openai"
	"github.com/llmbox-dev/llmbox/internal/preflight/text"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// How long doctor waits for those that may never answer. All wait at the same time.
const (
	// doctorTimeout bounds everything but the GPUs.
	doctorTimeout = 8 * time.Second
	// doctorGPUTimeout is shorter than preflight's: on a box that serves the driver is
	// awake, so that half a minute of silence is a hang and no slow start.
	doctorGPUTimeout = 8 * time.Second
)

// doctorFlags are the flags of doctor and of what shares its look at a box.
type doctorFlags struct {
	snapshot   string
	save       string
	all        bool
	fix        bool
	offline    bool
	ignore     []string
	gpuTimeout time.Duration
}

func (f *doctorFlags) register(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.offline, "offline", false, "ask nothing outside this machine and its cluster")
	cmd.Flags().DurationVar(&f.gpuTimeout, "gpu-timeout", doctorGPUTimeout, "how long the GPUs may take to answer before that counts as a hang")
	cmd.Flags().StringSliceVar(&f.ignore, "ignore", nil, "ids of checks that you accept as they are; they become notes")
}

func (a *app) doctorCommand() *cobra.Command {
	var flags doctorFlags
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say why a box does not serve: the one cause, and what mends it",
		Long: `doctor reads everything once, at the same time and each with a deadline: the machine,
its GPUs, k3s and containerd, the cluster, logs, and the box's own endpoint. It names
the root cause first, folds what merely follows from it, and says what to type. It
changes nothing. Run it as root to see everything; what it can't see it says.

With --fix it lists what it can mend safely, asks, does it, checks each, and looks again.
With --snapshot it judges somebody else's box, from what support-bundle wrote.

It ends with 0 when all is well, 3 when something failed, 4 when there are only warnings.`,
		Example: `  sudo llmbox doctor
  sudo llmbox doctor --fix
  sudo llmbox doctor --all                      show what follows and what is well, too
  llmbox doctor --output json | jq '.findings[0]'
  llmbox doctor --snapshot bundle.tar.gz        judge a box from its support bundle
  llmbox doctor --kubeconfig ~/.kube/config     a box on another cluster`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.runDoctor(cmd, flags) },
	}
	flags.register(cmd)
	f := cmd.Flags()
	f.StringVar(&flags.snapshot, "snapshot", "", "judge this snapshot or support bundle, a directory or .tar.gz, instead of the box")
	f.StringVar(&flags.save, "save", "", "also write what was read to this directory or .tar.gz")
	f.BoolVar(&flags.all, "all", false, "show what follows from a cause by itself, and each check that is well")
	f.BoolVar(&flags.fix, "fix", false, "mend what can be mended safely: list it, ask, do it, look again")
	return cmd
}

func (a *app) runDoctor(cmd *cobra.Command, flags doctorFlags) error {
	switch {
	case flags.snapshot != "" && flags.save != "":
		return usageError{errors.New("--snapshot and --save exclude each other"), "a snapshot that is judged is there already"}
	case flags.snapshot != "" && flags.fix:
		return usageError{errors.New("--fix mends this box, not a snapshot"), "leave one of the flags out"}
	}
	ctx := cmd.Context()
	facts, err := a.boxFacts(ctx, cmd, flags)
	if err != nil {
		return err
	}
	found := doctor.JudgeWith(ctx, facts, doctor.Options{Accepted: flags.ignore})
	if err := checkIgnored(found, flags.ignore); err != nil {
		return err
	}
	if flags.save != "" {
		if err := facts.Save(flags.save); err != nil {
			return usageError{fmt.Errorf("writing the snapshot: %w", err), "name a place that can be written with --save"}
		}
	}
	var mending error
	if flags.fix {
		var changed bool
		if changed, mending = a.mend(ctx, facts, found); mending != nil && !errors.Is(mending, errNotMended) {
			return mending
		}
		if changed {
			if facts, err = a.boxFacts(ctx, cmd, flags); err != nil {
				return errors.Join(mending, err)
			}
			found = doctor.JudgeWith(ctx, facts, doctor.Options{Accepted: flags.ignore})
		}
	}
	if err := a.printDiagnosis(found, flags.all); err != nil {
		return err
	}
	return errors.Join(mending, diagnosis(found))
}

func checkIgnored(found []finding.Finding, ignore []string) error {
	for _, id := range ignore {
		if !slices.ContainsFunc(found, func(f finding.Finding) bool { return f.ID == id }) && !doctor.Known(id) {
			return usageError{fmt.Errorf("flag --ignore: no check is called %q", id), "docs/doctor.md lists them"}
		}
	}
	return nil
}

// diagnosis is how the command ends.
func diagnosis(found []finding.Finding) error {
	var failed []string
	warned := false
	for _, f := range found {
		if len(f.Causes) > 0 {
			continue
		}
		if f.Severity == finding.Fail {
			failed = append(failed, f.ID)
		}
		warned = warned || f.Severity == finding.Warn
	}
	switch {
	case len(failed) > 0:
		return fmt.Errorf("%w: %s", installer.ErrCheckFailed, strings.Join(failed, ", "))
	case warned:
		return errWarnings
	}
	return nil
}

func (a *app) printDiagnosis(found []finding.Finding, all bool) error {
	if a.output == "json" {
		return a.printJSON(findingsDoc{Findings: slices.Concat([]finding.Finding{}, found)})
	}
	shown := slices.Clone(found)
	if !all {
		// Of a box a person wants to know what is wrong; what there is none of, or what
		// nobody could see, is told in a word below.
		shown = slices.DeleteFunc(shown, func(f finding.Finding) bool { return f.State == finding.NotApplicable })
	} else {
		for i, f := range shown {
			if len(f.Causes) > 0 {
				shown[i].Title += " (follows from " + strings.Join(f.Causes[:min(2, len(f.Causes))], ", ") + ")"
				shown[i].Causes = nil
			}
		}
	}
	return text.TextFor("llmbox doctor", a.env.Stdout, shown, a.width(), a.color(), all)
}

// boxFacts reads the box, or what somebody read of one.
func (a *app) boxFacts(ctx context.Context, cmd *cobra.Command, flags doctorFlags) (*snapshot.Snapshot, error) {
	if flags.snapshot != "" {
		s, err := snapshot.Load(flags.snapshot)
		if err != nil {
			return nil, usageError{fmt.Errorf("reading the snapshot: %w", err), "llmbox support-bundle makes one"}
		}
		return s, nil
	}
	o := snapshot.Options{
		Version: a.env.Version, Offline: flags.offline, Installed: true, Timeout: doctorTimeout,
		Hosts: doctorHosts(flags.offline), NetworkTimeout: doctorTimeout - 2*time.Second,
		DiskPaths: []string{"/", "/var/lib/rancher", "/var/lib/kubelet", "/var/lib/llmbox"},
		GPU:       a.askGPUs(flags.gpuTimeout), GPUTimeout: flags.gpuTimeout + time.Second,
	}
	kube, why := a.kubeconfigREST()
	if kube != nil {
		o.Kube = kube
		o.ClusterOnly = (a.kubeconfig != "" || a.kubecontext != "") && !onThisMachine(kube.Host)
		o.Endpoint = func(ctx context.Context) snapshot.EndpointProbe { return a.askEndpoint(ctx, cmd) }
	}
	if o.ClusterOnly {
		o.GPU = nil
	} else if runtime.GOOS != "linux" {
		return nil, usageError{fmt.Errorf("this machine runs %s, a box needs Linux", runtime.GOOS), "run llmbox on the box, or name its cluster: --kubeconfig FILE"}
	}
	s := snapshot.Collect(ctx, o)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if why != nil {
		s.MarkUnreadable("cluster", why.Error())
	}
	return s, nil
}

// doctorHosts are asked to see whether the outside can be reached.
func doctorHosts(offline bool) []string {
	if offline {
		return nil
	}
	return []string{"huggingface.co", "registry-1.docker.io"}
}

// kubeconfigREST reads how to reach the cluster, without asking it anything.
func (a *app) kubeconfigREST() (*rest.Config, error) {
	name := a.kubeconfigPath()
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	if name != "" {
		if _, err := os.Stat(name); err != nil {
			return nil, fmt.Errorf("reading %s: %w", name, err)
		}
		rules = &clientcmd.ClientConfigLoadingRules{ExplicitPath: name}
	}
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: a.kubecontext}).ClientConfig()
	if err != nil {
		if name == "" {
			name = k3s.Kubeconfig
		}
		if errors.Is(err, os.ErrPermission) {
			return nil, fmt.Errorf("reading %s: permission denied; run it as root", name)
		}
		return nil, fmt.Errorf("no usable kubeconfig: %w", err)
	}
	return config, nil
}

// onThisMachine says whether an API server's address is this machine's own.
func onThisMachine(server string) bool {
	u, err := url.Parse(server)
	if err != nil {
		return false
	}
	ip := net.ParseIP(u.Hostname())
	if u.Hostname() == "localhost" || ip.IsLoopback() {
		return true
	}
	addresses, err := net.InterfaceAddrs()
	if err != nil || ip == nil {
		return false
	}
	return slices.ContainsFunc(addresses, func(a net.Addr) bool {
		network, ok := a.(*net.IPNet)
		return ok && network.IP.Equal(ip)
	})
}

// askEndpoint asks the box for one token the way a client does, and once without a key.
func (a *app) askEndpoint(ctx context.Context, cmd *cobra.Command) snapshot.EndpointProbe {
	var probe snapshot.EndpointProbe
	begin := time.Now()
	end := func(stage string, err error) snapshot.EndpointProbe {
		probe.Stage, probe.ElapsedMS = stage, time.Since(begin).Milliseconds()
		if err != nil {
			probe.Error = err.Error()
			var status *openai.StatusError
			if errors.As(err, &status) {
				probe.Status = status.Code
			}
		}
		return probe
	}
	b, err := a.reach(ctx, cmd)
	if err != nil {
		return end("address", err)
	}
	door, err := b.door(ctx)
	if err != nil {
		return end("address", err)
	}
	probe.URL = door.URL + "/v1"
	probe.Unauthorized = withoutKey(ctx, door)
	key, err := b.chatKey(ctx, "")
	if err != nil {
		return end("key", err)
	}
	probe.WithKey = true
	client := openai.New(door.HTTP, door.URL, key, endpointSilence)
	if probe.Model, err = served(ctx, client); err != nil {
		return end("http", err)
	}
	answer, err := client.Chat(ctx, openai.Request{Model: probe.Model, MaxTokens: 1, Messages: []openai.Message{{Role: "user", Content: "Hello"}}}, func(openai.Delta) error { return nil })
	if err != nil {
		return end("stream", err)
	}
	probe.Status, probe.Tokens = http.StatusOK, 1
	if answer.Usage != nil {
		probe.Tokens = int(cmp.Or(answer.Usage.CompletionTokens, 1))
	}
	return end("", nil)
}

const endpointSilence = 5 * time.Second

// withoutKey is the status that somebody without a key gets; 0 for none.
func withoutKey(ctx context.Context, door installer.Door) int {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, door.URL+"/v1/models", nil)
	if err != nil {
		return 0
	}
	resp, err := door.HTTP.Do(req)
	if err != nil {
		return 0
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

// printShortDiagnosis says in two lines why a box is not ready, as doctor sees it. It is
// a courtesy: what it can't find out it leaves to doctor.
func (a *app) printShortDiagnosis(ctx context.Context, cmd *cobra.Command) {
	if a.output == "json" || runtime.GOOS != "linux" {
		return
	}
	facts, err := a.boxFacts(ctx, cmd, doctorFlags{offline: true, gpuTimeout: doctorGPUTimeout})
	if err != nil {
		return
	}
	if line := shortDiagnosis(doctor.JudgeWith(ctx, facts, doctor.Options{})); line != "" {
		_, _ = fmt.Fprintf(a.env.Stdout, "\n%s\n", line)
	}
}

// shortDiagnosis is the first root with what mends it; empty where nothing failed.
func shortDiagnosis(found []finding.Finding) string {
	var first finding.Finding
	more := 0
	for _, f := range found {
		if f.Severity != finding.Fail || len(f.Causes) > 0 {
			continue
		}
		if first.ID == "" {
			first = f
		} else {
			more++
		}
	}
	if first.ID == "" {
		return ""
	}
	line := fmt.Sprintf("Cause     %s (%s): %s\nTo mend   %s", first.Title, first.ID, first.Measured, first.Fix)
	if more > 0 {
		line += fmt.Sprintf("\n          and %d more: llmbox doctor", more)
	}
	return line
}
