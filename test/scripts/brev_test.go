package scripts

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// In a mount namespace of its own a script finds the directories it writes to empty;
// systemctl is a stand-in that says what it was asked for.
const setupHere = `
for dir in /var/lib /var/log /var/tmp /etc/systemd/system /usr/local /run; do mount -t tmpfs t $dir; done
mkdir -p /run/systemd/system
"$@" || exit
ls -l /var/lib/llmbox/launch /etc/systemd/system/llmbox-launch.service | awk 'NF > 8 { print $1, $9 }'
cat /var/lib/llmbox/launch/settings
echo "token=$(cat /var/lib/llmbox/launch/hf-token 2>/dev/null)"
if [ -n "$WORK" ]; then
  sh /var/lib/llmbox/launch/work.sh </dev/null || echo "work=$?"
  echo "failed=$(cat /var/lib/llmbox/launch/failed 2>/dev/null)"
  test ! -e /var/lib/llmbox/launch/ready || echo "ready"
  ls -A /var/tmp | grep llmbox-launch || echo "nothing left"
fi
`

func brev(t *testing.T, shell []string, env ...string) outcome {
	t.Helper()
	tools := t.TempDir()
	for _, tool := range []string{"systemctl", "cloud-init", "apt-get"} {
		write(t, filepath.Join(tools, tool), []byte("#!/bin/sh\necho \"ran $(basename \"$0\") $*\" >>"+tools+"/log\n"), 0o755)
	}
	got := invocation{
		script: read(t, "../../scripts/brev.sh"), shell: shell, path: tools + ":" + os.Getenv("PATH"), env: env,
		wrapper: []string{"unshare", "-m", "sh", "-c", setupHere, "sh"},
	}.run(t)
	if log, err := os.ReadFile(filepath.Join(tools, "log")); err == nil {
		got.stdout += string(log)
	}
	return got
}

// The script writes down what was asked for, for root alone, never shows a secret, and
// returns without waiting for the work.
func TestBrevSetup(t *testing.T) {
	needRoot(t)
	for _, shell := range shells()[:3] {
		t.Run(strings.Join(shell, " "), func(t *testing.T) {
			got := brev(t, shell, "LLMBOX_URL=https://releases.example.invalid/", "LLMBOX_VERSION=1.2.3", "HF_TOKEN=hf_x", "MODEL=org/name", "PORT=8081", "LLMBOX_FLAGS=--profiles core --ignore a.b")
			if got.code != 0 {
				t.Fatalf("%s", got)
			}
			for _, want := range []string{
				"-rw------- hf-token", "-rw------- settings", "-rwx------ work.sh", "-rw-r--r-- /etc/systemd/system/llmbox-launch.service",
				"url='https://releases.example.invalid'\nversion='v1.2.3'\nmodel='org/name'\nport='8081'\nflags='--profiles core --ignore a.b'\n",
				"token=hf_x\n", "ran systemctl daemon-reload\nran systemctl enable llmbox-launch.service\nran systemctl start --no-block llmbox-launch.service\n",
			} {
				if !strings.Contains(got.stdout, want) {
					t.Errorf("no %q in\n%s", want, got)
				}
			}
			if strings.Count(got.stdout+got.stderr, "hf_x") != 1 {
				t.Errorf("the token was shown:\n%s", got)
			}
		})
	}
}

func TestBrevRefused(t *testing.T) {
	needRoot(t)
	for name, c := range map[string]struct{ env, says string }{
		"a token of two lines":   {"HF_TOKEN=a\nExecStart=/evil", "HF_TOKEN has more than one line"},
		"a token with a newline": {"HF_TOKEN=a\n", "HF_TOKEN has more than one line"},
		"a quote in the model":   {"MODEL=a'; reboot; '", "MODEL has a character"},
		"a space in the model":   {"MODEL=a b", "MODEL has a character"},
		"a carriage return":      {"MODEL=a\r", "MODEL has a character"},
		"a port that is none":    {"PORT=80;x", "PORT has a character"},
		"a substitution":         {"LLMBOX_FLAGS=$(reboot)", "LLMBOX_FLAGS has a character"},
		"a version that is path": {"LLMBOX_VERSION=../x", "LLMBOX_VERSION has a character"},
		"a hidden version":       {"LLMBOX_VERSION=.x", "LLMBOX_VERSION is no version"},
		"plain http":             {"LLMBOX_URL=http://x", "must begin with https://"},
		"no address":             {"LLMBOX_URL=", "no address of releases is known"},
	} {
		t.Run(name, func(t *testing.T) {
			got := brev(t, nil, "LLMBOX_URL=https://releases.example.invalid", c.env)
			if got.code != 2 || !strings.Contains(got.stderr, c.says) || strings.Contains(got.stdout, "ran ") {
				t.Errorf("%s", got)
			}
			if strings.Contains(got.stderr, "reboot") || strings.Contains(got.stderr, "evil") {
				t.Errorf("a value was shown: %s", got)
			}
		})
	}
}

