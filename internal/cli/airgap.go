package cli

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/llmbox-dev/llmbox/internal/bundle"
	"github.com/llmbox-dev/llmbox/internal/component"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/download"
	"github.com/llmbox-dev/llmbox/internal/installer"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/machine"
	"github.com/llmbox-dev/llmbox/internal/weights"
)

const (
	// digestSuffix and signatureSuffix name the files beside a bundle.
	digestSuffix    = ".digest"
	signatureSuffix = ".digest.sig"
	// smallFile bounds digest files, signatures, keys and lists of images.
	smallFile = 1 << 20
)

// trustFlags say by which key a bundle has to be signed.
type trustFlags struct{ key, signature, digest string }

func (t *trustFlags) register(cmd *cobra.Command, prefix string) {
	f := cmd.Flags()
	f.StringVar(&t.key, prefix+"key", "", "PEM file with the public key (Ed25519 or ECDSA) by which the bundle has to be signed")
	f.StringVar(&t.signature, prefix+"signature", "", "file with the signature of the digest file (default FILE"+signatureSuffix+")")
	f.StringVar(&t.digest, prefix+"digest", "", "digest file (default FILE"+digestSuffix+", where there is one)")
}

func (a *app) bundleCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "bundle", Short: "Carry a box to a machine without a network", Args: noArgs,
		Example: `  llmbox bundle create --gpu l4 -o box.bundle       on a machine with a network
  llmbox bundle verify box.bundle
  sudo llmbox install --bundle box.bundle           on the one without`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.AddCommand(a.bundleCreateCommand(), a.bundleVerifyCommand())
	return c
}

// createFlags are the flags of bundle create.
type createFlags struct {
	box                                               boxFlags
	file, k3sBinary, k3sImages, architecture, program string
}

func (a *app) bundleCreateCommand() *cobra.Command {
	var flags createFlags
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Put everything a box needs into one file",
		Long: `create fetches k3s, every container image, the model's weights and llmbox itself into
one file, from which a machine without any network becomes a box. What was fetched is
kept beside the file until it is whole: run again, it goes on.

The digest of the bundle is written beside it; that file is what you sign:
  openssl pkeyutl -sign -rawin -inkey key.pem -in box.tar.zst.digest -out box.tar.zst.digest.sig`,
		Example: `  llmbox bundle create --gpu l4 --model Qwen/Qwen3-8B -o box.tar.zst
  sudo llmbox install --bundle box.tar.zst`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.createBundle(cmd, &flags) },
	}
	flags.box.register(cmd)
	f := cmd.Flags()
	// Takes the place of the global flag: what this command puts out is the bundle.
	f.StringVarP(&flags.file, "output", "o", "llmbox-bundle.tar.zst", "file to write")
	f.StringVar(&flags.k3sBinary, "k3s-binary", "", "k3s binary to take instead of the release's (absolute path)")
	f.StringVar(&flags.k3sImages, "k3s-images", "", "list of the images that k3s itself runs (default k3s-images.txt beside the binary, else the release's)")
	f.StringVar(&flags.architecture, "arch", runtime.GOARCH, "architecture of the machines: amd64 or arm64")
	f.StringVar(&flags.program, "llmbox", "", "llmbox for that architecture (default: this one)")
	flags.box.extra = func(l *config.Layer) error {
		if f.Changed("k3s-binary") {
			return l.Set("k3s.binaryPath", flags.k3sBinary, config.Flag("k3s-binary"))
		}
		return nil
	}
	return cmd
}

