// Command dcgm-exporter-standin takes the place of NVIDIA's DCGM exporter on a node
// without a GPU. It reads the same variables and the same list of fields, serves those
// fields under the same names and labels, and learns from kubelet which pod has which
// GPU. Which GPUs there are it asks nvidia-smi, which a container has only if the
// container runtime handed it in.
//
// The figures are made up: they move with time and with whether a pod has the GPU, and
// mean nothing.
package main

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const (
	resource = "nvidia.com/gpu"
	kubelet  = "unix:///var/lib/kubelet/pod-resources/kubelet.sock"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx); err != nil {
		log.Print("dcgm-exporter-standin: ", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	list, err := os.Open(os.Getenv("DCGM_EXPORTER_COLLECTORS"))
	if err != nil {
		return fmt.Errorf("opening the list of fields: %w", err)
	}
	fields, err := readFields(list)
	if err = errors.Join(err, list.Close()); err != nil {
		return err
	}
	e := &exporter{fields: fields, host: os.Getenv("NODE_NAME"), began: time.Now()}
	if e.gpus, err = findGPUs(ctx); err != nil {
		return err
	}
	if os.Getenv("DCGM_EXPORTER_KUBERNETES") == "true" {
		conn, err := grpc.NewClient(kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return fmt.Errorf("reaching kubelet: %w", err)
		}
		defer func() { _ = conn.Close() }()
		e.pods = resources.NewPodResourcesListerClient(conn)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", e)
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	server := &http.Server{Addr: os.Getenv("DCGM_EXPORTER_LISTEN"), Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() {
		<-ctx.Done()
		_ = server.Close()
	}()
	log.Printf("dcgm-exporter-standin: %d fields of %d GPUs on %s", len(fields), len(e.gpus), server.Addr)
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving metrics: %w", err)
	}
	return nil
}

// field is one line of the list.
type field struct{ name, kind, help string }

// readFields reads a list as the exporter does: comments, blank lines, and lines of
// name, type and help. A name that is not DCGM's ends the exporter, so it ends this.
func readFields(r io.Reader) ([]field, error) {
	lines := csv.NewReader(r)
	lines.Comment, lines.TrimLeadingSpace, lines.FieldsPerRecord = '#', true, 3
	records, err := lines.ReadAll()
	if err != nil {
		return nil, fmt.Errorf("reading the list of fields: %w", err)
	}
	known := values()
	var fields []field
	for _, r := range records {
		f := field{name: strings.TrimSpace(r[0]), kind: strings.TrimSpace(r[1]), help: strings.TrimSpace(r[2])}
		if _, ok := known[f.name]; !ok {
			return nil, fmt.Errorf("reading the list of fields: this stand-in knows no DCGM field %s", f.name)
		}
		switch f.kind {
		case "gauge", "counter", "label":
		default:
			return nil, fmt.Errorf("reading the list of fields: %s has the type %q", f.name, f.kind)
		}
		fields = append(fields, f)
	}
	if len(fields) == 0 {
		return nil, errors.New("reading the list of fields: it names none")
	}
	return fields, nil
}

type gpu struct {
	index, uuid, name, bus string
	memoryMiB              float64
	driver                 string
}

func findGPUs(ctx context.Context) ([]gpu, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nvidia-smi", "--query-gpu=index,uuid,name,pci.bus_id,memory.total,driver_version", "--format=csv,noheader,nounits")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("asking for the GPUs: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	return readGPUs(out)
}

func readGPUs(out []byte) ([]gpu, error) {
	var gpus []gpu
	for line := range strings.Lines(string(out)) {
		f := strings.Split(strings.TrimSpace(line), ", ")
		if len(f) != 6 {
			return nil, fmt.Errorf("asking for the GPUs: nvidia-smi says %q", line)
		}
		memory, err := strconv.ParseFloat(f[4], 64)
		if err != nil {
			return nil, fmt.Errorf("asking for the GPUs: %w", err)
		}
		gpus = append(gpus, gpu{index: f[0], uuid: f[1], name: f[2], bus: f[3], memoryMiB: memory, driver: f[5]})
	}
	if len(gpus) == 0 {
		return nil, errors.New("asking for the GPUs: there is none")
	}
	return gpus, nil
}

// owner is the container that has a GPU.
type owner struct{ namespace, pod, container string }

type exporter struct {
	fields []field
	gpus   []gpu
	host   string
	began  time.Time
	pods   resources.PodResourcesListerClient
}

// owners asks kubelet which container has which GPU.
func (e *exporter) owners(ctx context.Context) (map[string]owner, error) {
	if e.pods == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	answer, err := e.pods.List(ctx, &resources.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("asking kubelet for the pods: %w", err)
	}
	found := map[string]owner{}
	for _, p := range answer.GetPodResources() {
		for _, c := range p.GetContainers() {
			for _, d := range c.GetDevices() {
				if d.GetResourceName() != resource {
					continue
				}
				for _, id := range d.GetDeviceIds() {
					// A slice of a shared GPU is named after it, with a number behind.
					uuid, _, _ := strings.Cut(id, "::")
					found[uuid] = owner{p.GetNamespace(), p.GetName(), c.GetName()}
				}
			}
		}
	}
	return found, nil
}

// ServeHTTP writes the fields in Prometheus' text format.
func (e *exporter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	owners, err := e.owners(r.Context())
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = w.Write(e.text(owners, time.Since(e.began).Seconds()))
}

func (e *exporter) text(owners map[string]owner, seconds float64) []byte {
	known := values()
	labels := make([]string, len(e.gpus))
	for i, g := range e.gpus {
		pairs := [][2]string{{"gpu", g.index}, {"UUID", g.uuid}, {"pci_bus_id", g.bus}, {"device", "nvidia" + g.index}, {"modelName", g.name}, {"Hostname", e.host}}
		for _, f := range e.fields {
			if f.kind == "label" {
				pairs = append(pairs, [2]string{f.name, g.driver})
			}
		}
		if o, ok := owners[g.uuid]; ok {
			pairs = append(pairs, [2]string{"container", o.container}, [2]string{"namespace", o.namespace}, [2]string{"pod", o.pod})
		}
		var text []string
		for _, p := range pairs {
			text = append(text, p[0]+"="+strconv.Quote(p[1]))
		}
		labels[i] = strings.Join(text, ",")
	}
	var out bytes.Buffer
	for _, f := range e.fields {
		if f.kind == "label" {
			continue
		}
		fmt.Fprintf(&out, "# HELP %s %s\n# TYPE %s %s\n", f.name, f.help, f.name, f.kind)
		for i, g := range e.gpus {
			load := 0.0
			if _, ok := owners[g.uuid]; ok {
				load = 1
			}
			fmt.Fprintf(&out, "%s{%s} %s\n", f.name, labels[i], strconv.FormatFloat(known[f.name](g, load, seconds), 'f', -1, 64))
		}
	}
	return out.Bytes()
}

// values are the DCGM fields this stand-in knows, each with a figure for a GPU that a
// pod has (load 1) or has not (0), so many seconds after the start.
func values() map[string]func(g gpu, load, seconds float64) float64 {
	constant := func(v float64) func(gpu, float64, float64) float64 {
		return func(gpu, float64, float64) float64 { return v }
	}
	between := func(idle, busy float64) func(gpu, float64, float64) float64 {
		return func(_ gpu, load, _ float64) float64 { return idle + load*(busy-idle) }
	}
	used := func(g gpu, load float64) float64 { return float64(int(g.memoryMiB * 0.9 * load)) }
	reserved := func(g gpu) float64 { return float64(int(g.memoryMiB * 0.008)) }
	return map[string]func(gpu, float64, float64) float64{
		"DCGM_FI_DRIVER_VERSION":               constant(0),
		"DCGM_FI_DEV_SM_CLOCK":                 between(210, 1410),
		"DCGM_FI_DEV_MEM_CLOCK":                constant(1593),
		"DCGM_FI_DEV_CLOCKS_EVENT_REASONS":     between(1, 0),
		"DCGM_FI_DEV_GPU_TEMP":                 between(31, 58),
		"DCGM_FI_DEV_MEMORY_TEMP":              between(35, 66),
		"DCGM_FI_DEV_SLOWDOWN_TEMP":            constant(89),
		"DCGM_FI_DEV_POWER_USAGE":              between(61.7, 290),
		"DCGM_FI_DEV_POWER_MGMT_LIMIT":         constant(400),
		"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": func(_ gpu, _, seconds float64) float64 { return float64(int(seconds * 61700)) },
		"DCGM_FI_DEV_GPU_UTIL":                 between(0, 70),
		"DCGM_FI_DEV_MEM_COPY_UTIL":            between(0, 40),
		"DCGM_FI_DEV_FB_TOTAL":                 func(g gpu, _, _ float64) float64 { return g.memoryMiB },
		"DCGM_FI_DEV_FB_USED":                  func(g gpu, load, _ float64) float64 { return used(g, load) },
		"DCGM_FI_DEV_FB_RESERVED":              func(g gpu, _, _ float64) float64 { return reserved(g) },
		"DCGM_FI_DEV_FB_FREE":                  func(g gpu, load, _ float64) float64 { return g.memoryMiB - used(g, load) - reserved(g) },

		"DCGM_FI_DEV_XID_ERRORS":                  constant(0),
		"DCGM_FI_DEV_PCIE_REPLAY_COUNTER":         constant(0),
		"DCGM_FI_DEV_ECC_SBE_VOL_TOTAL":           constant(0),
		"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL":           constant(0),
		"DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS":   constant(0),
		"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": constant(0),
		"DCGM_FI_DEV_ROW_REMAP_PENDING":           constant(0),
		"DCGM_FI_DEV_ROW_REMAP_FAILURE":           constant(0),
		"DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL":      constant(0),

		"DCGM_FI_PROF_GR_ENGINE_ACTIVE":   between(0, 0.7),
		"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": between(0, 0.3),
		"DCGM_FI_PROF_DRAM_ACTIVE":        between(0, 0.5),
		"DCGM_FI_PROF_PCIE_TX_BYTES":      between(1e6, 4e7),
		"DCGM_FI_PROF_PCIE_RX_BYTES":      between(1e6, 4e7),
	}
}
