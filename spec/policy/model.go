package policy

import (
	"fmt"
	"net/netip"
	"strings"
)

// World is all that a verdict depends on. It is the oracle of the data path: where
// the two differ, the data path is wrong. Its methods are safe for concurrent use.
type World struct {
	// NodeProbes is the switch of that name: what the node itself sends reaches
	// endpoints whose rules deny it. It is set before the first question.
	NodeProbes bool

	endpoints map[netip.Addr]Policies
	rules     map[Key]map[Direction]prepared
}

// prepared is one direction of one policy; one that is over a limit has no rules.
type prepared struct {
	Rules
	over bool
}

// NewWorld makes the model of endpoints under a set of documents. Of endpoints with
// the same address the last one counts.
func NewWorld(set *Set, pools Pools, endpoints ...Endpoint) *World {
	w := &World{endpoints: map[netip.Addr]Policies{}, rules: map[Key]map[Direction]prepared{}}
	for _, e := range endpoints {
		w.endpoints[e.Address] = set.For(e, pools)
	}
	for _, o := range set.Objects() {
		r, ok := o.(interface{ Rules(Direction) Rules })
		if !ok {
			continue // an Attachment
		}
		w.rules[o.Key()] = map[Direction]prepared{}
		for _, d := range Directions {
			p := prepared{Rules: r.Rules(d)}
			if p.over = len(p.Size().Over()) > 0; p.over {
				p.List, p.Restricts = nil, true
			}
			w.rules[o.Key()][d] = p
		}
	}
	return w
}

// Frame is what a packet is below IP.
type Frame uint8

// The frames that are told apart.
const (
	IPv4       Frame = iota
	ARP              // always passes
	OtherFrame       // another ethertype, or any frame with a VLAN tag
)

// Packet is a packet at one enforcement point, with no flow of which it could be
// a part: established flows are the conntrack table's.
type Packet struct {
	Frame       Frame
	Source      netip.Addr
	Destination netip.Addr
	Protocol    uint8
	SourcePort  uint16 // decides nothing
	// DestinationPort counts only where the protocol has ports. A later fragment
	// has those of its first.
	DestinationPort uint16
	// FromNode says that the node itself sends it: it came in by no link.
	FromNode bool
	// Unreadable says that the header is cut off, or that this is a later fragment
	// whose first was not seen.
	Unreadable bool
}

// Layer names what has decided.
type Layer string

// The layers, in the order in which they are evaluated.
const (
	LayerFrame  Layer = "frame"
	LayerACL    Layer = "NetworkACL"
	LayerGroups Layer = "SecurityGroup"
)

// Step is what one layer says.
type Step struct {
	Layer    Layer  `json:"layer"`
	Reason   Reason `json:"reason"`
	Policy   string `json:"policy,omitempty"`   // name of the document that has decided
	Rule     string `json:"rule,omitempty"`     // its rule, "spec.ingress[3]"; empty: a default
	Priority uint16 `json:"priority,omitempty"` // of an ACL's rule
	Why      string `json:"why"`
}

// Decision is the verdict of one enforcement point.
type Decision struct {
	Direction Direction  `json:"direction"`
	Endpoint  netip.Addr `json:"endpoint"`
	Allowed   bool       `json:"allowed"`
	// Enforced says that something applies in this direction, so that what cannot
	// be judged is dropped. Remember says that an admission is written down.
	Enforced bool   `json:"enforced"`
	Remember bool   `json:"remember"`
	Steps    []Step `json:"steps"` // the last one has decided
}

// Judge gives the verdict on a packet that leaves (Egress) or enters (Ingress) an
// endpoint. An address without an endpoint has no enforcement point: allowed.
func (w *World) Judge(d Direction, self netip.Addr, p Packet) Decision {
	out := Decision{Direction: d, Endpoint: self, Allowed: true}
	policies, ok := w.endpoints[self]
	if !ok {
		return out.end(true, Step{Layer: LayerFrame, Reason: NoEndpoint, Why: self.String() + " is no endpoint of this node"})
	}
	var acl prepared
	if policies.ACL != nil {
		acl = w.rules[policies.ACL.Key()][d]
	}
	out.Enforced = len(policies.Groups) > 0 || acl.Restricts
	if s := readable(p, out.Enforced); s != nil {
		return out.end(s.Reason == NotEnforced, *s)
	}
	if p.Frame != IPv4 {
		return out.end(true, Step{Layer: LayerFrame, Reason: NotEnforced, Why: "ARP is never judged"})
	}
	out.Remember = policies.ACL != nil || len(policies.Groups) > 0
	if !out.Remember {
		return out.end(true, Step{Layer: LayerFrame, Reason: NotEnforced, Why: "nothing is attached"})
	}
	q := query{proto: p.Protocol, peer: p.Source}
	if d == Egress {
		q.peer = p.Destination
	}
	if Protocol(p.Protocol).HasPorts() {
		q.port = p.DestinationPort
	}
	if peer := w.endpoints[q.peer]; !peer.TooMany {
		q.groups = peer.GroupNames()
	}
	if policies.ACL != nil {
		s := q.acl(acl)
		out = out.end(s.Reason == ACLPass, s)
	}
	if out.Allowed && len(policies.Groups) > 0 {
		s := w.securityGroups(q, policies, d)
		out = out.end(s.Reason == GroupPass, s)
	}
	if !out.Allowed && d == Ingress && p.FromNode && w.NodeProbes {
		return out.end(true, Step{Layer: LayerFrame, Reason: ProbeAllowed, Why: "the node itself sends it, and nodeProbes lets that pass whatever the rules say"})
	}
	return out
}

