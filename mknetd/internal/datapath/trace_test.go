package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/asm"

	"mknet/spec/endpoint"
	"mknet/spec/policy"
	"mknet/tests/netlab"
)

// told is the events of a trace in a short form, as soon as there are n packets that
// have ended.
func told(t *testing.T, tr *Trace, n int) []TraceEvent {
	t.Helper()
	var out []TraceEvent
	deadline := time.After(patience)
	for n > 0 {
		select {
		case ev := <-tr.Events():
			out = append(out, ev)
			if ev.Reason >= policy.Redirected {
				n--
			}
		case <-deadline:
			t.Fatalf("no further event after %s", short(out))
		}
	}
	return out
}

// short is "entered egress:208 egress:300/1.0 501-peer".
func short(list []TraceEvent) string {
	var words []string
	for _, ev := range list {
		w := fmt.Sprint(uint16(ev.Reason))
		if ev.Point != 0 {
			w = ev.Point.String()[:2] + ":" + w
		}
		switch {
		case ev.Policy != 0 && ev.Rule >= 0:
			w += fmt.Sprintf("/%d.%d", ev.Policy, ev.Rule)
		case ev.Policy != 0:
			w += fmt.Sprintf("/%d", ev.Policy)
		}
		if ev.Reason >= policy.Redirected {
			w += "-" + ev.Outcome.String()
		}
		if ev.Reason == policy.Entered && ev.Reply {
			w += "-reply"
		}
		words = append(words, w)
	}
	return strings.Join(words, " ")
}

// quiet wants no event: those of a packet sent after what must not be seen come
// first, and none between.
func quiet(t *testing.T, tr *Trace) {
	t.Helper()
	select {
	case ev := <-tr.Events():
		t.Errorf("was told %s", short([]TraceEvent{ev}))
	default:
	}
}

func startTrace(t *testing.T, d *Datapath, f TraceFilter) *Trace {
	t.Helper()
	tr, err := d.Trace(f, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	})
	return tr
}

