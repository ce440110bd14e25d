package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// Bounds on what is read. A real configuration has some hundred values; the
// bounds keep a wrong file, or a few aliases of aliases, from eating the machine.
const (
	maxBytes = 1 << 20
	maxNodes = 20_000
	maxDepth = 64
	// Nobody reads further than this before mending the first ones.
	maxProblems = 50
)

// ReadFile reads a configuration file. An absent file is an error that wraps
// fs.ErrNotExist.
func ReadFile(path string) (Layer, error) {
	f, err := os.Open(path) //nolint:gosec // the path is the user's own choice
	if err != nil {
		return Layer{}, fmt.Errorf("reading config: %w", err)
	}
	layer, err := Read(path, f)
	return layer, errors.Join(err, f.Close())
}

// Read reads a configuration from a stream; name stands in errors.
func Read(name string, r io.Reader) (Layer, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxBytes+1))
	if err != nil {
		return Layer{}, fmt.Errorf("reading config %s: %w", name, err)
	}
	return Parse(name, data)
}

// Parse reads a configuration strictly: what it does not know is an error that
// names the line and the nearest key. All problems are reported together.
func Parse(name string, data []byte) (Layer, error) {
	return parse(name, data, FromFile)
}

func parse(name string, data []byte, kind OriginKind) (Layer, error) {
	r := &reader{name: name, kind: kind, root: boxSchema()}
	text, err := r.decode(data)
	if err != nil {
		return Layer{}, err
	}
	doc, err := r.document(text)
	if err != nil {
		return Layer{}, err
	}
	r.secrets(doc)
	r.section(doc, r.root, nil, 0)
	if kind == FromFile {
		r.header(doc)
	}
	if err := r.problems.join(); err != nil {
		return Layer{}, err
	}
	return r.layer, nil
}

type reader struct {
	name     string
	kind     OriginKind
	root     *schema
	layer    Layer
	nodes    int
	tooMany  bool
	problems problems
}

func (r *reader) place(line int) string { return r.name + ":" + strconv.Itoa(line) }

func (r *reader) fail(n *yaml.Node, path []string, problem, fix string) {
	r.problems.add(&Error{Place: r.place(n.Line), Path: formatPath(path), Problem: problem, Fix: fix})
}

const startFix = "start it with the two lines `apiVersion: " + APIVersion + "` and `kind: " + Kind + "`"

// decode brings the bytes into plain UTF-8 with plain line ends, or names what
// kind of file it is instead.
func (r *reader) decode(data []byte) (string, error) {
	refuse := func(place, problem, fix string) (string, error) {
		return "", &Error{Place: place, Problem: problem, Fix: fix}
	}
	if len(data) > maxBytes {
		return refuse(r.name, "is larger than 1 MiB", "a configuration is a few hundred lines; check that this is the right file")
	}
	for _, mark := range [][]byte{{0xff, 0xfe}, {0xfe, 0xff}} {
		if bytes.HasPrefix(data, mark) {
			return refuse(r.name, "is UTF-16", "save it as UTF-8 (in the editor: encoding; or `iconv -f UTF-16 -t UTF-8`)")
		}
	}
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
	if at := bytes.IndexByte(data, 0); at >= 0 {
		problem, fix := "holds a NUL byte", "check that this is a text file"
		if at <= 1 {
			problem, fix = "holds NUL bytes, as UTF-16 without a byte order mark does", "save it as UTF-8"
		}
		return refuse(r.place(1+bytes.Count(data[:at], []byte("\n"))), problem, fix)
	}
	text := strings.ReplaceAll(string(data), "\r\n", "\n")
	for i, line := range strings.Split(text, "\n") {
		if !utf8.ValidString(line) {
			return refuse(r.place(i+1), "is not UTF-8", "save the file as UTF-8")
		}
		for _, c := range line {
			if c != '\t' && unicode.IsControl(c) {
				return refuse(r.place(i+1), fmt.Sprintf("holds a control character (%U)", c), "remove it")
			}
		}
	}
	return text, nil
}

var yamlLine = pattern(`^yaml: line (\d+): `)

