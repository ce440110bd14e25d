package nvmlhelper

import "embed"

const arch = "arm64"

//go:embed all:arm64
var files embed.FS
