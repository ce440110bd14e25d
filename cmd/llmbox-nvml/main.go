//go:build cgo && linux

// Command llmbox-nvml asks NVML once and writes one JSON document, package gpu's
// Report, to its standard output. It is linked dynamically, because NVML comes
// with the driver and has to be opened at run time; llmbox itself is static,
// carries this program inside and runs it with a deadline.
//
// It must not judge and must not look anywhere but at NVML: what the PCI bus and
// /proc say is the parent's to add. It gives each call's name away before it
// enters it, so that the parent can name the one that never came back.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/llmbox-dev/llmbox/internal/gpu"
)

func main() {
	dieBySignal()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "llmbox-nvml:", err)
		os.Exit(1)
	}
}

func run() error {
	enter := func(string) {}
	if os.Getenv(gpu.EnvProgress) != "" {
		// The parent hands the write end of a pipe over as the first extra file.
		progress := os.NewFile(gpu.ProgressFD, "progress")
		// A parent that no longer listens is no reason to stop.
		enter = func(call string) { _, _ = progress.WriteString(call + "\n") }
	}
	report := ask(os.Getenv(gpu.EnvLibrary), enter)
	if err := json.NewEncoder(os.Stdout).Encode(report); err != nil {
		return fmt.Errorf("writing the report: %w", err)
	}
	return nil
}

// Where the driver puts its library on systems whose loader does not know the
// place: WSL, NixOS, and Debian's own packages before their alternatives are set.
func libraryPaths() []string {
	return []string{
		"libnvidia-ml.so.1",
		"/usr/lib/wsl/lib/libnvidia-ml.so.1",
		"/run/opengl-driver/lib/libnvidia-ml.so.1",
		"/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1",
		"/usr/lib/aarch64-linux-gnu/nvidia/current/libnvidia-ml.so.1",
	}
}

// ask opens the library and reads everything.
func ask(override string, enter func(string)) gpu.Report {
	report := gpu.Report{Schema: gpu.ReportSchema, Source: gpu.SourceNone, Devices: []gpu.Device{}}
	paths := libraryPaths()
	if override != "" {
		paths = []string{override}
	}
	// The loader's own words are wanted, and symbols have to be looked up before
	// nvmlInit; go-nvml's Init gives neither. Opening twice gives the same handle.
	const flags = dl.RTLD_LAZY | dl.RTLD_GLOBAL
	var library *dl.DynamicLibrary
	var path string
	var refused error
	for _, path = range paths {
		enter("dlopen")
		library = dl.New(path, flags)
		err := library.Open()
		if err == nil {
			refused = nil
			break
		}
		// Only the first place is what a user would mend.
		if refused == nil {
			refused = err
		}
	}
	if refused != nil {
		report.NVML = gpu.NVMLEnding{
			Ending: gpu.EndingLibraryNotFound, Code: int(nvml.ERROR_LIBRARY_NOT_FOUND), Detail: gpu.OneLine(refused.Error()),
		}
		return report
	}
	r := &reader{
		lib:   nvml.New(nvml.WithLibraryPath(path)),
		enter: enter,
		lost:  map[int]bool{},
		has:   func(symbol string) bool { return library.Lookup(symbol) == nil },
	}
	r.read(&report)
	return report
}

// errorMap collects a call's name and NVML's words for its failure.
type errorMap map[string]string

// orNil keeps an empty map out of the document.
func (m errorMap) orNil() map[string]string {
	if len(m) == 0 {
		return nil
	}
	return m
}

// words are NVML's own for a return code. The function that has them is itself one
// that a broken library may lack.
func (r *reader) words(ret nvml.Return) string {
	if !r.has("nvmlErrorString") {
		return fmt.Sprintf("NVML return code %d", int(ret))
	}
	return gpu.OneLine(r.lib.ErrorString(ret))
}

// endingOf maps the return code of a call that nothing can go on without.
func endingOf(ret nvml.Return) gpu.Ending {
	for code, ending := range map[nvml.Return]gpu.Ending{
		nvml.ERROR_LIBRARY_NOT_FOUND:       gpu.EndingLibraryNotFound,
		nvml.ERROR_LIB_RM_VERSION_MISMATCH: gpu.EndingVersionMismatch,
		nvml.ERROR_DRIVER_NOT_LOADED:       gpu.EndingDriverNotLoaded,
		nvml.ERROR_NO_PERMISSION:           gpu.EndingNoPermission,
		nvml.ERROR_GPU_IS_LOST:             gpu.EndingGPULost,
		nvml.ERROR_FUNCTION_NOT_FOUND:      gpu.EndingMissingSymbol,
	} {
		if errors.Is(ret, code) {
			return ending
		}
	}
	return gpu.EndingError
}
