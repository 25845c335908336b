package policy_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"mknet/spec/policy"
)

var (
	self  = netip.MustParseAddr("10.0.0.1") // what is judged
	pod   = netip.MustParseAddr("10.0.0.2") // an endpoint that holds "peer"
	other = netip.MustParseAddr("10.0.0.3") // an endpoint without any policy
	far   = netip.MustParseAddr("8.8.8.8")  // no endpoint
	pools = policy.Pools{"pods": netip.MustParsePrefix("10.0.0.0/24")}
)

func testWorld(t *testing.T, documents string) *policy.World {
	t.Helper()
	set := mustSet(t, documents)
	if err := set.UnknownPools(pools); err != nil {
		t.Fatal(err)
	}
	return policy.NewWorld(set, pools,
		policy.Endpoint{Address: self, Network: "net", Namespace: "default", Name: "self"},
		policy.Endpoint{Address: pod, Network: "net", Namespace: "default", Name: "peer"},
		policy.Endpoint{Address: other, Network: "other", Name: "f00d"})
}

// withACL attaches a NetworkACL to self alone, withGroups SecurityGroups: "g"
// with the given spec and what else is in it.
func withACL(spec string) string {
	return acl + indent(spec) + "\n---\n" + attachment + "  networkACLRef: {name: a}\n  subnets: [10.0.0.1/32]\n"
}

func withGroups(spec string, more ...string) string {
	names := "[{name: g}"
	docs := group + indent(spec) + "\n"
	for i, m := range more {
		names += fmt.Sprintf(", {name: g%d}", i)
		docs += fmt.Sprintf("---\napiVersion: mknet/v1\nkind: SecurityGroup\nmetadata: {name: g%d}\nspec:\n%s\n", i, indent(m))
	}
	return docs + "---\n" + attachment + "  securityGroupRefs: " + names + "]\n  endpoints: [{name: self}]\n" +
		"---\napiVersion: mknet/v1\nkind: SecurityGroup\nmetadata: {name: peer}\nspec: {}\n" +
		"---\napiVersion: mknet/v1\nkind: Attachment\nmetadata: {name: peer}\nspec:\n  securityGroupRefs: [{name: peer}]\n  endpoints: [{network: net, namespace: default, name: pe*}]\n"
}

func indent(spec string) string { return "  " + strings.ReplaceAll(spec, "\n", "\n  ") }

const (
	in  = policy.Ingress
	out = policy.Egress
)

