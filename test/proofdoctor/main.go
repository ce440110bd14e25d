// Command proofdoctor breaks a box on a node of the lab in one way after the other and
// asks llmbox doctor each time. It holds that the root is named first, that a healthy
// box gives no warning, and that --fix mends what it claims. Each trial appends a row to
// docs/proofs/doctor.jsonl.
//
// It knows the lab and the box; nothing of the product knows it.
package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log"
	"math/big"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/llmbox-dev/llmbox/internal/finding"
)

type bench struct {
	ctx        context.Context
	objects    dynamic.Interface
	llmbox     string
	lab        string
	dir        string
	kubeconfig string
	ignore     string
	patience   time.Duration
	node       string
}

// row is one trial.
type row struct {
	Time     string `json:"time"`
	Commit   string `json:"commit"`
	Fault    string `json:"fault"`
	Want     string `json:"want"`
	First    string `json:"first"`
	Measured string `json:"measured,omitempty"`
	Followed int    `json:"followers"`
	Outcome  string `json:"outcome"`
	AfterMS  int64  `json:"after_ms"`
	DoctorMS int64  `json:"doctor_ms"`
	Fixed    string `json:"fixed,omitempty"`
}

// fault is one way to break a box.
type fault struct {
	name string
	// want are the ids of which one must come first.
	want   []string
	inject func(*bench) error
	revert func(*bench) error
	// fix asks for --fix and that the box is well after it.
	fix bool
}

func main() {
	log.SetFlags(0)
	b := &bench{ctx: context.Background()}
	flag.StringVar(&b.llmbox, "llmbox", "bin/llmbox", "the binary under test")
	flag.StringVar(&b.lab, "lab", "bin/llmbox-lab", "the lab's program")
	flag.StringVar(&b.dir, "dir", "", "directory of a node lab with a box on it")
	flag.StringVar(&b.kubeconfig, "kubeconfig", "", "its kubeconfig (default DIR/kubeconfig)")
	flag.StringVar(&b.ignore, "ignore", "", "checks that the lab's machine does not pass, with commas between")
	flag.DurationVar(&b.patience, "patience", 90*time.Second, "how long a fault may take to show")
	out := flag.String("out", "docs/proofs/doctor.jsonl", "where the rows go")
	only := flag.String("only", "", "names of faults, with commas between; empty for all")
	healthy := flag.Int("healthy", 20, "how often the healthy box is looked at first")
	commit := flag.String("commit", "", "what is tried, for the rows")
	flag.Parse()
	if err := b.run(*out, *only, *commit, *healthy); err != nil {
		log.Fatal(err)
	}
}

