package tracing

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"mknet/mknetd/internal/datapath"
	"mknet/spec/api"
	"mknet/spec/policy"
)

var (
	pod, peer = netip.MustParseAddr("10.88.0.2"), netip.MustParseAddr("10.88.0.3")
	acl       = policy.Key{Kind: policy.KindNetworkACL, Name: "wall"}
	group     = policy.Key{Kind: policy.KindSecurityGroup, Name: "web"}
)

func teller(toOurs bool) *Teller {
	return New(Config{
		Node: "n", To: peer, ToOurs: toOurs, Wall: time.Unix(100, 0), Clock: 5 * time.Second,
		Numbers: map[policy.Key]uint32{acl: 1, group: 2},
		Rules: func(k policy.Key, d policy.Direction) policy.Rules {
			if k != acl || d != policy.Egress {
				return policy.Rules{}
			}
			return policy.Rules{List: []policy.Rule{{Path: "spec.egress[0]"}}}
		},
	})
}

// ev makes an event of packet n (its time in seconds).
func ev(n int, reason policy.Reason, change ...func(*datapath.TraceEvent)) datapath.TraceEvent {
	e := datapath.TraceEvent{
		Began: time.Duration(n) * time.Second, At: time.Duration(n)*time.Second + time.Millisecond, Hook: "from_container",
		Source: pod, Destination: peer, DestinationPort: 80, Protocol: policy.TCP, TCPFlags: 0x12, Reason: reason, Rule: -1,
	}
	for _, f := range change {
		f(&e)
	}
	return e
}

func at(d policy.Direction, whose netip.Addr) func(*datapath.TraceEvent) {
	return func(e *datapath.TraceEvent) { e.Point, e.Endpoint = d, whose }
}

func by(number uint32, rule int) func(*datapath.TraceEvent) {
	return func(e *datapath.TraceEvent) { e.Policy, e.Rule = number, rule }
}

func out(o datapath.Outcome) func(*datapath.TraceEvent) {
	return func(e *datapath.TraceEvent) { e.Outcome, e.Endpoint = o, pod }
}

func answer(e *datapath.TraceEvent) { e.Reply = true }

// say is an event in one line.
func say(e api.TraceEvent) string {
	return strings.Join(strings.Fields(fmt.Sprint(e.Packet, e.Point, " ", e.Code, " ", e.Policy, " ", e.Rule, " ", e.Outcome)), " ")
}

