// Package bundle is the one file with everything that a box is made of, for a machine
// without a network: its form, how it is put together on a connected machine, and how it
// is read as a stream without trusting it. It must not know charts, plans, k3s'
// configuration, or how anything is shown.
//
// # Form
//
// A bundle is a tar archive in zstd. Its first file, manifest.json, lists all others in
// their order with size and SHA-256; nothing else may follow. The SHA-256 of the manifest
// stands for the whole bundle and is what gets signed. The files come in the order in
// which an install has a use for them: llmbox, k3s, the images that the first token waits
// for, the model server's image, the weights, the rest. Images are stored by their blobs,
// each once.
//
// The zstd stream is a row of independent frames. Each is compressed or stored by what a
// look at it promises, so that layers and weights that are compressed already cost no
// second compression; any zstd reads either.
//
// # Trust
//
// A reader takes nothing but what the manifest names next: regular files, in order, of the
// declared size, with the declared SHA-256. Names in the archive are compared and never
// used as paths; where a file goes follows from its kind and digest. What is decompressed
// is bounded by the declared sizes.
package bundle
