// Command crds writes the CustomResourceDefinitions that llmbox embeds, from
// the Go API types of the projects that own them.
//
// One list (groups.go) says which types, at which version, with which
// generator options; fixups.go says what each project changes afterwards; every
// group has a module of its own under modules/, so that the types compile
// against the dependencies their project chose and two projects cannot pull
// each other to other versions. Descriptions are left out: they are most of a
// CRD's bytes and none of its meaning to the API server.
//
// The command knows nothing of charts, clusters or installing: it turns source
// into files, and running it twice gives the same bytes.
package main
