package enforcer

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"mknet/mknetd/internal/classifier"
	"mknet/spec/policy"
)

// Enforcer is the policy maps and what they are to hold. Its methods are safe for
// concurrent use and take turns.
type Enforcer struct {
	kernel Kernel

	mu sync.Mutex

	// What is wanted.
	set       *policy.Set
	numbers   Numbers
	pools     policy.Pools
	endpoints map[netip.Addr]Endpoint
	compiled  map[policy.Key]compiled

	// What the maps hold.
	slots      map[uint32]held
	points     map[netip.Addr]Point
	identities map[netip.Addr]Identity

	stale   map[netip.Addr]uint8 // points whose policies have changed since they were written: 1 egress, 2 ingress
	orphans map[tableID]orphan   // tables that no slot names any more
	counts  map[uint32]map[string]uint64
	last    uint32 // generations, versions and epochs: each is used once
	err     error  // of the last call; nil: all is as wanted
}

// held is a slot as it was written.
type held struct {
	Slot
	sum   [32]byte // zero: written by an earlier process
	rules policy.Rules
}

// orphan is a table on its way out, with what is needed to keep its counts.
type orphan struct {
	slot  uint32
	rules policy.Rules
}

// Open reads the maps. Nothing is written before the first Apply, which is to be
// done before programs are attached; it puts a new table into every slot and
// raises every epoch: what was admitted before is judged again.
func Open(k Kernel, pools policy.Pools) (*Enforcer, error) {
	e := &Enforcer{
		kernel: marked{k}, set: &policy.Set{}, pools: pools, endpoints: map[netip.Addr]Endpoint{},
		slots: map[uint32]held{}, stale: map[netip.Addr]uint8{}, orphans: map[tableID]orphan{}, counts: map[uint32]map[string]uint64{},
	}
	slots, err := k.Slots()
	if err != nil {
		return nil, fmt.Errorf("read the policy slots: %w", err)
	}
	named := map[tableID]bool{}
	for i, s := range slots {
		e.slots[i] = held{Slot: s}
		e.last = max(e.last, s.Generation)
		if id, ok := s.table(); ok {
			named[id] = true
		}
	}
	if e.points, err = k.Points(); err != nil {
		return nil, fmt.Errorf("read the policy points: %w", err)
	}
	for a, p := range e.points {
		e.last = max(e.last, p.Epoch[0], p.Epoch[1], p.Version)
		e.stale[a] = 3
	}
	if e.identities, err = k.Identities(); err != nil {
		return nil, fmt.Errorf("read the policy identities: %w", err)
	}
	for _, id := range e.identities {
		e.last = max(e.last, id.Epoch, id.Version)
	}
	for _, c := range classifier.Classes {
		generations, err := k.Tables(c)
		if err != nil {
			return nil, fmt.Errorf("list the %s policy tables: %w", c, err)
		}
		for _, g := range generations {
			e.last = max(e.last, g)
			if id := (tableID{c, g}); !named[id] {
				e.orphans[id] = orphan{}
			}
		}
	}
	return e, nil
}

// Apply makes documents and endpoints the wanted state and brings the maps to it.
// An error from compiling leaves the wanted state as it was; any other one leaves
// every policy old or new, and Retry goes on.
func (e *Enforcer) Apply(set *policy.Set, numbers Numbers, endpoints []Endpoint) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	all, err := compile(set, numbers, e.compiled)
	if err != nil {
		return err
	}
	e.set, e.numbers, e.compiled = set, numbers, all
	e.endpoints = map[netip.Addr]Endpoint{}
	for _, ep := range endpoints {
		e.endpoints[ep.Address] = ep
	}
	return e.reconcileLocked()
}

// SetPolicies is Apply with the endpoints as they are.
func (e *Enforcer) SetPolicies(set *policy.Set, numbers Numbers) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	all, err := compile(set, numbers, e.compiled)
	if err != nil {
		return err
	}
	e.set, e.numbers, e.compiled = set, numbers, all
	return e.reconcileLocked()
}

