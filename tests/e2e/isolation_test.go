package e2e

import (
	"bytes"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// Two children reach the internet and not each other, also after somebody else
// has put an ACCEPT in front of everything, as Docker and the reference firewall
// plugin do.
func TestSiblingsStayApart(t *testing.T) {
	n := node.New(t)
	pods := []*netlab.Namespace{netlab.New(t), netlab.New(t)}
	a, b := n.Add(t, "c1", pods[0], "eth0"), n.Add(t, "c2", pods[1], "eth0")
	one, two := n.Boot(t, a, "g1"), n.Boot(t, b, "g1")
	netlab.MustPing(t, one.Namespace, netlab.InternetAddr)
	netlab.MustPing(t, two.Namespace, netlab.InternetAddr)
	netlab.MustNotPing(t, one.Namespace, b.Address.String())
	for _, rule := range [][]string{
		{"-I", "FORWARD", "1", "-j", "ACCEPT"},
		{"-I", "FORWARD", "1", "-s", a.Address.String(), "-j", "ACCEPT"},
		{"-I", "FORWARD", "1", "-d", b.Address.String(), "-j", "ACCEPT"},
	} {
		netlab.Run(t, "iptables", rule...)
		netlab.MustNotPing(t, one.Namespace, b.Address.String())
		netlab.MustNotPing(t, n.Internet, a.Address.String())
		undo := append([]string{"-D", "FORWARD"}, rule[3:]...)
		netlab.Run(t, "iptables", undo...)
	}
	netlab.MustPing(t, one.Namespace, netlab.InternetAddr)
}

// A child's packets carry its own address or are dropped: first at the pump, and
// where a child has got past that, in raw PREROUTING, counted.
func TestSpoofedSourceIsDroppedAndCounted(t *testing.T) {
	n := node.New(t)
	pods := []*netlab.Namespace{netlab.New(t), netlab.New(t)}
	a, b := n.Add(t, "c1", pods[0], "eth0"), n.Add(t, "c2", pods[1], "eth0")
	one := n.Boot(t, a, "g1")
	one.Run(t, "ip", "addr", "add", b.Address.String()+"/32", "dev", "lo")
	netlab.MustNotPing(t, one.Namespace, netlab.InternetAddr, "-I", b.Address.String())
	stats := netlab.Run(t, n.Shim, "stats", "--endpoint", a.Generation.String())
	if !strings.Contains(stats, "source") {
		t.Errorf("mk-shim stats names no drop by source:\n%s", stats)
	}
	// What stands for a pump that checks nothing: a packet made in the namespace.
	pods[0].Run(t, "ip", "addr", "add", b.Address.String()+"/32", "dev", "lo")
	before := counter(t, "raw", a.Generation.String(), "-j DROP")
	netlab.MustNotPing(t, pods[0], netlab.InternetAddr, "-I", b.Address.String())
	if after := counter(t, "raw", a.Generation.String(), "-j DROP"); after <= before {
		t.Errorf("raw PREROUTING counted %d drops before and %d after", before, after)
	}
}

// Nothing from outside reaches a child that has not asked for it, whatever the
// policy of FORWARD is.
func TestUnsolicitedFromOutsideIsDropped(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	netlab.MustNotPing(t, n.Internet, ep.Address.String())
	netlab.Run(t, "iptables", "-P", "FORWARD", "DROP")
	defer netlab.Run(t, "iptables", "-P", "FORWARD", "ACCEPT")
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
	netlab.MustNotPing(t, n.Internet, ep.Address.String())
}

// hostAccess decides whether a child reaches the primary's own addresses; the
// primary always reaches the child.
func TestHostAccess(t *testing.T) {
	for _, access := range []string{"deny", "allow"} {
		t.Run(access, func(t *testing.T) {
			n := node.New(t)
			pod := netlab.New(t)
			ep := n.AddCall(t, node.Call{ContainerID: "c1", Netns: pod.Path(), IfName: "eth0", Config: map[string]any{"hostAccess": access}})
			child := n.Boot(t, ep, "g1")
			service := netlab.ServeTCP(t, nil, netlab.HostAddr+":8080")
			for _, addr := range []string{netlab.HostAddr + ":8080", ep.TransitHost.String() + ":8080"} {
				err := netlab.Connect(child.Namespace, addr)
				if access == "allow" && addr == service && err != nil {
					t.Errorf("connect to %s: %v", addr, err)
				}
				if access == "deny" && err == nil {
					t.Errorf("connect to %s succeeded", addr)
				}
			}
			netlab.MustPing(t, child.Namespace, netlab.HostAddr) // echo is answered in both
			inside := netlab.ServeTCP(t, child.Namespace, ep.Address.String()+":80")
			if err := netlab.Connect(nil, inside); err != nil {
				t.Errorf("the primary cannot reach the child: %v", err)
			}
		})
	}
}

// The metadata address answers DNS where it is the configured resolver and
// nothing else, also when somebody rewrites its destination.
func TestMetadataAddress(t *testing.T) {
	const metadata = "169.254.169.254"
	n := node.New(t, "resolver:", "  nameservers: ["+metadata+"]")
	n.Internet.Run(t, "ip", "addr", "add", metadata+"/32", "dev", "lo")
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	netlab.ServeTCP(t, n.Internet, metadata+":80")
	netlab.ServeTCP(t, n.Internet, metadata+":53")
	netlab.ServeTCP(t, n.Internet, netlab.InternetAddr+":80")
	check := func(when string) {
		t.Helper()
		if err := netlab.Connect(child.Namespace, metadata+":53"); err != nil {
			t.Errorf("%s: DNS over TCP: %v", when, err)
		}
		if err := netlab.Connect(child.Namespace, metadata+":80"); err == nil {
			t.Errorf("%s: the metadata service was reached", when)
		}
		if err := netlab.Connect(child.Namespace, netlab.InternetAddr+":80"); err != nil {
			t.Errorf("%s: an ordinary service: %v", when, err)
		}
	}
	check("as it is")
	netlab.Run(t, "iptables", "-t", "nat", "-I", "PREROUTING", "1", "-d", metadata, "-p", "tcp", "--dport", "80", "-j", "DNAT", "--to-destination", netlab.InternetAddr+":80")
	defer netlab.Run(t, "iptables", "-t", "nat", "-D", "PREROUTING", "1")
	check("with a DNAT of the metadata address")
}

// A link that merely looks like one of ours works as if mknet were not there.
func TestForeignLookalikeLinkWorks(t *testing.T) {
	n := node.New(t)
	pod, other := netlab.New(t), netlab.New(t)
	n.Add(t, "c1", pod, "eth0")
	netlab.Run(t, "ip", "link", "add", "mkvpn0", "type", "veth", "peer", "name", "eth0", "netns", other.Name)
	defer netlab.Run(t, "ip", "link", "del", "mkvpn0")
	netlab.Run(t, "ip", "addr", "add", "192.0.2.1/24", "dev", "mkvpn0")
	netlab.Run(t, "ip", "link", "set", "mkvpn0", "up")
	netlab.Run(t, "sysctl", "-qw", "net.ipv4.conf.mkvpn0.forwarding=1", "net.ipv4.conf.up0.forwarding=1")
	other.Run(t, "ip", "addr", "add", "192.0.2.2/24", "dev", "eth0")
	other.Run(t, "ip", "link", "set", "eth0", "up")
	other.Run(t, "ip", "route", "add", "default", "via", "192.0.2.1")
	n.Internet.Run(t, "ip", "route", "add", "192.0.2.0/24", "via", netlab.HostAddr)
	netlab.MustPing(t, other, netlab.InternetAddr)
	netlab.MustPing(t, n.Internet, "192.0.2.2")
	n.Kill(t)
	n.Start(t) // a restart's clean-up leaves it alone too
	netlab.MustPing(t, other, netlab.InternetAddr)
}

// All four devices have the egress's MTU, and packets up to it pass whole.
func TestC24_MTUFollowsTheEgressOnAllDevices(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	want := fmt.Sprintf("mtu %d ", node.MTUBytes)
	for what, out := range map[string]string{
		"host veth": netlab.Run(t, "ip", "link", "show", ep.HostLink),
		"peer":      pod.Run(t, "ip", "link", "show", ep.PeerLink),
		"TUN":       pod.Run(t, "ip", "link", "show", "eth0"),
		"mkn0":      child.Run(t, "ip", "link", "show", "mkn0"),
	} {
		if !strings.Contains(out, want) {
			t.Errorf("%s: want %s, got %s", what, want, out)
		}
	}
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr, "-M", "do", "-s", "1372")
	netlab.MustNotPing(t, child.Namespace, netlab.InternetAddr, "-M", "do", "-s", "1373")
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr, "-s", "8192")
	netlab.Run(t, "ping", "-c1", "-W20", "-s", "8192", ep.Address.String())

	var server net.PacketConn
	var err error
	n.Internet.Do(t, func() { server, err = net.ListenPacket("udp4", netlab.InternetAddr+":7777") })
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	var client net.Conn
	child.Do(t, func() { client, err = net.Dial("udp4", netlab.InternetAddr+":7777") })
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	sent := bytes.Repeat([]byte("0123456789abcdef"), 512)
	if _, err := client.Write(sent); err != nil {
		t.Fatal(err)
	}
	if err := server.SetReadDeadline(time.Now().Add(node.Patience)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 2*len(sent))
	k, _, err := server.ReadFrom(got)
	if err != nil || !bytes.Equal(got[:k], sent) {
		t.Errorf("8 KiB of UDP: %d bytes arrived, %v", k, err)
	}
}
