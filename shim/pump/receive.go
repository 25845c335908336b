package pump

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	wire "mknet/spec/pump"
)

// headroom is kept free at the start of the receive buffer, so that a virtio-net
// header fits in front of any packet that came without one.
const headroom = wire.VnetHeaderBytes

// inbox takes the frames of one lane apart, in place.
type inbox struct {
	s       *session
	l       *lane
	q       device
	raw     syscall.RawConn
	vnet    bool
	check   wire.Check
	largest int // frame

	buf        []byte
	next, end  int    // what was read and not looked at yet: buf[next:end]
	inner      int    // end of an opened sealed frame, whose frames begin at next; 0 outside
	innerFrame int    // where the sealed frame ends
	pending    []byte // a packet that is to be written
	err        error

	packets, bytes uint64 // delivered in this pass
}

func newInbox(s *session, l *lane, q device) *inbox {
	in := &inbox{
		s: s, l: l, q: q, raw: q.SyscallConn(), vnet: q.VnetHeader(), largest: wire.MaxFrameBytes,
		check: wire.Check{MTUBytes: s.cfg.MTUBytes, Source: s.cfg.AllowedSource},
	}
	if l.open != nil {
		in.largest = wire.MaxSealedBytes
	}
	in.buf = make([]byte, headroom+wire.BatchBytes+in.largest)
	in.next, in.end = headroom, headroom
	return in
}

// receive carries packets from a lane to a queue until the session ends, and then
// reads on until the connection does.
func (s *session) receive(l *lane, q device) {
	in := newInbox(s, l, q)
	for {
		n, err := l.conn.Read(in.buf[in.end:])
		switch {
		case s.ended():
			// Read on until the peer has closed its end, see session.run.
			if err != nil {
				return
			}
			in.next, in.end = headroom, headroom
			continue
		case n > 0:
			l.alive.Store(true)
			in.end += n
			s.fail(in.pass())
		}
		if err != nil {
			s.fail(&LaneError{int(l.index), err})
			return
		}
	}
}

// pass delivers all whole frames of the buffer.
func (in *inbox) pass() error {
	err := in.raw.Write(in.deliver)
	in.account()
	switch {
	case in.err != nil:
		return in.err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil // the session ends
	case err != nil:
		return &QueueError{in.q.Name(), err}
	}
	in.compact()
	return nil
}

// compact makes room for the rest of the largest frame.
func (in *inbox) compact() {
	switch {
	case in.next == in.end:
		in.next, in.end = headroom, headroom
	case len(in.buf)-in.next < in.largest || len(in.buf)-in.end < wire.MaxFrameBytes:
		in.end = headroom + copy(in.buf[headroom:], in.buf[in.next:in.end])
		in.next = headroom
	}
}

// account adds the pass to the counters and reports to the peer what was
// consumed. Not with each frame: measured, that gains nothing, and a peer that
// takes no notice of its window would never be found out.
func (in *inbox) account() {
	if in.packets > 0 {
		in.s.cfg.Counters.rxPackets.Add(in.packets)
		in.s.cfg.Counters.rxBytes.Add(in.bytes)
		in.packets, in.bytes = 0, 0
	}
	if c, due := in.l.receiver.Due(); due {
		in.s.latency().postCredit(c)
	}
}

// deliver handles all whole frames that were read. It reports false, come back
// when the queue is writable, only while a packet is pending.
func (in *inbox) deliver(fd uintptr) bool {
	for {
		if in.pending != nil {
			_, err := unix.Write(int(fd), in.pending)
			switch {
			case err == nil:
				in.packets++
				in.bytes += uint64(len(in.pending))
				if in.vnet {
					in.bytes -= wire.VnetHeaderBytes
				}
			case errors.Is(err, unix.EAGAIN):
				return false
			case errors.Is(err, unix.EINTR):
				continue
			default:
				in.refused(err)
			}
			in.pending = nil
		}
		if in.err != nil || !in.frame() {
			return true
		}
	}
}

