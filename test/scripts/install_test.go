package scripts

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const script = "../../scripts/install.sh"

// shells are what `sh` is on the machines that a script is piped into.
func shells() [][]string {
	return [][]string{{"dash"}, {"busybox", "sh"}, {"bash", "--posix"}, {"bash"}}
}

// llmboxStandIn says what it was started with, and what it was started on.
const llmboxStandIn = `#!/bin/sh
case "$1" in
version) echo "llmbox stand-in"; exit 0 ;;
completion) echo "# completion"; exit 0 ;;
esac
read -r line && echo "stdin had: $line"
[ -t 0 ] && echo "stdin is a terminal"
for arg in "$@"; do echo "arg=$arg"; done
echo "home=${HOME-unset} kubeconfig=${KUBECONFIG-unset} model=${LLMBOX_MODEL-unset}"
exit 42
`

// release is a server of releases with what one test breaks of it.
type release struct {
	*httptest.Server
	files map[string][]byte
	ca    string

	mu    sync.Mutex
	asked []string
	// answer takes a request over where it returns true.
	answer func(w http.ResponseWriter, r *http.Request) bool
}

func newRelease(t *testing.T) *release {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return newReleaseOn(t, listener)
}

func newReleaseOn(t *testing.T, listener net.Listener) *release {
	t.Helper()
	r := &release{files: map[string][]byte{
		"/latest": []byte("v1.2.3\n"),
	}}
	r.publish(llmboxStandIn)
	r.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.mu.Lock()
		r.asked = append(r.asked, req.URL.Path)
		answer := r.answer
		r.mu.Unlock()
		if answer != nil && answer(w, req) {
			return
		}
		data, ok := r.files[req.URL.Path]
		if !ok {
			http.NotFound(w, req)
			return
		}
		http.ServeContent(w, req, "", time.Time{}, bytes.NewReader(data))
	}))
	_ = r.Listener.Close()
	r.Listener = listener
	r.StartTLS()
	t.Cleanup(r.Close)
	r.ca = filepath.Join(t.TempDir(), "ca.pem")
	write(t, r.ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: r.Certificate().Raw}), 0o644)
	return r
}

// publish makes this the binary of the release.
func (r *release) publish(binary string) {
	for _, arch := range []string{"amd64", "arm64"} {
		r.files["/v1.2.3/llmbox-linux-"+arch] = []byte(binary)
	}
	sum := sha256.Sum256([]byte(binary))
	r.files["/v1.2.3/SHA256SUMS"] = fmt.Appendf(nil, "%x  llmbox-linux-amd64\n%x  llmbox-linux-arm64\n%x  other.deb\n", sum, sum, sha256.Sum256(nil))
}

func (r *release) paths() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.asked)
}

// sign signs SHA256SUMS as `cosign sign-blob --key` does, and returns the public key's file.
func (r *release) sign(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	digest := sha256.Sum256(r.files["/v1.2.3/SHA256SUMS"])
	signature, err := ecdsa.SignASN1(rand.Reader, key, digest[:])
	if err != nil {
		t.Fatal(err)
	}
	r.files["/v1.2.3/SHA256SUMS.sig"] = []byte(base64.StdEncoding.EncodeToString(signature) + "\n")
	der, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "key.pem")
	write(t, file, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), 0o644)
	return file
}

// invocation is one run of the script on a pipe, without a terminal.
type invocation struct {
	script  []byte
	shell   []string
	args    []string
	env     []string
	path    string
	user    uint32
	wrapper []string
}

type outcome struct {
	code           int
	stdout, stderr string
}

func (o outcome) String() string {
	return fmt.Sprintf("exit %d\nstdout:\n%s\nstderr:\n%s", o.code, o.stdout, o.stderr)
}

