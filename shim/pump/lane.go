package pump

import (
	"crypto/cipher"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	wire "mknet/spec/pump"
)

const nonceBytes = 12 // of both ciphers, RFC 5116 section 3.1

// Bounds of the wait for room in a message transport.
const (
	minBackoff = 100 * time.Microsecond
	maxBackoff = 20 * time.Millisecond
)

// lane is one connection of a session.
type lane struct {
	s      *session
	index  uint8
	conn   net.Conn
	open   cipher.AEAD // used by the receiver only
	opened uint64      // sealed frames so far, the next nonce; used by the receiver only

	write struct {
		sync.Mutex // one batch at a time, in the order of its nonce
		seal       cipher.AEAD
		batches    uint64 // sealed so far, the next nonce
		tail       []byte // rest of a batch that an offer could not write
		broken     error  // why a write ended midway: nothing may follow
		scratch    []byte // for control frames
		raw        syscall.RawConn
		try        func(fd uintptr) bool // tries to write tail
		tried      int                   // bytes
		tryErr     error
	}

	credit struct {
		sync.Mutex
		account  *wire.Sender
		reserved struct{ bytes, messages int }
		maxBatch int           // bytes
		arrived  chan struct{} // capacity 1: there may be more room
	}
	receiver *wire.Receiver // used by the receiver only

	mail struct {
		sync.Mutex
		credits    [wire.MaxLanes]wire.Credit
		hasCredit  [wire.MaxLanes]bool
		ping, pong uint64
		hasPing    bool
		hasPong    bool
		posted     chan struct{} // capacity 1: there is mail
	}

	alive atomic.Bool // something came since the last look
	rtt   struct {
		sync.Mutex
		token   uint64
		sent    time.Time
		waiting bool
	}
}

func newLane(s *session, index uint8, l Lane) *lane {
	n := &lane{s: s, index: index, conn: l.Conn, open: l.Open}
	n.write.seal = l.Seal
	n.write.scratch = make([]byte, wire.HeaderBytes, 1024) // more than all mail and a tag
	if c, ok := l.Conn.(syscall.Conn); ok && s.cfg.MaxMessageBytes == 0 {
		if raw, err := c.SyscallConn(); err == nil { // without it control frames take the longer way
			n.write.raw, n.write.try = raw, n.tryTail
		}
	}
	granted := s.cfg.Granted[index]
	n.credit.account = wire.NewSender(granted)
	// Half a window at most, so that the answer to one half comes while the other
	// is under way.
	n.credit.maxBatch = min(wire.BatchBytes, int(granted.Bytes)/2)
	n.credit.arrived = make(chan struct{}, 1)
	n.receiver = wire.NewReceiver(index, s.cfg.Grant[index])
	n.mail.posted = make(chan struct{}, 1)
	return n
}

// signal makes a channel of capacity 1 readable.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// reserve takes room for a batch: at least one largest frame. It returns zero
// when there is none.
func (l *lane) reserve() (bytes, messages int) {
	c := &l.credit
	c.Lock()
	defer c.Unlock()
	bytes, messages = c.account.Room()
	bytes, messages = bytes-c.reserved.bytes, messages-c.reserved.messages
	if bytes < wire.MaxFrameBytes || messages < 1 {
		return 0, 0
	}
	bytes = min(bytes, c.maxBatch+wire.MaxFrameBytes)
	c.reserved.bytes += bytes
	c.reserved.messages += messages
	return bytes, messages
}

// settle turns a reservation into what was used of it.
func (l *lane) settle(bytes, messages, usedBytes, usedMessages int) {
	c := &l.credit
	c.Lock()
	c.reserved.bytes -= bytes
	c.reserved.messages -= messages
	c.account.Spend(usedBytes, usedMessages)
	c.Unlock()
	if len(l.s.queues) > len(l.s.lanes) { // another queue may have found none because of us
		signal(c.arrived)
	}
}

// update takes in a report of the peer.
func (l *lane) update(r wire.Credit) error {
	l.credit.Lock()
	err := l.credit.account.Update(r)
	l.credit.Unlock()
	signal(l.credit.arrived)
	return err
}

// flush writes a batch: room for the header of a sealed frame, then whole frames,
// with room for a tag behind.
func (l *lane) flush(b []byte) error {
	l.write.Lock()
	defer l.write.Unlock()
	return l.flushLocked(b)
}

func (l *lane) flushLocked(b []byte) error {
	w := &l.write
	if w.broken == nil && len(w.tail) > 0 {
		w.broken = l.transmit(w.tail)
		w.tail = w.tail[:0]
	}
	if w.broken == nil && len(b) > wire.HeaderBytes {
		w.broken = l.transmit(l.sealLocked(b))
	}
	if w.broken != nil {
		return &LaneError{int(l.index), w.broken}
	}
	return nil
}

// sealLocked makes of a batch what goes out.
func (l *lane) sealLocked(b []byte) []byte {
	w := &l.write
	if w.seal == nil {
		return b[wire.HeaderBytes:]
	}
	wire.PutHeader(b, wire.Sealed, len(b)-wire.HeaderBytes+wire.SealOverheadBytes)
	nonce := nonceOf(w.batches)
	w.batches++
	return w.seal.Seal(b[:wire.HeaderBytes], nonce[:], b[wire.HeaderBytes:], b[:wire.HeaderBytes])
}

// nonceOf is the nonce of the n-th batch of a lane and direction.
func nonceOf(n uint64) (b [nonceBytes]byte) {
	binary.BigEndian.PutUint64(b[nonceBytes-8:], n)
	return b
}

// transmit writes b as a stream, or as messages that may find no room.
func (l *lane) transmit(b []byte) error {
	limit := l.s.cfg.MaxMessageBytes
	if limit == 0 {
		_, err := l.conn.Write(b)
		return err
	}
	var waited time.Duration // since the last progress
	backoff := minBackoff
	for len(b) > 0 {
		// A transport without flow control may never say that it is writable again,
		// so that no wait for it is without end.
		if err := l.conn.SetWriteDeadline(time.Now().Add(backoff)); err != nil {
			return err
		}
		n, err := l.conn.Write(b[:min(limit, len(b))])
		b = b[n:]
		if n > 0 {
			waited, backoff = 0, minBackoff
		}
		switch {
		case err == nil:
			continue
		case errors.Is(err, os.ErrDeadlineExceeded): // has waited already
		case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOBUFS):
			time.Sleep(backoff)
		default:
			return err
		}
		l.s.cfg.Counters.transportRetries.Add(1)
		waited += backoff
		backoff = min(2*backoff, maxBackoff)
		patience := l.s.cfg.DeadAfter
		if l.s.ended() {
			patience = min(CloseGrace, patience)
		}
		if waited >= patience {
			return err
		}
	}
	return nil
}
