package ipt

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"mknet/spec/endpoint"
)

// Elsewhere is the flavour other than f's where that holds chains or rules of ours,
// else "". It makes no table. Where the other flavour's programs are not installed
// nobody can have made rules with them, unless they are expected: then, and where a
// program or the kernel does not answer, it is an error.
func (f *Firewall) Elsewhere(ctx context.Context, expected bool) (string, error) {
	if f.flavour == Legacy {
		for _, table := range everyTable {
			if holds, err := nftHoldsChains(table, named); err != nil {
				return "", err
			} else if holds {
				return NFT, nil
			}
		}
		return "", nil
	}
	inUse, err := legacyInUse()
	if err != nil || !inUse {
		return "", err
	}
	t, err := findTools(ctx, Legacy)
	if absent(err) && !expected {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("look for our rules in iptables %s: %w", Legacy, err)
	}
	out, err := run(ctx, execTimeout, "", t.save) // the tables that there are
	if err != nil {
		return "", fmt.Errorf("look for our rules in iptables %s: %w", Legacy, err)
	}
	v := newView("") // of all tables
	if err := v.parse(out); err != nil {
		return "", fmt.Errorf("look for our rules in iptables %s: %w", Legacy, err)
	}
	if holdsOurs(v) {
		return Legacy, nil
	}
	return "", nil
}

func holdsOurs(v *view) bool {
	return slices.ContainsFunc(v.order, isShared) ||
		slices.ContainsFunc(owned(v), func(o Owned) bool { return !o.Generation.IsZero() })
}

// RemoveAll removes everything that carries our mark, the shared parts last; what is
// foreign stays. Of the recorded generations it removes chains that somebody flushed
// as well, which carry no mark. It reports whether anything was there. A chain that a
// foreign rule jumps to stays, and the error names that rule.
func (f *Firewall) RemoveAll(ctx context.Context, recorded []endpoint.Generation) (found bool, err error) {
	r, err := f.Read(ctx)
	if err != nil {
		return false, err
	}
	all := map[endpoint.Generation]bool{} // to go
	for _, g := range recorded {
		all[g] = true
	}
	for _, o := range r.Owned() {
		all[o.Generation] = true
	}
	delete(all, endpoint.Generation{})
	var errs []error
	for _, table := range slices.Backward(f.existing()) {
		found = found || holdsOurs(r.views[table])
		var lines []string
		for g := range all {
			of, held := removal(r.views[table], g)
			lines = append(lines, of...)
			errs = append(errs, held)
		}
		if len(lines) > 0 {
			errs = append(errs, f.restore(ctx, table, lines))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return found, fmt.Errorf("remove our rules from iptables %s: %w", f.flavour, err)
	}
	if err := f.RemoveShared(ctx); err != nil {
		return found, fmt.Errorf("remove our shared chains from iptables %s: %w", f.flavour, err)
	}
	return found, nil
}
