package datapath

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

const (
	finFlag = 0x01
	rstFlag = 0x04
)

// segment is a TCP header with numbers, and n bytes behind it.
func segment(sport, dport uint16, flags uint8, seq, ack uint32, window uint16, n int) []byte {
	h := tcp(sport, dport, flags, make([]byte, n)...)
	binary.BigEndian.PutUint32(h[4:], seq)
	binary.BigEndian.PutUint32(h[8:], ack)
	binary.BigEndian.PutUint16(h[14:], window)
	return h
}

// clientOnly lets an endpoint connect and nobody connect to it.
const clientOnly = "sg g {}\nat g {securityGroupRefs: [{name: g}], endpoints: [{name: ep0}]}"

const peerAddr = "1.2.3.4"

func clientLab(t *testing.T) *policyLab {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20")
	l.apply(documents(t, clientOnly))
	return l
}

// step is a packet of endpoint 0, or one to it, and what becomes of it.
type step struct {
	what string
	out  bool
	b    []byte
	want bool
	left int // flow entries afterwards
}

func (l *policyLab) play(proto uint8, steps []step) {
	l.t.Helper()
	for i, s := range steps {
		send := l.in
		if s.out {
			send = l.out
		}
		if got := send(peerAddr, proto, s.b); got != s.want {
			l.t.Errorf("step %d, %s: passes %t, want %t", i, s.what, got, s.want)
		}
		if got := l.flows(); got != s.left {
			l.t.Errorf("step %d, %s: %d entries, want %d", i, s.what, got, s.left)
		}
	}
}

func TestTCPConnection(t *testing.T) {
	l := clientLab(t)
	const c, s, w = 1000, 5000, 64240
	up := func(flags uint8, seq, ack uint32, n int) []byte { return segment(40000, 80, flags, seq, ack, w, n) }
	down := func(flags uint8, seq, ack uint32, n int) []byte { return segment(80, 40000, flags, seq, ack, w, n) }
	open := []step{
		{"answer before the SYN", false, down(synFlag|ackFlag, s, c+1, 0), false, 0},
		{"SYN", true, up(synFlag, c, 0, 0), true, 2},
		{"SYN again", true, up(synFlag, c, 0, 0), true, 2},
		{"SYN of the other side", false, down(synFlag, s, 0, 0), false, 2},
		{"SYN-ACK", false, down(synFlag|ackFlag, s, c+1, 0), true, 2},
		{"ACK", true, up(ackFlag, c+1, s+1, 0), true, 2},
		{"data", true, up(ackFlag, c+1, s+1, 100), true, 2},
		{"data back", false, down(ackFlag, s+1, c+101, 1000), true, 2},
		{"another port", false, segment(80, 40001, ackFlag, s, c, w, 0), false, 2},
		{"SYN of the other side now", false, down(synFlag, s, 0, 0), false, 2},
	}
	closing := []step{
		{"FIN", true, up(ackFlag|finFlag, c+101, s+1001, 0), true, 2},
		{"the same FIN again", true, up(ackFlag|finFlag, c+101, s+1001, 0), true, 2},
		{"ACK of the FIN", false, down(ackFlag, s+1001, c+102, 0), true, 2},
		{"more data", false, down(ackFlag, s+1001, c+102, 500), true, 2},
		{"ACK of the data", true, up(ackFlag, c+102, s+1501, 0), true, 2},
		{"FIN back", false, down(ackFlag|finFlag, s+1501, c+102, 0), true, 2},
		{"an ACK that does not cover it", true, up(ackFlag, c+102, s+1501, 0), true, 2},
		{"the last ACK", true, up(ackFlag, c+102, s+1502, 0), true, 0},
		{"FIN back again", false, down(ackFlag|finFlag, s+1501, c+102, 0), false, 0},
	}
	l.play(protoTCP, append(open, closing...))
	for name, end := range map[string][]step{
		"D7 resets": {
			{"D7 RST far ahead", false, down(rstFlag, s+1001+1<<20, 0, 0), true, 2},
			{"D7 RST behind", false, down(rstFlag, s, 0, 0), true, 2},
			{"D7 the flow goes on", false, down(ackFlag, s+1001, c+101, 10), true, 2},
			{"RST in the window", false, down(rstFlag, s+1+10, 0, 0), true, 0},
			{"data after the RST", false, down(ackFlag, s+1001, c+101, 10), false, 0},
		},
		"own reset": {
			{"RST of the endpoint", true, up(rstFlag|ackFlag, c+101, s+1, 0), true, 0},
		},
		"ports used again": {
			{"FIN", true, up(ackFlag|finFlag, c+101, s+1001, 0), true, 2},
			{"SYN", true, up(synFlag, c+9000, 0, 0), true, 2},
			{"SYN-ACK", false, down(synFlag|ackFlag, s+9000, c+9001, 0), true, 2},
		},
	} {
		t.Run(name, func(t *testing.T) {
			l.t = t
			l.forget()
			l.play(protoTCP, append(open[1:], end...))
		})
	}
	t.Run("refused", func(t *testing.T) {
		l.t = t
		l.forget()
		l.play(protoTCP, []step{
			{"SYN", true, up(synFlag, c, 0, 0), true, 2},
			{"RST that answers nothing", false, down(rstFlag|ackFlag, 0, c+7, 0), true, 2},
			{"RST", false, down(rstFlag|ackFlag, 0, c+1, 0), true, 0},
		})
	})
	// The window is scaled once both SYNs have said so, and not before.
	for _, scaled := range []bool{true, false} {
		l.t = t
		l.forget()
		options := []byte{2, 4, 5, 180, 1, 3, 3, 10}
		withScale := func(h []byte, yes bool) []byte {
			if yes {
				h = append(h, options...)
				h[12] = 7 << 4
			}
			return h
		}
		far := uint32(s + 1 + 1<<20)
		left := 2
		if scaled {
			left = 0
		}
		l.play(protoTCP, []step{
			{"SYN", true, withScale(up(synFlag, c, 0, 0), true), true, 2},
			{"SYN-ACK", false, withScale(down(synFlag|ackFlag, s, c+1, 0), scaled), true, 2},
			{"ACK", true, up(ackFlag, c+1, s+1, 0), true, 2},
			{"RST in the scaled window", false, down(rstFlag, far, 0, 0), true, left},
		})
	}
}