// Flows that are allowed, known, denied by either layer, redirected and handed to
// the host stack, on live traffic: each step with its rule, and nobody else's.
func TestG3Trace(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, by Outcome) {
		named := func(name string, stackOnly bool) func(*endpoint.Endpoint) {
			return func(ep *endpoint.Endpoint) {
				if ep.ContainerID = name; stackOnly {
					ep.Bandwidth = &endpoint.Bandwidth{IngressRate: 1e9, IngressBurst: 1e8}
				}
			}
		}
		a, b := startPodAs(t, d, 10, 1500, named("ep0", false)), startPodAs(t, d, 20, 1500, named("ep1", false))
		c := startPodAs(t, d, 30, 1500, named("ep2", true))
		l := livePolicy(t, d, a, b, c)
		l.apply(documents(t, `
			acl wall {egress: [{priority: 5, action: deny, protocol: udp, ports: [{port: 53}]}, {priority: 6, action: allow}]}
			sg server {ingress: [{protocol: tcp, ports: [{port: 22}]}, {protocol: udp, ports: [{port: 7}]}]}
			at wall {networkACLRef: {name: wall}, subnets: [10.9.0.10/32]}
			at server {securityGroupRefs: [{name: server}], endpoints: [{name: ep1}]}`))
		wall, server := l.number("wall"), l.number("server")
		end := map[Outcome]string{Peer: "501-peer", Redirect: "500-redirect"}[by]
		send := func(from, to *livePod, sport, dport uint16) {
			from.inject(t, from.frame(ipv4{dst: to.Address, proto: protoUDP, payload: udp(sport, dport)}))
		}
		noise := func() { send(a, b, 1, 8); send(a, c, 1, 7); send(b, a, 8, 8) }
		for _, x := range []struct {
			name string
			to   *livePod
			port uint16
			send func()
			ends int
			want string
		}{
			{
				"allowed and redirected", b, 7, func() { send(a, b, 40, 7) }, 1,
				fmt.Sprintf("100 eg:208 eg:300/%d.1 in:208 in:302/%d.1 in:302 %s", wall, server, end),
			},
			{"known", b, 7, func() { send(a, b, 40, 7) }, 1, "100 eg:209 in:209 " + end},
			{"its reply", b, 7, func() { send(b, a, 7, 40) }, 1, "100-reply eg:209 in:209 " + end},
			{"denied by the ACL", b, 53, func() { send(a, b, 40, 53) }, 1, fmt.Sprintf("100 eg:208 eg:301/%d.0 503-drop-acl", wall)},
			{"denied by the groups", b, 9, func() { send(a, b, 40, 9) }, 1, fmt.Sprintf("100 eg:208 eg:300/%d.1 in:208 in:303 503-drop-group", wall)},
			{"by the host stack", c, 9, func() { send(a, c, 40, 9) }, 2, fmt.Sprintf("100 eg:208 eg:300/%d.1 502-stack 100 in:306 504-delivered", wall)},
			{"of another's address", b, 9, func() {
				a.inject(t, a.frame(ipv4{src: c.Address, dst: b.Address, proto: protoUDP, payload: udp(40, 9)}))
			}, 1, "100 503-drop-address"},
		} {
			from := a.Address
			if x.name == "of another's address" {
				from = c.Address
			}
			tr := startTrace(t, d, TraceFilter{From: from, To: x.to.Address, Protocol: protoUDP, Port: x.port})
			noise()
			x.send()
			got := told(t, tr, x.ends)
			if short(got) != x.want {
				t.Errorf("%s:\n got %s\nwant %s", x.name, short(got), x.want)
			}
			for _, ev := range got {
				port := ev.DestinationPort
				if ev.Reply {
					port = ev.SourcePort
				}
				if port != x.port || ev.Protocol != protoUDP || ev.Bytes != 42 || ev.Began == 0 || ev.At < ev.Began || ev.Hook == "" {
					t.Errorf("%s: %+v", x.name, ev)
				}
			}
			noise()
			if err := tr.Close(); err != nil {
				t.Error(err)
			}
			for ev := range tr.Events() {
				t.Errorf("%s: was also told %s", x.name, short([]TraceEvent{ev}))
			}
		}
	})
}

// Children are told of by the same reasons; fragments by their first one's ports;
// TCP with its flags.
func TestTraceOfChildrenAndFragments(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20")
	l.apply(documents(t, "sg g {ingress: [{protocol: udp}]}\nat g {securityGroupRefs: [{name: g}], endpoints: [{name: ep0}]}"))
	self, peer := l.eps[0].Address, netip.MustParseAddr(peerAddr)
	udpTrace := startTrace(t, l.d, TraceFilter{To: self, Protocol: protoUDP, Port: 53})
	in := func(p ipv4) { p.src, p.dst = peer, self; l.pass(policy.Ingress, 0, p) }
	in(ipv4{proto: protoUDP, id: 7, frag: 0x2000, payload: udp(1, 53, make([]byte, 16)...)})
	in(ipv4{proto: protoUDP, id: 7, frag: 3, payload: make([]byte, 16)})
	in(ipv4{proto: protoUDP, id: 8, frag: 3, payload: make([]byte, 16)}) // of a datagram that nobody knows
	if got, want := short(told(t, udpTrace, 2)), "100 in:208 in:302/1.0 in:302 504-delivered 100 in:209 504-delivered"; got != want {
		t.Errorf("fragments:\n got %s\nwant %s", got, want)
	}
	quiet(t, udpTrace)
	tcpTrace := startTrace(t, l.d, TraceFilter{From: self, Protocol: protoTCP})
	l.out(peerAddr, protoTCP, tcp(5, 80, synFlag))
	in(ipv4{proto: protoTCP, payload: tcp(80, 5, synFlag|ackFlag)})
	got := told(t, tcpTrace, 2)
	if want := "100 eg:208 eg:302 502-stack 100-reply in:209 504-delivered"; short(got) != want {
		t.Errorf("TCP:\n got %s\nwant %s", short(got), want)
	}
	if got[0].TCPFlags != synFlag || got[4].TCPFlags != synFlag|ackFlag || got[0].Hook != "from_child" || got[4].Hook != "to_child" || got[1].Endpoint != self || got[4].SourcePort != 80 {
		t.Errorf("TCP: %+v", got)
	}
	l.apply(documents(t, "sg g {ingress: [{protocol: udp}], egressDefault: deny}\nat g {securityGroupRefs: [{name: g}], endpoints: [{name: ep0}]}"))
	l.out(peerAddr, protoTCP, tcp(5, 80, ackFlag))
	if got, want := short(told(t, tcpTrace, 1)), "100 eg:210 eg:303 503-drop-group"; got != want {
		t.Errorf("after a change:\n got %s\nwant %s", got, want)
	}
}

