package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/bake"
	"github.com/llmbox-dev/llmbox/internal/bundle"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/machine"
)

// bakeDoc is the document of bake --output json.
type bakeDoc struct {
	bake.Report
	// Clean says that nothing in the image tells one machine from another.
	Clean  bool   `json:"clean"`
	Bundle string `json:"bundle_manifest_sha256,omitempty"`
	// WrittenBytes are those that this run put on the disk.
	WrittenBytes int64 `json:"written_bytes"`
}

// bakeFlags are the flags of bake.
type bakeFlags struct {
	bundle bundleFlags
	check  bool
}

func (a *app) bakeCommand() *cobra.Command {
	var flags bakeFlags
	cmd := &cobra.Command{
		Use:   "bake --bundle FILE|- [-- FLAGS OF INSTALL]",
		Short: "Make this machine an image of which boxes are made",
		Long: `bake puts k3s, container images, weights and llmbox itself on the disk of a builder
machine, and a unit that makes each machine that boots from a copy of that disk a box,
without a download. Nothing runs here and no identity is made: certificates, tokens,
keys, passwords and the node's name come into being at the first boot. The machine's own
id is emptied. Then shut it down and take the image of its disk.

What follows -- are flags of the install at the first boot. A machine that does not fit,
because of its GPU, its disk or anything that preflight finds, is refused there with the
reason, in ` + bake.FailedFile + `; no other model is taken silently.

At the end, and with --check alone, every file of llmbox and k3s is listed and held
against those that may be in an image. Ends with 3 where another is found.`,
		Example: `  llmbox bundle create --gpu l4 -o box.tar.zst
  sudo llmbox bake --bundle box.tar.zst -- --port 8081 && sudo poweroff
  sudo llmbox bake --bundle box.tar.zst --config box.yaml
  sudo llmbox bake --check --output json | jq .problems`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if at := cmd.ArgsLenAtDash(); len(args) > 0 && at != 0 {
				return usageError{fmt.Errorf("%q is no flag of bake", args[0]), "flags of the install come after --: llmbox bake --bundle FILE -- --port 8081"}
			}
			return a.runBake(cmd, &flags, args)
		},
	}
	flags.bundle.register(cmd)
	cmd.Flags().BoolVar(&flags.check, "check", false, "only look whether this machine can become an image, and change nothing")
	return cmd
}

func (a *app) runBake(cmd *cobra.Command, flags *bakeFlags, args []string) error {
	ctx := cmd.Context()
	if runtime.GOOS != "linux" {
		return usageError{fmt.Errorf("this machine runs %s, a box needs Linux", runtime.GOOS), "run it on the builder machine"}
	}
	if a.configFile == "-" {
		return usageError{errors.New("the configuration becomes part of the image"), "name a file: --config FILE"}
	}
	host, err := a.thisMachine()
	if err != nil {
		return err
	}
	if !host.IsRoot() {
		return usageError{errors.New("an image holds what only root may read and write"), "run it as root: sudo llmbox bake"}
	}
	box, err := a.boxOnMachine(ctx, cmd, &boxFlags{}, host)
	if err != nil {
		return err
	}
	if flags.check {
		return a.checkBaked(host, box, bakeDoc{})
	}
	if flags.bundle.file == "" {
		return usageError{errors.New("nothing says what goes into the image"), "llmbox bundle create -o box.tar.zst, then sudo llmbox bake --bundle box.tar.zst"}
	}
	if err := a.checkInstallFlags(args); err != nil {
		return err
	}
	if !initFits(box.K3s.Init) {
		return usageError{fmt.Errorf("k3s.init is %s, and systemd runs the first boot", box.K3s.Init), "leave it out of the configuration"}
	}
	if err := refuseSecrets(box); err != nil {
		return err
	}
	var content []byte
	if a.configFile != "" {
		if content, err = readSmall(a.configFile); err != nil {
			return usageError{fmt.Errorf("reading the configuration: %w", err), "name a file that can be read with --config"}
		}
	}
	why, err := host.Serves(ctx, box)
	if err != nil {
		return err
	}
	if why != "" {
		return bakeRefusal{fmt.Errorf("%w: this machine is a box, and copies of it would share its keys and certificates: %s", installer.ErrCheckFailed, why),
			"bake on a machine that was never one, or: sudo llmbox uninstall --keep-data --keep-binary, then bake again"}
	}
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		return bakeRefusal{fmt.Errorf("%w: systemd does not run here, and a unit of its makes the box at the first boot", installer.ErrCheckFailed), "bake on a machine with systemd"}
	}
	return a.bakeHere(ctx, host, flags, machine.Baking{Box: box, Config: content, Args: args})
}

