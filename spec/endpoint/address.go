package endpoint

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// Pools are the two address pools that slots are cut from.
type Pools struct {
	Child   netip.Prefix // a canonical private IPv4 prefix, /12 to /30
	Transit netip.Prefix // never shown to a workload
}

// DefaultPools are used when the daemon's configuration names none.
var DefaultPools = Pools{
	Child:   netip.MustParsePrefix("172.30.0.0/16"),
	Transit: netip.MustParsePrefix("100.64.0.0/10"),
}

// SlotBits is the prefix length of one slot: a /30 with two usable addresses.
const SlotBits = 30

// Addresses are the four addresses of one slot.
type Addresses struct {
	Subnet      netip.Prefix // the child's /30
	Gateway     netip.Addr   // first usable: on the TUN in the CNI namespace
	Child       netip.Addr   // second usable: on mkn0 in the child
	TransitHost netip.Addr   // first usable of the transit /30: on the host veth
	TransitPeer netip.Addr   // second usable of the transit /30: on mkhost0
}

// Validate checks both pools: IPv4, canonical, the child pool private (RFC
// 1918) and /12 to /30, the transit pool at least as large, and no overlap.
func (p Pools) Validate() error {
	for _, q := range []struct {
		name string
		p    netip.Prefix
	}{{"child pool", p.Child}, {"transit pool", p.Transit}} {
		switch {
		case !q.p.IsValid() || !q.p.Addr().Is4():
			return fmt.Errorf("%s %q: must be an IPv4 prefix", q.name, q.p)
		case q.p != q.p.Masked():
			return fmt.Errorf("%s %s: has host bits set, did you mean %s", q.name, q.p, q.p.Masked())
		}
	}
	switch {
	case !p.Child.Addr().IsPrivate():
		return fmt.Errorf("child pool %s: must be private (RFC 1918)", p.Child)
	case p.Child.Bits() < 12 || p.Child.Bits() > SlotBits:
		return fmt.Errorf("child pool %s: must be /12 to /%d", p.Child, SlotBits)
	case p.Transit.Bits() > p.Child.Bits():
		return fmt.Errorf("transit pool %s: has fewer slots than the child pool %s", p.Transit, p.Child)
	case p.Child.Overlaps(p.Transit):
		return fmt.Errorf("child pool %s and transit pool %s overlap", p.Child, p.Transit)
	}
	return nil
}

// Slots is the number of endpoints that the child pool holds.
func (p Pools) Slots() uint32 { return 1 << (SlotBits - p.Child.Bits()) }

// At returns the addresses of a slot. It panics when the slot is not below
// Slots: the allocator never hands out such a slot, and a slot read from disk is
// checked first.
func (p Pools) At(slot uint32) Addresses {
	if slot >= p.Slots() {
		panic(fmt.Sprintf("slot %d: pool %s has %d", slot, p.Child, p.Slots()))
	}
	child, transit := offset(p.Child.Addr(), slot*4), offset(p.Transit.Addr(), slot*4)
	return Addresses{
		Subnet:      netip.PrefixFrom(child, SlotBits),
		Gateway:     offset(child, 1),
		Child:       offset(child, 2),
		TransitHost: offset(transit, 1),
		TransitPeer: offset(transit, 2),
	}
}

// SlotOf returns the slot whose child address is addr. Only the child's own
// address of a /30 names a slot.
func (p Pools) SlotOf(addr netip.Addr) (uint32, error) {
	if !p.Child.Contains(addr) {
		return 0, fmt.Errorf("address %s: is not in the child pool %s", addr, p.Child)
	}
	n := toUint(addr) - toUint(p.Child.Addr())
	if n%4 != 2 {
		return 0, fmt.Errorf("address %s: is not a child address, the nearest is %s", addr, offset(p.Child.Addr(), n/4*4+2))
	}
	return n / 4, nil
}

func toUint(a netip.Addr) uint32 { b := a.As4(); return binary.BigEndian.Uint32(b[:]) }

func offset(a netip.Addr, n uint32) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], toUint(a)+n)
	return netip.AddrFrom4(b)
}
