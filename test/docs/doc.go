// Package docs reads what the project tells people to type, and holds it against what is
// there: commands and flags of llmbox, targets of make, pages that are linked. What neither
// needs a machine nor changes one is run. It knows nothing of what a command does.
package docs