func TestTeller(t *testing.T) {
	t.Parallel()
	drop := []datapath.TraceEvent{ev(7, policy.Entered), ev(7, policy.ConntrackMiss, at(policy.Egress, pod)), ev(7, policy.ACLDrop, at(policy.Egress, pod), by(1, 0)), ev(7, policy.Dropped, out(datapath.DropACL))}
	pass := []datapath.TraceEvent{ev(8, policy.Entered), ev(8, policy.ConntrackHit, at(policy.Egress, pod)), ev(8, policy.ConntrackHit, at(policy.Ingress, peer)), ev(8, policy.RedirectedP, out(datapath.Peer))}
	stack := []datapath.TraceEvent{ev(8, policy.Entered), ev(8, policy.NotEnforced, at(policy.Egress, pod)), ev(8, policy.ToHostStack, out(datapath.Stack))}
	delivered := []datapath.TraceEvent{ev(9, policy.Entered), ev(9, policy.NotEnforced, at(policy.Ingress, peer)), ev(9, policy.ToEndpoint, out(datapath.Delivered))}
	answered := []datapath.TraceEvent{ev(10, policy.Entered, answer), ev(10, policy.GroupDrop, answer, at(policy.Ingress, pod)), ev(10, policy.Dropped, answer, out(datapath.DropGroup))}
	for _, c := range []struct {
		name    string
		events  [][]datapath.TraceEvent
		toOurs  bool
		stops   string
		verdict api.Outcome
		because string
	}{
		{"nothing", nil, true, "", api.Unknown, "no packet of the flow came"},
		{"nothing but a rule", nil, true, "iptables r", api.Dropped, "iptables r"},
		{"dropped", [][]datapath.TraceEvent{drop}, true, "", api.Dropped, "dropped: acl drop at egress of 10.88.0.2, NetworkACL/wall spec.egress[0]"},
		{"redirected", [][]datapath.TraceEvent{pass}, true, "", api.Passes, "redirected to peer: conntrack hit at ingress of 10.88.0.3"},
		{"dropped, then let through", [][]datapath.TraceEvent{drop, pass}, true, "", api.Passes, "; 1 packets passed a program, 1 were dropped"},
		{"to the stack, and out of sight", [][]datapath.TraceEvent{stack}, false, "", api.Passes, "to the host stack: no policy at egress of 10.88.0.2"},
		{"to the stack, and lost", [][]datapath.TraceEvent{stack}, true, "", api.Unknown, "went to the host stack and did not come out to 10.88.0.3"},
		{"to the stack, and refused", [][]datapath.TraceEvent{stack}, true, "iptables filter MK-1 7", api.Dropped, "iptables filter MK-1 7"},
		{"to the stack, and out", [][]datapath.TraceEvent{stack, delivered}, true, "", api.Passes, "to the endpoint: no policy at ingress of 10.88.0.3"},
		{"its answer is dropped", [][]datapath.TraceEvent{pass, answered}, true, "", api.Dropped, "the answer: dropped: sg drop at ingress of 10.88.0.2 default"},
		{"only answers", [][]datapath.TraceEvent{{ev(1, policy.Entered, answer), ev(1, policy.ToEndpoint, answer, out(datapath.Delivered))}}, true, "", api.Passes, "only answers were seen: to the endpoint"},
		{"another's address", [][]datapath.TraceEvent{{ev(1, policy.Entered), ev(1, policy.Dropped, out(datapath.DropMAC))}}, true, "", api.Dropped, "dropped (drop-mac)"},
	} {
		tell := teller(c.toOurs)
		n := 0
		for _, list := range c.events {
			for _, e := range list {
				if _, news := tell.Event(e); news {
					n++
				}
			}
		}
		end := tell.End(time.Unix(200, 0), 3, c.stops)
		if end.Verdict != c.verdict || !strings.Contains(end.Because, c.because) || end.Events != n || end.Lost != 3 {
			t.Errorf("%s: %s: %s (%d events, want %d)", c.name, end.Verdict, end.Because, end.Events, n)
		}
	}
}

func TestEvent(t *testing.T) {
	t.Parallel()
	tell := teller(true)
	var got []string
	for _, e := range []datapath.TraceEvent{
		ev(7, policy.Entered),
		ev(8, policy.Entered), // two CPUs
		ev(7, policy.ACLPass, at(policy.Egress, pod), by(1, 0)),
		ev(7, policy.ACLPass, at(policy.Egress, pod), by(1, 9)),         // the document has changed
		ev(7, policy.GroupPass, at(policy.Egress, pod), by(77, 4)),      // is gone
		ev(7, policy.GroupPass, at(policy.Egress, pod)),                 // says it again
		ev(7, policy.GroupPass, at(policy.Ingress, peer)),               // by default
		ev(8, policy.ACLDrop, at(policy.Ingress, peer), by(1, -1)),      // no rule matched
		ev(8, policy.GroupDrop, at(policy.Ingress, peer)),               // likewise
		ev(7, policy.ACLPass, at(policy.Ingress, peer), by(2, 0)),       // a direction without rules
		ev(7, policy.Redirected, out(datapath.Redirect), by(0, 0xffff)), // the end
	} {
		if e, news := tell.Event(e); news {
			got = append(got, say(e))
		}
	}
	want := []string{
		"1 100", "2 100", "1egress 300 NetworkACL/wall spec.egress[0]", "1egress 300 NetworkACL/wall rule 9", "1egress 302 policy 77 rule 4", "1ingress 302 default",
		"2ingress 301 NetworkACL/wall default", "2ingress 303 default", "1ingress 300 SecurityGroup/web rule 0", "1 500 redirect",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	e, _ := tell.Event(ev(9, policy.Entered))
	if e.TCPFlags != "SYN,ACK" || !e.At.Equal(time.Unix(104, int64(time.Millisecond))) || e.Endpoint.IsValid() || e.Name != "entered" || e.Node != "n" {
		t.Errorf("%+v", e)
	}
}
