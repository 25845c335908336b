package session

import (
	"context"
	"errors"
	"net"
	"time"

	"mknet/spec/endpoint"
	"mknet/spec/pump"
)

// DefaultTimeout bounds one handshake, from the first byte to the last. It must
// exceed what an agent needs to configure its device and a transport needs for
// six messages on a slow machine.
const DefaultTimeout = 10 * time.Second

// Identity is who one end is. An agent may leave Endpoint zero.
type Identity struct {
	Sandbox  endpoint.Sandbox
	Endpoint endpoint.Generation
}

// Key is a 256-bit data key of one lane and one direction.
type Key [32]byte

// String keeps a key out of logs.
func (Key) String() string { return "key(secret)" }

// GoString keeps a key out of %#v.
func (Key) GoString() string { return "key(secret)" }

// Lane is one authenticated connection. The keys are nil unless the session is
// sealed.
type Lane struct {
	Number        int // pump.LaneBulk or pump.LaneLatency
	Conn          net.Conn
	Send, Receive *Key
}

// Session is a confirmed pair of ends and their lanes. It has no deadline set
// on its connections.
type Session struct {
	Endpoint endpoint.Generation // as the shim named it
	Version  uint16
	Config   pump.LinkConfig // NextToken is cleared
	Ack      pump.Ack
	Lanes    []Lane // Ack.Lanes of them, in the order of their numbers
	Rotated  bool   // the token was replaced by the next one

	role pump.Role // whose end this is
}

// Close closes every lane. It may be called more than once.
func (s *Session) Close() error {
	var errs []error
	for _, l := range s.Lanes {
		if err := l.Conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// guard gives conn a deadline and makes ctx end its reads and writes. Call the
// returned function when the handshake is over: it reports whether the
// connection is still usable, without a deadline.
func guard(ctx context.Context, conn net.Conn, timeout time.Duration) (release func() error) {
	_ = conn.SetDeadline(time.Now().Add(timeout)) // a connection without deadlines fails at its first read
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	return func() error {
		if !stop() {
			return context.Cause(ctx)
		}
		return conn.SetDeadline(time.Time{})
	}
}

// link is one connection in its handshake, under a deadline.
type link struct {
	conn         net.Conn
	ch           *channel // set once the peer is confirmed
	ours, theirs pump.Hello
	release      func() error
}

// close ends the deadline and the connection. It may be called more than once.
func (l *link) close() error {
	_ = l.release()
	return ignoreClosed(l.conn.Close())
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