// document parses text into its one document, a mapping.
func (r *reader) document(text string) (*yaml.Node, error) {
	decoder := yaml.NewDecoder(strings.NewReader(text))
	var doc, second yaml.Node
	err := decoder.Decode(&doc)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, r.syntax(text, err)
	}
	empty := err != nil || len(doc.Content) == 1 && isNull(doc.Content[0])
	switch err := decoder.Decode(&second); {
	case errors.Is(err, io.EOF) && empty:
		return nil, &Error{Place: r.name, Problem: "holds no configuration", Fix: startFix + ", or leave the file out to take the defaults"}
	case errors.Is(err, io.EOF):
	case err != nil:
		return nil, r.syntax(text, err)
	default:
		line := second.Line
		if len(second.Content) == 1 && second.Content[0].Line > 0 {
			line = second.Content[0].Line
		}
		return nil, &Error{Place: r.place(line), Problem: "a second document starts here (after `---`)", Fix: "keep one document in the file"}
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		problem := "must be a mapping of keys to values, not " + kindName(root)
		if root.Kind == yaml.ScalarNode && strings.ContainsRune(root.Value, '\u00a0') {
			problem += " (it holds a non-breaking space, which does not count as a space)"
		}
		return nil, &Error{Place: r.place(root.Line), Problem: problem, Fix: startFix}
	}
	return root, nil
}

// syntax turns the parser's complaint into one a person can act on. Tabs and
// unusual spaces look like indentation and are the common cause.
func (r *reader) syntax(text string, err error) error {
	message := err.Error()
	at := 0
	if m := yamlLine().FindStringSubmatch(message); m != nil {
		at, _ = strconv.Atoi(m[1])
		message = strings.TrimPrefix(message, m[0])
	}
	message = strings.TrimPrefix(message, "yaml: ")
	lines := strings.Split(text, "\n")
	if line := firstBadLine(lines, len(text)); line > 0 {
		at = line
	}
	for number := max(1, at-1); number <= min(len(lines), at+1); number++ {
		line := lines[number-1]
		if strings.TrimSpace(line) == "" {
			continue
		}
		indent := line[:len(line)-len(strings.TrimLeftFunc(line, oddSpace))]
		if strings.ContainsRune(indent, '\t') {
			return &Error{Place: r.place(number), Problem: fmt.Sprintf("tab at line %d: YAML is indented by spaces only", number), Fix: "replace the tab by spaces"}
		}
		for _, c := range indent {
			if c != ' ' {
				return &Error{Place: r.place(number), Problem: fmt.Sprintf("%s in the indentation of line %d", runeName(c), number), Fix: "replace it by plain spaces"}
			}
		}
	}
	place := r.name
	if at > 0 {
		place = r.place(at)
	}
	return &Error{Place: place, Problem: "is not valid YAML here: " + message, Fix: "check indentation, colons, brackets and quotes on this line and the one before"}
}

// firstBadLine is the line behind the longest part of the text that can be read,
// or 0 where looking for it would cost too much. The parser itself names the line
// on which the surrounding mapping starts, which can be far above.
func firstBadLine(lines []string, size int) int {
	const most = 4 << 20 // bytes parsed again in all
	if len(lines)*size > most {
		return 0
	}
	for good := len(lines) - 1; good >= 0; good-- {
		decoder := yaml.NewDecoder(strings.NewReader(strings.Join(lines[:good], "\n")))
		var err error
		for err == nil {
			var doc yaml.Node
			err = decoder.Decode(&doc)
		}
		if !errors.Is(err, io.EOF) {
			continue
		}
		bad := good + 1
		for bad < len(lines) && (strings.TrimSpace(lines[bad-1]) == "" || strings.HasPrefix(strings.TrimSpace(lines[bad-1]), "#")) {
			bad++
		}
		return bad
	}
	return 0
}

// oddSpace is any character that looks like space, whether YAML agrees or not.
func oddSpace(c rune) bool { return unicode.IsSpace(c) || c == '\u200b' || c == '\ufeff' }

func runeName(c rune) string {
	switch c {
	case '\u00a0':
		return "non-breaking space (U+00A0)"
	case '\u200b':
		return "zero-width space (U+200B)"
	case '\ufeff':
		return "byte order mark (U+FEFF)"
	}
	return fmt.Sprintf("unusual space (%U)", c)
}

