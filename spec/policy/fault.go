package policy

import (
	"fmt"
	"strings"
)

// MaxFaults is how many faults an Error lists; the rest is counted.
const MaxFaults = 64

// Fault is one thing that is wrong with a document.
type Fault struct {
	Document string `json:"document"` // "SecurityGroup/web"; "document 2 (line 17)" where it has no name
	Path     string `json:"path"`     // "spec.ingress[0].ports[1].port"; empty: the document as a whole
	Problem  string `json:"problem"`
}

func (f Fault) String() string {
	if f.Path == "" {
		return f.Document + ": " + f.Problem
	}
	return f.Document + ": " + f.Path + ": " + f.Problem
}

// Error is returned for documents that are refused. Nothing of what was given
// together is accepted then.
type Error struct {
	Faults []Fault // at most MaxFaults
	More   int     // faults that are not listed
}

func (e *Error) Error() string {
	lines := e.Lines()
	return strings.Join(lines, "; ")
}

// Lines has one line a fault.
func (e *Error) Lines() []string {
	lines := make([]string, 0, len(e.Faults)+1)
	for _, f := range e.Faults {
		lines = append(lines, f.String())
	}
	if e.More > 0 {
		lines = append(lines, fmt.Sprintf("and %d more faults", e.More))
	}
	return lines
}

// add takes one more fault.
func (e *Error) add(document, path, format string, args ...any) {
	if len(e.Faults) == MaxFaults {
		e.More++
		return
	}
	e.Faults = append(e.Faults, Fault{document, path, fmt.Sprintf(format, args...)})
}

// err is nil where there is no fault: a nil *Error in an error is not nil.
func (e *Error) err() error {
	if len(e.Faults) == 0 {
		return nil
	}
	return e
}

// clip bounds what a message repeats of a document.
func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "..."
	}
	return s
}
