package policy

import (
	"encoding/json"
	"fmt"
)

// Reason is a step of a packet's way or its end, as traces and counters name it.
type Reason uint16

// The reasons. A number is never given another meaning.
const (
	Entered Reason = 100 // a program has begun with the packet

	NoEndpoint    Reason = 200 // the link or the address belongs to no endpoint: nothing is judged
	NoSlot        Reason = 201 // a policy that an endpoint holds has no slot: denied
	NoTable       Reason = 202 // a slot names a table that is not there: denied
	NoIdentity    Reason = 203 // the peer is no endpoint: no group matches
	NoFragment    Reason = 204 // a later fragment whose first one was not seen
	ConntrackMiss Reason = 208 // the flow is not known here: the layers are evaluated
	ConntrackHit  Reason = 209 // admitted before, nothing has changed since
	ConntrackOld  Reason = 210 // admitted before a change: judged again
	ConntrackFull Reason = 211 // admitted, but the flow could not be remembered
	Related       Reason = 212 // an ICMP error that quotes a packet of a live flow

	ACLPass      Reason = 300
	ACLDrop      Reason = 301
	GroupPass    Reason = 302
	GroupDrop    Reason = 303
	ParseDrop    Reason = 304 // the header or the ports cannot be read
	FrameDrop    Reason = 305 // neither IPv4 nor ARP, or tagged
	NotEnforced  Reason = 306 // nothing applies in this direction
	ProbeAllowed Reason = 307 // from the node itself, by the switch for probes

	FilterPass  Reason = 400 // iptables: a rule or a chain's policy accepts
	FilterDrop  Reason = 401 // iptables: a rule or a chain's policy drops
	FilterMatch Reason = 402 // iptables: a rule has matched and leaves it to others

	Redirected  Reason = 500 // to the local endpoint's host link
	RedirectedP Reason = 501 // straight into the local endpoint (bpf_redirect_peer)
	ToHostStack Reason = 502
	Dropped     Reason = 503
	ToEndpoint  Reason = 504 // from the host stack to the endpoint
)

var reasonNames = map[Reason]string{
	Entered:    "entered",
	NoEndpoint: "no endpoint", NoSlot: "policy slot missing", NoTable: "policy table missing", NoIdentity: "peer is no endpoint",
	NoFragment: "first fragment not seen", ConntrackMiss: "conntrack miss", ConntrackHit: "conntrack hit",
	ConntrackOld: "conntrack entry judged again", ConntrackFull: "conntrack full", Related: "related to a live flow",
	ACLPass: "acl pass", ACLDrop: "acl drop", GroupPass: "sg pass", GroupDrop: "sg drop",
	ParseDrop: "policy drop (header unreadable)", FrameDrop: "policy drop (not IPv4)", NotEnforced: "no policy", ProbeAllowed: "probe from the node",
	FilterPass: "iptables pass", FilterDrop: "iptables drop", FilterMatch: "iptables match",
	Redirected: "redirected", RedirectedP: "redirected to peer", ToHostStack: "to the host stack", Dropped: "dropped", ToEndpoint: "to the endpoint",
}

func (r Reason) String() string {
	if name, ok := reasonNames[r]; ok {
		return name
	}
	return fmt.Sprintf("reason %d", uint16(r))
}

// MarshalJSON writes number and name.
func (r Reason) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Code uint16 `json:"code"`
		Name string `json:"name"`
	}{uint16(r), r.String()})
}

// UnmarshalJSON reads what MarshalJSON writes.
func (r *Reason) UnmarshalJSON(b []byte) error {
	var v struct {
		Code uint16 `json:"code"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	*r = Reason(v.Code)
	return nil
}