func (a *app) createBundle(cmd *cobra.Command, flags *createFlags) (err error) {
	ctx := cmd.Context()
	if flags.architecture != runtime.GOARCH && flags.program == "" {
		return usageError{fmt.Errorf("this llmbox is for %s", runtime.GOARCH), "name the one for " + flags.architecture + ": --llmbox FILE"}
	}
	s, err := a.settle(ctx, cmd, &flags.box, false, a.newLogger())
	if err != nil {
		return err
	}
	client, err := download.New(machine.DownloadRules(s.box))
	if err != nil {
		return fmt.Errorf("preparing downloads: %w", err)
	}
	defer client.CloseIdle()
	work, err := filepath.Abs(flags.file + ".work")
	if err != nil {
		return fmt.Errorf("finding the work directory: %w", err)
	}
	parts := bundle.Parts{Version: a.env.Version, Architecture: flags.architecture, LLMBox: flags.program, Work: work}
	if parts.LLMBox == "" {
		if parts.LLMBox, err = a.env.Executable(); err != nil {
			return fmt.Errorf("finding the own binary: %w", err)
		}
	}
	if err := a.bundleK3s(ctx, s, flags, client, &parts); err != nil {
		return err
	}
	if err := a.bundleWeights(ctx, s, &parts); err != nil {
		return err
	}
	registries := &bundle.Registries{Client: client, Architecture: flags.architecture, Mirrors: map[string][]string{}}
	for host, m := range s.box.Registries.Mirrors {
		registries.Mirrors[host] = m.Endpoints
	}
	if file := s.box.Secrets.RegistryAuthFile; file != "" {
		raw, err := readSmall(file)
		if err != nil {
			return usageError{fmt.Errorf("reading the registries' credentials: %w", err), "name a file that can be read in secrets.registryAuthFile"}
		}
		if registries.Credentials, err = k3s.RegistryCredentials(raw); err != nil {
			return err
		}
	}
	return a.writeBundleFile(ctx, flags.file, parts, registries)
}

// bundleK3s brings k3s, and names the images that it runs itself and those of the plan.
func (a *app) bundleK3s(ctx context.Context, s *settled, flags *createFlags, client *download.Client, parts *bundle.Parts) error {
	want := k3s.WantBinary{
		Version: cmp.Or(s.box.K3s.Version, s.table.K3s.Shipped), Arch: flags.architecture, Fetcher: machine.Fetcher(client),
	}
	name, err := k3s.Asset(want.Arch)
	if err != nil {
		return err
	}
	parts.K3sName = name
	list := flags.k3sImages
	if parts.K3s = s.box.K3s.BinaryPath; parts.K3s != "" {
		if want.Arch == runtime.GOARCH {
			// One for other machines can't be asked.
			version, err := k3s.NewMachine(k3s.Options{State: parts.Work}).VersionOf(ctx, parts.K3s)
			if err != nil {
				return usageError{err, "name a k3s that runs with --k3s-binary"}
			}
			parts.K3sVersion = version.String()
		}
		if beside := filepath.Join(filepath.Dir(parts.K3s), "k3s-images.txt"); list == "" {
			if _, err := os.Stat(beside); err == nil {
				list = beside
			}
		}
	} else {
		parts.K3sVersion = want.Version
		a.say("k3s %s", want.Version)
		m := k3s.NewMachine(k3s.Options{State: parts.Work})
		if parts.K3s, parts.K3sSums, err = m.Release(ctx, want, nil); err != nil {
			return err
		}
	}
	var own []string
	if list != "" {
		raw, err := readSmall(list)
		if err != nil {
			return usageError{fmt.Errorf("reading the images of k3s: %w", err), "name a list, one image a line, with --k3s-images"}
		}
		own = k3s.ImageList(raw)
	} else if own, err = k3s.ReleaseImages(ctx, want); err != nil {
		return usageError{err, "name the list of the images that k3s runs with --k3s-images FILE"}
	}
	seen := map[string]bool{}
	add := func(group bundle.Group, reference, digest string) {
		if !seen[reference] {
			seen[reference] = true
			parts.Images = append(parts.Images, bundle.Wanted{Reference: reference, Digest: digest, Group: group})
		}
	}
	for _, reference := range own {
		add(bundle.GroupFirst, reference, "")
	}
	images := s.plan.BundleImages()
	for _, stage := range []struct {
		group  bundle.Group
		images []component.Image
	}{{bundle.GroupFirst, images.First}, {bundle.GroupModel, images.Model}, {bundle.GroupRest, images.Rest}} {
		for _, i := range stage.images {
			add(stage.group, i.Reference, i.Digest)
		}
	}
	return nil
}

