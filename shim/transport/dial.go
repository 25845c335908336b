package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// bufferBytes is the size of every socket buffer: large enough for one flush of
// the pump, small enough that a stall does not deliver seconds of old packets.
const bufferBytes = 1 << 20

// maxHybridLine bounds a VMM's answer: "OK " and a port, Firecracker's vsock.md.
const maxHybridLine = 32

// Dial connects to the child. ctx bounds it, nothing after it. The error is a
// *DialError, or the cause of ctx when that was canceled. The connection is a
// syscall.Conn too.
func Dial(ctx context.Context, a Address) (net.Conn, error) {
	var conn net.Conn
	var err error
	switch a.scheme {
	case schemeVsock:
		if a.cid == anyCID {
			return nil, &AddressError{URL: a.String(), Reason: "needs a CID to dial"}
		}
		conn, err = dialVsock(ctx, a)
	case schemeHybrid:
		conn, err = dialHybrid(ctx, a)
	case schemeUnix:
		conn, err = dialUnix(ctx, a.path)
	default:
		return nil, &AddressError{URL: a.String(), Reason: "is empty"}
	}
	if err != nil {
		return nil, dialError(ctx, a, err)
	}
	return conn, nil
}

func dialUnix(ctx context.Context, path string) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	setUnixBuffers(conn)
	return conn, nil
}

// dialHybrid asks a VMM for a port of its guest: "CONNECT port\n", answered by
// "OK hostport\n" when the guest accepts, and by the end of the connection when
// it does not.
func dialHybrid(ctx context.Context, a Address) (net.Conn, error) {
	conn, err := dialUnix(ctx, a.path)
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	err = conn.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	if err == nil {
		_, err = fmt.Fprintf(conn, "CONNECT %d\n", a.port)
	}
	if err == nil {
		err = readHybridAnswer(conn)
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// readHybridAnswer reads one line and not a byte more: what follows is the
// guest's.
func readHybridAnswer(r io.Reader) error {
	line := make([]byte, 0, maxHybridLine)
	for {
		if len(line) == maxHybridLine {
			return fmt.Errorf("the VMM's answer is longer than %d bytes: %q", maxHybridLine, line)
		}
		n, err := r.Read(line[len(line) : len(line)+1])
		line = line[:len(line)+n]
		if n == 1 && line[len(line)-1] == '\n' {
			break
		}
		if err != nil {
			return fmt.Errorf("the VMM answers %q: %w", line, err)
		}
	}
	port, ok := strings.CutPrefix(string(line[:len(line)-1]), "OK ")
	if _, err := strconv.ParseUint(port, 10, 32); !ok || err != nil {
		return fmt.Errorf("the VMM answers %q, not \"OK port\"", line)
	}
	return nil
}

// setUnixBuffers enlarges the buffers as far as the kernel lets us: without
// CAP_NET_ADMIN net.core.wmem_max is the limit, which only costs speed.
func setUnixBuffers(conn net.Conn) {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		for _, o := range [][2]int{{unix.SO_SNDBUFFORCE, unix.SO_SNDBUF}, {unix.SO_RCVBUFFORCE, unix.SO_RCVBUF}} {
			if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, o[0], bufferBytes) != nil {
				_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, o[1], bufferBytes)
			}
		}
	})
}