func (i invocation) run(t *testing.T) outcome {
	t.Helper()
	if i.script == nil {
		i.script = read(t, script)
	}
	if i.shell == nil {
		i.shell = []string{"dash"}
	}
	if i.path == "" {
		i.path = os.Getenv("PATH")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	shell := slices.Clone(i.shell)
	at, err := exec.LookPath(shell[0])
	if err != nil {
		t.Skipf("%s is not on this machine", shell[0])
	}
	shell[0] = at
	words := slices.Concat(i.wrapper, shell, []string{"-s", "--"}, i.args)
	cmd := exec.CommandContext(ctx, words[0], words[1:]...) // #nosec G204 -- the script under test
	cmd.Env = append([]string{"PATH=" + i.path}, i.env...)
	cmd.Stdin = bytes.NewReader(i.script)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = 10 * time.Second
	// A session of its own has no terminal, so that /dev/tty can't be opened.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if i.user != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: i.user, Gid: i.user}
		cmd.Dir = "/"
	}
	err = cmd.Run()
	if ctx.Err() != nil {
		t.Fatalf("it hangs\n%s", stderr.String())
	}
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return outcome{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

func (r *release) env(bin string, more ...string) []string {
	return append([]string{"INSTALL_LLMBOX_URL=" + r.URL, "INSTALL_LLMBOX_CA_FILE=" + r.ca, "INSTALL_LLMBOX_BIN_DIR=" + bin}, more...)
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func write(t *testing.T, file string, data []byte, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, data, mode); err != nil {
		t.Fatal(err)
	}
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: the script installs as root")
	}
	if out, err := exec.CommandContext(t.Context(), "unshare", "-m", "true").CombinedOutput(); err != nil {
		t.Skipf("needs mounts of its own, so that it installs nothing here: %v: %s", err, out)
	}
}

func leftovers(t *testing.T, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		found, _ := filepath.Glob(filepath.Join(dir, ".llmbox*"))
		more, _ := filepath.Glob(filepath.Join(dir, "llmbox.*"))
		if found = append(found, more...); len(found) > 0 {
			t.Errorf("left behind: %v", found)
		}
	}
}

// Each shell, on a pipe, without HOME and without a terminal: the flags arrive, standard
// input is /dev/null and the exit code is llmbox's own.
func TestPipe(t *testing.T) {
	needRoot(t)
	for _, shell := range shells() {
		t.Run(strings.Join(shell, " "), func(t *testing.T) {
			r := newRelease(t)
			bin, tmp := t.TempDir(), t.TempDir()
			got := invocation{
				shell: shell, args: []string{"--model", "a b", "--port=8081", "--ignore", "*"},
				env: r.env(bin, "INSTALL_LLMBOX_TMPDIR="+tmp, "INSTALL_LLMBOX_EXEC=--yes  --output=json", "KUBECONFIG=/other", "LLMBOX_MODEL=x"),
			}.run(t)
			want := "arg=install\narg=--fix\narg=--yes\narg=--output=json\narg=--model\narg=a b\narg=--port=8081\narg=--ignore\narg=*\nhome=unset kubeconfig=unset model=x\n"
			if got.code != 42 || got.stdout != want {
				t.Errorf("%s\nwanted exit 42 and\n%s", got, want)
			}
			leftovers(t, bin, tmp)
			// Once more: nothing is fetched again but the list of checksums.
			before := len(r.paths())
			got = invocation{shell: shell, env: r.env(bin), args: []string{"--", "--help"}}.run(t)
			if got.code != 42 || !strings.Contains(got.stderr, "is this release already") || !strings.Contains(got.stdout, "arg=--help") {
				t.Errorf("again: %s", got)
			}
			if again := r.paths()[before:]; !slices.Equal(again, []string{"/latest", "/v1.2.3/SHA256SUMS"}) {
				t.Errorf("asked again for %v", again)
			}
		})
	}
}

// Into a cluster, this machine is not mended and a KUBECONFIG stays.
func TestCluster(t *testing.T) {
	needRoot(t)
	r := newRelease(t)
	got := invocation{args: []string{"--kubeconfig", "/k"}, env: r.env(t.TempDir(), "KUBECONFIG=/other")}.run(t)
	if want := "arg=install\narg=--kubeconfig\narg=/k\nhome=unset kubeconfig=/other model=unset\n"; got.stdout != want {
		t.Errorf("%s", got)
	}
}