// bundleWeights brings the weights of a box that serves a model of its own.
func (a *app) bundleWeights(ctx context.Context, s *settled, parts *bundle.Parts) error {
	if s.box.Mode("weights") != config.ModeInstall || filepath.IsAbs(s.box.Model.Name) {
		return nil
	}
	token, err := a.hubToken(s.box)
	if err != nil {
		return err
	}
	source := s.box.Model.Source
	if source == config.SourceHub {
		source = ""
	}
	dir := filepath.Join(parts.Work, "models")
	files, err := weights.Open(ctx, weights.Options{
		Model: s.box.Model.Name, Revision: s.box.Model.Revision, Dir: dir, Source: source, Token: token,
		Download: machine.DownloadRules(s.box), Notice: func(text string) { a.newLogger().Warn("weights", "notice", text) },
	})
	if err != nil {
		return fixedError{err, "check the model's name, its licence and the token: --hf-token-file FILE"}
	}
	defer files.Close()
	a.say("weights of %s: %d files, %.2f GB", s.box.Model.Name, files.Files, float64(files.Bytes)/1e9)
	if err := files.Fetch(ctx, nil); err != nil {
		return err
	}
	listing, err := files.Listing()
	if err != nil {
		return fmt.Errorf("listing the weights: %w", err)
	}
	parts.Model = &bundle.Model{Name: s.box.Model.Name, Commit: files.Commit, Bytes: files.Bytes, Listing: listing}
	for _, b := range files.Blobs() {
		parts.Files = append(parts.Files, bundle.WeightsFile{At: filepath.Join(dir, filepath.FromSlash(b.Path)), Blob: b.Name})
	}
	return nil
}

// say tells a person what is being done.
func (a *app) say(format string, args ...any) { _, _ = fmt.Fprintf(a.env.Stderr, format+"\n", args...) }

func (a *app) writeBundleFile(ctx context.Context, file string, parts bundle.Parts, from *bundle.Registries) (err error) {
	temporary := file + ".incomplete"
	out, err := os.Create(temporary) // #nosec G304 -- the user's own
	if err != nil {
		return usageError{err, "name a place that can be written with -o"}
	}
	defer func() {
		if err != nil {
			_ = out.Close()
			_ = os.Remove(temporary)
		}
	}()
	began, doing := time.Now(), ""
	m, digest, err := bundle.Create(ctx, parts, from, out, func(p bundle.Progress) {
		if p.Doing != doing {
			doing = p.Doing
			switch doing {
			case "resolve":
				a.say("%d images", p.Total)
			case "fetch":
				a.say("fetching %.2f GB of images", float64(p.Total)/1e9)
			case "write":
				began = time.Now()
				a.say("writing %.2f GB", float64(p.Total)/1e9)
			}
		}
	})
	if err != nil {
		return err
	}
	if err := out.Sync(); err != nil {
		return fmt.Errorf("writing the bundle: %w", err)
	}
	info, err := out.Stat()
	if err != nil {
		return fmt.Errorf("writing the bundle: %w", err)
	}
	if err := out.Close(); err != nil {
		return fmt.Errorf("writing the bundle: %w", err)
	}
	if err := os.WriteFile(file+digestSuffix, bundle.Detached(digest), 0o644); err != nil { // #nosec G306 -- to be handed on
		return fmt.Errorf("writing the digest: %w", err)
	}
	if err := os.Rename(temporary, file); err != nil {
		return fmt.Errorf("writing the bundle: %w", err)
	}
	if err := os.RemoveAll(parts.Work); err != nil {
		return fmt.Errorf("clearing the downloads away: %w", err)
	}
	_, err = fmt.Fprintf(a.env.Stdout, "%s: %d images, %.2f GB in %.2f GB, written in %s\nsha256 of its manifest: %s (%s)\n",
		file, len(m.Images), float64(m.Bytes())/1e9, float64(info.Size())/1e9, time.Since(began).Round(100*time.Millisecond), digest, file+digestSuffix)
	return err
}

func (a *app) bundleVerifyCommand() *cobra.Command {
	var trust trustFlags
	var architecture string
	cmd := &cobra.Command{
		Use:   "verify FILE|-",
		Short: "Read a bundle to its end and say whether it is whole",
		Long: `verify reads the whole bundle and compares every file with the manifest: a bundle that
was changed, cut off, made for other machines or by an older llmbox is refused by name,
as install refuses it. With --key it has to be signed, too.`,
		Example: `  llmbox bundle verify box.tar.zst
  llmbox bundle verify --key box.pub box.tar.zst
  ssh store cat box.tar.zst | llmbox bundle verify -`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.ExactArgs(1)(cmd, args); err != nil {
				return usageError{err, helpOf(cmd)}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.openBundle(args[0], trust, bundle.Want{Architecture: architecture, Version: a.env.Version})
			if err != nil {
				return err
			}
			defer c.close()
			if err := c.reader.Each(cmd.Context(), nil, nil); err != nil {
				return refusal(err)
			}
			return a.printBundle(c)
		},
	}
	trust.register(cmd, "")
	cmd.Flags().StringVar(&architecture, "arch", runtime.GOARCH, "architecture of the machine it is meant for")
	return cmd
}

