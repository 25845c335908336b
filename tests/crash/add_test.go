package crash

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// D22: mknetd dies at each step of an ordinary pod's ADD, the runtime's DEL comes
// while it is down, and once it is back no address, record or link is left. With
// MKNET_CRASH_WALK=all it dies at every visit, else at one of each point.
func TestD22KilledDuringADD(t *testing.T) {
	usePrograms(t, filepath.Join(t.TempDir(), "bin"))
	const pool = "10.91.0.0/29"
	n := node.Prepare(t, "pools: [{name: pods, prefix: "+pool+"}]", "quarantine: 0s", "auditInterval: 0s")
	ns := netlab.New(t)
	veth := map[string]any{"mode": "veth"}
	call := func(verb string) error {
		_, err := n.CNI(t, node.Call{Verb: verb, ContainerID: "c1", Netns: ns.Path(), IfName: "eth0", Config: veth})
		return err
	}
	n.Start(t) // a start without a store visits other points
	n.Kill(t)
	trace := filepath.Join(n.Dir, "trace")
	n.Start(t, "MKNET_CRASH_TRACE="+trace)
	started := len(visitsIn(t, trace))
	free := freeAddresses(t, n)
	if want := 1<<(32-netip.MustParsePrefix(pool).Bits()) - 3; free != want { // the network's, its gateway's, the broadcast
		t.Fatalf("%d addresses are free before the first ADD, want %d", free, want)
	}
	if err := call("ADD"); err != nil {
		t.Fatal(err)
	}
	visits := visitsIn(t, trace)[started:]
	if err := call("DEL"); err != nil {
		t.Fatal(err)
	}
	n.Kill(t)
	if os.Getenv("MKNET_CRASH_WALK") != "all" {
		visits = oneOfEach(visits)
	}
	if len(visits) < 5 {
		t.Fatalf("the ADD visits only %v", visits)
	}
	for _, point := range visits {
		t.Run(strings.ReplaceAll(point, "/", ":"), func(t *testing.T) {
			n.Start(t, "MKNET_CRASH="+point)
			if err := call("ADD"); err == nil && !strings.HasPrefix(point, "api.reply-sent") {
				t.Error("the ADD succeeded, though mknetd was to die before it answers")
			}
			n.WaitDead(t)
			if err := call("DEL"); err != nil {
				t.Errorf("DEL while mknetd is down: %v", err)
			}
			n.Start(t)
			netlab.Eventually(t, node.Patience, func() error {
				if left := n.List(t); len(left) != 0 {
					return fmt.Errorf("left: %s, %s", left[0].Attachment, left[0].State)
				}
				if got := freeAddresses(t, n); got != free {
					return fmt.Errorf("%d addresses are free, %d before", got, free)
				}
				if _, err := ns.Try("ip", "link", "show", "eth0"); err == nil {
					return errors.New("the pod still has its interface")
				}
				return nil
			})
			n.CheckInventory(t)
			n.Kill(t)
		})
	}
	t.Logf("killed at %d of the points that an ADD visits", len(visits))
}

// visitsIn are the visits that a process has recorded so far.
func visitsIn(t *testing.T, trace string) (visits []string) {
	t.Helper()
	text, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); strings.Contains(line, "#") {
			visits = append(visits, line)
		}
	}
	return visits
}

// oneOfEach keeps the first visit of each declared point.
func oneOfEach(visits []string) []string {
	seen := map[string]bool{}
	return slices.DeleteFunc(visits, func(v string) bool {
		point := visit{Point: v}.point()
		old := seen[point]
		seen[point] = true
		return old
	})
}

// freeAddresses is how many addresses the first pool has to give.
func freeAddresses(t *testing.T, n *node.Node) int {
	t.Helper()
	conf, err := n.Client(t).Config(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return int(conf.Pools[0].Free)
}
