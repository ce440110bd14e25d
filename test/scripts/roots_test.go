package scripts

import (
	"bytes"
	"crypto/sha256"
	"encoding/pem"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/test/internal/cleanroot"
)

// cleanRoots are the root file systems that `make roots` made, each in a folder that says
// what it is.
func cleanRoots(t *testing.T) map[string]string {
	t.Helper()
	folder := os.Getenv("LLMBOX_DEBIAN_ROOTS")
	if folder == "" {
		t.Skip("LLMBOX_DEBIAN_ROOTS names no folder of clean roots: make test-roots makes them")
	}
	needRoot(t)
	out := map[string]string{}
	for _, name := range []string{"debian-12", "debian-13", "ubuntu-like", "split-usr"} {
		out[name] = filepath.Join(folder, name)
		if _, err := os.Stat(filepath.Join(out[name], "etc/os-release")); err != nil {
			t.Errorf("this root is missing, make roots: %v", err)
			delete(out, name)
		}
	}
	return out
}

// newIsland is a network of a loopback and nothing else: a listener on it, and the file by
// which a program gets in.
func newIsland(t *testing.T) (listener net.Listener, namespace string) {
	t.Helper()
	type island struct {
		listener net.Listener
		file     *os.File
		err      error
	}
	made := make(chan island)
	go func() {
		// Never unlocked: the thread, whose network it is, ends with this function.
		runtime.LockOSThread()
		var i island
		if i.err = unix.Unshare(unix.CLONE_NEWNET); i.err == nil {
			i.err = raiseLoopback()
		}
		if i.err == nil {
			i.file, i.err = os.Open("/proc/thread-self/ns/net")
		}
		if i.err == nil {
			i.listener, i.err = net.Listen("tcp", "127.0.0.1:0")
		}
		made <- i
	}()
	i := <-made
	if i.err != nil {
		t.Fatalf("making a network: %v", i.err)
	}
	t.Cleanup(func() { _ = i.file.Close() })
	return i.listener, fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), i.file.Fd())
}

func raiseLoopback() error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(socket) }()
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, request)
}

// visit is what somebody does on a machine that has never seen llmbox.
type visit struct {
	// typed is a line for a shell in the root; URL is the server's address in it.
	typed string
	// env is set on top of a PATH, and nothing else is.
	env []string
	// user is its number, 0 where nothing is said.
	user int
	// files and links are laid over the root, and gone are taken out of it.
	files, links map[string]string
	gone         []string
	// mounts is run by a shell in the root's folder before.
	mounts string
}