// bundleVerdict is the document of bundle verify --output json.
type bundleVerdict struct {
	Digest       string `json:"manifest_sha256"`
	Version      string `json:"llmbox_version"`
	Architecture string `json:"architecture"`
	Images       int    `json:"images"`
	Model        string `json:"model,omitempty"`
	Bytes        int64  `json:"size_bytes"`
	Signed       bool   `json:"signature_verified"`
}

func (a *app) printBundle(c *carried) error {
	m := c.reader.Manifest()
	v := bundleVerdict{Digest: c.reader.Digest(), Version: m.Version, Architecture: m.Architecture, Images: len(m.Images), Bytes: m.Bytes(), Signed: c.signed}
	if m.Model != nil {
		v.Model = m.Model.Name
	}
	if a.output == "json" {
		return a.printJSON(v)
	}
	signed := "no signature was asked for"
	if c.signed {
		signed = "signed by the key"
	}
	_, err := fmt.Fprintf(a.env.Stdout, "whole: %s; sha256 of its manifest %s; %s\n", c.account(), v.Digest, signed)
	return err
}

// carried is a bundle that is about to be read.
type carried struct {
	name   string
	reader *bundle.Reader
	file   io.Closer
	signed bool
}

func (c *carried) close() {
	c.reader.Close()
	if c.file != nil {
		_ = c.file.Close()
	}
}

// account says what is in it.
func (c *carried) account() string {
	m := c.reader.Manifest()
	text := fmt.Sprintf("%.2f GB for %s by llmbox %s: k3s %s, %d images", float64(m.Bytes())/1e9, m.Architecture, m.Version, cmp.Or(m.K3s.Version, "as named"), len(m.Images))
	if m.Model != nil {
		text += fmt.Sprintf(", %.2f GB of weights of %s", float64(m.Model.Bytes)/1e9, m.Model.Name)
	}
	return text
}

// refusal is a bundle that is of no use.
func refusal(err error) error {
	for _, known := range []struct {
		err error
		fix string
	}{
		{bundle.ErrArchitecture, "make one for this machine: llmbox bundle create --arch " + runtime.GOARCH},
		{bundle.ErrOlder, "make one with this llmbox: llmbox bundle create; or use the llmbox that is in it"},
		{bundle.ErrNewer, "use the llmbox that made it"},
		{bundle.ErrFormat, "use the llmbox that made it"},
		{bundle.ErrTruncated, "copy it anew, and compare with llmbox bundle verify"},
	} {
		if errors.Is(err, known.err) {
			return usageError{err, known.fix}
		}
	}
	if errors.Is(err, context.Canceled) {
		return err
	}
	return usageError{err, "copy it anew from where it was made; llmbox bundle verify FILE says whether it is whole"}
}

// openBundle reads what a bundle says of itself and refuses one that is of no use.
func (a *app) openBundle(file string, trust trustFlags, want bundle.Want) (*carried, error) {
	c := &carried{name: file}
	var from io.Reader = a.env.Stdin
	if file != "-" {
		opened, err := os.Open(file) // #nosec G304 -- the user's own
		if err != nil {
			return nil, usageError{fmt.Errorf("opening the bundle: %w", err), "name a bundle that can be read, or - for standard input"}
		}
		from, c.file = opened, opened
	}
	reader, err := bundle.NewReader(from)
	if err != nil {
		if c.file != nil {
			_ = c.file.Close()
		}
		return nil, refusal(err)
	}
	c.reader = reader
	err = reader.Manifest().Fits(want)
	if err == nil {
		c.signed, err = trust.check(file, reader.Digest())
	}
	if err != nil {
		c.close()
		return nil, refusal(err)
	}
	return c, nil
}

// errSignature means that a bundle is not signed by the key that was named.
var errSignature = errors.New("the bundle is not signed by that key")

