package images

import (
	"io"
	"log"
)

// quiet is a logger that keeps the registry from writing to the lab's stderr.
func quiet() *log.Logger { return log.New(io.Discard, "", 0) }
