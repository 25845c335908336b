// Package alloc decides which /30 slot an endpoint gets. It is pure: it opens
// nothing and reads no clock; the store keeps what it must remember and the
// engine passes the time. It implements spec/topology.md, "Addresses".
//
// Slots that were never used go first, in ascending order; then the one that was
// freed longest ago. A freed slot rests for a quarantine, which only two things
// override: a pool that has nothing else left, and an address asked for by name.
package alloc

import (
	"container/heap"
	"fmt"
	"sync"
	"time"
)

// DefaultQuarantine is how long a freed slot rests where the configuration does
// not say: longer than the 30 s after which Linux forgets an unreplied UDP
// conntrack entry (nf_conntrack_udp_timeout).
const DefaultQuarantine = 30 * time.Second

// Instant is a moment on CLOCK_BOOTTIME. Moments of different boots cannot be
// compared; a slot freed in another boot has served its quarantine.
type Instant struct {
	BootID string        // /proc/sys/kernel/random/boot_id
	At     time.Duration // CLOCK_BOOTTIME since that boot
}

// Freed is a slot that was in use and is free again. Its fields are those of the
// store's record of the same name, so that one converts to the other.
type Freed struct {
	Slot   uint32
	BootID string
	At     time.Duration
}

// Grant is a slot handed out by Allocate or Claim.
type Grant struct {
	Slot uint32
	// Early is set when the slot had not finished its quarantine: what the
	// previous owner left in conntrack may still be there.
	Early bool
}

// Counts describes the pool; Live + Freed + NeverUsed is Total.
type Counts struct {
	Total       uint32
	Live        uint32
	Freed       uint32 // all freed ones, quarantined or not
	NeverUsed   uint32
	Quarantined uint32 // those of Freed that still rest
}

// Free is the number of slots that Allocate can still hand out.
func (c Counts) Free() uint32 { return c.Total - c.Live }

// ExhaustedError is returned by Allocate when every slot is live.
type ExhaustedError struct{ Counts Counts }

func (e *ExhaustedError) Error() string {
	return fmt.Sprintf("child pool is exhausted: all %d addresses are in use (delete endpoints or configure a larger childPool)", e.Counts.Total)
}

// SlotError is returned where a slot is named that does not exist, or whose
// state does not allow the step.
type SlotError struct {
	Slot   uint32
	Reason string
}

func (e *SlotError) Error() string { return fmt.Sprintf("slot %d: %s", e.Slot, e.Reason) }

type state uint8

const (
	neverUsed state = iota
	live
	freed
)

// none ends the freed list; no pool has that many slots (a /12 has 2^18).
const none = ^uint32(0)

// node is one slot. prev and next link the freed ones, oldest first.
type node struct {
	prev, next uint32
	state      state
	fresh      bool   // live, and never used before: Cancel makes it neverUsed again
	fromHead   bool   // live, and taken by its turn: Cancel gives it its place back
	returned   bool   // stands in Allocator.returned
	turn       uint64 // ascending along the freed list
	freedAt    Instant
}

// Allocator hands out slots. It is safe for concurrent use. Allocate, Claim,
// Cancel and Free take constant time, apart from the heap of cancelled fresh
// slots, which is as large as the number of ADDs that failed before their record
// was written.
type Allocator struct {
	quarantine time.Duration

	mu         sync.Mutex
	slots      []node
	head, tail uint32 // freed list
	counts     Counts
	lastTurn   uint64
	cursor     uint32   // every neverUsed slot below it is in returned
	returned   slotHeap // neverUsed slots below cursor
}

// MaxSlots bounds a pool: a /12 cut into /30s.
const MaxSlots = 1 << 18

// New makes an allocator of slots 0 to total-1 from what the store knows: the
// live slots in any order, and the freed ones oldest first. A quarantine of 0
// turns it off. A slot out of range or named twice is a *SlotError.
func New(total uint32, quarantine time.Duration, liveSlots []uint32, freedSlots []Freed) (*Allocator, error) {
	if total == 0 || total > MaxSlots {
		return nil, fmt.Errorf("pool of %d slots: must have 1 to %d", total, MaxSlots)
	}
	if quarantine < 0 {
		return nil, fmt.Errorf("quarantine %s: must not be negative", quarantine)
	}
	a := &Allocator{quarantine: quarantine, slots: make([]node, total), head: none, tail: none}
	a.counts = Counts{Total: total, NeverUsed: total}
	for _, s := range liveSlots {
		if err := a.fresh(s); err != nil {
			return nil, err
		}
		a.slots[s] = node{state: live}
		a.counts.NeverUsed--
		a.counts.Live++
	}
	for _, f := range freedSlots {
		if err := a.fresh(f.Slot); err != nil {
			return nil, err
		}
		a.counts.NeverUsed--
		a.pushBack(f.Slot, Instant{BootID: f.BootID, At: f.At})
	}
	return a, nil
}

// fresh reports a slot that New has already placed, or that the pool lacks.
func (a *Allocator) fresh(s uint32) error {
	switch {
	case s >= uint32(len(a.slots)):
		return &SlotError{Slot: s, Reason: fmt.Sprintf("the pool has only %d", len(a.slots))}
	case a.slots[s].state != neverUsed:
		return &SlotError{Slot: s, Reason: "is named twice"}
	}
	return nil
}

