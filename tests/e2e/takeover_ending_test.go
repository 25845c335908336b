package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// A takeover from a mknetd that was told to end, and still waits for a call: the
// successor waits for it, longer than a plain second mknetd does.
func TestTakeoverFromOneThatEnds(t *testing.T) {
	n := node.New(t)
	call := begin(t, n)
	n.Signal(syscall.SIGTERM)
	netlab.Eventually(t, node.Patience, func() error {
		if _, err := os.Lstat(n.Socket); !errors.Is(err, fs.ErrNotExist) {
			return errors.New("the socket is still there")
		}
		return nil
	})
	n.StartSuccessor(t)
	waitLogged(t, n, "waiting for another mknetd to end") // it has found the store in use for 2 s
	if err := call.Close(); err != nil {
		t.Error(err)
	}
	if !n.Settle(t) {
		t.Error("the one that was told to end serves")
	}
	n.TakeOver(t)
}

// A mknetd that is told to end once a successor has its sockets is still taken over
// from: the sockets stay.
func TestTakeoverFromOneToldToEndMeanwhile(t *testing.T) {
	n := node.New(t)
	before, err := os.Lstat(n.Socket)
	if err != nil {
		t.Fatal(err)
	}
	between := intercept(t, n)
	between.whole = true
	n.StartSuccessor(t)
	got := between.relay(t, 2, func() {
		n.Signal(syscall.SIGTERM)
		waitLogged(t, n, "told to end")
	})
	if got != "ready" {
		t.Errorf("the step is %q", got)
	}
	if !n.Settle(t) {
		t.Error("the one that was told to end serves")
	}
	if now, err := os.Lstat(n.Socket); err != nil || !os.SameFile(now, before) {
		t.Errorf("the socket is another one: %v", err)
	}
	between.remove()
}

// A successor that lost its conversation, and waits for the store, makes new sockets
// where the mknetd before has ended and taken their files with it.
func TestTakeoverOfSocketsThatAreGone(t *testing.T) {
	n := node.New(t)
	between := intercept(t, n)
	n.StartSuccessor(t)
	if got := between.relay(t, 1, func() {}); got != "descriptors" { // and hangs up on both
		t.Errorf("the step is %q", got)
	}
	waitLogged(t, n, "waiting for another mknetd to end")
	between.remove()
	n.Signal(syscall.SIGTERM)
	if !n.Settle(t) {
		t.Error("the one that was told to end serves")
	}
	n.TakeOver(t)
}

// begin begins a call, of which mknetd waits for the rest.
func begin(t *testing.T, n *node.Node) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", n.Socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(2 * node.Patience)); err != nil {
		t.Fatal(err)
	}
	// The answer to Expect comes once the body is read (RFC 9110, 10.1.1).
	if _, err := io.WriteString(c, "POST /v1/endpoints HTTP/1.1\r\nHost: mknetd\r\nContent-Type: application/json\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(line, "100 Continue") {
		t.Fatalf("got %q, %v", line, err)
	}
	return c
}

// waitLogged waits until a mknetd of the node has logged text.
func waitLogged(t *testing.T, n *node.Node, text string) {
	t.Helper()
	netlab.Eventually(t, node.Patience, func() error {
		log, err := os.ReadFile(n.Dir + "/mknetd.log")
		if err == nil && !strings.Contains(string(log), text) {
			err = fmt.Errorf("nobody logged %q", text)
		}
		return err
	})
}
