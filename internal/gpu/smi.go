package gpu

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"
)

// errNoSMI means that there is no nvidia-smi to ask.
var errNoSMI = errors.New("no nvidia-smi")

// askSMI asks nvidia-smi for its XML.
func askSMI(ctx context.Context, o Options) (Report, error) {
	asked := run{
		path: o.SMI, name: "nvidia-smi", arguments: []string{"-q", "-x"},
		environment: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"},
		slowAfter:   o.SMIAfter, hangAfter: o.SMIAfter, limit: MaxAnswer,
	}
	out := asked.do(ctx)
	switch {
	case errors.Is(out.startErr, fs.ErrNotExist):
		return Report{}, errNoSMI
	case out.startErr != nil:
		return Report{}, fmt.Errorf("starting it: %w", out.startErr)
	case out.timedOut:
		return Report{}, fmt.Errorf("no answer within %s", o.SMIAfter)
	case out.cancelled:
		return Report{}, errors.New("stopped before there was an answer")
	case out.signal != "":
		return Report{}, errors.New("killed by " + out.signal)
	case out.truncated:
		return Report{}, fmt.Errorf("more than %d bytes of answer", MaxAnswer)
	}
	report, err := DecodeSMI(out.stdout)
	if err != nil && out.exit != 0 {
		// What it says on its way out is plain text, on either stream.
		return Report{}, fmt.Errorf("exit %d: %s", out.exit, OneLine(string(out.stdout)+" "+string(out.stderr)))
	}
	return report, err
}

// smiLog is the part of nvidia-smi's XML that a report holds. The elements are those
// of nvsmi_device_v12.dtd as drivers 470 to 575 write it; what an older one does not
// have stays empty, which reads like N/A.
type smiLog struct {
	XMLName xml.Name `xml:"nvidia_smi_log"`
	Driver  string   `xml:"driver_version"`
	CUDA    string   `xml:"cuda_version"`
	GPUs    []smiGPU `xml:"gpu"`
}

type smiGPU struct {
	ID          string `xml:"id,attr"`
	Name        string `xml:"product_name"`
	Brand       string `xml:"product_brand"`
	Persistence string `xml:"persistence_mode"`
	Serial      string `xml:"serial"`
	UUID        string `xml:"uuid"`
	VBIOS       string `xml:"vbios_version"`
	GSP         string `xml:"gsp_firmware_version"`
	Virtual     string `xml:"gpu_virtualization_mode>virtualization_mode"`
	License     string `xml:"vgpu_software_licensed_product>license_status"`
	ComputeMode string `xml:"compute_mode"`

	MIG        string `xml:"mig_mode>current_mig"`
	MIGPending string `xml:"mig_mode>pending_mig"`
	MIGDevices []struct {
		Total string `xml:"fb_memory_usage>total"`
	} `xml:"mig_devices>mig_device"`

	DeviceID      string `xml:"pci>pci_device_id"`
	Bus           string `xml:"pci>pci_bus_id"`
	Generation    string `xml:"pci>pci_gpu_link_info>pcie_gen>current_link_gen"`
	MaxGeneration string `xml:"pci>pci_gpu_link_info>pcie_gen>max_link_gen"`
	Width         string `xml:"pci>pci_gpu_link_info>link_widths>current_link_width"`
	MaxWidth      string `xml:"pci>pci_gpu_link_info>link_widths>max_link_width"`
	Replays       string `xml:"pci>replay_counter"`

	Total    string `xml:"fb_memory_usage>total"`
	Reserved string `xml:"fb_memory_usage>reserved"`
	Used     string `xml:"fb_memory_usage>used"`
	Free     string `xml:"fb_memory_usage>free"`
	BAR1     string `xml:"bar1_memory_usage>total"`

	ECC        string `xml:"ecc_mode>current_ecc"`
	ECCPending string `xml:"ecc_mode>pending_ecc"`
	Volatile   smiECC `xml:"ecc_errors>volatile"`
	Aggregate  smiECC `xml:"ecc_errors>aggregate"`

	RemapCorrectable   string `xml:"remapped_rows>remapped_row_corr"`
	RemapUncorrectable string `xml:"remapped_rows>remapped_row_unc"`
	RemapPending       string `xml:"remapped_rows>remapped_row_pending"`
	RemapFailure       string `xml:"remapped_rows>remapped_row_failure"`

	RetiredSingle  string `xml:"retired_pages>multiple_single_bit_retirement>retired_count"`
	RetiredDouble  string `xml:"retired_pages>double_bit_retirement>retired_count"`
	RetiredPending string `xml:"retired_pages>pending_retirement"`

	Temperature string `xml:"temperature>gpu_temp"`
	Shutdown    string `xml:"temperature>gpu_temp_max_threshold"`
	Slowdown    string `xml:"temperature>gpu_temp_slow_threshold"`

	// The readings were renamed twice: power_readings, then gpu_power_readings, in
	// which power_draw became average_power_draw.
	PowerOld      string `xml:"power_readings>power_draw"`
	PowerNew      string `xml:"gpu_power_readings>power_draw"`
	PowerAverage  string `xml:"gpu_power_readings>average_power_draw"`
	PowerLimitOld string `xml:"power_readings>enforced_power_limit"`
	PowerLimitNew string `xml:"gpu_power_readings>current_power_limit"`

	Reasons struct {
		List []smiElement `xml:",any"`
	} `xml:"clocks_event_reasons"`
	OldReasons struct {
		List []smiElement `xml:",any"`
	} `xml:"clocks_throttle_reasons"`

	FabricState  string `xml:"fabric>state"`
	FabricStatus string `xml:"fabric>status"`
	FabricClique string `xml:"fabric>cliqueId"`

	Processes []struct {
		PID  string `xml:"pid"`
		Type string `xml:"type"`
		Name string `xml:"process_name"`
		Used string `xml:"used_memory"`
	} `xml:"processes>process_info"`
}