// check compares a bundle with its digest file and, where a key was named, the signature.
func (t trustFlags) check(file, digest string) (signed bool, err error) {
	name, named := t.digest, t.digest != ""
	if !named && file != "-" {
		name = file + digestSuffix
	}
	if name != "" {
		raw, err := readSmall(name)
		switch {
		case errors.Is(err, fs.ErrNotExist) && !named:
		case err != nil:
			return false, fmt.Errorf("reading the digest file: %w", err)
		default:
			if err := bundle.CheckDetached(raw, digest); err != nil {
				return false, err
			}
		}
	}
	if t.key == "" {
		return false, nil
	}
	at := t.signature
	if at == "" {
		if file == "-" {
			return false, fmt.Errorf("%w: no signature was named", errSignature)
		}
		at = file + signatureSuffix
	}
	key, err := readSmall(t.key)
	if err != nil {
		return false, fmt.Errorf("reading the key: %w", err)
	}
	signature, err := readSmall(at)
	if err != nil {
		return false, fmt.Errorf("%w: %w", errSignature, err)
	}
	return true, checkSignature(key, signature, bundle.Detached(digest))
}

// checkSignature takes Ed25519 over the message and ECDSA over its SHA-256, raw or in
// base64.
func checkSignature(key, signature, message []byte) error {
	block, _ := pem.Decode(key)
	if block == nil {
		return fmt.Errorf("%w: the key is not in PEM", errSignature)
	}
	public, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		return fmt.Errorf("%w: %w", errSignature, err)
	}
	if plain, err := base64.StdEncoding.DecodeString(string(bytes.TrimSpace(signature))); err == nil {
		signature = plain
	}
	good := false
	switch public := public.(type) {
	case ed25519.PublicKey:
		good = ed25519.Verify(public, message, signature)
	case *ecdsa.PublicKey:
		sum := sha256.Sum256(message)
		good = ecdsa.VerifyASN1(public, sum[:], signature)
	default:
		return fmt.Errorf("%w: neither Ed25519 nor ECDSA", errSignature)
	}
	if !good {
		return errSignature
	}
	return nil
}

func readSmall(name string) ([]byte, error) {
	file, err := os.Open(name) // #nosec G304 -- the user's own
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	return io.ReadAll(io.LimitReader(file, smallFile))
}

// bundleFlags are the flags by which install takes a bundle.
type bundleFlags struct {
	file  string
	trust trustFlags
	open  *carried
}

func (b *bundleFlags) register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&b.file, "bundle", "", "take everything from this file of llmbox bundle create, or - for standard input; nothing is downloaded")
	b.trust.register(cmd, "bundle-")
}

// opened opens the bundle, where one was named and it is not open yet, before anything
// is looked at.
func (b *bundleFlags) opened(ctx context.Context, cmd *cobra.Command, a *app, flags *boxFlags) error {
	if b.file == "" || b.open != nil {
		return nil
	}
	return b.take(ctx, cmd, a, flags)
}

func (b *bundleFlags) close() {
	if b.open != nil {
		b.open.close()
	}
}

// read opens the bundle and refuses one that is of no use here.
func (b *bundleFlags) read(a *app) (err error) {
	b.open, err = a.openBundle(b.file, b.trust, bundle.Want{Architecture: runtime.GOARCH, Version: a.env.Version})
	return err
}

// take opens the bundle and has the box be the one that is in it.
func (b *bundleFlags) take(ctx context.Context, cmd *cobra.Command, a *app, flags *boxFlags) error {
	if b.file == "-" && a.configFile == "-" {
		return usageError{errors.New("--bundle and --config both read standard input"), "name a file for one of them"}
	}
	if err := b.read(a); err != nil {
		return err
	}
	model := b.open.reader.Manifest().Model
	if model == nil {
		return nil
	}
	blind := *flags
	blind.noAssumption = true
	before, err := a.decide(ctx, cmd, &blind, false, a.newLogger())
	if before == nil {
		return err
	}
	if source, known := before.sources.Find("model.name"); known && source.Asked() && before.box.Model.Name != model.Name {
		return usageError{fmt.Errorf("the bundle has the weights of %s, and %s is asked for (%s)", model.Name, before.box.Model.Name, source.Origin),
			"leave the model out, or make a bundle with that one"}
	}
	extra := flags.extra
	flags.extra = func(l *config.Layer) error {
		var problems []error
		if extra != nil {
			problems = append(problems, extra(l))
		}
		if !cmd.Flags().Changed("model") {
			problems = append(problems, l.Set("model.name", model.Name, config.Flag("bundle")))
		}
		if !cmd.Flags().Changed("revision") {
			problems = append(problems, l.Set("model.revision", model.Commit, config.Flag("bundle")))
		}
		return errors.Join(problems...)
	}
	return nil
}

