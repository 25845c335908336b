package ipt

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"mknet/spec/endpoint"
)

// Reading is what all tables held at one moment. Reading a table costs as much as it
// has rules, whoever's they are, so that whoever wants to know more than one thing
// reads once.
type Reading struct {
	f     *Firewall
	views map[string]*view
}

// Read reads every table. Where one cannot be read (IncompatibleError) there is no
// reading at all.
func (f *Firewall) Read(ctx context.Context) (*Reading, error) {
	return f.readTables(ctx, f.existing())
}

func (f *Firewall) readTables(ctx context.Context, tables []string) (*Reading, error) {
	r := &Reading{f: f, views: map[string]*view{}}
	if f.flavour == NFT {
		// iptables-nft-save fetches all tables also where it prints one.
		var out string
		err := untilCompatible(ctx, func() (err error) {
			if out, err = f.run(ctx, "", f.tools.save); err != nil {
				return err
			}
			return whole(out, func(table string) bool { return slices.Contains(tables, table) && f.concerns(table) })
		})
		if err != nil {
			return nil, fmt.Errorf("iptables: %w", err)
		}
		text, err := byTable(out)
		if err != nil {
			return nil, fmt.Errorf("iptables: %w", err)
		}
		for _, table := range tables {
			v := newView(table)
			v.full = true
			if err := v.parse(text[table]); err != nil {
				return nil, fmt.Errorf("iptables: %w", err)
			}
			r.views[table] = v
		}
		return r, nil
	}
	for _, table := range tables {
		v, err := f.read(ctx, table)
		if err != nil {
			return nil, fmt.Errorf("iptables table %s: %w", table, err)
		}
		r.views[table] = v
	}
	return r, nil
}

// byTable cuts what iptables-save printed into its tables.
func byTable(out string) (map[string]string, error) {
	text := map[string]string{}
	var table string
	var b strings.Builder
	for line := range linesOf(out) {
		switch name, starts := strings.CutPrefix(line, "*"); {
		case unclosed(line): // what follows may be other tables
			return nil, fmt.Errorf("table %s: the quote does not end in the line %q", table, line)
		case starts:
			table = name
		case line == "COMMIT":
			text[table] = b.String()
			b.Reset()
		default:
			b.WriteString(line + "\n")
		}
	}
	return text, nil
}

// Shared reports what is missing from the shared parts and what is foreign in them. A
// foreign rule before our jumps is not a fault, whatever it accepts the guard still
// judges, unless it takes every packet: then no endpoint's rules are asked any more.
func (r *Reading) Shared() []endpoint.Fault {
	var faults []endpoint.Fault
	for _, table := range r.f.tables() {
		faults = append(faults, sharedCheck(r.views[table], r.f.sharedParts(table))...)
	}
	return faults
}

// Endpoints is Check of every table of every endpoint. Endpoints without a fault have
// no entry. Of the shared parts it looks at those that lead to the endpoint; all of
// them are Shared's.
func (r *Reading) Endpoints(eps []endpoint.Endpoint) map[endpoint.Generation][]endpoint.Fault {
	all := map[endpoint.Generation][]endpoint.Fault{}
	for _, table := range r.f.tables() {
		for _, ep := range eps {
			if ep.Mode == endpoint.Veth {
				continue
			}
			p, err := r.f.part(table, ep)
			if err != nil {
				all[ep.Generation] = append(all[ep.Generation], fault(table, ep.Generation.Chain(), err.Error()))
				continue
			}
			if faults := p.check(r.views[table]); len(faults) > 0 {
				all[ep.Generation] = append(all[ep.Generation], faults...)
			}
		}
	}
	return all
}

// Owned lists everything of ours that belongs to an endpoint: chains that hold a
// rule with a generation or are reached from one, rules with a generation in
// other chains, and empty chains that have an endpoint's name (what a flush of
// the table leaves; their Generation is zero). A chain with such a name and
// foreign rules only is foreign. The shared parts are not listed.
func (r *Reading) Owned() []Owned {
	var all []Owned
	for _, table := range r.f.existing() {
		if v := r.views[table]; v != nil {
			all = append(all, owned(v)...)
		}
	}
	return all
}

// CheckShared is Shared of a fresh reading.
func (f *Firewall) CheckShared(ctx context.Context) ([]endpoint.Fault, error) {
	r, err := f.readTables(ctx, f.tables())
	if err != nil {
		return nil, err
	}
	return r.Shared(), nil
}

// EnsureSharedAsOf is EnsureShared for one who has just read the tables: only those
// that want a repair are read again. It reports whether there was one.
func (f *Firewall) EnsureSharedAsOf(ctx context.Context, r *Reading) (repaired bool, err error) {
	pods, epoch := f.known() // what becomes known meanwhile may miss a table
	var broken []string
	for _, table := range f.tables() {
		if len(sharedRepair(r.views[table], f.sharedParts(table))) > 0 {
			broken = append(broken, table)
		}
	}
	if len(broken) > 0 {
		if err := f.ensureShared(ctx, broken...); err != nil {
			return true, err
		}
	}
	f.serve(pods, epoch)
	return len(broken) > 0, nil
}
