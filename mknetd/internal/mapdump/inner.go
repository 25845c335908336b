package mapdump

import (
	"encoding/binary"
	"fmt"
	"slices"

	"mknet/mknetd/internal/classifier"
	"mknet/spec/policy"
)

// Parts of a table, the numbers of field part.
const (
	partRule uint64 = iota
	partAddress
	partPort
	partGroup
)

// readInner shows what the table of one generation holds: its rules with what they
// have decided, and which of them each interval of addresses and ports, and each
// group, has. Intervals without rules are left out.
func (m Map) readInner(from source, req Request) (Dump, error) {
	out := Dump{Map: m.Name, Entries: []Row{}, Lookups: 1, of: inner}
	filters, err := inner.parseFilters(req.Filters)
	if err != nil {
		return out, err
	}
	value, err := from.lookup(binary.LittleEndian.AppendUint32(nil, *req.Inner))
	if err != nil {
		return out, err
	}
	var table []byte
	if value != nil {
		if table, err = from.table(value); err != nil {
			return out, err
		}
	}
	if table == nil {
		return out, m.noTable(from, *req.Inner)
	}
	t, err := classifier.Describe(m.class, table)
	if err != nil {
		return out, err
	}
	for _, cells := range innerRows(t) {
		if !out.add(&inner, filters, req.Limit, cells) {
			break
		}
	}
	return out, nil
}

// noTable names the generations that there are.
func (m Map) noTable(from source, want uint32) error {
	var have []uint64
	if err := from.each(func(key, _ []byte) bool { have = append(have, word(key, false)); return true }); err != nil {
		return err
	}
	if len(have) == 0 {
		return usage("generation %d: the map is empty: no policy in force has a table of this size", want)
	}
	slices.Sort(have)
	return usage("generation %d: there is no such table; there are %s", want, ranges(have))
}

func innerRows(t classifier.Description) [][]cell {
	var rows [][]cell
	row := func(part uint64, index int, from string, rules []int) {
		c := make([]cell, len(inner.Fields))
		c[0].n, c[1].n, c[2].s = part, uint64(index), from
		for _, r := range rules {
			c[3].list = append(c[3].list, uint64(r))
		}
		rows = append(rows, c)
	}
	for i, r := range t.Rules {
		row(partRule, i, "", []int{i})
		last := rows[len(rows)-1]
		last[4].n, last[5].n = 1, r.Hits
		if r.Allow {
			last[4].n = 2
		}
	}
	for i, iv := range t.Addresses {
		if len(iv.Rules) > 0 {
			row(partAddress, i, addressRange(iv.First, iv.Last), iv.Rules)
		}
	}
	for i, iv := range t.Ports {
		if len(iv.Rules) > 0 {
			row(partPort, i, portRange(iv.First, iv.Last), iv.Rules)
		}
	}
	for i, g := range t.Groups {
		row(partGroup, i, fmt.Sprint(g.Number), g.Rules)
	}
	return rows
}

func addressRange(first, last uint32) string {
	if first == last {
		return addrOf(uint64(first)).String()
	}
	return addrOf(uint64(first)).String() + "-" + addrOf(uint64(last)).String()
}

// portRange names protocol<<16|port, from first to last.
func portRange(first, last uint32) string {
	last = min(last, 255<<16|0xffff)
	p, q := policy.Protocol(first>>16), policy.Protocol(last>>16)
	a, b := first&0xffff, last&0xffff
	switch {
	case a == 0 && b == 0xffff && p == q:
		return p.String()
	case a == 0 && b == 0xffff:
		return p.String() + "-" + q.String()
	case p != q:
		return fmt.Sprintf("%s/%d-%s/%d", p, a, q, b)
	case a == b:
		return fmt.Sprintf("%s/%d", p, a)
	}
	return fmt.Sprintf("%s/%d-%d", p, a, b)
}
