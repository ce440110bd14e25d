// Package nvmlhelper carries the built cmd/llmbox-nvml inside the binary. A clone
// holds none, so that everything builds and passes its tests without a C compiler;
// what such a build can't do is then said as "helper absent".
//
// It only holds the file; it must not know how it is run.
package nvmlhelper

import (
	"errors"
	"fmt"
	"io/fs"
)

// name is the program within the directory of the architecture.
const name = "llmbox-nvml"

// Helper returns the program for this architecture, nil where the build has none.
// Callers must not change it.
func Helper() []byte {
	data, err := fs.ReadFile(files, arch+"/"+name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		// A file that was compiled in can't fail to be read.
		panic(fmt.Errorf("reading the embedded NVML helper: %w", err))
	}
	return data
}
