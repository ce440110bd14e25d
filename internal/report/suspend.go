package report

import (
	"bytes"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// canSuspend says whether somebody is there to wake us up again: a process of
// our session, above us, in another group (the shell). Without one the kernel
// doesn't stop us, and waiting to be continued would be waiting for ever.
func canSuspend() bool {
	session, err := unix.Getsid(0)
	if err != nil {
		return false
	}
	group := unix.Getpgrp()
	for pid := os.Getppid(); pid > 1; {
		if s, err := unix.Getsid(pid); err != nil || s != session {
			return false
		}
		if g, err := unix.Getpgid(pid); err != nil || g != group {
			return err == nil
		}
		if pid = parentOf(pid); pid == 0 {
			return false
		}
	}
	return false
}

// parentOf reads a process's parent: the second field behind the name, which is
// in parentheses and may hold anything.
func parentOf(pid int) int {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	fields := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
	if len(fields) < 2 {
		return 0
	}
	parent, err := strconv.Atoi(string(fields[1]))
	if err != nil {
		return 0
	}
	return parent
}
