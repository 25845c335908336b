package ipt

import (
	"errors"
	"net"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

func TestEgressIsTranslated(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		c := l.child(7)
		serve(t, l.internet, "0.0.0.0:8080")
		mustReach(t, c.Namespace, "tcp4", netlab.InternetAddr+":8080", netlab.HostAddr)
		mustReach(t, c.Namespace, "udp4", netlab.InternetAddr+":8080", netlab.HostAddr)
		c.Run(t, "ping", "-c", "1", "-W", "20", netlab.InternetAddr)
		if got := l.faults(c.ep); got != nil {
			t.Errorf("faults of a healthy endpoint: %q", got)
		}
	})
}

// A spoofed packet must die in raw: conntrack, which comes after it, would take
// it for the victim's and refresh or open an entry.
func TestSpoofedSourceDiesInRaw(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		c := l.child(1)
		s := serve(t, l.internet, "0.0.0.0:8080")
		victim := endpoint.DefaultPools.At(2).Child.String()
		c.Run(t, "ip", "addr", "add", victim+"/32", "dev", "lo")
		conn, err := dial(t, c.Namespace, "udp4", victim, netlab.InternetAddr+":8080", drops)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for range 3 {
			if _, err := conn.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
		}
		netlab.Eventually(t, passes, func() error {
			if n := l.packets("raw", c.ep.Chain, 1); n != 3 {
				return errors.New("raw has not counted 3 packets")
			}
			return nil
		})
		if got := netlab.Run(t, "conntrack", "-L", "-s", victim); got != "" {
			t.Errorf("conntrack knows the spoofed source: %s", got)
		}
		if got := s.peers(); len(got) != 0 {
			t.Errorf("the server saw %q", got)
		}
		// The transit peer's own address is not the child's either.
		if err := mustNotReachFrom(t, c.Namespace, c.ep.TransitPeer.String(), netlab.InternetAddr+":8080"); err == nil {
			t.Error("the transit address got out")
		}
		mustReach(t, c.Namespace, "tcp4", netlab.InternetAddr+":8080", netlab.HostAddr)
	})
}

func mustNotReachFrom(t *testing.T, ns *netlab.Namespace, from, to string) error {
	t.Helper()
	_, err := ask(t, ns, "udp4", from, to, drops)
	return err
}

func TestSiblingsStayApart(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		a, b := l.child(3), l.child(4)
		published := l.child(5, func(e *endpoint.Endpoint) { e.Publishes, e.PodAccess = true, endpoint.Allow })
		for _, c := range []*child{b, published} {
			s := serve(t, c.Namespace, addrPort(c.ep.Address, 80))
			try := func(when string) {
				for _, network := range []string{"tcp4", "udp4"} {
					if mustNotReach(t, a.Namespace, network, addrPort(c.ep.Address, 80)) == nil || len(s.peers()) > 0 {
						t.Errorf("%s: %s from %s reached its sibling", when, network, a.ep.Address)
					}
				}
			}
			try("our rules alone")
			l.ipt("-I", "FORWARD", "1", "-j", "ACCEPT")
			before := l.packets(l.fw.guard, c.ep.Chain+outSuffix, len(l.guardChain(c.ep, c.ep.Chain+outSuffix)))
			try("somebody accepts everything first")
			l.ipt("-D", "FORWARD", "-j", "ACCEPT")
			dropped := l.packets(l.fw.guard, c.ep.Chain+outSuffix, len(l.guardChain(c.ep, c.ep.Chain+outSuffix))) - before
			if c == b && dropped == 0 {
				t.Errorf("the guard of %s has counted nothing", c.ep.Chain)
			}
		}
	})
}

func (l *lab) guardChain(ep endpoint.Endpoint, name string) []rule {
	for _, c := range l.fw.guardOf(ep) {
		if c.name == name {
			return c.rules
		}
	}
	l.t.Fatalf("no chain %s", name)
	return nil
}

func TestHostAccess(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		const resolver = "192.0.2.53"
		netlab.Run(t, "ip", "addr", "add", resolver+"/32", "dev", "lo")
		t.Cleanup(func() { netlab.Run(t, "ip", "addr", "del", resolver+"/32", "dev", "lo") })
		deny := l.child(1, func(e *endpoint.Endpoint) { e.DNS.Nameservers = []string{resolver} })
		allow := l.child(2, func(e *endpoint.Endpoint) { e.HostAccess = endpoint.Allow })
		serve(t, nil, "0.0.0.0:8080")
		serve(t, nil, resolver+":53")

		try := func(when string) {
			for _, to := range []string{netlab.HostAddr, deny.ep.TransitHost.String(), resolver} {
				for _, network := range []string{"tcp4", "udp4"} {
					if mustNotReach(t, deny.Namespace, network, to+":8080") == nil {
						t.Errorf("%s: reached %s", when, to)
					}
				}
			}
			mustReach(t, deny.Namespace, "udp4", resolver+":53", deny.ep.Address.String())
			mustReach(t, deny.Namespace, "tcp4", resolver+":53", deny.ep.Address.String())
			deny.Run(t, "ping", "-c", "1", "-W", "20", netlab.HostAddr)
			deny.Run(t, "ping", "-c", "1", "-W", "20", deny.ep.TransitHost.String())
		}
		try("our rules alone")
		l.ipt("-I", "INPUT", "1", "-j", "ACCEPT")
		try("somebody accepts everything first")
		l.ipt("-D", "INPUT", "-j", "ACCEPT")

		mustReach(t, allow.Namespace, "tcp4", netlab.HostAddr+":8080", allow.ep.Address.String())
		mustReach(t, allow.Namespace, "tcp4", allow.ep.TransitHost.String()+":8080", allow.ep.Address.String())

		// A host that drops by policy is no obstacle to what the record allows.
		l.ipt("-P", "INPUT", "DROP")
		t.Cleanup(func() { l.ipt("-P", "INPUT", "ACCEPT") })
		mustReach(t, allow.Namespace, "tcp4", netlab.HostAddr+":8080", allow.ep.Address.String())
		mustReach(t, deny.Namespace, "udp4", resolver+":53", deny.ep.Address.String())
	})
}

