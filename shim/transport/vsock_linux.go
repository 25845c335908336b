package transport

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"

	"github.com/mdlayher/socket"
	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"
)

// The multikernel tree's include/uapi/linux/vm_sockets.h.
const (
	soVMSocketsTransport = 9
	transportMultikernel = 1
)

// vsockConn is an AF_VSOCK stream. The socket's SyscallConn serves the pump.
type vsockConn struct {
	*socket.Conn
	local, remote *vsock.Addr
}

// LocalAddr is part of net.Conn.
func (c *vsockConn) LocalAddr() net.Addr { return c.local }

// RemoteAddr is part of net.Conn.
func (c *vsockConn) RemoteAddr() net.Addr { return c.remote }

// vsockSocket makes a socket with its buffers and transport set.
func vsockSocket(a Address) (*socket.Conn, error) {
	c, err := socket.Socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0, "vsock", nil)
	if err != nil {
		return nil, err
	}
	if err := setVsockOptions(c, a.multikernel); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// optionSetter is what setVsockOptions needs of a socket.
type optionSetter interface {
	SetsockoptInt(level, opt, value int) error
	SetsockoptBytes(level, opt int, b []byte) error
}

func setVsockOptions(c optionSetter, multikernel bool) error {
	if multikernel {
		// Before connect and bind: the transport is chosen there.
		err := c.SetsockoptInt(unix.AF_VSOCK, soVMSocketsTransport, transportMultikernel)
		switch {
		case errors.Is(err, unix.ENOPROTOOPT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
			return fmt.Errorf("%w: %w", errUnsupported, err)
		case err != nil:
			return fmt.Errorf("set SO_VM_SOCKETS_TRANSPORT: %w", err)
		}
	}
	// The maximum first: the kernel clips the size to it, and its default is
	// 256 KiB (VIRTIO_VSOCK_MAX_BUF_SIZE, af_vsock.c). Both are u64.
	size := binary.NativeEndian.AppendUint64(nil, bufferBytes)
	for _, opt := range []int{unix.SO_VM_SOCKETS_BUFFER_MAX_SIZE, unix.SO_VM_SOCKETS_BUFFER_SIZE} {
		err := c.SetsockoptBytes(unix.AF_VSOCK, opt, size)
		if err != nil && !errors.Is(err, unix.ENOPROTOOPT) { // a transport without credit has no such buffer
			return fmt.Errorf("set the vsock buffer size: %w", err)
		}
	}
	return nil
}

func dialVsock(ctx context.Context, a Address) (net.Conn, error) {
	c, err := vsockSocket(a)
	if err != nil {
		return nil, err
	}
	if _, err := c.Connect(ctx, &unix.SockaddrVM{CID: a.cid, Port: a.port}); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	local, err := c.Getsockname()
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	conn := &vsockConn{Conn: c, local: &vsock.Addr{}, remote: &vsock.Addr{ContextID: a.cid, Port: a.port}}
	if vm, ok := local.(*unix.SockaddrVM); ok {
		conn.local = &vsock.Addr{ContextID: vm.CID, Port: vm.Port}
	}
	return conn, nil
}

// vsockListener accepts peers of any CID; filter them with cidListener.
type vsockListener struct {
	c    *socket.Conn
	addr *vsock.Addr
}

func listenVsock(a Address) (net.Listener, error) {
	c, err := vsockSocket(a)
	if err != nil {
		return nil, err
	}
	if err := c.Bind(&unix.SockaddrVM{CID: a.cid, Port: a.port}); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	if err := c.Listen(unix.SOMAXCONN); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &vsockListener{c: c, addr: &vsock.Addr{ContextID: a.cid, Port: a.port}}, nil
}

// Accept is part of net.Listener.
func (l *vsockListener) Accept() (net.Conn, error) {
	c, sa, err := l.c.Accept(context.Background(), 0)
	if err != nil {
		return nil, err
	}
	vm, ok := sa.(*unix.SockaddrVM)
	if !ok {
		return nil, errors.Join(fmt.Errorf("peer address of type %T", sa), c.Close())
	}
	// The buffers are inherited from the listener (__vsock_create, af_vsock.c).
	return &vsockConn{Conn: c, local: l.addr, remote: &vsock.Addr{ContextID: vm.CID, Port: vm.Port}}, nil
}

// Close is part of net.Listener.
func (l *vsockListener) Close() error { return l.c.Close() }

// Addr is part of net.Listener.
func (l *vsockListener) Addr() net.Addr { return l.addr }