func (b *bench) run(out, only, commit string, healthy int) error {
	if b.kubeconfig == "" {
		b.kubeconfig = b.dir + "/kubeconfig"
	}
	config, err := clientcmd.BuildConfigFromFlags("", b.kubeconfig)
	if err != nil {
		return fmt.Errorf("reading the kubeconfig: %w", err)
	}
	if b.objects, err = dynamic.NewForConfig(config); err != nil {
		return fmt.Errorf("building the client: %w", err)
	}
	file, err := os.OpenFile(out, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644) // #nosec G302 G304 -- a record to be read by all
	if err != nil {
		return fmt.Errorf("opening the record: %w", err)
	}
	defer func() { _ = file.Close() }()
	write := func(r row) error {
		r.Time, r.Commit = time.Now().UTC().Format(time.RFC3339), commit
		line, err := json.Marshal(r)
		if err != nil {
			return err
		}
		log.Printf("%-28s %-8s first %s (%d followers, doctor %d ms) %s", r.Fault, r.Outcome, r.First, r.Followed, r.DoctorMS, r.Measured)
		_, err = file.Write(append(line, '\n'))
		return err
	}
	for i := range healthy {
		found, took := b.doctor()
		r := row{Fault: "none", Want: "none", Outcome: "right", DoctorMS: took.Milliseconds()}
		if bad := roots(found); len(bad) > 0 || len(found) == 0 {
			r.Outcome, r.First, r.Measured = "wrong", first(found).ID, first(found).Measured
		}
		if err := write(r); err != nil {
			return err
		}
		if i == 0 && r.Outcome != "right" {
			log.Printf("the box is not well to begin with")
		}
	}
	for _, f := range faults() {
		if only != "" && !slices.Contains(strings.Split(only, ","), f.name) {
			continue
		}
		if err := write(b.try(f)); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) try(f fault) row {
	r := row{Fault: f.name, Want: strings.Join(f.want, "|"), Outcome: "wrong"}
	if err := f.inject(b); err != nil {
		r.Outcome, r.Measured = "not injected", err.Error()
		return r
	}
	began := time.Now()
	for {
		found, took := b.doctor()
		top := first(found)
		r.First, r.Measured, r.DoctorMS, r.AfterMS = top.ID, top.Measured, took.Milliseconds(), time.Since(began).Milliseconds()
		r.Followed = 0
		for _, one := range found {
			if len(one.Causes) > 0 {
				r.Followed++
			}
		}
		if slices.Contains(f.want, top.ID) && (top.Severity == finding.Fail || top.Severity == finding.Warn) {
			r.Outcome = "right"
			break
		}
		if time.Since(began) > b.patience {
			break
		}
		time.Sleep(2 * time.Second)
	}
	if f.fix && r.Outcome == "right" {
		r.Fixed = "no"
		raw, err := b.command("--fix", "--yes").CombinedOutput()
		found, _ := b.doctor()
		if !slices.ContainsFunc(roots(found), func(one finding.Finding) bool { return slices.Contains(f.want, one.ID) }) {
			r.Fixed = "yes"
		} else if err != nil {
			log.Printf("--fix: %v\n%s", err, raw)
		}
	}
	if f.revert != nil {
		if err := f.revert(b); err != nil {
			log.Printf("%s: putting it back: %v", f.name, err)
		}
	}
	b.settle()
	return r
}

// settle waits until the box is well again.
func (b *bench) settle() {
	until := time.Now().Add(b.patience)
	for time.Now().Before(until) {
		found, _ := b.doctor()
		if len(found) > 0 && len(roots(found)) == 0 {
			return
		}
		time.Sleep(2 * time.Second)
	}
	log.Printf("the box did not become well again")
}

func (b *bench) command(more ...string) *exec.Cmd {
	args := append([]string{"exec", "--dir", b.dir, "--", b.llmbox, "doctor", "--kubeconfig", b.kubeconfig, "--offline"}, more...)
	if b.ignore != "" {
		args = append(args, "--ignore", b.ignore)
	}
	return exec.CommandContext(b.ctx, b.lab, args...) // #nosec G204 -- the programs under test
}

func (b *bench) doctor() ([]finding.Finding, time.Duration) {
	began := time.Now()
	raw, err := b.command("--output", "json").Output()
	took := time.Since(began)
	var document struct {
		Findings []finding.Finding `json:"findings"`
	}
	if jsonErr := json.Unmarshal(raw, &document); jsonErr != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			log.Printf("doctor: %s", exit.Stderr)
		}
		return nil, took
	}
	return document.Findings, took
}

func roots(found []finding.Finding) []finding.Finding {
	var out []finding.Finding
	for _, f := range found {
		if len(f.Causes) == 0 && (f.Severity == finding.Fail || f.Severity == finding.Warn) {
			out = append(out, f)
		}
	}
	return out
}

func first(found []finding.Finding) finding.Finding {
	if len(found) == 0 {
		return finding.Finding{ID: "nothing"}
	}
	return found[0]
}

func gvr(text string) schema.GroupVersionResource {
	parts := strings.Split(text, "/")
	if len(parts) == 2 {
		return schema.GroupVersionResource{Version: parts[0], Resource: parts[1]}
	}
	return schema.GroupVersionResource{Group: parts[0], Version: parts[1], Resource: parts[2]}
}

func (b *bench) at(resource, namespace string) dynamic.ResourceInterface {
	if namespace == "" {
		return b.objects.Resource(gvr(resource))
	}
	return b.objects.Resource(gvr(resource)).Namespace(namespace)
}

func (b *bench) patch(resource, namespace, name, merge string, sub ...string) error {
	_, err := b.at(resource, namespace).Patch(b.ctx, name, types.MergePatchType, []byte(merge), metav1.PatchOptions{}, sub...)
	return err
}

