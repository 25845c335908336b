package vsockswitch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"
)

// Descriptor flags and ring flags, virtio 1.2 section 2.7.
const (
	descNext     = 1
	descWrite    = 2
	descIndirect = 4

	availNoInterrupt = 1

	// maxRingEntries is the largest queue size that virtio allows.
	maxRingEntries = 32768
	// maxChain bounds the buffers of one chain: a Linux guest uses two.
	maxChain = 64
)

// errStopped says that the device's rings do not run (any more).
var errStopped = errors.New("the device has stopped")

// ring is one split virtqueue. Its methods are for one goroutine, but for
// interrupt.
//
// The guest's fields are read and written as plain memory; a locked operation
// between them (fence) orders them for the processor and the compiler.
type ring struct {
	entries    uint32
	descriptor []byte
	avail      []byte // flags u16, idx u16, ring [entries]u16
	used       []byte // flags u16, idx u16, ring [entries]{id u32, len u32}
	nextAvail  uint16 // the guest's next chain
	nextUsed   uint16
	mem        *memory
	kick       *os.File // the guest tells us; eventfd, non-blocking
	call       *atomic.Pointer[os.File]
	fence      atomic.Uint32
}

// chain is one request of the guest's.
type chain struct {
	head        uint16
	read, write [][]byte // what the device reads and what it writes
}

// newRing looks the parts of a queue up in the front end's memory.
func newRing(v *vring, mem *memory) (*ring, error) {
	if v.entries == 0 || v.entries > maxRingEntries || v.entries&(v.entries-1) != 0 {
		return nil, fmt.Errorf("queue size %d is no power of two up to %d", v.entries, maxRingEntries)
	}
	n := uint64(v.entries)
	r := &ring{entries: v.entries, nextAvail: v.base, mem: mem, kick: v.kick, call: &v.call}
	var errs [3]error
	r.descriptor, errs[0] = mem.atUser(v.descriptor, 16*n)
	r.avail, errs[1] = mem.atUser(v.avail, 4+2*n)
	r.used, errs[2] = mem.atUser(v.used, 4+8*n)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	r.nextUsed = binary.LittleEndian.Uint16(r.used[2:])
	return r, nil
}

// pop takes the guest's next chain; ok is false when there is none. An error
// means that the ring is broken.
func (r *ring) pop() (c chain, ok bool, err error) {
	idx := binary.LittleEndian.Uint16(r.avail[2:])
	r.fence.Add(1) // idx before the entries that it announces
	if idx == r.nextAvail {
		return c, false, nil
	}
	if pending := idx - r.nextAvail; uint32(pending) > r.entries {
		return c, false, fmt.Errorf("available index is %d ahead in a queue of %d", pending, r.entries)
	}
	c.head = binary.LittleEndian.Uint16(r.avail[4+2*(uint32(r.nextAvail)&(r.entries-1)):])
	for i, n := c.head, 0; ; n++ {
		if uint32(i) >= r.entries || n == maxChain {
			return c, false, fmt.Errorf("descriptor chain of %d or more, next %d, queue size %d", n, i, r.entries)
		}
		d := r.descriptor[16*uint32(i):]
		flags := binary.LittleEndian.Uint16(d[12:])
		if flags&descIndirect != 0 {
			return c, false, errors.New("indirect descriptor, which was not offered")
		}
		b, err := r.mem.atGuest(binary.LittleEndian.Uint64(d), uint64(binary.LittleEndian.Uint32(d[8:])))
		if err != nil {
			return c, false, err
		}
		if flags&descWrite != 0 {
			c.write = append(c.write, b)
		} else {
			c.read = append(c.read, b)
		}
		if flags&descNext == 0 {
			break
		}
		i = binary.LittleEndian.Uint16(d[14:])
	}
	r.nextAvail++
	return c, true, nil
}

// giveBack undoes the last pop.
func (r *ring) giveBack() { r.nextAvail-- }

// push returns a chain to the guest, into which n bytes were written, and
// interrupts it unless it asked not to be.
func (r *ring) push(c chain, n int) {
	slot := 4 + 8*(uint32(r.nextUsed)&(r.entries-1))
	binary.LittleEndian.PutUint32(r.used[slot:], uint32(c.head))
	binary.LittleEndian.PutUint32(r.used[slot+4:], uint32(n))
	r.fence.Add(1) // the entry before the index that announces it
	r.nextUsed++
	binary.LittleEndian.PutUint16(r.used[2:], r.nextUsed)
	r.fence.Add(1) // the index before the guest's wish
	if binary.LittleEndian.Uint16(r.avail)&availNoInterrupt == 0 {
		interrupt(r.call.Load())
	}
}

// interrupt signals an eventfd, if there is one. An error means that the front
// end has just replaced it, and the new one is signaled when it is set.
func interrupt(call *os.File) {
	if call != nil {
		_, _ = call.Write([]byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
}

// wait blocks until the guest kicks; errStopped once stop was called.
func (r *ring) wait() error {
	var b [8]byte
	if _, err := r.kick.Read(b[:]); err != nil {
		return errStopped
	}
	return nil
}

// stop wakes wait, now and later.
func (r *ring) stop() { _ = r.kick.SetReadDeadline(time.Unix(1, 0)) }

// resume undoes stop, for the ring that takes the descriptor over.
func (r *ring) resume() { _ = r.kick.SetReadDeadline(time.Time{}) }