// A connection that broke leaves a part of the script: at every line, and at every byte
// of its end, nothing is run. Programs that would do something are not even looked for.
func TestTruncated(t *testing.T) {
	for _, name := range []string{"install.sh", "brev.sh"} {
		whole := read(t, "../../scripts/"+name)
		var cuts []int
		for at, b := range whole {
			if b == '\n' && at < len(whole)-1 {
				cuts = append(cuts, at+1)
			}
		}
		for at := len(whole) - 60; at < len(whole)-1; at++ {
			cuts = append(cuts, at)
		}
		for _, shell := range shells() {
			t.Run(name+" "+strings.Join(shell, " "), func(t *testing.T) {
				if testing.Short() && shell[0] != "dash" {
					t.Skip("dash alone")
				}
				traps := t.TempDir()
				touched := filepath.Join(traps, "touched")
				for _, tool := range []string{"uname", "id", "curl", "wget", "sudo", "mkdir", "mktemp", "rm", "systemctl", "cat", "sh", "tee", "install", "df"} {
					write(t, filepath.Join(traps, tool), []byte("#!/bin/bash\necho "+tool+" \"$@\" >>"+touched+"\n"), 0o755)
				}
				for _, cut := range cuts {
					if cut == len(bytes.TrimRight(whole, "\n")) {
						continue
					}
					got := invocation{script: whole[:cut], shell: shell, path: traps, env: []string{"INSTALL_LLMBOX_URL=https://127.0.0.1:1", "LLMBOX_URL=https://127.0.0.1:1"}}.run(t)
					if data, err := os.ReadFile(touched); err == nil {
						t.Fatalf("cut at byte %d of %d something ran: %s", cut, len(whole), data)
					}
					if got.stdout != "" || strings.Contains(got.stderr, "llmbox: ") {
						t.Fatalf("cut at byte %d of %d: %s", cut, len(whole), got)
					}
				}
				// That the whole one is seen to run, without an address and so without doing
				// anything, shows that a part would be. busybox has most tools inside.
				got := invocation{script: whole, shell: shell, path: traps}.run(t)
				if _, err := os.Stat(touched); err != nil && !strings.Contains(got.stderr, "llmbox: ") {
					t.Errorf("nothing is seen of the whole script: %s", got)
				}
			})
		}
	}
}

