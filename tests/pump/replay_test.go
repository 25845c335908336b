package pump

import (
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// What a shim once sent, sent again by somebody who only listened, neither ends
// the session that stands nor gives an unconfigured child its interface.
func TestReplayChangesNothing(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.BootAlone(t, ep, "g1")
	socket := strings.TrimPrefix(child.Agent(), "unix://")
	tap := n.Dir + "/tap.sock"
	recorded := record(t, tap, socket)
	args := child.ShimArgs()
	args[slices.Index(args, "--agent")+1] = "unix://" + tap
	startShim(t, n, args...)
	child.WaitLink(t)
	sessions, index := shimStats(t, n, ep).Counters.Sessions, linkIndex(t, child.Namespace)
	lanes := recorded()
	if len(lanes) < 1 || len(lanes[0]) < 100 {
		t.Fatalf("recorded %d connections", len(lanes))
	}
	pings := netlab.StartPings(t, child.Namespace)
	pings.FirstAnswer(t, node.Patience)
	for _, lane := range lanes {
		replay(t, socket, lane)
	}
	child.WaitLink(t)
	if _, lost := pings.Stop(); lost > 0 {
		t.Errorf("%d echo requests were lost to a replay", lost)
	}
	if after := shimStats(t, n, ep).Counters.Sessions; after != sessions {
		t.Errorf("%d sessions after the replay, had %d", after, sessions)
	}
	// A child that has just booted: another agent, and no interface yet.
	unbind(t, n, ep) // which ends the shim
	child.KillAgent()
	child.Run(t, "ip", "link", "del", "mkn0")
	child.StartAgent(t)
	netlab.Eventually(t, node.Patience, func() error {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	for _, lane := range lanes {
		replay(t, socket, lane)
	}
	if links := child.Run(t, "ip", "-o", "link"); strings.Contains(links, "mkn0") {
		t.Errorf("a replay has made an interface (it was %s):\n%s", index, links)
	}
}

// record passes connections to a socket on to another and keeps what the dialing
// side sends first.
func record(t *testing.T, from, to string) (recorded func() [][]byte) {
	t.Helper()
	const keep = 4096 // a handshake is less
	l, err := net.Listen("unix", from)
	if err != nil {
		t.Fatal(err)
	}
	var (
		mu   sync.Mutex
		all  [][]byte
		work sync.WaitGroup
	)
	work.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("unix", to)
			if err != nil {
				_ = near.Close()
				continue
			}
			mu.Lock()
			i := len(all)
			all = append(all, nil)
			mu.Unlock()
			work.Go(func() { _, _ = io.Copy(near, far); _ = near.Close() })
			work.Go(func() {
				defer far.Close()
				buf := make([]byte, 64<<10)
				for {
					got, err := near.Read(buf)
					mu.Lock()
					all[i] = append(all[i], buf[:min(got, keep-len(all[i]))]...)
					mu.Unlock()
					if _, werr := far.Write(buf[:got]); err != nil || werr != nil {
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); work.Wait() })
	return func() [][]byte {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(all)
	}
}

// replay sends what was recorded and waits for the agent to end the connection.
func replay(t *testing.T, socket string, text []byte) {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(node.Patience)); err != nil {
		t.Fatal(err)
	}
	_, _ = conn.Write(text) // the agent may have ended it by then
	if _, err := io.Copy(io.Discard, conn); err != nil && !strings.Contains(err.Error(), "reset") {
		t.Errorf("the agent does not end the connection: %v", err)
	}
}
