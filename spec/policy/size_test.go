package policy_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"mknet/spec/policy"
)

func TestLimits(t *testing.T) {
	acl := func(n int, rule func(i int) policy.ACLRule) policy.Rules {
		a := &policy.NetworkACL{}
		for i := range n {
			r := rule(i)
			r.Priority, r.Action = uint16(i+1), policy.Allow
			a.Spec.Ingress = append(a.Spec.Ingress, r)
		}
		return a.Rules(policy.Ingress)
	}
	host := func(i int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 14), byte(i >> 6), byte(i<<2) | 1}), 32)
	}
	port := func(i int) []policy.PortRange {
		return []policy.PortRange{{From: uint16(2*i + 1), To: uint16(2*i + 1)}}
	}
	group := func(n int) policy.Rules {
		g := &policy.SecurityGroup{}
		for i := range n {
			g.Spec.Ingress = append(g.Spec.Ingress, policy.GroupIngress{Protocol: policy.AnyProtocol, From: []policy.Peer{{Group: &policy.Ref{Name: fmt.Sprint("g", i)}}}})
		}
		return g.Rules(policy.Ingress)
	}
	for _, c := range []struct {
		name  string
		rules policy.Rules
		size  policy.Size
		over  string // a part of the only line; empty: it fits
	}{
		{"1024 rules, each with a peer and a port of its own", acl(1024, func(i int) policy.ACLRule {
			return policy.ACLRule{CIDR: host(i), Protocol: policy.TCP, Ports: port(i)}
		}), policy.Size{Rules: 1024, AddressBounds: 2049, AddressSets: 1025, PortBounds: 2049, PortSets: 1025}, ""},
		{
			"equal rules", acl(1024, func(int) policy.ACLRule { return policy.ACLRule{Protocol: policy.AnyProtocol} }),
			policy.Size{Rules: 1024, AddressBounds: 1, AddressSets: 1, PortBounds: 2, PortSets: 2},
			"",
		},
		{
			"1025 rules", acl(1025, func(int) policy.ACLRule { return policy.ACLRule{Protocol: policy.UDP} }),
			policy.Size{Rules: 1025, AddressBounds: 1, PortBounds: 3},
			"has 1025 rules, at most 1024 fit",
		},
		{"many ports", acl(3, func(i int) policy.ACLRule {
			r := policy.ACLRule{Protocol: policy.TCP}
			for j := range 1000 {
				r.Ports = append(r.Ports, port(1000*i+j)...)
			}
			return r
		}), policy.Size{Rules: 3, AddressBounds: 1, PortBounds: 6001}, "has 6001 port boundaries, at most 4096 fit"},
		{"256 references", group(256), policy.Size{Rules: 256, AddressBounds: 1, AddressSets: 1, PortBounds: 2, PortSets: 2, References: 256}, ""},
		{"257 references", group(257), policy.Size{Rules: 257, AddressBounds: 1, PortBounds: 2, References: 257}, "has 257 referenced security groups, at most 256 fit"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := c.rules.Size()
			if got != c.size {
				t.Errorf("size: got %+v, want %+v", got, c.size)
			}
			if over := strings.Join(got.Over(), "; "); over != c.over {
				t.Errorf("over: got %q, want %q", over, c.over)
			}
		})
	}
}

// 2,047 distinct CIDRs always fit, however they nest.
func TestNestedCIDRs(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		g := &policy.SecurityGroup{}
		g.Spec.Ingress = make([]policy.GroupIngress, 1024)
		for i := range 2047 {
			var b [4]byte
			b[0], b[1], b[2], b[3] = byte(r.Uint32()), byte(r.Uint32()&3), byte(r.Uint32()&3), byte(r.Uint32())
			p, err := netip.AddrFrom4(b).Prefix(r.IntN(33))
			if err != nil {
				t.Fatal(err)
			}
			rule := &g.Spec.Ingress[i%1024]
			rule.Protocol = policy.AnyProtocol
			rule.From = append(rule.From, policy.Peer{CIDR: p})
		}
		rules := g.Rules(policy.Ingress)
		if over := rules.Size().Over(); len(over) > 0 {
			t.Fatalf("got %q", over)
		}
	}
}

// The intervals say the same as the rules one by one.
func TestIntervals(t *testing.T) {
	set := mustSet(t, `
apiVersion: mknet/v1
kind: NetworkACL
metadata: {name: a}
spec:
  ingress:
  - {priority: 1, action: deny, cidr: 10.1.2.3/32, protocol: tcp, ports: [{port: 1}, {portRange: {from: 65534, to: 65535}}]}
  - {priority: 2, action: deny, cidr: 10.0.0.0/8, protocol: 0}
  - {priority: 3, action: deny, cidr: 255.255.255.255/32, protocol: 255}
  - {priority: 4, action: allow, cidr: 0.0.0.0/1, protocol: udp, ports: [{portRange: {from: 5, to: 90}}, {portRange: {from: 50, to: 100}}]}
  - {priority: 5, action: allow}
`)
	rules := set.NetworkACL("a").Rules(policy.Ingress)
	addresses, ports := rules.Addresses(), rules.Ports()
	has := func(iv policy.Intervals, n uint32, rule int) bool {
		i, found := slices.BinarySearch(iv.Starts, n)
		if !found {
			i--
		}
		return iv.Sets[iv.Set[i]][rule/64]>>(rule%64)&1 == 1
	}
	for _, addr := range []string{"0.0.0.0", "10.1.2.2", "10.1.2.3", "10.1.2.4", "9.255.255.255", "11.0.0.0", "127.255.255.255", "128.0.0.0", "255.255.255.254", "255.255.255.255"} {
		a := netip.MustParseAddr(addr)
		b := a.As4()
		number := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
		for _, proto := range []uint8{0, 1, 5, 6, 7, 17, 255} {
			for _, port := range []uint16{0, 1, 2, 4, 5, 49, 50, 90, 91, 100, 101, 65533, 65534, 65535} {
				for i := range rules.List {
					one := policy.Rules{List: rules.List[i : i+1]}
					want := one.Match(a, proto, port, nil) == 0
					if got := has(addresses, number, i) && has(ports, policy.PortKey(proto, port), i); got != want {
						t.Errorf("rule %d, peer %s, protocol %d, port %d: got %t, want %t", i, a, proto, port, got, want)
					}
				}
			}
		}
	}
}

// D12: a document with as many rules as fit is taken, and one more is refused whole,
// with the direction, the count and the limit.
func TestD12LimitPlusOneIsRefused(t *testing.T) {
	document := func(rules int) []byte {
		return []byte("apiVersion: mknet/v1\nkind: SecurityGroup\nmetadata: {name: big}\nspec: {egress: [{}], ingress: [" +
			strings.Repeat("{protocol: tcp}, ", rules) + "]}\n")
	}
	if objects, err := policy.Parse(document(policy.MaxRules)); err != nil || len(objects) != 1 {
		t.Errorf("%d rules: %d documents, %v", policy.MaxRules, len(objects), err)
	}
	objects, err := policy.Parse(document(policy.MaxRules + 1))
	if objects != nil || err == nil || !strings.Contains(err.Error(), "spec.ingress") || !strings.Contains(err.Error(), "has 1025 rules, at most 1024 fit") {
		t.Errorf("%d rules: %d documents, %v", policy.MaxRules+1, len(objects), err)
	}
}
