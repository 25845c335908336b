package tracing

import (
	"slices"

	"mknet/mknetd/internal/nftrace"
	"mknet/spec/api"
	"mknet/spec/policy"
)

// iptables is the hook of events that rules of iptables make.
const iptables = "iptables"

// iptablesTables are those of the family ip that iptables-nft keeps.
var iptablesTables = []string{"raw", "mangle", "nat", "filter", "security"}

// wall is what the rules of iptables did with the packets of one direction.
type wall struct {
	seen, dropped bool
	last          api.TraceEvent // what was last said, of the packet that came last
	at            int            // the event of that
}

// Filter returns what a step says. rule is the rule's text and number its place in its
// chain, empty and 0 where they are not known.
func (t *Teller) Filter(s nftrace.Step, rule string, number int) api.TraceEvent {
	packet, known := t.rulesOf[s.Packet.Number]
	if !known {
		packet = t.next()
		t.rulesOf[s.Packet.Number] = packet
	}
	reason := policy.FilterMatch
	switch s.Verdict {
	case "accept":
		reason = policy.FilterPass
	case "drop":
		reason = policy.FilterDrop
	}
	out := api.TraceEvent{
		At: s.At, Node: t.node, Packet: packet, Hook: iptables, Code: uint16(reason), Name: reason.String(),
		Source: s.Packet.Source, Destination: s.Packet.Destination, SourcePort: s.Packet.SourcePort, DestinationPort: s.Packet.DestinationPort,
		TCPFlags: flagNames(s.Packet.TCPFlags), Reply: s.Packet.Reply, Bytes: s.Packet.Bytes,
		Table: s.Table, Chain: s.Chain, Rule: rule, Number: number, Handle: s.Handle, Verdict: s.Verdict,
	}
	if s.Family != "ip" || !slices.Contains(iptablesTables, s.Table) {
		out.Table = s.Family + " " + s.Table
	}
	if s.Handle == 0 {
		out.Rule = "policy"
	}
	t.events++
	w := &t.seen[0].wall
	if out.Reply {
		w = &t.seen[1].wall
	}
	// A packet that is dropped has nothing said of it afterwards.
	*w = wall{seen: true, dropped: reason == policy.FilterDrop, last: out, at: t.events}
	return out
}

// walled reports whether a rule dropped the last packet: none came through to the end
// of its way since.
func (d direction) walled() bool {
	arrived := d.last != nil && slices.Contains([]uint16{uint16(policy.Redirected), uint16(policy.RedirectedP), uint16(policy.ToEndpoint)}, d.why.Code)
	return d.wall.dropped && (!arrived || d.at < d.wall.at)
}

func (w wall) because() string { return "iptables: " + w.last.Place() }

// walls is the verdict where no program has seen a packet.
func (t *Teller) walls(stops string) (api.Outcome, string) {
	there, back := t.seen[0].wall, t.seen[1].wall
	switch {
	case there.dropped:
		return api.Dropped, there.because()
	case stops != "":
		return api.Dropped, stops
	case back.dropped:
		return api.Dropped, "the answer: " + back.because()
	case there.seen && there.last.Chain == "PREROUTING":
		return api.Unknown, "came no further than " + there.last.Table + " PREROUTING: routing (see mknetd explain)"
	case !there.seen:
		return api.Passes, "only answers were seen: " + back.because()
	}
	return api.Passes, there.because()
}
