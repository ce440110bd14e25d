package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// ticks is how many of /proc/stat's units are a second, on every architecture that Go has.
const ticks = 100

// cores are core-seconds of the machine that everything runs on: both ends of the link, the
// registry, the hub and what is installed. Where they are used up, they are the bound, and
// not the link.
type cores struct {
	Busy   float64 `json:"busy_core_seconds"`
	IOWait float64 `json:"iowait_core_seconds"`
	Idle   float64 `json:"idle_core_seconds"`
}

func readCores() (cores, error) {
	raw, err := os.ReadFile("/proc/stat")
	if err != nil {
		return cores{}, fmt.Errorf("reading the machine's times: %w", err)
	}
	return parseCores(string(raw))
}

// parseCores reads the first line: user, nice, system, idle, iowait, irq, softirq, steal,
// and guests, which are in user already.
func parseCores(stat string) (cores, error) {
	first, _, _ := strings.Cut(stat, "\n")
	fields := strings.Fields(first)
	if len(fields) < 9 || fields[0] != "cpu" {
		return cores{}, fmt.Errorf("reading the machine's times: the first line is %q", first)
	}
	var c cores
	for i, field := range fields[1:9] {
		n, err := strconv.ParseFloat(field, 64)
		if err != nil {
			return cores{}, fmt.Errorf("reading the machine's times: %w", err)
		}
		switch i {
		case 3:
			c.Idle = n / ticks
		case 4:
			c.IOWait = n / ticks
		default:
			c.Busy += n / ticks
		}
	}
	return c, nil
}

func (c cores) since(before cores) cores {
	return cores{Busy: c.Busy - before.Busy, IOWait: c.IOWait - before.IOWait, Idle: c.Idle - before.Idle}
}
