// Package tracing turns what the programs and the rules of iptables tell of single
// packets into what an operator reads: numbered packets, names of policies and rules,
// and a verdict. It is pure; the engine feeds it.
package tracing

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"mknet/mknetd/internal/datapath"
	"mknet/spec/api"
	"mknet/spec/policy"
)

// Teller follows one trace. It is used by one goroutine.
type Teller struct {
	node    string
	to      netip.Addr // who is meant to get the flow
	toOurs  bool       // its link has programs of ours
	began   time.Time  // of the wall clock
	at      time.Duration
	names   map[uint32]policy.Key
	rules   func(policy.Key, policy.Direction) policy.Rules
	packets map[time.Duration]*packet // by TraceEvent.Began
	rulesOf map[int]int               // by the number that nftrace gives a packet: ours
	events  int
	seen    [2]direction // there, and back
}

// packet is one at one program.
type packet struct {
	number int
	last   api.TraceEvent
	told   api.TraceEvent // the last that says why: of a policy, of conntrack
}

// direction is what became of the packets of one direction.
type direction struct {
	passed, dropped int
	last            *packet // the last one that has ended
	why             api.TraceEvent
	at              int // the event by which it ended
	wall            wall
}

// Config is what a Teller is told from outside.
type Config struct {
	Node    string
	To      netip.Addr
	ToOurs  bool
	Wall    time.Time     // the wall clock
	Clock   time.Duration // CLOCK_MONOTONIC at the same moment
	Numbers map[policy.Key]uint32
	// Rules returns the rules of a policy's direction, none where there is no such
	// policy now.
	Rules func(policy.Key, policy.Direction) policy.Rules
}

// New returns a Teller.
func New(c Config) *Teller {
	t := &Teller{
		node: c.Node, to: c.To, toOurs: c.ToOurs, began: c.Wall, at: c.Clock, rules: c.Rules,
		names: map[uint32]policy.Key{}, packets: map[time.Duration]*packet{}, rulesOf: map[int]int{},
	}
	for k, n := range c.Numbers {
		t.names[n] = k
	}
	return t
}

// Event returns what the programs' event says, false where it says nothing new.
func (t *Teller) Event(ev datapath.TraceEvent) (api.TraceEvent, bool) {
	p := t.packets[ev.Began]
	if p == nil {
		p = &packet{number: t.next()}
		t.packets[ev.Began] = p
	}
	// The rule of a group that matched has been told; that the groups pass follows.
	if ev.Reason == policy.GroupPass && ev.Policy == 0 && p.last.Code == uint16(policy.GroupPass) && p.last.Policy != "" && p.last.Point == point(ev) {
		return api.TraceEvent{}, false
	}
	out := api.TraceEvent{
		At: t.began.Add(ev.At - t.at), Node: t.node, Packet: p.number, Hook: ev.Hook, Point: point(ev),
		Code: uint16(ev.Reason), Name: ev.Reason.String(),
		Source: ev.Source, Destination: ev.Destination, SourcePort: ev.SourcePort, DestinationPort: ev.DestinationPort,
		TCPFlags: flagNames(ev.TCPFlags), Reply: ev.Reply, Bytes: ev.Bytes,
	}
	if !ev.Endpoint.IsUnspecified() {
		out.Endpoint = ev.Endpoint
	}
	if ev.Policy != 0 {
		out.Policy, out.Rule = t.rule(ev)
	} else if ev.Reason == policy.GroupPass || ev.Reason == policy.GroupDrop {
		out.Rule = "default"
	}
	if ev.Reason >= policy.Redirected {
		out.Outcome = ev.Outcome.String()
		t.ended(p, out)
	} else if ev.Reason != policy.Entered {
		p.told = out
	}
	p.last = out
	t.events++
	return out, true
}

// next is the number of a packet that was not seen before.
func (t *Teller) next() int { return len(t.packets) + len(t.rulesOf) + 1 }

func point(ev datapath.TraceEvent) string {
	if ev.Point == 0 {
		return ""
	}
	return ev.Point.String()
}

