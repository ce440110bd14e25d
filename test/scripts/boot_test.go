package scripts

import (
	"context"
	"crypto/sha256"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/llmbox-dev/llmbox/test/internal/cleanroot"
)

// visitUnit is run at each boot: the first has cloud-init's place, which starts the setup
// script, and in the end the machine is switched off.
const visitUnit = `[Unit]
Description=What is done at this boot
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'n=$$(($$(cat /var/visits 2>/dev/null || echo 0) + 1)); echo $$n >/var/visits; exec sh /root/visit-$$n >/var/log/visit-$$n 2>&1'
ExecStopPost=/bin/systemctl poweroff --no-block
[Install]
WantedBy=multi-user.target
`

// awaited are the shell functions of a visit.
const awaited = `
until_settled() {
  for i in $(seq 900); do
    [ ! -e /var/lib/llmbox/launch/ready ] || break
    case "$(systemctl is-active llmbox-launch)" in failed|inactive) break ;; esac
    sleep 0.1
  done
  # The file is there a moment before the unit ends.
  while [ "$(systemctl is-active llmbox-launch)" = active ]; do sleep 0.1; done
  systemctl show -p ActiveState -p Result -p NRestarts -p ConditionResult llmbox-launch
}
`

// The setup script of a launchable on machines whose first process is their own systemd.
func TestBrevUnderSystemd(t *testing.T) {
	roots := cleanRoots(t)
	for _, program := range []string{"systemd-nspawn", "unshare"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%v: Debian's systemd-container has it", err)
		}
	}
	const setup = awaited + "LLMBOX_URL=URL HF_TOKEN=hf_x MODEL=org/name PORT=8081 bash /root/brev.sh\n"
	install := "arg=install\narg=--fix\narg=--yes\narg=--model\narg=org/name\narg=--port\narg=8081\narg=--hf-token-file\narg=/var/lib/llmbox/launch/hf-token\n"
	cases := map[string]struct {
		// installs is what llmbox does instead of ending with 42.
		installs string
		visits   []string
		// ends is how the unit is in the end of each visit.
		ends []string
		// installed says how often the install was begun.
		installed int
		left      map[string]string
	}{
		"serves, and is left alone at the next boot": {
			installs: "exit 0", visits: []string{setup + "until_settled", awaited + "until_settled"},
			ends:      []string{"Result=success\nNRestarts=0\nActiveState=inactive\nConditionResult=yes", "Result=success\nNRestarts=0\nActiveState=inactive\nConditionResult=no"},
			installed: 1, left: map[string]string{"ready": "T", "hf-token": "hf_x"},
		},
		"fails once and is tried again": {
			installs: "[ -e /var/once ] && exit 0; touch /var/once; exit 1", visits: []string{setup + "until_settled"},
			ends:      []string{"Result=success\nNRestarts=1\nActiveState=inactive\nConditionResult=yes"},
			installed: 2, left: map[string]string{"ready": "T"},
		},
		"a machine that can't serve": {
			installs: "exit 3", visits: []string{setup + "until_settled"},
			ends:      []string{"Result=exit-code\nNRestarts=0\nActiveState=failed\nConditionResult=yes"},
			installed: 1, left: map[string]string{"failed": "this needs a person"},
		},
		"switched off in the middle": {
			installs: "[ -e /var/once ] && exit 0; touch /var/once; sleep 600",
			visits: []string{
				setup + "until [ -e /var/once ]; do sleep 0.1; done; systemctl show -p ActiveState llmbox-launch",
				awaited + "until_settled",
			},
			ends:      []string{"ActiveState=active", "Result=success\nNRestarts=0\nActiveState=inactive\nConditionResult=yes"},
			installed: 2, left: map[string]string{"ready": "T"},
		},
	}
	for name, lower := range roots {
		t.Run(name, func(t *testing.T) {
			for what, c := range cases {
				t.Run(strings.ReplaceAll(what, ",", ""), func(t *testing.T) {
					r, namespace := newPublished(t)
					r.publish(strings.Replace(llmboxStandIn, "exit 42", c.installs, 1))
					r.files["/v1.2.3/install.sh"] = r.files["/install.sh"]
					r.files["/v1.2.3/SHA256SUMS"] = fmt.Appendf(r.files["/v1.2.3/SHA256SUMS"], "%x  install.sh\n", sha256.Sum256(r.files["/install.sh"]))
					root := cleanroot.Root{Lower: lower, Disk: t.TempDir()}
					bundle := "etc/ssl/certs/ca-certificates.crt"
					files := map[string]string{
						bundle:                             string(read(t, filepath.Join(lower, bundle))) + string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: r.Certificate().Raw})),
						"etc/systemd/system/visit.service": visitUnit,
						"root/brev.sh":                     string(read(t, "../../scripts/brev.sh")),
					}
					for i, visit := range c.visits {
						files[fmt.Sprintf("root/visit-%d", i+1)] = strings.ReplaceAll(visit, "URL=URL", "URL="+r.URL) + "\n"
					}
					for name, content := range files {
						if err := root.Lay(name, []byte(content), 0o644, 0); err != nil {
							t.Fatal(err)
						}
					}
					if err := root.Link("etc/systemd/system/multi-user.target.wants/visit.service", "../visit.service"); err != nil {
						t.Fatal(err)
					}
					for i, end := range c.ends {
						// A unit that doesn't stop when it is told to costs 90 seconds.
						ctx, cancel := context.WithTimeout(t.Context(), 80*time.Second)
						console, err := root.Boot(ctx, fmt.Sprintf("llmbox-visit-%d", os.Getpid()), namespace)
						cancel()
						if err != nil {
							t.Fatalf("%v\n%s", err, console)
						}
						said := string(read(t, root.Written(fmt.Sprintf("var/log/visit-%d", i+1))))
						if !sameLines(said, end) {
							t.Errorf("boot %d ended with\n%s\nwanted\n%s", i+1, said, end)
						}
						if strings.Contains(said+console, "hf_x") {
							t.Errorf("the token was shown:\n%s\n%s", said, console)
						}
					}
					log := string(read(t, root.Written("var/log/llmbox/launch.log")))
					if n := strings.Count(log, install); n != c.installed || strings.Contains(log, "hf_x") {
						t.Errorf("installs were begun %d times, wanted %d of\n%s\nin\n%s", n, c.installed, install, log)
					}
					for name, want := range c.left {
						if got := string(read(t, root.Written(filepath.Join("var/lib/llmbox/launch", name)))); !strings.Contains(got, want) {
							t.Errorf("%s holds %q, wanted %q", name, got, want)
						}
					}
					for _, name := range []string{"ready", "failed"} {
						if _, wanted := c.left[name]; !wanted {
							if _, err := os.Stat(root.Written(filepath.Join("var/lib/llmbox/launch", name))); err == nil {
								t.Errorf("there is a file %s, too", name)
							}
						}
					}
				})
			}
		})
	}
}

// sameLines says whether all of these lines are among the others, in whatever order
// systemctl prints them.
func sameLines(text, want string) bool {
	for line := range strings.Lines(want) {
		if !strings.Contains("\n"+text+"\n", "\n"+strings.TrimSpace(line)+"\n") {
			return false
		}
	}
	return true
}