func (d Decision) end(allowed bool, s Step) Decision {
	d.Allowed, d.Steps = allowed, append(d.Steps, s)
	return d
}

// readable judges what no rule can; nil: the rules may.
func readable(p Packet, enforced bool) *Step {
	s := Step{Layer: LayerFrame}
	switch {
	case p.Frame == OtherFrame:
		s.Reason, s.Why = FrameDrop, "the frame is neither IPv4 nor ARP"
	case p.Frame == IPv4 && p.Unreadable:
		s.Reason, s.Why = ParseDrop, "the header cannot be read"
	default:
		return nil
	}
	if !enforced {
		s.Reason, s.Why = NotEnforced, s.Why+", and nothing applies in this direction"
	}
	return &s
}

// query is what rules match.
type query struct {
	peer   netip.Addr
	proto  uint8
	port   uint16
	groups []string
}

func (q query) match(rules prepared) int { return rules.Match(q.peer, q.proto, q.port, q.groups) }

func (q query) acl(rules prepared) Step {
	s := Step{Layer: LayerACL, Reason: ACLPass, Policy: rules.Policy.Name}
	i := q.match(rules)
	switch {
	case i >= 0:
		r := rules.List[i]
		s.Rule, s.Priority, s.Why = r.Path, r.Priority, "the rule allows"
		if !r.Allow {
			s.Reason, s.Why = ACLDrop, "the rule denies"
		}
	case rules.over:
		s.Reason, s.Why = ACLDrop, "it is over a limit, so that this direction is closed"
	case rules.Restricts:
		s.Reason, s.Why = ACLDrop, "no rule matches"
	default:
		s.Why = "it has no rules in this direction"
	}
	return s
}

func (w *World) securityGroups(q query, p Policies, d Direction) Step {
	s := Step{Layer: LayerGroups, Reason: GroupPass}
	if p.TooMany {
		s.Reason, s.Why = GroupDrop, fmt.Sprintf("%d groups are attached, at most %d can be: closed", len(p.Groups), MaxGroupsPerEndpoint)
		return s
	}
	var restricting []string
	for _, g := range p.Groups {
		rules := w.rules[g.Key()][d]
		if i := q.match(rules); i >= 0 {
			s.Policy, s.Rule, s.Why = rules.Policy.Name, rules.List[i].Path, "the rule allows"
			return s
		}
		if rules.Restricts {
			restricting = append(restricting, g.Metadata.Name)
		}
	}
	if len(restricting) > 0 {
		s.Reason, s.Policy = GroupDrop, restricting[0]
		s.Why = "no rule matches in " + strings.Join(p.GroupNames(), ", ") + "; restricted by " + strings.Join(restricting, ", ")
		return s
	}
	s.Why = "no group has an egress rule or egressDefault deny"
	return s
}

// Verdict is what becomes of the first packet of a flow on its whole way.
type Verdict struct {
	Allowed bool       `json:"allowed"`
	Points  []Decision `json:"points"` // egress of the source, then ingress of the destination, where these are endpoints
}

// Explain judges at both points. Where a packet is sent from and to the same
// endpoint (through the host), both points are that endpoint's.
func (w *World) Explain(p Packet) Verdict {
	v := Verdict{Allowed: true}
	for _, at := range []struct {
		d    Direction
		self netip.Addr
	}{{Egress, p.Source}, {Ingress, p.Destination}} {
		if _, ok := w.endpoints[at.self]; !ok || !v.Allowed {
			continue
		}
		d := w.Judge(at.d, at.self, p)
		v.Points = append(v.Points, d)
		v.Allowed = v.Allowed && d.Allowed
	}
	return v
}