// holds refuses a bundle that lacks what the box needs.
func (b *bundleFlags) holds(s *settled) error {
	m := b.open.reader.Manifest()
	has := map[string]string{}
	for _, i := range m.Images {
		has[i.Reference] = i.Digest
	}
	for _, i := range s.plan.BundleImages().All() {
		digest, ok := has[i.Reference]
		if !ok {
			return usageError{fmt.Errorf("the bundle lacks the image %s", i.Reference), "make it with the configuration of this box: llmbox bundle create --config FILE"}
		}
		if i.Digest != "" && i.Digest != digest {
			return usageError{fmt.Errorf("the bundle has %s as %s, wanted is %s", i.Reference, digest, i.Digest), "make it anew with this llmbox"}
		}
	}
	if err := b.holdsK3s(s); err != nil {
		return err
	}
	if s.box.Mode("weights") == config.ModeInstall && !filepath.IsAbs(s.box.Model.Name) {
		if m.Model == nil || m.Model.Name != s.box.Model.Name || m.Model.Commit != s.box.Model.Revision {
			return usageError{fmt.Errorf("the bundle lacks the weights of %s at %s", s.box.Model.Name, cmp.Or(s.box.Model.Revision, "any commit")), "make it with that model"}
		}
	}
	return nil
}

// holdsK3s refuses a bundle that has another k3s than the box wants.
func (b *bundleFlags) holdsK3s(s *settled) error {
	has, wanted := b.open.reader.Manifest().K3s, cmp.Or(s.box.K3s.Version, s.table.K3s.Shipped)
	if s.box.K3s.BinaryPath == "" && !has.Named && has.Version != wanted {
		return usageError{fmt.Errorf("the bundle has k3s %s, wanted is %s", has.Version, wanted), "make it anew, or --set k3s.version=" + has.Version}
	}
	return nil
}

// k3sVersion is that of the k3s that the bundle will bring; empty where it brings none,
// or nobody has said which.
func (b *bundleFlags) k3sVersion(s *settled) string {
	if b.open == nil || s.box.K3s.BinaryPath != "" {
		return ""
	}
	return b.open.reader.Manifest().K3s.Version
}

// weights are those that the bundle will bring.
func (b *bundleFlags) weights(ctx context.Context, host *machine.Host, s *settled, flags *boxFlags) (*weights.Weights, error) {
	model := b.open.reader.Manifest().Model
	if model == nil || s.box.Mode("weights") != config.ModeInstall {
		return nil, nil
	}
	files, err := host.CarriedWeights(s.box, model)
	if err != nil {
		return nil, refusal(fmt.Errorf("%w: %w", bundle.ErrManifest, err))
	}
	node, err := host.NodeName(ctx, s.box)
	if err != nil {
		return nil, err
	}
	flags.commit = files.Commit
	flags.models = &installer.HostModels{Dir: machine.ModelDir(s.box), NodeName: node, Bytes: files.Bytes}
	return files, nil
}

// into has the run unpack the bundle first and take everything from it.
func (b *bundleFlags) into(m *installer.Machine) {
	if b.open == nil {
		return
	}
	total := b.open.reader.Manifest().Bytes()
	m.Images = nil
	m.Bundle = &installer.Bundle{Unpack: func(ctx context.Context, progress func(done, total int64, what string)) (string, error) {
		last := time.Time{}
		brought, err := m.Host.Unpack(ctx, m.Want, b.open.reader, func(done int64, what string) {
			const every = 500 * time.Millisecond
			if time.Since(last) > every {
				last = time.Now()
				progress(done, total, what)
			}
		})
		if err != nil {
			return "", refusal(err)
		}
		m.Want.Bundle = brought
		return strings.Join([]string{b.open.account(), fmt.Sprintf("%.2f GB written, %.2f GB were there", float64(brought.Written)/1e9, float64(brought.Present)/1e9)}, "; "), nil
	}}
}
