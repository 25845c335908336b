package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// chained runs one meta plugin behind mk-cni, with the ADD's result as its
// prevResult.
func chained(t *testing.T, n *node.Node, verb, plugin string, c node.Call, prev json.RawMessage, config map[string]any) error {
	t.Helper()
	conf := map[string]any{"cniVersion": "1.1.0", "name": node.Network, "type": plugin, "prevResult": prev}
	for k, v := range config {
		conf[k] = v
	}
	stdin, err := json.Marshal(conf)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(node.Reference(t, "meta/"+plugin))
	cmd.Stdin = strings.NewReader(string(stdin))
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb, "CNI_CONTAINERID="+c.ContainerID, "CNI_NETNS="+c.Netns, "CNI_IFNAME="+c.IfName, "CNI_PATH="+n.Dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", plugin, verb, err, out)
	}
	return nil
}

// firewall puts an ACCEPT for the child at the head of FORWARD; siblings stay
// apart. portmap's DNAT reaches the child where the network lets it in.
func TestChainWithPortmapAndFirewall(t *testing.T) {
	for _, publish := range []bool{true, false} {
		t.Run(fmt.Sprintf("publishPorts %v", publish), func(t *testing.T) {
			n := node.New(t)
			first := node.Call{ContainerID: "c1", Netns: netlab.New(t).Path(), IfName: "eth0", Config: map[string]any{"publishPorts": publish}}
			second := node.Call{ContainerID: "c2", Netns: netlab.New(t).Path(), IfName: "eth0"}
			prev, prev2 := n.AddResult(t, first), n.AddResult(t, second)
			ports := map[string]any{"runtimeConfig": map[string]any{"portMappings": []any{map[string]any{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}}, "backend": "iptables"}
			for _, step := range []struct {
				plugin string
				call   node.Call
				prev   json.RawMessage
				config map[string]any
			}{{"portmap", first, prev, ports}, {"firewall", first, prev, map[string]any{"backend": "iptables"}}, {"firewall", second, prev2, map[string]any{"backend": "iptables"}}} {
				if err := chained(t, n, "ADD", step.plugin, step.call, step.prev, step.config); err != nil {
					t.Fatal(err)
				}
			}
			eps := n.List(t)
			if eps[0].ContainerID != "c1" {
				eps[0], eps[1] = eps[1], eps[0]
			}
			one, two := n.Boot(t, eps[0], "g1"), n.Boot(t, eps[1], "g1")
			netlab.ServeTCP(t, one.Namespace, eps[0].Address.String()+":80")
			err := netlab.Connect(n.Internet, netlab.HostAddr+":8080")
			if publish && err != nil {
				t.Errorf("the published port: %v", err)
			}
			if !publish && err == nil {
				t.Error("a port of a network that publishes none was reached")
			}
			netlab.MustNotPing(t, two.Namespace, eps[0].Address.String())
			netlab.MustPing(t, two.Namespace, netlab.InternetAddr)
			for i, ep := range eps {
				if err := n.Check(t, ep); err != nil {
					t.Errorf("CHECK of %d: %v", i, err)
				}
			}
			for _, c := range []*node.Child{one, two} {
				if err := c.StopShim(); err != nil {
					t.Error(err)
				}
			}
			for _, step := range []struct {
				plugin string
				call   node.Call
				prev   json.RawMessage
			}{{"firewall", second, prev2}, {"firewall", first, prev}, {"portmap", first, prev}} {
				config := map[string]any{"backend": "iptables"}
				if step.plugin == "portmap" {
					config = ports
				}
				if err := chained(t, n, "DEL", step.plugin, step.call, step.prev, config); err != nil {
					t.Error(err)
				}
			}
			for _, ep := range eps {
				if err := n.Del(t, ep); err != nil {
					t.Error(err)
				}
			}
			node.PurgeReference(t)
		})
	}
}

// sbr judges by source before our rule by interface and takes the link's routes
// away: the child's way out leads back into its own TUN. CHECK says so; tuning is
// fine. DEL works all the same.
func TestC16_SourceBasedRoutingBehindIsNamed(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	call := node.Call{ContainerID: "c1", Netns: pod.Path(), IfName: "eth0"}
	prev := n.AddResult(t, call)
	ep := n.List(t)[0]
	if err := chained(t, n, "ADD", "tuning", call, prev, map[string]any{"sysctl": map[string]string{"net.core.somaxconn": "500"}}); err != nil {
		t.Fatal(err)
	}
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK with tuning behind: %v", err)
	}
	if err := chained(t, n, "ADD", "sbr", call, prev, nil); err != nil {
		t.Fatal(err)
	}
	if err := n.Check(t, ep); err == nil || !strings.Contains(err.Error(), "foreign rule") {
		t.Errorf("CHECK with sbr behind says %v, want it to name the foreign rule", err)
	}
	if err := chained(t, n, "DEL", "sbr", call, prev, nil); err != nil {
		t.Error(err)
	}
	if err := n.Del(t, ep); err != nil {
		t.Error(err)
	}
}

// bandwidth is a capability of mk-cni: mknetd shapes, and CHECK sees it.
func TestBandwidthCapability(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	rate := map[string]any{"ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 4_000_000, "egressBurst": 400_000}
	ep := n.AddCall(t, node.Call{ContainerID: "c1", Netns: pod.Path(), IfName: "eth0", Config: map[string]any{"runtimeConfig": map[string]any{"bandwidth": rate}}})
	for where, out := range map[string]string{
		"towards the child, 8 Mbit": netlab.Run(t, "tc", "qdisc", "show", "dev", ep.HostLink),
		"from the child, 4 Mbit":    pod.Run(t, "tc", "qdisc", "show", "dev", ep.PeerLink),
	} {
		if !strings.Contains(out, "tbf") || !strings.Contains(out, strings.Fields(where)[3]+"Mbit") {
			t.Errorf("%s: %s", where, out)
		}
	}
	netlab.Run(t, "tc", "qdisc", "del", "dev", ep.HostLink, "root")
	if err := n.Check(t, ep); err == nil || !strings.Contains(err.Error(), "qdisc") {
		t.Errorf("CHECK without the shaper: %v", err)
	}
	if err := n.Del(t, ep); err != nil {
		t.Error(err)
	}
}
