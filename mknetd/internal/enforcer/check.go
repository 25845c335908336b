package enforcer

import (
	"bytes"
	"fmt"
	"net/netip"

	"mknet/spec/policy"
)

// CheckEndpoint compares what the maps hold for an endpoint with what was written
// there: its point, its identity, and the slots of the policies that it holds. It
// returns one line a difference; what is absent begins with "missing". A change
// that could not be written yet is Status's matter.
func (e *Enforcer) CheckEndpoint(a netip.Addr) ([]string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p, written := e.points[a]
	if !written {
		return []string{"missing: nothing of the endpoint has been written yet"}, nil
	}
	var out []string
	have, err := e.kernel.ReadPoint(a)
	if err != nil {
		return nil, fmt.Errorf("read the policy point of %s: %w", a, err)
	}
	if want := p.Encode(a); have == nil {
		out = append(out, "missing: what it sends and gets is not judged")
	} else if !bytes.Equal(have, want[:]) {
		out = append(out, describePoint(have, p))
	}
	have, err = e.kernel.ReadIdentity(a)
	if err != nil {
		return nil, fmt.Errorf("read the policy identity of %s: %w", a, err)
	}
	id, named := e.identities[a]
	want := id.Encode(a)
	switch {
	case named && have == nil:
		out = append(out, "missing as a peer: no rule that names a SecurityGroup matches it")
	case !named && have != nil:
		out = append(out, "is a peer with SecurityGroups and holds none")
	case named && !bytes.Equal(have, want[:]):
		out = append(out, "is not the peer that was written")
	}
	wrong, err := e.wrongSlotsLocked(p)
	for _, w := range wrong {
		out = append(out, fmt.Sprintf("policy number %d has %s", w.number, w.has))
	}
	return out, err
}

// describePoint says in what the value differs from what was written.
func describePoint(have []byte, want Point) string {
	_, p, err := DecodePoint(have)
	switch {
	case err != nil:
		return err.Error()
	case p.ACL != want.ACL:
		return fmt.Sprintf("has the NetworkACL with number %d, want %d", p.ACL, want.ACL)
	case p.Groups != want.Groups:
		return fmt.Sprintf("has the SecurityGroups with numbers %v, want %v", p.Groups[:p.groups()], want.Groups[:want.groups()])
	case p.Flags != want.Flags:
		return fmt.Sprintf("has flags %#x, want %#x", p.Flags, want.Flags)
	}
	return "is not the value that was written"
}

// wrongSlot is a direction of a policy whose slot is not what was written, or names a
// table that is gone.
type wrongSlot struct {
	number, index uint32
	has           string // instead
}

// wrongSlotsLocked looks at the slots of what a point names, and whether the table of
// each is there.
func (e *Enforcer) wrongSlotsLocked(p Point) ([]wrongSlot, error) {
	var out []wrongSlot
	for _, n := range append([]uint32{p.ACL}, p.Groups[:p.groups()]...) {
		for _, d := range policy.Directions {
			index := SlotIndex(n, d)
			h, written := e.slots[index]
			if n == 0 || !written {
				continue
			}
			have, err := e.kernel.ReadSlot(index)
			if err != nil {
				return out, fmt.Errorf("read policy slot %d: %w", index, err)
			}
			if have != h.Slot {
				out = append(out, wrongSlot{n, index, fmt.Sprintf("another slot for %s than was written", d)})
				continue
			}
			if id, compiled := have.table(); compiled {
				there, err := e.kernel.HasTable(id.class, id.generation)
				if err != nil {
					return out, fmt.Errorf("look for policy table %d: %w", id.generation, err)
				}
				if !there {
					out = append(out, wrongSlot{n, index, fmt.Sprintf("no table %d for %s any more: what reaches it is refused", id.generation, d)})
				}
			}
		}
	}
	return out, nil
}

// rereadLocked forgets of an endpoint what the maps do not hold any more as it was
// written, so that it is written anew, and reports whether there was such.
func (e *Enforcer) rereadLocked(a netip.Addr) (lost bool, err error) {
	have, err := e.kernel.ReadPoint(a)
	if err != nil {
		return false, fmt.Errorf("read the policy point of %s: %w", a, err)
	}
	p, written := e.points[a]
	if want := p.Encode(a); written && !bytes.Equal(have, want[:]) {
		delete(e.points, a)
		lost = true
	}
	if have, err = e.kernel.ReadIdentity(a); err != nil {
		return lost, fmt.Errorf("read the policy identity of %s: %w", a, err)
	}
	id, named := e.identities[a]
	switch want := id.Encode(a); {
	case have == nil && named:
		delete(e.identities, a)
		lost = true
	case have != nil && (!named || !bytes.Equal(have, want[:])):
		e.identities[a] = Identity{} // one that no endpoint has: written anew, or deleted
		lost = true
	}
	wrong, err := e.wrongSlotsLocked(p)
	for _, w := range wrong {
		h := e.slots[w.index]
		h.sum = [32]byte{}
		e.slots[w.index] = h
		lost = true
	}
	return lost, err
}
