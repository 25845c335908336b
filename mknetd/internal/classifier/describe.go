package classifier

import (
	"encoding/binary"
	"fmt"
)

// Description is what a table out of the kernel holds, for those who read it.
type Description struct {
	Header
	Rules            []DescribedRule
	Addresses, Ports []Interval
	Groups           []Reference
}

// DescribedRule is one rule: which packets it matches is in the other parts.
type DescribedRule struct {
	Allow bool
	Hits  uint64 // packets that it has decided
}

// Interval is numbers within which the same rules match.
type Interval struct {
	First, Last uint32
	Rules       []int
}

// Reference is the rules that name a group.
type Reference struct {
	Number uint32
	Rules  []int
}

// Describe reads a whole table.
func Describe(c Class, table []byte) (Description, error) {
	l, d := c.Layout(), c.Dimensions()
	if len(table) < l.Bytes {
		return Description{}, fmt.Errorf("policy table: has %d bytes, want %d", len(table), l.Bytes)
	}
	h, err := ParseHeader(table)
	if err != nil {
		return Description{}, err
	}
	u32 := func(off int) int { return int(binary.LittleEndian.Uint32(table[off:])) }
	addresses, ports, groups := u32(offAddresses), u32(offPorts), u32(offReferences)
	if int(h.Rules) > 64*d.Words || max(addresses, ports) > d.Intervals || groups > d.References {
		return Description{}, fmt.Errorf("policy table %d: says that it has %d rules, %d and %d intervals and %d groups, more than a %s one can", h.Generation, h.Rules, addresses, ports, groups, c)
	}
	out := Description{Header: h}
	for i, hits := range Hits(c, table, int(h.Rules)) {
		out.Rules = append(out.Rules, DescribedRule{Allow: table[l.Allow+i/8]>>(i%8)&1 != 0, Hits: hits})
	}
	set := func(off int) (rules []int) {
		for i := range int(h.Rules) {
			if table[off+i/8]>>(i%8)&1 != 0 {
				rules = append(rules, i)
			}
		}
		return rules
	}
	intervals := func(n, starts, sets, rows int) []Interval {
		list := make([]Interval, n)
		for i := range list {
			list[i] = Interval{First: uint32(u32(starts + 4*i)), Last: ^uint32(0)}
			if i > 0 {
				list[i-1].Last = list[i].First - 1
			}
			row := int(binary.LittleEndian.Uint16(table[sets+4*i:])) % d.Rows
			list[i].Rules = set(rows + 8*d.Words*row)
		}
		return list
	}
	// A closed table has no counts, and one interval of each.
	out.Addresses = intervals(addresses, l.AddrStart, l.AddrSet, l.AddrBits)
	out.Ports = intervals(ports, l.PortStart, l.PortSet, l.PortBits)
	for i := range groups {
		out.Groups = append(out.Groups, Reference{Number: uint32(u32(l.RefGroup + 4*i)), Rules: set(l.RefBits + 8*d.Words*i)})
	}
	return out, nil
}
