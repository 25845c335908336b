package datapath

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

func TestPodToPod(t *testing.T) {
	for _, c := range []Config{{Attach: TCX}, {Attach: TCX, NoPeer: true}, {Attach: Clsact}, {Attach: Clsact, NoPeer: true}} {
		way(t, c, podToPod)
	}
}

func podToPod(t *testing.T, d *Datapath, by Outcome) {
	a, b := startPod(t, d, 10, 1500), startPod(t, d, 20, 1500)
	b.serve(t, 80)
	atB := Counters{}
	atA := a.grew(t, func() {
		atB = b.grew(t, func() {
			a.mustPing(t, b.Address)
			a.echo(t, "udp4", b.Address, 80, 100)
			a.echo(t, "tcp4", b.Address, 80, 1<<20)
		})
	})
	for name, c := range map[string]Counters{"a": atA, "b": atB} {
		if c[by].Packets < 6 || c[Stack].Packets != 0 || c[Delivered].Packets != 0 {
			t.Errorf("pod %s: %v, want every packet by %s", name, c, by)
		}
	}
	// D20: the megabyte went in GSO packets, which are longer than the MTU.
	if mean := atA[by].Bytes / atA[by].Packets; mean < 2000 {
		t.Logf("mean packet of %d bytes: no GSO was used", mean)
	}
}

// What the host itself sends and gets goes through its stack, both ways.
func TestNodeToPod(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, _ Outcome) {
		netlab.Uplink(t, "1500")
		a := startPod(t, d, 10, 1500)
		got := a.grew(t, func() {
			netlab.Run(t, "ping", "-n", "-c3", "-i0.02", "-W5", a.Address.String())
			a.mustPing(t, netip.MustParseAddr(netlab.HostAddr))
		})
		if got[Stack].Packets < 6 || got[Delivered].Packets < 6 || got[Peer].Packets+got[Redirect].Packets != 0 {
			t.Errorf("%v, want 6 packets through the stack in each direction", got)
		}
		netlab.Run(t, "iptables", "-t", "nat", "-A", "POSTROUTING", "-s", "10.9.0.0/24", "-o", netlab.UplinkName, "-j", "MASQUERADE")
		defer netlab.Run(t, "iptables", "-t", "nat", "-F", "POSTROUTING")
		a.mustPing(t, netip.MustParseAddr(netlab.InternetAddr))
	})
}

// A pod reaches another of its node by a port of the host and by a service
// address; the replies go back through the host, which translates them. So does
// what an ICMP error quotes (D4). Beside it, the direct path is redirected.
func TestTranslatedFlows(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, by Outcome) {
		netlab.Uplink(t, "1500")
		a, b := startPod(t, d, 10, 1500), startPod(t, d, 20, 1500)
		b.serve(t, 80)
		host, service := netip.MustParseAddr(netlab.HostAddr), netip.MustParseAddr("10.96.0.1")
		defer netlab.Run(t, "iptables", "-t", "nat", "-F", "PREROUTING")
		for _, proto := range []string{"tcp", "udp"} {
			for _, to := range []netip.Addr{host, service} {
				netlab.Run(t, "iptables", "-t", "nat", "-A", "PREROUTING", "-d", to.String(), "-p", proto, "--dport", "8080", "-j", "DNAT", "--to-destination", b.Address.String()+":80")
				netlab.Run(t, "iptables", "-t", "nat", "-A", "PREROUTING", "-d", to.String(), "-p", proto, "--dport", "8081", "-j", "DNAT", "--to-destination", b.Address.String()+":81")
			}
		}
		for _, to := range []netip.Addr{host, service} {
			got := b.grew(t, func() {
				a.echo(t, "tcp4", to, 8080, 1<<16)
				a.echo(t, "udp4", to, 8080, 100)
				a.echo(t, "udp4", to, 8080, 4000) // in fragments
				a.refused(t, to, 8081)
			})
			if got[by].Packets != 0 || got[Stack].Packets < 4 || got[Delivered].Packets < 4 {
				t.Errorf("by %s: %v, want all through the stack", to, got)
			}
		}
		got := b.grew(t, func() {
			a.echo(t, "tcp4", b.Address, 80, 1<<16)
			a.echo(t, "udp4", b.Address, 80, 100)
			a.refused(t, b.Address, 81)
		})
		if got[Stack].Packets+got[Delivered].Packets != 0 || got[by].Packets < 4 {
			t.Errorf("directly: %v, want all by %s", got, by)
		}
	})
}

