package ipt

import (
	"fmt"
	"strings"
)

// view is what one iptables table held when it was read.
type view struct {
	table  string
	order  []string // chains as listed
	chains map[string][]rule
	full   bool // every chain of the table was read

	keys map[string]map[string]int // by chain and normal form, filled when asked for
}

func newView(table string) *view {
	return &view{table: table, chains: map[string][]rule{}}
}

func (v *view) add(name string) {
	if _, ok := v.chains[name]; !ok {
		v.order = append(v.order, name)
		v.chains[name] = nil
	}
}

func (v *view) has(name string) bool { _, ok := v.chains[name]; return ok }

// parse adds what `iptables -S` or `iptables-save` printed of one table.
func (v *view) parse(text string) error {
	for line := range linesOf(text) {
		switch {
		case unclosed(line):
			return fmt.Errorf("table %s: the quote does not end in the line %q", v.table, line)
		case line == "", line == "COMMIT", line[0] == '#', line[0] == '*':
			continue
		case line[0] == ':':
			name, _, _ := strings.Cut(line[1:], " ")
			v.add(name)
			continue
		case line[0] == '[': // [packets:bytes] of iptables-save -c
			_, line, _ = strings.Cut(line, " ")
		}
		w := split(line)
		if len(w) < 2 {
			return fmt.Errorf("table %s: cannot read the line %q", v.table, line)
		}
		switch w[0] {
		case "-P", "-N":
			v.add(w[1])
		case "-A":
			v.add(w[1])
			v.chains[w[1]] = append(v.chains[w[1]], rule(w[2:]))
		default:
			return fmt.Errorf("table %s: cannot read the line %q", v.table, line)
		}
	}
	return nil
}

// count is how often a chain holds a rule. The normal forms of a chain are made
// once, so that checking thousands of endpoints stays linear.
func (v *view) count(p placed) int {
	if v.keys == nil {
		v.keys = map[string]map[string]int{}
	}
	keys, ok := v.keys[p.chain]
	if !ok {
		keys = map[string]int{}
		for _, r := range v.chains[p.chain] {
			keys[r.key()]++
		}
		v.keys[p.chain] = keys
	}
	return keys[p.rule.key()]
}