func TestHostProcessesReachTheChild(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		c := l.child(1)
		serve(t, c.Namespace, addrPort(c.ep.Address, 80))
		mustReach(t, nil, "tcp4", addrPort(c.ep.Address, 80), netlab.HostAddr)
		mustReach(t, nil, "udp4", addrPort(c.ep.Address, 80), netlab.HostAddr)
		// A closed port is refused at once: the ICMP error is RELATED to our flow.
		if err := mustNotReach(t, nil, "udp4", addrPort(c.ep.Address, 81)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("closed port of the child: got %v, want connection refused", err)
		}
	})
}

func TestUnsolicitedAndPublished(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		closed := l.child(1)
		open := l.child(2, func(e *endpoint.Endpoint) { e.Publishes = true })
		l.internet.Run(t, "ip", "route", "add", endpoint.DefaultPools.Child.String(), "via", netlab.HostAddr)
		for port, c := range map[string]*child{"8001": closed, "8002": open} {
			serve(t, c.Namespace, addrPort(c.ep.Address, 80))
			for _, network := range []string{"tcp", "udp"} {
				rule := []string{"PREROUTING", "-i", netlab.UplinkName, "-p", network, "--dport", port, "-j", "DNAT", "--to-destination", addrPort(c.ep.Address, 80)}
				l.ipt(append([]string{"-t", "nat", "-A"}, rule...)...)
				t.Cleanup(func() { l.ipt(append([]string{"-t", "nat", "-D"}, rule...)...) })
			}
		}
		for _, network := range []string{"tcp4", "udp4"} {
			for _, c := range []*child{closed, open} {
				_ = mustNotReach(t, l.internet, network, addrPort(c.ep.Address, 80))
			}
			_ = mustNotReach(t, l.internet, network, netlab.HostAddr+":8001")
			mustReach(t, l.internet, network, netlab.HostAddr+":8002", netlab.InternetAddr)
		}
	})
}

func TestMetadata(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		const meta = "169.254.169.254"
		resolves := l.child(1, func(e *endpoint.Endpoint) { e.DNS.Nameservers = []string{meta} })
		other := l.child(2, func(e *endpoint.Endpoint) { e.HostAccess = endpoint.Allow })
		s := serve(t, l.internet, meta+":80")
		serve(t, l.internet, meta+":53")
		serve(t, l.internet, netlab.InternetAddr+":80")
		serve(t, nil, netlab.HostAddr+":80")

		try := func(when string) {
			for _, c := range []*child{resolves, other} {
				for _, network := range []string{"tcp4", "udp4"} {
					if err := mustNotReach(t, c.Namespace, network, meta+":80"); !errors.Is(err, syscall.ECONNREFUSED) {
						t.Errorf("%s: %s to metadata from slot %d: got %v, want connection refused", when, network, c.ep.Slot, err)
					}
				}
			}
		}
		try("our rules alone")
		for _, network := range []string{"tcp4", "udp4"} {
			mustReach(t, resolves.Namespace, network, meta+":53", netlab.HostAddr)
			_ = mustNotReach(t, other.Namespace, network, meta+":53")
		}
		for _, to := range []string{netlab.InternetAddr, netlab.HostAddr} {
			for _, network := range []string{"tcp", "udp"} {
				l.ipt("-t", "nat", "-I", "PREROUTING", "1", "-d", meta, "-p", network, "--dport", "80", "-j", "DNAT", "--to-destination", to+":80")
			}
			try("DNAT to " + to)
			l.ipt("-t", "nat", "-F", "PREROUTING")
		}
		// Accepted first by somebody else, the guard drops without an answer.
		l.ipt("-I", "FORWARD", "1", "-j", "ACCEPT")
		_ = mustNotReach(t, resolves.Namespace, "tcp4", meta+":80")
		l.ipt("-D", "FORWARD", "-j", "ACCEPT")
		if got := s.peers(); len(got) > 0 {
			t.Errorf("the metadata server was reached by %q", got)
		}
	})
}

