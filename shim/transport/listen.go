package transport

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"
)

// CIDs that a shim may come from.
const (
	CIDMultikernel uint32 = 0 // the primary, by the multikernel transport
	CIDLoopback    uint32 = 1 // the same kernel: tests only
	CIDHost        uint32 = 2 // the host of a virtual machine
)

// Options of Listen.
type Options struct {
	// AllowedCIDs are the vsock peers that are let in; nil means CIDHost, with
	// transport=multikernel CIDMultikernel.
	AllowedCIDs []uint32
	// Rejected is told about peers that are not, at most one a second: they may
	// come as fast as they like. It may be nil.
	Rejected func(peer net.Addr, reason string)
}

// Listen makes the agent's listener. A vsock peer of another CID, and a Unix
// peer that is neither root nor our own user, is closed before a byte is read.
// A Unix socket gets mode 0600; one that nobody serves any more is replaced.
func Listen(ctx context.Context, a Address, o Options) (net.Listener, error) {
	var l net.Listener
	var err error
	switch a.scheme {
	case schemeVsock:
		if l, err = listenVsock(a); err != nil {
			err = listenHint(a, err)
		}
	case schemeUnix:
		l, err = listenUnix(ctx, a.path)
	default:
		return nil, &AddressError{URL: a.String(), Reason: "cannot be listened on, use vsock:// in the child"}
	}
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", a, err)
	}
	allowed := o.AllowedCIDs
	if allowed == nil {
		allowed = []uint32{CIDHost}
		if a.multikernel {
			allowed = []uint32{CIDMultikernel}
		}
	}
	return &gate{Listener: l, allowed: allowed, rejected: o.Rejected}, nil
}

func listenHint(a Address, err error) error {
	switch {
	case errors.Is(err, errUnsupported):
		return err
	case errors.Is(err, unix.EAFNOSUPPORT):
		return fmt.Errorf("%w (modprobe vmw_vsock_virtio_transport)", err)
	case errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.ENODEV):
		return fmt.Errorf("%w (no vsock transport has CID %d here)", err, a.cid)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w (a port below 1024 needs CAP_NET_BIND_SERVICE)", err)
	}
	return err
}

// gate lets in only peers that may be a shim.
type gate struct {
	net.Listener
	allowed  []uint32
	rejected func(net.Addr, string)
	told     time.Time // when rejected was called last; Accept has one caller
}

// Accept waits for a peer that is let in.
func (g *gate) Accept() (net.Conn, error) {
	for {
		conn, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		reason := g.refusal(conn)
		if reason == "" {
			setUnixBuffers(conn)
			return conn, nil
		}
		peer := conn.RemoteAddr()
		_ = conn.Close() // nothing was read or written
		if now := time.Now(); g.rejected != nil && now.Sub(g.told) >= time.Second {
			g.told = now
			g.rejected(peer, reason)
		}
	}
}

// refusal is why conn is not let in; empty when it is.
func (g *gate) refusal(conn net.Conn) string {
	switch c := conn.(type) {
	case *net.UnixConn:
		cred, err := peerCredentials(c)
		if err != nil {
			return fmt.Sprintf("peer credentials: %v", err)
		}
		if cred.Uid != 0 && int(cred.Uid) != os.Geteuid() {
			return fmt.Sprintf("user %d is neither root nor ours", cred.Uid)
		}
		return ""
	default:
		peer, ok := conn.RemoteAddr().(*vsock.Addr)
		if !ok {
			return "unknown kind of peer address"
		}
		if !slices.Contains(g.allowed, peer.ContextID) {
			return fmt.Sprintf("CID %d is not allowed, only %v", peer.ContextID, g.allowed)
		}
		return ""
	}
}

func peerCredentials(c *net.UnixConn) (cred *unix.Ucred, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	ctrlErr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return cred, errors.Join(ctrlErr, err)
}

func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	if err := removeStale(ctx, path); err != nil {
		return nil, err
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		// The mode of the unbound socket becomes that of the file (unix_bind_bsd,
		// net/unix/af_unix.c): there is no moment in which others may connect.
		ctrlErr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(ctrlErr, err)
	}}
	return lc.Listen(ctx, "unix", path)
}

// removeStale removes a socket that nobody listens on.
func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s is there and is not a socket", path)
	}
	conn, err := dialUnix(ctx, path)
	if err == nil {
		return errors.Join(fmt.Errorf("%w: somebody serves it", unix.EADDRINUSE), conn.Close())
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return err
	}
	return os.Remove(path)
}
