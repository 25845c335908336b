package api

import (
	"fmt"
	"net/netip"
	"time"
)

// TraceRequest asks what becomes of the packets of a flow from now on, in both
// directions: POST /v1/trace -> 200, TraceLines, one a line.
type TraceRequest struct {
	// From and To say whom (spec/operations.md, "Who is meant"); To may have the port.
	// One of them must be an endpoint of this node.
	From string `json:"from"`
	To   string `json:"to"`
	// Protocol is a name or a number; empty: tcp with a port, else icmp.
	Protocol string `json:"protocol,omitempty"`
	Port     uint16 `json:"port,omitempty"` // of To; 0: any, or none, or in To
	// Probe sends one packet of the flow out of From, which must be a pod of this node;
	// the trace then ends when it is settled.
	Probe bool `json:"probe,omitempty"`
	// TimeoutSeconds is 1 to 600; 0 is 10.
	TimeoutSeconds int `json:"timeoutSeconds,omitempty"`
}

// TraceLine is one of its fields.
type TraceLine struct {
	Begin *TraceBegin `json:"begin,omitempty"` // the first line
	Event *TraceEvent `json:"event,omitempty"`
	Note  *TraceNote  `json:"note,omitempty"`
	End   *TraceEnd   `json:"end,omitempty"` // the last one
}

// TraceBegin says what is being traced. What comes earlier is not told.
type TraceBegin struct {
	At       time.Time  `json:"at"`
	Node     string     `json:"node"`
	From     netip.Addr `json:"from"`
	To       netip.Addr `json:"to"`
	Protocol string     `json:"protocol"`
	Port     uint16     `json:"port,omitempty"`
	Until    time.Time  `json:"until"`
}

// TraceEvent is one step of one packet at one program, or on its way through the rules
// of iptables.
type TraceEvent struct {
	At   time.Time `json:"at"`
	Node string    `json:"node"`
	// Packet numbers the packets at programs: one that passes two programs has two, and
	// one more in iptables.
	Packet int    `json:"packet"`
	Hook   string `json:"hook"` // from_container, to_container, from_child, to_child, iptables
	// Point is the direction of the enforcement point, and Endpoint whose it is.
	Point    string     `json:"point,omitempty"` // egress, ingress
	Endpoint netip.Addr `json:"endpoint,omitzero"`
	Code     uint16     `json:"code"` // spec/policy: Reason
	Name     string     `json:"name"`

	Source          netip.Addr `json:"source"`
	Destination     netip.Addr `json:"destination"`
	SourcePort      uint16     `json:"sourcePort,omitempty"`
	DestinationPort uint16     `json:"destinationPort,omitempty"`
	TCPFlags        string     `json:"tcpFlags,omitempty"` // "SYN,ACK"
	Reply           bool       `json:"reply"`              // from To to From
	Bytes           int        `json:"bytes"`              // of the frame; in iptables of the packet

	Outcome string `json:"outcome,omitempty"` // as counters name it, with codes from 500 on
	Policy  string `json:"policy,omitempty"`  // kind/name
	// Rule is its path in the document, or "default"; in iptables the rule as iptables
	// -S prints it, or "policy", empty where it cannot be read.
	Rule string `json:"rule,omitempty"`

	// Only in iptables, and in nf_tables of others.
	Table   string `json:"table,omitempty"` // "filter"; where it is not iptables' "inet firewalld"
	Chain   string `json:"chain,omitempty"`
	Number  int    `json:"number,omitempty"`  // of the rule in its chain, from 1
	Handle  uint64 `json:"handle,omitempty"`  // of the rule, as nft -a prints it
	Verdict string `json:"verdict,omitempty"` // accept, drop, return, continue, queue
}

// Place is where in iptables an event is: "filter MK-0123456789ab 7: -j DROP".
func (ev TraceEvent) Place() string {
	out := ev.Table + " " + ev.Chain
	switch {
	case ev.Number > 0:
		out += fmt.Sprintf(" %d: %s", ev.Number, ev.Rule)
	case ev.Rule != "":
		out += " " + ev.Rule
	case ev.Handle > 0:
		out += fmt.Sprintf(" handle %d", ev.Handle)
	}
	return out
}

// TraceNote is what others than the programs say.
type TraceNote struct {
	At    time.Time `json:"at"`
	Node  string    `json:"node"`
	About string    `json:"about"` // "probe", "iptables", "pump"
	Text  string    `json:"text"`
}

// TraceEnd is the verdict on the flow.
type TraceEnd struct {
	At      time.Time `json:"at"`
	Verdict Outcome   `json:"verdict"`
	Because string    `json:"because"`
	Events  int       `json:"events"`
	Lost    uint64    `json:"lost"` // events that found no room
}
