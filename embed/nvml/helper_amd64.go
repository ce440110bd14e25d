package nvmlhelper

import "embed"

const arch = "amd64"

//go:embed all:amd64
var files embed.FS