// secrets looks for tokens everywhere, under unknown keys too.
func (r *reader) secrets(n *yaml.Node) {
	if n.Kind == yaml.ScalarNode && looksLikeSecret(n.Value) {
		e := secretError(r.place(n.Line), "")
		r.problems.add(e)
	}
	for i, c := range n.Content {
		if len(r.problems) >= maxProblems {
			return
		}
		if n.Kind == yaml.MappingNode && i%2 == 1 && n.Content[i-1].Value == "components" {
			// Chart values have their own way out.
			r.componentSecrets(c)
			continue
		}
		r.secrets(c)
	}
}

func (r *reader) componentSecrets(n *yaml.Node) {
	if n.Kind == yaml.ScalarNode && looksLikeSecret(n.Value) {
		r.problems.add(secretError(r.place(n.Line), "components"))
	}
	for _, c := range n.Content {
		if len(r.problems) >= maxProblems {
			return
		}
		r.componentSecrets(c)
	}
}

// header demands the two lines that say what the file is.
func (r *reader) header(doc *yaml.Node) {
	for _, want := range []struct{ key, value string }{{"apiVersion", APIVersion}, {"kind", Kind}} {
		value, ok := r.layer.entries[want.key]
		switch {
		case ok && value.value == want.value:
		case ok:
			text, _ := value.value.(string)
			r.problems.add(&Error{Place: value.origin.Text, Path: want.key,
				Problem: fmt.Sprintf("%s is not known to this llmbox", quoteShort(text)), Fix: fmt.Sprintf("write %s: %s", want.key, want.value)})
		case !hasKey(doc, want.key):
			r.problems.add(&Error{Place: r.place(doc.Line), Path: want.key, Problem: "is missing", Fix: fmt.Sprintf("add the line `%s: %s`", want.key, want.value)})
		}
	}
}

func hasKey(mapping *yaml.Node, key string) bool {
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == key {
			return true
		}
	}
	return false
}

// follow counts and resolves aliases. It returns nil when a bound is reached.
func (r *reader) follow(n *yaml.Node, path []string, depth int) *yaml.Node {
	r.nodes++
	if r.nodes > maxNodes || depth > maxDepth {
		if !r.tooMany {
			r.tooMany = true
			problem := fmt.Sprintf("has more than %d values, aliases counted each time", maxNodes)
			if depth > maxDepth {
				problem = fmt.Sprintf("is nested more than %d deep", maxDepth)
			}
			r.fail(n, path[:min(len(path), 3)], problem, "write it out plainly, without aliases of aliases")
		}
		return nil
	}
	if n.Kind == yaml.AliasNode {
		return r.follow(n.Alias, path, depth+1)
	}
	return n
}

// pairs calls visit for each key of a mapping, after refusing doubled keys,
// merge keys and keys that are no strings.
func (r *reader) pairs(n *yaml.Node, path []string, visit func(key *yaml.Node, value *yaml.Node)) {
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content) && !r.tooMany && len(r.problems) < maxProblems; i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if key.Kind == yaml.AliasNode {
			key = key.Alias
		}
		switch {
		case key.Kind != yaml.ScalarNode:
			r.fail(key, path, "has a key that is not plain text", "write the key as a word")
			continue
		case key.ShortTag() == "!!merge":
			r.fail(key, path, "uses a merge key (`<<`), which is not supported", "write the keys out")
			continue
		case key.ShortTag() != "!!str":
			r.fail(key, path, fmt.Sprintf("has the key %s, which YAML does not read as text", quoteShort(key.Value)), "put the key into quotes")
			continue
		}
		if first := strings.IndexFunc(key.Value, func(c rune) bool { return c != ' ' && oddSpace(c) }); first >= 0 {
			c, _ := utf8.DecodeRuneInString(key.Value[first:])
			r.fail(key, path, fmt.Sprintf("%s in front of or in the key %s", runeName(c), quoteShort(strings.TrimFunc(key.Value, oddSpace))), "replace it by plain spaces")
			continue
		}
		if line, twice := seen[key.Value]; twice {
			r.fail(key, append(slices.Clone(path), key.Value), fmt.Sprintf("stands here again; it is already set on line %d", line), "keep one of the two")
			continue
		}
		seen[key.Value] = key.Line
		visit(key, value)
	}
}

