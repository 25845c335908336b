package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Kind is why a peer could not be reached.
type Kind string

// The kinds. What they have in common: the peer was not reached, so nothing is
// known about who it is.
const (
	// NoDevice: this kernel has no way to that child: no vsock, no such CID, no
	// VMM behind the socket. The child does not run yet, or not any more.
	NoDevice Kind = "no device"
	// Refused: the child's kernel answers, but nobody listens on the port.
	Refused Kind = "refused"
	// TimedOut: no answer: the child is booting, or hangs.
	TimedOut Kind = "timed out"
	// Unsupported: this kernel lacks what the address asks for. No retry helps.
	Unsupported Kind = "unsupported"
	// Denied: this process may not.
	Denied Kind = "not permitted"
	// Other: anything else.
	Other Kind = "failed"
)

// DialError is what Dial returns, but for a *AddressError.
type DialError struct {
	Address Address
	Kind    Kind
	Err     error
}

func (e *DialError) Error() string {
	return fmt.Sprintf("dial %s: %s: %v%s", e.Address, e.Kind, e.Err, e.hint())
}

// Unwrap gives the cause.
func (e *DialError) Unwrap() error { return e.Err }

// Is matches another *DialError by Kind alone, so that
// errors.Is(err, &DialError{Kind: Refused}) works.
func (e *DialError) Is(target error) bool {
	t, ok := target.(*DialError)
	return ok && t.Kind == e.Kind && t.Err == nil
}

func (e *DialError) hint() string {
	switch {
	case e.Kind == Unsupported && e.Address.multikernel:
		return " (this kernel has no multikernel vsock transport: use vsock:// without the option, or a multikernel kernel)"
	case e.Kind == NoDevice && errors.Is(e.Err, unix.EAFNOSUPPORT):
		return " (modprobe vsock and the transport's module: vhost_vsock, vmw_vsock_virtio_transport or vsock_loopback)"
	case e.Kind == NoDevice && e.Address.scheme == schemeVsock:
		return fmt.Sprintf(" (no child has CID %d, or its vsock transport is not loaded)", e.Address.cid)
	case e.Kind == NoDevice && e.Address.scheme == schemeHybrid:
		return " (the VMM does not run, or its vsock socket is elsewhere)"
	case e.Kind == Refused:
		return " (is mk-agent running there?)"
	case e.Kind == Denied:
		return " (needs root)"
	}
	return ""
}

// dialError sorts a cause into a kind. The errnos are those of
// net/vmw_vsock/af_vsock.c, virtio_transport_common.c and vhost/vsock.c.
func dialError(ctx context.Context, a Address, err error) error {
	e := &DialError{Address: a, Kind: Other, Err: err}
	switch {
	case ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded):
		return context.Cause(ctx)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		e.Kind = TimedOut
	case errors.Is(err, errUnsupported):
		e.Kind = Unsupported
	case errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH),
		errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ESOCKTNOSUPPORT):
		e.Kind = NoDevice
	case errors.Is(err, fs.ErrNotExist):
		// A missing socket file: the VMM is not there, or the development agent.
		e.Kind = Refused
		if a.scheme == schemeHybrid {
			e.Kind = NoDevice
		}
	case errors.Is(err, unix.ECONNREFUSED) && a.scheme == schemeHybrid:
		e.Kind = NoDevice // a socket file that a dead VMM left
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE), errors.Is(err, io.EOF):
		e.Kind = Refused
	case errors.Is(err, unix.ETIMEDOUT):
		e.Kind = TimedOut
	case errors.Is(err, fs.ErrPermission):
		e.Kind = Denied
	}
	return e
}

// errUnsupported marks that the kernel lacks a socket option.
var errUnsupported = errors.New("the kernel does not know SO_VM_SOCKETS_TRANSPORT")

var _ net.Error = (*DialError)(nil)

// Timeout reports whether the peer did not answer in time.
func (e *DialError) Timeout() bool { return e.Kind == TimedOut }

// Temporary reports whether a later attempt may work. Part of net.Error.
func (e *DialError) Temporary() bool { return e.Kind != Unsupported && e.Kind != Denied }
