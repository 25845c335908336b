package datapath

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

// Random rules and packets: the programs and the model must agree on each. Rule
// counts go from 1 to the limit; tuples lie on and beside the edges of rules. One
// endpoint only sends and the other only receives, so that no packet is the reply
// of another; an admitted tuple that comes again has the same verdict.
//
// MKNET_POLICY_FUZZ=1000000 sets the number of packets.
func TestPolicyDifferential(t *testing.T) {
	const perSet = 3000
	total := longRun(t, 75_000)
	l := newPolicyLab(t, Config{Flows: 65536}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20", "10.9.0.30", "10.9.0.40")
	r := rand.New(rand.NewPCG(1, uint64(total)))
	begin, denied, done := time.Now(), 0, 0
	for n := 0; done < total; n++ {
		rules := []int{1, 16, 64, 65, 256, 257, 1024}[n%7]
		objects := randomDocuments(r, rules)
		l.apply(objects)
		edges := edgesOf(objects)
		want := map[policy.Reason]uint64{}
		before := l.reasons(nil)
		for range min(perSet, total-done) {
			d := policy.Directions[r.IntN(2)]
			self := int(d) - 1
			p, judged := randomPolicyPacket(r, edges)
			if d == policy.Egress {
				p.src, judged.Source = l.eps[self].Address, l.eps[self].Address
			} else {
				p.dst, judged.Destination = l.eps[self].Address, l.eps[self].Address
			}
			model := l.world.Judge(d, l.eps[self].Address, judged)
			if got := l.pass(d, self, p); got != model.Allowed {
				t.Fatalf("set %d (%d rules), %s %+v: programs say %t, the model %+v", n, rules, d, judged, got, model)
			}
			if !model.Allowed {
				denied++
				want[model.Steps[len(model.Steps)-1].Reason]++
			}
			done++
		}
		got := l.reasons(before)
		for _, reason := range []policy.Reason{policy.ACLDrop, policy.GroupDrop, policy.NoSlot, policy.NoTable} {
			if got[reason] != want[reason] {
				t.Errorf("set %d: %d packets were dropped by %q, the model drops %d", n, got[reason], reason, want[reason])
			}
		}
	}
	t.Logf("%d verdicts (%d denied) in %s", done, denied, time.Since(begin).Round(time.Millisecond))
}

// randomDocuments has an ACL and three groups with up to n rules a direction.
// Values come from few, so that rules overlap, shadow and touch each other.
func randomDocuments(r *rand.Rand, n int) []policy.Object {
	header := func(k policy.Kind, name string) policy.Header {
		return policy.Header{APIVersion: policy.APIVersion, Kind: k, Metadata: policy.Metadata{Name: name}}
	}
	acl := &policy.NetworkACL{Header: header(policy.KindNetworkACL, "acl")}
	aclRules := func() (out []policy.ACLRule) {
		for i := range n {
			rule := policy.ACLRule{Priority: uint16((i+1)*61%65535 + 1), Action: policy.Allow, Protocol: randomProtocol(r)}
			if r.IntN(2) == 0 {
				rule.Action = policy.Deny
			}
			if r.IntN(8) > 0 {
				rule.CIDR = randomPrefix(r, n)
			}
			rule.Ports = randomPorts(r, rule.Protocol)
			out = append(out, rule)
		}
		return out
	}
	acl.Spec.Ingress, acl.Spec.Egress = aclRules(), aclRules()
	objects := []policy.Object{acl}
	names := []string{"web", "db", "ops"}
	for _, name := range names {
		g := &policy.SecurityGroup{Header: header(policy.KindSecurityGroup, name)}
		peers := func() (out []policy.Peer) {
			for range 1 + r.IntN(3) {
				if r.IntN(2) == 0 {
					out = append(out, policy.Peer{Group: &policy.Ref{Name: names[r.IntN(3)]}})
				} else {
					out = append(out, policy.Peer{CIDR: randomPrefix(r, n)})
				}
			}
			return out
		}
		for range 1 + r.IntN(n) {
			p := randomProtocol(r)
			g.Spec.Ingress = append(g.Spec.Ingress, policy.GroupIngress{From: peers(), Protocol: p, Ports: randomPorts(r, p)})
		}
		for range r.IntN(n + 1) {
			p := randomProtocol(r)
			g.Spec.Egress = append(g.Spec.Egress, policy.GroupEgress{To: peers(), Protocol: p, Ports: randomPorts(r, p)})
		}
		objects = append(objects, g)
	}
	at := &policy.Attachment{Header: header(policy.KindAttachment, "acl"), Spec: policy.AttachmentSpec{NetworkACL: &policy.Ref{Name: "acl"}, Pools: []string{"all"}}}
	if r.IntN(3) == 0 {
		at.Spec.Pools, at.Spec.Subnets = nil, []netip.Prefix{netip.MustParsePrefix("10.9.0.10/32")}
	}
	objects = append(objects, at)
	for i, name := range names {
		for _, ep := range r.Perm(4)[:r.IntN(4)] {
			objects = append(objects, &policy.Attachment{Header: header(policy.KindAttachment, fmt.Sprint(name, ep)), Spec: policy.AttachmentSpec{
				SecurityGroups: []policy.Ref{{Name: names[i]}}, Endpoints: []policy.Selector{{Name: fmt.Sprint("ep", ep)}},
			}})
		}
	}
	return objects
}

func randomProtocol(r *rand.Rand) policy.Protocol {
	return []policy.Protocol{policy.AnyProtocol, 0, 1, policy.TCP, policy.TCP, policy.UDP, policy.UDP, policy.SCTP, 47, 255}[r.IntN(10)]
}

func randomPrefix(r *rand.Rand, n int) netip.Prefix {
	bits := []int{0, 1, 8, 16, 24, 28, 30, 31, 32, 32, 32, 32}
	if n > 256 { // the number of distinct boundaries is limited
		bits = bits[4:]
	}
	p, _ := randomPeer(r).Prefix(bits[r.IntN(len(bits))])
	return p
}

func randomPeer(r *rand.Rand) netip.Addr {
	switch r.IntN(8) {
	case 0:
		return netip.AddrFrom4([][4]byte{{0, 0, 0, 0}, {255, 255, 255, 255}, {127, 255, 255, 255}, {128, 0, 0, 0}, {0, 0, 0, 1}}[r.IntN(5)])
	case 1, 2:
		return netip.AddrFrom4([4]byte{10, 9, 0, byte(10 * (1 + r.IntN(4)))}) // an endpoint
	}
	return netip.AddrFrom4([4]byte{10, 9, byte(r.IntN(2)), byte(r.IntN(256))})
}

func randomPorts(r *rand.Rand, p policy.Protocol) (out []policy.PortRange) {
	if !p.HasPorts() {
		return nil
	}
	at := 1
	for range r.IntN(4) { // in order and apart: documents may not overlap them
		at += 1 + r.IntN(40)*500
		to := min(at+r.IntN(3)*r.IntN(2000), 65535)
		if at > 65535 {
			break
		}
		out = append(out, policy.PortRange{From: uint16(at), To: uint16(to)})
		at = to + 1
	}
	return out
}

// edges are values of packets on which rules begin, end, or just do not.
type edges struct {
	addrs []netip.Addr
	ports []uint16
}

func edgesOf(objects []policy.Object) (out edges) {
	for _, o := range objects {
		rules, ok := o.(interface {
			Rules(policy.Direction) policy.Rules
		})
		if !ok {
			continue
		}
		for _, d := range policy.Directions {
			for _, rule := range rules.Rules(d).List {
				for _, c := range rule.CIDRs {
					first := c.Addr().As4()
					last := first
					for i := c.Bits(); i < 32; i++ {
						last[i/8] |= 0x80 >> (i % 8)
					}
					a, b := netip.AddrFrom4(first), netip.AddrFrom4(last)
					for _, x := range []netip.Addr{a, b, a.Prev(), b.Next()} {
						if x.IsValid() {
							out.addrs = append(out.addrs, x)
						}
					}
				}
				for _, p := range rule.Ports {
					out.ports = append(out.ports, p.From, p.To, p.From-1, p.To+1)
				}
			}
		}
	}
	return out
}

func randomPolicyPacket(r *rand.Rand, e edges) (ipv4, policy.Packet) {
	peer := randomPeer(r)
	if r.IntN(2) == 0 && len(e.addrs) > 0 {
		peer = e.addrs[r.IntN(len(e.addrs))]
	}
	proto := uint8(r.IntN(256))
	if p := randomProtocol(r); p != policy.AnyProtocol {
		proto = uint8(p)
	}
	port := uint16(r.IntN(65536))
	if r.IntN(3) > 0 && len(e.ports) > 0 {
		port = e.ports[r.IntN(len(e.ports))]
	}
	p := ipv4{src: peer, dst: peer, proto: proto}
	judged := policy.Packet{Source: peer, Destination: peer, Protocol: proto}
	sport := uint16(r.IntN(65536))
	switch proto {
	case protoTCP:
		p.payload = tcp(sport, port, []uint8{synFlag, ackFlag, synFlag | ackFlag}[r.IntN(3)])
	case protoUDP:
		p.payload = udp(sport, port)
	case protoSCTP:
		p.payload = sctp(sport, port)
	case protoICMP:
		p.payload = icmp([]uint8{0, 8, 13, 99}[r.IntN(4)], 0, r.Uint32())
	default:
		p.payload = make([]byte, r.IntN(12))
	}
	if policy.Protocol(proto).HasPorts() {
		judged.DestinationPort = port
	}
	return p, judged
}
