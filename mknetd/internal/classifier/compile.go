package classifier

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"

	"mknet/spec/policy"
)

// Magic is the first word of a table, "MKT2".
const Magic uint32 = 0x32544B4D

// Flags of a table.
const (
	FlagRestricts uint32 = 1 << 0 // a packet that no rule matches is denied (see policy.Rules)
	FlagClosed    uint32 = 1 << 1 // over a limit: no rules, and restricts
	FlagGroup     uint32 = 1 << 2 // of a SecurityGroup
	FlagEgress    uint32 = 1 << 3 // egress; without it, ingress
)

// Offsets in the header.
const (
	offMagic      = 0
	offFlags      = 4
	offPolicy     = 8
	offGeneration = 12
	offRules      = 16
	offAddresses  = 20
	offPorts      = 24
	offAddrRows   = 28
	offPortRows   = 32
	offReferences = 36
	offNoMatch    = 40
)

// unusedEntry fills starts and references behind the last one.
const unusedEntry = ^uint32(0)

// GroupNumbers gives every SecurityGroup its number in the data path, 1 to
// 0xFFFFFFFE.
type GroupNumbers map[string]uint32

// CapacityError is returned by Compile for a direction that is over a limit.
type CapacityError struct {
	Policy    policy.Key
	Direction policy.Direction
	Over      []string // one line a limit
}

func (e *CapacityError) Error() string {
	return fmt.Sprintf("%s %s: %s", e.Policy, e.Direction, strings.Join(e.Over, "; "))
}

// Table is a compiled direction: the bytes of a map's value, and what belongs to
// it in Go.
type Table struct {
	Class Class
	Bytes []byte
	Rules policy.Rules // rule i of the bitmaps is List[i]
}

// Compile makes the table of a direction. id is the number of the policy, which
// the header repeats for those who read maps by hand. What is over a limit gives
// a *CapacityError; see Closed. It keeps no reference to groups.
func Compile(rules policy.Rules, id uint32, groups GroupNumbers) (*Table, error) {
	size := rules.Size()
	class, ok := ClassOf(size)
	if !ok {
		return nil, &CapacityError{rules.Policy, rules.Direction, size.Over()}
	}
	t := newTable(class, rules, id)
	if rules.Restricts {
		t.setFlags(FlagRestricts)
	}
	layout, words := class.Layout(), class.Dimensions().Words
	for i, r := range rules.List {
		if r.Allow {
			t.setBit(layout.Allow, i)
		}
	}
	t.intervals(rules.Addresses(), layout.AddrStart, layout.AddrSet, layout.AddrBits)
	t.intervals(rules.Ports(), layout.PortStart, layout.PortSet, layout.PortBits)
	refs, err := references(rules, groups)
	if err != nil {
		return nil, err
	}
	for i := range class.Dimensions().References {
		t.put32(layout.RefGroup+4*i, unusedEntry)
	}
	for i, number := range slices.Sorted(maps.Keys(refs)) {
		t.put32(layout.RefGroup+4*i, number)
		for _, rule := range refs[number] {
			t.setBit(layout.RefBits+8*words*i, rule)
		}
	}
	for off, n := range map[int]int{
		offRules: size.Rules, offAddresses: size.AddressBounds, offPorts: size.PortBounds,
		offAddrRows: size.AddressSets, offPortRows: size.PortSets, offReferences: len(refs),
	} {
		t.put32(off, uint32(n))
	}
	return t, nil
}

// Closed makes the table of a direction that does not fit: it matches nothing and
// denies.
func Closed(rules policy.Rules, id uint32) *Table {
	t := newTable(Small, policy.Rules{Policy: rules.Policy, Direction: rules.Direction, Restricts: true}, id)
	t.setFlags(FlagRestricts | FlagClosed)
	empty, layout := policy.Rules{}, Small.Layout()
	t.intervals(empty.Addresses(), layout.AddrStart, layout.AddrSet, layout.AddrBits)
	t.intervals(empty.Ports(), layout.PortStart, layout.PortSet, layout.PortBits)
	for i := range Small.Dimensions().References {
		t.put32(layout.RefGroup+4*i, unusedEntry)
	}
	return t
}

func newTable(c Class, rules policy.Rules, id uint32) *Table {
	t := &Table{Class: c, Bytes: make([]byte, c.Layout().Bytes), Rules: rules}
	t.put32(offMagic, Magic)
	t.put32(offPolicy, id)
	if rules.Policy.Kind == policy.KindSecurityGroup {
		t.setFlags(FlagGroup)
	}
	if rules.Direction == policy.Egress {
		t.setFlags(FlagEgress)
	}
	return t
}

// references returns the rules that name each group, by the group's number.
func references(rules policy.Rules, groups GroupNumbers) (map[uint32][]int, error) {
	out := map[uint32][]int{}
	for i, r := range rules.List {
		for _, name := range r.Groups {
			number := groups[name]
			if number == 0 || number == unusedEntry {
				return nil, fmt.Errorf("%s %s: SecurityGroup %q has no number", rules.Policy, r.Path, name)
			}
			out[number] = append(out[number], i)
		}
	}
	return out, nil
}

// intervals writes one dimension.
func (t *Table) intervals(iv policy.Intervals, starts, sets, rows int) {
	d := t.Class.Dimensions()
	for i := range d.Intervals {
		start, set := unusedEntry, iv.Set[len(iv.Set)-1]
		if i < len(iv.Starts) {
			start, set = iv.Starts[i], iv.Set[i]
		}
		t.put32(starts+4*i, start)
		t.put32(sets+4*i, uint32(set)|uint32(occupied(iv.Sets[set]))<<16)
	}
	for i, set := range iv.Sets {
		for w, word := range set {
			binary.LittleEndian.PutUint64(t.Bytes[rows+8*(d.Words*i+w):], word)
		}
	}
}

// occupied is the words of a bitmap that are not zero: bit w for word w.
func occupied(bitmap []uint64) (words uint16) {
	for w, word := range bitmap {
		if word != 0 {
			words |= 1 << w
		}
	}
	return words
}

// SetGeneration writes the number under which a table is inserted.
func SetGeneration(table []byte, g uint32) {
	binary.LittleEndian.PutUint32(table[offGeneration:], g)
}

func (t *Table) put32(off int, v uint32) { binary.LittleEndian.PutUint32(t.Bytes[off:], v) }

func (t *Table) setFlags(f uint32) {
	t.put32(offFlags, binary.LittleEndian.Uint32(t.Bytes[offFlags:])|f)
}

// setBit sets bit i of the bitmap at off; little-endian words make it bit i%8 of
// byte i/8.
func (t *Table) setBit(off, i int) { t.Bytes[off+i/8] |= 1 << (i % 8) }