// rule names the policy that has decided, and its rule.
func (t *Teller) rule(ev datapath.TraceEvent) (name, rule string) {
	key, ok := t.names[ev.Policy]
	if !ok {
		return fmt.Sprintf("policy %d", ev.Policy), fmt.Sprintf("rule %d", ev.Rule)
	}
	if ev.Rule < 0 {
		return key.String(), "default"
	}
	if list := t.rules(key, ev.Point).List; ev.Rule < len(list) {
		return key.String(), list[ev.Rule].Path
	}
	return key.String(), fmt.Sprintf("rule %d", ev.Rule)
}

// flagNames are TCP's, RFC 9293 section 3.1.
func flagNames(f uint8) string {
	var out []string
	for i, name := range []string{"FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"} {
		if f>>i&1 != 0 {
			out = append(out, name)
		}
	}
	return strings.Join(out, ",")
}

func (t *Teller) ended(p *packet, ev api.TraceEvent) {
	d := &t.seen[0]
	if ev.Reply {
		d = &t.seen[1]
	}
	if ev.Code == uint16(policy.Dropped) {
		d.dropped++
	} else {
		d.passed++
	}
	d.last, d.why, d.at = p, ev, t.events+1
}

// End is the verdict. stops is what others than the programs say that they stopped,
// empty where there is nothing.
func (t *Teller) End(at time.Time, lost uint64, stops string) api.TraceEnd {
	end := api.TraceEnd{At: at, Events: t.events, Lost: lost}
	there, back := t.seen[0], t.seen[1]
	switch {
	case there.last == nil && back.last == nil && (there.wall.seen || back.wall.seen):
		end.Verdict, end.Because = t.walls(stops)
	case there.last == nil && back.last == nil:
		end.Verdict, end.Because = api.Unknown, "no packet of the flow came to a program or to iptables of this node (does anybody send? --probe sends one)"
		if stops != "" {
			end.Verdict, end.Because = api.Dropped, stops
		}
	case there.last != nil && there.why.Code == uint16(policy.Dropped):
		end.Verdict, end.Because = api.Dropped, there.reason()
	case there.walled():
		end.Verdict, end.Because = api.Dropped, there.wall.because()
	case stops != "":
		end.Verdict, end.Because = api.Dropped, stops
	case there.last != nil && there.why.Code == uint16(policy.ToHostStack) && t.toOurs:
		end.Verdict, end.Because = api.Unknown, fmt.Sprintf("went to the host stack and did not come out to %s: routing or iptables (see mknetd explain)", t.to)
	case back.last != nil && back.why.Code == uint16(policy.Dropped):
		end.Verdict, end.Because = api.Dropped, "the answer: "+back.reason()
	case back.walled():
		end.Verdict, end.Because = api.Dropped, "the answer: "+back.wall.because()
	case there.last == nil:
		end.Verdict, end.Because = api.Passes, "only answers were seen: "+back.reason()
	default:
		end.Verdict, end.Because = api.Passes, there.reason()
	}
	if n := there.dropped + back.dropped; n > 0 && there.passed+back.passed > 0 {
		end.Because += fmt.Sprintf("; %d packets passed a program, %d were dropped", there.passed+back.passed, n)
	}
	return end
}

// reason says why the last packet ended as it did.
func (d direction) reason() string {
	why := d.last.told
	words := d.why.Name
	if slices.Contains([]uint16{uint16(policy.Dropped), uint16(policy.Redirected), uint16(policy.RedirectedP)}, d.why.Code) && why.Code == 0 {
		words += " (" + d.why.Outcome + ")"
	}
	if why.Code == 0 {
		return words
	}
	words += ": " + why.Name
	if why.Point != "" {
		words += " at " + why.Point + " of " + why.Endpoint.String()
	}
	if why.Policy != "" {
		words += ", " + why.Policy
	}
	if why.Rule != "" {
		words += " " + why.Rule
	}
	return words
}
