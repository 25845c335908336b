package datapath

import (
	"context"
	"fmt"
	"testing"
	"time"

	"mknet/tests/netlab"
)

// A queueing discipline that somebody puts on a pod's host link sends the pod's
// packets through the host stack, in both directions, and they go the short way
// again when it is taken away; a clsact is not one.
func TestShapedLinkGoesByTheStack(t *testing.T) {
	d := open(t, Config{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	changed, err := d.FollowShaping(ctx)
	if err != nil {
		t.Fatal(err)
	}
	followed := make(chan struct{})
	a, b := startPod(t, d, 2, 1500), startPod(t, d, 3, 1500)
	pods := map[string]*livePod{a.HostLink: a, b.HostLink: b}
	heard := make(chan string, 16)
	go func() {
		defer close(followed)
		for name := range changed {
			heard <- name
		}
	}()
	follow := func() {
		t.Helper()
		select {
		case name := <-heard:
			if pods[name] == nil {
				t.Fatalf("a change of %q was reported, want one of the pods' links", name)
			}
			pods[name].heal(t)
		case <-time.After(patience):
			t.Fatal("no change was reported")
		}
	}
	ways := func(what string, want Outcome) {
		t.Helper()
		before := []Counters{a.counters(t), b.counters(t)}
		a.ns.Run(t, "ping", "-c2", "-i0.2", "-W20", b.Address.String())
		for i, after := range []Counters{a.counters(t), b.counters(t)} {
			if got := after[want].Packets - before[i][want].Packets; got < 2 {
				t.Errorf("%s: %d packets of pod %d went by %s, want 2 and more", what, got, i, want)
			}
		}
	}
	short := Peer
	if d.cfg.NoPeer {
		short = Redirect
	}
	ways("at first", short)
	for _, p := range []*livePod{a, b} {
		for _, qdisc := range [][]string{{"root", "tbf", "rate", "100mbit", "burst", "100kb", "latency", "50ms"}, {"ingress"}} {
			if qdisc[0] == "ingress" && d.Way() == Clsact {
				continue // our own filters hang there
			}
			netlab.Run(t, "tc", append([]string{"qdisc", "add", "dev", p.HostLink}, qdisc...)...)
			follow()
			ways(fmt.Sprint(qdisc[0], " on ", p.HostLink), Stack)
			netlab.Run(t, "tc", "qdisc", "del", "dev", p.HostLink, qdisc[0])
			follow()
			ways("without it", short)
		}
	}
	cancel()
	<-followed
}
