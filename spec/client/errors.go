package client

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"
)

// ErrUnreachable is what every *UnreachableError matches.
var ErrUnreachable = errors.New("mknetd is unreachable")

// Reason says why there was no answer.
type Reason string

// The reasons.
const (
	NotThere Reason = "not there" // the socket's file or the host does not exist
	Refused  Reason = "refused"   // nobody listens
	TimedOut Reason = "timed out" // no whole answer before the context's deadline
	Broken   Reason = "broken"    // the connection ended before a whole answer
)

// UnreachableError says that mknetd gave no answer. It matches ErrUnreachable,
// and what lies below (fs.ErrNotExist, context.DeadlineExceeded, ...).
type UnreachableError struct {
	Addr   string
	Reason Reason
	Err    error
}

func (e *UnreachableError) Error() string {
	next := ""
	switch e.Reason {
	case NotThere, Refused:
		next = " (is mknetd running?)"
	}
	return fmt.Sprintf("mknetd at %s: %s: %v%s", e.Addr, e.Reason, e.Err, next)
}

func (e *UnreachableError) Is(target error) bool { return target == ErrUnreachable }
func (e *UnreachableError) Unwrap() error        { return e.Err }

// ReplyError says that an answer is not what the API promises: another program
// listens there, or a version that does not fit.
type ReplyError struct {
	Addr, Call string // "POST /v1/endpoints"
	Why        string
}

func (e *ReplyError) Error() string {
	return fmt.Sprintf("mknetd at %s: %s: unexpected answer: %s", e.Addr, e.Call, e.Why)
}

// transportError sorts an error that came in place of an answer. What proves that
// somebody refused us (permissions, a certificate) is not "unreachable".
func transportError(ctx context.Context, addr, call string, err error) error {
	unreachable := func(r Reason) error { return &UnreachableError{Addr: addr, Reason: r, Err: err} }
	var op *net.OpError
	var timeout interface{ Timeout() bool }
	switch {
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("mknetd at %s: %s: %w (only root and the configured socketGroup may call)", addr, call, err)
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		return fmt.Errorf("mknetd at %s: %s: %w", addr, call, err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded),
		errors.Is(err, syscall.EAGAIN), // the listener's backlog is full: it does not accept
		errors.As(err, &timeout) && timeout.Timeout():
		return unreachable(TimedOut)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return unreachable(NotThere)
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOTSOCK):
		return unreachable(Refused)
	case isTLS(err):
		return fmt.Errorf("mknetd at %s: %s: %w", addr, call, err)
	case errors.As(err, &op) && op.Op == "dial":
		return unreachable(NotThere)
	}
	return unreachable(Broken)
}