type smiECC struct {
	DRAM   string `xml:"dram_uncorrectable"`
	SRAM   string `xml:"sram_uncorrectable"`
	Parity string `xml:"sram_uncorrectable_parity"`
	SECDED string `xml:"sram_uncorrectable_secded"`
	// Before Ampere.
	Total string `xml:"double_bit>total"`
}

type smiElement struct {
	XMLName xml.Name
	Text    string `xml:",chardata"`
}

// DecodeSMI reads what "nvidia-smi -q -x" writes. The XML has to be well-formed and
// within the limits of a report.
func DecodeSMI(data []byte) (Report, error) {
	if len(data) > MaxAnswer {
		return Report{}, fmt.Errorf("nvidia-smi wrote %d bytes, at most %d are read", len(data), MaxAnswer)
	}
	var log smiLog
	decoder := xml.NewDecoder(bytes.NewReader(data))
	if err := decoder.Decode(&log); err != nil {
		return Report{}, fmt.Errorf("reading nvidia-smi's XML: %w", err)
	}
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return Report{}, fmt.Errorf("reading nvidia-smi's XML: %w", err)
		}
		if text, ok := token.(xml.CharData); !ok || len(bytes.TrimSpace(text)) > 0 {
			return Report{}, errors.New("reading nvidia-smi's XML: something follows it")
		}
	}
	report := Report{
		Schema: ReportSchema, Source: SourceSMI, NVML: NVMLEnding{Ending: EndingOK},
		Driver: smiText(log.Driver), CUDA: smiText(log.CUDA), Devices: []Device{},
	}
	if len(log.GPUs) > maxDevices {
		return Report{}, fmt.Errorf("reading nvidia-smi's XML: %d GPUs, at most %d are read", len(log.GPUs), maxDevices)
	}
	for i, g := range log.GPUs {
		report.Devices = append(report.Devices, g.device(i))
	}
	if err := report.check(); err != nil {
		return Report{}, fmt.Errorf("reading nvidia-smi's XML: %w", err)
	}
	// Who asked knows how NVML ended; nvidia-smi does not.
	report.NVML = NVMLEnding{}
	return report, nil
}

