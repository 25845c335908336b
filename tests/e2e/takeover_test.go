package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// A newer mknetd takes over under traffic and under calls: no packet is lost, no
// ADD or DEL fails, the shim and its TUN stay, and the socket is the same.
func TestTakeoverLosesNothing(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	tun := pod.Run(t, "ip", "-o", "link", "show", "eth0")
	socket, err := os.Lstat(n.Socket)
	if err != nil {
		t.Fatal(err)
	}
	pings := netlab.StartPings(t, child.Namespace)
	pings.FirstAnswer(t, node.Patience)
	for round := range 3 {
		first := n.DaemonPID()
		var callers sync.WaitGroup
		defer callers.Wait()
		for i := range 4 {
			other := netlab.New(t)
			call := node.Call{ContainerID: fmt.Sprintf("other%d-%d", round, i), Netns: other.Path(), IfName: "eth0"}
			callers.Go(func() {
				// A DEL that mknetd is too busy to take is queued, which is success too.
				for _, call.Verb = range []string{"ADD", "DEL"} {
					if _, err := n.CNI(t, call); err != nil {
						t.Errorf("%s while mknetd is taken over: %v", call.Verb, err)
					}
				}
			})
		}
		n.TakeOver(t)
		callers.Wait()
		if n.DaemonPID() == first {
			t.Fatal("the same mknetd serves")
		}
	}
	answered, lost := pings.Stop()
	t.Logf("3 takeovers under 12 ADDs and DELs: %d echo requests answered, %d lost", answered, lost)
	if lost > 0 || answered < 10 {
		t.Errorf("%d echo requests were answered and %d lost", answered, lost)
	}
	if now := pod.Run(t, "ip", "-o", "link", "show", "eth0"); now != tun {
		t.Errorf("the TUN was\n%s\nis\n%s", tun, now)
	}
	if now, err := os.Lstat(n.Socket); err != nil || !os.SameFile(now, socket) {
		t.Errorf("the socket is another one: %v", err)
	}
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	if err := child.StopShim(); err != nil {
		t.Errorf("mk-shim's orderly end: %v", err)
	}
	if err := n.Del(t, ep); err != nil {
		t.Error(err)
	}
	node.Gone(t, ep)
}

// At each step of a takeover either side may die: exactly one daemon serves then.
func TestTakeoverWhenEitherDies(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	steps := []string{"hello", "descriptors", "ready", "released", "serving"}
	for at, step := range steps {
		for _, victim := range []string{"first", "successor"} {
			t.Run(victim+" dies before "+step+" arrives", func(t *testing.T) {
				first := n.DaemonPID()
				between := intercept(t, n)
				second := n.StartSuccessor(t)
				pid := first
				if victim == "successor" {
					pid = second
				}
				got := between.relay(t, at, func() { n.KillProcess(pid) })
				if got != step {
					t.Errorf("step %d is %q, want %q", at, got, step)
				}
				if byNew := n.Settle(t); byNew != (victim == "first") {
					t.Errorf("the survivor serves: %v", byNew)
				}
				if err := n.Check(t, ep); err != nil {
					t.Errorf("CHECK: %v", err)
				}
				n.CheckInventory(t)
				between.remove()
				n.Stop(t)
				n.Start(t)
			})
		}
	}
	if err := n.Del(t, ep); err != nil {
		t.Error(err)
	}
}

// Who would listen elsewhere cannot take over; without a daemon it just starts.
func TestTakeoverThatIsRefused(t *testing.T) {
	n := node.New(t)
	out, err := said(n, "serve", "--takeover", "--socket", n.Dir+"/other.sock")
	if err == nil || !strings.Contains(out, "refuses") || !strings.Contains(out, n.Socket) {
		t.Errorf("with another socket: %v\n%s", err, out)
	}
	if out, err := said(n, "serve"); err == nil || !strings.Contains(out, "only one mknetd may run") {
		t.Errorf("a plain second instance: %v\n%s", err, out)
	}
	n.TakeOver(t)
	n.Kill(t) // leaves both sockets' files
	n.Start(t, "A=b")
	n.TakeOver(t)
}

// interceptor stands between the two sides of a takeover.
type interceptor struct {
	l    *net.UnixListener
	path string // its own, where the successor looks
	real string // the running daemon's socket
	// whole: relay goes on until either side ends the conversation.
	whole bool
}

func intercept(t *testing.T, n *node.Node) *interceptor {
	t.Helper()
	i := &interceptor{path: filepath.Join(n.Dir, "state", "takeover.sock")}
	i.real = i.path + ".real"
	if err := os.Rename(i.path, i.real); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: i.path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	i.l = l
	return i
}

func (i *interceptor) remove() {
	_ = i.l.Close()
	_ = os.Remove(i.real)
}

// relay passes messages on; before the one with the given number it calls kill, and
// passes it on unless its sender is dead. It returns the step of that message.
func (i *interceptor) relay(t *testing.T, at int, kill func()) string {
	t.Helper()
	successor, err := i.l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer successor.Close()
	first, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: i.real, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	step := "" // of the message at
	for k := 0; ; k++ {
		from, to := successor, first
		if k%2 == 1 {
			from, to = first, successor
		}
		text, oob := make([]byte, 8<<10), make([]byte, 256)
		if err := from.SetReadDeadline(time.Now().Add(2 * node.Patience)); err != nil {
			t.Fatal(err)
		}
		size, oobn, _, _, err := from.ReadMsgUnix(text, oob)
		if err != nil && k > at {
			return step
		}
		if err != nil {
			t.Fatalf("message %d: %v", k, err)
		}
		var m struct{ Step string }
		if err := json.Unmarshal(text[:size], &m); err != nil {
			t.Fatalf("message %d: %v: %q", k, err, text[:size])
		}
		if k == at {
			step = m.Step
			kill()
			if dead(from) {
				closePassed(t, oob[:oobn])
				return m.Step
			}
		}
		_, _, err = to.WriteMsgUnix(text[:size], oob[:oobn], nil) // fails where that side is dead
		closePassed(t, oob[:oobn])
		if k == at && !i.whole || k > at && err != nil {
			return step
		}
		if err != nil {
			t.Fatalf("message %d: %v", k, err)
		}
	}
}

// dead reports whether the other end of a connection is closed.
func dead(c *net.UnixConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	_ = raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		_, _ = unix.Poll(p, 0)
		gone = p[0].Revents&(unix.POLLRDHUP|unix.POLLHUP) != 0
	})
	return gone
}

// closePassed closes the descriptors that a message brought: a copy that stayed
// here would keep a socket alive.
func closePassed(t *testing.T, oob []byte) {
	t.Helper()
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	}
}
