// Package sbom writes software bills of materials in CycloneDX' JSON: one of a binary,
// one of the container images that it brings. It is told everything: it reads no file and
// takes no time, so the same release has the same bytes.
package sbom

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	cyclonedx "github.com/CycloneDX/cyclonedx-go"

	"github.com/llmbox-dev/llmbox/tools/release/internal/inventory"
)

// Part is a module together with its licence.
type Part struct {
	inventory.Module
	Licence string
	// Child says that it is in the embedded NVML helper, Data that only files made of it
	// are in the binary.
	Child, Data bool
}

// Program is what the bill of a binary says.
type Program struct {
	Binary inventory.Binary
	// Child is the embedded NVML helper; its name is empty where there is none.
	Child   inventory.Binary
	Parts   []Part
	Version string
	Time    time.Time
}

// WriteProgram writes the bill of one binary.
func WriteProgram(w io.Writer, p Program) error {
	root := cyclonedx.Component{
		BOMRef: "llmbox", Type: cyclonedx.ComponentTypeApplication, Name: p.Binary.Name, Version: p.Version,
		PackageURL: purl(p.Binary.Main.Path, p.Version),
		Hashes:     sha(p.Binary.SHA256),
		Licenses:   licences("Apache-2.0"),
		Properties: properties("go:version", p.Binary.Go, "go:package", p.Binary.Package,
			"go:os", p.Binary.Settings["GOOS"], "go:arch", p.Binary.Settings["GOARCH"],
			"vcs:revision", p.Binary.Settings["vcs.revision"], "vcs:time", p.Binary.Settings["vcs.time"], "vcs:modified", p.Binary.Settings["vcs.modified"]),
	}
	var components []cyclonedx.Component
	var needs, childNeeds []string
	if p.Child.Name != "" {
		components = append(components, cyclonedx.Component{
			BOMRef: "llmbox-nvml", Type: cyclonedx.ComponentTypeApplication, Name: p.Child.Name, Version: p.Version,
			Description: "the program that asks NVML; embedded, linked dynamically with the machine's C library",
			Hashes:      sha(p.Child.SHA256), Licenses: licences("Apache-2.0"),
			Properties: properties("go:version", p.Child.Go),
		})
		needs = append(needs, "llmbox-nvml")
	}
	for _, part := range p.Parts {
		one := cyclonedx.Component{
			Type: cyclonedx.ComponentTypeLibrary, Name: part.Path, Version: part.Version,
			PackageURL: purl(part.Path, part.Version), Licenses: licences(part.Licence),
			Properties: properties("go:sum", part.Sum),
		}
		if part.Path == "std" {
			one.Version = strings.TrimPrefix(p.Binary.Go, "go")
			one.PackageURL = purl("stdlib", one.Version)
		}
		if part.Data {
			one.Type = cyclonedx.ComponentTypeData
			one.Description = "CustomResourceDefinitions are generated from its types; no code of it is linked"
		}
		one.BOMRef = cmp.Or(one.PackageURL, one.Name)
		if part.Data {
			one.BOMRef += "#crds"
		}
		components = append(components, one)
		if part.Child {
			childNeeds = append(childNeeds, one.BOMRef)
		} else {
			needs = append(needs, one.BOMRef)
		}
	}
	graph := []cyclonedx.Dependency{{Ref: "llmbox", Dependencies: &needs}}
	if len(childNeeds) > 0 {
		graph = append(graph, cyclonedx.Dependency{Ref: "llmbox-nvml", Dependencies: &childNeeds})
	}
	return write(w, root, components, graph, p.Time)
}

// Image is one container image as `llmbox images --output json` lists it.
type Image struct {
	Reference  string   `json:"reference"`
	Digest     string   `json:"digest"`
	SizeBytes  int64    `json:"size_bytes"`
	Components []string `json:"components"`
	Source     string   `json:"source"`
}

