package datapath

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// skb is struct __sk_buff as far as BPF_PROG_TEST_RUN takes and gives it.
type skb struct {
	Len, PktType, Mark uint32
	_                  [7]uint32
	IfIndex            uint32 // at 40
	_                  [30]uint32
	GSOSegs            uint32 // at 164
	_                  uint64
	GSOSize            uint32 // at 176
	_                  uint32
	_                  uint64
}

// What programs return.
const (
	retNext     = 0xffffffff // TC_ACT_UNSPEC
	retDrop     = 2
	retRedirect = 7
)

// bench holds two pods (a, b), one that is only reached through the host stack
// (shaped), a child, and a link of ours without entry, on links without traffic.
type bench struct {
	d                   *Datapath
	a, b, shaped, child endpoint.Endpoint
	ifA, ifB, ifBare    uint32
	gateway, outside    netip.Addr
}

func newBench(t *testing.T, cfg Config) *bench {
	t.Helper()
	b := &bench{
		d:       open(t, cfg),
		a:       pod("10.9.0.10", 1500),
		b:       pod("10.9.0.20", 1500),
		shaped:  pod("10.9.0.30", 1500),
		child:   pod("172.30.0.2", 1400),
		gateway: gatewayAddr,
		outside: netip.MustParseAddr("198.51.100.1"),
	}
	b.shaped.Bandwidth = &endpoint.Bandwidth{IngressRate: 1e6, IngressBurst: 1e5}
	b.child.Mode = endpoint.Multikernel
	b.child.HostLink = b.child.Generation.HostLink()
	for _, ep := range []endpoint.Endpoint{b.a, b.b, b.shaped, b.child} {
		addLink(t, ep)
		objects := b.d.Objects(ep)
		if err := objects[len(objects)-1].Ensure(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	addLink(t, endpoint.Endpoint{HostLink: "lxcbare"})
	b.ifA, b.ifB, b.ifBare = indexOf(t, b.d, b.a.HostLink), indexOf(t, b.d, b.b.HostLink), indexOf(t, b.d, "lxcbare")
	return b
}

// addLink adds the endpoint's veth, which carries nothing, for its index.
func addLink(t testing.TB, ep endpoint.Endpoint) {
	t.Helper()
	netlab.Run(t, "ip", "link", "add", ep.HostLink, "address", mac(ep.Generation.HostMAC()), "type", "veth", "peer", "name", "p"+ep.HostLink[1:])
	t.Cleanup(func() { netlab.Run(t, "ip", "link", "del", ep.HostLink) })
}

func indexOf(t *testing.T, d *Datapath, name string) uint32 {
	t.Helper()
	l, err := d.linkByName(name)
	if err != nil || l == nil {
		t.Fatalf("link %s: %v", name, err)
	}
	return uint32(l.Attrs().Index)
}

// run hands one frame to a program and returns what it returned, the frame
// afterwards, and the mark.
func (b *bench) run(t *testing.T, program string, data []byte, in skb) (uint32, []byte, uint32) {
	t.Helper()
	var out skb
	buf := make([]byte, len(data)+64)
	o := ebpf.RunOptions{Data: data, DataOut: buf, Context: in, ContextOut: &out}
	ret, err := b.d.names[program].Run(&o)
	if err != nil {
		t.Fatalf("%s: %v", program, err)
	}
	return ret, o.DataOut, out.Mark
}

// fromA is a frame of pod a to its gateway's hardware address.
func (b *bench) fromA(ip ipv4) frame {
	if !ip.src.IsValid() {
		ip.src = b.a.Address
	}
	if !ip.dst.IsValid() {
		ip.dst = b.b.Address
	}
	return frame{src: b.a.Generation.PeerMAC(), dst: b.a.Generation.HostMAC(), ip: &ip}
}

// toB is a frame from the host stack to pod b.
func (b *bench) toB(ip ipv4) frame {
	if !ip.src.IsValid() {
		ip.src = b.a.Address
	}
	if !ip.dst.IsValid() {
		ip.dst = b.b.Address
	}
	return frame{src: b.b.Generation.HostMAC(), dst: b.b.Generation.PeerMAC(), ip: &ip}
}

func (b *bench) other(f frame, typ uint16, raw ...byte) frame {
	f.ip, f.typ, f.raw = nil, typ, raw
	return f
}

// counted returns what changed in the counters of addr, by outcome.
func counted(before, after Counters) string {
	var s string
	for i := range after {
		if n := after[i].Packets - before[i].Packets; n > 0 {
			s += fmt.Sprintf("%s:%d ", Outcome(i), n)
		}
	}
	return s
}

func (b *bench) counters(t *testing.T, addr netip.Addr) Counters {
	t.Helper()
	c, err := b.d.Counters(addr)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (b *bench) path(t *testing.T, k flowKey) uint8 {
	t.Helper()
	var f flowValue
	if _, err := lookup(b.d.objects.Flows, k, &f); err != nil {
		t.Fatal(err)
	}
	return f.Path
}

func (b *bench) setPath(t *testing.T, k flowKey, path uint8, age uint32) {
	t.Helper()
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		t.Fatal(err)
	}
	v := flowValue{Seen: uint32(ts.Nano()>>30) - age, Path: path}
	if err := b.d.objects.Flows.Put(k, v); err != nil {
		t.Fatal(err)
	}
}

// TEST_RUN refuses packets over a page and IPv4 frames without a whole header;
// those, and non-linear packets, are in live tests.
func TestFromContainer(t *testing.T) {
	b := newBench(t, Config{})
	mac := b.a.Generation.PeerMAC()
	stranger := [6]byte{2, 1, 1, 1, 1, 1}
	spoofed := b.fromA(ipv4{proto: unix.IPPROTO_UDP, payload: udp(1, 2)})
	spoofed.src = stranger
	misdirected := b.fromA(ipv4{proto: unix.IPPROTO_UDP, payload: udp(1, 2)})
	misdirected.dst = stranger
	syn, ack := tcp(1000, 80, synFlag), tcp(1000, 80, ackFlag)
	const tcpP, udpP, icmpP = unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP
	quote := func(p ipv4) []byte { return p.bytes() }
	query := ipv4{src: b.b.Address, dst: b.a.Address, proto: udpP, payload: udp(53, 1000)}

	for _, c := range []struct {
		name    string
		frame   frame
		bare    bool // on the link without entry
		in      skb
		path    uint8 // of flow (tcp|udp) 1000 <-> 80, set before
		age     uint32
		ret     uint32
		outcome Outcome
	}{
		{name: "SYN to a pod", frame: b.fromA(ipv4{proto: tcpP, payload: syn}), ret: retRedirect, outcome: Peer},
		{name: "middle of an unknown connection", frame: b.fromA(ipv4{proto: tcpP, payload: ack}), ret: retNext, outcome: Stack},
		{name: "middle of a redirected connection", frame: b.fromA(ipv4{proto: tcpP, payload: ack}), path: byRedirect, ret: retRedirect, outcome: Peer},
		{name: "middle of a delivered connection", frame: b.fromA(ipv4{proto: tcpP, payload: ack}), path: byStack, ret: retNext, outcome: Stack},
		{name: "SYN with the ports of a delivered connection", frame: b.fromA(ipv4{proto: tcpP, payload: syn}), path: byStack, ret: retNext, outcome: Stack},
		{name: "after a day of silence", frame: b.fromA(ipv4{proto: tcpP, payload: ack}), path: byRedirect, age: 80001, ret: retNext, outcome: Stack},
		{name: "after an hour of silence", frame: b.fromA(ipv4{proto: tcpP, payload: ack}), path: byRedirect, age: 3600, ret: retRedirect, outcome: Peer},
		{name: "SYN-ACK of an unknown connection", frame: b.fromA(ipv4{proto: tcpP, payload: tcp(1000, 80, synFlag|ackFlag)}), ret: retNext, outcome: Stack},
		{name: "UDP", frame: b.fromA(ipv4{proto: udpP, payload: udp(1000, 80)}), ret: retRedirect, outcome: Peer},
		{name: "UDP reply of a delivered flow", frame: b.fromA(ipv4{proto: udpP, payload: udp(1000, 80)}), path: byStack, ret: retNext, outcome: Stack},
		{name: "UDP after the memory of a delivered flow", frame: b.fromA(ipv4{proto: udpP, payload: udp(1000, 80)}), path: byStack, age: 701, ret: retRedirect, outcome: Peer},
		{name: "UDP header cut off", frame: b.fromA(ipv4{proto: udpP, payload: []byte{1, 2, 3}}), ret: retNext, outcome: Stack},
		{name: "echo request", frame: b.fromA(ipv4{proto: icmpP, payload: icmp(8, 0, 7<<16)}), ret: retRedirect, outcome: Peer},
		{name: "echo reply without request", frame: b.fromA(ipv4{proto: icmpP, payload: icmp(0, 0, 8<<16)}), ret: retNext, outcome: Stack},
		{name: "ICMP of an unknown type", frame: b.fromA(ipv4{proto: icmpP, payload: icmp(99, 0, 0)}), ret: retNext, outcome: Stack},
		{name: "GRE", frame: b.fromA(ipv4{proto: unix.IPPROTO_GRE, payload: []byte{0, 0, 8, 0}}), ret: retRedirect, outcome: Peer},
		{name: "SCTP", frame: b.fromA(ipv4{proto: unix.IPPROTO_SCTP, payload: udp(1000, 80)}), ret: retRedirect, outcome: Peer},
		{name: "D4 error quoting an unknown flow", frame: b.fromA(ipv4{proto: icmpP, payload: icmp(3, 3, 0, quote(query)...)}), ret: retNext, outcome: Stack},
		{name: "D4 error with its quote cut off", frame: b.fromA(ipv4{proto: icmpP, payload: icmp(3, 3, 0, 1, 2, 3)}), ret: retNext, outcome: Stack},
		{name: "D4 error quoting a delivered flow", frame: b.fromA(ipv4{proto: icmpP, payload: icmp(3, 3, 0, quote(ipv4{src: b.b.Address, dst: b.a.Address, proto: udpP, payload: udp(80, 1000)})...)}), path: byStack, ret: retNext, outcome: Stack},
		{name: "D4 error quoting a redirected flow", frame: b.fromA(ipv4{proto: icmpP, payload: icmp(3, 3, 0, quote(ipv4{src: b.b.Address, dst: b.a.Address, proto: udpP, payload: udp(80, 1000)})...)}), path: byRedirect, ret: retRedirect, outcome: Peer},
		{name: "to the outside", frame: b.fromA(ipv4{dst: b.outside, proto: udpP, payload: udp(1, 2)}), ret: retNext, outcome: Stack},
		{name: "to the gateway", frame: b.fromA(ipv4{dst: b.gateway, proto: udpP, payload: udp(1, 2)}), ret: retNext, outcome: Stack},
		{name: "to a shaped pod", frame: b.fromA(ipv4{dst: b.shaped.Address, proto: udpP, payload: udp(1, 2)}), ret: retNext, outcome: Stack},
		{name: "to a child", frame: b.fromA(ipv4{dst: b.child.Address, proto: udpP, payload: udp(1, 2)}), ret: retNext, outcome: Stack},
		{name: "D18 to itself", frame: b.fromA(ipv4{dst: b.a.Address, proto: udpP, payload: udp(1, 2)}), ret: retNext, outcome: Stack},
		{name: "TTL 1", frame: b.fromA(ipv4{proto: udpP, ttl: 1, payload: udp(1, 2)}), ret: retNext, outcome: Stack},
		{name: "TTL 2", frame: b.fromA(ipv4{proto: udpP, ttl: 2, payload: udp(1, 2)}), ret: retRedirect, outcome: Peer},
		{name: "IP options", frame: b.fromA(ipv4{proto: udpP, options: []byte{7, 3, 4, 0}, payload: udp(1, 2)}), ret: retNext, outcome: Stack},
		{name: "D1 first fragment", frame: b.fromA(ipv4{proto: udpP, frag: 0x2000, payload: udp(1, 2)}), ret: retNext, outcome: Stack},
		{name: "D1 last fragment", frame: b.fromA(ipv4{proto: udpP, frag: 0x00b9, payload: udp(1, 2)}), ret: retNext, outcome: Stack},
		{name: "D20 1500 bytes", frame: b.fromA(ipv4{proto: udpP, payload: udp(1, 2, make([]byte, 1472)...)}), ret: retRedirect, outcome: Peer},
		{name: "D20 1501 bytes", frame: b.fromA(ipv4{proto: udpP, payload: udp(1, 2, make([]byte, 1473)...)}), ret: retNext, outcome: Stack},
		{name: "D20 GSO", frame: b.fromA(ipv4{proto: tcpP, payload: tcp(1000, 80, ackFlag, make([]byte, 3000)...)}), in: skb{GSOSegs: 3, GSOSize: 1448}, path: byRedirect, ret: retRedirect, outcome: Peer},
		{name: "D20 GSO of segments that fit exactly", frame: b.fromA(ipv4{proto: tcpP, payload: tcp(1000, 80, ackFlag, make([]byte, 3000)...)}), in: skb{GSOSegs: 3, GSOSize: 1460}, path: byRedirect, ret: retRedirect, outcome: Peer},
		{name: "D20 GSO of segments a byte too long", frame: b.fromA(ipv4{proto: tcpP, payload: tcp(1000, 80, ackFlag, make([]byte, 3000)...)}), in: skb{GSOSegs: 3, GSOSize: 1461}, path: byRedirect, ret: retNext, outcome: Stack},
		{name: "another pod's source", frame: b.fromA(ipv4{src: b.b.Address, proto: udpP, payload: udp(1, 2)}), ret: retDrop, outcome: DropAddress},
		{name: "a source that nobody has", frame: b.fromA(ipv4{src: b.outside, proto: udpP, payload: udp(1, 2)}), ret: retDrop, outcome: DropAddress},
		{name: "the child's source", frame: b.fromA(ipv4{src: b.child.Address, proto: udpP, payload: udp(1, 2)}), ret: retDrop, outcome: DropAddress},
		{name: "another hardware source", frame: spoofed, ret: retDrop, outcome: DropMAC},
		{name: "to another station", frame: misdirected, ret: retNext, outcome: Stack},
		{name: "a link without endpoint", frame: b.fromA(ipv4{proto: udpP, payload: udp(1, 2)}), bare: true, ret: retDrop, outcome: DropUnknown},
		{name: "ARP on a link without endpoint", frame: b.other(b.fromA(ipv4{}), unix.ETH_P_ARP, arpPacket(1, mac, b.a.Address, [6]byte{}, b.gateway)...), bare: true, ret: retDrop, outcome: DropUnknown},
		{name: "IPv6 on a link without endpoint", frame: b.other(b.fromA(ipv4{}), unix.ETH_P_IPV6, make([]byte, 40)...), bare: true, ret: retDrop, outcome: DropUnknown},
		{name: "header length of 16", frame: b.fromA(ipv4{proto: udpP, first: 0x44, payload: udp(1, 2)}), ret: retDrop, outcome: DropHeader},
		{name: "version 6 as IPv4", frame: b.fromA(ipv4{proto: udpP, first: 0x65, payload: udp(1, 2)}), ret: retDrop, outcome: DropHeader},
		{name: "IPv6", frame: b.other(b.fromA(ipv4{}), unix.ETH_P_IPV6, make([]byte, 40)...), ret: retDrop, outcome: DropOther},
		{name: "LLDP", frame: b.other(b.fromA(ipv4{}), 0x88cc, make([]byte, 40)...), ret: retDrop, outcome: DropOther},
		{name: "802.1Q", frame: b.other(b.fromA(ipv4{}), unix.ETH_P_8021Q, append([]byte{0, 5, 8, 0}, b.fromA(ipv4{}).ip.bytes()...)...), ret: retDrop, outcome: DropVLAN},
		{name: "802.1ad", frame: b.other(b.fromA(ipv4{}), unix.ETH_P_8021AD, append([]byte{0, 5, 8, 0}, b.fromA(ipv4{}).ip.bytes()...)...), ret: retDrop, outcome: DropVLAN},
		{name: "ARP for the gateway", frame: b.other(b.fromA(ipv4{}), unix.ETH_P_ARP, arpPacket(1, mac, b.a.Address, [6]byte{}, b.gateway)...), ret: retRedirect, outcome: ARP},
		{name: "ARP for another", frame: b.other(b.fromA(ipv4{}), unix.ETH_P_ARP, arpPacket(1, mac, b.a.Address, [6]byte{}, b.b.Address)...), ret: retNext, outcome: Stack},
		{name: "ARP answer", frame: b.other(b.fromA(ipv4{}), unix.ETH_P_ARP, arpPacket(2, mac, b.a.Address, b.a.Generation.HostMAC(), b.gateway)...), ret: retNext, outcome: Stack},
		{name: "ARP probe", frame: b.other(b.fromA(ipv4{}), unix.ETH_P_ARP, arpPacket(1, mac, netip.IPv4Unspecified(), [6]byte{}, b.a.Address)...), ret: retNext, outcome: Stack},
		{name: "ARP in another's name", frame: b.other(b.fromA(ipv4{}), unix.ETH_P_ARP, arpPacket(2, mac, b.b.Address, b.a.Generation.HostMAC(), b.gateway)...), ret: retDrop, outcome: DropAddress},
		{name: "ARP with another's hardware address", frame: b.other(b.fromA(ipv4{}), unix.ETH_P_ARP, arpPacket(1, stranger, b.a.Address, [6]byte{}, b.gateway)...), ret: retDrop, outcome: DropMAC},
		{name: "ARP cut off", frame: b.other(b.fromA(ipv4{}), unix.ETH_P_ARP, arpPacket(1, mac, b.a.Address, [6]byte{}, b.gateway)[:20]...), ret: retDrop, outcome: DropHeader},
		{name: "ARP for IPv6", frame: b.other(b.fromA(ipv4{}), unix.ETH_P_ARP, append([]byte{0, 1, 0x86, 0xdd}, make([]byte, 24)...)...), ret: retDrop, outcome: DropHeader},
	} {
		t.Run(c.name, func(t *testing.T) {
			flows := []flowKey{keyOf(tcpP, b.a.Address, b.b.Address, 1000, 80), keyOf(udpP, b.a.Address, b.b.Address, 1000, 80)}
			for _, k := range flows {
				if err := remove(b.d.objects.Flows, k); err != nil {
					t.Fatal(err)
				}
				if c.path != 0 {
					b.setPath(t, k, c.path, c.age)
				}
			}
			at := b.a.Address
			c.in.IfIndex = b.ifA
			if c.bare {
				c.in.IfIndex, at = b.ifBare, Unknown
			}
			before := b.counters(t, at)
			data := c.frame.bytes()
			ret, out, mark := b.run(t, "from_container", data, c.in)
			if ret != c.ret {
				t.Errorf("returned %d, want %d", int32(ret), int32(c.ret))
			}
			if got, want := counted(before, b.counters(t, at)), c.outcome.String()+":1 "; got != want {
				t.Errorf("counted %q, want %q", got, want)
			}
			switch c.outcome {
			case Peer:
				b.rewritten(t, data, out)
				if mark != 0 {
					t.Errorf("mark is %#x, want none", mark)
				}
			case ARP:
				want := b.other(frame{src: b.a.Generation.HostMAC(), dst: mac}, unix.ETH_P_ARP, arpPacket(2, b.a.Generation.HostMAC(), b.gateway, mac, b.a.Address)...)
				if !bytes.Equal(out, want.bytes()) {
					t.Errorf("answered\n%x, want\n%x", out, want.bytes())
				}
			default:
				if !bytes.Equal(out, data) {
					t.Errorf("changed the frame:\n%x to\n%x", data, out)
				}
			}
		})
	}
}

// rewritten checks a redirected frame: the hardware addresses of b's link, the TTL
// one less, the checksum right, and nothing else changed.
func (b *bench) rewritten(t *testing.T, in, out []byte) {
	t.Helper()
	want := bytes.Clone(in)
	dst, src := b.b.Generation.PeerMAC(), b.b.Generation.HostMAC()
	copy(want, dst[:])
	copy(want[6:], src[:])
	want[22]--
	want[24], want[25] = 0, 0
	binary.BigEndian.PutUint16(want[24:], checksum(want[14:34]))
	if !bytes.Equal(out, want) {
		t.Errorf("frame is\n%x, want\n%x", out[:34], want[:34])
	}
}

// The incremental checksum is right for every TTL and for sums at the edge.
func TestChecksumAfterTTL(t *testing.T) {
	b := newBench(t, Config{})
	for ttl := 2; ttl < 256; ttl++ {
		// The identifier sweeps the checksum over its whole range.
		f := b.fromA(ipv4{proto: unix.IPPROTO_UDP, ttl: uint8(ttl), id: uint16(ttl * 257), payload: udp(1, 2)}).bytes()
		_, out, _ := b.run(t, "from_container", f, skb{IfIndex: b.ifA})
		b.rewritten(t, f, out)
	}
	for _, sum := range []uint16{0xfeff, 0xfefe, 0xff00, 0xffff, 0x0000, 0x00ff} {
		p := ipv4{src: b.a.Address, dst: b.b.Address, proto: unix.IPPROTO_UDP, payload: udp(1, 2)}
		zero := ^binary.BigEndian.Uint16(p.bytes()[10:]) // the sum with identifier 0
		p.id = foldSub(^sum, zero)
		f := b.fromA(p).bytes()
		_, out, _ := b.run(t, "from_container", f, skb{IfIndex: b.ifA})
		if got := checksum(out[14:34]); got != 0 {
			t.Errorf("checksum %#x before: wrong after", binary.BigEndian.Uint16(f[24:]))
		}
	}
}

// foldSub is a - b in ones' complement.
func foldSub(a, b uint16) uint16 {
	s := uint32(a) + uint32(^b)
	return uint16(s>>16 + s&0xffff)
}

func TestToContainer(t *testing.T) {
	b := newBench(t, Config{})
	const tcpP, udpP, icmpP = unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP
	for _, c := range []struct {
		name    string
		frame   frame
		mark    uint32
		bare    bool
		path    uint8 // of flow a:1000 -> b:80, set before
		ret     uint32
		outcome string
		then    uint8 // that path afterwards
	}{
		{name: "SYN", frame: b.toB(ipv4{proto: tcpP, payload: tcp(1000, 80, synFlag)}), ret: retNext, outcome: "delivered:1 ", then: byStack},
		{name: "middle of an unknown connection", frame: b.toB(ipv4{proto: tcpP, payload: tcp(1000, 80, ackFlag)}), ret: retNext, outcome: "delivered:1 ", then: byStack},
		{name: "stray of a redirected connection", frame: b.toB(ipv4{proto: tcpP, payload: tcp(1000, 80, ackFlag)}), path: byRedirect, ret: retNext, outcome: "delivered:1 ", then: byRedirect},
		{name: "new connection with the ports of a redirected one", frame: b.toB(ipv4{proto: tcpP, payload: tcp(1000, 80, synFlag)}), path: byRedirect, ret: retNext, outcome: "delivered:1 ", then: byStack},
		{name: "UDP", frame: b.toB(ipv4{proto: udpP, payload: udp(1000, 80)}), ret: retNext, outcome: "delivered:1 ", then: byStack},
		{name: "UDP of a redirected flow", frame: b.toB(ipv4{proto: udpP, payload: udp(1000, 80)}), path: byRedirect, ret: retNext, outcome: "delivered:1 ", then: byStack},
		{name: "first fragment", frame: b.toB(ipv4{proto: udpP, frag: 0x2000, payload: udp(1000, 80)}), ret: retNext, outcome: "delivered:1 ", then: byStack},
		{name: "later fragment", frame: b.toB(ipv4{proto: udpP, frag: 1, payload: udp(1000, 80)}), ret: retNext, outcome: "delivered:1 "},
		{name: "ICMP error", frame: b.toB(ipv4{proto: icmpP, payload: icmp(3, 3, 0, make([]byte, 28)...)}), ret: retNext, outcome: "delivered:1 "},
		{name: "from the outside", frame: b.toB(ipv4{src: b.outside, proto: udpP, payload: udp(1000, 80)}), ret: retNext, outcome: "delivered:1 "},
		{name: "for an address behind the pod", frame: b.toB(ipv4{dst: b.outside, proto: udpP, payload: udp(1000, 80)}), ret: retNext, outcome: "delivered:1 "},
		{name: "redirected by us", frame: b.toB(ipv4{proto: udpP, payload: udp(1000, 80)}), mark: 0x6d6b6e74, ret: retNext},
		{name: "header length of 16", frame: b.toB(ipv4{proto: udpP, first: 0x44, payload: udp(1, 2)}), ret: retDrop, outcome: "drop-header:1 "},
		{name: "IPv6", frame: b.other(b.toB(ipv4{}), unix.ETH_P_IPV6, make([]byte, 40)...), ret: retDrop, outcome: "drop-other:1 "},
		{name: "802.1Q", frame: b.other(b.toB(ipv4{}), unix.ETH_P_8021Q, make([]byte, 40)...), ret: retDrop, outcome: "drop-vlan:1 "},
		{name: "ARP", frame: b.other(b.toB(ipv4{}), unix.ETH_P_ARP, make([]byte, 28)...), ret: retNext},
		{name: "a link without endpoint", frame: b.toB(ipv4{proto: udpP, payload: udp(1000, 80)}), bare: true, ret: retDrop, outcome: "drop-unknown:1 "},
	} {
		t.Run(c.name, func(t *testing.T) {
			keys := map[uint8]flowKey{tcpP: keyOf(tcpP, b.a.Address, b.b.Address, 1000, 80), udpP: keyOf(udpP, b.a.Address, b.b.Address, 1000, 80)}
			for _, k := range keys {
				if err := remove(b.d.objects.Flows, k); err != nil {
					t.Fatal(err)
				}
				if c.path != 0 {
					b.setPath(t, k, c.path, 0)
				}
			}
			in, at := skb{IfIndex: b.ifB, Mark: c.mark}, b.b.Address
			if c.bare {
				in.IfIndex, at = b.ifBare, Unknown
			}
			before := b.counters(t, at)
			data := c.frame.bytes()
			ret, out, mark := b.run(t, "to_container", data, in)
			if ret != c.ret || mark != 0 {
				t.Errorf("returned %d with mark %#x, want %d and none", int32(ret), mark, int32(c.ret))
			}
			if got := counted(before, b.counters(t, at)); got != c.outcome {
				t.Errorf("counted %q, want %q", got, c.outcome)
			}
			if !bytes.Equal(out, data) {
				t.Errorf("changed the frame:\n%x to\n%x", data, out)
			}
			if c.frame.ip == nil || c.ret == retDrop {
				return
			}
			if got := b.path(t, keys[max(tcpP, c.frame.ip.proto)]); c.frame.ip.proto != icmpP && got != c.then {
				t.Errorf("the flow's path is %d, want %d", got, c.then)
			}
		})
	}
}

// A mark that is not ours stays, and does not pass for ours.
func TestForeignMarkStays(t *testing.T) {
	b := newBench(t, Config{})
	f := b.toB(ipv4{proto: unix.IPPROTO_UDP, payload: udp(1000, 80)}).bytes()
	before := b.counters(t, b.b.Address)
	ret, _, mark := b.run(t, "to_container", f, skb{IfIndex: b.ifB, Mark: 0x4000})
	if ret != retNext || mark != 0x4000 || counted(before, b.counters(t, b.b.Address)) != "delivered:1 " {
		t.Errorf("returned %d with mark %#x, want to be delivered with 0x4000", int32(ret), mark)
	}
}

// Without bpf_redirect_peer the packet carries the mark to the destination's
// to_container, in both kinds of redirect.
func TestRedirectMarks(t *testing.T) {
	b := newBench(t, Config{NoPeer: true})
	for _, c := range []struct {
		frame   frame
		outcome string
	}{
		{b.fromA(ipv4{proto: unix.IPPROTO_UDP, payload: udp(1000, 80)}), "redirect:1 "},
		{b.other(b.fromA(ipv4{}), unix.ETH_P_ARP, arpPacket(1, b.a.Generation.PeerMAC(), b.a.Address, [6]byte{}, b.gateway)...), "arp:1 "},
	} {
		before := b.counters(t, b.a.Address)
		ret, _, mark := b.run(t, "from_container", c.frame.bytes(), skb{IfIndex: b.ifA})
		if got := counted(before, b.counters(t, b.a.Address)); ret != retRedirect || mark != 0x6d6b6e74 || got != c.outcome {
			t.Errorf("returned %d with mark %#x, counted %q, want %q", int32(ret), mark, got, c.outcome)
		}
	}
}

func TestPassOther(t *testing.T) {
	b := newBench(t, Config{PassOther: true})
	for _, c := range []struct {
		program string
		frame   frame
		ifIndex uint32
		at      netip.Addr
	}{
		{"from_container", b.other(b.fromA(ipv4{}), unix.ETH_P_IPV6, make([]byte, 40)...), b.ifA, b.a.Address},
		{"from_container", b.other(b.fromA(ipv4{}), unix.ETH_P_8021Q, make([]byte, 40)...), b.ifA, b.a.Address},
		{"to_container", b.other(b.toB(ipv4{}), unix.ETH_P_IPV6, make([]byte, 40)...), b.ifB, b.b.Address},
	} {
		before := b.counters(t, c.at)
		ret, _, _ := b.run(t, c.program, c.frame.bytes(), skb{IfIndex: c.ifIndex})
		if got := counted(before, b.counters(t, c.at)); ret != retNext || got != "other:1 " {
			t.Errorf("%s: returned %d, counted %q, want it passed as other", c.program, int32(ret), got)
		}
	}
}

// A child's programs judge: they let everything through and never redirect.
func TestChild(t *testing.T) {
	b := newBench(t, Config{})
	index := indexOf(t, b.d, b.child.HostLink)
	for _, c := range []struct {
		program, outcome string
		frame            frame
	}{
		{"from_child", "stack:1 ", frame{ip: &ipv4{src: b.child.Address, dst: b.a.Address, proto: unix.IPPROTO_UDP, payload: udp(1, 2)}}},
		{"from_child", "stack:1 ", frame{typ: unix.ETH_P_IPV6, raw: make([]byte, 40)}},
		{"to_child", "delivered:1 ", frame{ip: &ipv4{src: b.a.Address, dst: b.child.Address, proto: unix.IPPROTO_UDP, payload: udp(1, 2)}}},
	} {
		before := b.counters(t, b.child.Address)
		ret, _, _ := b.run(t, c.program, c.frame.bytes(), skb{IfIndex: index})
		if got := counted(before, b.counters(t, b.child.Address)); ret != retNext || got != c.outcome {
			t.Errorf("%s: returned %d, counted %q, want %d and %q", c.program, int32(ret), got, -1, c.outcome)
		}
	}
}
