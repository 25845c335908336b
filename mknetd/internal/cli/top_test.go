package cli

import (
	"strings"
	"testing"
	"time"

	specapi "mknet/spec/api"
	"mknet/spec/endpoint"
)

func TestRates(t *testing.T) {
	made := time.Unix(1000, 0)
	ep := sample("aa112233445566778899aabbccddeeff", endpoint.Ready)
	ep.CreatedAt = made
	at := func(seconds int, packets uint64) topRow {
		return topRow{ep: ep, now: carried{at: made.Add(time.Duration(seconds) * time.Second), known: true, fromPackets: packets, toBytes: 10 * packets}}
	}
	first := at(10, 100)
	first.since(topRow{})
	second := at(12, 160)
	second.since(first)
	same := at(12, 160)
	same.since(second)
	unknown := topRow{ep: ep}
	unknown.since(second)
	for _, c := range []struct {
		name             string
		r                topRow
		packets, toBytes float64
	}{
		{"the first page: since it was made", first, 10, 100},
		{"the next page", second, 30, 300},
		{"no new report: the last rates hold", same, 30, 300},
		{"nobody knows", unknown, 0, 0},
	} {
		if c.r.fromPackets != c.packets || c.r.toBytes != c.toBytes {
			t.Errorf("%s: %v packets and %v bytes per second, want %v and %v", c.name, c.r.fromPackets, c.r.toBytes, c.packets, c.toBytes)
		}
	}
}

func TestCarriedByAPod(t *testing.T) {
	s := carriedOf(specapi.CountersReply{Path: []specapi.PathCount{
		{Outcome: "peer", Packets: 1, Bytes: 10},
		{Outcome: "stack", Packets: 2, Bytes: 20},
		{Outcome: "delivered", Packets: 4, Bytes: 40},
		{Outcome: "drop-mac", Packets: 8},
		{Outcome: "arp", Packets: 16},
	}}, true)
	if s.fromPackets != 3 || s.fromBytes != 30 || s.toPackets != 4 || s.toBytes != 40 || s.drops != 8 {
		t.Errorf("got %+v", s)
	}
}

func TestTop(t *testing.T) {
	d := &daemon{endpoints: []endpoint.Endpoint{
		sample("aa112233445566778899aabbccddeeff", endpoint.Ready), sample("bb112233445566778899aabbccddeeff", endpoint.Deleting),
	}}
	d.counters = &specapi.CountersReply{
		Generation: d.endpoints[0].Generation, ReportedAt: time.Unix(10, 0).UTC(),
		Counters: specapi.Counters{RxPackets: 100, RxBytes: 500000, TxPackets: 20, RTTNanoseconds: 1500000, Drops: []specapi.Drops{{Reason: "mtu", Packets: 3}}},
	}
	flags := started(t, d)
	page := func(args ...string) (int, string, string) {
		return run(t, Program{}, append(append([]string{"top"}, args...), flags...)...)
	}
	status, out, errs := page("--pages", "1")
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if status != ExitOK || len(lines) != 3 || strings.Contains(out, clearScreen) {
		t.Fatalf("status %d, %s\n%s", status, errs, out)
	}
	if got := strings.Join(strings.Fields(lines[1]), " "); got != "aa1122334455 READY n/caa/eth0 172.30.0.30 10 50k 2 0 3 1.5ms" {
		t.Errorf("the busy one: %s", got)
	}
	if got := strings.Join(strings.Fields(lines[2]), " "); got != "bb1122334455 DELETING n/cbb/eth0 172.30.0.30 - - - - - -" {
		t.Errorf("the unknown one: %s", got)
	}
	if status, out, _ := page("--pages", "2", "--interval", "100ms", "--sort", "state", "--limit", "1"); status != ExitOK ||
		strings.Count(out, clearScreen) != 2 || strings.Count(out, "and 1 more") != 2 || !strings.Contains(out, "DELETING") || strings.Contains(out, "READY") {
		t.Errorf("two pages: status %d\n%s", status, out)
	}
	for _, args := range [][]string{{"--sort", "colour"}, {"--interval", "1ms"}} {
		if status, _, errs := page(args...); status != ExitUsage || !strings.Contains(errs, args[0]) {
			t.Errorf("%v: status %d, %s", args, status, errs)
		}
	}
}