func (g smiGPU) device(index int) Device {
	d := Device{
		Index: index, Name: smiText(g.Name), Brand: smiText(g.Brand), Serial: smiText(g.Serial), UUID: smiText(g.UUID),
		VBIOS: smiText(g.VBIOS), GSP: smiText(g.GSP), PCIBus: NormalBus(smiText(g.Bus)),
		ComputeMode: strings.ToLower(smiText(strings.ReplaceAll(g.ComputeMode, "_", " "))),
	}
	if d.PCIBus == "" {
		d.PCIBus = NormalBus(smiText(g.ID))
	}
	// "223610DE": the device, then the vendor.
	if id := smiText(g.DeviceID); len(id) == 8 {
		d.PCIDevice = strings.ToUpper(id[:4])
	}
	d.ComputeMode = strings.ReplaceAll(d.ComputeMode, " ", "_")
	switch strings.ToLower(smiText(g.Virtual)) {
	case "none":
		d.Virtualization = "none"
	case "pass-through":
		d.Virtualization = "passthrough"
	case "vgpu", "vgpu guest":
		d.Virtualization = "vgpu"
	case "host vgpu", "host vsga":
		d.Virtualization = "host_vgpu"
	}
	if license := strings.ToLower(smiText(g.License)); license != "" {
		d.License = "unlicensed"
		if strings.HasPrefix(license, "licensed") {
			d.License = "licensed"
		}
	}
	fillFromTable(&d)
	if text := smiText(g.Persistence); text != "" {
		on := text == "Enabled"
		d.Persistence = &on
	}
	g.memory(&d)
	g.health(&d)
	g.state(&d)
	g.processes(&d)
	return d
}

func (g smiGPU) memory(d *Device) {
	if total, ok := smiBytes(g.Total); ok {
		d.Memory = &Memory{TotalBytes: total}
		d.Memory.ReservedBytes, _ = smiBytes(g.Reserved)
		d.Memory.UsedBytes, _ = smiBytes(g.Used)
		d.Memory.FreeBytes, _ = smiBytes(g.Free)
		d.Memory.BAR1Bytes, _ = smiBytes(g.BAR1)
	}
	if mode := smiText(g.MIG); mode != "" {
		d.MIG = &MIG{Enabled: mode == "Enabled", Pending: smiText(g.MIGPending) == "Enabled"}
		for _, part := range g.MIGDevices {
			bytes, _ := smiBytes(part.Total)
			if len(d.MIG.Instances) < maxList {
				d.MIG.Instances = append(d.MIG.Instances, MIGInstance{MemoryBytes: bytes})
			}
		}
	}
}

func (g smiGPU) health(d *Device) {
	if mode := smiText(g.ECC); mode != "" {
		d.ECC = &ECC{
			Enabled: mode == "Enabled", Pending: smiText(g.ECCPending) == "Enabled",
			UncorrectedVolatile: g.Volatile.sum(), UncorrectedAggregate: g.Aggregate.sum(),
		}
	}
	if correctable, ok := smiNumber(g.RemapCorrectable); ok {
		uncorrectable, _ := smiNumber(g.RemapUncorrectable)
		d.Remap = &Remap{
			Correctable: correctable, Uncorrectable: uncorrectable,
			Pending: smiText(g.RemapPending) == "Yes", Failure: smiText(g.RemapFailure) == "Yes",
		}
	}
	if single, ok := smiNumber(g.RetiredSingle); ok {
		double, _ := smiNumber(g.RetiredDouble)
		d.Retired = &Retired{SingleBit: single, DoubleBit: double, Pending: smiText(g.RetiredPending) == "Yes"}
	}
}

func (e smiECC) sum() *uint64 {
	var sum uint64
	found := false
	for _, text := range []string{e.DRAM, e.SRAM, e.Parity, e.SECDED, e.Total} {
		if n, ok := smiNumber(text); ok {
			sum += uint64(n) // #nosec G115 -- smiNumber gives none below zero
			found = true
		}
	}
	if !found {
		return nil
	}
	return &sum
}