// TestSemantics is the table of spec/policy.md, line by line.
func TestSemantics(t *testing.T) {
	tcp := func(port uint16) policy.Packet { return policy.Packet{Protocol: 6, DestinationPort: port} }
	proto := func(n uint8) policy.Packet { return policy.Packet{Protocol: n} }
	for _, c := range []struct {
		name, docs string
		d          policy.Direction
		peer       netip.Addr
		packet     policy.Packet // without addresses
		want       policy.Reason // of the last step
		rule       string        // of the last step
	}{
		{"none attached, in", acl + "  {}\n", in, far, tcp(80), policy.NotEnforced, ""},
		{"none attached, out", acl + "  {}\n", out, far, tcp(80), policy.NotEnforced, ""},

		{"acl without rules, in", withACL("{}"), in, far, tcp(80), policy.ACLPass, ""},
		{"acl without rules, out", withACL("{}"), out, far, tcp(80), policy.ACLPass, ""},
		{"acl with an empty list", withACL("ingress: []"), in, far, tcp(80), policy.ACLPass, ""},
		{"acl with rules out, in", withACL("egress: [{priority: 1, action: deny}]"), in, far, tcp(80), policy.ACLPass, ""},
		{"acl, no match, in", withACL("ingress: [{priority: 1, action: allow, cidr: 10.0.0.0/8}]"), in, far, tcp(80), policy.ACLDrop, ""},
		{"acl, no match, out", withACL("egress: [{priority: 1, action: allow, cidr: 10.0.0.0/8}]"), out, far, tcp(80), policy.ACLDrop, ""},
		{"acl, match, in", withACL("ingress: [{priority: 1, action: allow, cidr: 8.0.0.0/8}]"), in, far, tcp(80), policy.ACLPass, "spec.ingress[0]"},
		{"acl, match, out", withACL("egress: [{priority: 1, action: allow, cidr: 8.0.0.0/8}]"), out, far, tcp(80), policy.ACLPass, "spec.egress[0]"},
		{"acl, deny all", withACL("egress: [{priority: 9, action: deny}]"), out, far, proto(0), policy.ACLDrop, "spec.egress[0]"},
		{"acl, priority and not order", withACL("ingress: [{priority: 20, action: deny}, {priority: 10, action: allow, protocol: tcp}]"), in, far, tcp(1), policy.ACLPass, "spec.ingress[1]"},
		{"acl, the lower number decides", withACL("ingress: [{priority: 20, action: allow}, {priority: 10, action: deny, protocol: tcp}]"), in, far, tcp(1), policy.ACLDrop, "spec.ingress[1]"},

		{"group without rules, in", withGroups("{}"), in, far, tcp(80), policy.GroupDrop, ""},
		{"group without rules, out", withGroups("{}"), out, far, tcp(80), policy.GroupPass, ""},
		{"group with empty lists, in", withGroups("ingress: []\negress: []"), in, far, tcp(80), policy.GroupDrop, ""},
		{"group with empty lists, out", withGroups("ingress: []\negress: []"), out, far, tcp(80), policy.GroupPass, ""},
		{"group, egressDefault deny", withGroups("egressDefault: deny"), out, far, tcp(80), policy.GroupDrop, ""},
		{"group, egressDefault allow", withGroups("egressDefault: allow"), out, far, tcp(80), policy.GroupPass, ""},
		{"group, egressDefault allow, rules", withGroups("egressDefault: allow\negress: [{protocol: udp}]"), out, far, tcp(80), policy.GroupDrop, ""},
		{"group, no match, in", withGroups("ingress: [{protocol: udp}]"), in, far, tcp(80), policy.GroupDrop, ""},
		{"group, no match, out", withGroups("egress: [{protocol: udp}]"), out, far, tcp(80), policy.GroupDrop, ""},
		{"group, match, in", withGroups("ingress: [{protocol: udp}, {protocol: tcp}]"), in, far, tcp(80), policy.GroupPass, "spec.ingress[1]"},
		{"group, match, out", withGroups("egress: [{protocol: tcp}]"), out, far, tcp(80), policy.GroupPass, "spec.egress[0]"},
		{"two groups, the second allows", withGroups("egress: [{protocol: udp}]", "egress: [{protocol: tcp}]"), out, far, tcp(80), policy.GroupPass, "spec.egress[0]"},
		{"two groups, one restricts by a rule", withGroups("egress: [{protocol: udp}]", "{}"), out, far, tcp(80), policy.GroupDrop, ""},
		{"two groups, one restricts by its default", withGroups("{}", "egressDefault: deny"), out, far, tcp(80), policy.GroupDrop, ""},
		{"two groups, none restricts", withGroups("{}", "ingress: [{protocol: tcp}]"), out, far, tcp(80), policy.GroupPass, ""},

		{"acl denies what the group allows", withACL("ingress: [{priority: 1, action: deny}]") + "---\n" + strings.ReplaceAll(withGroups("ingress: [{}]"), "{name: t}", "{name: t2}"), in, far, tcp(80), policy.ACLDrop, "spec.ingress[0]"},
		{"group denies what the acl allows", withACL("ingress: [{priority: 1, action: allow}]") + "---\n" + strings.ReplaceAll(withGroups("{}"), "{name: t}", "{name: t2}"), in, far, tcp(80), policy.GroupDrop, ""},

		{"protocol 0 is no wildcard", withGroups("ingress: [{protocol: 0}]"), in, far, tcp(80), policy.GroupDrop, ""},
		{"protocol 0", withGroups("ingress: [{protocol: 0}]"), in, far, proto(0), policy.GroupPass, "spec.ingress[0]"},
		{"protocol 255", withGroups("ingress: [{protocol: 255}]"), in, far, proto(255), policy.GroupPass, "spec.ingress[0]"},
		{"protocol by number", withGroups("ingress: [{protocol: 6, ports: [{port: 80}]}]"), in, far, tcp(80), policy.GroupPass, "spec.ingress[0]"},
		{"all, protocol 0", withGroups("ingress: [{protocol: all}]"), in, far, proto(0), policy.GroupPass, "spec.ingress[0]"},
		{"all, gre", withGroups("ingress: [{}]"), in, far, proto(47), policy.GroupPass, "spec.ingress[0]"},
		{"gre by name", withGroups("ingress: [{protocol: gre}]"), in, far, proto(47), policy.GroupPass, "spec.ingress[0]"},
		{"esp is not gre", withGroups("ingress: [{protocol: gre}]"), in, far, proto(50), policy.GroupDrop, ""},

		{"port in a list", withGroups("ingress: [{protocol: tcp, ports: [{port: 80}, {port: 443}]}]"), in, far, tcp(443), policy.GroupPass, "spec.ingress[0]"},
		{"port between", withGroups("ingress: [{protocol: tcp, ports: [{port: 80}, {port: 443}]}]"), in, far, tcp(81), policy.GroupDrop, ""},
		{"range, first", withGroups("ingress: [{protocol: tcp, ports: [{portRange: {from: 8, to: 9}}]}]"), in, far, tcp(8), policy.GroupPass, "spec.ingress[0]"},
		{"range, last", withGroups("ingress: [{protocol: tcp, ports: [{portRange: {from: 8, to: 9}}]}]"), in, far, tcp(9), policy.GroupPass, "spec.ingress[0]"},
		{"range, past", withGroups("ingress: [{protocol: tcp, ports: [{portRange: {from: 8, to: 9}}]}]"), in, far, tcp(10), policy.GroupDrop, ""},
		{"every port is not port 0", withGroups("ingress: [{protocol: tcp, ports: [{portRange: {from: 1, to: 65535}}]}]"), in, far, tcp(0), policy.GroupDrop, ""},
		{"no ports takes port 0", withGroups("ingress: [{protocol: tcp}]"), in, far, tcp(0), policy.GroupPass, "spec.ingress[0]"},
		{"a port that icmp has not", withGroups("ingress: [{protocol: tcp, ports: [{port: 80}]}]"), in, far, policy.Packet{Protocol: 1, DestinationPort: 80}, policy.GroupDrop, ""},
		{"source port", withGroups("ingress: [{protocol: tcp, ports: [{port: 80}]}]"), in, far, policy.Packet{Protocol: 6, SourcePort: 80, DestinationPort: 5}, policy.GroupDrop, ""},

		{"reference", withGroups("ingress: [{from: [{securityGroupRef: {name: peer}}]}]"), in, pod, tcp(80), policy.GroupPass, "spec.ingress[0]"},
		{"reference, out", withGroups("egress: [{to: [{securityGroupRef: {name: peer}}]}]"), out, pod, tcp(80), policy.GroupPass, "spec.egress[0]"},
		{"reference, endpoint without the group", withGroups("ingress: [{from: [{securityGroupRef: {name: peer}}]}]"), in, other, tcp(80), policy.GroupDrop, ""},
		{"reference, no endpoint", withGroups("ingress: [{from: [{securityGroupRef: {name: peer}}]}]"), in, far, tcp(80), policy.GroupDrop, ""},
		{"reference to itself", withGroups("ingress: [{from: [{securityGroupRef: {name: g}}]}]"), in, self, tcp(80), policy.GroupPass, "spec.ingress[0]"},
		{"reference to itself, another", withGroups("ingress: [{from: [{securityGroupRef: {name: g}}]}]"), in, pod, tcp(80), policy.GroupDrop, ""},
		{"reference or address", withGroups("ingress: [{from: [{securityGroupRef: {name: peer}}, {cidr: 8.8.8.8/32}]}]"), in, far, tcp(80), policy.GroupPass, "spec.ingress[0]"},

		{"unreadable, enforced", withGroups("{}"), in, far, policy.Packet{Protocol: 17, Unreadable: true}, policy.ParseDrop, ""},
		{"unreadable, nothing attached", acl + "  {}\n", in, far, policy.Packet{Protocol: 17, Unreadable: true}, policy.NotEnforced, ""},
		{"unreadable, rules in the other direction", withACL("egress: [{priority: 1, action: deny}]"), in, far, policy.Packet{Protocol: 17, Unreadable: true}, policy.NotEnforced, ""},
		{"unreadable, a rule allows all", withACL("ingress: [{priority: 1, action: allow}]"), in, far, policy.Packet{Protocol: 17, Unreadable: true}, policy.ParseDrop, ""},
		{"not IPv4, enforced", withGroups("ingress: [{}]"), in, far, policy.Packet{Frame: policy.OtherFrame}, policy.FrameDrop, ""},
		{"not IPv4, not enforced", withACL("egress: [{priority: 1, action: deny}]"), in, far, policy.Packet{Frame: policy.OtherFrame}, policy.NotEnforced, ""},
		{"ARP, enforced", withGroups("{}"), in, far, policy.Packet{Frame: policy.ARP}, policy.NotEnforced, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := testWorld(t, c.docs)
			p := c.packet
			p.Source, p.Destination = c.peer, self
			if c.d == policy.Egress {
				p.Source, p.Destination = self, c.peer
			}
			got := w.Judge(c.d, self, p)
			last := got.Steps[len(got.Steps)-1]
			allowed := c.want == policy.NotEnforced || c.want == policy.ACLPass || c.want == policy.GroupPass
			if last.Reason != c.want || last.Rule != c.rule || got.Allowed != allowed {
				t.Errorf("%+v\ngot  %+v\nwant reason %d (%s), rule %q", p, got, c.want, c.want, c.rule)
			}
		})
	}
}