// A link that only looks like ours, here mkvpn0, is none of our business.
func TestForeignLinkForwardsFreely(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		c := l.child(1)
		vpn := netlab.New(t)
		netlab.Run(t, "ip", "link", "add", "mkvpn0", "type", "veth", "peer", "name", "vpn0", "netns", vpn.Name)
		t.Cleanup(func() { netlab.Run(t, "ip", "link", "del", "mkvpn0") })
		netlab.Run(t, "ip", "addr", "add", "10.9.9.1/24", "dev", "mkvpn0")
		netlab.Run(t, "ip", "link", "set", "mkvpn0", "up")
		forward(t, "mkvpn0")
		vpn.Run(t, "ip", "addr", "add", "10.9.9.2/24", "dev", "vpn0")
		vpn.Run(t, "ip", "link", "set", "vpn0", "up")
		vpn.Run(t, "ip", "route", "add", "default", "via", "10.9.9.1")
		l.internet.Run(t, "ip", "route", "add", "10.9.9.0/24", "via", netlab.HostAddr)
		serve(t, l.internet, "0.0.0.0:8080")
		serve(t, vpn, "0.0.0.0:8080")
		serve(t, nil, "0.0.0.0:8081")
		mustReach(t, vpn, "tcp4", netlab.InternetAddr+":8080", "10.9.9.2")
		mustReach(t, vpn, "tcp4", netlab.HostAddr+":8081", "10.9.9.2")
		mustReach(t, l.internet, "tcp4", "10.9.9.2:8080", netlab.InternetAddr)
		_ = mustNotReach(t, c.Namespace, "tcp4", "10.9.9.2:8080")
		_ = mustNotReach(t, vpn, "tcp4", addrPort(c.ep.Address, 8080))
	})
}

// Ordinary pods are reached where both are allowed to.
func TestPodAccess(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		deny := l.child(1)
		allow := l.child(2, func(e *endpoint.Endpoint) { e.PodAccess = endpoint.Allow })
		pod := netlab.New(t)
		netlab.Run(t, "ip", "link", "add", "lxc0123456789ab", "type", "veth", "peer", "name", "eth0", "netns", pod.Name)
		t.Cleanup(func() { netlab.Run(t, "ip", "link", "del", "lxc0123456789ab") })
		group := endpoint.Endpoint{Mode: endpoint.Veth, PodAccess: endpoint.Allow, HostAccess: endpoint.Allow, IPMasq: true}.LinkGroup()
		netlab.Run(t, "ip", "link", "set", "lxc0123456789ab", "group", strconv.FormatUint(uint64(group), 10))
		netlab.Run(t, "ip", "addr", "add", "10.8.8.1/24", "dev", "lxc0123456789ab")
		netlab.Run(t, "ip", "link", "set", "lxc0123456789ab", "up")
		forward(t, "lxc0123456789ab")
		pod.Run(t, "ip", "addr", "add", "10.8.8.2/24", "dev", "eth0")
		pod.Run(t, "ip", "link", "set", "eth0", "up")
		pod.Run(t, "ip", "route", "add", "default", "via", "10.8.8.1")
		serve(t, pod, "0.0.0.0:80")
		for _, c := range []*child{deny, allow} {
			serve(t, c.Namespace, addrPort(c.ep.Address, 80))
		}
		_ = mustNotReach(t, deny.Namespace, "tcp4", "10.8.8.2:80")
		_ = mustNotReach(t, pod, "tcp4", addrPort(deny.ep.Address, 80))
		mustReach(t, allow.Namespace, "tcp4", "10.8.8.2:80", allow.ep.Address.String())
		mustReach(t, pod, "tcp4", addrPort(allow.ep.Address, 80), "10.8.8.2")
	})
}

func TestConnectionLimit(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour, func(c *Config) { c.ConnLimit = 5 })
		full, other := l.child(1), l.child(2)
		serve(t, l.internet, "0.0.0.0:8080")
		serve(t, nil, "0.0.0.0:8081")
		var held []net.Conn
		defer func() {
			for _, c := range held {
				c.Close()
			}
		}()
		for i := range 5 {
			c, err := dial(t, full.Namespace, "tcp4", "", netlab.InternetAddr+":8080", passes)
			if err != nil {
				t.Fatalf("connection %d of 5: %v", i+1, err)
			}
			held = append(held, c)
		}
		_ = mustNotReach(t, full.Namespace, "tcp4", netlab.InternetAddr+":8080")
		_ = mustNotReach(t, full.Namespace, "udp4", netlab.InternetAddr+":8080")
		limit := slices.IndexFunc(l.guardChain(full.ep, full.ep.Chain), func(r rule) bool { return r.value("--connlimit-above") == "5" })
		if n := l.packets(l.fw.guard, full.ep.Chain, limit+1); n == 0 {
			t.Error("the limit has counted nothing")
		}
		mustReach(t, other.Namespace, "tcp4", netlab.InternetAddr+":8080", netlab.HostAddr)
	})
}
