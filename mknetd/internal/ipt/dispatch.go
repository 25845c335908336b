package ipt

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"mknet/spec/endpoint"
)

// EnsureShared builds what all endpoints share in every table and repairs what
// is missing, in one commit a table. A chain that exists is never declared again,
// which would empty it. Our jumps are put first in the built-in chains where they
// are not; a rule that is not ours in a chain of ours is removed. When nothing is
// wrong nothing is written.
func (f *Firewall) EnsureShared(ctx context.Context) error {
	pods, epoch := f.known() // what becomes known meanwhile may miss a table
	if err := f.ensureShared(ctx, f.tables()...); err != nil {
		return err
	}
	f.serve(pods, epoch)
	return nil
}

// sharedAttempts bounds how often a repair is planned anew because another
// program changed the table between the read and the commit.
const sharedAttempts = 3

// ensureShared repairs the shared parts of tables, which are read together: with many
// rules reading is what costs.
func (f *Firewall) ensureShared(ctx context.Context, tables ...string) error {
	f.sharing.Lock()
	defer f.sharing.Unlock()
	r, err := f.readTables(ctx, tables)
	if err != nil {
		return err
	}
	for _, table := range tables {
		if err := f.ensureSharedLocked(ctx, table, r.views[table]); err != nil {
			return fmt.Errorf("iptables table %s: %w", table, err)
		}
	}
	return nil
}

// ensureSharedLocked is ensureShared of one table that was read under the lock.
func (f *Firewall) ensureSharedLocked(ctx context.Context, table string, v *view) error {
	for attempt := 1; ; attempt++ {
		lines := sharedRepair(v, f.sharedParts(table))
		if len(lines) == 0 {
			return nil
		}
		// -N and -D in it assert what was read.
		err := f.restore(ctx, table, lines)
		if err == nil && f.OnShared != nil {
			f.OnShared(table)
		}
		if err == nil || !decided(err) || attempt == sharedAttempts {
			return err
		}
		if v, err = f.read(ctx, table); err != nil {
			return err
		}
	}
}

// shared is the wanted content of the shared chains of one table.
type shared struct {
	chains []string          // in order of the trees
	rules  map[string][]rule // gotos of each
	jumps  map[string][]rule // of each built-in chain, in order
	// ordered are chains whose rules, not only gotos, stand in one order.
	ordered map[string]bool
}

func sharedOf(trees []tree) shared {
	s := shared{rules: map[string][]rule{}, jumps: map[string][]rule{}, ordered: map[string]bool{}}
	for _, t := range trees {
		s.chains = append(s.chains, t.chains()...)
		for _, p := range t.rules() {
			s.rules[p.chain] = append(s.rules[p.chain], p.rule)
		}
		j := t.jump()
		s.jumps[j.chain] = append(s.jumps[j.chain], j.rule)
	}
	return s
}

// sharedRepair are the lines that turn what a table holds into what is wanted.
func sharedRepair(v *view, want shared) []string {
	var declare, change, last []string
	known := map[string]bool{}
	for _, name := range want.chains {
		known[name] = true
		if !v.has(name) {
			declare = append(declare, "-N "+name) // fails where it exists; ":" would empty it
		}
		if want.ordered[name] {
			if !same(want.rules[name], v.chains[name]) {
				change = append(change, "-F "+name)
				for _, r := range want.rules[name] {
					change = append(change, placed{name, r}.String())
				}
			}
			continue
		}
		missing, wrong := sharedDiff(want.rules[name], v.chains[name])
		for _, r := range wrong {
			change = append(change, "-D "+name+" "+r.String())
		}
		for _, r := range missing {
			change = append(change, placed{name, r}.String())
		}
	}
	for _, name := range v.order {
		if known[name] {
			continue
		}
		if isShared(name) { // of a pool that is configured no more
			if !slices.ContainsFunc(v.chains[name], isEndpoints) {
				change = append(change, "-F "+name)
				last = append(last, "-X "+name)
			}
			continue
		}
		jumps, have := want.jumps[name], v.chains[name]
		n := len(jumps)
		rest := have[min(n, len(have)):]
		if len(have) >= n && same(jumps, have[:n]) && !slices.ContainsFunc(rest, isJump) {
			continue
		}
		for _, r := range have {
			if isJump(r) {
				change = append(change, "-D "+name+" "+r.String())
			}
		}
		for _, r := range slices.Backward(jumps) {
			change = append(change, "-I "+name+" 1 "+r.String())
		}
	}
	// A built-in chain that the table does not list yet (nft makes them on first use).
	for _, base := range slices.Sorted(maps.Keys(want.jumps)) {
		if v.has(base) {
			continue
		}
		for _, r := range want.jumps[base] {
			change = append(change, placed{base, r}.String())
		}
	}
	return slices.Concat(declare, change, last)
}

