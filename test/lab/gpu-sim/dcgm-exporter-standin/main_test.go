package main

import (
	"os"
	"strings"
	"testing"
)

// The chart's own list: each field of it must be served, or an alert hangs in the air.
func TestTheChartsList(t *testing.T) {
	list, err := os.Open("../../../../embed/charts/gpu-operator/files/dcgm-metrics.csv")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = list.Close() }()
	fields, err := readFields(list)
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := readGPUs([]byte("0, GPU-a, NVIDIA A100-SXM4-80GB, 00000000:81:00.0, 81920, 570.133.20\n1, GPU-b, NVIDIA A100-SXM4-80GB, 00000000:82:00.0, 81920, 570.133.20\n"))
	if err != nil {
		t.Fatal(err)
	}
	e := &exporter{fields: fields, gpus: gpus, host: "lab"}
	text := string(e.text(map[string]owner{"GPU-b": {"llm", "model-server-0", "vllm"}}, 10))
	for _, f := range fields {
		want := 2
		if f.kind == "label" {
			want = 0
		}
		if got := strings.Count(text, "\n"+f.name+"{"); got != want {
			t.Errorf("%s has %d samples, want %d", f.name, got, want)
		}
	}
	for _, want := range []string{
		`DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",pci_bus_id="00000000:81:00.0",device="nvidia0",modelName="NVIDIA A100-SXM4-80GB",Hostname="lab",DCGM_FI_DRIVER_VERSION="570.133.20"} 0`,
		`DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b",pci_bus_id="00000000:82:00.0",device="nvidia1",modelName="NVIDIA A100-SXM4-80GB",Hostname="lab",DCGM_FI_DRIVER_VERSION="570.133.20",container="vllm",namespace="llm",pod="model-server-0"} 70`,
		"# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter",
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("there is no line %s in\n%s", want, text)
		}
	}
}

func TestListsThatEndTheExporter(t *testing.T) {
	for name, list := range map[string]string{
		"no such field": "DCGM_FI_DEV_NO_SUCH_FIELD, gauge, Help.",
		"no such type":  "DCGM_FI_DEV_GPU_TEMP, gauges, Help.",
		"two columns":   "DCGM_FI_DEV_GPU_TEMP, gauge",
		"nothing":       "# a comment\n\n",
	} {
		if fields, err := readFields(strings.NewReader(list)); err == nil {
			t.Errorf("%s: read as %v", name, fields)
		}
	}
}