// refusals are what a release, a machine or a wish can have wrong. Each ends with a
// message, and nothing is installed.
func TestRefused(t *testing.T) {
	needRoot(t)
	set := func(path, data string) func(*release) { return func(r *release) { r.files[path] = []byte(data) } }
	drop := func(path string) func(*release) { return func(r *release) { delete(r.files, path) } }
	sum := fmt.Sprintf("%x", sha256.Sum256([]byte(llmboxStandIn)))
	for name, c := range map[string]struct {
		release func(*release)
		args    []string
		env     []string
		tools   string
		without []string
		code    int
		says    string
	}{
		"a corrupted binary":            {release: set("/v1.2.3/llmbox-linux-amd64", "#!/bin/sh\necho evil\n"), code: 1, says: "llmbox-linux-amd64 is damaged: its checksum is "},
		"half a binary":                 {release: set("/v1.2.3/llmbox-linux-amd64", llmboxStandIn[:40]), code: 1, says: "is damaged"},
		"no list of checksums":          {release: drop("/v1.2.3/SHA256SUMS"), code: 1, says: "nothing is installed unverified"},
		"an empty list of checksums":    {release: set("/v1.2.3/SHA256SUMS", ""), code: 1, says: "this release has no llmbox-linux-amd64"},
		"another file's checksum alone": {release: set("/v1.2.3/SHA256SUMS", sum+"  llmbox-linux-arm64\n"), code: 1, says: "this release has no llmbox-linux-amd64"},
		"a name that ends alike":        {release: set("/v1.2.3/SHA256SUMS", sum+"  not-llmbox-linux-amd64\n"), code: 1, says: "this release has no llmbox-linux-amd64"},
		"a checksum that is cut off":    {release: set("/v1.2.3/SHA256SUMS", sum[:40]+"  llmbox-linux-amd64\n"), code: 1, says: "has 40 digits, not 64"},
		"a checksum that is none":       {release: set("/v1.2.3/SHA256SUMS", strings.Repeat("z", 64)+"  llmbox-linux-amd64\n"), code: 1, says: "is damaged"},
		"two checksums":                 {release: set("/v1.2.3/SHA256SUMS", sum+"  llmbox-linux-amd64\n"+sum+"  llmbox-linux-amd64\n"), code: 1, says: "is damaged"},
		"a page instead of checksums":   {release: set("/v1.2.3/SHA256SUMS", "<html>sign in</html>\n"), code: 1, says: "this release has no"},
		"no binary":                     {release: drop("/v1.2.3/llmbox-linux-amd64"), code: 1, says: "llmbox-linux-amd64 could not be had: curl: (22)"},
		"a missing architecture":        {tools: "uname", env: []string{"MACHINE=riscv64"}, code: 2, says: "there is no llmbox for riscv64"},
		"32 bits":                       {tools: "uname", env: []string{"MACHINE=armv7l"}, code: 2, says: "there is no llmbox for armv7l"},
		"another system":                {tools: "uname", env: []string{"SYSTEM=Darwin"}, code: 2, says: "this machine runs Darwin"},
		"a version that is not there":   {env: []string{"INSTALL_LLMBOX_VERSION=9.9.9"}, code: 1, says: "SHA256SUMS of this release could not be had"},
		"a version that is a path":      {env: []string{"INSTALL_LLMBOX_VERSION=../../etc"}, code: 2, says: "INSTALL_LLMBOX_VERSION is"},
		"a channel that is a path":      {env: []string{"INSTALL_LLMBOX_CHANNEL=a/b"}, code: 2, says: "INSTALL_LLMBOX_CHANNEL is"},
		"a channel that answers a page": {release: set("/latest", "<html>\n"), code: 1, says: "holds no version"},
		"a channel that answers a path": {release: set("/latest", "v1/../../x\n"), code: 2, says: "letters, digits"},
		"an empty channel":              {release: set("/latest", ""), code: 1, says: "is empty"},
		"no channel":                    {release: drop("/latest"), code: 1, says: "didn't say which version is current"},
		"plain http":                    {env: []string{"INSTALL_LLMBOX_URL=http://127.0.0.1:1"}, code: 2, says: "releases come over https only"},
		"a redirect to plain http": {release: func(r *release) {
			r.answer = func(w http.ResponseWriter, req *http.Request) bool {
				http.Redirect(w, req, "http://127.0.0.1:1/v1.2.3/SHA256SUMS", http.StatusFound)
				return true
			}
		}, code: 1, says: "didn't say"},
		"no address":                   {env: []string{"INSTALL_LLMBOX_URL="}, code: 2, says: "no address of releases is known"},
		"a server nobody vouches for":  {env: []string{"INSTALL_LLMBOX_CA_FILE="}, code: 1, says: "didn't say which version is current: curl: (60)"},
		"nobody listens":               {env: []string{"INSTALL_LLMBOX_URL=https://127.0.0.1:1", "INSTALL_LLMBOX_RETRIES=1"}, code: 1, says: "curl: (7)"},
		"a switch that is no switch":   {env: []string{"INSTALL_LLMBOX_SKIP_VERIFY=maybe"}, code: 2, says: "must be true or false"},
		"a number that is none":        {env: []string{"INSTALL_LLMBOX_RETRIES=many"}, code: 2, says: "no number of tries"},
		"a directory that is relative": {env: []string{"INSTALL_LLMBOX_BIN_DIR=bin"}, code: 2, says: "must be an absolute path"},
		"a directory that is a file":   {env: []string{"INSTALL_LLMBOX_BIN_DIR=/dev/null/x"}, code: 1, says: "/dev/null/x can't be written to"},
		"no way to sum":                {without: []string{"sha256sum", "shasum", "openssl"}, code: 1, says: "can't be verified"},
		"no way to load":               {without: []string{"curl", "wget"}, code: 1, says: "neither curl nor wget is here"},
		"a wget that checks nobody":    {without: []string{"curl", "wget"}, tools: "wget", code: 1, says: "this wget doesn't check whom it talks to"},
		"nothing to skip to":           {env: []string{"INSTALL_LLMBOX_SKIP_DOWNLOAD=true"}, code: 2, says: "is not there"},
		"a signature is wanted":        {env: []string{"INSTALL_LLMBOX_REQUIRE_SIGNATURE=true"}, code: 1, says: "no key is known"},
		"no key file":                  {env: []string{"INSTALL_LLMBOX_PUBLIC_KEY=/nowhere"}, code: 2, says: "/nowhere can't be read"},
		"no directory of a release":    {env: []string{"INSTALL_LLMBOX_ARTIFACT_DIR=/nowhere"}, code: 2, says: "/nowhere is no directory"},
		"a binary that doesn't start": {release: func(r *release) {
			r.files["/v1.2.3/llmbox-linux-amd64"] = []byte("#!/bin/nothing\n")
			r.files["/v1.2.3/SHA256SUMS"] = fmt.Appendf(nil, "%x  llmbox-linux-amd64\n", sha256.Sum256(r.files["/v1.2.3/llmbox-linux-amd64"]))
		}, code: 1, says: "the binary doesn't start from"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRelease(t)
			if c.release != nil {
				c.release(r)
			}
			bin, tmp := t.TempDir(), t.TempDir()
			path := os.Getenv("PATH")
			if c.without != nil {
				path = pathWithout(t, c.without...)
			}
			if c.tools != "" {
				first, err := filepath.Abs("testdata/" + c.tools)
				if err != nil {
					t.Fatal(err)
				}
				path = first + ":" + path
			}
			got := invocation{
				path: path, args: c.args,
				env: append(r.env(bin, "INSTALL_LLMBOX_TMPDIR="+tmp, "INSTALL_LLMBOX_RETRIES=2"), c.env...),
			}.run(t)
			if got.code != c.code || !strings.Contains(got.stderr, c.says) || got.stdout != "" {
				t.Errorf("%s\nwanted exit %d and %q", got, c.code, c.says)
			}
			if _, err := os.Stat(filepath.Join(bin, "llmbox")); err == nil {
				t.Error("something was installed")
			}
			leftovers(t, bin, tmp)
		})
	}
}