// refused sorts the errors of a write to the TUN: those that concern the packet,
// and those after which the queue is of no use.
func (in *inbox) refused(err error) {
	drop := wire.DropTunOther
	switch {
	case errors.Is(err, unix.EBADFD), errors.Is(err, unix.EBADF), errors.Is(err, unix.ENODEV):
		in.err = &QueueError{in.q.Name(), err}
		return
	case errors.Is(err, unix.EIO):
		drop = wire.DropTunDown
	case errors.Is(err, unix.EINVAL):
		drop = wire.DropTunInvalid
	case errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
		drop = wire.DropTunMemory
	}
	in.s.cfg.Counters.drops[drop].Add(1)
}

// frame handles the next frame. It reports false when there is no whole one, or
// the session has to end.
func (in *inbox) frame() bool {
	end := in.end
	if in.inner > 0 {
		end = in.inner
	}
	if in.inner > 0 && in.next == in.inner { // past the tag
		in.next, in.inner = in.innerFrame, 0
		return true
	}
	f, err := wire.Next(in.buf[in.next:end], in.l.open != nil && in.inner == 0)
	if err == nil && f.Bytes == 0 {
		if in.inner == 0 {
			return false
		}
		err = &wire.FrameError{Problem: "sealed frame ends within a frame"}
	}
	if err == nil {
		err = in.handle(f)
	}
	if err != nil {
		var closed *PeerClosedError
		if !errors.As(err, &closed) {
			err = &ProtocolError{int(in.l.index), err}
		}
		in.err = err
		return false
	}
	return true
}

// handle handles one frame, which begins at next, and moves next behind it.
func (in *inbox) handle(f wire.Frame) error {
	at := in.next
	in.next += f.Bytes
	switch f.Type {
	case wire.Sealed:
		nonce := nonceOf(in.l.opened)
		in.l.opened++
		plain, err := in.l.open.Open(f.Body[:0], nonce[:], f.Body, in.buf[at:at+wire.HeaderBytes])
		if err != nil {
			return ErrUnsealed // the cause says no more
		}
		in.innerFrame = in.next
		in.next = at + wire.HeaderBytes
		in.inner = in.next + len(plain)
	case wire.Data, wire.DataVnet:
		if err := in.l.receiver.Receive(f.Bytes); err != nil {
			return err
		}
		if d := in.packet(f, at+wire.HeaderBytes); d != wire.DropNone {
			in.s.cfg.Counters.drops[d].Add(1)
		}
	case wire.Credits:
		c := wire.CreditOf(f.Body)
		if int(c.Lane) >= len(in.s.lanes) {
			return &wire.CreditError{Problem: fmt.Sprintf("report for lane %d of %d", c.Lane, len(in.s.lanes))}
		}
		return in.s.lanes[c.Lane].update(c)
	case wire.Ping:
		in.l.postPong(wire.PingToken(f.Body))
	case wire.Pong:
		in.l.pong(wire.PingToken(f.Body))
	case wire.Close:
		reason, text := wire.CloseText(f.Body)
		return &PeerClosedError{reason, text}
	}
	return nil
}

// packet makes the packet of a frame pending, in the form that the queue takes,
// or says why not. The body begins at buf[at].
func (in *inbox) packet(f wire.Frame, at int) wire.Drop {
	if f.Type == wire.DataVnet {
		if d := in.check.Vnet(f.Body); d != wire.DropNone {
			return d
		}
		switch {
		case in.vnet:
			in.pending = f.Body
		case wire.NeedsOffload(f.Body):
			return wire.DropNoOffload
		default:
			in.pending = f.Body[wire.VnetHeaderBytes:]
		}
		return wire.DropNone
	}
	if d := in.check.Plain(f.Body); d != wire.DropNone {
		return d
	}
	if !in.vnet {
		in.pending = f.Body
		return wire.DropNone
	}
	// What lies before the body has been looked at, or is headroom.
	in.pending = in.buf[at-wire.VnetHeaderBytes : at+len(f.Body)]
	clear(in.pending[:wire.VnetHeaderBytes])
	return wire.DropNone
}
