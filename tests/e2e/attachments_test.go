package e2e

import (
	"strings"
	"testing"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// Two attachments in one namespace work side by side: each child leaves by its
// own veth, replies come back the way they came, and there is no way from one to
// the other inside the shared namespace. Deleting either leaves the other whole.
func TestTwoAttachmentsInOneNamespace(t *testing.T) {
	for _, first := range []string{"eth0", "net1"} {
		t.Run("delete "+first+" first", func(t *testing.T) {
			n := node.New(t)
			pod := netlab.New(t)
			a, b := n.Add(t, "c1", pod, "eth0"), n.Add(t, "c1", pod, "net1")
			if a.Subnet == b.Subnet || a.PeerLink == b.PeerLink || a.RouteTable == b.RouteTable {
				t.Fatalf("attachments share something: %s %s %d, %s %s %d", a.Subnet, a.PeerLink, a.RouteTable, b.Subnet, b.PeerLink, b.RouteTable)
			}
			one, two := n.Boot(t, a, "g1"), n.Boot(t, b, "g1")
			netlab.MustPing(t, one.Namespace, netlab.InternetAddr)
			netlab.MustPing(t, two.Namespace, netlab.InternetAddr)
			for _, ep := range []string{a.Address.String(), b.Address.String()} {
				netlab.Run(t, "ping", "-c1", "-W20", ep)
			}
			// Replies leave by the interface that the request came in on.
			for _, x := range []struct{ link, other, addr string }{{a.HostLink, b.HostLink, b.Address.String()}, {b.HostLink, a.HostLink, a.Address.String()}} {
				before := received(t, x.link)
				netlab.Run(t, "ping", "-c3", "-i0.2", "-W20", x.addr)
				if after := received(t, x.link); after-before > 2 {
					t.Errorf("pinging %s: %s received %d packets, they belong on %s", x.addr, x.link, after-before, x.other)
				}
			}
			netlab.MustNotPing(t, one.Namespace, b.Address.String())
			netlab.MustNotPing(t, two.Namespace, a.Address.String())

			goes, stays, left := a, b, two
			if first == "net1" {
				goes, stays, left = b, a, one
			}
			if first == "eth0" {
				one.Halt(t)
			} else {
				two.Halt(t)
			}
			if err := n.Del(t, goes); err != nil {
				t.Fatal(err)
			}
			netlab.MustPing(t, left.Namespace, netlab.InternetAddr)
			netlab.Run(t, "ping", "-c1", "-W20", stays.Address.String())
			netlab.MustNotPing(t, left.Namespace, goes.Address.String())
			if err := n.Check(t, stays); err != nil {
				t.Errorf("CHECK of the one that stays: %v", err)
			}
			if out := pod.Run(t, "ip", "route"); !strings.Contains(out, "default") {
				t.Errorf("the namespace has lost its default route:\n%s", out)
			}
		})
	}
}

// received returns how many packets a link has received.
func received(t *testing.T, link string) int {
	t.Helper()
	fields := strings.Fields(netlab.Run(t, "cat", "/sys/class/net/"+link+"/statistics/rx_packets"))
	n := 0
	for _, c := range fields[0] {
		n = n*10 + int(c-'0')
	}
	return n
}

// Children with the same names inside keep distinct identities outside.
func TestChildrenWithTheSameNamesInside(t *testing.T) {
	n := node.New(t)
	pods := []*netlab.Namespace{netlab.New(t), netlab.New(t)}
	a, b := n.Add(t, "c1", pods[0], "eth0"), n.Add(t, "c2", pods[1], "eth0")
	one, two := n.Boot(t, a, "boot-1"), n.Boot(t, b, "boot-1")
	for _, c := range []*node.Child{one, two} {
		if out := c.Run(t, "ip", "-br", "addr", "show", "mkn0"); !strings.Contains(out, c.Endpoint.Address.String()) {
			t.Errorf("%s: mkn0 has %q, want %s", c.Sandbox, out, c.Endpoint.Address)
		}
	}
	one.Halt(t)
	if err := n.Del(t, a); err != nil {
		t.Fatal(err)
	}
	netlab.MustPing(t, two.Namespace, netlab.InternetAddr)
}
