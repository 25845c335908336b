package policy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	"sigs.k8s.io/yaml"
)

// Limits of what Parse reads at once.
const (
	MaxBytes     = 900 << 10 // so that it also fits into one call of the API, 1 MiB
	MaxDocuments = 1024      // of one text, and of one Set
)

// Parse reads documents in YAML, separated by lines that begin with "---", or in
// JSON. A List is taken apart. Every document is checked by itself (for what
// refers to others see NewSet). Where anything is wrong, the error is an *Error
// with all faults, and nothing is returned.
func Parse(text []byte) ([]Object, error) { return parse(text, false) }

// Restore is Parse for a document that was in force before: it may be over a limit,
// which an older version did not have. What is over one is closed where it is
// evaluated; refusing it here would leave it out, and open.
func Restore(text []byte) ([]Object, error) { return parse(text, true) }

func parse(text []byte, restore bool) ([]Object, error) {
	faults := &Error{}
	switch {
	case len(text) > MaxBytes && !restore:
		faults.add("text", "", "has %d bytes, at most %d are read at once", len(text), MaxBytes)
	case !utf8.Valid(text):
		faults.add("text", "", "is not valid UTF-8")
	}
	if err := faults.err(); err != nil {
		return nil, err
	}
	var objects []Object
	count := 0
	for _, part := range split(string(text)) {
		name := fmt.Sprintf("document %d (line %d)", count+1, part.line)
		if part.ended {
			faults.add(name, "", `has a line "...": separate documents by "---"`)
			continue
		}
		tree, err := toTree(part.text)
		if err != nil {
			count++
			faults.add(name, "", "%s (lines count from its beginning)", yamlProblem(err))
			continue
		}
		if tree == nil {
			continue // nothing but white space and comments
		}
		if count++; count > MaxDocuments {
			faults.add("text", "", "has more than %d documents", MaxDocuments)
			break
		}
		objects = append(objects, readDocument(faults, name, tree, restore)...)
	}
	if len(objects) > MaxDocuments {
		faults.add("text", "", "has %d documents, at most %d are read at once", len(objects), MaxDocuments)
	}
	if count == 0 && len(faults.Faults) == 0 {
		faults.add("text", "", "holds no document")
	}
	seen := map[Key]bool{}
	for _, o := range objects {
		if seen[o.Key()] && o.Key().Name != "" {
			faults.add(o.Key().String(), "", "occurs twice")
		}
		seen[o.Key()] = true
	}
	if err := faults.err(); err != nil {
		return nil, err
	}
	return objects, nil
}

// part is the text of one document.
type part struct {
	text  string
	line  int  // of its beginning, from 1
	ended bool // has an end marker, after which YAML would skip the rest
}

// split cuts a stream at its document markers. A marker is "---" at the beginning
// of a line, before white space or the line's end; nothing else of YAML can look
// like that (YAML 1.2.2 section 9.1.2).
func split(text string) []part {
	var parts []part
	cur := part{line: 1}
	var body strings.Builder
	finish := func() {
		cur.text = body.String()
		parts = append(parts, cur)
		body.Reset()
	}
	n := 0
	for line := range strings.Lines(text) {
		n++
		switch {
		case marks(line, "---"):
			finish()
			cur = part{line: n}
			line = line[3:]
		case marks(line, "..."):
			cur.ended = true
		}
		body.WriteString(line)
	}
	finish()
	return parts
}

func marks(line, marker string) bool {
	rest, ok := strings.CutPrefix(line, marker)
	return ok && (rest == "" || strings.ContainsRune(" \t\r\n", rune(rest[0])))
}

// toTree turns one document into maps, lists, strings, json.Numbers and booleans.
// A key that occurs twice is an error.
func toTree(text string) (any, error) {
	doc, err := yaml.YAMLToJSONStrict([]byte(text))
	if err != nil {
		return nil, err
	}
	dec := json.NewDecoder(bytes.NewReader(doc))
	dec.UseNumber()
	var tree any
	if err := dec.Decode(&tree); err != nil {
		return nil, err
	}
	return tree, nil
}

// yamlProblem takes the wording of the YAML parser down to one line.
func yamlProblem(err error) string {
	s := strings.TrimPrefix(err.Error(), "yaml: ")
	s = strings.TrimPrefix(s, "unmarshal errors:\n")
	lines := strings.Split(strings.TrimSpace(s), "\n")
	for i := range lines {
		lines[i] = clip(strings.TrimSpace(lines[i]))
	}
	return strings.Join(lines[:min(len(lines), 8)], ", ")
}
