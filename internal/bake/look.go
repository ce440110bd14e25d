package bake

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
)

// Paths are the directories of a box that its configuration names.
type Paths struct{ Data, Log, K3sData string }

// File is one that llmbox or k3s made and that goes into the image.
type File struct {
	Path  string `json:"path"`
	Bytes int64  `json:"size_bytes"`
	// What says why it may.
	What string `json:"what"`
}

// Problem is a file that must not go into an image.
type Problem struct {
	Path string `json:"path"`
	Why  string `json:"why"`
}

// Report is what lies in an image.
type Report struct {
	Files    []File    `json:"files"`
	Problems []Problem `json:"problems"`
	// Notes are about what is not llmbox's and stays.
	Notes []string `json:"notes"`
}

// Clean says that no identity was found.
func (r Report) Clean() bool { return len(r.Problems) == 0 }

const (
	machineID = "/etc/machine-id"
	// credentialSecret is systemd's, made by the first call of systemd-creds.
	credentialSecret = "/var/lib/systemd/credential.secret" // #nosec G101 -- a path
	// smallFile bounds in bytes the files of which the content is looked at; what is
	// longer came out of a bundle, whose every byte was compared with its digest.
	smallFile = 1 << 20
)

// rule is a kind of file that is known to be the same in every image.
type rule struct {
	pattern *regexp.Regexp
	what    string
	// carried comes from a bundle and was compared with its digest: its content is not
	// looked at, as weights and programs hold any bytes.
	carried bool
}

func rules(p Paths) []rule {
	data, state := regexp.QuoteMeta(path.Clean(p.Data)), regexp.QuoteMeta(StateDir)
	r := func(pattern, what string, carried bool) rule {
		return rule{regexp.MustCompile("^" + pattern + "$"), what, carried}
	}
	return []rule{
		r(data+`/cache/bundle/[0-9a-f]{16}/(llmbox|k3s|k3s-[a-z0-9]+|sha256sum-[a-z0-9]+\.txt|llmbox-bundle-[0-9]-[a-z]+\.tar|complete)`, "from the bundle", true),
		r(data+`/models/hub/models--[^/]+/blobs/[0-9a-f]{40,64}`, "weights from the bundle", true),
		r(data+`/bin/llmbox`, "llmbox", true),
		r(`(/usr/local|/opt)/bin/llmbox`, "llmbox", true),
		r(`/usr/local/share/bash-completion/completions/llmbox`, "completion", false),
		r(`/etc/llmbox/config\.yaml`, "configuration", false),
		r(regexp.QuoteMeta(HeadFile), "the beginning of the bundle", true),
		r(state+`/repairs\.json`, "what was mended of the machine", false),
		r(state+`/bake/(bake\.json|config\.yaml)`, "what the first boot goes by", false),
		r(`/etc/systemd/system/(multi-user\.target\.wants/)?`+regexp.QuoteMeta(UnitName), "unit of the first boot", false),
	}
}

// secretPatterns are what a key or a token looks like, whoever wrote it down.
func secretPatterns() map[string]*regexp.Regexp {
	return map[string]*regexp.Regexp{
		"a private key":         regexp.MustCompile(`-----BEGIN [A-Z ]*PRIVATE KEY`),
		"a certificate":         regexp.MustCompile(`-----BEGIN CERTIFICATE`),
		"a token of k3s":        regexp.MustCompile(`K10[0-9a-f]{64}::`),
		"a Hugging Face token":  regexp.MustCompile(`\bhf_[A-Za-z0-9]{20,}`),
		"a token of Vault":      regexp.MustCompile(`\bhvs\.[A-Za-z0-9_-]{20,}`),
		"a password in a URL":   regexp.MustCompile(`://[^/\s:@]+:[^/\s@]+@`),
		"a JSON web token":      regexp.MustCompile(`\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.`),
		"a cloud's access key":  regexp.MustCompile(`\bAKIA[0-9A-Z]{16}\b`),
		"a key of this gateway": regexp.MustCompile(`\bsk-[A-Za-z0-9_-]{20,}`),
	}
}