func (b *bench) remove(resource, namespace, name string) error {
	return b.at(resource, namespace).Delete(b.ctx, name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
}

func (b *bench) make(resource, namespace, object string) error {
	var o map[string]any
	if err := json.Unmarshal([]byte(object), &o); err != nil {
		return err
	}
	_, err := b.at(resource, namespace).Create(b.ctx, &unstructured.Unstructured{Object: o}, metav1.CreateOptions{})
	return err
}

// patched changes an object and gives it its former fields back.
func patched(name string, want []string, resource, namespace, object, merge, back string, fix bool) fault {
	return fault{name: name, want: want, fix: fix,
		inject: func(b *bench) error { return b.patch(resource, namespace, object, merge) },
		revert: func(b *bench) error { return b.patch(resource, namespace, object, back) },
	}
}

// made adds an object and takes it away again.
func made(name string, want []string, resource, namespace, object string) fault {
	return fault{name: name, want: want,
		inject: func(b *bench) error { return b.make(resource, namespace, object) },
		revert: func(b *bench) error {
			var o struct {
				Metadata struct {
					Name string `json:"name"`
				} `json:"metadata"`
			}
			if err := json.Unmarshal([]byte(object), &o); err != nil {
				return err
			}
			return b.remove(resource, namespace, o.Metadata.Name)
		},
	}
}

// stopped halts a program of the lab and lets it go on.
func stopped(name string, want []string, program string) fault {
	signal := func(sig string) func(*bench) error {
		return func(b *bench) error {
			pids, err := processes(b.dir, program)
			if err != nil || len(pids) == 0 {
				return errors.Join(err, fmt.Errorf("no %s of the lab runs", program))
			}
			return exec.CommandContext(b.ctx, "kill", append([]string{"-" + sig}, pids...)...).Run() // #nosec G204 -- numbers of the lab's own processes
		}
	}
	return fault{name: name, want: want, inject: signal("STOP"), revert: signal("CONT")}
}

// processes are the pids of a program of this lab: its command line or its root lies in
// the lab's directory.
func processes(dir, program string) ([]string, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	var out []string
	for _, e := range entries {
		comm, err := os.ReadFile("/proc/" + e.Name() + "/comm")
		if err != nil || strings.TrimSpace(string(comm)) != program[:min(len(program), 15)] {
			continue
		}
		root, err := os.Readlink("/proc/" + e.Name() + "/root")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		line, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err == nil && (strings.HasPrefix(root, dir) || strings.Contains(string(line), dir) || strings.Contains(string(line), "/lab/") || inLab(e.Name(), dir)) {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

func inLab(pid, dir string) bool {
	mounts, err := os.ReadFile("/proc/" + pid + "/mountinfo")
	return err == nil && strings.Contains(string(mounts), dir)
}

// expired is a kubernetes.io/tls Secret whose certificate ended yesterday.
func expired() (string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "box.example"}, NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: time.Now().Add(-24 * time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return "", err
	}
	raw, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return "", err
	}
	object, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": map[string]any{"name": "expired"},
		"stringData": map[string]string{"tls.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), "tls.key": string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw}))},
	})
	return string(object), err
}

// pod is one of the lab's images with something wrong about it.
func pod(name, more, container string) string {
	return `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"` + name + `"},"spec":{` + more + `"terminationGracePeriodSeconds":0,"containers":[{"name":"c","image":"docker.io/rancher/mirrored-pause:3.6"` + container + `}]}}`
}

func faults() []fault {
	const (
		deployments = "apps/v1/deployments"
		pods        = "v1/pods"
		routes      = "gateway.networking.k8s.io/v1/httproutes"
	)
	all := []fault{
		patched("coredns-gone", []string{"net.dns.coredns"}, deployments, "kube-system", "coredns", `{"spec":{"replicas":0}}`, `{"spec":{"replicas":1}}`, true),
		{
			name: "cordon", want: []string{"node.cordoned"}, fix: true,
			inject: func(b *bench) error { return b.patchNode(`{"spec":{"unschedulable":true}}`) },
			revert: func(b *bench) error { return b.patchNode(`{"spec":{"unschedulable":null}}`) },
		},
		patched("model-scaled-to-0", []string{"model.missing"}, deployments, "llm", "model-server", `{"spec":{"replicas":0}}`, `{"spec":{"replicas":1}}`, false),
		made("webhook-without-anybody", []string{"operator.webhook.blocking"}, "admissionregistration.k8s.io/v1/validatingwebhookconfigurations", "",
			`{"apiVersion":"admissionregistration.k8s.io/v1","kind":"ValidatingWebhookConfiguration","metadata":{"name":"fault"},"webhooks":[{"name":"fault.example.com","failurePolicy":"Fail","sideEffects":"None","admissionReviewVersions":["v1"],"clientConfig":{"service":{"namespace":"llm","name":"nobody","path":"/"}},"rules":[{"apiGroups":["fault.example.com"],"apiVersions":["v1"],"operations":["CREATE"],"resources":["things"]}]}]}`),
		made("api-without-anybody", []string{"operator.apiservice"}, "apiregistration.k8s.io/v1/apiservices", "",
			`{"apiVersion":"apiregistration.k8s.io/v1","kind":"APIService","metadata":{"name":"v1.fault.example.com"},"spec":{"group":"fault.example.com","version":"v1","insecureSkipTLSVerify":true,"groupPriorityMinimum":100,"versionPriority":10,"service":{"namespace":"llm","name":"nobody"}}}`),
		made("no-such-node", []string{"pod.unschedulable"}, pods, "llm", pod("fault-node", `"nodeSelector":{"fault":"1"},`, "")),
		made("no-room", []string{"pod.insufficient"}, pods, "llm", pod("fault-cpu", "", `,"resources":{"requests":{"cpu":"4000"}}`)),
		made("no-gpu-left", []string{"pod.insufficient_gpu"}, pods, "llm", pod("fault-gpu", "", `,"resources":{"limits":{"nvidia.com/gpu":"1"}}`)),
		made("no-such-secret", []string{"secrets.missing"}, pods, "llm", pod("fault-secret", "", `,"env":[{"name":"X","valueFrom":{"secretKeyRef":{"name":"nowhere","key":"x"}}}]`)),
		made("no-such-image", []string{"image.pull.not_found"}, pods, "llm", `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"fault-image"},"spec":{"containers":[{"name":"c","image":"docker.io/library/nowhere:1"}]}}`),
		made("no-such-runtime", []string{"runtime.handler_missing"}, "node.k8s.io/v1/runtimeclasses", "", `{"apiVersion":"node.k8s.io/v1","kind":"RuntimeClass","metadata":{"name":"fault"},"handler":"gone"}`),
		made("no-such-program", []string{"workload.unexplained", "runtime.binary_missing"}, pods, "llm", pod("fault-program", "", `,"command":["/no/such/program"]`)),
		{
			name: "port-taken", want: []string{"pod.host_port"},
			inject: func(b *bench) error {
				return errors.Join(b.make(pods, "llm", pod("fault-port-a", "", `,"ports":[{"containerPort":9555,"hostPort":9555}]`)), pause(8*time.Second), b.make(pods, "llm", pod("fault-port-b", "", `,"ports":[{"containerPort":9555,"hostPort":9555}]`)))
			},
			revert: func(b *bench) error {
				return errors.Join(b.remove(pods, "llm", "fault-port-a"), b.remove(pods, "llm", "fault-port-b"))
			},
		},
		{
			name: "no-such-class", want: []string{"storage.no_class"},
			inject: func(b *bench) error {
				return b.make("v1/persistentvolumeclaims", "llm", `{"apiVersion":"v1","kind":"PersistentVolumeClaim","metadata":{"name":"fault"},"spec":{"storageClassName":"nowhere","accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Gi"}}}}`)
			},
			revert: func(b *bench) error { return b.remove("v1/persistentvolumeclaims", "llm", "fault") },
		},
		made("release-half-way", []string{"helm.release.pending"}, "v1/secrets", "llm",
			`{"apiVersion":"v1","kind":"Secret","type":"helm.sh/release.v1","metadata":{"name":"sh.helm.release.v1.fault.v1","labels":{"owner":"helm","name":"fault","status":"pending-install","version":"1","modifiedAt":"1700000000"}}}`),
		made("release-failed", []string{"helm.release.failed"}, "v1/secrets", "llm",
			`{"apiVersion":"v1","kind":"Secret","type":"helm.sh/release.v1","metadata":{"name":"sh.helm.release.v1.fault.v1","labels":{"owner":"helm","name":"fault","status":"failed","version":"1"}}}`),
		{
			name: "certificate-expired", want: []string{"gateway.certificate"},
			inject: func(b *bench) error {
				object, err := expired()
				if err != nil {
					return err
				}
				return b.make("v1/secrets", "llm", object)
			},
			revert: func(b *bench) error { return b.remove("v1/secrets", "llm", "expired") },
		},
		patched("service-of-nobody", []string{"gateway.no_upstream"}, "v1/services", "llm", "model-server", `{"spec":{"selector":{"fault":"1"}}}`, `{"spec":{"selector":{"fault":null}}}`, false),
		patched("route-to-nowhere", []string{"gateway.route"}, routes, "llm", "openai",
			`{"spec":{"rules":[{"name":"openai","matches":[{"path":{"type":"PathPrefix","value":"/v1"}}],"backendRefs":[{"group":"","kind":"Service","name":"nowhere","port":8000,"weight":1}],"timeouts":{"request":"0s"}}]}}`,
			`{"spec":{"rules":[{"name":"openai","matches":[{"path":{"type":"PathPrefix","value":"/v1"}}],"backendRefs":[{"group":"","kind":"Service","name":"model-server","port":8000,"weight":1}],"timeouts":{"request":"0s"}}]}}`, false),
		patched("route-with-a-limit", []string{"gateway.route_timeout"}, routes, "llm", "openai",
			`{"spec":{"rules":[{"name":"openai","matches":[{"path":{"type":"PathPrefix","value":"/v1"}}],"backendRefs":[{"group":"","kind":"Service","name":"model-server","port":8000,"weight":1}],"timeouts":{"request":"15s"}}]}}`,
			`{"spec":{"rules":[{"name":"openai","matches":[{"path":{"type":"PathPrefix","value":"/v1"}}],"backendRefs":[{"group":"","kind":"Service","name":"model-server","port":8000,"weight":1}],"timeouts":{"request":"0s"}}]}}`, false),
		{
			name: "pod-refused", want: []string{"pod.stale"}, fix: true,
			inject: func(b *bench) error {
				err := b.make(pods, "llm", pod("fault-stale", `"nodeName":"nowhere",`, ""))
				return errors.Join(err, b.patch(pods, "llm", "fault-stale", `{"status":{"phase":"Failed","reason":"UnexpectedAdmissionError","message":"Allocate failed due to no healthy devices present"}}`, "status"))
			},
			revert: func(b *bench) error { _ = b.remove(pods, "llm", "fault-stale"); return nil },
		},
		{
			name: "vault-sealed", want: []string{"secrets.vault_sealed"}, fix: true,
			inject: func(b *bench) error {
				return errors.Join(b.patch(deployments, "vault", "vault-unsealer", `{"spec":{"replicas":0}}`), pause(5*time.Second), b.remove(pods, "vault", "vault-0"))
			},
			revert: func(b *bench) error {
				return b.patch(deployments, "vault", "vault-unsealer", `{"spec":{"replicas":1}}`)
			},
		},
		{
			name: "service-network-dropped", want: []string{"net.service_route", "net.firewall"},
			inject: func(b *bench) error { return b.inNode("iptables", "-I", "OUTPUT", "-d", "10.43.0.1", "-j", "REJECT") },
			revert: func(b *bench) error { return b.inNode("iptables", "-D", "OUTPUT", "-d", "10.43.0.1", "-j", "REJECT") },
		},
		stopped("containerd-halted", []string{"runtime.containerd", "node.not_ready"}, "containerd"),
		stopped("kubelet-halted", []string{"node.not_ready"}, "kubelet"),
		stopped("api-server-halted", []string{"k3s.api"}, "kube-apiserver"),
	}
	// The runtime's fault also needs somebody who asks for it.
	for i := range all {
		if all[i].name == "no-such-runtime" {
			inject, revert := all[i].inject, all[i].revert
			all[i].inject = func(b *bench) error {
				return errors.Join(inject(b), b.make(pods, "llm", pod("fault-runtime", `"runtimeClassName":"fault",`, "")))
			}
			all[i].revert = func(b *bench) error { return errors.Join(b.remove(pods, "llm", "fault-runtime"), revert(b)) }
		}
	}
	return all
}

func pause(d time.Duration) error { time.Sleep(d); return nil }

func (b *bench) inNode(argv ...string) error {
	out, err := exec.CommandContext(b.ctx, b.lab, append([]string{"exec", "--dir", b.dir, "--"}, argv...)...).CombinedOutput() // #nosec G204 -- the lab's own
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, out)
	}
	return nil
}

func (b *bench) patchNode(merge string) error {
	if b.node == "" {
		list, err := b.objects.Resource(gvr("v1/nodes")).List(b.ctx, metav1.ListOptions{})
		if err != nil || len(list.Items) == 0 {
			return errors.Join(err, errors.New("the lab has no node"))
		}
		b.node = list.Items[0].GetName()
	}
	return b.patch("v1/nodes", "", b.node, merge)
}
