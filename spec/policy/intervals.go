package policy

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// Intervals divides the 32-bit numbers into intervals within which the same rules
// match. Interval i begins at Starts[i] and ends before Starts[i+1], the last one
// at the largest number; Starts[0] is 0. Set[i] says which of Sets it has: equal
// sets are kept once.
type Intervals struct {
	Starts []uint32
	Set    []int
	Sets   []RuleSet
}

// RuleSet is a set of rules: bit i of word i/64 is rule i of Rules.List.
type RuleSet []uint64

// Addresses divides the addresses of peers (as big-endian numbers) by the CIDRs of
// the rules. A rule that only names groups is in no set. The rules must be within
// the limits, see Size.
func (rs Rules) Addresses() Intervals { return cut(rs.addressSpans(), len(rs.List)) }

// Ports divides PortKey values by protocol and port.
func (rs Rules) Ports() Intervals { return cut(rs.portSpans(), len(rs.List)) }

// PortKey is what Ports divides: the protocol in bits 16 to 23, the destination
// port below it, 0 where the packet has none.
func PortKey(proto uint8, port uint16) uint32 { return uint32(proto)<<16 | uint32(port) }

// span is a range of numbers, both ends included, that one rule matches.
type span struct {
	rule        int
	first, last uint32
}

func (rs Rules) addressSpans() []span {
	var out []span
	for i, r := range rs.List {
		for _, p := range r.CIDRs {
			first := addrNumber(p.Addr())
			out = append(out, span{i, first, first | uint32(uint64(1)<<(32-p.Bits())-1)})
		}
	}
	return out
}

func (rs Rules) portSpans() []span {
	var out []span
	for i, r := range rs.List {
		switch {
		case r.Protocol == AnyProtocol: // has no ports
			out = append(out, span{i, 0, PortKey(255, 65535)})
		case len(r.Ports) == 0:
			out = append(out, span{i, PortKey(uint8(r.Protocol), 0), PortKey(uint8(r.Protocol), 65535)})
		default:
			for _, p := range r.Ports {
				out = append(out, span{i, PortKey(uint8(r.Protocol), p.From), PortKey(uint8(r.Protocol), p.To)})
			}
		}
	}
	return out
}

// addrNumber is an IPv4 address as a number, the first byte the highest.
func addrNumber(a netip.Addr) uint32 { b := a.As4(); return binary.BigEndian.Uint32(b[:]) }

// bounds returns where intervals begin, in order, from 0.
func bounds(spans []span) []uint32 {
	out := make([]uint32, 1, 2*len(spans)+1)
	for _, s := range spans {
		out = append(out, s.first)
		if s.last != ^uint32(0) {
			out = append(out, s.last+1)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// cut sweeps over the spans in order and writes down the set of each interval.
func cut(spans []span, rules int) Intervals {
	out := Intervals{Starts: bounds(spans)}
	out.Set = make([]int, len(out.Starts))
	at := func(n uint32) int { i, _ := slices.BinarySearch(out.Starts, n); return i }
	begin, end := make([][]int, len(out.Starts)), make([][]int, len(out.Starts))
	for _, s := range spans {
		i := at(s.first)
		begin[i] = append(begin[i], s.rule)
		if s.last != ^uint32(0) {
			j := at(s.last + 1)
			end[j] = append(end[j], s.rule)
		}
	}
	depth := make([]int, rules) // open spans of each rule: its peers may overlap
	now := make(RuleSet, (rules+63)/64)
	known := map[string]int{}
	var key []byte
	for i := range out.Starts {
		for _, r := range end[i] {
			if depth[r]--; depth[r] == 0 {
				now[r/64] &^= 1 << (r % 64)
			}
		}
		for _, r := range begin[i] {
			depth[r]++
			now[r/64] |= 1 << (r % 64)
		}
		key = key[:0]
		for _, w := range now {
			key = binary.LittleEndian.AppendUint64(key, w)
		}
		set, ok := known[string(key)]
		if !ok {
			set = len(out.Sets)
			known[string(key)] = set
			out.Sets = append(out.Sets, slices.Clone(now))
		}
		out.Set[i] = set
	}
	return out
}
