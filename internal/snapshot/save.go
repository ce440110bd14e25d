package snapshot

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// member is one file of a snapshot as it is stored.
type member struct {
	name string
	data []byte
}

// members are all files of the snapshot in a fixed order: the same snapshot is the
// same bytes.
func (s *Snapshot) members() ([]member, error) {
	manifest, err := yaml.Marshal(s.Manifest)
	if err != nil {
		return nil, fmt.Errorf("writing %s: %w", manifestName, err)
	}
	out := []member{{manifestName, manifest}}
	if s.GPU != nil {
		report, err := indented(s.GPU)
		if err != nil {
			return nil, fmt.Errorf("writing %s: %w", gpuName, err)
		}
		out = append(out, member{gpuName, report})
	}
	entries := make([]Entry, 0, len(s.entries))
	for _, p := range sortedKeys(s.entries) {
		entries = append(entries, s.entries[p])
	}
	list, err := entryLines(entries)
	if err != nil {
		return nil, fmt.Errorf("writing %s: %w", filesName, err)
	}
	out = append(out, member{filesName, list})
	for _, name := range sortedKeys(s.probes) {
		answer, err := indented(s.probes[name])
		if err != nil {
			return nil, fmt.Errorf("writing probe %s: %w", name, err)
		}
		out = append(out, member{probeDir + name + ".json", answer})
	}
	for _, name := range sortedKeys(s.commands) {
		text := s.commands[name]
		out = append(out, member{commandDir + name + ".txt",
			[]byte("exit=" + strconv.Itoa(text.Exit) + "\n" + text.Data)})
	}
	for _, p := range sortedKeys(s.files) {
		out = append(out, member{strings.TrimSuffix(hostDir, "/") + p, []byte(s.files[p])})
	}
	for _, kind := range s.ClusterKinds() {
		out = append(out, member{clusterDir + kind + ".json", s.cluster[kind]})
	}
	for _, log := range s.Logs() {
		out = append(out, member{log.Place(), []byte(s.logs[log])})
	}
	for _, m := range out {
		if err := safeName(m.name); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// indented writes JSON for people; "<" stays what it is.
func indented(v any) ([]byte, error) {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	err := encoder.Encode(v)
	return out.Bytes(), err
}

// entryLines writes a JSON list with one entry a line, so that people can grep it.
func entryLines(entries []Entry) ([]byte, error) {
	var out bytes.Buffer
	out.WriteString("[")
	for i, e := range entries {
		line, err := json.Marshal(e)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			out.WriteString(",")
		}
		out.WriteString("\n")
		out.Write(line)
	}
	out.WriteString("\n]\n")
	return out.Bytes(), nil
}

// Save writes the snapshot as a gzipped tar archive where the name ends in .tar.gz
// or .tgz, else as a directory that must be absent or empty. What is written is
// only for its owner's eyes.
func (s *Snapshot) Save(name string) error {
	var err error
	if strings.HasSuffix(name, ".tar.gz") || strings.HasSuffix(name, ".tgz") {
		err = s.saveArchive(name)
	} else {
		err = s.saveDirectory(name)
	}
	if err != nil {
		return fmt.Errorf("writing snapshot %s: %w", name, err)
	}
	return nil
}

func (s *Snapshot) saveArchive(name string) (err error) {
	file, err := os.CreateTemp(filepath.Dir(name), ".snapshot-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = file.Close()
			_ = os.Remove(file.Name())
		}
	}()
	if err = s.WriteArchive(file); err != nil {
		return err
	}
	if err = file.Close(); err != nil {
		return err
	}
	return os.Rename(file.Name(), name)
}

// WriteArchive writes the gzipped tar archive to w.
func (s *Snapshot) WriteArchive(w io.Writer) error {
	members, err := s.members()
	if err != nil {
		return err
	}
	zipped := gzip.NewWriter(w)
	archive := tar.NewWriter(zipped)
	for _, m := range members {
		header := &tar.Header{
			Typeflag: tar.TypeReg, Name: m.name, Mode: 0o600, Size: int64(len(m.data)),
			ModTime: s.Manifest.Time.UTC().Truncate(time.Second), Format: tar.FormatPAX,
		}
		if header.ModTime.IsZero() {
			header.ModTime = time.Unix(0, 0)
		}
		if err := archive.WriteHeader(header); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		if _, err := archive.Write(m.data); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
	}
	return errors.Join(archive.Close(), zipped.Close())
}

func (s *Snapshot) saveDirectory(name string) (err error) {
	members, err := s.members()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(name, 0o700); err != nil {
		return err
	}
	if old, err := os.ReadDir(name); err != nil {
		return err
	} else if len(old) > 0 {
		return fmt.Errorf("not empty: %w", fs.ErrExist)
	}
	root, err := os.OpenRoot(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	for _, m := range members {
		if err := root.MkdirAll(path.Dir(m.name), 0o700); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		if err := root.WriteFile(m.name, m.data, 0o600); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
	}
	return nil
}
