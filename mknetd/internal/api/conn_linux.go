package api

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/spec/fdpass"
)

// maxPassed is how many descriptors one read has room for. The kernel drops
// those beyond and says so (MSG_CTRUNC); one is what a request may pass.
const maxPassed = 4

// passConn is a Unix connection that keeps a descriptor passed with a request
// (SCM_RIGHTS, unix(7)) until the request takes it. Only the first is kept: every
// other one is closed on arrival, and the request is told.
type passConn struct {
	*net.UnixConn
	peer  endpoint.Process
	onEnd func() // once, when the connection is closed

	oob [64]byte // fdpass.Room(maxPassed) is 32; read by one reader at a time

	mu       sync.Mutex
	file     *os.File
	excess   bool
	lost     bool // one was passed that this process had no room for
	closed   bool
	requests int
}

func (c *passConn) Read(p []byte) (int, error) {
	room := c.oob[:fdpass.Room(maxPassed)]
	// ReadMsgUnix sets MSG_CMSG_CLOEXEC: no child of ours inherits the descriptor.
	n, oobn, flags, _, err := c.UnixConn.ReadMsgUnix(p, room)
	if oobn > 0 {
		c.keep(room[:oobn])
	}
	if flags&unix.MSG_CTRUNC != 0 {
		// The kernel cuts the message short for want of room in the buffer, and for
		// want of a free descriptor (net/core/scm.c: scm_detach_fds).
		c.mu.Lock()
		if c.file == nil && !c.excess {
			c.lost = true
		} else {
			c.excess = true
		}
		c.mu.Unlock()
	}
	if errors.Is(err, io.EOF) {
		err = io.EOF // net wraps it here, which readers do not expect
	}
	return max(n, 0), err // net gives -1 with an error, which io.Reader does not allow
}

func (c *passConn) keep(oob []byte) {
	files, err := fdpass.Received(oob, "passed")
	if err != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range files {
		if c.closed || c.file != nil {
			c.excess = true
			_ = f.Close()
			continue
		}
		c.file = f
	}
}

// take hands over what was passed. excess says that there was more than one, lost
// that one could not be received.
func (c *passConn) take() (f *os.File, excess, lost bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f, excess, lost = c.file, c.excess, c.lost
	c.file, c.excess, c.lost = nil, false, false
	return f, excess, lost
}

// count numbers the requests of the connection, from 1.
func (c *passConn) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requests++
	return c.requests
}

// Close also closes a descriptor that no request took.
func (c *passConn) Close() error {
	c.mu.Lock()
	first := !c.closed
	c.closed = true
	f := c.file
	c.file = nil
	c.mu.Unlock()
	if f != nil {
		_ = f.Close()
	}
	err := c.UnixConn.Close()
	if first && c.onEnd != nil {
		c.onEnd()
	}
	return err
}

// send writes head, and then body together with the descriptors of files in one
// message. The files stay the caller's.
func (c *passConn) send(head, body []byte, files []*os.File) error {
	if _, err := c.Write(head); err != nil {
		return err
	}
	n, err := fdpass.Send(c.UnixConn, body, files...)
	if err != nil {
		return err
	}
	_, err = c.Write(body[n:])
	return err
}

// control runs f on the connection's descriptor.
func control(c syscall.Conn, f func(fd int) error) error {
	conn, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := conn.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return fmt.Errorf("use the descriptor: %w", err)
	}
	return inner
}
