package e2e

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"mknet/tests/netlab"
)

// sockets are opened by a thread that is inside the namespace; a socket stays in
// the namespace that it was made in.

// serveTCP accepts connections on an address of a namespace (nil: the host),
// answers each with one line, and returns the address.
func serveTCP(t *testing.T, ns *netlab.Namespace, addr string) string {
	t.Helper()
	var l net.Listener
	var err error
	in(t, ns, func() {
		// The child's address may be assigned a moment later than the link is up.
		l, err = net.Listen("tcp4", addr)
	})
	if err != nil {
		t.Fatalf("listen on %s: %v", addr, err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { l.Close(); <-done })
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(30 * time.Second))
			_, _ = io.WriteString(c, "hello\n")
			c.Close()
		}
	}()
	return addr
}

// connect opens a TCP connection from a namespace (nil: the host) and reads the
// line that serveTCP sends. One that is dropped takes all of three seconds.
func connect(ns *netlab.Namespace, addr string) error {
	script := fmt.Sprintf("exec 3<>/dev/tcp/%s && read -t 3 line <&3 && [ \"$line\" = hello ]", slash(addr))
	args := []string{"-s", "KILL", "3", "bash", "-c", script}
	var err error
	if ns == nil {
		_, err = netlab.Try("timeout", args...)
	} else {
		_, err = ns.Try("timeout", args...)
	}
	return err
}

func slash(addr string) string {
	host, port, _ := net.SplitHostPort(addr)
	return host + "/" + port
}

// in runs f with its thread in the namespace.
func in(t *testing.T, ns *netlab.Namespace, f func()) {
	t.Helper()
	if ns == nil {
		f()
		return
	}
	ns.Do(t, f)
}