// in visits a root, and says what came of it and which files changed.
func (v visit) in(t *testing.T, lower string, r *release, namespace string) (outcome, cleanroot.Root, []string) {
	t.Helper()
	root := cleanroot.Root{Lower: lower, Disk: t.TempDir(), Mounts: v.mounts}
	more := func(name, text string) string { return string(read(t, filepath.Join(lower, name))) + text }
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{
		// The server's certificate is one that everybody trusts here.
		"etc/ssl/certs/ca-certificates.crt": more("etc/ssl/certs/ca-certificates.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: r.Certificate().Raw}))),
		"etc/hosts":                         "127.0.0.1 localhost " + name + "\n",
		"etc/passwd":                        more("etc/passwd", "ops:x:1000:1000::/home/ops:/bin/sh\n"),
		"etc/group":                         more("etc/group", "ops:x:1000:\n"),
		"etc/shadow":                        more("etc/shadow", "ops:!:20000:0:99999:7:::\n"),
		"home/ops/.profile":                 "",
		"root/install.sh":                   string(r.files["/install.sh"]),
	}
	maps.Copy(files, v.files)
	for name, content := range files {
		mode, owner := fs.FileMode(0o644), 0
		switch {
		case strings.Contains(name, "bin/"):
			mode = 0o755
		case name == "etc/shadow":
			mode = 0o600
		case strings.HasPrefix(name, "etc/sudoers.d/"):
			mode = 0o440
		case strings.HasPrefix(name, "home/ops/"):
			owner = 1000
		}
		if err := root.Lay(name, []byte(content), mode, owner); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range v.links {
		if err := root.Link(name, target); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range v.gone {
		if err := root.Hide(name); err != nil {
			t.Fatal(err)
		}
	}
	enter, err := root.Command(v.user)
	if err != nil {
		t.Fatal(err)
	}
	got := invocation{
		script:  []byte(strings.ReplaceAll(v.typed, "URL", r.URL) + "\n"),
		shell:   []string{"/bin/sh"},
		path:    cleanroot.Path,
		env:     v.env,
		wrapper: append([]string{"nsenter", "--net=" + namespace}, enter...),
	}.run(t)
	changes, err := root.Changes()
	if err != nil {
		t.Fatal(err)
	}
	return got, root, changes
}

// newPublished is a release as it would be published on that network: the script knows the
// address by itself.
func newPublished(t *testing.T) (r *release, namespace string) {
	t.Helper()
	listener, namespace := newIsland(t)
	r = newReleaseOn(t, listener)
	filled := bytes.Replace(read(t, script), []byte("release_url=''"), []byte("release_url='"+r.URL+"'"), 1)
	if !bytes.Contains(filled, []byte(r.URL)) {
		t.Fatal("the script has no place for the address of releases")
	}
	r.files["/install.sh"] = filled
	return r, namespace
}

// What people type on machines of their own, in clean roots of
// several distributions, and all that it changes there.
func TestInCleanRoots(t *testing.T) {
	const pipe = "curl -fsSL URL/install.sh | "
	const free = "ops ALL=(ALL) NOPASSWD:ALL\n"
	installed := []string{"/usr/local/bin/llmbox", "/usr/local/share/bash-completion/completions/llmbox"}
	started := "arg=install\narg=--fix\narg=--model\narg=a b\n"
	drop := func(path string) func(*release) { return func(r *release) { delete(r.files, path) } }
	cases := map[string]struct {
		visit
		release func(*release)
		only    string
		code    int
		// says is in what the script says, prints all that llmbox does.
		says, prints string
		left         []string
	}{
		"a root shell on a terminal": {
			visit: visit{typed: `script -qec 'test -t 0 && tty >/dev/null && sh /root/install.sh --model "a b"' /dev/null </dev/null`, env: []string{"HOME=/root", "TERM=xterm"}},
			code:  42, prints: started + "home=/root kubeconfig=unset model=unset\n", left: installed,
		},
		"a root shell with the script as a file": {
			visit: visit{typed: `sh /root/install.sh --model "a b" </dev/null`, env: []string{"HOME=/root"}},
			code:  42, says: "installed /usr/local/bin/llmbox", prints: started + "home=/root kubeconfig=unset model=unset\n", left: installed,
		},
		"a pipe without a terminal and without HOME": {
			visit: visit{typed: pipe + `sh -s -- --model "a b"`},
			code:  42, says: "installed /usr/local/bin/llmbox", prints: started + "home=unset kubeconfig=unset model=unset\n", left: installed,
		},
		"dash": {
			visit: visit{typed: pipe + `dash -s -- --model "a b"`},
			code:  42, prints: started + "home=unset kubeconfig=unset model=unset\n", left: installed,
		},
		"bash": {
			visit: visit{typed: pipe + `bash -s -- --model "a b"`},
			code:  42, prints: started + "home=unset kubeconfig=unset model=unset\n", left: installed,
		},
		"busybox sh": {
			visit: visit{typed: pipe + `busybox sh -s -- --model "a b"`},
			code:  42, prints: started + "home=unset kubeconfig=unset model=unset\n", left: installed,
		},
		"sh is busybox": {
			visit: visit{typed: pipe + `sh -s -- --model "a b"`, links: map[string]string{"usr/local/bin/sh": "/bin/busybox"}},
			code:  42, prints: started + "home=unset kubeconfig=unset model=unset\n", left: installed,
		},
		"wget alone": {
			visit: visit{typed: `wget -qO- URL/install.sh | sh -s -- --model "a b"`, gone: []string{"usr/bin/curl"}},
			code:  42, prints: started + "home=unset kubeconfig=unset model=unset\n", left: installed,
		},
		"a user with sudo": {
			visit: visit{
				typed: pipe + `sh -s -- --model "a b"`, user: 1000, env: []string{"HOME=/home/ops", "LLMBOX_MODEL=m"},
				files: map[string]string{"etc/sudoers.d/90-cloud-init-users": free},
			},
			code: 42, says: "installed /usr/local/bin/llmbox", prints: started + "home=/root kubeconfig=unset model=m\n", left: installed,
		},
		"a user whose sudo wants a password": {
			visit: visit{typed: pipe + "sh", user: 1000, env: []string{"HOME=/home/ops"}, files: map[string]string{"etc/sudoers.d/ops": "ops ALL=(ALL) ALL\n"}},
			code:  2, says: "sudo wants a password, and there is no terminal to ask on",
		},
		"a user without sudo": {
			visit: visit{typed: pipe + "sh", user: 1000, env: []string{"HOME=/home/ops"}, gone: []string{"usr/bin/sudo"}},
			code:  2, says: "this needs root, and sudo is not here",
		},
		"a user without sudo who wants the file alone": {
			visit: visit{typed: pipe + "INSTALL_LLMBOX_BIN_DIR=$HOME/bin sh -s -- --download-only", user: 1000, env: []string{"HOME=/home/ops"}, gone: []string{"usr/bin/sudo"}},
			code:  0, prints: "/home/ops/bin/llmbox\n", left: []string{"/home/ops/bin/llmbox"},
		},
		"a read-only /usr/local": {
			visit: visit{typed: pipe + `sh -s -- --model "a b"`, mounts: "mount -t tmpfs -o ro local usr/local"},
			code:  42, says: "installed /opt/bin/llmbox", prints: started + "home=unset kubeconfig=unset model=unset\n", left: []string{"/opt/bin/llmbox"},
		},
		"a /tmp that starts nothing": {
			visit: visit{typed: pipe + `sh -s -- --model "a b"`, mounts: "mount -t tmpfs -o noexec,mode=1777 tmp tmp"},
			code:  42, prints: started + "home=unset kubeconfig=unset model=unset\n", left: installed,
		},
		"a corrupted binary": {
			visit:   visit{typed: pipe + "sh"},
			release: func(r *release) { r.files["/v1.2.3/llmbox-linux-amd64"] = []byte("#!/bin/sh\necho evil\n") },
			code:    1, says: "llmbox-linux-amd64 is damaged: its checksum is ",
		},
		"a corrupted list of checksums": {
			visit: visit{typed: pipe + "sh"},
			release: func(r *release) {
				r.files["/v1.2.3/SHA256SUMS"] = []byte(strings.Repeat("z", 64) + "  llmbox-linux-amd64\n")
			},
			code: 1, says: "SHA256SUMS of this release is damaged",
		},
		"half a list of checksums": {
			visit: visit{typed: pipe + "sh"},
			release: func(r *release) {
				r.files["/v1.2.3/SHA256SUMS"] = fmt.Appendf(nil, "%.20x  llmbox-linux-amd64\n", sha256.Sum256([]byte(llmboxStandIn)))
			},
			code: 1, says: "has 40 digits, not 64",
		},
		"no list of checksums": {
			visit: visit{typed: pipe + "sh"}, release: drop("/v1.2.3/SHA256SUMS"),
			code: 1, says: "nothing is installed unverified",
		},
		"a release without this architecture": {
			visit: visit{typed: pipe + "sh"},
			release: func(r *release) {
				r.files["/v1.2.3/SHA256SUMS"] = bytes.ReplaceAll(r.files["/v1.2.3/SHA256SUMS"], []byte("amd64"), []byte("s390x"))
			},
			code: 1, says: "this release has no llmbox-linux-amd64",
		},
		"a machine of 32 bits": {
			visit: visit{typed: pipe + "linux32 sh"},
			code:  2, says: "there is no llmbox for i686",
		},
		"another kind of machine": {
			visit: visit{typed: pipe + "sh", files: map[string]string{"usr/local/sbin/uname": "#!/bin/sh\ncase $1 in -m) echo riscv64 ;; *) echo Linux ;; esac\n"}},
			code:  2, says: "there is no llmbox for riscv64",
		},
		"a connection that ends in the middle of the script": {
			visit: visit{typed: pipe + "sh"},
			release: func(r *release) {
				r.answer = func(w http.ResponseWriter, req *http.Request) bool {
					if req.URL.Path != "/install.sh" {
						return false
					}
					whole := r.files[req.URL.Path]
					w.Header().Set("Content-Length", fmt.Sprint(len(whole)))
					_, _ = w.Write(whole[:len(whole)/2])
					panic(http.ErrAbortHandler)
				}
			},
			only: "/install.sh", code: -1,
		},
		"the first half of the script": {
			visit: visit{typed: fmt.Sprintf("head -c %d /root/install.sh | sh", len(read(t, script))/2)},
			only:  "none", code: -1,
		},
	}
	for name, root := range cleanRoots(t) {
		t.Run(name, func(t *testing.T) {
			for what, c := range cases {
				t.Run(what, func(t *testing.T) {
					r, namespace := newPublished(t)
					if c.release != nil {
						c.release(r)
					}
					got, visited, left := c.in(t, root, r, namespace)
					said := strings.ReplaceAll(got.stderr+got.stdout, "\r\n", "\n")
					if c.code >= 0 && got.code != c.code || !strings.Contains(said, c.says) {
						t.Errorf("%s\nwanted exit %d and %q", got, c.code, c.says)
					}
					if !strings.HasSuffix(said, c.prints) || c.prints == "" && got.stdout != "" || strings.Contains(said, "stdin ") {
						t.Errorf("%s\nwanted it to end with\n%s", got, c.prints)
					}
					if !slices.Equal(left, c.left) {
						t.Errorf("it changed %q, wanted %q", left, c.left)
					}
					for _, file := range left {
						if strings.HasSuffix(file, "bin/llmbox") && string(read(t, visited.Written(file))) != llmboxStandIn {
							t.Errorf("%s is not what was published", file)
						}
					}
					asked := r.paths()
					if c.only != "" && slices.ContainsFunc(asked, func(path string) bool { return path != c.only }) {
						t.Errorf("half a script asked for %q", asked)
					}
				})
			}
		})
	}
}
