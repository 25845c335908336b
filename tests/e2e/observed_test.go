package e2e

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the table of faults in spec/life-cycle.md")

// finding is one line of the table of injected faults in spec/life-cycle.md. Both
// texts are string literals, so that the table can be made without a run.
type finding struct{ fault, result string }

// observed says, at the end of what proves it, what a fault led to.
func observed(t *testing.T, f finding) {
	t.Helper()
	if !t.Failed() {
		t.Logf("observed: %s: %s", f.fault, f.result)
	}
}

const (
	faultsFile  = "../../spec/life-cycle.md"
	faultsBegin = "<!-- table of faults: go test ./tests/e2e -run FaultTable -update -->\n"
	faultsEnd   = "<!-- end of the table of faults -->\n"
)

// The table in spec/life-cycle.md has every finding of this package's tests, in
// their own words.
func TestFaultTableIsCurrent(t *testing.T) {
	text, err := os.ReadFile(faultsFile)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, found := strings.Cut(string(text), faultsBegin)
	have, tail, ended := strings.Cut(rest, faultsEnd)
	if !found || !ended {
		t.Fatalf("%s has no place for the table", faultsFile)
	}
	want := "\n| injected fault | observed result | test |\n|---|---|---|\n"
	for _, row := range findings(t) {
		want += row + "\n"
	}
	want += "\n"
	if have == want {
		return
	}
	if !*update {
		t.Fatalf("the table in %s is stale (run with -update); want\n%s", faultsFile, want)
	}
	if err := os.WriteFile(faultsFile, []byte(head+faultsBegin+want+faultsEnd+tail), 0o644); err != nil {
		t.Fatal(err)
	}
}

// findings are the rows, by file and place in it.
func findings(t *testing.T) (rows []string) {
	t.Helper()
	files, err := filepath.Glob("*_test.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("no tests: %v", err)
	}
	for _, name := range files {
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || !strings.HasPrefix(f.Name.Name, "Test") {
				continue
			}
			ast.Inspect(f, func(n ast.Node) bool {
				lit, ok := n.(*ast.CompositeLit)
				if !ok {
					return true
				}
				if kind, ok := lit.Type.(*ast.Ident); !ok || kind.Name != "finding" {
					return true
				}
				row, err := rowOf(lit, f.Name.Name)
				if err != nil {
					t.Errorf("%s: %v", set.Position(lit.Pos()), err)
				}
				rows = append(rows, row)
				return false
			})
		}
	}
	return rows
}

func rowOf(lit *ast.CompositeLit, test string) (string, error) {
	var words []string
	for _, e := range lit.Elts {
		text, ok := e.(*ast.BasicLit)
		if !ok {
			return "", fmt.Errorf("a finding has two string literals and nothing else")
		}
		word, err := strconv.Unquote(text.Value)
		if err != nil {
			return "", err
		}
		words = append(words, strings.ReplaceAll(word, "|", "\\|"))
	}
	if len(words) != 2 {
		return "", fmt.Errorf("a finding has two string literals, not %d", len(words))
	}
	return fmt.Sprintf("| %s | %s | `%s` |", words[0], words[1], test), nil
}
