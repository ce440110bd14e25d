package cli

import (
	"os/exec"
	"syscall"
)

// setOwnGroup keeps a Ctrl-C at the terminal from reaching the lab: llmbox
// decides when it stops.
func setOwnGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
}