// refused wants the ICMP error of a closed UDP port to reach the socket.
func (p *livePod) refused(t *testing.T, to netip.Addr, port int) {
	t.Helper()
	c := p.dial(t, "udp4", to, port)
	defer c.Close()
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("UDP to closed port %s:%d: got %v, want %v", to, port, err, unix.ECONNREFUSED)
	}
}

// D18: what a pod sends to its own address never leaves it; by a port of the host
// that is its own, it reaches itself, with the host's address as source.
func TestD18Hairpin(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, by Outcome) {
		netlab.Uplink(t, "1500")
		a := startPod(t, d, 10, 1500)
		a.serve(t, 80)
		host := netip.MustParseAddr(netlab.HostAddr)
		netlab.Run(t, "iptables", "-t", "nat", "-A", "PREROUTING", "-d", netlab.HostAddr, "-p", "tcp", "--dport", "8080", "-j", "DNAT", "--to-destination", a.Address.String()+":80")
		netlab.Run(t, "iptables", "-t", "nat", "-A", "POSTROUTING", "-s", a.Address.String(), "-d", a.Address.String(), "-j", "MASQUERADE")
		defer netlab.Run(t, "iptables", "-t", "nat", "-F")
		got := a.grew(t, func() { a.mustPing(t, a.Address) })
		if got[Stack].Packets+got[Delivered].Packets+got[by].Packets != 0 {
			t.Errorf("own address: %v, want nothing on the link", got)
		}
		got = a.grew(t, func() { a.echo(t, "tcp4", host, 8080, 1000) })
		if got[Stack].Packets < 6 || got[Delivered].Packets < 6 || got[by].Packets != 0 {
			t.Errorf("by the host: %v, want both ways through the stack", got)
		}
	})
}

// D2: datagrams around the edges of fragmentation are not lost, and D1, where no
// policy is enforced: fragments pass in any order.
func TestD2DatagramSizes(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, _ Outcome) {
		a, b := startPod(t, d, 10, 1500), startPod(t, d, 20, 1500)
		b.serve(t, 80)
		c := a.dial(t, "udp4", b.Address, 80)
		defer c.Close()
		for _, from := range []int{1465, 2950} {
			for n := from; n <= from+15; n++ {
				echo(t, c, n)
			}
		}
	})
}

func TestD1FragmentsOutOfOrder(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, _ Outcome) {
		a, b := startPod(t, d, 10, 1500), startPod(t, d, 20, 1500)
		var u net.PacketConn
		b.ns.Do(t, func() {
			var err error
			if u, err = net.ListenPacket("udp4", b.Address.String()+":80"); err != nil {
				t.Error(err)
			}
		})
		if u == nil {
			t.FailNow()
		}
		defer u.Close()
		datagram := udp(1000, 80, make([]byte, 2392)...)
		part := func(from, to int, more uint16) []byte {
			return a.frame(ipv4{dst: b.Address, proto: unix.IPPROTO_UDP, id: 7, frag: more | uint16(from/8), payload: datagram[from:to]})
		}
		for _, f := range [][]byte{part(800, 1600, 0x2000), part(0, 800, 0x2000), part(1600, 2400, 0)} {
			a.inject(t, f)
		}
		if err := u.SetReadDeadline(deadline()); err != nil {
			t.Fatal(err)
		}
		if n, _, err := u.ReadFrom(make([]byte, 4000)); err != nil || n != 2392 {
			t.Errorf("got %d bytes, %v, want a datagram of 2392", n, err)
		}
	})
}

// A packet over the destination's MTU is answered by the host with the MTU, and
// TCP goes on with it.
func TestDestinationMTU(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, by Outcome) {
		netlab.Uplink(t, "1500")
		a, b := startPod(t, d, 10, 1500), startPod(t, d, 20, 1300)
		b.serve(t, 80)
		out, err := a.ns.Try("ping", "-n", "-c1", "-W5", "-Mdo", "-s1400", b.Address.String())
		if err == nil || !strings.Contains(out+err.Error(), "mtu = 1300") {
			t.Errorf("ping of 1428 bytes: %v %s, want frag needed with mtu 1300", err, out)
		}
		a.mustPing(t, b.Address, "-Mdo", "-s1272")
		got := a.grew(t, func() { a.echo(t, "tcp4", b.Address, 80, 1<<20) })
		if got[by].Packets < 10 {
			t.Errorf("%v, want TCP by %s", got, by)
		}
	})
}

