package enforcer

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"mknet/mknetd/internal/classifier"
	"mknet/spec/policy"
)

// Numbers gives every NetworkACL and SecurityGroup its number, 1 to MaxNumber,
// which it keeps as long as it exists.
type Numbers map[policy.Key]uint32

// Endpoint is an endpoint with what the maps say of it.
type Endpoint struct {
	policy.Endpoint
	ID     uint64 // first 8 bytes of its generation
	Probes bool   // probes from the node pass
}

// direction is one direction of one policy as it is wanted.
type direction struct {
	key   policy.Key
	dir   policy.Direction
	slot  uint32 // index
	rules policy.Rules
	flags uint8             // of the slot
	table *classifier.Table // nil: no rules, no table
	sum   [32]byte          // of all that decides: equal sums mean equal verdicts
	over  []string          // limits that it is over; its table is closed then
}

type compiled struct {
	object     policy.Object
	refs       string // numbers of the groups that it names
	directions [2]direction
}

// compile makes both directions of every policy. What has not changed since the
// last call is taken from there.
func compile(set *policy.Set, numbers Numbers, last map[policy.Key]compiled) (map[policy.Key]compiled, error) {
	groups := classifier.GroupNumbers{}
	for key, n := range numbers {
		if n == 0 || n > MaxNumber {
			return nil, fmt.Errorf("%s: number %d: must be 1 to %d", key, n, MaxNumber)
		}
		if key.Kind == policy.KindSecurityGroup {
			groups[key.Name] = n
		}
	}
	out := map[policy.Key]compiled{}
	for o := range set.All() {
		r, ok := o.(interface {
			Rules(policy.Direction) policy.Rules
		})
		if !ok {
			continue // an Attachment
		}
		number, ok := numbers[o.Key()]
		if !ok {
			return nil, fmt.Errorf("%s: has no number", o.Key())
		}
		c := compiled{object: o}
		for i, d := range policy.Directions {
			c.directions[i] = direction{key: o.Key(), dir: d, slot: SlotIndex(number, d), rules: r.Rules(d)}
			for _, g := range c.directions[i].rules.References() {
				c.refs += fmt.Sprintf("%s=%d ", g, groups[g])
			}
		}
		if l, ok := last[o.Key()]; ok && l.object == o && l.refs == c.refs && l.directions[0].slot == c.directions[0].slot {
			out[o.Key()] = l
			continue
		}
		for i := range c.directions {
			if err := c.directions[i].compile(number, groups); err != nil {
				return nil, err
			}
		}
		out[o.Key()] = c
	}
	return out, nil
}

func (d *direction) compile(number uint32, groups classifier.GroupNumbers) error {
	d.flags = SlotValid
	if d.rules.Restricts {
		d.flags |= SlotRestricts
	}
	if len(d.rules.List) > 0 {
		var over *classifier.CapacityError
		t, err := classifier.Compile(d.rules, number, groups)
		switch {
		case errors.As(err, &over):
			d.over, d.table = over.Over, classifier.Closed(d.rules, number)
			d.rules = d.table.Rules
			d.flags |= SlotRestricts | SlotClosed
		case err != nil:
			return err
		default:
			d.table = t
		}
	}
	h := sha256.New()
	h.Write([]byte{d.flags})
	if d.table != nil {
		h.Write([]byte{byte(d.table.Class)})
		h.Write(d.table.Bytes)
	}
	h.Sum(d.sum[:0])
	return nil
}

// sorted iterates over compiled policies in the order of their keys.
func sorted(m map[policy.Key]compiled) []compiled {
	out := slices.Collect(maps.Values(m))
	slices.SortFunc(out, func(a, b compiled) int { return a.object.Key().Compare(b.object.Key()) })
	return out
}

// point returns what applies to an endpoint, without epochs and version.
func point(e Endpoint, p policy.Policies, numbers Numbers, all map[policy.Key]compiled) Point {
	out := Point{ID: e.ID}
	if p.ACL != nil {
		out.ACL = numbers[p.ACL.Key()]
		out.Flags |= PointAttached
		for i, flag := range []uint16{PointEgress, PointIngress} {
			if all[p.ACL.Key()].directions[i].flags&SlotRestricts != 0 {
				out.Flags |= flag
			}
		}
	}
	if len(p.Groups) > 0 {
		out.Flags |= PointAttached | PointEgress | PointIngress
	}
	if p.TooMany {
		out.Flags |= PointClosed
	} else {
		out.Groups = groupNumbers(p, numbers)
	}
	if e.Probes {
		out.Flags |= PointProbes
	}
	return out
}

func groupNumbers(p policy.Policies, numbers Numbers) (out [policy.MaxGroupsPerEndpoint]uint32) {
	for i, g := range p.Groups {
		out[i] = numbers[g.Key()]
	}
	return out
}

// identity returns the groups that an endpoint holds as a peer; false where it
// holds none, which needs no entry.
func identity(p policy.Policies, numbers Numbers) (out [policy.MaxGroupsPerEndpoint]uint32, ok bool) {
	if p.TooMany || len(p.Groups) == 0 {
		return out, false
	}
	return groupNumbers(p, numbers), true
}

// holds reports whether the point names a policy.
func (p Point) holds(number uint32) bool {
	return p.ACL == number || slices.Contains(p.Groups[:], number)
}

func sortedAddrs[V any](m map[netip.Addr]V) []netip.Addr {
	return slices.SortedFunc(maps.Keys(m), netip.Addr.Compare)
}

// fingerprint is what a rule is known by when its place has changed.
func fingerprint(r policy.Rule) string {
	r.Path = ""
	r.Groups = slices.Sorted(slices.Values(r.Groups))
	r.CIDRs = slices.SortedFunc(slices.Values(r.CIDRs), func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	return fmt.Sprint(r)
}
