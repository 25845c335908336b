package policy

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Direction is one of the two enforcement points of an endpoint. The numbers are
// those of the tables and of the conntrack key in the kernel.
type Direction uint8

// The directions, as the endpoint sees them.
const (
	Egress  Direction = 1 // leaves the endpoint
	Ingress Direction = 2 // enters it
)

// Directions is both, in the order of their numbers.
var Directions = [2]Direction{Egress, Ingress}

func (d Direction) String() string {
	switch d {
	case Egress:
		return "egress"
	case Ingress:
		return "ingress"
	}
	return fmt.Sprintf("direction(%d)", uint8(d))
}

// MarshalJSON writes the name.
func (d Direction) MarshalJSON() ([]byte, error) { return json.Marshal(d.String()) }

// UnmarshalJSON reads the name.
func (d *Direction) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	switch s {
	case "egress":
		*d = Egress
	case "ingress":
		*d = Ingress
	default:
		return fmt.Errorf("direction %q: must be egress or ingress", clip(s))
	}
	return nil
}

// Rules is one direction of one policy in the form in which it is evaluated: the
// first rule of List that matches decides.
type Rules struct {
	Policy    Key
	Direction Direction
	// Restricts says that a packet which no rule matches is denied. For groups it
	// is enough that one of those of an endpoint restricts.
	Restricts bool
	List      []Rule
}

// Rule matches a packet when the protocol, one of the ports and one of the peers
// do.
type Rule struct {
	Allow    bool
	Protocol Protocol
	Ports    []PortRange    // empty: no condition, also for packets without a port
	CIDRs    []netip.Prefix // IPv4, canonical
	Groups   []string       // names of SecurityGroups that the peer may hold
	Priority uint16         // 0 in a group
	Path     string         // in its document, "spec.ingress[3]"
}

// anyPeer is every address; it is never changed.
var anyPeer = []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0)}

// Rules returns one direction in the order of priorities.
func (a *NetworkACL) Rules(d Direction) Rules {
	list := a.Spec.Ingress
	if d == Egress {
		list = a.Spec.Egress
	}
	out := Rules{Policy: a.Key(), Direction: d, Restricts: len(list) > 0, List: make([]Rule, 0, len(list))}
	for i, r := range list {
		rule := Rule{Allow: r.Action == Allow, Protocol: r.Protocol, Ports: r.Ports, CIDRs: anyPeer, Priority: r.Priority, Path: index("spec."+d.String(), i)}
		if r.CIDR.IsValid() {
			rule.CIDRs = []netip.Prefix{r.CIDR}
		}
		out.List = append(out.List, rule)
	}
	slices.SortStableFunc(out.List, func(x, y Rule) int { return cmp.Compare(x.Priority, y.Priority) })
	return out
}

// Rules returns one direction in the order of the document, which decides nothing:
// all rules allow.
func (g *SecurityGroup) Rules(d Direction) Rules {
	out := Rules{Policy: g.Key(), Direction: d, Restricts: true}
	add := func(i int, peers []Peer, p Protocol, ports []PortRange) {
		rule := Rule{Allow: true, Protocol: p, Ports: ports, Path: index("spec."+d.String(), i)}
		if len(peers) == 0 {
			rule.CIDRs = anyPeer
		}
		for _, peer := range peers {
			if peer.Group != nil {
				rule.Groups = append(rule.Groups, peer.Group.Name)
			} else {
				rule.CIDRs = append(rule.CIDRs, peer.CIDR)
			}
		}
		out.List = append(out.List, rule)
	}
	if d == Ingress {
		for i, r := range g.Spec.Ingress {
			add(i, r.From, r.Protocol, r.Ports)
		}
		return out
	}
	for i, r := range g.Spec.Egress {
		add(i, r.To, r.Protocol, r.Ports)
	}
	out.Restricts = len(g.Spec.Egress) > 0 || g.Spec.EgressDefault == Deny
	return out
}

// Match returns the first rule that matches, or -1: the slow and plain way that
// everything faster is tested against. port is the destination port, 0 where the
// packet has none; groups are those that the peer holds.
func (rs Rules) Match(peer netip.Addr, proto uint8, port uint16, groups []string) int {
	return slices.IndexFunc(rs.List, func(r Rule) bool {
		return r.matchProtocol(proto) && r.matchPort(port) && r.matchPeer(peer, groups)
	})
}

func (r Rule) matchProtocol(proto uint8) bool {
	return r.Protocol == AnyProtocol || r.Protocol == Protocol(proto)
}

func (r Rule) matchPort(port uint16) bool {
	return len(r.Ports) == 0 || slices.ContainsFunc(r.Ports, func(p PortRange) bool { return p.From <= port && port <= p.To })
}

func (r Rule) matchPeer(peer netip.Addr, groups []string) bool {
	return slices.ContainsFunc(r.CIDRs, func(p netip.Prefix) bool { return p.Contains(peer) }) ||
		slices.ContainsFunc(r.Groups, func(g string) bool { return slices.Contains(groups, g) })
}

// References returns the distinct groups that the rules name, in order.
func (rs Rules) References() []string {
	var out []string
	for _, r := range rs.List {
		out = append(out, r.Groups...)
	}
	slices.SortFunc(out, strings.Compare)
	return slices.Compact(out)
}
