// Package release looks at a release as `make release` left it: the folder that
// LLMBOX_RELEASE names. It verifies it as a user would, and installs its packages into a
// Debian that has seen nothing of llmbox. It knows nothing of how a release is made.
package release
