package classifier

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"mknet/spec/policy"
)

// NoRule is returned where no rule matches.
const NoRule = -1

// Lookup finds the rule that decides, as the data path does it: from the bytes
// alone. addr is the peer's IPv4 address as a big-endian number, key its
// policy.PortKey, groups the numbers of the groups that the peer holds.
func Lookup(c Class, table []byte, addr, key uint32, groups []uint32) (rule int, allow bool) {
	l, d := c.Layout(), c.Dimensions()
	row := func(starts, sets, rows int, key uint32) (bitmap []byte, occupied uint16) {
		i := search(table[starts:], d.Intervals, key)
		set := binary.LittleEndian.Uint32(table[sets+4*i:])
		return table[rows+8*d.Words*int(set&0xFFFF):], uint16(set >> 16)
	}
	byAddr, left := row(l.AddrStart, l.AddrSet, l.AddrBits, addr)
	byPort, ports := row(l.PortStart, l.PortSet, l.PortBits, key)
	var byGroup [policy.MaxGroupsPerEndpoint][]byte
	n := 0
	for _, g := range groups {
		i := search(table[l.RefGroup:], d.References, g)
		if binary.LittleEndian.Uint32(table[l.RefGroup+4*i:]) == g {
			byGroup[n] = table[l.RefBits+8*d.Words*i:]
			n++
		}
	}
	for w := range d.Words {
		for _, r := range byGroup[:n] {
			if word(r, w) != 0 {
				left |= 1 << w
			}
		}
	}
	for left &= ports; left != 0; left &= left - 1 {
		w := bits.TrailingZeros16(left)
		m := word(byAddr, w)
		for _, r := range byGroup[:n] {
			m |= word(r, w)
		}
		if m &= word(byPort, w); m != 0 {
			lowest := m & -m
			return 64*w + bits.TrailingZeros64(m), word(table[l.Allow:], w)&lowest != 0
		}
	}
	return NoRule, false
}

func word(b []byte, i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }

// search returns the last of n entries that is not above the key, 0 where all are;
// n is a power of four. The comparison is the sign bit of a 64-bit difference.
func search(entries []byte, n int, key uint32) int {
	at := 0
	for step := n / 4; step > 0; step /= 4 {
		from := at
		for i := 1; i < 4; i++ {
			entry := binary.LittleEndian.Uint32(entries[4*(from+i*step):])
			below := (uint64(entry) - uint64(key) - 1) >> 63 // 1 where entry <= key
			at += step * int(below)
		}
	}
	return at
}

// Lookup is the function of that name on this table.
func (t *Table) Lookup(addr, key uint32, groups []uint32) (rule int, allow bool) {
	return Lookup(t.Class, t.Bytes, addr, key, groups)
}

// Header is what a table says of itself.
type Header struct {
	Flags      uint32
	Policy     uint32
	Generation uint32
	Rules      uint32
	NoMatch    uint64 // packets that no rule matched
}

// ParseHeader reads the header of a table out of the kernel.
func ParseHeader(table []byte) (Header, error) {
	if len(table) < headerBytes {
		return Header{}, fmt.Errorf("policy table: has %d bytes, want at least %d", len(table), headerBytes)
	}
	u32 := func(off int) uint32 { return binary.LittleEndian.Uint32(table[off:]) }
	if m := u32(offMagic); m != Magic {
		return Header{}, fmt.Errorf("policy table: begins with %#08x, want %#08x: another version made it", m, Magic)
	}
	return Header{
		Flags: u32(offFlags), Policy: u32(offPolicy), Generation: u32(offGeneration), Rules: u32(offRules),
		NoMatch: binary.LittleEndian.Uint64(table[offNoMatch:]),
	}, nil
}

// Hits returns how many packets each rule has decided in a table out of the
// kernel.
func Hits(c Class, table []byte, rules int) []uint64 {
	out := make([]uint64, rules)
	for i := range out {
		out[i] = word(table[c.Layout().Hits:], i)
	}
	return out
}

// KernelBytes is what every table of a class costs in the kernel, in whole pages
// (kernel/bpf/arraymap.c rounds the value up to 8 bytes; vmalloc to pages).
func (c Class) KernelBytes() int {
	const page = 4096
	return (c.Layout().Bytes + page - 1) / page * page
}