// Allocate hands out the next slot. When all are live it returns an
// *ExhaustedError.
func (a *Allocator) Allocate(now Instant) (Grant, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s, ok := a.nextNeverUsed(); ok {
		a.take(s)
		return Grant{Slot: s}, nil
	}
	if a.head == none {
		return Grant{}, &ExhaustedError{Counts: a.countsLocked(now)}
	}
	// The head has rested longest. Where even it still rests, nothing else is
	// left, which is what overrides the quarantine.
	s := a.head
	early := a.rests(s, now)
	a.take(s)
	return Grant{Slot: s, Early: early}, nil
}

// Claim hands out one slot by name, quarantined or not; a live one is a
// *SlotError.
func (a *Allocator) Claim(slot uint32, now Instant) (Grant, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if slot >= uint32(len(a.slots)) {
		return Grant{}, &SlotError{Slot: slot, Reason: fmt.Sprintf("the pool has only %d", len(a.slots))}
	}
	if a.slots[slot].state == live {
		return Grant{}, &SlotError{Slot: slot, Reason: "is in use"}
	}
	early := a.slots[slot].state == freed && a.rests(slot, now)
	a.take(slot)
	return Grant{Slot: slot, Early: early}, nil
}

// Cancel takes back a grant whose record was never written. A slot that was taken
// by its turn stands again where it stood; a freed one that was claimed by name
// rests anew.
func (a *Allocator) Cancel(slot uint32, now Instant) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.mustBeLive(slot); err != nil {
		return err
	}
	n := &a.slots[slot]
	a.counts.Live--
	switch {
	case n.fresh:
		n.state, n.fresh = neverUsed, false
		a.counts.NeverUsed++
		if slot < a.cursor && !n.returned {
			n.returned = true
			heap.Push(&a.returned, slot)
		}
	case n.fromHead:
		a.reinsert(slot)
	default:
		a.pushBack(slot, now)
	}
	return nil
}

// Free takes back a slot whose record is gone; it joins the end of the queue.
func (a *Allocator) Free(slot uint32, now Instant) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.mustBeLive(slot); err != nil {
		return err
	}
	a.counts.Live--
	a.pushBack(slot, now)
	return nil
}

// Counts returns the present numbers. Counting the quarantined ones visits only
// those, newest first.
func (a *Allocator) Counts(now Instant) Counts {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.countsLocked(now)
}

func (a *Allocator) countsLocked(now Instant) Counts {
	c := a.counts
	for s := a.tail; s != none && a.rests(s, now); s = a.slots[s].prev {
		c.Quarantined++
	}
	return c
}

func (a *Allocator) mustBeLive(slot uint32) error {
	switch {
	case slot >= uint32(len(a.slots)):
		return &SlotError{Slot: slot, Reason: fmt.Sprintf("the pool has only %d", len(a.slots))}
	case a.slots[slot].state != live:
		return &SlotError{Slot: slot, Reason: "is not in use"}
	}
	return nil
}

// rests reports whether a freed slot is still in quarantine.
func (a *Allocator) rests(slot uint32, now Instant) bool {
	at := a.slots[slot].freedAt
	return at.BootID == now.BootID && now.At-at.At < a.quarantine
}

// nextNeverUsed finds the lowest slot that was never used without taking it.
func (a *Allocator) nextNeverUsed() (uint32, bool) {
	for len(a.returned) > 0 { // all of them are below the cursor
		if s := a.returned[0]; a.slots[s].state == neverUsed {
			return s, true
		}
		s := heap.Pop(&a.returned).(uint32) // it was claimed by name meanwhile
		a.slots[s].returned = false
	}
	for ; a.cursor < uint32(len(a.slots)); a.cursor++ {
		if a.slots[a.cursor].state == neverUsed {
			return a.cursor, true
		}
	}
	return 0, false
}

// take makes a slot live, wherever it stands.
func (a *Allocator) take(slot uint32) {
	n := &a.slots[slot]
	if n.state == freed {
		n.fromHead = a.head == slot
		a.unlink(slot)
		a.counts.Freed--
		n.fresh = false
	} else {
		a.counts.NeverUsed--
		n.fresh = true
	}
	n.state = live
	a.counts.Live++
}

func (a *Allocator) pushBack(slot uint32, at Instant) {
	a.lastTurn++
	n := &a.slots[slot]
	n.state, n.freedAt, n.turn = freed, at, a.lastTurn
	a.link(slot, a.tail, none)
	a.counts.Freed++
}

// reinsert puts a slot that was at the head back into the order of turns. It
// passes only slots that were cancelled after they were taken before this one.
func (a *Allocator) reinsert(slot uint32) {
	n := &a.slots[slot]
	n.state = freed
	before, after := none, a.head
	for after != none && a.slots[after].turn < n.turn {
		before, after = after, a.slots[after].next
	}
	a.link(slot, before, after)
	a.counts.Freed++
}

func (a *Allocator) link(slot, before, after uint32) {
	a.slots[slot].prev, a.slots[slot].next = before, after
	if before == none {
		a.head = slot
	} else {
		a.slots[before].next = slot
	}
	if after == none {
		a.tail = slot
	} else {
		a.slots[after].prev = slot
	}
}

func (a *Allocator) unlink(slot uint32) {
	n := &a.slots[slot]
	if n.prev == none {
		a.head = n.next
	} else {
		a.slots[n.prev].next = n.next
	}
	if n.next == none {
		a.tail = n.prev
	} else {
		a.slots[n.next].prev = n.prev
	}
	n.prev, n.next = none, none
}

// slotHeap is a min-heap of slots for container/heap.
type slotHeap []uint32

func (h slotHeap) Len() int           { return len(h) }
func (h slotHeap) Less(i, j int) bool { return h[i] < h[j] }
func (h slotHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *slotHeap) Push(x any)        { *h = append(*h, x.(uint32)) }
func (h *slotHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}