// SetEndpoint adds an endpoint, or changes one, or puts right what somebody else
// has made of its entries, and reports whether it had to write. It is to return
// before the first packet of the endpoint: without a point nothing is judged.
func (e *Enforcer) SetEndpoint(ep Endpoint) (changed bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.endpoints[ep.Address] = ep
	lost, err := e.rereadLocked(ep.Address)
	if err != nil {
		return false, err
	}
	before, written := e.points[ep.Address]
	if lost {
		err = e.reconcileLocked()
	} else {
		err = e.endpointLocked(ep.Address)
	}
	return lost || !written || e.points[ep.Address] != before, err
}

// RemoveEndpoint forgets an endpoint, and reports whether there was one; absent is
// success, and so is an address that has a new owner already.
func (e *Enforcer) RemoveEndpoint(ep Endpoint) (changed bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if owner, owned := e.endpoints[ep.Address]; owned && owner.ID != ep.ID {
		return false, nil
	}
	_, changed = e.points[ep.Address]
	delete(e.endpoints, ep.Address)
	return changed, e.endpointLocked(ep.Address)
}

// endpointLocked brings one endpoint up to date. What is still to be done for
// others, or for a policy, does not hold it up: it gets each policy as it is.
func (e *Enforcer) endpointLocked(a netip.Addr) error {
	err := errors.Join(e.identityLocked(a), e.pointLocked(a))
	if e.err != nil || err != nil {
		if all := e.reconcileLocked(); err != nil {
			err = all // what stood in the way may be done now
		}
	}
	return err
}

// missingLocked returns a policy of the point that has no slot.
func (e *Enforcer) missingLocked(p Point) (number uint32, ok bool) {
	for _, n := range append([]uint32{p.ACL}, p.Groups[:]...) {
		for _, d := range policy.Directions {
			if n != 0 && e.slots[SlotIndex(n, d)].Flags&SlotValid == 0 {
				return n, false
			}
		}
	}
	return 0, true
}

// Retry goes on where the last call failed; it writes nothing when all is as it
// should be.
func (e *Enforcer) Retry() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.reconcileLocked()
}

func (e *Enforcer) reconcileLocked() error {
	e.err = e.stepsLocked()
	return e.err
}

// stepsLocked is steps 3 to 9 of spec/policy-datapath.md. It ends at the first
// error: a later step must not see an earlier one undone.
func (e *Enforcer) stepsLocked() error {
	wanted := map[uint32]bool{}
	for _, c := range sorted(e.compiled) {
		for _, d := range c.directions {
			wanted[d.slot] = true
			if err := e.slotLocked(d); err != nil {
				return fmt.Errorf("%s %s: %w", d.key, d.dir, err)
			}
		}
	}
	for _, step := range []func(netip.Addr) error{e.identityLocked, e.pointLocked} {
		for _, a := range e.addressesLocked() {
			if err := step(a); err != nil {
				return err
			}
		}
	}
	for i, s := range e.slots {
		if wanted[i] {
			continue
		}
		if err := e.kernel.SetSlot(i, Slot{}); err != nil {
			return fmt.Errorf("empty policy slot %d: %w", i, err)
		}
		e.retireLocked(i, s)
		delete(e.slots, i)
	}
	return e.sweepLocked()
}

// slotLocked puts a direction's table and slot in place, where they differ.
func (e *Enforcer) slotLocked(d direction) error {
	before := e.slots[d.slot]
	if before.sum == d.sum {
		return nil
	}
	now := held{Slot: Slot{Flags: d.flags}, sum: d.sum, rules: d.rules}
	if d.table != nil {
		now.Generation, now.Class = e.nextLocked(), uint8(d.table.Class)+1
		table := slices.Clone(d.table.Bytes)
		classifier.SetGeneration(table, now.Generation)
		// Until a slot names it, it is one to be removed.
		e.orphans[tableID{d.table.Class, now.Generation}] = orphan{}
		if err := e.kernel.InsertTable(d.table.Class, now.Generation, table); err != nil {
			return fmt.Errorf("insert a %s table: %w", d.table.Class, err)
		}
	}
	if err := e.kernel.SetSlot(d.slot, now.Slot); err != nil {
		return fmt.Errorf("write slot %d: %w", d.slot, err)
	}
	if id, ok := now.table(); ok {
		delete(e.orphans, id)
	}
	e.slots[d.slot] = now
	e.retireLocked(d.slot, before)
	for a, p := range e.points {
		if p.holds(d.slot >> 1) {
			e.stale[a] |= uint8(d.dir)
		}
	}
	return nil
}

