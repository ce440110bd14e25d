//go:build !amd64 && !arm64

package nvmlhelper

import "embed"

const arch = "none"

// NVIDIA has no driver for this architecture.
var files embed.FS