// What is over a limit and was not refused closes its direction and no other.
func TestOverLimitCloses(t *testing.T) {
	a := &policy.NetworkACL{Header: policy.Header{Kind: policy.KindNetworkACL, Metadata: policy.Metadata{Name: "a"}}}
	for i := range policy.MaxRules + 1 {
		a.Spec.Ingress = append(a.Spec.Ingress, policy.ACLRule{Priority: uint16(i + 1), Action: policy.Allow, Protocol: policy.AnyProtocol})
	}
	at := &policy.Attachment{Header: policy.Header{Kind: policy.KindAttachment, Metadata: policy.Metadata{Name: "t"}}}
	at.Spec.NetworkACL = &policy.Ref{Name: "a"}
	at.Spec.Pools = []string{"pods"}
	set, err := policy.NewSet(a, at)
	if err != nil {
		t.Fatal(err)
	}
	w := policy.NewWorld(set, pools, policy.Endpoint{Address: self})
	if got := w.Judge(in, self, policy.Packet{Source: far, Destination: self}); got.Allowed || got.Steps[0].Reason != policy.ACLDrop {
		t.Errorf("ingress: got %+v, want closed", got)
	}
	if got := w.Judge(out, self, policy.Packet{Source: self, Destination: far}); !got.Allowed {
		t.Errorf("egress: got %+v, want open", got)
	}
}