// D7: resets that the receiver would not take leave a live flow alone, past a pass of
// the collector too.
func TestD7ResetsOutOfTheWindow(t *testing.T) {
	l := clientLab(t)
	const c, s, w = 1000, 5000, 100
	reset := func(seq uint32) []byte { return segment(80, 7, rstFlag, seq, 0, 0, 0) }
	l.play(protoTCP, []step{
		{"SYN", true, segment(7, 80, synFlag, c, 0, w, 0), true, 2},
		{"SYN-ACK", false, segment(80, 7, synFlag|ackFlag, s, c+1, w, 0), true, 2},
		{"ACK", true, segment(7, 80, ackFlag, c+1, s+1, w, 0), true, 2},
		{"RST just behind the window", false, reset(s + 1 + w), true, 2},
		{"RST just before it", false, reset(s), true, 2},
		{"RST half the numbers away", false, reset(s + 1 + 1<<31), true, 2},
	})
	if got, err := l.d.Policy().Collect(); err != nil || got.Expired != 0 || got.Entries != 2 {
		t.Errorf("collected %+v, %v, want the flow's two entries left alone", got, err)
	}
	l.play(protoTCP, []step{
		{"data", false, segment(80, 7, ackFlag, s+1, c+1, w, 10), true, 2},
		{"data back", true, segment(7, 80, ackFlag, c+1, s+11, w, 10), true, 2},
		{"RST at the end of the window", false, reset(s + 11 + w - 1), true, 0},
	})
}

