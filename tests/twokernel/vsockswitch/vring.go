package vsockswitch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
)

// setMemory replaces the memory table. The rings must not run meanwhile, and what
// they used before is unmapped.
func (s *session) setMemory(p []byte, files []*os.File) error {
	n := int(binary.LittleEndian.Uint32(p))
	if n > maxRegions || len(p) < 8+32*n {
		return fmt.Errorf("memory table of %d regions in %d bytes", n, len(p))
	}
	entries := make([]regionEntry, n)
	for i := range entries {
		b := p[8+32*i:]
		entries[i] = regionEntry{
			guest: binary.LittleEndian.Uint64(b), size: binary.LittleEndian.Uint64(b[8:]),
			user: binary.LittleEndian.Uint64(b[16:]), offset: binary.LittleEndian.Uint64(b[24:]),
		}
	}
	mem, err := mapMemory(entries, files)
	if err != nil {
		return err
	}
	s.halt()
	old := s.mem
	s.mem = mem
	if err := old.unmap(); err != nil {
		return fmt.Errorf("unmap guest memory: %w", err)
	}
	return s.runWhenComplete()
}

// handleVring acts on a request about one queue.
func (s *session) handleVring(request uint32, p []byte, files []*os.File) ([]byte, error) {
	le := binary.LittleEndian
	index := le.Uint32(p) & 0xff
	if index >= queues {
		return nil, fmt.Errorf("no queue %d", index)
	}
	v := &s.vrings[index]
	switch request {
	case reqSetVringNum:
		v.entries = le.Uint32(p[4:])
	case reqSetVringAddr:
		v.descriptor, v.used, v.avail = le.Uint64(p[8:]), le.Uint64(p[16:]), le.Uint64(p[24:])
	case reqSetVringBase:
		v.base = uint16(le.Uint32(p[4:]))
	case reqGetVringBase: // stops the queue; one queue of vsock is no device
		s.halt()
		closeFile(v.kick)
		v.kick = nil
		return le.AppendUint32(le.AppendUint32(nil, index), uint32(v.base)), nil
	case reqSetVringKick:
		if le.Uint64(p)&vringNoFD != 0 || len(files) != 1 {
			return nil, errors.New("no kick descriptor: polling is not supported")
		}
		s.halt()
		closeFile(v.kick)
		v.kick, files[0] = files[0], nil
		return nil, s.runWhenComplete()
	case reqSetVringCall:
		var call *os.File
		if le.Uint64(p)&vringNoFD == 0 && len(files) == 1 {
			call, files[0] = files[0], nil
		}
		closeFile(v.call.Swap(call))
		interrupt(call) // one may have been lost to the old descriptor
	}
	return nil, nil
}

// runWhenComplete starts the device once memory and both queues are known.
func (s *session) runWhenComplete() error {
	if s.dev != nil || s.mem == nil {
		return nil
	}
	for i := range s.vrings {
		if v := &s.vrings[i]; v.kick == nil || v.entries == 0 || v.descriptor == 0 {
			return nil
		}
	}
	for i := range s.vrings {
		r, err := newRing(&s.vrings[i], s.mem)
		if err != nil {
			return fmt.Errorf("queue %d: %w", i, err)
		}
		s.rings[i] = r
	}
	s.dev = startDevice(s.back, s.rings[0], s.rings[1], s.log)
	return nil
}

// halt stops the device, if it runs, and remembers where its queues stood.
func (s *session) halt() {
	if s.dev == nil {
		return
	}
	s.dev.stop()
	s.dev = nil
	for i, r := range s.rings {
		s.vrings[i].base = r.nextAvail
		r.resume()
	}
}
