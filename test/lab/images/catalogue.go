package images

import (
	"fmt"
	"path/filepath"
	"strings"

	assets "github.com/llmbox-dev/llmbox/embed"
	"github.com/llmbox-dev/llmbox/internal/component"
)

// Catalogue lists the images a node may ask for. Programs lie in dir, llmbox's own
// binary at llmbox. References come from the component table; entrypoints and users
// are upstream's.
func Catalogue(dir, llmbox, llmboxVersion string) ([]Image, error) {
	table, err := component.LoadTable(assets.FS())
	if err != nil {
		return nil, err
	}
	c := catalogue{dir: dir, table: table}
	// What a cluster has before anything is installed into it, under k3s' references.
	for _, pause := range []string{"registry.k8s.io/pause:3.10", "docker.io/rancher/mirrored-pause:3.6"} {
		c.add(pause, one("pause-standin", "/pause"), user("65535:65535"), standIn)
	}
	c.add("docker.io/rancher/mirrored-coredns-coredns:1.15.0", one("coredns", "/coredns"), user("65532:65532"))
	c.add("docker.io/rancher/local-path-provisioner:v0.0.30", one("local-path-provisioner", "/usr/bin/local-path-provisioner"),
		func(i *Image) { i.Entrypoint, i.Cmd = nil, []string{"local-path-provisioner"} })
	c.add("docker.io/rancher/mirrored-library-busybox:1.35.0", busybox)

	// What helm-controller's Jobs run where nobody names another.
	c.add("docker.io/rancher/klipper-helm:latest", helmJob, user("1000"), standIn)

	c.add("ghcr.io/llmbox-dev/llmbox:"+llmboxVersion, one("llmbox", "/llmbox"), func(i *Image) { i.Files[0].Source = llmbox })
	for _, variant := range []string{"", "-cu129"} {
		c.add(c.ref("model", "vllm")+variant, one("vllm-sim", "/usr/local/bin/vllm"), standIn, func(i *Image) {
			i.Entrypoint, i.WorkingDir = []string{"vllm", "serve"}, "/vllm-workspace"
			i.Files = append(i.Files, File{Path: "/etc/passwd", Content: "root:x:0:0:root:/root:/bin/bash\nvllm:x:2000:0::/home/vllm:/bin/bash\n"})
		})
	}
	c.add(c.ref("envoy-gateway", "gateway"), one("envoy-gateway", "/usr/local/bin/envoy-gateway"), user("65532:65532"))
	c.add(c.ref("envoy-gateway", "envoy"), one("proxy-standin", "/usr/local/bin/envoy"), standIn, user("65532:65532"))
	c.add(c.ref("external-secrets", "controller"), one("external-secrets", "/bin/external-secrets"), user("65534"))

	c.add(c.ref("vault", "vault"), one("vault-on-core", "/bin/vault"), standIn, func(i *Image) {
		// Upstream's entrypoint is a script around the program; it starts as root and steps down.
		i.Entrypoint, i.Cmd = []string{"/bin/vault"}, []string{"server", "-config=/vault/config"}
		i.Files = append(i.Files, File{Path: "/etc/passwd", Content: "root:x:0:0:root:/root:/bin/sh\nvault:x:100:1000::/home/vault:/bin/false\n"})
	})

	c.add(c.ref("keda", "operator"), one("keda", "/keda"), user("65532:65532"))
	c.add(c.ref("keda", "metricsApiserver"), one("keda-adapter", "/keda-adapter"), user("65532:65532"))
	c.add(c.ref("keda", "admissionWebhooks"), one("keda-admission-webhooks", "/keda-admission-webhooks"), user("65532:65532"))
	c.add(c.ref("kyverno", "kyverno"), one("kyverno", "/ko-app/kyverno"), user("65532"))
	c.add(c.ref("kyverno", "kyvernopre"), one("kyverno-init", "/ko-app/kyverno-init"), user("65532"))

	c.add(c.ref("prometheus", "operator"), one("prometheus-operator", "/bin/operator"), user("65534"))
	c.add(c.ref("prometheus", "configReloader"), one("prometheus-config-reloader", "/bin/prometheus-config-reloader"), user("65534"))
	c.add(c.ref("prometheus", "prometheus"), one("prometheus", "/bin/prometheus"), user("65534"), func(i *Image) { i.WorkingDir = "/prometheus" })
	c.add(c.ref("prometheus", "nodeExporter"), one("node-exporter", "/bin/node_exporter"), user("65534"))
	c.add(c.ref("prometheus", "alertmanager"), one("alertmanager", "/bin/alertmanager"), user("65534"), func(i *Image) { i.WorkingDir = "/alertmanager" })
	c.add(c.ref("prometheus", "grafana"), answering("Grafana", ":3000"), user("472"))
	c.add(c.ref("prometheus", "kubeStateMetrics"), one("kube-state-metrics-standin", "/kube-state-metrics"), standIn, user("65534"))

	c.gpuOperator()
	return c.images, c.err
}