// section reads a mapping that has a schema.
func (r *reader) section(n *yaml.Node, s *schema, path []string, depth int) {
	if n = r.follow(n, path, depth); n == nil {
		return
	}
	if isNull(n) {
		return // a section whose keys are all commented out
	}
	if n.Kind != yaml.MappingNode {
		fix := "write each entry below it as NAME: {key: value}"
		if s.shape == shapeSection {
			fix = fmt.Sprintf("write its keys below it, indented: %s", strings.Join(s.keys(), ", "))
		}
		r.wrongType(n, path, s, fix)
		return
	}
	r.pairs(n, path, func(key, value *yaml.Node) {
		here := append(slices.Clone(path), key.Value)
		sub := s.child(key.Value)
		if sub == nil {
			e := unknownKey(r.root, s, path, key.Value, r.place(key.Line))
			if r.kind == FromRecord {
				e.Fix = "it was recorded by another version of llmbox: run that version or a newer one"
			}
			r.problems.add(e)
			return
		}
		if s.shape == shapeNamed && key.Value == "" {
			r.fail(key, path, "has an empty name", "give it a name")
			return
		}
		if sub.leaf() {
			r.value(value, sub, here, depth+1)
		} else {
			r.section(value, sub, here, depth+1)
		}
	})
}

// value reads a leaf.
func (r *reader) value(n *yaml.Node, s *schema, path []string, depth int) {
	if n = r.follow(n, path, depth); n == nil {
		return
	}
	var value any
	switch s.shape {
	case shapeFree:
		if isNull(n) {
			return
		}
		if n.Kind != yaml.MappingNode {
			r.wrongType(n, path, s, "write the values below it as key: value")
			return
		}
		free := r.free(n, path, depth)
		if r.tooMany {
			return
		}
		value = free
	case shapeStrings:
		if n.Kind != yaml.SequenceNode {
			r.wrongType(n, path, s, `write it as ["a", "b"]`)
			return
		}
		list := make([]string, 0, len(n.Content))
		for i, item := range n.Content {
			at := append(slices.Clone(path), index(i))
			if item = r.follow(item, path, depth+1); item == nil {
				return
			}
			text, ok := r.text(item, &schema{shape: shapeString}, at)
			if !ok {
				return
			}
			list = append(list, text)
		}
		value = list
	case shapeString:
		text, ok := r.text(n, s, path)
		if !ok {
			return
		}
		value = text
	case shapeBool:
		if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!bool" {
			r.wrongType(n, path, s, "write true or false, without quotes")
			return
		}
		var b bool
		if err := n.Decode(&b); err != nil {
			r.wrongType(n, path, s, "write true or false, without quotes")
			return
		}
		value = b
	case shapeInt:
		if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!int" {
			r.wrongType(n, path, s, "write the number without quotes, point or unit")
			return
		}
		number, err := strconv.Atoi(n.Value)
		if err != nil {
			r.fail(n, path, fmt.Sprintf("%s is out of range or not decimal", quoteShort(n.Value)), "write a plain decimal number")
			return
		}
		value = number
	}
	r.layer.put(entry{path, value, Origin{r.kind, r.originText(n.Line)}})
}

func (r *reader) originText(line int) string {
	if r.kind == FromRecord {
		return "recorded by the last run"
	}
	return r.place(line)
}

// text reads a string scalar. A number is refused, not converted: 1.10 would
// otherwise silently differ from "1.10" elsewhere.
func (r *reader) text(n *yaml.Node, s *schema, path []string) (string, bool) {
	if n.Kind == yaml.ScalarNode {
		switch n.ShortTag() {
		case "!!str", "!!timestamp":
			if looksLikeSecret(n.Value) {
				return "", false // reported by secrets
			}
			if e := checkString(n.Value, formatPath(path), r.place(n.Line)); e != nil {
				r.problems.add(e)
				return "", false
			}
			return n.Value, true
		case "!!int", "!!float", "!!bool":
			r.wrongType(n, path, s, "put it into quotes: "+strconv.Quote(n.Value))
			return "", false
		}
	}
	r.wrongType(n, path, s, "write plain text there")
	return "", false
}

