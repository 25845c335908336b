package datapath

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

// D9: a packet from one endpoint of the node to another has the same verdict by
// bpf_redirect_peer, by bpf_redirect, through the host stack, and between children,
// and it is the model's.
func TestD9PlacementNeverChangesAVerdict(t *testing.T) {
	addresses := []string{"10.9.0.10", "10.9.0.20", "10.9.0.30", "10.8.0.40"}
	labs := map[string]*policyLab{
		"peer":     newPolicyLab(t, Config{Dir: DefaultMount + "/placepeer"}, endpoint.Veth, addresses...),
		"stack":    newPolicyLab(t, Config{Dir: DefaultMount + "/placestack"}, endpoint.Veth, addresses...),
		"redirect": newPolicyLab(t, Config{Dir: DefaultMount + "/placeredirect", NoPeer: true}, endpoint.Veth, addresses...),
		"children": newPolicyLab(t, Config{Dir: DefaultMount + "/placechildren"}, endpoint.Multikernel, addresses...),
	}
	// through is what becomes of the packet on its whole way.
	through := map[string]func(from, to int, p ipv4) bool{
		"peer": func(from, _ int, p ipv4) bool { return labs["peer"].pass(policy.Egress, from, p) },
		"redirect": func(from, to int, p ipv4) bool {
			l := labs["redirect"]
			if l.run(policy.Egress, from, frame{ip: &p}, skb{}) == retDrop {
				return false
			}
			// What carries the mark has been judged.
			return l.run(policy.Ingress, to, frame{ip: &p}, skb{Mark: 0x6d6b6e74}) != retDrop
		},
		"stack": func(from, to int, p ipv4) bool {
			last := p
			last.ttl = 1 // which only the host stack can settle
			return labs["stack"].pass(policy.Egress, from, last) && labs["stack"].pass(policy.Ingress, to, p)
		},
		"children": func(from, to int, p ipv4) bool {
			return labs["children"].pass(policy.Egress, from, p) && labs["children"].pass(policy.Ingress, to, p)
		},
	}
	r := rand.New(rand.NewPCG(9, 9))
	passed, dropped := 0, 0
	for _, rules := range []int{1, 4, 12, 70} {
		objects := randomDocuments(r, rules)
		for _, l := range labs {
			l.apply(objects)
		}
		e := edgesOf(objects)
		for range 150 {
			from, to := r.IntN(4), r.IntN(4)
			p, judged := randomPolicyPacket(r, e)
			if from == to || p.proto == protoTCP && p.payload[13] != synFlag || p.proto == protoICMP && p.payload[0] != 8 {
				continue // only the first packet of a flow is redirected
			}
			l := labs["peer"]
			p.src, p.dst = l.eps[from].Address, l.eps[to].Address
			judged.Source, judged.Destination = p.src, p.dst
			want := l.world.Explain(judged).Allowed
			for name, send := range through {
				for _, l := range labs {
					l.forget()
				}
				if got := send(from, to, p); got != want {
					t.Errorf("%s, %d rules, %+v: passes %t, the model says %t", name, rules, judged, got, want)
				}
			}
			if passed++; !want {
				passed--
				dropped++
			}
		}
	}
	if passed < 20 || dropped < 20 {
		t.Errorf("%d packets passed and %d did not: too few of either", passed, dropped)
	}
}

