package pods

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// A pod's namespace vanishes without a DEL, and the same container ID and interface
// are added in another network: the host links of both have one name. The release of
// the first, by its DEL or by the audit, takes nothing from the second.
func TestSuccessorOfTheSameHostLink(t *testing.T) {
	for _, c := range []struct {
		name    string
		release func(*testing.T, *node.Node, endpoint.Endpoint)
	}{
		{"DEL", func(t *testing.T, n *node.Node, a endpoint.Endpoint) {
			if err := n.Del(t, a); err != nil {
				t.Error(err)
			}
		}},
		{"audit", func(t *testing.T, n *node.Node, _ endpoint.Endpoint) {
			// A DEL that finds nothing is a reason to look.
			if _, err := n.CNI(t, node.Call{Verb: "DEL", ContainerID: "nobody", IfName: "eth0"}); err != nil {
				t.Error(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := node.New(t, podPools, "auditInterval: 10h")
			one, two, three := netlab.New(t), netlab.New(t), netlab.New(t)
			other := n.AddPod(t, "c2", two)
			a := n.AddPod(t, "c1", one)
			one.Remove(t)
			netlab.Eventually(t, node.Patience, func() error {
				if _, err := netlab.Try("ip", "link", "show", a.HostLink); err == nil {
					return fmt.Errorf("%s is still there", a.HostLink)
				}
				return nil
			})
			call := node.Call{Verb: "ADD", ContainerID: "c1", Netns: three.Path(), IfName: "eth0", Config: map[string]any{"mode": "veth", "name": "other"}}
			if _, err := n.CNI(t, call); err != nil {
				t.Fatal(err)
			}
			var b endpoint.Endpoint
			for _, ep := range n.List(t) {
				if ep.Network == "other" {
					b = ep
				}
			}
			if b.HostLink != a.HostLink || n.Endpoint(t, a.Generation) == nil {
				t.Fatalf("records %+v, want the first and another with its host link", n.List(t))
			}
			c.release(t, n, a)
			netlab.Eventually(t, node.Patience, func() error {
				if n.Endpoint(t, a.Generation) != nil {
					return errors.New("the first pod's record is still there")
				}
				return nil
			})
			call.Verb, call.Config["prevResult"] = "CHECK", node.PrevResult(b)
			if _, err := n.CNI(t, call); err != nil {
				t.Errorf("CHECK of the second pod: %v", err)
			}
			log, err := os.ReadFile(n.Dir + "/mknetd.log")
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(string(log)) {
				if strings.Contains(line, "repaired") {
					t.Errorf("something had to be repaired: %s", line)
				}
			}
			netlab.MustPing(t, three, other.Address.String())
			call.Verb = "DEL"
			if _, err := n.CNI(t, call); err != nil {
				t.Error(err)
			}
			podGone(t, b)
			if err := n.Del(t, other); err != nil {
				t.Error(err)
			}
			n.CheckInventory(t)
		})
	}
}
