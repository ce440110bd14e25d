package gpu

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// Limits of a report. NVIDIA's largest single machine has 16 GPUs, one GPU at most 7
// MIG instances and NVML at most 36 NVLinks.
const (
	maxDevices   = 64
	maxText      = 1024
	maxProcesses = 4096
	maxList      = 256
	maxErrors    = 512
)

// Decode reads a report: one JSON document of this schema, everything within limits,
// so that what a broken library wrote can't reach a terminal or a judge. Fields that
// are not known are left out: a newer llmbox may have added them. Whole numbers keep their range by their types.
func Decode(data []byte) (Report, error) {
	if len(data) > MaxAnswer {
		return Report{}, fmt.Errorf("a report of %d bytes, at most %d are read", len(data), MaxAnswer)
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	var r Report
	if err := decoder.Decode(&r); err != nil {
		return Report{}, fmt.Errorf("reading the report: %w", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return Report{}, errors.New("reading the report: something follows it")
	}
	if err := r.check(); err != nil {
		return Report{}, fmt.Errorf("reading the report: %w", err)
	}
	if r.Devices == nil {
		r.Devices = []Device{}
	}
	return r, nil
}

func (r Report) check() error {
	if r.Schema != ReportSchema {
		return fmt.Errorf("schema %d, this llmbox reads %d", r.Schema, ReportSchema)
	}
	switch r.Source {
	case SourceNVML, SourceSMI, SourceProc, SourcePCI, SourceNone:
	default:
		return fmt.Errorf("unknown source %.40q", string(r.Source))
	}
	switch r.NVML.Ending {
	case EndingOK, EndingLibraryNotFound, EndingVersionMismatch, EndingDriverNotLoaded, EndingNoPermission,
		EndingGPULost, EndingTimeout, EndingKilled, EndingNotStarted, EndingHelperAbsent, EndingMissingSymbol,
		EndingBadAnswer, EndingError:
	default:
		return fmt.Errorf("unknown ending %.40q", string(r.NVML.Ending))
	}
	if len(r.Devices) > maxDevices {
		return fmt.Errorf("%d devices, at most %d are read", len(r.Devices), maxDevices)
	}
	if len(r.Links) > maxDevices*(maxDevices-1)/2 {
		return fmt.Errorf("%d links, more than there are pairs", len(r.Links))
	}
	if err := texts(r.NVML.Detail, r.NVML.Signal, r.NVML.LastCall, r.Driver, r.Library, r.CUDA); err != nil {
		return err
	}
	if err := errorTexts(r.Errors); err != nil {
		return err
	}
	for i, d := range r.Devices {
		// The place of a device is its index: links point to it.
		if d.Index != i {
			return fmt.Errorf("device %d says that it is %d", i, d.Index)
		}
		if err := d.check(); err != nil {
			return fmt.Errorf("device %d: %w", i, err)
		}
	}
	seen := map[[2]int]bool{}
	for _, l := range r.Links {
		pair := [2]int{l.A, l.B}
		if l.A < 0 || l.B <= l.A || l.B >= len(r.Devices) || seen[pair] {
			return fmt.Errorf("link %d to %d: not a new pair of devices", l.A, l.B)
		}
		seen[pair] = true
		if err := texts(l.Path, l.P2P); err != nil {
			return err
		}
	}
	return nil
}

func (d Device) check() error {
	if len(d.NVLinks) > maxList || len(d.Throttle) > maxList || len(d.Processes) > maxProcesses {
		return errors.New("a list is too long")
	}
	if err := texts(d.Error, d.Name, d.UUID, d.Brand, d.Serial, d.VBIOS, d.GSP, d.PCIBus, d.PCIDevice,
		d.KernelDriver, d.Virtualization, d.License, d.ComputeMode); err != nil {
		return err
	}
	if err := texts(d.Throttle...); err != nil {
		return err
	}
	if d.MIG != nil {
		if len(d.MIG.Instances) > maxList {
			return errors.New("a list is too long")
		}
		for _, m := range d.MIG.Instances {
			if err := texts(m.UUID, m.Name); err != nil {
				return err
			}
		}
	}
	if d.Fabric != nil {
		if err := texts(d.Fabric.State, d.Fabric.Status); err != nil {
			return err
		}
	}
	for _, p := range d.Processes {
		if err := texts(p.Name, p.Kind); err != nil {
			return err
		}
	}
	return errorTexts(d.Errors)
}

func errorTexts(errs map[string]string) error {
	if len(errs) > maxErrors {
		return errors.New("too many errors")
	}
	for call, words := range errs {
		if err := texts(call, words); err != nil {
			return err
		}
	}
	return nil
}

// texts refuses what is too long or would do something to a terminal.
func texts(all ...string) error {
	for _, text := range all {
		if len(text) > maxText {
			return fmt.Errorf("a text of %d bytes, at most %d are read", len(text), maxText)
		}
		if !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r >= 0x7f && r < 0xa0 }) {
			return fmt.Errorf("a text with control characters: %.40q", text)
		}
	}
	return nil
}