// pathWithout is a directory with links to every program there is but those.
func pathWithout(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, from := range []string{"/bin", "/usr/bin"} {
		entries, err := os.ReadDir(from)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if !slices.Contains(names, e.Name()) {
				_ = os.Symlink(filepath.Join(from, e.Name()), filepath.Join(dir, e.Name()))
			}
		}
	}
	return dir
}

// An old binary stays where a new one can't take its place.
func TestOldStays(t *testing.T) {
	needRoot(t)
	r := newRelease(t)
	r.files["/v1.2.3/llmbox-linux-amd64"] = []byte("damaged")
	bin := t.TempDir()
	write(t, filepath.Join(bin, "llmbox"), []byte("old"), 0o755)
	if got := (invocation{env: r.env(bin)}).run(t); got.code != 1 || string(read(t, filepath.Join(bin, "llmbox"))) != "old" {
		t.Errorf("%s", got)
	}
}

func TestSignature(t *testing.T) {
	needRoot(t)
	for name, c := range map[string]struct {
		spoil func(*release)
		code  int
		says  string
	}{
		"right":           {code: 0, says: "signature verified (openssl)"},
		"of another list": {spoil: func(r *release) { r.files["/v1.2.3/SHA256SUMS"] = append(r.files["/v1.2.3/SHA256SUMS"], "# more\n"...) }, code: 1, says: "the signature of SHA256SUMS is wrong"},
		"no base64":       {spoil: func(r *release) { r.files["/v1.2.3/SHA256SUMS.sig"] = []byte("!!") }, code: 1, says: "damaged"},
		"none":            {spoil: func(r *release) { delete(r.files, "/v1.2.3/SHA256SUMS.sig") }, code: 1, says: "SHA256SUMS.sig of this release could not be had"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRelease(t)
			key := r.sign(t)
			if c.spoil != nil {
				c.spoil(r)
			}
			got := invocation{args: []string{"--download-only"}, env: r.env(t.TempDir(), "INSTALL_LLMBOX_PUBLIC_KEY="+key)}.run(t)
			if got.code != c.code || !strings.Contains(got.stderr, c.says) {
				t.Errorf("%s", got)
			}
		})
	}
	t.Run("another key", func(t *testing.T) {
		r, other := newRelease(t), newRelease(t)
		r.sign(t)
		got := invocation{env: r.env(t.TempDir(), "INSTALL_LLMBOX_PUBLIC_KEY="+other.sign(t))}.run(t)
		if got.code != 1 || !strings.Contains(got.stderr, "the signature of SHA256SUMS is wrong") {
			t.Errorf("%s", got)
		}
	})
	t.Run("no verifier", func(t *testing.T) {
		r := newRelease(t)
		key := r.sign(t)
		path := pathWithout(t, "openssl", "cosign")
		got := invocation{path: path, args: []string{"--download-only"}, env: r.env(t.TempDir(), "INSTALL_LLMBOX_PUBLIC_KEY="+key)}.run(t)
		if got.code != 0 || !strings.Contains(got.stderr, "the signature is not checked") {
			t.Errorf("%s", got)
		}
		got = invocation{path: path, env: r.env(t.TempDir(), "INSTALL_LLMBOX_PUBLIC_KEY="+key, "INSTALL_LLMBOX_REQUIRE_SIGNATURE=true")}.run(t)
		if got.code != 1 || !strings.Contains(got.stderr, "can't be checked") {
			t.Errorf("%s", got)
		}
	})
}

