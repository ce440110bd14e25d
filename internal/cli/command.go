package cli

import "github.com/spf13/cobra"

// Command is the whole command line, for what writes its manual.
func Command(version string) *cobra.Command {
	return (&app{env: Process(version)}).root()
}
