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
const yields = 2

// batch collects frames in one buffer, as they go out.
type batch struct {
	buf             []byte // header of a sealed frame, then frames; the rest is room
	packet          wire.Type
	vnetBytes       int
	room, messages  int // what credit allows
	end             int // of the frames
	frames, ipBytes int
	maxBytes        int
	err             error
}

// fill reads the queue until it is empty or the batch is full. It reports false,
// wait for more, only when there is nothing at all.
func (b *batch) fill(fd uintptr) bool {
	tries := 0
	for b.frames < b.messages {
		used := b.end - wire.HeaderBytes
		if used >= b.maxBytes || used+wire.MaxFrameBytes > b.room {
			break
		}
		at := b.end + wire.HeaderBytes
		n, err := unix.Read(int(fd), b.buf[at:b.end+wire.MaxFrameBytes])
		switch {
		case err == nil && n > b.vnetBytes:
			wire.PutHeader(b.buf[b.end:], b.packet, n)
			b.end = at + n
			b.frames++
			b.ipBytes += n - b.vnetBytes
		case err == nil: // a TUN never does that; going on could be without end
			b.err = io.ErrUnexpectedEOF
			return true
		case errors.Is(err, unix.EAGAIN):
			if b.frames == 0 || tries == yields {
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

// send carries packets from a queue to a lane until the session ends. Without
// credit it does not read, and the kernel drops what the queue does not hold.
func (s *session) send(q device, l *lane) {
	b := &batch{
		buf:      make([]byte, wire.HeaderBytes+wire.MaxBatchBytes+wire.SealOverheadBytes),
		packet:   wire.Data,
		maxBytes: l.credit.maxBatch,
	}
	if q.VnetHeader() {
		b.packet, b.vnetBytes = wire.DataVnet, wire.VnetHeaderBytes
	}
	raw, fill := q.SyscallConn(), b.fill
	for {
		b.room, b.messages = l.reserve()
		if b.room == 0 {
			s.cfg.Counters.creditWaits.Add(1)
			select {
			case <-l.credit.arrived:
				continue
			case <-s.done:
				return
			}
		}
		b.end, b.frames, b.ipBytes = wire.HeaderBytes, 0, 0
		err := raw.Read(fill)
		l.settle(b.room, b.messages, b.end-wire.HeaderBytes, b.frames)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return // woken because the session ends
		case err != nil:
			s.fail(&QueueError{q.Name(), err})
			return
		case b.err != nil:
			s.fail(&QueueError{q.Name(), b.err})
			return
		}
		if err := l.flush(b.buf[:b.end]); err != nil {
			s.lost(err)
			return
		}
		c := s.cfg.Counters
		c.batches.Add(1)
		c.txPackets.Add(uint64(b.frames))
		c.txBytes.Add(uint64(b.ipBytes))
	}
}
