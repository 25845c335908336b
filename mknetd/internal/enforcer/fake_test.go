package enforcer_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"mknet/mknetd/internal/classifier"
	"mknet/mknetd/internal/enforcer"
	"mknet/spec/policy"
)

var errInjected = errors.New("injected")

// fake is a kernel in memory. It counts what is done, fails where it is told to,
// and calls seen after every change.
type fake struct {
	tables     [3]map[uint32][]byte
	slots      map[uint32]uint64
	points     map[netip.Addr][enforcer.PointBytes]byte
	identities map[netip.Addr][enforcer.IdentityBytes]byte

	ops    []string
	failAt int // of ops, from 1; 0: never
	seen   func()
}

func newFake() *fake {
	f := &fake{slots: map[uint32]uint64{}, points: map[netip.Addr][enforcer.PointBytes]byte{}, identities: map[netip.Addr][enforcer.IdentityBytes]byte{}}
	for i := range f.tables {
		f.tables[i] = map[uint32][]byte{}
	}
	return f
}

// clone is what a daemon finds that begins anew.
func (f *fake) clone() *fake {
	g := newFake()
	for i := range f.tables {
		for k, v := range f.tables[i] {
			g.tables[i][k] = slices.Clone(v)
		}
	}
	maps.Copy(g.slots, f.slots)
	maps.Copy(g.points, f.points)
	maps.Copy(g.identities, f.identities)
	return g
}

func (f *fake) do(op string, change func()) error {
	f.ops = append(f.ops, op)
	if len(f.ops) == f.failAt {
		return errInjected
	}
	change()
	if f.seen != nil {
		f.seen()
	}
	return nil
}

func (f *fake) InsertTable(c classifier.Class, g uint32, table []byte) error {
	if _, ok := f.tables[c][g]; ok || len(table) != c.Layout().Bytes {
		return fmt.Errorf("generation %d again, or %d bytes", g, len(table))
	}
	return f.do("insert", func() { f.tables[c][g] = slices.Clone(table) })
}

func (f *fake) ReadTable(c classifier.Class, g uint32) ([]byte, error) {
	t, ok := f.tables[c][g]
	if !ok {
		return nil, fmt.Errorf("no table %d", g)
	}
	return slices.Clone(t), f.do("read", func() {})
}

func (f *fake) HasTable(c classifier.Class, g uint32) (bool, error) {
	_, ok := f.tables[c][g]
	return ok, nil
}

func (f *fake) DeleteTable(c classifier.Class, g uint32) error {
	return f.do("delete", func() { delete(f.tables[c], g) })
}

func (f *fake) Tables(c classifier.Class) ([]uint32, error) {
	return slices.Sorted(maps.Keys(f.tables[c])), nil
}

func (f *fake) SetSlot(i uint32, s enforcer.Slot) error {
	return f.do("slot", func() {
		f.slots[i] = s.Word()
		if s.Word() == 0 {
			delete(f.slots, i)
		}
	})
}

func (f *fake) ReadSlot(i uint32) (enforcer.Slot, error) { return enforcer.SlotOf(f.slots[i]), nil }

func (f *fake) ReadPoint(a netip.Addr) ([]byte, error) {
	b, ok := f.points[a]
	if !ok {
		return nil, nil
	}
	return b[:], nil
}

func (f *fake) ReadIdentity(a netip.Addr) ([]byte, error) {
	b, ok := f.identities[a]
	if !ok {
		return nil, nil
	}
	return b[:], nil
}

func (f *fake) Slots() (map[uint32]enforcer.Slot, error) {
	out := map[uint32]enforcer.Slot{}
	for i, w := range f.slots {
		out[i] = enforcer.SlotOf(w)
	}
	return out, nil
}

func (f *fake) PutPoint(a netip.Addr, p enforcer.Point) error {
	return f.do("point", func() { f.points[a] = p.Encode(a) })
}

func (f *fake) DeletePoint(a netip.Addr) error {
	return f.do("unpoint", func() { delete(f.points, a) })
}

func (f *fake) Points() (map[netip.Addr]enforcer.Point, error) {
	out := map[netip.Addr]enforcer.Point{}
	for _, b := range f.points {
		a, p, err := enforcer.DecodePoint(b[:])
		if err != nil {
			return nil, err
		}
		out[a] = p
	}
	return out, nil
}

