package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"mknet/spec/pump"
)

// Errors of a handshake that callers branch on. Mismatches are a
// *pump.MismatchError; bytes that are not this protocol are
// pump.ErrMalformedHello, pump.ErrMalformedMessage or pump.ErrMalformedConfig.
var (
	// ErrAuthentication: the two ends do not hold the same token, or a byte was
	// changed on the way. A retry does not help.
	ErrAuthentication = errors.New("authentication failed")
	// ErrTimeout: the peer took longer than the handshake may. Retry.
	ErrTimeout = errors.New("handshake timed out")
	// ErrClosed: the peer ended the connection inside the handshake. Retry.
	ErrClosed = errors.New("peer closed the connection during the handshake")
	// ErrNextToken: the agent's token is single-use and the next one could not be
	// made or kept on our side.
	ErrNextToken = errors.New("the agent's single-use token cannot be replaced")
	// ErrNoSession: a latency lane came without the session that it belongs to.
	ErrNoSession = errors.New("no session waits for this lane")
	// ErrDisplaced is the cause with which a newer session of the same link ends
	// an older one.
	ErrDisplaced = errors.New("displaced by a newer session")
)

// RefusedError says that the confirmed agent could not apply the link
// configuration. Text comes from the child: treat it as data.
type RefusedError struct{ Text string }

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the agent could not configure the link: %q", e.Text)
}

// classify turns what a connection or a decoder said into the errors above.
func classify(err error) error {
	var refused *pump.RefusedError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &refused):
		switch refused.Reason {
		case pump.RefusedAuth:
			return fmt.Errorf("%w: %w", ErrAuthentication, err)
		case pump.RefusedNoSession:
			return fmt.Errorf("%w: %w", ErrNoSession, err)
		}
		return err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%w: %w", ErrTimeout, err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.ErrClosedPipe), errors.Is(err, net.ErrClosed),
		errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.ENOTCONN):
		return fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return err
}

// withContext prefers the reason of a context that is over to the I/O error that
// it caused.
func withContext(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// refusalFor is what the other end is told about err, and whether to tell it.
func refusalFor(err error) (pump.Refusal, bool) {
	var mismatch *pump.MismatchError
	switch {
	case errors.Is(err, ErrAuthentication):
		return pump.RefusedAuth, true
	case errors.As(err, &mismatch):
		return pump.RefusedMismatch, true
	case errors.Is(err, pump.ErrMalformedMessage), errors.Is(err, pump.ErrMalformedConfig):
		return pump.RefusedMalformed, true
	case errors.Is(err, ErrNoSession):
		return pump.RefusedNoSession, true
	}
	return 0, false // not our protocol, gone, or too slow: say nothing
}