// sharedDiff compares one shared chain: the gotos that are missing, and the
// rules that should not be there. Order does not matter, because the gotos of a
// chain exclude each other, and an endpoint's rules are its own business.
func sharedDiff(want, have []rule) (missing, wrong []rule) {
	seen := map[string]bool{}
	wanted := map[string]bool{}
	for _, r := range want {
		wanted[r.key()] = true
	}
	for _, r := range have {
		k := r.key()
		switch {
		case wanted[k] && !seen[k]:
			seen[k] = true
		case !isEndpoints(r):
			wrong = append(wrong, r)
		}
	}
	for _, r := range want {
		if !seen[r.key()] {
			missing = append(missing, r)
		}
	}
	return missing, wrong
}

// isEndpoints reports whether a rule is an endpoint's dispatch: it carries a
// generation and leads to a chain of that generation. The mark alone is not
// enough inside a chain of ours.
func isEndpoints(r rule) bool {
	g, ok := generation(r)
	return ok && chainOf(g, r.target())
}

// isJump reports whether a rule in a built-in chain is one of our jumps.
func isJump(r rule) bool { return r.comment() == sharedMark && isShared(r.target()) }

// takesAll reports whether a rule has no match and lets no packet past.
func takesAll(r rule) bool {
	text := r.String()
	return text == "-j ACCEPT" || text == "-j REJECT" || strings.HasPrefix(text, "-j REJECT ")
}

func sharedCheck(v *view, want shared) []endpoint.Fault {
	var faults []endpoint.Fault
	for _, base := range slices.Sorted(maps.Keys(want.jumps)) {
		for _, r := range want.jumps[base] {
			if j := (placed{base, r}); v.count(j) == 0 {
				faults = append(faults, fault(v.table, base, "the jump is missing: "+j.String()))
			}
		}
		for _, r := range v.chains[base] {
			if isJump(r) {
				break
			}
			if takesAll(r) {
				faults = append(faults, fault(v.table, base, "a foreign rule takes every packet before our jump: "+placed{base, r}.String()))
			}
		}
	}
	for _, name := range want.chains {
		if !v.has(name) {
			faults = append(faults, fault(v.table, name, "the chain is missing"))
			continue
		}
		if want.ordered[name] {
			faults = append(faults, compare(v.table, name, want.rules[name], v.chains[name])...)
			continue
		}
		missing, wrong := sharedDiff(want.rules[name], v.chains[name])
		for _, r := range missing {
			faults = append(faults, fault(v.table, name, "the shared rule is missing: "+placed{name, r}.String()))
		}
		for _, r := range wrong {
			faults = append(faults, fault(v.table, name, "a foreign rule: "+placed{name, r}.String()))
		}
	}
	return faults
}

// RemoveShared removes the shared parts from every table (purge). A table in which a
// foreign rule jumps to them keeps them, and the error names that rule. It is refused
// while an endpoint has rules, which would then no longer be reached.
func (f *Firewall) RemoveShared(ctx context.Context) error {
	r, err := f.Read(ctx)
	if err != nil {
		return err
	}
	for _, table := range f.existing() {
		v := r.views[table]
		for _, name := range v.order {
			if i := slices.IndexFunc(v.chains[name], isEndpoints); i >= 0 {
				return fmt.Errorf("iptables table %s: an endpoint still has rules: %s", table, placed{name, v.chains[name][i]})
			}
		}
	}
	f.unserve()
	var errs []error
	for _, table := range slices.Backward(f.existing()) {
		if held := jumpsToShared(r.views[table]); held != nil {
			errs = append(errs, fmt.Errorf("iptables table %s: chain %s is still used by a rule that is not ours, delete that rule: %s", table, held.rule.target(), held))
			continue
		}
		if lines := sharedRepair(r.views[table], shared{}); len(lines) > 0 {
			if err := f.restore(ctx, table, lines); err != nil {
				errs = append(errs, fmt.Errorf("iptables table %s: %w", table, err))
			}
		}
	}
	return errors.Join(errs...)
}

// jumpsToShared is a foreign rule that holds a shared chain; nil: there is none.
func jumpsToShared(v *view) *placed {
	for _, name := range v.order {
		if isShared(name) {
			continue // goes as a whole
		}
		for _, r := range v.chains[name] {
			if isShared(r.target()) && !isJump(r) {
				return &placed{name, r}
			}
		}
	}
	return nil
}