func TestD21ICMPByIdentifier(t *testing.T) {
	l := clientLab(t)
	l.play(protoICMP, []step{
		{"reply without a request", false, icmp(0, 0, 7<<16), false, 0},
		{"request", true, icmp(8, 0, 7<<16|1), true, 2},
		{"reply", false, icmp(0, 0, 7<<16|1), true, 2},
		{"reply with another identifier", false, icmp(0, 0, 8<<16|1), false, 2},
		{"second request", true, icmp(8, 0, 8<<16|1), true, 4},
		{"its reply", false, icmp(0, 0, 8<<16|1), true, 4},
		{"a request of the other side with that identifier", false, icmp(8, 0, 7<<16), false, 4},
	})
}

func TestD3ErrorsByQuotedFlow(t *testing.T) {
	l := clientLab(t)
	router, self, peer := netip.MustParseAddr("5.5.5.5"), l.eps[0].Address, netip.MustParseAddr(peerAddr)
	quote := func(p ipv4) []byte { return p.bytes() }
	known := ipv4{src: self, dst: peer, proto: protoUDP, payload: udp(1000, 53)}
	if !l.pass(policy.Egress, 0, known) {
		t.Fatal("the flow's own packet is dropped")
	}
	l.out(peerAddr, protoICMP, icmp(8, 0, 7<<16))
	for _, c := range []struct {
		name string
		err  []byte
		want bool
	}{
		{"frag-needed that quotes it", icmp(3, 4, 1400, quote(known)...), true},
		{"time exceeded", icmp(11, 0, 0, quote(known)...), true},
		{"that quotes the echo", icmp(3, 1, 0, quote(ipv4{src: self, dst: peer, proto: protoICMP, payload: icmp(8, 0, 7<<16)})...), true},
		{"another port", icmp(3, 4, 1400, quote(ipv4{src: self, dst: peer, proto: protoUDP, payload: udp(1000, 54)})...), false},
		{"another source", icmp(3, 4, 1400, quote(ipv4{src: router, dst: peer, proto: protoUDP, payload: udp(1000, 53)})...), false},
		{"the other direction", icmp(3, 4, 1400, quote(ipv4{src: peer, dst: self, proto: protoUDP, payload: udp(53, 1000)})...), false},
		{"cut off", icmp(3, 4, 1400, quote(known)[:18]...), false},
		{"a quoted fragment", icmp(3, 4, 1400, quote(ipv4{src: self, dst: peer, proto: protoUDP, frag: 7, payload: udp(1000, 53)})...), false},
		{"redirect", icmp(5, 0, 0, quote(known)...), false},
	} {
		if got := l.pass(policy.Ingress, 0, ipv4{src: router, dst: self, proto: protoICMP, payload: c.err}); got != c.want {
			t.Errorf("%s: passes %t, want %t", c.name, got, c.want)
		}
	}
}

// D6: what was only a SYN is gone by its time, and what was established stays.
func TestD6HalfOpenExpires(t *testing.T) {
	l := clientLab(t)
	l.play(protoTCP, []step{
		{"SYN", true, segment(1, 80, synFlag, 1, 0, 100, 0), true, 2},
		{"SYN-ACK", false, segment(80, 1, synFlag|ackFlag, 9, 2, 100, 0), true, 2},
		{"SYN of another", true, segment(2, 80, synFlag, 1, 0, 100, 0), true, 4},
		{"its SYN-ACK", false, segment(80, 2, synFlag|ackFlag, 9, 2, 100, 0), true, 4},
		{"its ACK", true, segment(2, 80, ackFlag, 2, 10, 100, 0), true, 4},
	})
	l.age(int64(121 * time.Second))
	l.play(protoTCP, []step{
		{"SYN-ACK of the half-open one", false, segment(80, 1, synFlag|ackFlag, 9, 2, 100, 0), false, 2},
		{"data of the established one", false, segment(80, 2, ackFlag, 10, 2, 100, 5), true, 2},
	})
	l.age(int64(30 * time.Second))
	c, err := l.d.Policy().Collect()
	if err != nil || c.Expired != 2 || c.Entries != 4 {
		t.Errorf("collected %+v, %v; want 2 of 4 expired", c, err)
	}
}