// A connection that breaks in the middle, a server that stalls and one that is busy: the
// download goes on where it was, by either program.
func TestRetries(t *testing.T) {
	needRoot(t)
	for _, loader := range []string{"curl", "wget"} {
		path := os.Getenv("PATH")
		if loader == "wget" {
			path = pathWithout(t, "curl")
		}
		for name, spoil := range map[string]func(http.ResponseWriter, []byte){
			"broken off": func(w http.ResponseWriter, data []byte) {
				w.Header().Set("Content-Length", fmt.Sprint(len(data)))
				_, _ = w.Write(data[:len(data)/2])
				panic(http.ErrAbortHandler)
			},
			"stalled": func(w http.ResponseWriter, data []byte) {
				w.Header().Set("Content-Length", fmt.Sprint(len(data)))
				_, _ = w.Write(data[:len(data)/2])
				_ = http.NewResponseController(w).Flush()
				time.Sleep(5 * time.Second)
				panic(http.ErrAbortHandler)
			},
			"busy": func(w http.ResponseWriter, _ []byte) { http.Error(w, "busy", http.StatusServiceUnavailable) },
		} {
			t.Run(loader+" "+name, func(t *testing.T) {
				r := newRelease(t)
				var once sync.Once
				r.answer = func(w http.ResponseWriter, req *http.Request) bool {
					first := false
					if strings.HasSuffix(req.URL.Path, "amd64") {
						once.Do(func() { first = true })
					}
					if first {
						spoil(w, r.files[req.URL.Path])
					}
					return first
				}
				got := invocation{path: path, args: []string{"--download-only"}, env: r.env(t.TempDir(), "INSTALL_LLMBOX_STALL_SECONDS=2")}.run(t)
				if got.code != 0 || !strings.Contains(got.stderr, "try 1 of 5 for v1.2.3/llmbox-linux-amd64 ended") {
					t.Errorf("%s", got)
				}
			})
		}
	}
}

// Without a network: a directory with a release is enough, and is verified alike.
func TestArtifacts(t *testing.T) {
	needRoot(t)
	r := newRelease(t)
	dir, bin := t.TempDir(), t.TempDir()
	for _, name := range []string{"SHA256SUMS", "llmbox-linux-amd64"} {
		write(t, filepath.Join(dir, name), r.files["/v1.2.3/"+name], 0o644)
	}
	env := []string{"INSTALL_LLMBOX_ARTIFACT_DIR=" + dir, "INSTALL_LLMBOX_BIN_DIR=" + bin}
	path := pathWithout(t, "curl", "wget")
	if got := (invocation{path: path, env: env}).run(t); got.code != 42 {
		t.Errorf("%s", got)
	}
	write(t, filepath.Join(dir, "llmbox-linux-amd64"), []byte("damaged"), 0o644)
	env[1] = "INSTALL_LLMBOX_BIN_DIR=" + t.TempDir()
	if got := (invocation{path: path, env: env}).run(t); got.code != 1 || !strings.Contains(got.stderr, "is damaged") {
		t.Errorf("%s", got)
	}
	if err := os.Remove(filepath.Join(dir, "SHA256SUMS")); err != nil {
		t.Fatal(err)
	}
	if got := (invocation{path: path, env: env}).run(t); got.code != 1 || !strings.Contains(got.stderr, "nothing is installed unverified") {
		t.Errorf("%s", got)
	}
	// Only the named switch overrides.
	got := invocation{path: path, args: []string{"--download-only"}, env: append(env, "INSTALL_LLMBOX_SKIP_VERIFY=true")}.run(t)
	if got.code != 1 || !strings.Contains(got.stderr, "what is installed is not verified") || !strings.Contains(got.stderr, "doesn't start") {
		t.Errorf("%s", got)
	}
	env[1] = "INSTALL_LLMBOX_BIN_DIR=" + bin
	got = invocation{path: path, args: []string{"--model", "m"}, env: append(env, "INSTALL_LLMBOX_SKIP_DOWNLOAD=true")}.run(t)
	if got.code != 42 || !strings.Contains(got.stdout, "arg=m") {
		t.Errorf("%s", got)
	}
}