// retireLocked notes that no slot names a table any more.
func (e *Enforcer) retireLocked(slot uint32, s held) {
	if id, ok := s.table(); ok && s.Flags&SlotValid != 0 {
		e.orphans[id] = orphan{slot, s.rules}
	}
}

// addressesLocked are those that have or should have a point or an identity.
func (e *Enforcer) addressesLocked() []netip.Addr {
	all := map[netip.Addr]bool{}
	for a := range e.endpoints {
		all[a] = true
	}
	for a := range e.points {
		all[a] = true
	}
	for a := range e.identities {
		all[a] = true
	}
	return sortedAddrs(all)
}

func (e *Enforcer) identityLocked(a netip.Addr) error {
	before, there := e.identities[a]
	var groups [policy.MaxGroupsPerEndpoint]uint32
	ep, wanted := e.endpoints[a]
	if wanted {
		groups, wanted = identity(e.set.For(ep.Endpoint, e.pools), e.numbers)
	}
	switch {
	case !wanted && there:
		if err := e.kernel.DeleteIdentity(a); err != nil {
			return fmt.Errorf("delete the identity of %s: %w", a, err)
		}
		delete(e.identities, a)
	case wanted && (!there || before.Groups != groups):
		now := Identity{Epoch: e.nextLocked(), Groups: groups, Version: e.nextLocked()}
		if err := e.kernel.PutIdentity(a, now); err != nil {
			return fmt.Errorf("write the identity of %s: %w", a, err)
		}
		e.identities[a] = now
	}
	return nil
}

func (e *Enforcer) pointLocked(a netip.Addr) error {
	before, there := e.points[a]
	ep, wanted := e.endpoints[a]
	if !wanted {
		if there {
			if err := e.kernel.DeletePoint(a); err != nil {
				return fmt.Errorf("delete the policy point of %s: %w", a, err)
			}
			delete(e.points, a)
		}
		delete(e.stale, a)
		return nil
	}
	now := point(ep, e.set.For(ep.Endpoint, e.pools), e.numbers, e.compiled)
	now.Epoch, now.Version = before.Epoch, before.Version
	stale := e.stale[a]
	if !there || now.judges() != before.judges() {
		stale = 3
	}
	if stale == 0 && now == before {
		return nil
	}
	if n, ok := e.missingLocked(now); !ok {
		return fmt.Errorf("policy point of %s: policy number %d has no slot yet", a, n)
	}
	for i, d := range policy.Directions {
		if stale&uint8(d) != 0 {
			now.Epoch[i] = e.nextLocked()
		}
	}
	now.Version = e.nextLocked()
	if err := e.kernel.PutPoint(a, now); err != nil {
		return fmt.Errorf("write the policy point of %s: %w", a, err)
	}
	e.points[a] = now
	delete(e.stale, a)
	return nil
}

// sweepLocked deletes the tables that no slot names, once no program can still be
// reading them.
func (e *Enforcer) sweepLocked() error {
	if len(e.orphans) == 0 {
		return nil
	}
	if err := e.kernel.Barrier(); err != nil {
		return fmt.Errorf("wait for programs at work: %w", err)
	}
	for id, o := range e.orphans {
		if len(o.rules.List) > 0 {
			if err := e.keepCountsLocked(id, o); err != nil {
				return err
			}
			o.rules = policy.Rules{} // kept once, also when the deletion is tried again
			e.orphans[id] = o
		}
		if err := e.kernel.DeleteTable(id.class, id.generation); err != nil {
			return fmt.Errorf("delete %s policy table %d: %w", id.class, id.generation, err)
		}
		delete(e.orphans, id)
	}
	return nil
}

// nextLocked returns a number that was never used; 0 means "none" everywhere.
func (e *Enforcer) nextLocked() uint32 {
	if e.last++; e.last == 0 {
		e.last++
	}
	return e.last
}
