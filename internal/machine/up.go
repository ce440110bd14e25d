package machine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path"
	"runtime"
	"slices"
	"time"

	"golang.org/x/net/http/httpproxy"

	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/download"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/weights"
)

// PhaseImage is the part of the work that k3s knows nothing of.
const PhaseImage k3s.Phase = "image"

// readyDeadline bounds how long a started k3s may take: on a small machine the first
// start unpacks for a minute, and CoreDNS' image comes over the network.
const readyDeadline = 15 * time.Minute

// secretLimit bounds a credentials file in bytes.
const secretLimit = 1 << 20

// Want is the machine as it shall be.
type Want struct {
	Box config.Box
	// K3sVersion is the release that this llmbox was built for; the box's own wins.
	K3sVersion string
	// K3sDigests are pinned digests of its binary by architecture, where they are known.
	K3sDigests map[string]string
	// GPUs is how many the machine has.
	GPUs int
	// GPURuntime says that pods shall get GPUs from k3s' own runtime class.
	GPURuntime bool
	// Image is llmbox's own reference; none is made where it is empty.
	Image string
	// Adopt has llmbox use a k3s that somebody else installed.
	Adopt bool
	// Bundle is what a bundle brought; nothing is downloaded then.
	Bundle *Brought
	// Join is set for a machine that joins another.
	Join *Join
}

// Join is the box that a machine joins.
type Join struct {
	// URL is that of its first machine, such as "https://10.0.0.5:6443".
	URL string
	// Token lets it in. It is kept in a file of root's, which k3s reads at each start.
	Token string
}

// tokenFile keeps the token in StateDir.
const tokenFile = "join-token"

// Outcome is what was done.
type Outcome struct {
	// Changed says that anything was.
	Changed bool
	// Version is that of k3s, NodeName the node's.
	Version, NodeName string
	// Restarted says why a running k3s was restarted; empty where it was not.
	Restarted []string
	// Supervised says that nothing starts k3s at boot.
	Supervised bool
	// Program is where llmbox stays.
	Program string
}

// Up brings the machine to what is wanted, up to a k3s that is ready. What is so already
// stays untouched. Cut off anywhere, the next call goes on.
func (h *Host) Up(ctx context.Context, want Want, report k3s.Report) (Outcome, error) {
	var out Outcome
	m := h.K3s(want.Box)
	if want.Image != "" {
		if err := static(h.o.Executable); err != nil {
			return out, err
		}
	}
	if want.Adopt {
		if _, err := m.Adopt(ctx); err != nil {
			return out, err
		}
	}
	settings, err := h.settings(ctx, want)
	if err != nil {
		return out, err
	}
	var changed bool
	if out.Program, changed, err = h.ensureProgram(want.Box.Paths.Data); err != nil {
		return out, err
	}
	out.Changed = changed
	init, err := m.ChooseInit(ctx, want.Box.K3s.Init)
	if err != nil {
		return out, err
	}
	var image *ownImage
	if want.Image != "" {
		if image, err = newOwnImage(h.o.Executable, want.Image); err != nil {
			return out, err
		}
	}
	binary, err := h.binary(want)
	if err != nil {
		return out, err
	}
	record, err := m.Record(ctx)
	if err != nil {
		return out, err
	}
	archive := path.Join(k3s.ImagesDir(want.Box.K3s.DataDir), imageArchive)
	if record.Adopted {
		// Nothing of llmbox goes into directories of somebody else's k3s.
		archive = path.Join(want.Box.Paths.Data, "cache", imageArchive)
	}
	prepare := func(ctx context.Context) error {
		changed, err := h.ensureBoot(init, out.Program, want.Box)
		if err == nil && !record.Adopted {
			var laid bool
			laid, err = h.layImages(want)
			changed = changed || laid
		}
		out.Changed = out.Changed || changed
		if err != nil || image == nil {
			return err
		}
		changed, err = h.ensureArchive(ctx, image, archive)
		out.Changed = out.Changed || changed
		return err
	}
	done, err := m.Ensure(ctx, k3s.Want{
		Binary: binary, Settings: settings, Init: init,
		Hook:       h.command(out.Program, want.Box, "node-ip"),
		Supervisor: h.command(out.Program, want.Box, "supervise"),
		Prepare:    prepare,
	}, report)
	out.Changed = out.Changed || len(done.Changed) > 0 || done.Started || done.Restarted
	out.Version, out.NodeName, out.Restarted = done.Binary.Version, done.NodeName, done.Reasons
	if err != nil {
		return out, err
	}
	out.Supervised = !record.Adopted && done.Service.Init() == k3s.Supervised
	if record.Adopted {
		if err := prepare(ctx); err != nil {
			return out, err
		}
	}
	if !done.Started && !done.Restarted {
		imported, err := h.importBundle(ctx, done.Binary.Path, want)
		out.Changed = out.Changed || imported
		if err != nil {
			return out, err
		}
	}
	if err := h.ready(ctx, m, want, settings, done, &out, report); err != nil {
		return out, err
	}
	if err := h.pinImages(ctx, done.Binary.Path, want); err != nil || image == nil {
		return out, err
	}
	if report != nil {
		report(k3s.Progress{Phase: PhaseImage, Message: "bringing llmbox's image in"})
	}
	imported, err := h.importImage(ctx, image, done.Binary.Path, archive)
	out.Changed = out.Changed || imported
	return out, err
}

