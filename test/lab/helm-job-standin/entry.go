package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const configHashLabel = "helmcharts.helm.cattle.io/configHash"

// exitHelm2 is the status for a chart that asks for Helm 2.
const exitHelm2 = 64

// entry is one run of a Job's container.
type entry struct {
	env  func(string) string
	root string
	// out gets what a reader of the pod's log sees.
	out            io.Writer
	terminationLog string
	// helm runs the real one.
	helm func(ctx context.Context, stdin io.Reader, stdout io.Writer, args ...string) (int, error)
	// setStatus rewrites the status in a release's newest record.
	setStatus func(ctx context.Context, namespace, name string, revision int, status string) error
}

// release is what Helm says of the one in the cluster.
type release struct {
	status, applyMethod string
	revision            int // 0: there is none
}

func (e *entry) run(ctx context.Context, args []string) (int, error) {
	if len(args) == 0 {
		return 1, errors.New("no operation: the arguments begin with install or delete")
	}
	if e.env("HELM_VERSION") == "v2" {
		e.tell("Helm 2 has come to its end: make the chart one for Helm 3", true)
		return exitHelm2, nil
	}
	caFile, err := e.collectCAs()
	if err != nil {
		return 1, err
	}
	chart, err := e.unpack()
	if err != nil {
		return 1, err
	}
	if args[0] != "delete" {
		if code, err := e.repositories(ctx, chart, caFile); err != nil || code != 0 {
			return code, err
		}
	}
	live, err := e.status(ctx)
	if err != nil {
		return 1, err
	}
	if args[0] == "delete" {
		return e.remove(ctx, live)
	}
	return e.bring(ctx, args, chart, caFile, live)
}

// remove uninstalls. A Helm that fails to makes no Job fail: who deletes a HelmChart
// would wait for ever.
func (e *entry) remove(ctx context.Context, live release) (int, error) {
	if live.revision == 0 {
		e.tell("No helm chart installed; nothing to delete", false)
		return 0, nil
	}
	if !e.expected(live) {
		return 0, nil
	}
	e.tell("Uninstalling helm chart", false)
	_, err := e.do(ctx, "uninstall", e.env("NAME"), "--namespace", e.env("TARGET_NAMESPACE"), "--wait")
	return 0, err
}

// bring installs or upgrades, by what is there and by the failure policy.
func (e *entry) bring(ctx context.Context, args []string, chart, caFile string, live release) (int, error) {
	rest, name := args[1:], e.env("NAME")
	install := func(after release) (int, error) {
		e.tell("Installing helm chart", false)
		return e.do(ctx, slices.Concat(args, []string{name, chart}, e.flags(caFile, after))...)
	}
	upgrade := func(why string) (int, error) {
		e.tell(why, false)
		return e.do(ctx, slices.Concat([]string{"upgrade"}, rest, []string{name, chart}, e.flags(caFile, live))...)
	}
	if live.revision == 0 && live.status == "" {
		return install(live)
	}
	if !e.expected(live) {
		return 0, nil
	}
	switch live.status {
	case "pending-install", "pending-upgrade", "pending-rollback", "superseded", "uninstalling":
		e.tell("Resetting helm release status from '"+live.status+"' to 'failed'", true)
		if err := e.setStatus(ctx, e.env("TARGET_NAMESPACE"), name, live.revision, "failed"); err != nil {
			// As with the plugin: what follows finds out for itself.
			e.say(err.Error())
		}
		if live.status == "pending-upgrade" || live.status == "superseded" {
			return upgrade("Retrying upgrade of helm chart")
		}
		live.status = "failed"
	case "deployed":
		e.say("Already installed " + name)
		return upgrade("Upgrading helm chart")
	}
	switch live.status {
	case "deleted", "failed", "null", "unknown":
	default:
		return install(live)
	}
	policy := e.env("FAILURE_POLICY")
	switch policy {
	case "abort":
		e.tell("Release status is '"+live.status+"' and failure policy is '"+policy+"'; waiting for operator intervention", true)
		return 1, nil
	case "", "reinstall":
		e.tell("Uninstalling "+live.status+" helm chart", false)
		if _, err := e.do(ctx, "uninstall", name, "--namespace", e.env("TARGET_NAMESPACE"), "--wait"); err != nil {
			return 1, err
		}
		return install(release{})
	case "retry":
		_, err := upgrade("Upgrading " + name + " from failed state")
		return 0, err
	default:
		e.tell("Unknown failure policy '"+policy+"'", true)
		return 1, nil
	}
}