// bakeHere does it, under the lock of the machine.
func (a *app) bakeHere(ctx context.Context, host *machine.Host, flags *bakeFlags, baking machine.Baking) error {
	release, err := host.Lock("bake", "")
	if err != nil {
		return err
	}
	defer release()
	if err := flags.bundle.read(a); err != nil {
		return err
	}
	defer flags.bundle.close()
	baking.Bundle = flags.bundle.open.reader
	a.say("baking %s", flags.bundle.open.account())
	brought, err := host.Bake(ctx, baking, func(int64, string) {})
	if err != nil {
		if isBundleError(err) {
			return refusal(err)
		}
		return err
	}
	if err := host.Forget(); err != nil {
		return err
	}
	return a.checkBaked(host, baking.Box, bakeDoc{Bundle: baking.Bundle.Digest(), WrittenBytes: brought.Written})
}

func isBundleError(err error) bool {
	for _, known := range []error{bundle.ErrTruncated, bundle.ErrManifest, bundle.ErrNotBundle, bundle.ErrBomb} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// bakeRefusal is a machine that can't become an image, and the way out.
type bakeRefusal struct {
	error
	fix string
}

func (e bakeRefusal) Unwrap() error { return e.error }

// Fix is the way out.
func (e bakeRefusal) Fix() string { return e.fix }

// checkInstallFlags refuses now what the first boot would refuse on every clone.
func (a *app) checkInstallFlags(args []string) error {
	other := &app{env: a.env}
	root := other.root()
	install, rest, err := root.Find(append([]string{"install"}, args...))
	if err != nil {
		return usageError{err, "llmbox install --help shows what can follow --"}
	}
	if err := install.ParseFlags(rest); err != nil {
		return usageError{err, "llmbox install --help shows what can follow --"}
	}
	if left := install.Flags().Args(); len(left) > 0 {
		return usageError{fmt.Errorf("%q is no flag of install", left[0]), "llmbox install --help shows what can follow --"}
	}
	for _, name := range []string{"bundle", "bundle-key", "bundle-signature", "bundle-digest", "config", "output", "kubeconfig", "context", "adopt", "dry-run", "hf-token-file"} {
		if install.Flags().Changed(name) {
			return usageError{fmt.Errorf("--%s can't follow --: it is settled by the image, or has no place in one", name), "leave it out"}
		}
	}
	if init := install.Flags().Lookup("init").Value.String(); !initFits(init) {
		return usageError{fmt.Errorf("--init %s can't follow --: systemd runs the first boot", init), "leave it out"}
	}
	sets, err := install.Flags().GetStringArray("set")
	if err != nil {
		return fmt.Errorf("reading --set: %w", err)
	}
	for _, set := range sets {
		if strings.HasPrefix(set, "paths.") || strings.HasPrefix(set, "k3s.dataDir") || strings.HasPrefix(set, "k3s.init") || strings.HasPrefix(set, "secrets.") {
			return usageError{fmt.Errorf("--set %s can't follow --: the image depends on it", set), "write it into a file: llmbox bake --config FILE"}
		}
	}
	return nil
}

// initFits says whether what keeps k3s running outlives the unit of the first boot.
func initFits(init string) bool { return init == "" || init == "auto" || init == "systemd" }

// refuseSecrets refuses a configuration whose secrets would be copied with the image.
func refuseSecrets(box config.Box) error {
	for _, file := range []string{box.Secrets.HFTokenFile, box.Secrets.RegistryAuthFile} {
		if file == "" {
			continue
		}
		if _, err := os.Stat(file); err == nil {
			return bakeRefusal{fmt.Errorf("%w: %s holds a secret, and every copy of the disk would have it", installer.ErrCheckFailed, file),
				"move it away; have each machine get its own by cloud-init, before its first boot ends"}
		}
	}
	return nil
}

// checkBaked shows what lies in the image, and fails where something must not.
func (a *app) checkBaked(host *machine.Host, box config.Box, doc bakeDoc) error {
	found, err := host.LookAtBaked(box)
	if err != nil {
		return err
	}
	doc.Report, doc.Clean = found, found.Clean()
	if a.output == "json" {
		err = a.printJSON(doc)
	} else {
		_, err = io.WriteString(a.env.Stdout, bakedText(doc))
	}
	if err != nil || doc.Clean {
		return err
	}
	return bakeRefusal{fmt.Errorf("%w: %d things on this machine have no place in an image", installer.ErrCheckFailed, len(found.Problems)),
		"remove what is named above; what a box left: sudo llmbox uninstall --keep-data --keep-binary"}
}

// bakedText is what a person reads.
func bakedText(doc bakeDoc) string {
	var b strings.Builder
	kinds, bytes, order := map[string]int{}, map[string]int64{}, []string{}
	for _, f := range doc.Files {
		if kinds[f.What] == 0 {
			order = append(order, f.What)
		}
		kinds[f.What]++
		bytes[f.What] += f.Bytes
	}
	for _, what := range order {
		fmt.Fprintf(&b, "%4d files, %8.2f MB: %s\n", kinds[what], float64(bytes[what])/1e6, what)
	}
	for _, p := range doc.Problems {
		fmt.Fprintf(&b, "not for an image: %s: %s\n", p.Path, p.Why)
	}
	for _, n := range doc.Notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	switch {
	case !doc.Clean:
	case len(doc.Files) == 0:
		b.WriteString("Nothing of llmbox is here, and no identity.\n")
	default:
		b.WriteString("No identity is here. Shut this machine down now and take the image of its disk.\n")
	}
	return b.String()
}

// firstBoot is what the unit of an image runs: the install that was baked. Its events go
// to a log, and how it ended to a marker.
func (a *app) firstBoot() (err error) {
	host, err := a.thisMachine()
	if err != nil {
		return err
	}
	record, err := host.Baked(context.Background())
	if err != nil {
		return err
	}
	const dirMode, mode = 0o755, 0o644
	if err := os.MkdirAll(record.Log, dirMode); err != nil { // #nosec G301 -- as all of llmbox's
		return fmt.Errorf("making the directory of logs: %w", err)
	}
	log, err := os.OpenFile(filepath.Join(record.Log, bake.LogFile), os.O_WRONLY|os.O_CREATE|os.O_APPEND, mode) // #nosec G302,G304 -- events hold no secret
	if err != nil {
		return fmt.Errorf("opening the log: %w", err)
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	said := &bytes.Buffer{}
	env := a.env
	env.Stdin, env.Terminal = strings.NewReader(""), false
	env.Stdout, env.Stderr = log, io.MultiWriter(a.env.Stderr, said)
	code := Main(record.Args, env)
	if code == exitDone {
		return host.EndFirstBoot("")
	}
	why := fmt.Sprintf("the install ended with %d: %s", code, lastError(said.String()))
	if code == exitCheckFailed {
		// Asked of the GPUs that are here, whatever they were on the builder.
		models := &bytes.Buffer{}
		env.Stdout, env.Stderr = models, io.Discard
		if Main([]string{"models", "--output", "json"}, env) == exitDone {
			why += fittingModels(models.Bytes())
		}
	}
	if err := host.EndFirstBoot(why); err != nil {
		return err
	}
	return firstBootError{code, why}
}

// fittingModels names those that this machine's GPUs could serve, best first.
func fittingModels(answer []byte) string {
	var doc struct {
		Models []struct{ Name, Fit string }
	}
	if err := json.Unmarshal(answer, &doc); err != nil {
		return ""
	}
	const most = 3
	var names []string
	for _, m := range doc.Models {
		if m.Fit == "fits" && len(names) < most {
			names = append(names, m.Name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return "; the GPUs of this machine could serve " + strings.Join(names, ", ")
}

// lastError is the error that a run ended with and its way out, of what it told people.
func lastError(said string) string {
	if i := strings.LastIndex("\n"+said, "\nerror: "); i >= 0 {
		said = said[i:]
	}
	return foldLines(said)
}

// firstBootError passes the exit code of the install on: systemd goes by it.
type firstBootError struct {
	code int
	why  string
}

func (e firstBootError) Error() string { return e.why }
