// Command release does the parts of `make release` that need more than a compiler: bills
// of materials, the licence report, packages, signatures. scripts/release.sh calls it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/llmbox-dev/llmbox/tools/release/internal/fill"
	"github.com/llmbox-dev/llmbox/tools/release/internal/inventory"
	"github.com/llmbox-dev/llmbox/tools/release/internal/licences"
	"github.com/llmbox-dev/llmbox/tools/release/internal/packages"
	"github.com/llmbox-dev/llmbox/tools/release/internal/sbom"
	"github.com/llmbox-dev/llmbox/tools/release/internal/signing"
	"github.com/llmbox-dev/llmbox/tools/release/internal/size"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintf(os.Stderr, "release: %v\n", err)
		stop()
		os.Exit(1) //nolint:gocritic // stop was called
	}
}

func run(ctx context.Context, args []string) error {
	commands := map[string]func(context.Context, *flag.FlagSet, []string) error{
		"papers": papers, "packages": pack, "fill": fillIn, "sign": sign, "verify": verify, "public": public, "size": sizes,
	}
	if len(args) == 0 || commands[args[0]] == nil {
		return errors.New("which of papers, packages, fill, sign, verify, public, size?")
	}
	return commands[args[0]](ctx, flag.NewFlagSet(args[0], flag.ContinueOnError), args[1:])
}

// papers writes what goes beside the binaries: bills of materials and licences.
func papers(ctx context.Context, f *flag.FlagSet, args []string) error {
	root := f.String("root", ".", "the project's source")
	dir := f.String("dir", "", "folder with llmbox-linux-ARCH; the papers go there, too")
	version := f.String("version", "", "version of the release")
	epoch := f.Int64("time", 0, "time of the release, in seconds since 1970")
	images := f.String("images", "", "what llmbox images --output json printed")
	if err := f.Parse(args); err != nil {
		return err
	}
	at := time.Unix(*epoch, 0)
	generated, err := inventory.Generated(ctx, filepath.Join(*root, "embed", "crds"))
	if err != nil {
		return err
	}
	programs, err := filepath.Glob(filepath.Join(*dir, "llmbox-linux-*"))
	if err != nil {
		return err
	}
	var bills []bill
	everything := [][]inventory.Source{generated}
	for _, file := range programs {
		if strings.HasSuffix(file, ".json") {
			continue
		}
		one, err := look(ctx, *root, file)
		if err != nil {
			return err
		}
		bills = append(bills, one)
		everything = append(everything, one.sources, one.childSources)
	}
	if len(bills) == 0 {
		return fmt.Errorf("%s has no llmbox-linux-ARCH", *dir)
	}
	found, err := licences.All(inventory.Merge(everything...))
	if err != nil {
		return fmt.Errorf("licences:\n%w", err)
	}
	err = whole(filepath.Join(*dir, "THIRD-PARTY-LICENCES.txt"), func(w io.Writer) error {
		return licences.Report(w, "Third-party licences of llmbox "+*version, found)
	})
	if err != nil {
		return err
	}
	expressions := map[inventory.Module]string{}
	for _, one := range found {
		expressions[one.Module] = one.Expression()
	}
	for _, one := range bills {
		program := sbom.Program{Binary: one.binary, Child: one.child, Version: *version, Time: at}
		for _, source := range one.sources {
			program.Parts = append(program.Parts, sbom.Part{Module: source.Module, Licence: expressions[source.Module]})
		}
		for _, source := range one.childSources {
			if !slices.ContainsFunc(one.sources, func(s inventory.Source) bool { return s.Module == source.Module }) {
				program.Parts = append(program.Parts, sbom.Part{Module: source.Module, Licence: expressions[source.Module], Child: true})
			}
		}
		for _, source := range generated {
			program.Parts = append(program.Parts, sbom.Part{Module: source.Module, Licence: expressions[source.Module], Data: true})
		}
		err := whole(filepath.Join(*dir, one.binary.Name+".cdx.json"), func(w io.Writer) error { return sbom.WriteProgram(w, program) })
		if err != nil {
			return err
		}
	}
	if *images == "" {
		return nil
	}
	data, err := os.ReadFile(*images)
	if err != nil {
		return fmt.Errorf("reading the images: %w", err)
	}
	var list struct {
		Images []sbom.Image `json:"images"`
	}
	if err := json.Unmarshal(data, &list); err != nil {
		return fmt.Errorf("reading the images: %w", err)
	}
	if len(list.Images) == 0 {
		return fmt.Errorf("%s lists no image", *images)
	}
	return whole(filepath.Join(*dir, "llmbox-images.cdx.json"), func(w io.Writer) error {
		return sbom.WriteImages(w, *version, list.Images, at)
	})
}

type bill struct {
	binary, child         inventory.Binary
	sources, childSources []inventory.Source
}

// look reads a binary and finds the sources of exactly what is in it.
func look(ctx context.Context, root, file string) (bill, error) {
	var out bill
	var err error
	if out.binary, err = inventory.ReadBinary(file); err != nil {
		return out, err
	}
	arch := out.binary.Settings["GOARCH"]
	if out.sources, err = inventory.Sources(ctx, inventory.Program{Root: root, Package: "./cmd/llmbox", Arch: arch}); err != nil {
		return out, err
	}
	if missing := inventory.Missing(out.binary, out.sources); len(missing) > 0 {
		return out, fmt.Errorf("%s was not built from %s: its %s is not there", file, root, strings.Join(missing, ", "))
	}
	child := filepath.Join(root, "embed", "nvml", arch, "llmbox-nvml")
	if out.child, err = inventory.ReadBinary(child); err != nil {
		return out, err
	}
	if out.childSources, err = inventory.Sources(ctx, inventory.Program{Root: root, Package: "./cmd/llmbox-nvml", Arch: arch, Cgo: true}); err != nil {
		return out, err
	}
	if missing := inventory.Missing(out.child, out.childSources); len(missing) > 0 {
		return out, fmt.Errorf("%s was not built from %s: its %s is not there", child, root, strings.Join(missing, ", "))
	}
	return out, nil
}