// flags are those of install and upgrade alike.
func (e *entry) flags(caFile string, live release) []string {
	flags := e.trust(caFile)
	if v := e.env("PLAIN_HTTP"); v == "true" {
		flags = append(flags, "--plain-http")
	}
	if v := e.env("TIMEOUT"); v != "" {
		flags = append(flags, "--timeout", v)
	}
	if v := e.env("CONFIG_HASH"); v != "" {
		flags = append(flags, "--labels", configHashLabel+"="+v)
	}
	side, force := e.env("SERVER_SIDE"), e.env("FORCE_CONFLICTS")
	if side == "auto" && live.revision == 0 {
		side = "true" // an install knows no auto
	}
	if force == "true" && (side == "false" || side == "auto" && live.applyMethod != "ssa") {
		force = "false"
	}
	if side != "" {
		flags = append(flags, "--server-side="+side)
	}
	if force != "" {
		flags = append(flags, "--force-conflicts="+force)
	}
	values, _ := filepath.Glob(filepath.Join(e.root, "config", "*.yaml")) // a constant pattern
	for _, v := range values {
		flags = append(flags, "--values", v)
	}
	return flags
}

// trust are the flags that say which repositories to trust.
func (e *entry) trust(caFile string) []string {
	var flags []string
	if caFile != "" {
		flags = append(flags, "--ca-file", caFile)
	}
	if e.env("INSECURE_SKIP_TLS_VERIFY") == "true" {
		flags = append(flags, "--insecure-skip-tls-verify")
	}
	return flags
}

// expected says whether the release is still the one that helm-controller saw when it
// made the Job; another one gets a Job of its own.
func (e *entry) expected(live release) bool {
	want := e.env("EXPECTED_RELEASE_REVISION")
	if want == "" || want == strconv.Itoa(live.revision) {
		return true
	}
	e.tell(fmt.Sprintf("Current release revision %d does not match expected revision %s", live.revision, want), true)
	return false
}

// status asks Helm for the release. That there is none is said in the log, by Helm.
func (e *entry) status(ctx context.Context) (release, error) {
	var out bytes.Buffer
	args := []string{"status", "--namespace", e.env("TARGET_NAMESPACE"), e.env("NAME"), "--output", "json"}
	e.trace(args)
	code, err := e.helm(ctx, nil, &out, args...)
	if err != nil || code != 0 {
		return release{}, err
	}
	var answer struct {
		Version     int    `json:"version"`
		ApplyMethod string `json:"apply_method"`
		Info        struct {
			Status string `json:"status"`
		} `json:"info"`
	}
	if err := json.Unmarshal(out.Bytes(), &answer); err != nil {
		return release{}, fmt.Errorf("reading Helm's answer: %w", err)
	}
	return release{status: answer.Info.Status, applyMethod: answer.ApplyMethod, revision: answer.Version}, nil
}

