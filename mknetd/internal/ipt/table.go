package ipt

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"mknet/spec/endpoint"
)

// Table is the part of one endpoint in one iptables table: its chains, and its
// rule in a leaf of each dispatch tree.
type Table struct {
	fw    *Firewall
	table string
	ep    endpoint.Endpoint

	changed bool
}

// Changed reports whether the last Ensure or Remove found something to do.
func (t *Table) Changed() bool { return t.changed }

// Kind is "iptables".
func (t *Table) Kind() string { return "iptables" }

// Name is the table and the endpoint's chain: "filter MK-0123456789ab".
func (t *Table) Name() string { return t.table + " " + t.ep.Generation.Chain() }

// Where is endpoint.InHost.
func (t *Table) Where() string { return endpoint.InHost }

// Ensure makes the table's part of the endpoint what the record asks for, in
// one commit: chains, content and order, and the way that leads there. Where all
// is in place nothing is written. A chain of that name that holds only what does
// not carry the generation is foreign and an error.
//
// Restoring the nat table does not translate flows that began without it: the
// caller flushes the address's conntrack entries after a repair.
func (t *Table) Ensure(ctx context.Context) error {
	t.changed = true
	p, err := t.fw.part(t.table, t.ep)
	if err != nil {
		return err
	}
	// A fresh endpoint takes one commit and no read: -C asserts the shared way,
	// -N that the chains are new, and no rule can point to a chain that is new.
	err = t.fw.join(ctx, t.table, p.create())
	if err == nil || !decided(err) {
		return t.wrap(err)
	}
	v, err := t.fw.read(ctx, t.table, p.names()...)
	if err != nil {
		return t.wrap(err)
	}
	if !p.reachable(v) {
		if err := t.fw.ensureShared(ctx, t.table); err != nil {
			return t.wrap(err)
		}
		if v, err = t.fw.read(ctx, t.table, p.names()...); err != nil {
			return t.wrap(err)
		}
	}
	lines, err := p.repair(v, t.ep.Generation)
	if err != nil || len(lines) == 0 {
		t.changed = false
		return t.wrap(err)
	}
	return t.wrap(t.fw.restore(ctx, t.table, lines))
}

// Check reports every difference; it changes nothing.
func (t *Table) Check(ctx context.Context) ([]endpoint.Fault, error) {
	p, err := t.fw.part(t.table, t.ep)
	if err != nil {
		return nil, err
	}
	v, err := t.fw.read(ctx, t.table, p.names()...)
	if err != nil {
		return nil, t.wrap(err)
	}
	return p.check(v), nil
}

// Remove deletes what is there; absent is success, also where the shared parts
// are gone or somebody flushed the table.
func (t *Table) Remove(ctx context.Context) error {
	t.changed = true
	g := t.ep.Generation
	p, err := t.fw.part(t.table, t.ep)
	if err != nil {
		// A record that cannot be rendered (its address is in no pool) still
		// has a generation to search for.
		t.changed, err = t.fw.removeByMark(ctx, t.table, g)
		return t.wrap(err)
	}
	// The common case again takes one commit: each line asserts its object.
	err = t.fw.join(ctx, t.table, p.destroy())
	if err == nil || !decided(err) {
		return t.wrap(err)
	}
	if t.fw.flavour == NFT { // one chain costs one chain here, the table is read only at need
		// Nothing of an endpoint is in a built-in chain, which may hold what cannot be read.
		ours := slices.DeleteFunc(p.names(), func(name string) bool { return !named(name) })
		v, err := t.fw.read(ctx, t.table, ours...)
		if err != nil {
			return t.wrap(err)
		}
		lines, held := removal(v, g)
		if len(lines) == 0 && held == nil {
			t.changed = false
			return nil
		}
		if held == nil {
			if err = t.fw.restore(ctx, t.table, lines); err == nil || !decided(err) {
				return t.wrap(err)
			}
		}
	}
	t.changed, err = t.fw.removeByMark(ctx, t.table, g)
	return t.wrap(err)
}

func (t *Table) wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("endpoint %s: iptables table %s: %w", t.ep.Generation.Short(), t.table, err)
}

// decided reports whether iptables itself refused a commit, so that reading the
// table will tell why. A held lock or an ended context does not.
func decided(err error) bool {
	var c *CommandError
	return errors.As(err, &c) && !errors.Is(err, ErrBusy)
}