// Every protocol's silence is as long as spec/policy-datapath.md says.
func TestTimeouts(t *testing.T) {
	l := clientLab(t)
	for _, c := range []struct {
		name        string
		proto       uint8
		there, back []byte
		ttl         time.Duration
	}{
		{"UDP", protoUDP, udp(5, 53), udp(53, 5), time.Minute},
		{"ICMP", protoICMP, icmp(8, 0, 1<<16), icmp(0, 0, 1<<16), 30 * time.Second},
		{"GRE", protoGRE, make([]byte, 8), make([]byte, 8), 2 * time.Minute},
		{"TCP in the middle", protoTCP, segment(5, 80, ackFlag, 1, 1, 9, 0), segment(80, 5, ackFlag, 1, 1, 9, 0), time.Hour},
		{"TCP closing", protoTCP, segment(5, 80, ackFlag|finFlag, 1, 1, 9, 0), segment(80, 5, ackFlag, 1, 1, 9, 0), time.Minute},
	} {
		for _, late := range []bool{false, true} {
			l.forget()
			if !l.out(peerAddr, c.proto, c.there) {
				t.Fatalf("%s: dropped", c.name)
			}
			age := c.ttl - 2*time.Second
			if late {
				age = c.ttl + time.Second
			}
			l.age(int64(age))
			if got := l.in(peerAddr, c.proto, c.back); got == late {
				t.Errorf("%s after %s: passes %t", c.name, age, got)
			}
			if !late { // and both directions are young again
				l.age(int64(age))
				if !l.out(peerAddr, c.proto, c.there) || !l.in(peerAddr, c.proto, c.back) {
					t.Errorf("%s: was not refreshed", c.name)
				}
			}
		}
	}
}

// Rules change under flows: only those that a change concerns are judged again,
// once, by the direction in which they began.
func TestD11JudgedAgain(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20", "10.9.0.30")
	docs := func(ports, more string) []policy.Object {
		return documents(t, "sg g {ingress: [{protocol: tcp, ports: ["+ports+"]}, {from: [{securityGroupRef: {name: h}}]}]}\nsg h {}\nsg other {ingress: [{}]}\n"+
			"at g {securityGroupRefs: [{name: g}], endpoints: [{name: ep0}]}\nat other {securityGroupRefs: [{name: other}], endpoints: [{name: ep1}]}\n"+more)
	}
	const member = "at h {securityGroupRefs: [{name: h}], endpoints: [{name: ep2}]}"
	l.apply(docs("{port: 80}, {port: 81}", member))
	udpPeer := l.eps[2].Address.String()
	l.in(peerAddr, protoTCP, tcp(7, 80, synFlag))
	l.in(peerAddr, protoTCP, tcp(7, 81, synFlag))
	l.in(udpPeer, protoUDP, udp(9, 9))
	l.pass(policy.Ingress, 1, ipv4{src: netip.MustParseAddr(peerAddr), dst: l.eps[1].Address, proto: protoTCP, payload: tcp(7, 80, synFlag)})
	other := func() bool {
		return l.pass(policy.Ingress, 1, ipv4{src: netip.MustParseAddr(peerAddr), dst: l.eps[1].Address, proto: protoTCP, payload: tcp(7, 80, ackFlag)})
	}
	again := func(what string, want uint64, f func()) {
		t.Helper()
		before := l.reasons(nil)
		f()
		if got := l.reasons(before)[policy.ConntrackOld]; got != want {
			t.Errorf("%s: %d flows were judged again, want %d", what, got, want)
		}
	}
	again("a resync of the same documents", 0, func() {
		l.apply(docs("{port: 80}, {port: 81}", member))
		if !l.in(peerAddr, protoTCP, tcp(7, 80, ackFlag)) || !other() {
			t.Error("a flow stopped")
		}
	})
	again("a rule is gone", 2, func() {
		l.apply(docs("{port: 81}", member))
		// A one-way download: only what the endpoint sends is seen after the change.
		for range 3 {
			if !l.out(peerAddr, protoTCP, tcp(81, 7, ackFlag)) {
				t.Error("the reply direction of a flow that is still allowed stopped")
			}
		}
		if l.in(peerAddr, protoTCP, tcp(7, 80, ackFlag)) {
			t.Error("a flow goes on without its rule")
		}
		for range 2 {
			if !other() {
				t.Error("a flow of another endpoint stopped")
			}
		}
	})
	again("the removed flow again, in either direction", 3, func() {
		for _, send := range []func() bool{
			func() bool { return l.in(peerAddr, protoTCP, tcp(7, 80, ackFlag)) },
			func() bool { return l.out(peerAddr, protoTCP, tcp(80, 7, ackFlag)) }, // what is not acknowledged yet
			func() bool { return l.in(peerAddr, protoTCP, tcp(7, 80, ackFlag)) },
		} {
			if send() {
				t.Error("it passes")
			}
		}
	})
	if !l.in(udpPeer, protoUDP, udp(9, 9)) {
		t.Error("the flow of a member stopped")
	}
	again("membership is revoked", 1, func() {
		l.apply(docs("{port: 81}", ""))
		if l.in(udpPeer, protoUDP, udp(9, 9)) {
			t.Error("a flow goes on without membership")
		}
		if !l.in(peerAddr, protoTCP, tcp(7, 81, ackFlag)) || !other() {
			t.Error("a flow of others stopped")
		}
	})
}