// A user without root: sudo is used where it is needed and not where it isn't; what must
// reach llmbox goes by name, so that no value is in an argument.
func TestUser(t *testing.T) {
	needRoot(t)
	const nobody = 65534
	standIn := func(t *testing.T, body string) (path, log string) {
		t.Helper()
		dir, err := os.MkdirTemp("", "llmbox-sudo-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		if err := os.Chmod(dir, 0o777); err != nil { // #nosec G302 -- another user writes its log
			t.Fatal(err)
		}
		log = filepath.Join(dir, "log")
		write(t, filepath.Join(dir, "sudo"), []byte("#!/bin/sh\nprintf '%s\\n' \"$*\" >>"+log+"\n"+body), 0o755)
		return dir + ":" + os.Getenv("PATH"), log
	}
	open := func(t *testing.T, r *release) string {
		t.Helper()
		dir, err := os.MkdirTemp("", "llmbox-bin-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		if err := os.Chown(dir, nobody, nobody); err != nil {
			t.Fatal(err)
		}
		ca := filepath.Join(dir, "ca.pem")
		write(t, ca, read(t, r.ca), 0o644)
		r.ca = ca
		return dir
	}
	// As sudo does by itself, it keeps nothing of the environment.
	const passes = "while :; do case \"$1\" in -n|-v) shift ;; *) break ;; esac; done\nexec env -i PATH=\"$PATH\" HOME=/root \"$@\"\n"
	for _, shell := range shells() {
		t.Run("sudo without a password, "+strings.Join(shell, " "), func(t *testing.T) {
			r := newRelease(t)
			const says = `echo "token=$HF_TOKEN proxy=$https_proxy term=${TERM-unset} secret=${SECRET-unset}"`
			r.publish(strings.Replace(llmboxStandIn, "exit 42", says+"\nexit 42", 1))
			bin := open(t, r)
			path, log := standIn(t, passes)
			got := invocation{
				shell: shell, user: nobody, path: path, args: []string{"--yes", "a b"},
				env: r.env(bin, "HF_TOKEN=hf_secret", "https_proxy=", "LLMBOX_MODEL=it's \"$HOME\" `id`\nand \\ more", "SECRET=x", "OTHER=x\nTERM=x"),
			}.run(t)
			want := "arg=install\narg=--fix\narg=--yes\narg=a b\nhome=/root kubeconfig=unset model=it's \"$HOME\" `id`\nand \\ more\ntoken=hf_secret proxy= term="
			if got.code != 42 || !strings.HasPrefix(got.stdout, want) || !strings.Contains(got.stdout, "secret=unset") {
				t.Errorf("%s\nwanted exit 42 and\n%s", got, want)
			}
			words := string(read(t, log))
			if strings.Contains(words, "hf_secret") || strings.Contains(words, "INSTALL_LLMBOX") || strings.Contains(words, "LLMBOX_MODEL") {
				t.Errorf("sudo was told too much:\n%s", words)
			}
			if strings.Contains(words, "curl") || strings.Contains(words, "sha256sum") {
				t.Errorf("sudo did what needs no root:\n%s", words)
			}
		})
	}
	t.Run("sudo with a password and no terminal", func(t *testing.T) {
		r := newRelease(t)
		path, _ := standIn(t, "exit 1\n")
		got := invocation{user: nobody, path: path, env: r.env(open(t, r))}.run(t)
		if got.code != 2 || !strings.Contains(got.stderr, "there is no terminal to ask on") {
			t.Errorf("%s", got)
		}
	})
	t.Run("no sudo", func(t *testing.T) {
		r := newRelease(t)
		bin := open(t, r)
		dir := t.TempDir()
		for d := dir; d != "/"; d = filepath.Dir(d) {
			if d == os.TempDir() {
				break
			}
			_ = os.Chmod(d, 0o755) // #nosec G302 -- another user looks into it
		}
		for _, name := range []string{"curl", "sha256sum", "uname", "id", "awk", "df", "mktemp", "rm", "cp", "chmod", "mv", "mkdir", "sh", "grep", "tr", "env"} {
			at, err := exec.LookPath(name)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(at, filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		got := invocation{user: nobody, path: dir, env: r.env(bin)}.run(t)
		if got.code != 2 || !strings.Contains(got.stderr, "this needs root, and sudo is not here") {
			t.Errorf("%s", got)
		}
		got = invocation{user: nobody, path: dir, args: []string{"--download-only"}, env: r.env(bin)}.run(t)
		if got.code != 0 || got.stdout != bin+"/llmbox\n" {
			t.Errorf("%s", got)
		}
	})
}

// The usual places, in a mount namespace of its own: /usr/local/bin with a completion
// beside it, /opt/bin where /usr/local is read-only, and a binary on a disk that may not
// start programs.
func TestPlaces(t *testing.T) {
	needRoot(t)
	for name, c := range map[string]struct {
		mounts string
		env    []string
		code   int
		says   string
	}{
		"usual":                {mounts: "mount -t tmpfs t /usr/local", code: 0, says: "installed /usr/local/bin/llmbox"},
		"read-only /usr/local": {mounts: "mount -t tmpfs -o ro t /usr/local && mount -t tmpfs t /opt", code: 0, says: "installed /opt/bin/llmbox"},
		"both read-only":       {mounts: "mount -t tmpfs -o ro t /usr/local && mount -t tmpfs -o ro t /opt", code: 1, says: "neither /usr/local/bin nor /opt/bin can be written to"},
		"noexec /tmp":          {mounts: "mount -t tmpfs t /usr/local && mount -t tmpfs -o noexec t /var/tmp", env: []string{"INSTALL_LLMBOX_TMPDIR=/var/tmp"}, code: 0, says: "installed"},
		"small /tmp":           {mounts: "mount -t tmpfs t /usr/local && mount -t tmpfs -o size=1m t /var/tmp", env: []string{"INSTALL_LLMBOX_TMPDIR=/var/tmp"}, code: 0, says: "installed"},
		"noexec /usr/local":    {mounts: "mount -t tmpfs -o noexec t /usr/local", code: 1, says: "mounted noexec?"},
		"full /usr/local":      {mounts: "mount -t tmpfs -o size=4k t /usr/local && mkdir /usr/local/bin && head -c 4096 /dev/zero >/usr/local/full", code: 1, says: "/usr/local/bin can't take the binary"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRelease(t)
			env := slices.DeleteFunc(r.env("", c.env...), func(s string) bool { return strings.HasPrefix(s, "INSTALL_LLMBOX_BIN_DIR") })
			got := invocation{
				wrapper: []string{"unshare", "-m", "sh", "-ec", c.mounts + `; "$@"; code=$?; if [ -e /usr/local/bin/llmbox ]; then cat /usr/local/share/bash-completion/completions/llmbox >&2; fi; exit $code`, "sh"},
				args:    []string{"--download-only"}, env: env,
			}.run(t)
			if got.code != c.code || !strings.Contains(got.stderr, c.says) {
				t.Errorf("%s", got)
			}
			if name == "usual" && !strings.Contains(got.stderr, "# completion") {
				t.Errorf("no completion: %s", got)
			}
		})
	}
}

// A proxy is asked, and its password is told to nobody.
func TestProxy(t *testing.T) {
	needRoot(t)
	r := newRelease(t)
	var asked string
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		asked = req.Method + " " + req.Host + " " + req.Header.Get("Proxy-Authorization")
		http.Error(w, "no", http.StatusBadGateway)
	}))
	defer proxy.Close()
	at := strings.TrimPrefix(proxy.URL, "http://")
	got := invocation{
		args: []string{"--download-only"},
		env:  r.env(t.TempDir(), "INSTALL_LLMBOX_RETRIES=1", "INSTALL_LLMBOX_URL=https://releases.example.invalid", "https_proxy=http://u:p%40ss@"+at),
	}.run(t)
	if want := "CONNECT releases.example.invalid:443 Basic " + base64.StdEncoding.EncodeToString([]byte("u:p@ss")); asked != want {
		t.Errorf("the proxy was asked %q, not %q", asked, want)
	}
	if got.code != 1 || strings.Contains(got.stderr+got.stdout, "p%40ss") || strings.Contains(got.stderr+got.stdout, "p@ss") {
		t.Errorf("%s", got)
	}
}

