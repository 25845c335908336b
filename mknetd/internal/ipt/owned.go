package ipt

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"mknet/spec/endpoint"
)

// everyTable are all tables that could hold something of ours, those of a
// daemon with another guard table included.
var everyTable = []string{tableRaw, tableSecurity, tableMangle, tableNAT, tableFilter}

// existing are the tables that this kernel has.
func (f *Firewall) existing() []string {
	if f.guard == tableMangle {
		return slices.DeleteFunc(slices.Clone(everyTable), func(t string) bool { return t == tableSecurity })
	}
	return everyTable
}

func owned(v *view) []Owned {
	// The generation that leads to a chain, from rules anywhere.
	reached := map[string]endpoint.Generation{}
	for _, rules := range v.chains {
		for _, r := range rules {
			if g, ok := generation(r); ok && chainOf(g, r.target()) {
				reached[r.target()] = g
			}
		}
	}
	var all []Owned
	for _, name := range v.order {
		rules := v.chains[name]
		digits := chainDigits(name)
		own := map[endpoint.Generation]bool{} // generations whose chain this is
		for _, r := range rules {
			if g, ok := generation(r); ok && chainOf(g, name) {
				own[g] = true
			}
		}
		if g, ok := reached[name]; ok && len(rules) == 0 {
			own[g] = true
		}
		for g := range own {
			all = append(all, Owned{Generation: g, Digits: g.Short(), Table: v.table, Object: name})
		}
		if len(own) == 0 && digits != "" && len(rules) == 0 {
			all = append(all, Owned{Digits: digits, Table: v.table, Object: name})
		}
		for _, r := range rules {
			if g, ok := generation(r); ok && !own[g] {
				all = append(all, Owned{Generation: g, Digits: g.Short(), Table: v.table, Object: placed{name, r}.String()})
			}
		}
	}
	return all
}

// RemoveOwned removes everything of one generation, from every table, and
// nothing else; absent is success. It goes on past an error.
func (f *Firewall) RemoveOwned(ctx context.Context, g endpoint.Generation) error {
	if g.IsZero() {
		return errors.New("remove from iptables: no generation given")
	}
	var errs []error
	for _, table := range slices.Backward(f.existing()) {
		if _, err := f.removeByMark(ctx, table, g); err != nil {
			errs = append(errs, fmt.Errorf("endpoint %s: iptables table %s: %w", g.Short(), table, err))
		}
	}
	return errors.Join(errs...)
}

// removeByMark reads a whole table and deletes what belongs to the generation. It
// reports whether there was anything.
func (f *Firewall) removeByMark(ctx context.Context, table string, g endpoint.Generation) (found bool, err error) {
	v, err := f.read(ctx, table)
	if err != nil {
		return false, err
	}
	lines, held := removal(v, g)
	if len(lines) > 0 {
		if err := f.restore(ctx, table, lines); err != nil {
			return true, errors.Join(held, err)
		}
	}
	return len(lines) > 0, held
}

// removal are the lines that delete what a view holds of a generation. A chain
// that a foreign rule jumps to cannot be deleted: it is emptied, and the error
// names that rule.
func removal(v *view, g endpoint.Generation) (lines []string, held error) {
	var chains []string
	for _, name := range v.order {
		if chainOf(g, name) && (len(v.chains[name]) == 0 || anyMarked(v.chains[name], g)) {
			chains = append(chains, name)
		}
	}
	foreign := map[string]placed{}
	for _, name := range v.order {
		if slices.Contains(chains, name) {
			continue
		}
		for _, r := range v.chains[name] {
			switch {
			case marked(r, g):
				lines = append(lines, "-D "+name+" "+r.String())
			case slices.Contains(chains, r.target()):
				foreign[r.target()] = placed{name, r}
			}
		}
	}
	for _, name := range chains {
		if len(v.chains[name]) > 0 {
			lines = append(lines, "-F "+name)
		}
	}
	for _, name := range chains {
		if by, ok := foreign[name]; ok {
			held = errors.Join(held, fmt.Errorf("chain %s is still used by a rule that is not ours, delete that rule: %s", name, by))
			continue
		}
		lines = append(lines, "-X "+name)
	}
	return lines, held
}

// generation reads the mark of a rule.
func generation(r rule) (endpoint.Generation, bool) {
	text, ok := strings.CutPrefix(r.comment(), genMark)
	if !ok {
		return endpoint.Generation{}, false
	}
	g, err := endpoint.ParseGeneration(text)
	return g, err == nil
}

// chainOf reports whether a chain's name is one of the generation's.
func chainOf(g endpoint.Generation, name string) bool {
	rest, ok := strings.CutPrefix(name, g.Chain())
	return ok && (rest == "" || rest == outSuffix || rest == inSuffix)
}

// chainDigits are the 12 digits of a name that an endpoint's chain could have.
func chainDigits(name string) string {
	digits, ok := strings.CutPrefix(name, endpoint.ChainPrefix)
	digits = strings.TrimSuffix(strings.TrimSuffix(digits, outSuffix), inSuffix)
	if !ok || len(digits) != 12 || strings.Trim(digits, hexDigits) != "" {
		return ""
	}
	return digits
}