// unpack writes the chart that came along, if one did, and says what Helm is to install.
func (e *entry) unpack() (string, error) {
	host := e.env("KUBERNETES_SERVICE_HOST")
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	chart := strings.ReplaceAll(e.env("CHART"), "%{KUBERNETES_API}%", host+":"+e.env("KUBERNETES_SERVICE_PORT"))
	raw, err := os.ReadFile(filepath.Join(e.root, "chart", e.env("NAME")+".tgz.base64")) // #nosec G304 -- the Job's own volume
	if errors.Is(err, fs.ErrNotExist) {
		return chart, nil
	}
	if err != nil {
		return "", fmt.Errorf("reading the chart: %w", err)
	}
	archive, err := base64.StdEncoding.DecodeString(strings.Join(strings.Fields(string(raw)), ""))
	if err != nil {
		return "", fmt.Errorf("decoding the chart: %w", err)
	}
	path := filepath.Join(e.root, "tmp", e.env("NAME")+".tgz")
	if err := os.WriteFile(path, archive, 0o600); err != nil {
		return "", fmt.Errorf("writing the chart: %w", err)
	}
	return path, nil
}

// collectCAs puts the authorities that repositories are to be checked against into one file.
func (e *entry) collectCAs() (string, error) {
	files, _ := filepath.Glob(filepath.Join(e.root, "ca-files", "*")) // a constant pattern
	var all []byte
	for _, f := range append([]string{filepath.Join(e.root, "config", "ca-file.pem")}, files...) {
		raw, err := os.ReadFile(f) // #nosec G304 -- the Job's own volumes
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("reading authorities: %w", err)
		}
		all = append(append(all, raw...), '\n')
	}
	if len(all) == 0 {
		return "", nil
	}
	path := filepath.Join(e.root, "tmp", "ca-file.pem")
	if err := os.WriteFile(path, all, 0o600); err != nil {
		return "", fmt.Errorf("writing authorities: %w", err)
	}
	return path, nil
}

// repositories makes the chart's repository known to Helm.
func (e *entry) repositories(ctx context.Context, chart, caFile string) (int, error) {
	repo := e.env("REPO")
	if repo == "" || strings.HasPrefix(chart, "http://") || strings.HasPrefix(chart, "https://") {
		return 0, nil
	}
	secret := func(name string) string { return filepath.Join(e.root, "auth", name) }
	add := append([]string{"repo", "add"}, e.trust(caFile)...)
	if e.env("AUTH_PASS_CREDENTIALS") == "true" {
		add = append(add, "--pass-credentials")
	}
	var stdin io.Reader
	user, userErr := os.ReadFile(secret("username")) // #nosec G304 -- the Job's own volume
	password, passwordErr := os.ReadFile(secret("password"))
	_, certErr := os.Stat(secret("tls.crt"))
	switch {
	case userErr == nil && passwordErr == nil:
		stdin = bytes.NewReader(password)
		add = append(add, "--username", strings.TrimSpace(string(user)), "--password-stdin")
	case certErr == nil:
		add = append(add, "--cert-file", secret("tls.crt"), "--key-file", secret("tls.key"))
	}
	alias, _, _ := strings.Cut(e.env("NAME"), "/")
	add = append(add, alias, repo)
	e.trace(add)
	if _, err := e.helm(ctx, stdin, e.out, add...); err != nil {
		return 1, err
	}
	_, err := e.do(ctx, "repo", "update")
	return 0, err
}

// do runs Helm with its output in the log.
func (e *entry) do(ctx context.Context, args ...string) (int, error) {
	e.trace(args)
	return e.helm(ctx, nil, e.out, args...)
}

// trace writes a command as a tracing shell does.
func (e *entry) trace(args []string) { e.say("+ helm " + strings.Join(args, " ")) }

func (e *entry) say(line string) { _, _ = fmt.Fprintln(e.out, line) }

// tell leaves a line as the container's termination message and, where a reader of the
// log needs it, in the log.
func (e *entry) tell(line string, log bool) {
	if log {
		e.say(line)
	}
	f, err := os.OpenFile(e.terminationLog, os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o666) // #nosec G302 -- kubelet's own
	if err != nil {
		e.say(fmt.Sprintf("leaving a termination message: %v", err))
		return
	}
	_, err = fmt.Fprintln(f, line)
	if err = errors.Join(err, f.Close()); err != nil {
		e.say(fmt.Sprintf("leaving a termination message: %v", err))
	}
}
