//go:build cgo && linux

package main

// void llmbox_die_by_signal(void);
import "C"

import "syscall"

// dieBySignal takes the fatal signals back from Go's runtime, which would turn a
// crash of the library into a trace of goroutines and an exit status: the parent
// names the signal. A core file would be of no use to anybody.
func dieBySignal() {
	C.llmbox_die_by_signal()
	_ = syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{})
}