// index is the path of a list's entry.
func index(i int) string { return "[" + strconv.Itoa(i) + "]" }

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

func kindName(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		switch n.ShortTag() {
		case "!!str", "!!timestamp":
			return "a string"
		case "!!int":
			return "a whole number"
		case "!!float":
			return "the number"
		case "!!bool":
			return "a boolean"
		case "!!null":
			return "nothing"
		}
		return "a value with the tag " + quoteShort(n.Tag)
	}
	return "a value"
}

func (r *reader) wrongType(n *yaml.Node, path []string, s *schema, fix string) {
	if isNull(n) {
		r.fail(n, path, "has no value", "give it one, or remove the key")
		return
	}
	got := kindName(n)
	if n.Kind == yaml.ScalarNode {
		got += " " + quoteShort(n.Value)
		if strings.ContainsRune(n.Value, '\u00a0') {
			fix = "replace the non-breaking space (U+00A0) in it by a plain space"
		}
	}
	r.fail(n, path, fmt.Sprintf("must be %s, not %s", s.shape, got), fix)
}

func unknownKey(root, at *schema, path []string, key, place string) *Error {
	e := &Error{Place: place, Path: formatPath(append(slices.Clone(path), key)), Problem: "unknown key"}
	if at.shape != shapeSection {
		e.Problem, e.Fix = "has no keys that can be set one by one", "remove what stands below it"
		if slices.Contains(path, "values") {
			e.Fix = "write chart values into a file, below components.NAME.values, and name it with --config FILE"
		}
		return e
	}
	switch near := nearest(key, at.keys()); {
	case near != "" && strings.EqualFold(near, key):
		e.Fix = fmt.Sprintf("did you mean %q? Upper and lower case count", near)
	case near != "":
		e.Fix = fmt.Sprintf("did you mean %q?", near)
	default:
		if other := root.elsewhere(key); other != "" {
			e.Fix = fmt.Sprintf("did you mean %q?", other)
		} else {
			e.Fix = "known here: " + strings.Join(at.keys(), ", ")
		}
	}
	return e
}

// free reads a mapping without a schema, such as chart values, into what JSON
// can hold.
func (r *reader) free(n *yaml.Node, path []string, depth int) map[string]any {
	out := map[string]any{}
	r.pairs(n, path, func(key, value *yaml.Node) {
		out[key.Value] = r.freeValue(value, append(slices.Clone(path), key.Value), depth+1)
	})
	return out
}

func (r *reader) freeValue(n *yaml.Node, path []string, depth int) any {
	if n = r.follow(n, path, depth); n == nil {
		return nil
	}
	switch n.Kind {
	case yaml.MappingNode:
		return r.free(n, path, depth)
	case yaml.SequenceNode:
		list := make([]any, 0, len(n.Content))
		for i, item := range n.Content {
			if r.tooMany {
				return nil
			}
			list = append(list, r.freeValue(item, append(slices.Clone(path), index(i)), depth+1))
		}
		return list
	case yaml.ScalarNode:
		switch n.ShortTag() {
		case "!!str", "!!timestamp":
			return n.Value
		case "!!null":
			return nil
		case "!!bool":
			var b bool
			if err := n.Decode(&b); err == nil {
				return b
			}
		case "!!int":
			var i int64
			if err := n.Decode(&i); err == nil {
				return i
			}
			r.fail(n, path, "number out of range", "put it into quotes, or write a smaller one")
			return nil
		case "!!float":
			var f float64
			if err := n.Decode(&f); err == nil && !math.IsNaN(f) && !math.IsInf(f, 0) {
				return f
			}
			r.fail(n, path, "is not a finite number", "write a decimal number, or put it into quotes")
			return nil
		}
	}
	r.fail(n, path, "is "+kindName(n)+", which charts can't take", "write it as text, number, true or false")
	return nil
}