// ready waits for k3s, and for pods to get GPUs from it.
func (h *Host) ready(ctx context.Context, m *k3s.Machine, want Want, settings k3s.Settings, done k3s.Outcome, out *Outcome, report k3s.Report) error {
	prober := h.o.Prober
	if prober == nil {
		prober = m.NewProber(h.kubeconfig(settings))
	}
	waitFor := k3s.WaitFor{
		NodeName: done.NodeName, Role: settings.Role,
		NoDNS: k3s.Disables(settings, "coredns"), NoStorage: k3s.Disables(settings, "local-storage"),
	}
	bounded, cancel := context.WithTimeout(ctx, readyDeadline)
	defer cancel()
	if err := m.Wait(bounded, done.Service, waitFor, done.Since, prober, report); err != nil {
		return err
	}
	if !want.GPURuntime {
		return nil
	}
	verdict, restarted, err := m.EnsureRuntime(bounded, done.Service, waitFor, prober, report)
	if restarted {
		out.Changed = true
		out.Restarted = append(out.Restarted, verdict.Why)
	}
	if err != nil {
		return err
	}
	return verdict.Problem()
}

// kubeconfig is by which this machine's node can be looked at.
func (h *Host) kubeconfig(s k3s.Settings) string {
	if s.Role == k3s.Agent {
		return h.at(k3s.AgentKubeconfig(s.Box.K3s.DataDir))
	}
	return h.at(k3s.Kubeconfig)
}

func (h *Host) settings(ctx context.Context, want Want) (k3s.Settings, error) {
	s := k3s.Settings{Role: k3s.Server, Box: want.Box, ProxyEnvironment: h.o.ProxyEnvironment}
	var err error
	if want.Join != nil {
		s.Role, s.Join = k3s.Agent, &k3s.Join{URL: want.Join.URL, TokenFile: path.Join(StateDir, tokenFile)}
		if err := writeFile(h.at(s.Join.TokenFile), secretMode, []byte(want.Join.Token+"\n")); err != nil {
			return s, fmt.Errorf("keeping the token: %w", err)
		}
	}
	if s.Facts, err = k3s.ReadFacts(ctx, h.files, want.Box.K3s.DataDir); err != nil {
		return s, fmt.Errorf("reading the machine's facts: %w", err)
	}
	s.Facts.GPUs = want.GPUs
	if file := want.Box.Secrets.RegistryAuthFile; file != "" {
		if s.RegistryAuth, err = h.files.ReadFile(ctx, file, secretLimit); err != nil {
			return s, fmt.Errorf("reading the registries' credentials: %w", err)
		}
	}
	return s, nil
}

func (h *Host) binary(want Want) (k3s.WantBinary, error) {
	client, err := h.downloads(want.Box)
	if err != nil {
		return k3s.WantBinary{}, err
	}
	b := k3s.WantBinary{
		Version: cmp.Or(want.Box.K3s.Version, want.K3sVersion), Arch: runtime.GOARCH,
		Exact: want.Box.K3s.Version != "", Fetcher: fetcher{client},
	}
	if b.Version == want.K3sVersion {
		b.Pinned = want.K3sDigests[runtime.GOARCH]
	}
	if file := want.Box.K3s.BinaryPath; file != "" {
		b.File = h.at(file)
	}
	want.Bundle.fromBundle(&b)
	return b, nil
}

// command is a command line of llmbox' own that the machine runs by itself.
func (h *Host) command(program string, box config.Box, name string) []string {
	return []string{program, "host", name, "--data", box.Paths.Data, "--log", box.Paths.Log, "--k3s-data", box.K3s.DataDir}
}

// downloadRules are the way out that the box was told of, or that of the environment.
func downloadRules(box config.Box) download.Options {
	o := download.Options{CAFile: box.Network.CAFile}
	if p := box.Network.Proxy; p.HTTP != "" || p.HTTPS != "" {
		o.Proxy = &httpproxy.Config{HTTPProxy: p.HTTP, HTTPSProxy: p.HTTPS, NoProxy: noProxy(box)}
	}
	return o
}

func (h *Host) downloads(box config.Box) (*download.Client, error) {
	client, err := download.New(downloadRules(box))
	if err != nil {
		return nil, fmt.Errorf("preparing downloads: %w", err)
	}
	return client, nil
}

