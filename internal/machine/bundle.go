package machine

import (
	"context"
	"fmt"
	"path"
	"path/filepath"
	"time"

	"github.com/llmbox-dev/llmbox/internal/bundle"
	"github.com/llmbox-dev/llmbox/internal/config"
	"github.com/llmbox-dev/llmbox/internal/download"
	"github.com/llmbox-dev/llmbox/internal/host"
	"github.com/llmbox-dev/llmbox/internal/k3s"
	"github.com/llmbox-dev/llmbox/internal/weights"
)

const (
	// bundleImportDeadline bounds one archive of images, vLLM's 12 GB included, where a
	// running k3s is told to take it in.
	bundleImportDeadline = 30 * time.Minute
	// pinnedLabel keeps the kubelet from clearing an image away (containerd,
	// internal/cri/labels).
	pinnedLabel = "io.cri-containerd.pinned=pinned"
)

// Brought is what came in a bundle and lies on the machine.
type Brought struct {
	bundle.Unpacked
	// Named says that whoever made the bundle answers for its k3s.
	Named bool
}

// DownloadRules are the way out that the box was told of.
func DownloadRules(box config.Box) download.Options { return downloadRules(box) }

// Fetcher lets k3s' releases be downloaded.
func Fetcher(client *download.Client) k3s.Fetcher { return fetcher{client} }

// Unpack puts a bundle where its parts belong. A machine that joins another serves no
// model from its own disk.
func (h *Host) Unpack(ctx context.Context, want Want, b *bundle.Reader, progress func(done int64, what string)) (*Brought, error) {
	to := bundle.Target{Stage: h.at(path.Join(want.Box.Paths.Data, "cache", "bundle")), UID: modelUser, GID: modelUser}
	if want.Join == nil {
		to.Models = h.at(ModelDir(want.Box))
	}
	unpacked, err := bundle.Unpack(ctx, b, to, func(done int64, e bundle.Entry) { progress(done, e.Path) })
	if err != nil {
		return nil, err
	}
	return &Brought{Unpacked: unpacked, Named: b.Manifest().K3s.Named}, nil
}

// CarriedWeights are weights that a bundle brings to the machine.
func (h *Host) CarriedWeights(box config.Box, model *bundle.Model) (*weights.Weights, error) {
	return weights.Known(weights.Options{Model: model.Name, Dir: h.at(ModelDir(box)), UID: modelUser, GID: modelUser}, model.Listing)
}

// fromBundle has k3s be taken from a bundle and nothing be downloaded.
func (b *Brought) fromBundle(want *k3s.WantBinary) {
	if b == nil {
		return
	}
	want.Offline, want.Fetcher = true, nil
	switch {
	case want.File != "":
	case b.Named:
		want.File = b.K3s
	default:
		want.BundleDir = b.Dir
	}
}

// layImages has the archives of a bundle lie where k3s imports them when it starts.
func (h *Host) layImages(want Want) (changed bool, err error) {
	if want.Bundle == nil {
		return false, nil
	}
	for _, a := range want.Bundle.Archives {
		to := h.at(path.Join(k3s.ImagesDir(want.Box.K3s.DataDir), filepath.Base(a.Path)))
		laid, err := bundle.Link(a.Path, to)
		if err != nil {
			return changed, fmt.Errorf("laying the images of the bundle where k3s looks for them: %w", err)
		}
		changed = changed || laid
	}
	return changed, nil
}

// importBundle has a k3s that was running already take in the images that it lacks.
func (h *Host) importBundle(ctx context.Context, binary string, want Want) (changed bool, err error) {
	if want.Bundle == nil {
		return false, nil
	}
	for _, a := range want.Bundle.Archives {
		missing, err := h.missingImages(ctx, binary, a.References)
		if err != nil {
			return changed, err
		}
		if len(missing) == 0 {
			continue
		}
		if err := h.ctr(ctx, binary, bundleImportDeadline, "import", a.Path); err != nil {
			return changed, fmt.Errorf("importing %s: %w", filepath.Base(a.Path), err)
		}
		changed = true
	}
	return changed, nil
}

// pinImages marks every image of a bundle as one to be kept: where there is no network,
// what the kubelet clears away is gone.
func (h *Host) pinImages(ctx context.Context, binary string, want Want) error {
	if want.Bundle == nil {
		return nil
	}
	for _, a := range want.Bundle.Archives {
		for _, reference := range a.References {
			if err := h.ctr(ctx, binary, listDeadline, "label", reference, pinnedLabel); err != nil {
				return fmt.Errorf("having %s be kept: %w", reference, err)
			}
		}
	}
	return nil
}

func (h *Host) ctr(ctx context.Context, binary string, deadline time.Duration, args ...string) error {
	result, err := h.o.Runner.Run(ctx, host.Command{
		Program: path.Base(binary), Directories: []string{path.Dir(binary)}, Deadline: deadline, Tail: true,
		Args: append([]string{"ctr", "--namespace", "k8s.io", "images"}, args...),
	})
	if err != nil {
		return fmt.Errorf("asking containerd: %w", err)
	}
	if result.Exit != 0 {
		return fmt.Errorf("asking containerd: k3s ctr images %s: exit status %d: %s", args[0], result.Exit, lastLine(result.Output))
	}
	return nil
}