// D9: two endpoints of a node do not live on each other's admissions, and what the
// destination refuses is counted there.
func TestD9AdmissionsAreNotShared(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Veth, "10.9.0.10", "10.9.0.20")
	l.apply(documents(t, "sg client {}\nsg closed {egressDefault: deny}\nat c {securityGroupRefs: [{name: client}], endpoints: [{name: ep0}]}\nat d {securityGroupRefs: [{name: closed}], endpoints: [{name: ep1}]}"))
	a, b := l.eps[0].Address, l.eps[1].Address
	there := ipv4{src: a, dst: b, proto: protoUDP, payload: udp(1000, 53)}
	back := ipv4{src: b, dst: a, proto: protoUDP, payload: udp(53, 1000)}
	for range 2 {
		before, err := l.d.Counters(b)
		if err != nil {
			t.Fatal(err)
		}
		if l.pass(policy.Egress, 0, there) {
			t.Error("the closed endpoint is reached")
		}
		after, err := l.d.Counters(b)
		if err != nil {
			t.Fatal(err)
		}
		if got := counted(before, after); got != "drop-group:1 " {
			t.Errorf("counted %q at the destination", got)
		}
	}
	if l.pass(policy.Egress, 1, back) {
		t.Error("the closed endpoint sends, by an admission that is not its own")
	}
	if !l.pass(policy.Ingress, 0, back) {
		t.Error("the client's own reply is dropped")
	}
	list, err := l.d.Policy().Flows()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range list {
		if (f.Hook == policy.Egress && f.Source() == b) || (f.Hook == policy.Ingress && f.Destination() == b) {
			t.Errorf("the closed endpoint has %+v", f)
		}
	}
}

// D18: what an endpoint sends to its own address is judged at both of its points.
func TestD18PolicyOfItself(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Veth, "10.9.0.10", "10.9.0.20")
	own := ipv4{src: l.eps[0].Address, dst: l.eps[0].Address, proto: protoTCP, payload: tcp(1000, 80, synFlag)}
	for docs, want := range map[string]bool{
		"": true,
		"sg g {ingress: [{from: [{securityGroupRef: {name: g}}]}]}\nat g {securityGroupRefs: [{name: g}], endpoints: [{name: ep0}]}": true,
		"sg g {}\nat g {securityGroupRefs: [{name: g}], endpoints: [{name: ep0}]}":                                                   false,
	} {
		l.apply(documents(t, docs))
		l.forget()
		if !l.pass(policy.Egress, 0, own) {
			t.Errorf("%q: does not leave", docs)
		}
		if got := l.pass(policy.Ingress, 0, own); got != want {
			t.Errorf("%q: comes back %t, want %t", docs, got, want)
		}
	}
}

// D17: what the node itself sends passes where the switch says so, with its
// replies, and nothing else does.
func TestD17Probes(t *testing.T) {
	for _, on := range []bool{false, true} {
		l := newPolicyLab(t, Config{Dir: fmt.Sprint(DefaultMount, "/probes", on)}, endpoint.Veth, "10.9.0.10", "10.9.0.20")
		l.probes = on
		closed := documents(t, "sg g {egressDefault: deny}\nat g {securityGroupRefs: [{name: g}], endpoints: [{name: ep0}]}")
		l.apply(closed)
		probe := func(in skb) bool {
			p := ipv4{src: gatewayAddr, dst: l.eps[0].Address, proto: protoTCP, payload: tcp(1000, 80, synFlag)}
			return l.run(policy.Ingress, 0, frame{ip: &p}, in) != retDrop
		}
		reply := ipv4{src: l.eps[0].Address, dst: gatewayAddr, proto: protoTCP, payload: tcp(80, 1000, synFlag|ackFlag)}
		if got := probe(skb{}); got != on {
			t.Errorf("switch %t: a probe passes %t", on, got)
		}
		if got := l.pass(policy.Egress, 0, reply); got != on {
			t.Errorf("switch %t: its reply passes %t", on, got)
		}
		l.apply(append(closed, documents(t, "acl a {}\nat a {networkACLRef: {name: a}, pools: [all]}")...))
		if got := l.pass(policy.Egress, 0, reply); got != on {
			t.Errorf("switch %t: after a change, the reply passes %t", on, got)
		}
		l.forget()
		if l.pass(policy.Egress, 0, ipv4{src: l.eps[0].Address, dst: netip.MustParseAddr(peerAddr), proto: protoUDP, payload: udp(1, 2)}) {
			t.Errorf("switch %t: the endpoint sends", on)
		}
	}
}
