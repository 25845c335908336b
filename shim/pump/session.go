package pump

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	wire "mknet/spec/pump"
)

// device is what the pump needs of a *tun.Queue.
type device interface {
	Name() string
	VnetHeader() bool
	SyscallConn() syscall.RawConn
	SetDeadline(time.Time) error
	SetOffloads(wire.Offloads) error
}

// past is a deadline that wakes whoever waits.
var past = time.Unix(1, 0)

// session is one Run.
type session struct {
	cfg    Config
	queues []device
	lanes  []*lane

	once  sync.Once
	cause error         // valid after done is closed
	done  chan struct{} // the session ends
}

// newSession checks what it is given and touches nothing.
func newSession(cfg Config, queues []device, lanes []Lane) (*session, error) {
	if len(lanes) < 1 || len(lanes) > wire.MaxLanes {
		return nil, fmt.Errorf("%d lanes, must be 1 to %d", len(lanes), wire.MaxLanes)
	}
	if len(queues) == 0 {
		return nil, errors.New("no queue")
	}
	if err := cfg.validate(len(lanes)); err != nil {
		return nil, err
	}
	s := &session{cfg: cfg, queues: queues, done: make(chan struct{})}
	for i, l := range lanes {
		switch {
		case l.Conn == nil:
			return nil, fmt.Errorf("lane %d: no connection", i)
		case (l.Seal == nil) != (l.Open == nil) || (l.Seal == nil) != (lanes[0].Seal == nil):
			return nil, fmt.Errorf("lane %d: all lanes are sealed in both directions, or none", i)
		}
		if l.Seal != nil {
			for _, a := range []interface {
				NonceSize() int
				Overhead() int
			}{l.Seal, l.Open} {
				if a.NonceSize() != nonceBytes || a.Overhead() != wire.SealOverheadBytes {
					return nil, fmt.Errorf("lane %d: cipher with a nonce of %d bytes and a tag of %d", i, a.NonceSize(), a.Overhead())
				}
			}
		}
		s.lanes = append(s.lanes, newLane(s, uint8(i), l))
	}
	return s, nil
}

// latency is the lane that carries credit: the last one.
func (s *session) latency() *lane { return s.lanes[len(s.lanes)-1] }

// fail ends the session; the first cause is the one that Run returns. It may be
// called from any goroutine, nil is ignored.
func (s *session) fail(err error) {
	if err == nil {
		return
	}
	s.once.Do(func() {
		s.cause = err
		close(s.done)
	})
}

// lost ends the session after a write that failed. What comes in says better why,
// a Close frame first of all, so that it is given a moment.
func (s *session) lost(err error) {
	if err == nil {
		return
	}
	t := time.NewTimer(CloseGrace)
	defer t.Stop()
	select {
	case <-s.done:
	case <-t.C:
		s.fail(err)
	}
}

func (s *session) ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

func (s *session) run(ctx context.Context) error {
	s.cfg.Counters.sessions.Add(1)
	if err := s.prepare(); err != nil {
		return errors.Join(err, s.closeLanes())
	}
	stop := context.AfterFunc(ctx, func() { s.fail(context.Cause(ctx)) })
	defer stop()

	var senders, receivers sync.WaitGroup
	for i, q := range s.queues {
		senders.Go(func() { s.send(q, s.lanes[min(i, len(s.lanes)-1)]) })
	}
	for i, l := range s.lanes {
		senders.Go(l.control)
		receivers.Go(func() { s.receive(l, s.queues[min(i, len(s.queues)-1)]) })
	}
	senders.Go(s.keepalive)

	<-s.done
	s.wake()
	senders.Wait() // each lane has sent its last frame, or could not
	if _, _, polite := farewell(s.cause); polite {
		// The connection stays open until the peer has closed its end: a close with
		// unread bytes resets it, and the peer would lose our reason.
		receivers.Wait()
	}
	err := s.closeLanes()
	receivers.Wait()
	for _, q := range s.queues {
		if e := q.SetDeadline(time.Time{}); e != nil && !errors.As(s.cause, new(*QueueError)) {
			err = errors.Join(err, &QueueError{q.Name(), e})
		}
	}
	if err != nil {
		return errors.Join(s.cause, err)
	}
	return s.cause
}

// prepare sets the TUN to what both sides can take.
func (s *session) prepare() error {
	o := s.cfg.LocalOffloads.And(s.cfg.PeerOffloads)
	for _, q := range s.queues {
		if !q.VnetHeader() {
			o = 0
		}
		if err := q.SetDeadline(time.Time{}); err != nil {
			return &QueueError{q.Name(), err}
		}
	}
	if err := s.queues[0].SetOffloads(o); err != nil { // one setting for the device
		return &QueueError{s.queues[0].Name(), err}
	}
	return nil
}

// wake ends every wait of the session: those on a queue at once, those on a lane
// after the time that a polite end may take.
func (s *session) wake() {
	for _, q := range s.queues {
		_ = q.SetDeadline(past) // fails on a queue that is gone, which waits for nothing
	}
	deadline := past
	if _, _, polite := farewell(s.cause); polite {
		deadline = time.Now().Add(min(CloseGrace, s.cfg.DeadAfter))
	}
	for _, l := range s.lanes {
		_ = l.conn.SetDeadline(deadline) // fails on a closed connection, which waits for nothing
	}
}

func (s *session) closeLanes() error {
	var err error
	for _, l := range s.lanes {
		if e := l.conn.Close(); e != nil && !errors.Is(e, net.ErrClosed) {
			err = errors.Join(err, fmt.Errorf("lane %d: close: %w", l.index, e))
		}
	}
	return err
}
