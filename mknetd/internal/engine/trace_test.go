package engine

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"mknet/mknetd/internal/ipt"
	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

// What iptables and the pump have counted meanwhile, and what of it stops a packet.
func TestCountedMeanwhile(t *testing.T) {
	t.Parallel()
	rule := func(number int, text string, packets uint64) ipt.Count {
		return ipt.Count{Table: "filter", Chain: "MK-1", Number: number, Rule: text, Packets: packets}
	}
	before := []ipt.Count{rule(1, "-s x -j ACCEPT", 5), rule(2, "-j DROP", 7)}
	drops := []api.Drops{{Reason: "mtu", Packets: 2}}
	for _, c := range []struct {
		name  string
		sends bool
		rules []ipt.Count
		drops []api.Drops
		notes []string
		stops string
	}{
		{"nothing", true, before, drops, nil, ""},
		{"an ACCEPT", true, []ipt.Count{rule(1, "-s x -j ACCEPT", 6), before[1]}, drops, []string{"filter MK-1 1: -s x -j ACCEPT: 1 packets of all flows of 172.30.0.2"}, ""},
		{"a DROP", true, []ipt.Count{before[0], rule(2, "-j DROP", 9)}, drops, []string{"filter MK-1 2: -j DROP: 2 packets"}, "iptables filter MK-1 2"},
		{"another rule in its place", true, []ipt.Count{before[0], rule(2, "-j REJECT", 9)}, drops, nil, ""},
		{"the pump, of what it sent", true, before, []api.Drops{{Reason: "mtu", Packets: 2}, {Reason: "source", Packets: 1}}, []string{"1 packets were dropped: source"}, "pump: of what the child 172.30.0.2 sent"},
		{"the pump, of the answer", false, before, []api.Drops{{Reason: "mtu", Packets: 3}}, []string{"1 packets were dropped: mtu"}, ""},
	} {
		w := watched{ep: endpoint.Endpoint{Address: netip.MustParseAddr("172.30.0.2")}, sends: c.sends, rules: before, drops: drops}
		notes, stops := counted(w, c.rules, c.drops)
		ok := len(notes) == len(c.notes) && strings.HasPrefix(stops, c.stops) && (stops == "") == (c.stops == "")
		for i := range min(len(notes), len(c.notes)) {
			ok = ok && strings.Contains(notes[i].text, c.notes[i])
		}
		if !ok {
			t.Errorf("%s: %v, stops %q; want %v, %q", c.name, notes, stops, c.notes, c.stops)
		}
	}
}

func TestTraceTerms(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		req   api.TraceRequest
		proto policy.Protocol
		ttl   time.Duration
		err   string
	}{
		{api.TraceRequest{}, policy.ICMP, 10 * time.Second, ""},
		{api.TraceRequest{Port: 80}, policy.TCP, 10 * time.Second, ""},
		{api.TraceRequest{Protocol: "UDP", TimeoutSeconds: 600, Probe: true, Port: 1}, policy.UDP, 600 * time.Second, ""},
		{api.TraceRequest{Protocol: "47"}, policy.GRE, 10 * time.Second, ""},
		{api.TraceRequest{Protocol: "all"}, 0, 0, `protocol "all"`},
		{api.TraceRequest{TimeoutSeconds: 601}, 0, 0, "must be 1 to 600"},
		{api.TraceRequest{TimeoutSeconds: -1}, 0, 0, "must be 1 to 600"},
		{api.TraceRequest{Protocol: "gre", Port: 1}, 0, 0, "gre has no ports"},
		{api.TraceRequest{Protocol: "sctp", Probe: true, Port: 1}, 0, 0, "can be icmp, tcp or udp"},
		{api.TraceRequest{Protocol: "tcp", Probe: true}, 0, 0, "needs a port"},
	} {
		proto, ttl, err := traceTerms(c.req)
		if c.err == "" && (err != nil || proto != c.proto || ttl != c.ttl) || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("%+v: %s, %s, %v", c.req, proto, ttl, err)
		}
	}
}
