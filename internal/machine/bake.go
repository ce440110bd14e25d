package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"

	"github.com/llmbox-dev/llmbox/internal/bake"
	"github.com/llmbox-dev/llmbox/internal/bundle"
	"github.com/llmbox-dev/llmbox/internal/config"
)

// BakePaths are the directories of a box that an image of it has.
func BakePaths(box config.Box) bake.Paths {
	return bake.Paths{Data: box.Paths.Data, Log: box.Paths.Log, K3sData: box.K3s.DataDir}
}

// LookAtBaked lists what lies on the machine for an image.
func (h *Host) LookAtBaked(box config.Box) (bake.Report, error) {
	return bake.Look(h.o.Root, BakePaths(box))
}

// Serves says what shows that the machine is or was a box, and so has an identity; empty
// where nothing does.
func (h *Host) Serves(ctx context.Context, box config.Box) (string, error) {
	installed, err := h.Installed(ctx, box)
	if err != nil {
		return "", err
	}
	if installed {
		return "llmbox has installed k3s here", nil
	}
	for _, name := range []string{"/etc/rancher/k3s", "/etc/rancher/node", path.Join(box.K3s.DataDir, "server"), path.Join(StateDir, choicesFile), path.Join(StateDir, tokenFile)} {
		_, err := h.files.Stat(ctx, name)
		switch {
		case err == nil:
			return name + " is here", nil
		case !errors.Is(err, fs.ErrNotExist):
			return "", fmt.Errorf("looking whether this machine is a box: %w", err)
		}
	}
	return "", nil
}

// Baking is what goes into an image beside the parts of the bundle.
type Baking struct {
	Box    config.Box
	Bundle *bundle.Reader
	// Config is the configuration that was named; nil where the usual one holds.
	Config []byte
	// Args are more flags of the install at the first boot.
	Args []string
}

// Bake puts the parts of a bundle where an install finds them, and has the machine become
// a box when it boots the next time. k3s never starts here: whatever tells one box from
// another is made by it and by what runs on it.
func (h *Host) Bake(ctx context.Context, b Baking, progress func(done int64, what string)) (*Brought, error) {
	brought, err := h.Unpack(ctx, Want{Box: b.Box}, b.Bundle, progress)
	if err != nil {
		return nil, err
	}
	program, _, err := h.ensureProgram(b.Box.Paths.Data)
	if err != nil {
		return nil, err
	}
	head := &bytes.Buffer{}
	if err := b.Bundle.WriteHead(head); err != nil {
		return nil, err
	}
	record, err := bake.Record{
		Version: h.o.Version, Bundle: b.Bundle.Digest(), Log: b.Box.Paths.Log, Args: bake.Arguments(b.Config != nil, b.Args),
	}.Encode()
	if err != nil {
		return nil, err
	}
	for _, name := range []string{bake.ReadyFile, bake.FailedFile, bake.ConfigFile} {
		if err := os.Remove(h.at(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("removing what an earlier image left: %w", err)
		}
	}
	const open = 0o644
	files := []struct {
		name    string
		mode    fs.FileMode
		content []byte
	}{{bake.HeadFile, open, head.Bytes()}, {bake.RecordFile, open, record}, {bake.UnitFile, open, []byte(bake.Unit(program))}}
	if b.Config != nil {
		files = append(files, files[0])
		files[0].name, files[0].mode, files[0].content = bake.ConfigFile, secretMode, b.Config
	}
	for _, f := range files {
		if err := writeFile(h.at(f.name), f.mode, f.content); err != nil {
			return nil, fmt.Errorf("writing %s: %w", f.name, err)
		}
	}
	link := h.at(bake.UnitLink)
	if _, err := os.Lstat(link); errors.Is(err, fs.ErrNotExist) {
		if err := makeDir(path.Dir(link)); err != nil {
			return nil, fmt.Errorf("enabling %s: %w", bake.UnitName, err)
		}
		if err := os.Symlink(bake.UnitFile, link); err != nil {
			return nil, fmt.Errorf("enabling %s: %w", bake.UnitName, err)
		}
	}
	return brought, nil
}

// Forget takes away what names the machine, the lock of this very run included.
func (h *Host) Forget() error {
	if err := os.Remove(h.at(path.Join(StateDir, lockFile))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing the lock: %w", err)
	}
	return bake.Forget(h.o.Root)
}

// Baked is what the image says of itself.
func (h *Host) Baked(ctx context.Context) (bake.Record, error) {
	const limit = 1 << 20
	data, err := h.files.ReadFile(ctx, bake.RecordFile, limit)
	if err != nil {
		return bake.Record{}, fmt.Errorf("reading what the image says of itself: %w", err)
	}
	return bake.ReadRecord(data)
}

// EndFirstBoot notes how the first boot went: once it served, the unit does not run again.
func (h *Host) EndFirstBoot(failure string) error {
	const mode = 0o644
	if failure != "" {
		return writeFile(h.at(bake.FailedFile), mode, []byte(failure+"\n"))
	}
	if err := writeFile(h.at(bake.ReadyFile), mode, nil); err != nil {
		return fmt.Errorf("noting that the box serves: %w", err)
	}
	for _, name := range []string{bake.FailedFile, bake.UnitLink} {
		if err := os.Remove(h.at(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("disabling %s: %w", bake.UnitName, err)
		}
	}
	return nil
}
