package pump

import (
	"errors"

	"golang.org/x/sys/unix"

	wire "mknet/spec/pump"
)

// A receiver never waits for a write: two sides that both did would stand still.
// It leaves its control frames in a lane's mail and offers to write them; what
// cannot be written at once is left to the lane's control goroutine. A newer frame
// replaces one of its kind that still waits, so that a peer cannot make it grow.

func (l *lane) postCredit(c wire.Credit) {
	l.mail.Lock()
	l.mail.credits[c.Lane], l.mail.hasCredit[c.Lane] = c, true
	l.mail.Unlock()
	l.offer()
}

func (l *lane) postPing(token uint64) {
	l.mail.Lock()
	l.mail.ping, l.mail.hasPing = token, true
	l.mail.Unlock()
	l.offer()
}

func (l *lane) postPong(token uint64) {
	l.mail.Lock()
	l.mail.pong, l.mail.hasPong = token, true
	l.mail.Unlock()
	l.offer()
}

// collect adds the frames that wait to b. The caller holds the lock of writing,
// so that reports of credit go out in their order.
func (l *lane) collect(b []byte) []byte {
	m := &l.mail
	m.Lock()
	defer m.Unlock()
	for i := range m.credits {
		if m.hasCredit[i] {
			b = wire.AppendCredit(b, m.credits[i])
			m.hasCredit[i] = false
		}
	}
	if m.hasPong {
		b = wire.AppendPing(b, wire.Pong, m.pong)
	}
	if m.hasPing {
		b = wire.AppendPing(b, wire.Ping, m.ping)
	}
	m.hasPing, m.hasPong = false, false
	return b
}

// offer writes the mail if that is possible without waiting, and so saves a change
// of goroutines with every report of credit.
func (l *lane) offer() {
	w := &l.write
	if w.raw == nil || !w.TryLock() {
		signal(l.mail.posted)
		return
	}
	defer w.Unlock()
	if w.broken == nil && len(w.tail) == 0 {
		b := l.collect(w.scratch)
		if len(b) == len(w.scratch) {
			return // somebody was faster
		}
		w.tail = append(w.tail, l.sealLocked(b)...)
		w.tried, w.tryErr = 0, nil
		err := errors.Join(w.raw.Write(w.try), w.tryErr)
		switch {
		case err == nil, errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
		default:
			w.broken = err
		}
		w.tail = w.tail[:copy(w.tail, w.tail[w.tried:])]
	}
	if w.broken != nil || len(w.tail) > 0 {
		signal(l.mail.posted)
	}
}

// tryTail writes what it can and never asks to be called again.
func (l *lane) tryTail(fd uintptr) bool {
	n, err := unix.Write(int(fd), l.write.tail)
	l.write.tried, l.write.tryErr = max(n, 0), err
	return true
}

// control writes the mail that an offer could not. At the end of the session it
// says why.
func (l *lane) control() {
	w := &l.write
	for {
		select {
		case <-l.mail.posted:
			w.Lock()
			err := l.flushLocked(l.collect(w.scratch))
			w.Unlock()
			l.s.lost(err)
		case <-l.s.done:
			if reason, text, polite := farewell(l.s.cause); polite {
				b := make([]byte, wire.HeaderBytes, 512)
				if l.flush(wire.AppendClose(b, reason, text)) == nil {
					if half, ok := l.conn.(interface{ CloseWrite() error }); ok {
						_ = half.CloseWrite() // the peer reads our reason all the same
					}
				}
			}
			return
		}
	}
}
