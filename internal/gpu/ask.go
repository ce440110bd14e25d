package gpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

// The times in which NVML has to answer. Without persistence mode the first
// question loads the driver's state onto each GPU, which takes seconds on a board
// with eight: no answer for a while is worth a word, but no hang.
const (
	// SlowAfter is when the asker is told that there is no answer yet.
	SlowAfter = 5 * time.Second
	// HangAfter is when the child is killed.
	HangAfter = 60 * time.Second
	// SMIAfter is when nvidia-smi is killed, which is only asked instead.
	SMIAfter = 10 * time.Second
	// FilesAfter is when the files of the host are given up: a driver that hangs can
	// hold a lock that reading its files under /proc waits for.
	FilesAfter = 3 * time.Second
)

// EndWithin is the longest that Ask takes with the times above.
const EndWithin = HangAfter + SMIAfter + 2*FilesAfter + 4*killGrace

// MaxAnswer bounds what a child may write, in bytes. A report of eight GPUs with
// all their links is about 40 KiB.
const MaxAnswer = 4 << 20

// GlibcFloor is the oldest C library on which the child starts. It is what shim.c
// of the child leaves in; a test reads it off the built child.
const GlibcFloor = "2.17"

// Options say whom Ask asks and how long it waits. The zero value asks nobody but
// the files of the running machine.
type Options struct {
	// Helper is the program of cmd/llmbox-nvml; empty where this build has none.
	Helper []byte
	// Library is opened instead of the system's libnvidia-ml.so.1.
	Library string
	// SMI is the nvidia-smi to ask where NVML can't speak; empty for none.
	SMI string
	// Root is the directory that stands for "/"; empty for "/" itself.
	Root string
	// The times replace the constants of the same name.
	SlowAfter, HangAfter, SMIAfter, FilesAfter time.Duration
	// OnSlow is called once when there is no answer after SlowAfter. It must not block.
	OnSlow func(waited time.Duration)
	// Environment is handed to the child beside the few variables it always gets.
	Environment []string
}

func (o Options) withDefaults() Options {
	if o.Root == "" {
		o.Root = "/"
	}
	if o.SlowAfter <= 0 {
		o.SlowAfter = SlowAfter
	}
	if o.HangAfter <= 0 {
		o.HangAfter = HangAfter
	}
	if o.SMIAfter <= 0 {
		o.SMIAfter = SMIAfter
	}
	if o.FilesAfter <= 0 {
		o.FilesAfter = FilesAfter
	}
	return o
}

// Ask finds out all it can about the GPUs of the machine and says who told it. It
// always returns a report, and returns in time, even where a process can't be killed
// or a file can't be read to its end.
func Ask(ctx context.Context, o Options) Report {
	o = o.withDefaults()
	pci, pciErr := within(ctx, o.FilesAfter, func() []pciDevice { return readPCI(o.Root) })
	report, ending := askNVML(ctx, o)
	if report.Source != SourceNVML {
		// What NVML knew of itself without a driver stays, such as the library's version.
		known := report
		report = askOthers(ctx, o, ending)
		report.addErrors(known.Errors)
		if report.Library == "" {
			report.Library = known.Library
		}
	}
	if pciErr != nil {
		report.addErrors(map[string]string{"/sys/bus/pci": pciErr.Error()})
	}
	addFromPCI(&report, pci)
	if report.Source == SourceNone && len(pci) > 0 {
		report.Source = SourcePCI
	}
	report.Schema, report.NVML = ReportSchema, ending
	return report
}

func (r *Report) addErrors(more map[string]string) {
	for call, words := range more {
		if r.Errors == nil {
			r.Errors = map[string]string{}
		}
		r.Errors[call] = words
	}
}

// within runs a function that may block in the kernel. Where it does, its goroutine
// is left behind: nothing can be done about a read that does not return.
func within[T any](ctx context.Context, most time.Duration, f func() T) (T, error) {
	done := make(chan T, 1)
	go func() { done <- f() }()
	timer := time.NewTimer(most)
	defer timer.Stop()
	var none T
	select {
	case value := <-done:
		return value, nil
	case <-timer.C:
		return none, fmt.Errorf("no answer within %s", most)
	case <-ctx.Done():
		return none, ctx.Err()
	}
}