// At most 16 at once; each has its own events; a place is free again after Close.
func TestTraceSessions(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10")
	l.apply(nil)
	var all []*Trace
	for i := range MaxTraces {
		all = append(all, startTrace(t, l.d, TraceFilter{From: l.eps[0].Address, Protocol: protoUDP, Port: uint16(100 + i/2)}))
	}
	if _, err := l.d.Trace(TraceFilter{Protocol: protoUDP}, time.Hour); !errors.Is(err, ErrTraces) {
		t.Errorf("one more: %v", err)
	}
	l.out(peerAddr, protoUDP, udp(1, 103))
	for _, tr := range all[6:8] {
		if got, want := short(told(t, tr, 1)), "100 eg:306 502-stack"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	for i, tr := range all {
		quiet(t, tr)
		if i%2 == 0 {
			if err := errors.Join(tr.Close(), tr.Close()); err != nil {
				t.Error(err)
			}
		}
	}
	again := startTrace(t, l.d, TraceFilter{From: l.eps[0].Address, Protocol: protoUDP, Port: 200})
	l.out(peerAddr, protoUDP, udp(1, 200))
	told(t, again, 1)
	if lost, err := again.Lost(); lost != 0 || err != nil {
		t.Errorf("lost %d, %v", lost, err)
	}
	_, err := l.d.Trace(TraceFilter{From: netip.IPv6Loopback()}, time.Hour)
	if err == nil || !strings.Contains(err.Error(), "must be IPv4") {
		t.Errorf("IPv6: %v", err)
	}
}

// Programs cease by themselves when the time is over, whether or not the process
// that began lives: nothing is written into the buffer any more. The next process
// clears what is left.
func TestTraceEndsWithoutItsProcess(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10")
	now, err := monotonic()
	if err != nil {
		t.Fatal(err)
	}
	// What a daemon has left that was killed: no reader, and a session.
	write := func(until uint64) {
		if err := l.d.objects.TraceSessions.Put(uint32(3), traceSession{Until: until, Proto: protoUDP}); err != nil {
			t.Fatal(err)
		}
		if err := l.d.objects.TraceUntil.Put(uint32(0), until); err != nil {
			t.Fatal(err)
		}
	}
	written := func() uint64 { // packets that a session matched
		var shares []tracePacket
		if err := l.d.objects.TracePackets.Lookup(uint32(0), &shares); err != nil {
			t.Fatal(err)
		}
		latest := uint64(0)
		for _, s := range shares {
			latest = max(latest, s.Lost)
		}
		return latest
	}
	// A buffer that nobody reads fills up, and what finds no room is counted.
	write(now + uint64(time.Hour))
	for range 3000 {
		l.out(peerAddr, protoUDP, udp(1, 9))
	}
	full := written()
	if full == 0 {
		t.Fatal("9,000 events without a reader, and none is lost")
	}
	write(now - 1) // its time is over
	for range 100 {
		l.out(peerAddr, protoUDP, udp(1, 9))
	}
	if got := written(); got != full {
		t.Errorf("%d events after the end", got-full)
	}
	write(now + uint64(time.Hour))
	next := again(t, l.d)
	for range 100 {
		l.out(peerAddr, protoUDP, udp(1, 9))
	}
	if got := written(); got != full {
		t.Errorf("%d events of a session that an earlier process began", got-full)
	}
	// What it left in the buffer is not told to a later session.
	tr := startTrace(t, next, TraceFilter{From: l.eps[0].Address, Protocol: protoUDP})
	l.out(peerAddr, protoUDP, udp(1, 77))
	for _, ev := range told(t, tr, 1) {
		if ev.DestinationPort != 77 {
			t.Errorf("told of an earlier packet: %+v", ev)
		}
	}
}

// Without a session nothing is told, and a queue that nobody empties loses events
// and says how many.
func TestTraceLoses(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10")
	l.out(peerAddr, protoUDP, udp(1, 9))
	var shares []tracePacket
	if err := l.d.objects.TracePackets.Lookup(uint32(0), &shares); err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(shares, func(p tracePacket) bool { return p != tracePacket{} }) {
		t.Errorf("without a session: %+v", shares)
	}
	tr := startTrace(t, l.d, TraceFilter{From: l.eps[0].Address, Protocol: protoUDP})
	n := 0
	netlab.Eventually(t, patience, func() error {
		for range 500 {
			l.out(peerAddr, protoUDP, udp(1, 9))
			n += 3
		}
		if lost, err := tr.Lost(); err != nil || lost == 0 {
			return fmt.Errorf("of %d events none is lost: %w", n, err)
		}
		return nil
	})
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	got := 0
	for range tr.Events() {
		got++
	}
	if lost, err := tr.Lost(); err != nil || got != traceQueue || int(lost) > n-got {
		t.Errorf("%d events: %d told, %d lost, %v", n, got, lost, err)
	}
}

// A daemon that takes over from one of before there were traces makes the maps that
// are not there, and its programs use them.
func TestTraceAfterAnUpgrade(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10")
	l.apply(nil)
	for _, name := range []string{"trace_until", "trace_sessions", "trace_packets", "trace_events"} {
		if err := os.Remove(filepath.Join(MapDir(l.d.cfg.Dir), name)); err != nil {
			t.Fatal(err)
		}
	}
	l.d = again(t, l.d)
	tr := startTrace(t, l.d, TraceFilter{From: l.eps[0].Address, Protocol: protoUDP})
	l.out(peerAddr, protoUDP, udp(1, 9))
	if got, want := short(told(t, tr, 1)), "100 eg:306 502-stack"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// Linux before 6.8 rounds each frame of a call chain up to 32 bytes and allows 512
// (kernel/bpf/verifier.c: check_max_stack_depth); the kernel here may count less.
func TestStackFitsOlderKernels(t *testing.T) {
	spec, err := loadProgram()
	if err != nil {
		t.Fatal(err)
	}
	frames, calls := map[string]int{}, map[string]map[string]bool{}
	for _, p := range spec.Programs {
		at := ""
		for _, ins := range p.Instructions {
			if s := ins.Symbol(); s != "" {
				at = s
			}
			if calls[at] == nil {
				calls[at] = map[string]bool{}
			}
			if ins.IsFunctionCall() {
				calls[at][ins.Reference()] = true
			}
			reaches := 0
			switch class := ins.OpCode.Class(); {
			case class.IsStore() && ins.Dst == asm.RFP, class.IsLoad() && ins.Src == asm.RFP:
				reaches = -int(ins.Offset)
			case ins.OpCode.ALUOp() == asm.Add && ins.OpCode.Source() == asm.ImmSource && class == asm.ALU64Class && ins.Constant < 0 && ins.Constant >= -512:
				reaches = -int(ins.Constant) // of a copy of the frame pointer
			}
			frames[at] = max(frames[at], reaches)
		}
	}
	var deepest func(f string) int
	deepest = func(f string) int {
		below := 0
		for g := range calls[f] {
			below = max(below, deepest(g))
		}
		return (max(frames[f], 1)+31)/32*32 + below
	}
	for name := range spec.Programs {
		if got := deepest(name); got > 512 || got < 200 {
			t.Errorf("%s: needs %d bytes of stack in the deepest chain of calls, of 512", name, got)
		}
	}
}
