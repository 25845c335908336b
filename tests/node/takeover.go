package node

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"

	"mknet/tests/netlab"
)

// StartSuccessor starts a second mknetd that takes over from the running one, and
// returns its process ID. Settle says which of them it was.
func (n *Node) StartSuccessor(t testing.TB) int {
	t.Helper()
	p, err := start(n.Dir+"/mknetd.log", nil, n.Daemon, "serve", "--config", n.Config, "--takeover")
	if err != nil {
		t.Fatal(err)
	}
	n.successor = p
	return p.cmd.Process.Pid
}

// Settle waits until exactly one of the two daemons lives and serves, and returns
// whether that is the successor. An ordered end of the other is no fault.
func (n *Node) Settle(t testing.TB) (successor bool) {
	t.Helper()
	netlab.Eventually(t, 2*Patience, func() error {
		if n.daemon.ended() == n.successor.ended() {
			return fmt.Errorf("of two daemons, have ended: the first %v, its successor %v", n.daemon.ended(), n.successor.ended())
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_, err := n.Client(t).Health(ctx)
		return err
	})
	successor = n.daemon.ended()
	if successor {
		n.daemon = n.successor
	}
	n.successor = nil
	return successor
}

// TakeOver replaces the running mknetd by another and fails the test unless the
// first ends in order.
func (n *Node) TakeOver(t testing.TB) {
	t.Helper()
	first := n.daemon
	n.StartSuccessor(t)
	if !n.Settle(t) {
		t.Fatal("the takeover failed: the first mknetd serves on")
	}
	if err := first.err(); err != nil {
		t.Errorf("the mknetd that was taken over from: %v", err)
	}
}

// KillProcess ends a process of this node, and waits for its end.
func (n *Node) KillProcess(pid int) {
	for _, p := range []*process{n.daemon, n.successor} {
		if p != nil && p.cmd.Process.Pid == pid {
			p.signal(syscall.SIGKILL)
			<-p.done
		}
	}
}
