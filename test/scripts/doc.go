// Package scripts runs the scripts of the project, as they are, under each shell that
// `sh` may be, against a server of releases on this machine. Stand-ins for sudo and for
// llmbox say what they were started with. It knows nothing of what llmbox does then.
package scripts
