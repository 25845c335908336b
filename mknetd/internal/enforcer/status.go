package enforcer

import (
	"fmt"

	"mknet/mknetd/internal/classifier"
	"mknet/spec/policy"
)

// Status is how far the maps are what they should be.
type Status struct {
	Err     error    // why not; nil: they are
	Closed  []string // directions over a limit, one line each
	TooMany []string // endpoints that more groups select than one can hold
	Count   [3]int   // tables by class
	Bytes   int      // of the tables, in the kernel
	Points  int      // endpoints
}

// Status returns the state as of the last call.
func (e *Enforcer) Status() Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.statusLocked()
}

// TryStatus is Status for those who do not wait; false while a call is at work.
func (e *Enforcer) TryStatus() (Status, bool) {
	if !e.mu.TryLock() {
		return Status{}, false
	}
	defer e.mu.Unlock()
	return e.statusLocked(), true
}

func (e *Enforcer) statusLocked() Status {
	s := Status{Err: e.err, Points: len(e.points)}
	for _, c := range sorted(e.compiled) {
		for _, d := range c.directions {
			for _, over := range d.over {
				s.Closed = append(s.Closed, fmt.Sprintf("%s %s is closed: it %s", d.key, d.dir, over))
			}
		}
	}
	for _, a := range sortedAddrs(e.endpoints) {
		ep := e.endpoints[a]
		if p := e.set.For(ep.Endpoint, e.pools); p.TooMany {
			s.TooMany = append(s.TooMany, fmt.Sprintf("endpoint %s (%s/%s) is closed: %d SecurityGroups select it, at most %d can", a, ep.Namespace, ep.Name, len(p.Groups), policy.MaxGroupsPerEndpoint))
		}
	}
	count := func(id tableID) {
		s.Count[id.class]++
		s.Bytes += id.class.KernelBytes()
	}
	for _, h := range e.slots {
		if id, ok := h.table(); ok {
			count(id)
		}
	}
	for id := range e.orphans {
		count(id)
	}
	return s
}

// RuleCount is how many packets a rule has decided: only those that were judged,
// one a flow as a rule.
type RuleCount struct {
	Rule    string // its place in the document
	Packets uint64
}

// Counts returns the counts of a direction, in the order of its rules. A rule keeps
// its count when the document changes around it, and loses it with the daemon.
func (e *Enforcer) Counts(key policy.Key, d policy.Direction) ([]RuleCount, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	number, ok := e.numbers[key]
	if !ok {
		return nil, nil
	}
	slot := SlotIndex(number, d)
	h := e.slots[slot]
	id, ok := h.table()
	if !ok || len(h.rules.List) == 0 {
		return nil, nil
	}
	table, err := e.kernel.ReadTable(id.class, id.generation)
	if err != nil {
		return nil, fmt.Errorf("%s %s: read its table: %w", key, d, err)
	}
	out := make([]RuleCount, len(h.rules.List))
	for i, hits := range classifier.Hits(id.class, table, len(h.rules.List)) {
		r := h.rules.List[i]
		out[i] = RuleCount{r.Path, hits + e.counts[slot][fingerprint(r)]}
	}
	return out, nil
}

// keepCountsLocked adds the counts of a table that goes to those of its policy.
// Rules that are equal share theirs.
func (e *Enforcer) keepCountsLocked(id tableID, o orphan) error {
	if _, ok := e.slots[o.slot]; !ok {
		delete(e.counts, o.slot)
		return nil
	}
	// Where somebody else deleted the table its counts are lost.
	if there, err := e.kernel.HasTable(id.class, id.generation); err == nil && !there {
		return nil
	}
	table, err := e.kernel.ReadTable(id.class, id.generation)
	if err != nil {
		return fmt.Errorf("read the counts of %s policy table %d: %w", id.class, id.generation, err)
	}
	if e.counts[o.slot] == nil {
		e.counts[o.slot] = map[string]uint64{}
	}
	for i, hits := range classifier.Hits(id.class, table, len(o.rules.List)) {
		e.counts[o.slot][fingerprint(o.rules.List[i])] += hits
	}
	// Counts of rules that are gone go too.
	known := map[string]bool{}
	for _, r := range e.slots[o.slot].rules.List {
		known[fingerprint(r)] = true
	}
	for f := range e.counts[o.slot] {
		if !known[f] {
			delete(e.counts[o.slot], f)
		}
	}
	return nil
}