// Look lists every file of llmbox and k3s below a root and says which of them an image
// must not have: all but those that are known to be alike everywhere.
func Look(root string, p Paths) (Report, error) {
	out := Report{Files: []File{}, Problems: []Problem{}, Notes: []string{}}
	id, err := readBounded(filepath.Join(root, machineID))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return out, fmt.Errorf("reading the machine's id: %w", err)
	}
	own := strings.TrimSpace(string(id))
	if own != "" && own != "uninitialized" {
		out.Problems = append(out.Problems, Problem{machineID, "it names this machine: every clone would have the same id"})
	} else {
		own = ""
	}
	if info, err := os.Lstat(filepath.Join(root, "/var/lib/dbus/machine-id")); err == nil && info.Mode().IsRegular() && info.Size() > 0 {
		out.Problems = append(out.Problems, Problem{"/var/lib/dbus/machine-id", "it names this machine"})
	}
	known := rules(p)
	seen := map[string]bool{}
	for _, place := range places(root, p) {
		err := filepath.WalkDir(filepath.Join(root, place), func(at string, d fs.DirEntry, err error) error {
			if err != nil {
				if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
					return nil
				}
				return err
			}
			name, err := filepath.Rel(root, at)
			if err != nil {
				return err
			}
			if name = "/" + name; d.IsDir() || seen[name] {
				return nil
			}
			seen[name] = true
			return out.judge(root, name, d, known, own)
		})
		if err != nil {
			return out, fmt.Errorf("looking through %s: %w", place, err)
		}
	}
	keys, err := filepath.Glob(filepath.Join(root, "/etc/ssh/ssh_host_*_key"))
	if err != nil {
		return out, fmt.Errorf("looking for host keys of SSH: %w", err)
	}
	if len(keys) > 0 {
		out.Notes = append(out.Notes, fmt.Sprintf("%d host keys of SSH are here and were left alone; where no cloud-init makes new ones for each clone: sudo rm /etc/ssh/ssh_host_*, and see that they are made anew at boot", len(keys)))
	}
	if _, err := os.Lstat(filepath.Join(root, credentialSecret)); err == nil {
		out.Notes = append(out.Notes, fmt.Sprintf("%s is here and was left alone: every clone has the key with which systemd-creds encrypts; where nothing was encrypted with it: sudo rm %s", credentialSecret, credentialSecret))
	}
	slices.SortFunc(out.Files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	slices.SortFunc(out.Problems, func(a, b Problem) int {
		return cmp.Or(strings.Compare(a.Path, b.Path), strings.Compare(a.Why, b.Why))
	})
	return out, nil
}

// places are those where llmbox, k3s and what runs on it leave files.
func places(root string, p Paths) []string {
	out := []string{
		StateDir, p.Data, p.Log, "/etc/llmbox", "/usr/local/bin/llmbox", "/opt/bin/llmbox", "/usr/local/share/bash-completion/completions/llmbox",
		"/etc/rancher", p.K3sData, "/var/lib/rancher", "/var/lib/kubelet", "/var/lib/cni", "/usr/local/bin/k3s", "/opt/bin/k3s",
	}
	for _, pattern := range []string{"*llmbox*", "*k3s*", "multi-user.target.wants/*llmbox*", "multi-user.target.wants/*k3s*"} {
		// The patterns are well formed.
		found, _ := filepath.Glob(filepath.Join(root, "/etc/systemd/system", pattern))
		for _, at := range found {
			if name, err := filepath.Rel(root, at); err == nil {
				out = append(out, "/"+name)
			}
		}
	}
	return out
}

func (r *Report) judge(root, name string, d fs.DirEntry, known []rule, id string) error {
	bad := func(why string) { r.Problems = append(r.Problems, Problem{name, why}) }
	i := slices.IndexFunc(known, func(k rule) bool { return k.pattern.MatchString(name) })
	if i < 0 {
		bad("it is none of the files of an image: it may hold what belongs to one machine")
		return nil
	}
	info, err := d.Info()
	if err != nil {
		return err
	}
	link := info.Mode()&fs.ModeSymlink != 0
	if link && name != UnitLink || !link && !info.Mode().IsRegular() {
		bad("it is no file")
		return nil
	}
	r.Files = append(r.Files, File{name, info.Size(), known[i].what})
	if known[i].carried || link {
		return nil
	}
	if info.Size() > smallFile {
		bad("it is longer than such a file can be")
		return nil
	}
	content, err := readBounded(filepath.Join(root, name))
	if err != nil {
		return err
	}
	for what, pattern := range secretPatterns() {
		if pattern.Match(content) {
			bad("it holds " + what)
		}
	}
	if id != "" && bytes.Contains(content, []byte(id)) {
		bad("it holds the id of this machine")
	}
	return nil
}

func readBounded(name string) ([]byte, error) {
	file, err := os.Open(name) // #nosec G304 -- a file of llmbox's own
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	return io.ReadAll(io.LimitReader(file, smallFile))
}

// Forget takes away by what the machine itself is told from others: its id and the seed
// of its random numbers, which systemd makes anew at the next boot. An id that is empty,
// and not absent, keeps that boot from being one that sets every unit anew
// (machine-id(5)).
func Forget(root string) error {
	at := filepath.Join(root, machineID)
	if _, err := os.Lstat(at); err == nil {
		if err := os.WriteFile(at, nil, 0o444); err != nil { // #nosec G306 -- the mode systemd gives it
			return fmt.Errorf("emptying %s: %w", machineID, err)
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("emptying %s: %w", machineID, err)
	}
	dbus := filepath.Join(root, "/var/lib/dbus/machine-id")
	if info, err := os.Lstat(dbus); err == nil && info.Mode().IsRegular() {
		if err := os.Remove(dbus); err != nil {
			return fmt.Errorf("removing the machine's id: %w", err)
		}
	}
	if err := os.Remove(filepath.Join(root, "/var/lib/systemd/random-seed")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing the seed of random numbers: %w", err)
	}
	return nil
}