type catalogue struct {
	dir    string
	table  *component.Table
	images []Image
	err    error
}

// ref is an image's reference in the component table.
func (c *catalogue) ref(name, key string) string {
	comp, ok := c.table.Get(name)
	image, known := comp.Images[key]
	if (!ok || !known) && c.err == nil {
		c.err = fmt.Errorf("listing the lab's images: the component table has no image %s of %s", key, name)
	}
	return image.Reference
}

func (c *catalogue) add(ref string, parts ...func(*Image)) {
	i := Image{Reference: ref}
	for _, p := range parts {
		p(&i)
	}
	for n, f := range i.Files {
		if f.Source != "" && !filepath.IsAbs(f.Source) {
			i.Files[n].Source = filepath.Join(c.dir, f.Source)
		}
	}
	c.images = append(c.images, i)
}

// one puts a program at one path, with a /tmp as most images have it.
func one(program, path string) func(*Image) {
	return func(i *Image) {
		i.Program, i.Entrypoint = program, []string{path}
		i.Files = append(i.Files, File{Path: path, Source: program}, File{Path: "/tmp/", Mode: 0o1777})
	}
}

func user(u string) func(*Image) { return func(i *Image) { i.User = u } }

func standIn(i *Image) { i.StandIn = true }

// answering stands in for a program that others only need to be up.
func answering(name, listen string) func(*Image) {
	return func(i *Image) {
		one("http-standin", "/http-standin")(i)
		i.StandIn = true
		i.Env = append(i.Env, "HTTP_STANDIN_NAME="+name, "HTTP_STANDIN_LISTEN="+listen)
	}
}

// helmJob has the real Helm, and a stand-in for the script that calls it.
func helmJob(i *Image) {
	const home = "/home/klipper-helm"
	i.Program, i.Entrypoint, i.WorkingDir = "helm-job-standin, helm4", []string{"entry"}, home
	i.Files = []File{
		{Path: "/usr/bin/entry", Source: "helm-job-standin"},
		{Path: "/usr/bin/helm", Source: "helm4"},
		{Path: home + "/", Mode: 0o755},
		{Path: "/tmp/", Mode: 0o1777},
		{Path: "/etc/passwd", Content: "root:x:0:0:root:/root:/bin/ash\nklipper-helm:x:1000:1000::" + home + ":/bin/bash\n"},
	}
}

// busybox is Debian's, for the shell scripts of others.
func busybox(i *Image) {
	i.Program, i.Cmd = "busybox of Debian", []string{"sh"}
	i.Files = []File{{Path: "/bin/busybox", Source: "/bin/busybox"}, {Path: "/tmp/", Mode: 0o1777}}
	for _, name := range strings.Fields("sh mkdir rm chmod cat ls sleep wget nslookup id test echo env ps nc") {
		i.Files = append(i.Files, File{Path: "/bin/" + name, Link: "busybox"})
	}
}