// alter changes a point behind the enforcer's back.
func (f *fake) alter(a netip.Addr, change func(*enforcer.Point)) {
	b := f.points[a]
	_, p, err := enforcer.DecodePoint(b[:])
	if err != nil {
		panic(err)
	}
	change(&p)
	f.points[a] = p.Encode(a)
}

func (f *fake) PutIdentity(a netip.Addr, id enforcer.Identity) error {
	return f.do("identity", func() { f.identities[a] = id.Encode(a) })
}

func (f *fake) DeleteIdentity(a netip.Addr) error {
	return f.do("unidentity", func() { delete(f.identities, a) })
}

func (f *fake) Identities() (map[netip.Addr]enforcer.Identity, error) {
	out := map[netip.Addr]enforcer.Identity{}
	for _, b := range f.identities {
		a, id, err := enforcer.DecodeIdentity(b[:])
		if err != nil {
			return nil, err
		}
		out[a] = id
	}
	return out, nil
}

func (f *fake) Barrier() error { return f.do("barrier", func() {}) }

// judge is steps 1 to 7 of spec/policy-datapath.md for a packet without a flow, on
// the bytes of the maps.
func (f *fake) judge(t *testing.T, d policy.Direction, self netip.Addr, p policy.Packet) policy.Reason {
	t.Helper()
	le := binary.LittleEndian
	point, ok := f.points[self]
	flags := le.Uint16(point[80:])
	enforced := flags&uint16(d) != 0 // the flags of the directions are their numbers
	switch {
	case p.Frame == policy.ARP:
		return policy.NotEnforced
	case p.Frame == policy.OtherFrame && enforced:
		return policy.FrameDrop
	case p.Frame == policy.IPv4 && p.Unreadable && enforced:
		return policy.ParseDrop
	case !ok:
		return policy.NoEndpoint
	case p.Frame == policy.OtherFrame || p.Unreadable || flags&enforcer.PointAttached == 0:
		return policy.NotEnforced
	}
	peer, port := p.Source, p.DestinationPort
	if d == policy.Egress {
		peer = p.Destination
	}
	if !policy.Protocol(p.Protocol).HasPorts() {
		port = 0
	}
	wire := peer.As4()
	identity := f.identities[peer]
	var groups []uint32
	for i := 0; i < policy.MaxGroupsPerEndpoint && le.Uint32(identity[8+4*i:]) != 0; i++ {
		groups = append(groups, le.Uint32(identity[8+4*i:]))
	}
	look := func(number uint32) (matched, allow, restricts bool) {
		s := enforcer.SlotOf(f.slots[enforcer.SlotIndex(number, d)])
		if s.Flags&enforcer.SlotValid == 0 {
			t.Fatalf("policy number %d of %s has no slot for %s", number, self, d)
		}
		restricts = s.Flags&enforcer.SlotRestricts != 0
		if s.Class == 0 {
			return false, false, restricts
		}
		c := classifier.Class(s.Class - 1)
		table, ok := f.tables[c][s.Generation]
		if !ok {
			t.Fatalf("slot of policy number %d, %s, names %s table %d, which is not there", number, d, c, s.Generation)
		}
		h, err := classifier.ParseHeader(table)
		if err != nil || h.Policy != number || h.Generation != s.Generation || h.Flags&classifier.FlagRestricts != 0 != restricts {
			t.Fatalf("table of policy number %d, slot %+v: header %+v, %v", number, s, h, err)
		}
		rule, allow := classifier.Lookup(c, table, binary.BigEndian.Uint32(wire[:]), policy.PortKey(p.Protocol, port), groups)
		if rule != classifier.NoRule {
			at := table[c.Layout().Hits+8*rule:]
			le.PutUint64(at, le.Uint64(at)+1)
		}
		return rule != classifier.NoRule, allow, restricts
	}
	last := policy.NotEnforced
	if number := le.Uint32(point[4:]); number != 0 {
		matched, allow, restricts := look(number)
		if matched && !allow || !matched && restricts {
			return policy.ACLDrop
		}
		last = policy.ACLPass
	}
	if flags&enforcer.PointClosed != 0 {
		return policy.GroupDrop
	}
	restricted, any := false, false
	for i := range policy.MaxGroupsPerEndpoint {
		number := le.Uint32(point[8+4*i:])
		if number == 0 {
			break
		}
		any = true
		matched, _, restricts := look(number)
		if matched {
			return policy.GroupPass
		}
		restricted = restricted || restricts
	}
	switch {
	case restricted:
		return policy.GroupDrop
	case any:
		return policy.GroupPass
	}
	return last
}
