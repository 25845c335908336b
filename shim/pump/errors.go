package pump

import (
	"errors"
	"fmt"
	"time"

	wire "mknet/spec/pump"
)

// PeerClosedError is returned by Run when the peer ended the session and said
// why. Reason tells whether to connect again.
type PeerClosedError struct {
	Reason wire.Reason
	Text   string // printable, at most wire.MaxCloseTextBytes
}

func (e *PeerClosedError) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("the peer closed the session: %s", e.Reason)
	}
	return fmt.Sprintf("the peer closed the session: %s: %s", e.Reason, e.Text)
}

// DeadPeerError is returned by Run when nothing came from the peer for too long.
type DeadPeerError struct {
	Lane    int
	Silence time.Duration
}

func (e *DeadPeerError) Error() string {
	return fmt.Sprintf("lane %d: the peer was silent for %s", e.Lane, e.Silence)
}

// ProtocolError is returned by Run when the peer sent what is no frame, broke
// its credit, or a sealed frame did not open. It wraps a *wire.FrameError, a
// *wire.CreditError or ErrUnsealed.
type ProtocolError struct {
	Lane int
	Err  error
}

func (e *ProtocolError) Error() string { return fmt.Sprintf("lane %d: %v", e.Lane, e.Err) }
func (e *ProtocolError) Unwrap() error { return e.Err }

// ErrUnsealed is wrapped where a sealed frame does not open: it was altered,
// repeated, reordered or made with another key.
var ErrUnsealed = errors.New("sealed frame does not authenticate")

// LaneError is returned by Run when a connection broke without a reason from the
// peer: connect again.
type LaneError struct {
	Lane int
	Err  error
}

func (e *LaneError) Error() string { return fmt.Sprintf("lane %d: connection lost: %v", e.Lane, e.Err) }
func (e *LaneError) Unwrap() error { return e.Err }

// QueueError is returned by Run when a queue of the TUN failed, usually because
// the device is gone: close all queues and attach again.
type QueueError struct {
	Queue string // name of the device
	Err   error
}

func (e *QueueError) Error() string { return fmt.Sprintf("tun %s: %v", e.Queue, e.Err) }
func (e *QueueError) Unwrap() error { return e.Err }

// StopError as the cause of Run's context ([context.WithCancelCause]) tells the
// peer why the session ends.
type StopError struct {
	Reason wire.Reason
	Text   string // at most wire.MaxCloseTextBytes go to the peer
}

func (e *StopError) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("session stopped: %s", e.Reason)
	}
	return fmt.Sprintf("session stopped: %s: %s", e.Reason, e.Text)
}

// farewell is what to tell the peer about the end of a session. Not polite means
// that there is nobody to tell.
func farewell(cause error) (r wire.Reason, text string, polite bool) {
	var (
		closed   *PeerClosedError
		lost     *LaneError
		dead     *DeadPeerError
		protocol *ProtocolError
		queue    *QueueError
		stop     *StopError
	)
	switch {
	case errors.As(cause, &closed), errors.As(cause, &lost):
		return 0, "", false
	case errors.As(cause, &dead):
		return wire.Unresponsive, "", true // it may be deaf in one direction only
	case errors.As(cause, &protocol):
		return wire.Protocol, protocol.Err.Error(), true
	case errors.As(cause, &queue):
		return wire.LocalFault, "", true // what happens to our devices is none of its business
	case errors.As(cause, &stop):
		return stop.Reason, stop.Text, true
	}
	return wire.Shutdown, "", true
}
