package enforcer

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"mknet/mknetd/internal/classifier"
	"mknet/spec/policy"
)

// MaxNumber is the highest number of a policy; 0 is none.
const MaxNumber = 4095

// Slots is the number of entries of the map of slots.
const Slots = 2 * (MaxNumber + 1)

// SlotIndex is where a policy's direction has its slot.
func SlotIndex(number uint32, d policy.Direction) uint32 {
	if d == policy.Ingress {
		return number<<1 | 1
	}
	return number << 1
}

// Slot says where a direction of a policy is. It is struct slot of
// spec/policy-datapath.md, which is one 64-bit number.
type Slot struct {
	Generation uint32 // of the table; 0 where there is none
	Class      uint8  // 0: no rules and no table; else 1 + classifier.Class
	Flags      uint8
}

// Flags of a slot.
const (
	SlotValid     uint8 = 1 << 0
	SlotRestricts uint8 = 1 << 1
	SlotClosed    uint8 = 1 << 2
)

// Word returns the number that the map holds.
func (s Slot) Word() uint64 {
	return uint64(s.Generation) | uint64(s.Class)<<32 | uint64(s.Flags)<<40
}

// SlotOf is the inverse of Word.
func SlotOf(w uint64) Slot {
	return Slot{Generation: uint32(w), Class: uint8(w >> 32), Flags: uint8(w >> 40)}
}

// table returns where the slot's table is.
func (s Slot) table() (tableID, bool) {
	return tableID{classifier.Class(s.Class - 1), s.Generation}, s.Class != 0
}

// tableID names a table in the kernel.
type tableID struct {
	class      classifier.Class
	generation uint32
}

// Flags of a point.
const (
	PointEgress   uint16 = 1 << 0 // egress is enforced: what cannot be judged is dropped
	PointIngress  uint16 = 1 << 1
	PointAttached uint16 = 1 << 2 // something is attached: admissions are remembered
	PointClosed   uint16 = 1 << 3 // too many groups: the layer denies everything
	PointProbes   uint16 = 1 << 4 // probes from the node pass
)

// Point is what applies to an endpoint: struct point. Its version and address are
// added when it is written.
type Point struct {
	ACL    uint32
	Groups [policy.MaxGroupsPerEndpoint]uint32 // 0 behind the last
	Epoch  [2]uint32                           // egress, ingress
	Flags  uint16
	ID     uint64 // first 8 bytes of the endpoint's generation

	Version uint32
}

// PointBytes and IdentityBytes are sizes of values.
const (
	PointBytes    = 104
	IdentityBytes = 80
)

// judges is the point without what changes no verdict on an admitted flow.
func (p Point) judges() Point {
	p.Epoch, p.Version = [2]uint32{}, 0
	p.Flags &= PointAttached | PointClosed
	return p
}

func (p Point) groups() int {
	n := 0
	for n < len(p.Groups) && p.Groups[n] != 0 {
		n++
	}
	return n
}

// Encode returns the map's value.
func (p Point) Encode(a netip.Addr) [PointBytes]byte {
	var b [PointBytes]byte
	le := binary.LittleEndian
	le.PutUint32(b[0:], p.Version)
	le.PutUint32(b[4:], p.ACL)
	for i, g := range p.Groups {
		le.PutUint32(b[8+4*i:], g)
	}
	le.PutUint32(b[72:], p.Epoch[0])
	le.PutUint32(b[76:], p.Epoch[1])
	le.PutUint16(b[80:], p.Flags)
	le.PutUint16(b[82:], uint16(p.groups()))
	wire := a.As4()
	copy(b[84:], wire[:])
	le.PutUint64(b[88:], p.ID)
	le.PutUint32(b[100:], p.Version)
	return b
}

// DecodePoint reads a map's value.
func DecodePoint(b []byte) (netip.Addr, Point, error) {
	if len(b) != PointBytes {
		return netip.Addr{}, Point{}, fmt.Errorf("policy point: has %d bytes, want %d", len(b), PointBytes)
	}
	le := binary.LittleEndian
	p := Point{ACL: le.Uint32(b[4:]), Epoch: [2]uint32{le.Uint32(b[72:]), le.Uint32(b[76:])}, Flags: le.Uint16(b[80:]), ID: le.Uint64(b[88:]), Version: le.Uint32(b)}
	for i := range p.Groups {
		p.Groups[i] = le.Uint32(b[8+4*i:])
	}
	return netip.AddrFrom4([4]byte(b[84:88])), p, nil
}

// Identity is the groups that an address holds as a peer: struct identity.
type Identity struct {
	Epoch   uint32
	Groups  [policy.MaxGroupsPerEndpoint]uint32
	Version uint32
}

// Encode returns the map's value.
func (id Identity) Encode(a netip.Addr) [IdentityBytes]byte {
	var b [IdentityBytes]byte
	le := binary.LittleEndian
	le.PutUint32(b[0:], id.Version)
	le.PutUint32(b[4:], id.Epoch)
	for i, g := range id.Groups {
		le.PutUint32(b[8+4*i:], g)
	}
	wire := a.As4()
	copy(b[72:], wire[:])
	le.PutUint32(b[76:], id.Version)
	return b
}

// DecodeIdentity reads a map's value.
func DecodeIdentity(b []byte) (netip.Addr, Identity, error) {
	if len(b) != IdentityBytes {
		return netip.Addr{}, Identity{}, fmt.Errorf("policy identity: has %d bytes, want %d", len(b), IdentityBytes)
	}
	le := binary.LittleEndian
	id := Identity{Epoch: le.Uint32(b[4:]), Version: le.Uint32(b)}
	for i := range id.Groups {
		id.Groups[i] = le.Uint32(b[8+4*i:])
	}
	return netip.AddrFrom4([4]byte(b[72:76])), id, nil
}
