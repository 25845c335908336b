package vsockswitch

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// windowBytes is how much a guest may send ahead of the host's program.
const windowBytes = 256 << 10

// link is one connection between the guest and a Unix socket.
type link struct {
	hub      *Hybrid
	dev      *device
	conn     *net.UnixConn
	key      linkKey
	accepted chan bool     // the guest's answer to our request
	done     chan struct{} // closed: everything is over

	mu       sync.Mutex
	changed  *sync.Cond
	pending  []byte // from the guest, not yet written; at most windowBytes
	noMore   bool   // the guest sends no more
	noRead   bool   // the guest takes no more
	consumed uint32 // bytes of the guest's written to conn, modulo 2^32
	told     uint32 // consumed, as the guest last heard
	sent     uint32 // bytes sent to the guest
	alloc    uint32 // the guest's window
	forward  uint32 // what the guest has consumed
}

func newLink(h *Hybrid, d *device, conn *net.UnixConn, key linkKey) *link {
	l := &link{hub: h, dev: d, conn: conn, key: key, accepted: make(chan bool, 1), done: make(chan struct{})}
	l.changed = sync.NewCond(&l.mu)
	return l
}

// header is a packet of this link's, with the present credit.
func (l *link) header(op uint16) header {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.told = l.consumed
	return header{
		srcCID: hostCID, dstCID: l.hub.id, srcPort: l.key.host, dstPort: l.key.guest,
		kind: typeStream, op: op, bufAlloc: windowBytes, fwdCnt: l.consumed,
	}
}

// credit notes the guest's window; every packet carries it.
func (l *link) credit(p header) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.alloc, l.forward = p.bufAlloc, p.fwdCnt
	l.changed.Broadcast()
}

// packet is one packet of the guest's on this link. It does not block on the
// host's program: the window bounds what is pending.
func (l *link) packet(ctx context.Context, p header, payload []byte) {
	l.credit(p)
	switch p.op {
	case opResponse:
		l.answer(true)
	case opReset:
		l.answer(false)
		l.kill()
	case opShutdown:
		if p.flags&shutdownSend != 0 {
			l.endInput()
		}
		if p.flags&shutdownReceive != 0 {
			l.endOutput()
		}
	case opData:
		if !l.take(payload) {
			l.dev.answer(ctx, l.header(opReset))
			l.kill()
		}
	case opCreditRequest:
		l.dev.answer(ctx, l.header(opCreditUpdate))
	}
}

func (l *link) answer(ok bool) {
	select {
	case l.accepted <- ok:
	default:
	}
}

// take keeps a payload for the writer; false when the guest exceeds its window or
// sends after its end.
func (l *link) take(payload []byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.noMore || len(l.pending)+len(payload) > windowBytes {
		return false
	}
	l.pending = append(l.pending, payload...)
	l.changed.Broadcast()
	return true
}

func (l *link) endInput() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.noMore = true
	l.changed.Broadcast()
}

// endOutput ends the reader: the guest takes no more.
func (l *link) endOutput() {
	l.mu.Lock()
	l.noRead = true
	l.changed.Broadcast()
	l.mu.Unlock()
	_ = l.conn.SetReadDeadline(time.Unix(1, 0))
}

// kill ends the link at once.
func (l *link) kill() {
	l.endInput()
	l.endOutput()
	_ = l.conn.SetWriteDeadline(time.Unix(1, 0))
}

// finish ends a link whose guest is down, once what it sent is written or
// DrainLimit is over.
func (l *link) finish() {
	l.answer(false)
	l.endInput()
	l.endOutput()
	_ = l.conn.SetWriteDeadline(time.Now().Add(DrainLimit))
}

// run carries both directions and ends with a reset for the guest.
func (l *link) run() {
	defer close(l.done)
	written := make(chan struct{})
	go func() {
		defer close(written)
		if err := l.write(); err != nil {
			l.kill()
		}
	}()
	if err := l.read(); err != nil {
		l.kill()
	}
	<-written
	l.hub.remove(l)
	l.conn.Close()
	l.dev.answer(context.Background(), l.header(opReset))
}

// write carries from the guest to the program until the guest ends.
func (l *link) write() error {
	var spare []byte
	for {
		l.mu.Lock()
		for len(l.pending) == 0 && !l.noMore {
			l.changed.Wait()
		}
		out := l.pending
		l.pending = spare[:0]
		l.mu.Unlock()
		if len(out) == 0 {
			return l.conn.CloseWrite()
		}
		if _, err := l.conn.Write(out); err != nil {
			return err
		}
		spare = out
		l.mu.Lock()
		l.consumed += uint32(len(out))
		update := l.consumed-l.told >= windowBytes/4
		l.mu.Unlock()
		if update {
			l.dev.answer(context.Background(), l.header(opCreditUpdate))
		}
	}
}

// read carries from the program to the guest until either ends.
func (l *link) read() error {
	buf := make([]byte, maxPayload)
	for {
		room := l.room()
		if room == 0 {
			return nil
		}
		n, err := l.conn.Read(buf[:min(room, len(buf))])
		if n > 0 {
			l.mu.Lock()
			l.sent += uint32(n)
			l.mu.Unlock()
			if err := l.dev.send(context.Background(), l.header(opData), buf[:n]); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			h := l.header(opShutdown)
			h.flags = shutdownSend
			return l.dev.send(context.Background(), h, nil)
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil // by endOutput
		case err != nil:
			return err
		}
	}
}

// room waits until the guest has room and returns how much; 0 when it takes no
// more.
func (l *link) room() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.noRead {
		if free := int32(l.alloc - (l.sent - l.forward)); free > 0 {
			return int(free)
		}
		l.changed.Wait()
	}
	return 0
}
