package tracing

import (
	"strings"
	"testing"
	"time"

	"mknet/mknetd/internal/datapath"
	"mknet/mknetd/internal/nftrace"
	"mknet/spec/api"
	"mknet/spec/policy"
)

// step is what iptables does with its packet n.
func step(n int, table, chain string, handle uint64, verdict string, change ...func(*nftrace.Step)) nftrace.Step {
	s := nftrace.Step{
		At: time.Unix(150, 0), Family: "ip", Table: table, Chain: chain, Handle: handle, Verdict: verdict,
		Packet: nftrace.Packet{Number: n, Source: pod, Destination: peer, SourcePort: 40000, DestinationPort: 80, TCPFlags: 2, Bytes: 60},
	}
	for _, f := range change {
		f(&s)
	}
	return s
}

func back(s *nftrace.Step) { s.Packet.Reply = true }

// Packets in iptables are numbered with those at programs, and every step has the
// rule, its place and a reason.
func TestFilter(t *testing.T) {
	t.Parallel()
	tell := teller(true)
	inet := func(s *nftrace.Step) { s.Family = "inet" }
	tell.Event(ev(7, policy.Entered))
	var got []string
	for _, c := range []struct {
		step   nftrace.Step
		rule   string
		number int
	}{
		{step(1, "raw", "PREROUTING", 0, "accept"), "", 0},
		{step(2, "filter", "MK-1", 12, "drop"), "-j DROP", 7},
		{step(1, "security", "MK-1", 9, "return"), "-o up0 -j RETURN", 5},
		{step(1, "fw", "forward", 3, "accept", inet), "", 0},
		{step(1, "mine", "forward", 3, "continue"), "", 0},
		{step(1, "filter", "FORWARD", 0, "drop"), "", 0},
	} {
		e := tell.Filter(c.step, c.rule, c.number)
		got = append(got, strings.Join([]string{string(rune('0' + e.Packet)), e.Hook, e.Name, e.Place(), e.Verdict}, " "))
	}
	want := []string{
		"2 iptables iptables pass raw PREROUTING policy accept",
		"3 iptables iptables drop filter MK-1 7: -j DROP drop",
		"2 iptables iptables match security MK-1 5: -o up0 -j RETURN return",
		"2 iptables iptables pass inet fw forward handle 3 accept",
		"2 iptables iptables match ip mine forward handle 3 continue",
		"2 iptables iptables drop filter FORWARD policy drop",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if e, _ := tell.Event(ev(8, policy.Entered)); e.Packet != 4 {
		t.Errorf("the next packet at a program is number %d", e.Packet)
	}
	e := tell.Filter(step(5, "filter", "MK-1", 1, "accept"), "-j ACCEPT", 1)
	if e.TCPFlags != "SYN" || e.Bytes != 60 || e.SourcePort != 40000 || !e.At.Equal(time.Unix(150, 0)) || e.Code != uint16(policy.FilterPass) {
		t.Errorf("%+v", e)
	}
}

// The verdict, with what iptables did to the last packet.
func TestEndWithIPTables(t *testing.T) {
	t.Parallel()
	type told struct {
		program *datapath.TraceEvent
		step    *nftrace.Step
	}
	program := func(e datapath.TraceEvent) told { return told{program: &e} }
	rule := func(s nftrace.Step) told { return told{step: &s} }
	stack := program(ev(1, policy.ToHostStack, out(datapath.Stack)))
	arrives := program(ev(2, policy.ToEndpoint, out(datapath.Delivered)))
	drop, pass := rule(step(1, "filter", "MK-1", 2, "drop")), rule(step(2, "filter", "MK-1", 3, "accept"))
	for _, c := range []struct {
		name    string
		told    []told
		toOurs  bool
		stops   string
		verdict api.Outcome
		because string
	}{
		{"dropped on its way", []told{stack, drop}, false, "", api.Dropped, "iptables: filter MK-1 2: r"},
		{"dropped, and the next one is not", []told{stack, drop, pass}, false, "", api.Passes, "to the host stack"},
		{"dropped, before the pump says something", []told{stack, drop}, false, "pump", api.Dropped, "iptables: filter"},
		{"dropped, and a later one arrives", []told{drop, arrives}, true, "", api.Passes, "to the endpoint"},
		{"passed, and did not come out", []told{stack, pass}, true, "", api.Unknown, "went to the host stack"},
		{"its answer is dropped", []told{stack, pass, rule(step(3, "filter", "MK-1-OUT", 4, "drop", back))}, false, "", api.Dropped, "the answer: iptables: filter MK-1-OUT 4: r"},
		{"no program: dropped", []told{drop}, false, "", api.Dropped, "iptables: filter MK-1 2: r"},
		{"no program: passed", []told{pass}, false, "", api.Passes, "iptables: filter MK-1 3: r"},
		{"no program: passed, but not the pump", []told{pass}, false, "pump: mtu", api.Dropped, "pump: mtu"},
		{"no program: only answers", []told{rule(step(2, "filter", "MK-1-OUT", 3, "accept", back))}, false, "", api.Passes, "only answers were seen: iptables: "},
		{"no program: the answer is dropped", []told{pass, rule(step(2, "filter", "MK-1-OUT", 3, "drop", back))}, false, "", api.Dropped, "the answer: iptables: "},
		{"no program: no route", []told{rule(step(1, "raw", "PREROUTING", 0, "accept"))}, false, "", api.Unknown, "came no further than raw PREROUTING"},
		{"nothing", nil, false, "", api.Unknown, "no packet of the flow came"},
	} {
		tell := teller(c.toOurs)
		for _, x := range c.told {
			if x.program != nil {
				tell.Event(*x.program)
			} else {
				tell.Filter(*x.step, "r", int(x.step.Handle))
			}
		}
		end := tell.End(time.Unix(200, 0), 0, c.stops)
		if end.Verdict != c.verdict || !strings.Contains(end.Because, c.because) || end.Events != len(c.told) {
			t.Errorf("%s: %s: %s (%d events)", c.name, end.Verdict, end.Because, end.Events)
		}
	}
}
