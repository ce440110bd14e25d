package node

import (
	"bytes"
	"os"
	"strconv"
	"strings"
)

// zombieOfOurs tells whether an entry of /proc is an ended child of the first process.
func zombieOfOurs(name string) (pid int, zombie bool) {
	pid, err := strconv.Atoi(name)
	if err != nil {
		return 0, false
	}
	raw, err := os.ReadFile("/proc/" + name + "/stat") // #nosec G304 -- a process id
	if err != nil {
		return 0, false
	}
	// The command name may hold spaces and parentheses.
	i := bytes.LastIndexByte(raw, ')')
	if i < 0 {
		return 0, false
	}
	fields := strings.Fields(string(raw[i+1:]))
	return pid, len(fields) > 1 && fields[0] == "Z" && fields[1] == "1"
}