func (g smiGPU) state(d *Device) {
	if now, ok := smiNumber(g.Temperature); ok {
		d.Temperature = &Temperature{Now: now}
		if slowdown, ok := smiNumber(g.Slowdown); ok {
			d.Temperature.Slowdown = &slowdown
		}
		if shutdown, ok := smiNumber(g.Shutdown); ok {
			d.Temperature.Shutdown = &shutdown
		}
	}
	power := Power{Now: smiWatts(g.PowerAverage, g.PowerNew, g.PowerOld), Limit: smiWatts(g.PowerLimitNew, g.PowerLimitOld)}
	if power.Now != nil || power.Limit != nil {
		d.PowerWatts = &power
	}
	if width, ok := smiNumber(g.Width); ok {
		d.PCIe = &PCIe{Width: width}
		d.PCIe.MaxWidth, _ = smiNumber(g.MaxWidth)
		d.PCIe.Generation, _ = smiNumber(g.Generation)
		d.PCIe.MaxGeneration, _ = smiNumber(g.MaxGeneration)
		d.PCIe.Replays, _ = smiNumber(g.Replays)
	}
	for _, reason := range append(g.Reasons.List, g.OldReasons.List...) {
		name := reason.XMLName.Local
		for _, prefix := range []string{"clocks_event_reason_", "clocks_throttle_reason_"} {
			name = strings.TrimPrefix(name, prefix)
		}
		// One name differs from NVML's by a letter.
		if name == "display_clocks_setting" {
			name = "display_clock_setting"
		}
		if smiText(reason.Text) == "Active" && len(d.Throttle) < maxList {
			d.Throttle = append(d.Throttle, OneLine(name))
		}
	}
	if state := smiText(g.FabricState); state != "" {
		d.Fabric = &Fabric{State: strings.ReplaceAll(strings.ToLower(state), " ", "_"), Status: smiText(g.FabricStatus)}
		d.Fabric.Clique, _ = smiNumber(g.FabricClique)
	}
}

func (g smiGPU) processes(d *Device) {
	for _, p := range g.Processes {
		pid, ok := smiNumber(p.PID)
		if !ok || len(d.Processes) == maxProcesses {
			continue
		}
		process := Process{PID: pid, Name: ProcessName(smiText(p.Name)), Kind: "graphics"}
		// "C", "G", "C+G" and, under the multi-process service, "M+C".
		if strings.Contains(p.Type, "C") {
			process.Kind = "compute"
		}
		if used, ok := smiBytes(p.Used); ok {
			process.UsedBytes = &used
		}
		d.Processes = append(d.Processes, process)
	}
}

// smiText is a value, empty where nvidia-smi has none to give.
func smiText(text string) string {
	text = OneLine(text)
	switch {
	case text == "N/A", text == "Unknown Error",
		strings.HasPrefix(text, "["), strings.HasPrefix(text, "Requested functionality"):
		return ""
	}
	return text
}

// smiNumber is the whole number at the start of "31 C", "16x" or "4".
func smiNumber(text string) (int, bool) {
	text = smiText(text)
	end := strings.IndexFunc(text, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(text)
	}
	n, err := strconv.Atoi(text[:end])
	return n, err == nil
}

// smiBytes is "23028 MiB" in bytes.
func smiBytes(text string) (uint64, bool) {
	number, unit, _ := strings.Cut(smiText(text), " ")
	n, err := strconv.ParseUint(number, 10, 32)
	if err != nil || unit != "MiB" {
		return 0, false
	}
	return n << 20, true
}

// smiWatts is the first of the texts that is a power, as in "16.24 W".
func smiWatts(texts ...string) *float64 {
	for _, text := range texts {
		number, unit, _ := strings.Cut(smiText(text), " ")
		// Digits and a point only: ParseFloat also knows NaN and infinity.
		if unit != "W" || strings.Trim(number, "0123456789.") != "" {
			continue
		}
		if watts, err := strconv.ParseFloat(number, 64); err == nil {
			return &watts
		}
	}
	return nil
}
