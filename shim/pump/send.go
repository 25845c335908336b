package pump

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"

	wire "mknet/spec/pump"
)

// yields is how often an empty queue is looked at again, after giving way to
// others, before a batch is written. Measured: 64-byte UDP 1.9 times naive with
// it, 1.6 without.
//
// A lone packet of the latency lane is written at once: on a busy machine each
// yield gives a whole slice to somebody else (measured: ping under four bulk flows
// 1.5 instead of 3.7 ms, at the same packets per second).
const yields = 2

// batch collects frames in one buffer, as they go out.
type batch struct {
	lane            *lane
	buf             []byte // header of a sealed frame, then frames; the rest is room
	packet          wire.Type
	vnetBytes       int
	end             int // of the frames
	frames, ipBytes int
	packets         int // read from the queue; several datagrams may share a frame
	udp             coalescer
	noCredit        bool
	err             error
}

// fill reads the queue until it is empty or the batch is full. It reports false,
// wait for more, only when there is nothing at all. Credit is not held while
// nothing is read: another queue may share the lane.
func (b *batch) fill(fd uintptr) bool {
	room, messages := b.lane.reserve()
	if b.noCredit = room == 0; b.noCredit {
		return true
	}
	more := b.drain(int(fd), room, messages)
	b.lane.settle(room, messages, b.end-wire.HeaderBytes, b.frames)
	return more
}

func (b *batch) drain(fd, room, messages int) bool {
	tries := 0
	for b.frames < messages {
		used := b.end - wire.HeaderBytes
		if used >= b.lane.credit.maxBatch || used+wire.MaxFrameBytes > room {
			break
		}
		at := b.end + wire.HeaderBytes
		n, err := unix.Read(fd, b.buf[at:b.end+wire.MaxFrameBytes])
		switch {
		case err == nil && n > b.vnetBytes:
			b.add(at, n)
		case err == nil: // a TUN never does that; going on could be without end
			b.err = io.ErrUnexpectedEOF
			return true
		case errors.Is(err, unix.EAGAIN):
			lone := b.packets == 1 && b.lane.index > 0
			if b.frames == 0 || lone || tries == yields {
				return b.frames > 0
			}
			tries++
			// Raw: this thread only gives way, it keeps what the Go scheduler gave it.
			_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		case errors.Is(err, unix.EINTR):
		default:
			b.err = err
			return true
		}
	}
	return true
}

// add takes in n bytes that were read to at, behind the room for a header.
func (b *batch) add(at, n int) {
	b.packets++
	p := b.buf[at : at+n]
	if more := b.udp.join(b.buf, b.end, p); more > 0 {
		b.end += more
		b.ipBytes += more
		wire.PutHeader(b.buf[b.udp.at-wire.HeaderBytes:], b.packet, b.end-b.udp.at)
		return
	}
	wire.PutHeader(b.buf[b.end:], b.packet, n)
	b.udp.begin(p, at)
	b.end = at + n
	b.frames++
	b.ipBytes += n - b.vnetBytes
}

// send carries packets from a queue to a lane until the session ends. Without
// credit it does not read, and the kernel drops what the queue does not hold.
func (s *session) send(q device, l *lane) {
	b := &batch{
		lane:   l,
		buf:    make([]byte, wire.HeaderBytes+wire.MaxBatchBytes+wire.SealOverheadBytes),
		packet: wire.Data,
	}
	if q.VnetHeader() {
		b.packet, b.vnetBytes = wire.DataVnet, wire.VnetHeaderBytes
		b.udp.on = s.cfg.LocalOffloads.And(s.cfg.PeerOffloads)&wire.OffloadUSO4 != 0
	}
	raw, fill := q.SyscallConn(), b.fill
	c := s.cfg.Counters
	for {
		b.end, b.frames, b.ipBytes, b.packets, b.udp.open = wire.HeaderBytes, 0, 0, 0, false
		err := raw.Read(fill)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return // woken because the session ends
		case err != nil:
			s.fail(&QueueError{q.Name(), err})
			return
		case b.err != nil:
			s.fail(&QueueError{q.Name(), b.err})
			return
		case b.noCredit:
			c.creditWaits.Add(1)
			select {
			case <-l.credit.arrived:
				continue
			case <-s.done:
				return
			}
		}
		if err := l.flush(b.buf[:b.end]); err != nil {
			s.lost(err)
			return
		}
		c.batches.Add(1)
		c.txPackets.Add(uint64(b.frames))
		c.txBytes.Add(uint64(b.ipBytes))
	}
}