func TestTooManyGroups(t *testing.T) {
	var docs strings.Builder
	for i := range 17 {
		fmt.Fprintf(&docs, "apiVersion: mknet/v1\nkind: SecurityGroup\nmetadata: {name: g%d}\nspec:\n  ingress: [{}]\n---\n", i)
		fmt.Fprintf(&docs, "apiVersion: mknet/v1\nkind: Attachment\nmetadata: {name: t%d}\nspec: {securityGroupRefs: [{name: g%d}], endpoints: [{name: self}]}\n---\n", i, i)
	}
	w := testWorld(t, docs.String())
	for _, d := range policy.Directions {
		if got := w.Judge(d, self, policy.Packet{Source: self, Destination: self}); got.Allowed || got.Steps[0].Reason != policy.GroupDrop {
			t.Errorf("%s: got %+v, want denied", d, got)
		}
	}
}

func TestExplain(t *testing.T) {
	w := testWorld(t, withGroups("ingress: [{from: [{securityGroupRef: {name: peer}}], protocol: tcp, ports: [{port: 80}]}]"))
	for _, c := range []struct {
		name     string
		from, to netip.Addr
		port     uint16
		want     string
	}{
		{"pod to pod", pod, self, 80, "allowed egress:302 ingress:302"},
		{"pod to pod, another port", pod, self, 81, "denied egress:302 ingress:303"},
		{"from outside", far, self, 80, "denied ingress:303"},
		{"to outside", self, far, 80, "allowed egress:302"},
		{"denied at the destination", self, pod, 80, "denied egress:302 ingress:303"},
		{"to itself", self, self, 80, "denied egress:302 ingress:303"},
		{"outside alone", far, far, 80, "allowed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := w.Explain(policy.Packet{Source: c.from, Destination: c.to, Protocol: 6, DestinationPort: c.port})
			got := map[bool]string{true: "allowed", false: "denied"}[v.Allowed]
			for _, p := range v.Points {
				got += fmt.Sprintf(" %s:%d", p.Direction, p.Steps[len(p.Steps)-1].Reason)
			}
			if got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// The switch for probes lets in what the node itself sends, whatever the rules say,
// and nothing that cannot be read.
func TestNodeProbes(t *testing.T) {
	docs := withGroups("{}")
	for _, c := range []struct {
		name   string
		on     bool
		d      policy.Direction
		packet policy.Packet
		want   policy.Reason
	}{
		{"from the node", true, policy.Ingress, policy.Packet{Protocol: 6, FromNode: true}, policy.ProbeAllowed},
		{"the switch is off", false, policy.Ingress, policy.Packet{Protocol: 6, FromNode: true}, policy.GroupDrop},
		{"from elsewhere", true, policy.Ingress, policy.Packet{Protocol: 6}, policy.GroupDrop},
		{"to the node", true, policy.Egress, policy.Packet{Protocol: 6, FromNode: true}, policy.GroupPass},
		{"unreadable", true, policy.Ingress, policy.Packet{Protocol: 6, FromNode: true, Unreadable: true}, policy.ParseDrop},
	} {
		w := testWorld(t, docs)
		w.NodeProbes = c.on
		p := c.packet
		p.Source, p.Destination = far, self
		if c.d == policy.Egress {
			p.Source, p.Destination = self, far
		}
		got := w.Judge(c.d, self, p)
		if last := got.Steps[len(got.Steps)-1]; last.Reason != c.want || got.Allowed != (c.want == policy.ProbeAllowed || c.want == policy.GroupPass) {
			t.Errorf("%s: got %+v, want %s", c.name, got, c.want)
		}
	}
}