func TestTimeExceeded(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, _ Outcome) {
		netlab.Uplink(t, "1500")
		a, b := startPod(t, d, 10, 1500), startPod(t, d, 20, 1500)
		out, err := a.ns.Try("ping", "-n", "-c1", "-W5", "-t1", b.Address.String())
		if err == nil || !strings.Contains(out+err.Error(), "Time to live exceeded") {
			t.Errorf("ping with TTL 1: %v %s, want time exceeded", err, out)
		}
		a.mustPing(t, b.Address, "-t2")
	})
}

// A shaped pod, and a child, is reached through the host stack alone.
func TestNeverRedirected(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, by Outcome) {
		a := startPod(t, d, 10, 1500)
		for _, change := range []func(*endpoint.Endpoint){
			func(ep *endpoint.Endpoint) { ep.Bandwidth = &endpoint.Bandwidth{IngressRate: 1e9, IngressBurst: 1e9} },
			func(ep *endpoint.Endpoint) { ep.Mode = endpoint.Multikernel; ep.HostLink = ep.Generation.HostLink() },
		} {
			b := startPodAs(t, d, 20, 1500, change)
			// A child's gateway is its TUN: nobody answers for it on this link.
			b.ns.Run(t, "ip", "neigh", "replace", b.Gateway.String(), "lladdr", mac(b.Generation.HostMAC()), "dev", "eth0")
			got := a.grew(t, func() { a.mustPing(t, b.Address) })
			back := b.counters(t)
			if got[by].Packets != 0 || got[Stack].Packets < 3 || back[Stack].Packets < 3 || back[by].Packets != 0 {
				t.Errorf("%s: %v and %v, want all through the stack", b.HostLink, got, back)
			}
			b.remove(t)
		}
	})
}

// A pod that sends with another's address is not heard.
func TestSpoofedSource(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, _ Outcome) {
		a, b := startPod(t, d, 10, 1500), startPod(t, d, 20, 1500)
		a.ns.Run(t, "ip", "addr", "add", "10.9.0.99/32", "dev", "eth0")
		got := a.grew(t, func() {
			if n := a.ping(t, b.Address, 1, "-I", "10.9.0.99", "-W1"); n != 0 {
				t.Errorf("%d pings answered", n)
			}
		})
		if got[DropAddress].Packets == 0 {
			t.Errorf("%v, want dropped addresses", got)
		}
	})
}

// Frames that TEST_RUN cannot make: a header cut off, an accelerated VLAN tag,
// and a packet whose IP header lies outside the linear part.
func TestFramesOfTheWire(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, by Outcome) {
		a, b := startPod(t, d, 10, 9000), startPod(t, d, 20, 9000)
		for _, c := range []struct {
			name    string
			send    func()
			outcome Outcome
		}{
			{"4 bytes of IPv4", func() { a.inject(t, a.frame(ipv4{dst: b.Address})[:18]) }, DropHeader},
			{"19 bytes of IPv4", func() { a.inject(t, a.frame(ipv4{dst: b.Address})[:33]) }, DropHeader},
			// The receiving side takes the tag off (net/core/dev.c: skb_vlan_untag).
			{"a tag", func() {
				f := a.frame(ipv4{dst: b.Address, proto: unix.IPPROTO_UDP, payload: udp(1000, 80)})
				a.inject(t, slices.Concat(f[:12], []byte{0x81, 0, 0, 5}, f[12:]))
			}, DropVLAN},
			{"non-linear", func() {
				a.injectNonLinear(t, a.frame(ipv4{dst: b.Address, proto: unix.IPPROTO_UDP, payload: udp(1000, 80, make([]byte, 6000)...)}))
			}, by},
			{"non-linear with a foreign source", func() {
				a.injectNonLinear(t, a.frame(ipv4{src: b.Address, dst: b.Address, proto: unix.IPPROTO_UDP, payload: udp(1000, 80, make([]byte, 6000)...)}))
			}, DropAddress},
		} {
			got := a.grew(t, func() {
				before := a.counters(t)[c.outcome].Packets
				c.send()
				netlab.Eventually(t, patience, func() error {
					if a.counters(t)[c.outcome].Packets == before {
						return errors.New("not counted as " + c.outcome.String())
					}
					return nil
				})
			})
			if got[c.outcome].Packets == 0 {
				t.Errorf("%s: %v, want %s", c.name, got, c.outcome)
			}
		}
	})
}