func noProxy(box config.Box) string {
	list := slices.Concat(box.Network.Proxy.NoProxy, []string{"127.0.0.0/8", "localhost", ".svc", box.Network.ClusterCIDR, box.Network.ServiceCIDR})
	out := ""
	for _, entry := range list {
		if out != "" {
			out += ","
		}
		out += entry
	}
	return out
}

// fetcher lets k3s download by internal/download.
type fetcher struct{ client *download.Client }

func (f fetcher) Fetch(ctx context.Context, want k3s.Fetch) error {
	if err := makeDir(path.Dir(want.Path)); err != nil {
		return fmt.Errorf("making the directory of a download: %w", err)
	}
	file := download.File{URLs: []string{want.URL}, Path: want.Path, Digest: download.SHA256(want.SHA256)}
	if want.Progress != nil {
		file.Progress = func(p download.Progress) { want.Progress(p.Done, max(p.Total, 0)) }
	}
	_, err := f.client.Fetch(ctx, file)
	return wayOut(err)
}

func (f fetcher) Text(ctx context.Context, url string, limit int64) ([]byte, error) {
	answer, err := f.client.Read(ctx, download.Document{URL: url, Limit: limit})
	return answer.Body, wayOut(err)
}

// wayOut puts beside a failed download what a person can do.
func wayOut(err error) error {
	var authority *download.CertificateError
	var full *download.SpaceError
	out := "Run the command again, it goes on where it stopped. Without a way to the internet: --k3s-binary FILE"
	switch {
	case err == nil, errors.Is(err, context.Canceled):
		return err
	case errors.As(err, &authority):
		out = "If a proxy of yours stands between: --set network.caFile=FILE names its certificate authority"
	case errors.As(err, &full):
		out = "Free space, then run the command again: it goes on where it stopped"
	}
	return &k3s.Problem{What: err.Error(), Out: out, Err: err}
}

// ModelDir is what the model server gets as HF_HOME.
func ModelDir(box config.Box) string { return path.Join(box.Paths.Data, "models") }

// modelUser is the model server's (vLLM's images run as 2000).
const modelUser = 2000

// Weights finds out what the weights of the box's model are. The token is for the hub
// alone.
func (h *Host) Weights(ctx context.Context, box config.Box, token string, notice func(string)) (*weights.Weights, error) {
	source := box.Model.Source
	if source == config.SourceHub {
		source = ""
	} else if path.IsAbs(source) {
		source = h.at(source)
	}
	return weights.Open(ctx, weights.Options{
		Model: box.Model.Name, Revision: box.Model.Revision, Dir: h.at(ModelDir(box)), Source: source, Token: token,
		Download: downloadRules(box), UID: modelUser, GID: modelUser, Notice: notice,
	})
}

// NodeName is the name that the node has or will get.
func (h *Host) NodeName(ctx context.Context, box config.Box) (string, error) {
	record, err := h.K3s(box).Record(ctx)
	if err != nil {
		return "", err
	}
	facts, err := k3s.ReadFacts(ctx, h.files, box.K3s.DataDir)
	if err != nil {
		return "", fmt.Errorf("reading the machine's facts: %w", err)
	}
	return k3s.NodeNameOf(k3s.Settings{Box: box, Facts: facts, NodeName: record.NodeName})
}

// Address is where this machine's k3s is reached by others.
func (h *Host) Address(ctx context.Context, box config.Box) (netip.Addr, error) {
	if box.Network.NodeIP != "" {
		return netip.ParseAddr(box.Network.NodeIP)
	}
	addresses, err := k3s.ReadAddresses(ctx, h.files)
	if err != nil {
		return netip.Addr{}, err
	}
	return k3s.NodeAddress(addresses)
}

// NodeIP is what runs before each start of k3s.
func (h *Host) NodeIP(ctx context.Context, box config.Box) error {
	return k3s.RefreshNodeIP(ctx, h.K3s(box), nil)
}

// Supervise keeps k3s running where there is no service manager.
func (h *Host) Supervise(ctx context.Context, box config.Box) error {
	return k3s.SuperviseInstalled(ctx, h.K3s(box))
}

// IsRoot says whether this process may change the machine.
func (h *Host) IsRoot() bool { return h.o.Root != "/" || os.Geteuid() == 0 }

// HasKubeconfig says whether k3s has written one that can be read.
func (h *Host) HasKubeconfig(ctx context.Context) (there, readable bool) {
	const limit = 1 << 20
	if _, err := h.files.Stat(ctx, k3s.Kubeconfig); err != nil {
		return false, false
	}
	_, err := h.files.ReadFile(ctx, k3s.Kubeconfig, limit)
	return true, !errors.Is(err, os.ErrPermission)
}
