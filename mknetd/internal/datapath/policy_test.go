package datapath

import (
	"net/netip"
	"testing"

	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

// The table of spec/policy.md, "What they mean": what the programs say is what the
// table says, and what the model says.
func TestPolicySemantics(t *testing.T) {
	l := newPolicyLab(t, Config{}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20", "10.8.0.30")
	acl := func(spec string) string {
		return "acl a " + spec + "\nat acl {networkACLRef: {name: a}, pools: [all]}\n"
	}
	sg := func(spec string) string {
		return "sg g " + spec + "\nat g {securityGroupRefs: [{name: g}], endpoints: [{name: ep0}]}\n"
	}
	tcp80, tcp81, udp80 := tcp(5, 80, synFlag), tcp(5, 81, synFlag), udp(5, 80)
	type packet struct {
		peer    string
		proto   uint8
		payload []byte
		in, out bool // wanted
	}
	both := func(peer string, proto uint8, payload []byte, want bool) packet {
		return packet{peer, proto, payload, want, want}
	}
	for _, c := range []struct {
		name    string
		docs    string
		packets []packet
	}{
		{"none attached", "acl a {ingress: [{priority: 1, action: deny}]}", []packet{both("1.2.3.4", protoTCP, tcp80, true), both("1.2.3.4", 0, nil, true)}},
		{"ACL without rules", acl("{}"), []packet{both("1.2.3.4", protoTCP, tcp80, true)}},
		{"ACL with empty lists", acl("{ingress: [], egress: []}"), []packet{both("1.2.3.4", protoTCP, tcp80, true)}},
		{"ACL of ingress only", acl("{ingress: [{priority: 9, action: allow, protocol: tcp}]}"), []packet{{"1.2.3.4", protoTCP, tcp80, true, true}, {"1.2.3.4", protoUDP, udp80, false, true}}},
		{"ACL of egress only", acl("{egress: [{priority: 9, action: allow, protocol: udp}]}"), []packet{{"1.2.3.4", protoTCP, tcp80, true, false}, {"1.2.3.4", protoUDP, udp80, true, true}}},
		{"lowest priority decides", acl("{ingress: [{priority: 20, action: allow}, {priority: 10, action: deny, cidr: 1.2.3.0/24}, {priority: 5, action: allow, cidr: 1.2.3.4/32}]}"), []packet{
			{"1.2.3.4", protoTCP, tcp80, true, true}, {"1.2.3.5", protoTCP, tcp80, false, true}, {"1.2.4.0", protoTCP, tcp80, true, true},
		}},
		{"group without rules", sg("{}"), []packet{{"1.2.3.4", protoTCP, tcp80, false, true}, {"1.2.3.4", protoGRE, []byte{0, 0, 8, 0}, false, true}}},
		{"egressDefault", sg("{egressDefault: deny}"), []packet{both("1.2.3.4", protoTCP, tcp80, false)}},
		{"group with egress rule", sg("{egress: [{to: [{cidr: 1.2.3.4/32}], protocol: tcp, ports: [{port: 80}]}]}"), []packet{
			{"1.2.3.4", protoTCP, tcp80, false, true}, {"1.2.3.4", protoTCP, tcp81, false, false}, {"1.2.3.5", protoTCP, tcp80, false, false}, {"1.2.3.4", protoUDP, udp80, false, false},
		}},
		{"every peer", sg("{ingress: [{}]}"), []packet{both("1.2.3.4", protoTCP, tcp80, true), both("10.9.0.20", protoSCTP, sctp(1, 2), true)}},
		{"port list and range", sg("{ingress: [{protocol: tcp, ports: [{port: 1}, {portRange: {from: 80, to: 82}}, {port: 65535}]}], egressDefault: deny}"), []packet{
			{"1.2.3.4", protoTCP, tcp(5, 1, synFlag), true, false},
			{"1.2.3.4", protoTCP, tcp(5, 2, synFlag), false, false},
			{"1.2.3.4", protoTCP, tcp(5, 79, synFlag), false, false},
			{"1.2.3.4", protoTCP, tcp(5, 82, synFlag), true, false},
			{"1.2.3.4", protoTCP, tcp(5, 83, synFlag), false, false},
			{"1.2.3.4", protoTCP, tcp(5, 65535, synFlag), true, false},
			{"1.2.3.4", protoTCP, tcp(5, 0, synFlag), false, false},
			{"1.2.3.4", protoUDP, udp(5, 80), false, false},
		}},
		{"a rule with ports never matches what has none", acl("{ingress: [{priority: 1, action: allow, protocol: tcp, ports: [{portRange: {from: 1, to: 65535}}]}, {priority: 2, action: allow, protocol: udp, ports: [{port: 7}]}]}"), []packet{
			{"1.2.3.4", protoICMP, icmp(8, 0, 7<<16), false, true},
			{"1.2.3.4", protoTCP, tcp(5, 0, synFlag), false, true},
			{"1.2.3.4", protoTCP, tcp(5, 9, synFlag), true, true},
			{"1.2.3.4", protoUDP, udp(5, 7), true, true},
			{"1.2.3.4", protoGRE, []byte{0, 7, 0, 7}, false, true},
		}},
		{"protocol 0 is no wildcard", acl("{ingress: [{priority: 1, action: allow, protocol: 0}]}"), []packet{{"1.2.3.4", 0, []byte{1}, true, true}, {"1.2.3.4", protoTCP, tcp80, false, true}, {"1.2.3.4", 255, nil, false, true}}},
		{"all is every protocol", acl("{ingress: [{priority: 1, action: deny, protocol: 255}, {priority: 2, action: allow, protocol: all}]}"), []packet{{"1.2.3.4", 0, nil, true, true}, {"1.2.3.4", 254, nil, true, true}, {"1.2.3.4", 255, nil, false, true}}},
		{"D19 GRE, ESP and SCTP are judged", acl("{ingress: [{priority: 1, action: deny, protocol: gre}, {priority: 2, action: deny, protocol: esp}, {priority: 3, action: deny, protocol: sctp, ports: [{port: 9}]}, {priority: 4, action: allow}]}"), []packet{
			{"1.2.3.4", protoGRE, []byte{0, 0, 8, 0}, false, true}, {"1.2.3.4", protoESP, make([]byte, 8), false, true}, {"1.2.3.4", protoSCTP, sctp(1, 9), false, true}, {"1.2.3.4", protoSCTP, sctp(1, 8), true, true}, {"1.2.3.4", protoICMP, icmp(8, 0, 1), true, true},
		}},
		{"a group as peer", sg("{ingress: [{from: [{securityGroupRef: {name: h}}]}], egress: [{to: [{securityGroupRef: {name: h}}]}]}") + "sg h {}\nat h {securityGroupRefs: [{name: h}], endpoints: [{name: ep1}]}", []packet{
			both("10.9.0.20", protoTCP, tcp80, true), both("10.8.0.30", protoTCP, tcp80, false), both("1.2.3.4", protoTCP, tcp80, false),
		}},
		{"itself as peer", sg("{ingress: [{from: [{securityGroupRef: {name: g}}]}]}") + "at more {securityGroupRefs: [{name: g}], endpoints: [{name: ep2}]}", []packet{
			{"10.8.0.30", protoTCP, tcp80, true, true}, {"10.9.0.20", protoTCP, tcp80, false, true}, {"10.9.0.10", protoTCP, tcp80, true, true},
		}},
		{"the ACL comes first", acl("{ingress: [{priority: 1, action: deny, cidr: 1.2.3.4/32}, {priority: 2, action: allow}]}") + sg("{ingress: [{from: [{cidr: 1.2.3.0/24}]}]}"), []packet{
			{"1.2.3.4", protoTCP, tcp80, false, true}, {"1.2.3.5", protoTCP, tcp80, true, true}, {"1.2.4.5", protoTCP, tcp80, false, true},
		}},
		{"any of two groups", sg("{ingress: [{from: [{cidr: 1.2.3.4/32}]}]}") + "sg h {ingress: [{from: [{cidr: 1.2.3.5/32}]}], egressDefault: deny}\nat h {securityGroupRefs: [{name: h}], endpoints: [{name: 'ep*'}]}", []packet{
			{"1.2.3.4", protoTCP, tcp80, true, false}, {"1.2.3.5", protoTCP, tcp80, true, false}, {"1.2.3.6", protoTCP, tcp80, false, false},
		}},
		{"ACL outside of its subnet", "acl a {ingress: [{priority: 1, action: deny}]}\nat acl {networkACLRef: {name: a}, subnets: [10.9.0.20/32]}", []packet{both("1.2.3.4", protoTCP, tcp80, true)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l.t = t
			l.apply(documents(t, c.docs))
			for _, p := range c.packets {
				for _, d := range policy.Directions {
					l.forget()
					got, want, judged := l.in(p.peer, p.proto, p.payload), p.in, policy.Packet{Source: netip.MustParseAddr(p.peer), Destination: l.eps[0].Address, Protocol: p.proto}
					if d == policy.Egress {
						l.forget()
						got, want = l.out(p.peer, p.proto, p.payload), p.out
						judged.Source, judged.Destination = judged.Destination, judged.Source
					}
					if policy.Protocol(p.proto).HasPorts() {
						judged.DestinationPort = uint16(p.payload[2])<<8 | uint16(p.payload[3])
					}
					if model := l.world.Judge(d, l.eps[0].Address, judged); got != want || model.Allowed != want {
						t.Errorf("%s, peer %s, protocol %d, %x: programs say %t, the model %t, want %t", d, p.peer, p.proto, p.payload, got, model.Allowed, want)
					}
				}
			}
		})
	}
}