// The unit's work: cloud-init and dpkg's lock are waited for, the release's own
// install.sh is verified, and what came of it is written down.
func TestBrevWork(t *testing.T) {
	needRoot(t)
	ready := strings.Replace(llmboxStandIn, "exit 42", "exit 0", 1)
	for name, c := range map[string]struct {
		binary string
		spoil  func(*release)
		want   []string
	}{
		"serves": {binary: ready, want: []string{
			"arg=install\narg=--fix\narg=--yes\narg=--model\narg=org/name\narg=--hf-token-file\narg=/var/lib/llmbox/launch/hf-token\n",
			"the box serves", "ready\nnothing left", "ran cloud-init status --wait\n", "DPkg::Lock::Timeout=900",
		}},
		"fails":                  {binary: llmboxStandIn, want: []string{"work=42\n", "failed=llmbox install ended with code 42; it is tried again\nnothing left"}},
		"a check failed":         {binary: strings.Replace(llmboxStandIn, "exit 42", "exit 3", 1), want: []string{"work=3\n", "this needs a person"}},
		"a damaged install.sh":   {binary: ready, spoil: func(r *release) { r.files["/v1.2.3/install.sh"] = []byte("echo evil") }, want: []string{"work=1\n", "install.sh of v1.2.3 is damaged"}},
		"no checksum of it":      {binary: ready, spoil: func(r *release) { r.files["/v1.2.3/SHA256SUMS"] = []byte("\n") }, want: []string{"work=1\n", "or SHA256SUMS has no line for it"}},
		"no release":             {binary: ready, spoil: func(r *release) { clear(r.files) }, want: []string{"work=1\n", "latest could not be had (curl's code 22)"}},
		"a version that is path": {binary: ready, spoil: func(r *release) { r.files["/latest"] = []byte("../../x\n") }, want: []string{"work=1\n", "holds no version"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRelease(t)
			r.files["/v1.2.3/install.sh"] = read(t, script)
			r.files["/v1.2.3/llmbox-linux-amd64"] = []byte(c.binary)
			r.files["/v1.2.3/SHA256SUMS"] = fmt.Appendf(nil, "%x  install.sh\n%x  llmbox-linux-amd64\n",
				sha256.Sum256(r.files["/v1.2.3/install.sh"]), sha256.Sum256([]byte(c.binary)))
			if c.spoil != nil {
				c.spoil(r)
			}
			got := brev(t, nil, "LLMBOX_URL="+r.URL, "CURL_CA_BUNDLE="+r.ca, "INSTALL_LLMBOX_RETRIES=1", "HF_TOKEN=hf_x", "MODEL=org/name", "WORK=1")
			for _, want := range c.want {
				if !strings.Contains(got.stdout, want) {
					t.Errorf("no %q in\n%s", want, got)
				}
			}
			if strings.Contains(got.stdout, "evil") || strings.Count(got.stdout+got.stderr, "hf_x") != 1 {
				t.Errorf("%s", got)
			}
		})
	}
}

// What systemd itself says of the unit.
func TestBrevUnit(t *testing.T) {
	tool, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not here")
	}
	text := string(read(t, "../../scripts/brev.sh"))
	_, rest, _ := strings.Cut(text, "cat <<'UNIT'\n")
	unit, _, ok := strings.Cut(rest, "\nUNIT\n")
	if !ok {
		t.Fatal("no unit in the script")
	}
	file := filepath.Join(t.TempDir(), "llmbox-launch.service")
	write(t, file, []byte(unit+"\n"), 0o644)
	out, err := exec.CommandContext(t.Context(), tool, "verify", "--man=no", "--recursive-errors=no", file).CombinedOutput() // #nosec G204 -- the unit under test
	lines := slices.DeleteFunc(strings.Split(string(out), "\n"), func(s string) bool { return !strings.Contains(s, "llmbox-launch") })
	if err != nil || len(lines) > 0 {
		t.Errorf("%v\n%s", err, out)
	}
}

// Brev takes 16 KiB, and a release fills in three lines more.
func TestBrevSize(t *testing.T) {
	if size := len(read(t, "../../scripts/brev.sh")); size > 15<<10 {
		t.Errorf("brev.sh has %d bytes", size)
	}
}