// Control characters have no place in a log.
func TestPlain(t *testing.T) {
	needRoot(t)
	r := newRelease(t)
	got := invocation{env: r.env(t.TempDir(), "TERM=xterm")}.run(t)
	if strings.ContainsAny(got.stdout+got.stderr, "\x1b\r") {
		t.Errorf("%q", got.stderr)
	}
}

// TestShellcheck holds every shell script to shellcheck, each as the shell that its
// first line names.
func TestShellcheck(t *testing.T) {
	tool, err := exec.LookPath("shellcheck")
	if err != nil {
		t.Skip("shellcheck is not here (Debian package shellcheck)")
	}
	var found []string
	for _, pattern := range []string{"../../scripts/*.sh", "../../packaging/*.sh", "../../.ci/run"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("no scripts at %s: %v", pattern, err)
		}
		found = append(found, files...)
	}
	for _, file := range found {
		if out, err := exec.CommandContext(t.Context(), tool, file).CombinedOutput(); err != nil { // #nosec G204 -- the project's own scripts
			t.Errorf("%s\n%s", file, out)
		}
	}
}

// TestPOSIX holds what runs on machines of others to sh: there may be no bash there.
func TestPOSIX(t *testing.T) {
	for _, file := range []string{"../../scripts/install.sh", "../../scripts/brev.sh", "../../packaging/preremove.sh"} {
		data, err := os.ReadFile(file) // #nosec G304 -- the project's own scripts
		if err != nil {
			t.Fatal(err)
		}
		if line, _, _ := strings.Cut(string(data), "\n"); line != "#!/bin/sh" {
			t.Errorf("%s begins with %q", file, line)
		}
	}
}
