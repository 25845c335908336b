package api

import (
	"net/netip"

	"mknet/spec/endpoint"
)

// WayRequest asks which way a packet would take now, and its answer:
// GET /v1/explain -> 200 Explanation.
type WayRequest struct {
	From, To string // whom: spec/operations.md, "Who is meant"; their ports may be SourcePort and Port
	Port     int    // 0: none, or in To
	Protocol string // "icmp" (an echo request), "tcp", "udp"; empty: tcp with a port, else icmp
	// SourcePort (of ICMP: the identifier) names one flow: where it exists, its next
	// packet is meant. 0: the first packet of a new flow, or in From.
	SourcePort int
	// SizeBytes is the packet's length, IP header included; it may not be cut. 0: short.
	SizeBytes int
}

// Outcome is what becomes of a packet at a step, or in the end.
type Outcome string

// The outcomes.
const (
	Passes  Outcome = "passes"
	Dropped Outcome = "dropped" // somebody's rule or route says so
	Broken  Outcome = "broken"  // an object is missing or not as it should be
	Unknown Outcome = "unknown" // it depends on what mknetd cannot see or judge
)

// ExplainStep is one station of the way.
type ExplainStep struct {
	Where   string  `json:"where"`  // "child", "namespace", "host", "world"
	Object  string  `json:"object"` // "link eth0", "route default dev ens4", "iptables filter FORWARD"
	Outcome Outcome `json:"outcome"`
	Why     string  `json:"why"`               // the rule, route or state that decides
	Rules   []Rule  `json:"rules,omitempty"`   // of the endpoints' chains, as far as they were asked
	Inspect string  `json:"inspect,omitempty"` // a command that shows it
}

// Rule is one iptables rule that was asked.
type Rule struct {
	Chain   string `json:"chain"`
	Number  int    `json:"number"`
	Text    string `json:"text"`
	Matches string `json:"matches"` // "yes", "no", or what cannot be judged
}

// Explanation is the way of a packet, and of its answer, by the live state.
type Explanation struct {
	From       netip.Addr       `json:"from"`
	To         netip.Addr       `json:"to"`
	Protocol   string           `json:"protocol"`
	Port       int              `json:"port,omitempty"`
	SourcePort int              `json:"sourcePort,omitempty"`
	SizeBytes  int              `json:"sizeBytes,omitempty"`
	Way        []ExplainStep    `json:"way"`
	Back       []ExplainStep    `json:"back"`      // empty where the packet does not arrive
	Faults     []endpoint.Fault `json:"faults"`    // of both endpoints, also off the way
	NotJudged  []ExplainStep    `json:"notJudged"` // stations of both ways that are Unknown, each once: what they do is not in the verdict
	Verdict    Outcome          `json:"verdict"`
	Because    string           `json:"because"`
}
