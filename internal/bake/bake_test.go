package bake

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func testPaths() Paths {
	return Paths{Data: "/var/lib/llmbox", Log: "/var/log/llmbox", K3sData: "/var/lib/rancher/k3s"}
}

func lay(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		at := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// image is a root as bake leaves it.
func image(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	lay(t, root, map[string]string{
		"/etc/machine-id": "",
		"/var/lib/llmbox/cache/bundle/0123456789abcdef/k3s":                        "k3s -----BEGIN RSA PRIVATE KEY",
		"/var/lib/llmbox/cache/bundle/0123456789abcdef/llmbox-bundle-1-first.tar":  "images",
		"/var/lib/llmbox/models/hub/models--a--b/blobs/" + strings.Repeat("0", 64): "weights",
		"/var/lib/llmbox/bin/llmbox":                                               "program",
		RecordFile:                                                                 "{}",
		HeadFile:                                                                   "head",
		UnitFile:                                                                   Unit("/usr/local/bin/llmbox"),
	})
	if err := os.MkdirAll(filepath.Dir(filepath.Join(root, UnitLink)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(UnitFile, filepath.Join(root, UnitLink)); err != nil {
		t.Fatal(err)
	}
	return root
}

func TestLookAtAnImage(t *testing.T) {
	found, err := Look(image(t), testPaths())
	if err != nil {
		t.Fatal(err)
	}
	if !found.Clean() {
		t.Errorf("problems: %v", found.Problems)
	}
	const want = 8
	if len(found.Files) != want {
		t.Errorf("%d files, want %d: %v", len(found.Files), want, found.Files)
	}
}

// TestLookFindsIdentities puts one thing more into an image and wants it to be named.
func TestLookFindsIdentities(t *testing.T) {
	for name, content := range map[string]string{
		"/etc/machine-id":                                         "0123456789abcdef0123456789abcdef\n",
		"/var/lib/dbus/machine-id":                                "0123456789abcdef0123456789abcdef\n",
		"/etc/rancher/node/password":                              "x",
		"/etc/rancher/k3s/k3s.yaml":                               "x",
		"/var/lib/rancher/k3s/server/tls/server-ca.key":           "x",
		"/var/lib/rancher/k3s/server/token":                       "x",
		"/var/lib/llmbox/join-token":                              "x",
		"/var/lib/llmbox/choices.yaml":                            "x",
		"/var/lib/llmbox/lock":                                    "{}",
		"/var/lib/llmbox/models/token":                            "x",
		"/var/lib/kubelet/pki/kubelet.crt":                        "x",
		"/etc/llmbox/hf-token":                                    "x",
		"/etc/llmbox/config.yaml":                                 "token: hf_abcdefghijklmnopqrstuvwx",
		ConfigFile:                                                "proxy: http://me:secret@proxy:3128",
		"/var/log/llmbox/run-1.ndjson":                            "x",
		"/etc/systemd/system/k3s.service":                         "x",
		"/var/lib/llmbox/cache/bundle/0123456789abcdef/node.conf": "x",
	} {
		t.Run(name, func(t *testing.T) {
			root := image(t)
			lay(t, root, map[string]string{name: content})
			found, err := Look(root, testPaths())
			if err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(found.Problems, func(p Problem) bool { return p.Path == name }) {
				t.Errorf("it is not named: %v", found.Problems)
			}
		})
	}
}

func TestLookInsideWhatIsAllowed(t *testing.T) {
	root := image(t)
	lay(t, root, map[string]string{
		"/etc/machine-id":               "0123456789abcdef0123456789abcdef\n",
		RecordFile:                      `{"install_arguments":["--set","network.nodeIP=0123456789abcdef0123456789abcdef"]}`,
		ConfigFile:                      "hfToken: hf_abcdefghijklmnopqrstuvwx\nproxy: http://me:secret@proxy:3128\n",
		"/opt/bin/llmbox":               "program",
		"/etc/ssh/ssh_host_ed25519_key": "x",
		credentialSecret:                "x",
	})
	found, err := Look(root, testPaths())
	if err != nil {
		t.Fatal(err)
	}
	// Always in the same order, two of one file included.
	want := []Problem{
		{"/etc/machine-id", "it names this machine: every clone would have the same id"},
		{RecordFile, "it holds the id of this machine"},
		{ConfigFile, "it holds a Hugging Face token"},
		{ConfigFile, "it holds a password in a URL"},
	}
	if !slices.Equal(found.Problems, want) {
		t.Errorf("problems: %v, wanted %v", found.Problems, want)
	}
	if !slices.ContainsFunc(found.Files, func(f File) bool { return f.Path == "/opt/bin/llmbox" }) {
		t.Errorf("the program is not listed: %v", found.Files)
	}
	if len(found.Notes) != 2 || !strings.Contains(found.Notes[0], "1 host keys of SSH") || !strings.Contains(found.Notes[1], "systemd-creds") {
		t.Errorf("notes: %q", found.Notes)
	}
	// A link leads out of the image.
	at := filepath.Join(root, HeadFile)
	if err := os.Remove(at); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/shadow", at); err != nil {
		t.Fatal(err)
	}
	if found, err = Look(root, testPaths()); err != nil || !slices.Contains(found.Problems, Problem{HeadFile, "it is no file"}) {
		t.Errorf("problems: %v, %v", found.Problems, err)
	}
}

func TestForget(t *testing.T) {
	root := t.TempDir()
	lay(t, root, map[string]string{
		"/etc/machine-id": "0123456789abcdef0123456789abcdef\n", "/var/lib/dbus/machine-id": "same", "/var/lib/systemd/random-seed": "seed",
		"/etc/ssh/ssh_host_ed25519_key": "stays",
	})
	for range 2 {
		if err := Forget(root); err != nil {
			t.Fatal(err)
		}
	}
	if data, err := os.ReadFile(filepath.Join(root, "/etc/machine-id")); err != nil || len(data) != 0 {
		t.Errorf("the id is %q, %v", data, err)
	}
	for name, want := range map[string]bool{"/var/lib/dbus/machine-id": false, "/var/lib/systemd/random-seed": false, "/etc/ssh/ssh_host_ed25519_key": true} {
		if _, err := os.Stat(filepath.Join(root, name)); (err == nil) != want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestUnit(t *testing.T) {
	unit := Unit(`/opt/my "box"/llm$box`)
	for _, want := range []string{
		`ExecStart="/opt/my \"box\"/llm$$box" host firstboot`, "ConditionPathExists=" + RecordFile, "ConditionPathExists=!" + ReadyFile,
		"RestartPreventExitStatus=2 3", "WantedBy=multi-user.target",
	} {
		if !strings.Contains(unit, want+"\n") {
			t.Errorf("it lacks %s:\n%s", want, unit)
		}
	}
}

func TestRecord(t *testing.T) {
	r := Record{Version: "1.2.3", Bundle: "abc", Log: "/var/log/llmbox", Args: Arguments(true, []string{"--port", "8081"})}
	data, err := r.Encode()
	if err != nil {
		t.Fatal(err)
	}
	back, err := ReadRecord(data)
	if err != nil || !slices.Equal(back.Args, []string{"install", "--bundle", HeadFile, "--yes", "--output", "json", "--config", ConfigFile, "--port", "8081"}) {
		t.Errorf("%v, %v", back, err)
	}
	if _, err := ReadRecord([]byte("{")); err == nil {
		t.Error("half a record is taken")
	}
}