func pack(_ context.Context, f *flag.FlagSet, args []string) error {
	description := f.String("description", "packaging/nfpm.yaml", "what goes into the packages, in nfpm's format")
	version := f.String("version", "", "version of the release")
	arch := f.String("arch", "", "amd64 or arm64")
	files := f.String("files", "", "folder with what is packaged")
	epoch := f.Int64("time", 0, "time of the release, in seconds since 1970")
	out := f.String("out", "", "folder for the packages")
	if err := f.Parse(args); err != nil {
		return err
	}
	written, err := packages.Write(packages.Options{
		Description: *description, Formats: []string{"deb", "rpm"}, Out: *out, Time: time.Unix(*epoch, 0).UTC(),
		Variables: map[string]string{"VERSION": *version, "ARCH": *arch, "FILES": *files},
	})
	for _, file := range written {
		fmt.Println(file)
	}
	return err
}

func fillIn(_ context.Context, f *flag.FlagSet, args []string) error {
	url := f.String("url", "", "https address that the releases will lie under")
	version := f.String("version", "", "version; empty for a script that installs the newest")
	key := f.String("key", "", "file with the public key that signs releases")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() != 2 {
		return errors.New("fill wants two files: the script, and where it goes")
	}
	values := fill.Values{URL: strings.TrimRight(*url, "/"), Version: *version}
	if *key != "" {
		data, err := os.ReadFile(*key)
		if err != nil {
			return fmt.Errorf("reading the public key: %w", err)
		}
		parsed, err := signing.PublicKey(data)
		if err != nil {
			return fmt.Errorf("reading %s: %w", *key, err)
		}
		encoded, err := signing.EncodePublic(parsed)
		if err != nil {
			return err
		}
		values.Key = string(encoded)
	}
	script, err := os.ReadFile(f.Arg(0))
	if err != nil {
		return err
	}
	filled, err := fill.Script(string(script), values)
	if err != nil {
		return fmt.Errorf("filling in %s: %w", f.Arg(0), err)
	}
	return whole(f.Arg(1), func(w io.Writer) error { _, err := io.WriteString(w, filled); return err })
}

func sign(_ context.Context, f *flag.FlagSet, args []string) error {
	keyFile := f.String("key", "", "file with the private key")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() != 1 {
		return errors.New("sign wants one file")
	}
	pem, err := os.ReadFile(*keyFile)
	if err != nil {
		return fmt.Errorf("reading the key: %w", err)
	}
	key, err := signing.PrivateKey(pem)
	if err != nil {
		return fmt.Errorf("reading %s: %w", *keyFile, err)
	}
	data, err := os.ReadFile(f.Arg(0))
	if err != nil {
		return err
	}
	signature, err := signing.Sign(key, data)
	if err != nil {
		return fmt.Errorf("signing %s: %w", f.Arg(0), err)
	}
	return whole(f.Arg(0)+".sig", func(w io.Writer) error { _, err := io.WriteString(w, signature); return err })
}

func verify(_ context.Context, f *flag.FlagSet, args []string) error {
	keyFile := f.String("key", "", "file with the public key")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() != 1 {
		return errors.New("verify wants one file; its signature is beside it, with .sig")
	}
	pem, err := os.ReadFile(*keyFile)
	if err != nil {
		return fmt.Errorf("reading the key: %w", err)
	}
	key, err := signing.PublicKey(pem)
	if err != nil {
		return fmt.Errorf("reading %s: %w", *keyFile, err)
	}
	data, err := os.ReadFile(f.Arg(0))
	if err != nil {
		return err
	}
	signature, err := os.ReadFile(f.Arg(0) + ".sig")
	if err != nil {
		return err
	}
	return signing.Verify(key, data, string(signature))
}

// public prints the public half of a key.
func public(_ context.Context, f *flag.FlagSet, args []string) error {
	keyFile := f.String("key", "", "file with the private key")
	if err := f.Parse(args); err != nil {
		return err
	}
	pem, err := os.ReadFile(*keyFile)
	if err != nil {
		return fmt.Errorf("reading the key: %w", err)
	}
	key, err := signing.PrivateKey(pem)
	if err != nil {
		return fmt.Errorf("reading %s: %w", *keyFile, err)
	}
	encoded, err := signing.EncodePublic(&key.PublicKey)
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(encoded)
	return err
}

func sizes(_ context.Context, f *flag.FlagSet, args []string) error {
	least := f.Uint64("least", 200_000, "what is smaller, in bytes, goes into one line")
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() != 1 {
		return errors.New("size wants one binary, built without -s")
	}
	binary, err := inventory.ReadBinary(f.Arg(0))
	if err != nil {
		return err
	}
	modules := []string{binary.Main.Path}
	for _, module := range binary.Modules {
		modules = append(modules, module.Path)
	}
	rows, err := size.ByModule(f.Arg(0), modules)
	if err != nil {
		return err
	}
	return size.Write(os.Stdout, rows, *least)
}

// whole leaves the file complete, or as it was.
func whole(path string, fill func(io.Writer) error) error {
	file, err := os.CreateTemp(filepath.Dir(path), ".release-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(file.Name()) }()
	if err := errors.Join(fill(file), file.Chmod(0o644), file.Close()); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return os.Rename(file.Name(), path)
}