// WriteImages writes the bill of the images. What is in them is said by their own makers.
func WriteImages(w io.Writer, version string, images []Image, at time.Time) error {
	root := cyclonedx.Component{
		BOMRef: "llmbox-images", Type: cyclonedx.ComponentTypeApplication, Name: "llmbox-images", Version: version,
		Description: "the container images that a box runs; none is part of the binary",
	}
	images = slices.Clone(images)
	slices.SortFunc(images, func(a, b Image) int { return cmp.Compare(a.Reference, b.Reference) })
	components := make([]cyclonedx.Component, 0, len(images))
	needs := make([]string, 0, len(images))
	for _, image := range images {
		repository, tag := split(image.Reference)
		one := cyclonedx.Component{
			BOMRef: image.Reference, Type: cyclonedx.ComponentTypeContainer, Name: repository, Version: cmp.Or(tag, image.Digest),
			Properties: properties("llmbox:components", strings.Join(image.Components, " "), "llmbox:source", image.Source, "llmbox:size_bytes", size(image.SizeBytes)),
		}
		// A purl of an image names its digest; without one there is nothing to name.
		if image.Digest != "" {
			one.PackageURL = oci(repository, tag, image.Digest)
			one.Hashes = sha(strings.TrimPrefix(image.Digest, "sha256:"))
		}
		components = append(components, one)
		needs = append(needs, one.BOMRef)
	}
	return write(w, root, components, []cyclonedx.Dependency{{Ref: root.BOMRef, Dependencies: &needs}}, at)
}

func write(w io.Writer, root cyclonedx.Component, components []cyclonedx.Component, graph []cyclonedx.Dependency, at time.Time) error {
	bom := cyclonedx.NewBOM()
	bom.Metadata = &cyclonedx.Metadata{Timestamp: at.UTC().Format(time.RFC3339), Component: &root}
	bom.Components = &components
	bom.Dependencies = &graph
	serial, err := serialOf(bom)
	if err != nil {
		return err
	}
	bom.SerialNumber = serial
	return encode(w, bom)
}

func encode(w io.Writer, bom *cyclonedx.BOM) error {
	encoder := cyclonedx.NewBOMEncoder(w, cyclonedx.BOMFileFormatJSON)
	encoder.SetPretty(true)
	encoder.SetEscapeHTML(false)
	// 1.6 is what the scanners of the day read.
	return encoder.EncodeVersion(bom, cyclonedx.SpecVersion1_6)
}

// serialOf is a UUID (version 8: made of a hash) of what the bill says.
func serialOf(bom *cyclonedx.BOM) (string, error) {
	hash := sha256.New()
	if err := encode(hash, bom); err != nil {
		return "", fmt.Errorf("encoding the bill: %w", err)
	}
	id := hash.Sum(nil)[:16]
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:]), nil
}

func purl(path, version string) string {
	words := strings.Split(path, "/")
	for i, word := range words {
		words[i] = url.PathEscape(word)
	}
	out := "pkg:golang/" + strings.Join(words, "/")
	if version != "" {
		out += "@" + strings.ReplaceAll(url.PathEscape(version), "+", "%2B")
	}
	return out
}

func oci(repository, tag, digest string) string {
	name := repository[strings.LastIndex(repository, "/")+1:]
	query := url.Values{"repository_url": {repository}}
	if tag != "" {
		query.Set("tag", tag)
	}
	return "pkg:oci/" + url.PathEscape(strings.ToLower(name)) + "@" + url.QueryEscape(digest) + "?" + query.Encode()
}

// split cuts a reference into repository and tag; a port is no tag.
func split(reference string) (repository, tag string) {
	reference, _, _ = strings.Cut(reference, "@")
	if at := strings.LastIndex(reference, ":"); at > strings.LastIndex(reference, "/") {
		return reference[:at], reference[at+1:]
	}
	return reference, ""
}

func sha(sum string) *[]cyclonedx.Hash {
	if _, err := hex.DecodeString(sum); err != nil || len(sum) != 64 {
		return nil
	}
	return &[]cyclonedx.Hash{{Algorithm: cyclonedx.HashAlgoSHA256, Value: sum}}
}

func licences(expression string) *cyclonedx.Licenses {
	switch {
	case expression == "":
		return nil
	case strings.Contains(expression, " "):
		return &cyclonedx.Licenses{{Expression: expression}}
	}
	return &cyclonedx.Licenses{{License: &cyclonedx.License{ID: expression}}}
}

func properties(pairs ...string) *[]cyclonedx.Property {
	var out []cyclonedx.Property
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			out = append(out, cyclonedx.Property{Name: pairs[i], Value: pairs[i+1]})
		}
	}
	if len(out) == 0 {
		return nil
	}
	return &out
}

func size(bytes int64) string {
	if bytes == 0 {
		return ""
	}
	return strconv.FormatInt(bytes, 10)
}
