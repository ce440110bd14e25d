// Command llmbox turns a bare NVIDIA GPU machine, or a cluster that is there
// already, into a box that serves an LLM.
package main

import (
	"os"

	"github.com/llmbox-dev/llmbox/internal/cli"
)

// version is set by the build; without it the binary says that it is a
// development build.
var version = "0.0.0-dev"

func main() {
	os.Exit(cli.Main(os.Args[1:], cli.Process(version)))
}