// An address that goes and comes back does not inherit admissions.
func TestAddressUsedAgain(t *testing.T) {
	l := clientLab(t)
	l.out(peerAddr, protoUDP, udp(5, 53))
	if !l.in(peerAddr, protoUDP, udp(53, 5)) {
		t.Fatal("the reply is dropped")
	}
	if _, err := l.enforce.RemoveEndpoint(l.wanted(l.eps[0])); err != nil {
		t.Fatal(err)
	}
	c, err := l.d.Policy().Collect()
	if err != nil || c.Orphaned != 2 {
		t.Errorf("collected %+v, %v; want 2 of an endpoint that is gone", c, err)
	}
	l.out(peerAddr, protoUDP, udp(5, 53)) // not an endpoint now: nothing is remembered
	l.apply(documents(t, clientOnly))
	if l.in(peerAddr, protoUDP, udp(53, 5)) {
		t.Error("the reply to an earlier owner passes")
	}
}

// Full: what is allowed passes and is not remembered; flows that have entries do
// not notice; what is denied stays denied.
func TestFullTable(t *testing.T) {
	l := newPolicyLab(t, Config{Flows: 64}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20")
	l.apply(documents(t, clientOnly))
	if !l.out(peerAddr, protoUDP, udp(1, 53)) {
		t.Fatal("the first flow is dropped")
	}
	before := l.reasons(nil)
	for i := range uint16(500) {
		if !l.out(peerAddr, protoUDP, udp(2+i, 53)) {
			t.Fatalf("an allowed packet is dropped by a full table")
		}
	}
	if got := l.reasons(before); got[policy.ConntrackFull] < 400 {
		t.Errorf("counted %v, want most as full", got)
	}
	list, err := l.d.Policy().Flows()
	if err != nil {
		t.Fatal(err)
	}
	if len(list)%2 != 0 {
		t.Errorf("%d entries: half an admission is left", len(list))
	}
	if !l.in(peerAddr, protoUDP, udp(53, 1)) {
		t.Error("the reply of a live flow is dropped")
	}
	if l.in(peerAddr, protoUDP, udp(53, 501)) {
		t.Error("a reply that nothing remembers passes the rules")
	}
}

// D8: a packet at the very end of its time, against passes of the collector over
// and over: never denied.
func TestD8CollectorSparesTheLiving(t *testing.T) {
	l := newPolicyLab(t, Config{Flows: 256}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20") // small: quickly collected
	l.apply(documents(t, clientOnly))
	p := l.d.Policy()
	l.out(peerAddr, protoUDP, udp(5, 53))
	// The entry has left seconds for the test to send the reply on a busy machine; the
	// collector sees a clock on which it has left 50 ms.
	const left = 20 * time.Second
	for i := range 1000 {
		l.age(int64(time.Minute - left))
		now, err := monotonic()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.collectAt(now + uint64(29*time.Second+left-50*time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if !l.in(peerAddr, protoUDP, udp(53, 5)) {
			t.Fatalf("pass %d: a reply within its time is dropped", i)
		}
	}
	// An entry that was read, and admitted anew before it was taken, is put back.
	var k ctKey
	var v ctValue
	if err := p.eachFlow(func(key ctKey, value ctValue) error { k, v = key, value; return nil }); err != nil {
		t.Fatal(err)
	}
	v.Seen -= uint64(time.Hour)
	if taken, err := newTaker(l.d.objects.PolicyConntrack).entry(k, v); taken || err != nil {
		t.Errorf("take: %t, %v", taken, err)
	}
	if err := l.d.objects.PolicyConntrack.Lookup(k, &v); err != nil {
		t.Errorf("it is gone: %v", err)
	}
}

// D19 and frames: what is not IPv4, or tagged, is dropped where the direction is
// enforced and passes where not; IPv4 does not notice.
func TestD19Frames(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20")
	for docs, want := range map[string][2]bool{ // passes: egress, ingress
		"":         {true, true},
		clientOnly: {false, false},
		"acl a {ingress: [{priority: 1, action: allow}]}\nat a {networkACLRef: {name: a}, pools: [all]}": {true, false},
	} {
		l.apply(documents(t, docs))
		for i, d := range policy.Directions {
			before := l.reasons(nil)
			n := uint64(0)
			for name, f := range map[string]frame{
				"IPv6":    {typ: unix.ETH_P_IPV6, raw: make([]byte, 40)},
				"802.1Q":  {typ: unix.ETH_P_8021Q, raw: make([]byte, 40)},
				"802.1ad": {typ: unix.ETH_P_8021AD, raw: make([]byte, 40)},
				"LLDP":    {typ: 0x88cc, raw: make([]byte, 40)},
			} {
				if got := l.run(d, 0, f, skb{}) != retDrop; got != want[i] {
					t.Errorf("%q %s %s: passes %t, want %t", docs, d, name, got, want[i])
				}
				if !want[i] {
					n++
				}
			}
			if got := l.reasons(before)[policy.FrameDrop]; got != n {
				t.Errorf("%q %s: %d counted, want %d", docs, d, got, n)
			}
			if l.run(d, 0, frame{typ: unix.ETH_P_ARP, raw: arpPacket(1, [6]byte{}, l.eps[0].Address, [6]byte{}, gatewayAddr)}, skb{}) == retDrop {
				t.Errorf("%q %s: ARP is dropped", docs, d)
			}
		}
		if !l.out(peerAddr, protoUDP, udp(1, 2)) {
			t.Errorf("%q: IPv4 is dropped", docs)
		}
	}
}

// D20: a GSO packet is as long as its header says, not as its segments.
func TestD20PolicyOnGSO(t *testing.T) {
	l := clientLab(t)
	p := ipv4{src: l.eps[0].Address, dst: netip.MustParseAddr(peerAddr), proto: protoTCP, payload: segment(5, 80, ackFlag, 1, 1, 9, 3000)}
	if l.run(policy.Egress, 0, frame{ip: &p}, skb{GSOSegs: 3, GSOSize: 1448}) == retDrop {
		t.Error("dropped")
	}
	if !l.in(peerAddr, protoTCP, segment(80, 5, ackFlag, 1, 3001, 9, 0)) {
		t.Error("its ACK is dropped")
	}
}

// What cannot be read is dropped where the direction is enforced.
func TestUnreadable(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20")
	padded := func(proto uint8, b []byte) ipv4 { return ipv4{proto: proto, payload: b} }
	for docs, want := range map[string]bool{"": true, clientOnly: false} {
		l.apply(documents(t, docs))
		for name, p := range map[string]ipv4{
			"UDP of 3 bytes":           padded(protoUDP, []byte{0, 1, 0}),
			"TCP of 19 bytes":          padded(protoTCP, tcp(1, 2, synFlag)[:19]),
			"TCP of 4 words":           padded(protoTCP, append([]byte{0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 4 << 4, 2}, make([]byte, 10)...)),
			"TCP with a header of 60":  padded(protoTCP, append([]byte{0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 15 << 4, 2}, make([]byte, 10)...)),
			"ICMP of 7 bytes":          padded(protoICMP, icmp(8, 0, 1)[:7]),
			"SCTP of 8 bytes":          padded(protoSCTP, udp(1, 2)),
			"D1 a fragment by itself":  {proto: protoUDP, frag: 100, id: 77, payload: make([]byte, 8)},
			"a header length of 16":    {proto: protoUDP, first: 0x44, payload: udp(1, 2)},
			"version 6":                {proto: protoUDP, first: 0x65, payload: udp(1, 2)},
			"a first fragment, tiny":   {proto: protoTCP, frag: 0x2000, id: 78, payload: make([]byte, 8)},
			"a fragment of ICMP alone": {proto: protoICMP, frag: 5, id: 79, payload: make([]byte, 8)},
		} {
			p.src, p.dst = l.eps[0].Address, netip.MustParseAddr(peerAddr)
			if got := l.pass(policy.Egress, 0, p); got != want {
				t.Errorf("%q egress, %s: passes %t, want %t", docs, name, got, want)
			}
			p.src, p.dst = p.dst, p.src
			if got := l.pass(policy.Ingress, 0, p); got != want {
				t.Errorf("%q ingress, %s: passes %t, want %t", docs, name, got, want)
			}
		}
	}
	// Ports are not read beyond the end of the packet: here they lie in the padding.
	l.apply(documents(t, "acl a {ingress: [{priority: 1, action: allow, protocol: udp, ports: [{port: 53}]}]}\nat a {networkACLRef: {name: a}, pools: [all]}"))
	short := ipv4{src: netip.MustParseAddr(peerAddr), dst: l.eps[0].Address, proto: protoUDP}
	f := frame{typ: unix.ETH_P_IP, raw: append(short.bytes(), udp(1, 53)...)}
	if l.run(policy.Ingress, 0, f, skb{}) != retDrop {
		t.Error("a datagram whose header lies behind the packet's end passes")
	}
}

// D1 and D5: later fragments have the ports of their first one, for 5 seconds, and
// only those of the same datagram.
func TestD1FragmentsHavePorts(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20")
	l.apply(documents(t, "acl a {ingress: [{priority: 1, action: allow, protocol: udp, ports: [{port: 53}]}, {priority: 2, action: allow, protocol: gre}]}\nat a {networkACLRef: {name: a}, pools: [all]}"))
	fragment := func(id, frag uint16, proto uint8, b []byte) bool {
		return l.pass(policy.Ingress, 0, ipv4{src: netip.MustParseAddr(peerAddr), dst: l.eps[0].Address, proto: proto, id: id, frag: frag, payload: b})
	}
	for _, s := range []struct {
		name     string
		id, frag uint16
		proto    uint8
		b        []byte
		want     bool
	}{
		{"second before first", 1, 0x2000 | 185, protoUDP, make([]byte, 80), false},
		{"first", 1, 0x2000, protoUDP, udp(9, 53, make([]byte, 72)...), true},
		{"third", 1, 370, protoUDP, make([]byte, 80), true},
		{"of another datagram", 2, 185, protoUDP, make([]byte, 80), false},
		{"of another protocol", 1, 185, protoTCP, make([]byte, 80), false},
		{"first that is denied", 3, 0x2000, protoUDP, udp(9, 54, make([]byte, 72)...), false},
		{"its second", 3, 185, protoUDP, make([]byte, 80), false},
		{"GRE needs no first", 4, 185, protoGRE, make([]byte, 80), true},
		{"the next datagram whole", 5, 0, protoUDP, udp(9, 53), true},
	} {
		if got := fragment(s.id, s.frag, s.proto, s.b); got != s.want {
			t.Errorf("%s: passes %t, want %t", s.name, got, s.want)
		}
	}
}