// askNVML runs the child. The report is only filled where it could be read.
func askNVML(ctx context.Context, o Options) (Report, NVMLEnding) {
	if len(o.Helper) == 0 {
		return Report{}, NVMLEnding{Ending: EndingHelperAbsent, Detail: "this build carries no NVML helper"}
	}
	env := append([]string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C",
		EnvProgress + "=1",
	}, o.Environment...)
	if o.Library != "" {
		env = append(env, EnvLibrary+"="+o.Library)
	}
	child := run{
		program: o.Helper, name: "llmbox-nvml", environment: env, progress: true,
		slowAfter: o.SlowAfter, hangAfter: o.HangAfter, onSlow: o.OnSlow, limit: MaxAnswer,
	}
	out := child.do(ctx)
	ending := NVMLEnding{ElapsedMS: out.elapsed.Milliseconds(), Slow: out.slow}
	call, device, _ := strings.Cut(out.lastLine, " ")
	where := ""
	if call != "" {
		where = " in " + call
		if device != "" {
			where += " for GPU " + device
		}
	}
	switch {
	case out.startErr != nil:
		ending.Ending = EndingNotStarted
		ending.Detail = OneLine(fmt.Sprintf("%v (the helper needs glibc %s or newer)", out.startErr, GlibcFloor))
	case out.timedOut:
		ending.Ending, ending.LastCall = EndingTimeout, call
		ending.Detail = fmt.Sprintf("no answer within %s%s", o.HangAfter, where)
		if out.abandoned {
			ending.Detail += "; the process can't be killed"
		}
	case out.cancelled:
		ending.Ending, ending.LastCall = EndingError, call
		ending.Detail = "stopped before there was an answer" + where
	case out.signal != "":
		ending.Ending, ending.Signal, ending.LastCall = EndingKilled, out.signal, call
		ending.Detail = "killed by " + out.signal + where
	case out.exit != 0 && call == "":
		// The dynamic loader ends like this too: no line of ours was reached.
		ending.Ending = EndingNotStarted
		ending.Detail = OneLine(fmt.Sprintf("exit %d: %s (the helper needs glibc %s or newer)", out.exit, out.stderr, GlibcFloor))
	case out.exit == loaderExit:
		// A function that is looked up only when it is called, and is not there.
		ending.Ending, ending.LastCall = EndingMissingSymbol, call
		ending.Detail = OneLine(string(out.stderr))
	case out.exit != 0:
		ending.Ending, ending.LastCall = EndingError, call
		ending.Detail = OneLine(fmt.Sprintf("exit %d: %s", out.exit, out.stderr))
	case out.truncated:
		ending.Ending = EndingBadAnswer
		ending.Detail = fmt.Sprintf("more than %d bytes of answer", MaxAnswer)
	default:
		report, err := Decode(out.stdout)
		if err != nil {
			ending.Ending, ending.Detail = EndingBadAnswer, OneLine(err.Error())
			return Report{}, ending
		}
		said := report.NVML
		said.ElapsedMS, said.Slow = ending.ElapsedMS, ending.Slow
		return report, said
	}
	return Report{}, ending
}

// loaderExit is the exit status of glibc's dynamic loader when a symbol is missing.
const loaderExit = 127

// askOthers asks nvidia-smi, then the driver's files.
func askOthers(ctx context.Context, o Options, ending NVMLEnding) Report {
	files, err := within(ctx, o.FilesAfter, func() driverFacts { return readDriver(o.Root) })
	report := files.report
	if err != nil {
		report.addErrors(map[string]string{"/proc/driver/nvidia": err.Error()})
	}
	// nvidia-smi opens the same library: where that hung, it would hang as well.
	if o.SMI != "" && ending.Ending != EndingTimeout {
		told, err := askSMI(ctx, o)
		if err == nil {
			told.Library = report.Library
			return told
		}
		if !errors.Is(err, errNoSMI) {
			report.addErrors(map[string]string{"nvidia-smi": OneLine(err.Error())})
		}
	}
	report.Source = SourceNone
	if files.loaded {
		report.Source = SourceProc
	}
	return report
}

// SMIPath is where nvidia-smi is on this machine, empty for nowhere.
func SMIPath() string {
	for _, path := range []string{
		"/usr/bin/nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi", "/run/current-system/sw/bin/nvidia-smi", "/opt/bin/nvidia-smi",
	} {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path
		}
	}
	return ""
}
