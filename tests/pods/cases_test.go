package pods

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// onlyPort80 lets others connect to the pod named server by that port alone.
var onlyPort80 = document("SecurityGroup", "web", "{ingress: [{protocol: tcp, ports: [{port: 80}]}]}") +
	document("Attachment", "web", "{securityGroupRefs: [{name: web}], endpoints: [{name: server}]}")

// policed are two pods under onlyPort80; the server listens on 80 and 81.
func policed(t *testing.T, config ...string) (n *node.Node, client *netlab.Namespace, a, b endpoint.Endpoint) {
	t.Helper()
	n = node.New(t, append([]string{podPools}, config...)...)
	one, two := netlab.New(t), netlab.New(t)
	a, b = n.AddPod(t, "client", one), n.AddPod(t, "server", two)
	for _, port := range []string{"80", "81"} {
		netlab.ServeTCP(t, two, b.Address.String()+":"+port)
	}
	applyPolicy(t, n, onlyPort80)
	return n, one, a, b
}

// enforced wants what onlyPort80 says.
func enforced(t *testing.T, when string, client *netlab.Namespace, server endpoint.Endpoint) {
	t.Helper()
	if err := netlab.Connect(client, server.Address.String()+":80"); err != nil {
		t.Errorf("%s: what is allowed: %v", when, err)
	}
	if err := netlab.Connect(client, server.Address.String()+":81"); err == nil {
		t.Errorf("%s: what is denied passes", when)
	}
}

// programs lists the TCX programs on both hooks of a link.
func programs(t *testing.T, name string) [2][]link.AttachedProgram {
	t.Helper()
	l, err := net.InterfaceByName(name)
	if err != nil {
		t.Fatal(err)
	}
	var out [2][]link.AttachedProgram
	for i, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
		q, err := link.QueryPrograms(link.QueryOptions{Target: l.Index, Attach: at})
		if err != nil {
			netlab.Missing(t, fmt.Errorf("programs of %s: %w", name, err), "run on Linux 6.6 or newer")
		}
		out[i] = q.Programs
	}
	return out
}

// D13: mknetd killed and started twenty times under ping and policy: no packet is
// lost, each hook has one program, and the maps are the ones that they were.
func TestD13KilledTwentyTimes(t *testing.T) {
	n, client, a, b := policed(t, "auditInterval: 0s")
	applyPolicy(t, n, onlyPort80+document("SecurityGroup", "ping", "{ingress: [{protocol: icmp}]}")+
		document("Attachment", "ping", "{securityGroupRefs: [{name: ping}], endpoints: [{name: server}]}"))
	type result struct {
		out string
		err error
	}
	stop, lost := make(chan struct{}), make(chan []result, 1)
	go func() {
		var bad []result
		for {
			select {
			case <-stop:
				lost <- bad
				return
			default:
			}
			if out, err := client.Try("ping", "-n", "-q", "-i0.01", "-c50", "-W10", b.Address.String()); err != nil || !strings.Contains(out, " 0% packet loss") {
				bad = append(bad, result{out, err})
			}
		}
	}()
	counted := byOutcome(t, n, a)
	for range 20 {
		n.Kill(t)
		n.Start(t)
		for _, ep := range []endpoint.Endpoint{a, b} {
			for hook, on := range programs(t, ep.HostLink) {
				if len(on) != 1 {
					t.Fatalf("%s, hook %d: programs %v, want one", ep.HostLink, hook, on)
				}
			}
		}
	}
	close(stop)
	for _, bad := range <-lost {
		t.Errorf("ping while mknetd is killed: %v\n%s", bad.err, bad.out)
	}
	if now := byOutcome(t, n, a); now["peer"] <= counted["peer"] || now["stack"] != counted["stack"] {
		t.Errorf("the client's counters are %v, before %v: want them to go on, and all by redirect", now, counted)
	}
	enforced(t, "after 20 restarts", client, b)
	n.CheckInventory(t)
}

// byOutcome are the packets of a pod.
func byOutcome(t *testing.T, n *node.Node, ep endpoint.Endpoint) map[string]uint64 {
	t.Helper()
	c, err := n.Client(t).Counters(t.Context(), ep.Generation)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]uint64{}
	for _, v := range c.Path {
		out[v.Outcome] = v.Packets
	}
	return out
}

// D14: with mknetd dead its programs stay, and policy is enforced.
func TestD14PolicyWithoutDaemon(t *testing.T) {
	n, client, a, b := policed(t)
	enforced(t, "with mknetd", client, b)
	n.Kill(t)
	for _, ep := range []endpoint.Endpoint{a, b} {
		for hook, on := range programs(t, ep.HostLink) {
			if len(on) != 1 {
				t.Errorf("without mknetd: %s, hook %d: programs %v, want one", ep.HostLink, hook, on)
			}
		}
	}
	enforced(t, "without mknetd", client, b)
	n.Start(t)
	enforced(t, "with mknetd again", client, b)
}

// detach takes both programs of a pod off by hand.
func detach(t *testing.T, ep endpoint.Endpoint) {
	t.Helper()
	programs(t, ep.HostLink) // skips where there is no TCX
	pins, err := filepath.Glob("/sys/fs/bpf/*/links/" + ep.HostLink + "-*")
	if err != nil || len(pins) != 2 {
		t.Fatalf("pins %v, %v, want two", pins, err)
	}
	for _, pin := range pins {
		l, err := link.LoadPinnedLink(pin, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Detach(); err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
}

// D15: programs that somebody detached are found by CHECK, and a start puts them
// back, or the next audit.
func TestD15DetachedIsFoundAndHealed(t *testing.T) {
	t.Run("by a start", func(t *testing.T) {
		n, client, _, b := policed(t, "auditInterval: 0s")
		detach(t, b)
		for hook, on := range programs(t, b.HostLink) {
			if len(on) != 0 {
				t.Errorf("hook %d still has %v", hook, on)
			}
		}
		node.WantCode(t, n.Check(t, b), 106, "not attached")
		n.Kill(t)
		n.Start(t)
		if err := n.Check(t, b); err != nil {
			t.Errorf("CHECK after the start: %v", err)
		}
		enforced(t, "healed by the start", client, b)
	})
	t.Run("by an audit", func(t *testing.T) {
		n, client, _, b := policed(t, "auditInterval: 1s")
		detach(t, b)
		netlab.Eventually(t, node.Patience, func() error { return n.Check(t, b) })
		enforced(t, "healed by the audit", client, b)
	})
}
