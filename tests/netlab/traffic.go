package netlab

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"
)

// MustPing fails the test unless one echo request from ns is answered.
func MustPing(t testing.TB, ns *Namespace, addr string, more ...string) {
	t.Helper()
	args := append([]string{"-c3", "-i0.2", "-W20"}, more...)
	if _, err := ns.Try("ping", append(args, addr)...); err != nil {
		t.Errorf("ping %s: %v", addr, err)
	}
}

// MustNotPing fails the test when an echo request is answered.
func MustNotPing(t testing.TB, ns *Namespace, addr string, more ...string) {
	t.Helper()
	args := append([]string{"-c2", "-i0.2", "-W1"}, more...)
	if out, err := ns.Try("ping", append(args, addr)...); err == nil {
		t.Errorf("ping %s was answered:\n%s", addr, out)
	}
}

// ServeTCP accepts connections on an address of a namespace (nil: the host),
// answers each with one line, and returns the address.
func ServeTCP(t testing.TB, ns *Namespace, addr string) string {
	t.Helper()
	var l net.Listener
	var err error
	ns.Do(t, func() {
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

// Connect opens a TCP connection from a namespace (nil: the host) and reads the
// line that ServeTCP sends. One that is dropped takes all of three seconds.
func Connect(ns *Namespace, addr string) error {
	script := fmt.Sprintf("exec 3<>/dev/tcp/%s && read -t 3 line <&3 && [ \"$line\" = hello ]", slash(addr))
	args := []string{"-s", "KILL", "3", "bash", "-c", script}
	var err error
	if ns == nil {
		_, err = Try("timeout", args...)
	} else {
		_, err = ns.Try("timeout", args...)
	}
	return err
}

func slash(addr string) string {
	host, port, _ := net.SplitHostPort(addr)
	return host + "/" + port
}
