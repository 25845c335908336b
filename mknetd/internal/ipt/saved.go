package ipt

import (
	"context"
	"fmt"
	"strings"
)

// Saved is one table as it stands, of everybody.
type Saved struct {
	Flavour string
	Table   string
	Chains  map[string]SavedChain
}

// SavedChain is one chain. Rules are words as iptables-save prints them, quotes
// resolved, without "-A chain".
type SavedChain struct {
	Policy string // of a built-in chain; empty for any other
	Rules  [][]string
}

// Dump reads every table of both flavours; one that holds no table is not asked,
// for asking would make the tables. It is for an explanation, not for the way of
// an ADD: it costs as much as all rules. One that cannot be read is an
// IncompatibleError.
func (f *Firewall) Dump(ctx context.Context) ([]Saved, error) {
	var all []Saved
	for _, flavour := range []string{NFT, Legacy} {
		t := f.tools
		if flavour != f.flavour {
			if flavour == Legacy {
				if inUse, err := legacyInUse(); err != nil {
					return nil, err
				} else if !inUse {
					continue
				}
			}
			var err error
			switch t, err = findTools(ctx, flavour); {
			case absent(err):
				continue // nobody can have made rules with it
			case err != nil:
				return nil, fmt.Errorf("read iptables %s: %w", flavour, err)
			}
		}
		var out string
		err := untilCompatible(ctx, func() (err error) {
			if out, err = run(ctx, execTimeout, "", t.save); err != nil {
				return err
			}
			return whole(out, anyTable)
		})
		if err != nil {
			return nil, fmt.Errorf("read iptables %s: %w", flavour, err)
		}
		all = append(all, ParseSave(flavour, out)...)
	}
	return all, nil
}

// ParseSave reads what iptables-save prints. Lines that it does not know are
// skipped.
func ParseSave(flavour, text string) []Saved {
	var all []Saved
	for line := range linesOf(text) {
		if name, is := strings.CutPrefix(line, "*"); is {
			all = append(all, Saved{Flavour: flavour, Table: name, Chains: map[string]SavedChain{}})
			continue
		}
		if len(all) == 0 {
			continue
		}
		chains := all[len(all)-1].Chains
		if rest, is := strings.CutPrefix(line, ":"); is {
			w := strings.Fields(rest)
			if len(w) >= 2 {
				policy := w[1]
				if policy == "-" {
					policy = ""
				}
				chains[w[0]] = SavedChain{Policy: policy}
			}
			continue
		}
		if w := split(line); len(w) > 2 && w[0] == "-A" {
			c := chains[w[1]]
			c.Rules = append(c.Rules, w[2:])
			chains[w[1]] = c
		}
	}
	return all
}