// names are the chains that hold the part or lead to it.
func (p part) names() []string {
	var names []string
	for _, d := range p.dispatch {
		for _, s := range d.path {
			names = append(names, s.chain)
		}
		names = append(names, d.leaf.chain)
	}
	for _, c := range p.chains {
		names = append(names, c.name)
	}
	return names
}

// create are the lines that add a fresh part, and fail where the shared way is
// missing or one of the chains exists.
func (p part) create() []string {
	var lines []string
	for _, d := range p.dispatch {
		for _, s := range d.path {
			lines = append(lines, "-C "+s.chain+" "+s.rule.String())
		}
	}
	for _, c := range p.chains {
		lines = append(lines, "-N "+c.name)
	}
	for _, c := range p.chains {
		for _, r := range c.rules {
			lines = append(lines, placed{c.name, r}.String())
		}
	}
	for _, d := range p.dispatch {
		lines = append(lines, d.leaf.String())
	}
	return lines
}

// destroy are the lines that remove a whole part, and fail where any is missing.
func (p part) destroy() []string {
	var lines []string
	for _, d := range p.dispatch {
		lines = append(lines, "-D "+d.leaf.chain+" "+d.leaf.rule.String())
	}
	for _, c := range p.chains {
		lines = append(lines, "-F "+c.name)
	}
	for _, c := range p.chains {
		lines = append(lines, "-X "+c.name)
	}
	return lines
}

// reachable reports whether the shared way to every leaf is there.
func (p part) reachable(v *view) bool {
	for _, d := range p.dispatch {
		for _, s := range d.path {
			if v.count(s) == 0 {
				return false
			}
		}
		if !v.has(d.leaf.chain) {
			return false
		}
	}
	return true
}

// repair are the lines that turn what is there into the part; none when it is
// right already.
func (p part) repair(v *view, g endpoint.Generation) ([]string, error) {
	var lines []string
	for _, c := range p.chains {
		have := v.chains[c.name]
		if len(have) > 0 && !anyMarked(have, g) {
			return nil, fmt.Errorf("chain %s exists and is not ours: %s", c.name, placed{c.name, have[0]})
		}
		if !v.has(c.name) || !same(c.rules, have) {
			lines = append(lines, ":"+c.name+" - [0:0]") // made, or emptied
			for _, r := range c.rules {
				lines = append(lines, placed{c.name, r}.String())
			}
		}
	}
	for _, d := range p.dispatch {
		// One dispatch rule, and no other of this generation beside it.
		kept := false
		for _, r := range v.chains[d.leaf.chain] {
			if marked(r, g) {
				if !kept && r.key() == d.leaf.rule.key() {
					kept = true
					continue
				}
				lines = append(lines, "-D "+d.leaf.chain+" "+r.String())
			}
		}
		if !kept {
			lines = append(lines, d.leaf.String())
		}
	}
	return lines, nil
}

// check names every difference between the part and what is there.
func (p part) check(v *view) []endpoint.Fault {
	var faults []endpoint.Fault
	for _, d := range p.dispatch {
		for _, s := range d.path {
			if v.count(s) == 0 {
				faults = append(faults, fault(p.table, s.chain, "the shared rule is missing: "+s.String()))
			}
			if isShared(s.chain) {
				faults = append(faults, foreignIn(v, s.chain)...)
			}
		}
		faults = append(faults, foreignIn(v, d.leaf.chain)...)
		if v.count(d.leaf) == 0 {
			faults = append(faults, fault(p.table, d.leaf.chain, "the dispatch rule is missing: "+d.leaf.String()))
		}
	}
	for _, c := range p.chains {
		if !v.has(c.name) {
			faults = append(faults, fault(p.table, c.name, "the chain is missing"))
			continue
		}
		faults = append(faults, compare(p.table, c.name, c.rules, v.chains[c.name])...)
	}
	return faults
}

// foreignIn names the rules in a shared chain that are neither a goto of ours nor
// an endpoint's dispatch.
func foreignIn(v *view, name string) []endpoint.Fault {
	var faults []endpoint.Fault
	for _, r := range v.chains[name] {
		if !isJump(r) && !isEndpoints(r) {
			faults = append(faults, fault(v.table, name, "a foreign rule: "+placed{name, r}.String()))
		}
	}
	return faults
}

// marked reports whether a rule carries the full generation.
func marked(r rule, g endpoint.Generation) bool { return r.comment() == genMark+g.String() }

func anyMarked(rules []rule, g endpoint.Generation) bool {
	return slices.ContainsFunc(rules, func(r rule) bool { return marked(r, g) })
}
