package topo

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"mknet/mknetd/internal/netns"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

func host(t *testing.T) *Host {
	t.Helper()
	h, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return h
}

func TestOwned(t *testing.T) {
	b := newBench(t)
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	b.build(t, ep)
	g := endpoint.NewGeneration()
	made, err := netns.Make(g)
	if err != nil {
		t.Fatal(err)
	}
	made.Close()
	netlab.Run(t, "ip", "link", "add", "mkvpn0", "type", "veth", "peer", "name", "mkvpn1")
	defer netlab.Run(t, "ip", "link", "del", "mkvpn0")
	got, err := b.Owned(t.Context())
	want := []Owned{{KindVeth, ep.HostLink, ep.Generation}, {KindNetns, g.OwnedNamespace(), g}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("Owned() = %v, %v, want %v", got, err, want)
	}
	stranger := Owned{KindVeth, "mkvpn0", g}
	for _, o := range append(got, stranger) {
		for range 2 {
			if err := b.RemoveOwned(t.Context(), o); err != nil {
				t.Error(err)
			}
		}
	}
	netlab.Run(t, "ip", "link", "show", "mkvpn0")
	if got, err := b.Owned(t.Context()); err != nil || len(got) != 0 {
		t.Errorf("Owned() after removal = %v, %v", got, err)
	}
}

func TestEgress(t *testing.T) {
	netlab.Clean(t)
	h := host(t)
	if _, err := h.Egress(""); !errors.Is(err, ErrNoEgress) {
		t.Errorf("Egress without a default route = %v, want %v", err, ErrNoEgress)
	}
	if _, err := h.Egress("up0"); !errors.Is(err, ErrNoEgress) {
		t.Errorf("Egress of a missing interface = %v, want %v", err, ErrNoEgress)
	}
	netlab.Uplink(t, "1400")
	hostAddr := netip.MustParseAddr(netlab.HostAddr)
	for _, name := range []string{"", "up0"} {
		e, err := h.Egress(name)
		if err != nil || e.Name != "up0" || e.Addr != hostAddr || e.MTUBytes != 1400 || e.Index == 0 {
			t.Errorf("Egress(%q) = %+v, %v", name, e, err)
		}
	}
	// A better metric wins, but not on an interface that is down; a preferred
	// source is taken.
	netlab.Run(t, "ip", "link", "add", "up1", "mtu", "1300", "type", "veth", "peer", "name", "up1p")
	defer netlab.Run(t, "ip", "link", "del", "up1")
	netlab.Run(t, "ip", "addr", "add", "192.0.2.10/24", "dev", "up1")
	netlab.Run(t, "ip", "addr", "add", "192.0.2.11/24", "dev", "up1")
	netlab.Run(t, "ip", "route", "del", "default")
	netlab.Run(t, "ip", "route", "add", "default", "via", netlab.InternetAddr, "dev", "up0", "metric", "100")
	netlab.Run(t, "ip", "link", "set", "up1p", "up")
	netlab.Run(t, "ip", "link", "set", "up1", "up")
	netlab.Run(t, "ip", "route", "add", "default", "via", "192.0.2.1", "dev", "up1", "metric", "50", "src", "192.0.2.11")
	if e, err := h.Egress(""); err != nil || e.Name != "up1" || e.Addr != netip.MustParseAddr("192.0.2.11") || e.MTUBytes != 1300 {
		t.Errorf("Egress with two defaults = %+v, %v, want up1 with 192.0.2.11", e, err)
	}
	netlab.Run(t, "ip", "link", "set", "up1", "down")
	if e, err := h.Egress(""); err != nil || e.Name != "up0" {
		t.Errorf("Egress with the better one down = %+v, %v, want up0", e, err)
	}
	netlab.Run(t, "ip", "route", "add", "unreachable", "default", "metric", "1")
	if e, err := h.Egress(""); err != nil || e.Name != "up0" {
		t.Errorf("Egress beside an unreachable default = %+v, %v, want up0", e, err)
	}
	netlab.Run(t, "ip", "route", "del", "unreachable", "default", "metric", "1")
}

func TestWatchEgress(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	changed, err := b.WatchEgress(ctx, func(err error) { t.Errorf("the watch broke: %v", err) })
	if err != nil {
		t.Fatal(err)
	}
	expect := func(what string) {
		t.Helper()
		select {
		case _, open := <-changed:
			if !open {
				t.Fatalf("after %s: the channel is closed", what)
			}
		case <-time.After(30 * time.Second):
			t.Errorf("no report of %s", what)
		}
	}
	// Endpoints come and go without a report.
	for range 3 {
		ep := record(t, endpoint.NewGeneration(), 0, "eth0")
		for _, o := range b.all(ep) {
			if err := o.Ensure(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		b.tearDown(t, ep)
	}
	select {
	case <-changed:
		t.Error("an endpoint was reported as a change of the host")
	case <-time.After(watchLatest + time.Second):
	}
	for _, tt := range [][]string{
		{"ip", "link", "set", "up0", "mtu", "1390"},
		{"ip", "addr", "add", "192.0.2.7/32", "dev", "up0"},
		{"ip", "route", "add", "198.18.0.0/24", "via", netlab.InternetAddr},
		{"ip", "route", "del", "default"},
	} {
		netlab.Run(t, tt[0], tt[1:]...)
		expect(strings.Join(tt, " "))
	}
	cancel()
	for range changed { // ends: the channel is closed
	}
}

// A subscription that breaks is made again, and what was missed meanwhile is looked at.
func TestWatchEgressGoesOn(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w, err := b.subscribe(ctx)
	if err != nil {
		t.Fatal(err)
	}
	events, broken := make(chan struct{}, 1), make(chan error, 10)
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.watch(ctx, w, events, func(err error) { broken <- err })
	}()
	expect := func(what string) {
		t.Helper()
		select {
		case <-events:
		case <-time.After(30 * time.Second):
			t.Fatalf("no report of %s", what)
		}
	}
	w.socket.Close()
	if err := <-broken; err == nil || !strings.Contains(err.Error(), "watch the egress") {
		t.Errorf("broken: %v", err)
	}
	expect("the new subscription")
	netlab.Run(t, "ip", "addr", "add", "192.0.2.7/32", "dev", "up0")
	expect("an address")
	cancel()
	<-done
}

func TestOverlaps(t *testing.T) {
	b := newBench(t)
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	pools := []Range{{"child pool", endpoint.DefaultPools.Child}, {"transit pool", endpoint.DefaultPools.Transit}}
	check := func(name string, want ...string) {
		t.Helper()
		got, err := b.Overlaps(pools)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: Overlaps = %q, %v, want %q", name, got, err, want)
		}
	}
	check("an empty host")
	if err := b.Conflict(ep); err != nil {
		t.Errorf("Conflict on an empty host = %v", err)
	}
	b.build(t, ep)
	check("our own endpoint")
	if err := b.Conflict(ep); err != nil {
		t.Errorf("Conflict with itself = %v", err)
	}
	next := record(t, endpoint.NewGeneration(), 1, "eth0")
	netlab.Run(t, "ip", "route", "add", "0.0.0.0/1", "via", netlab.InternetAddr)
	netlab.Run(t, "ip", "route", "add", "128.0.0.0/1", "via", netlab.InternetAddr)
	check("the two halves of a VPN")

	netlab.Run(t, "ip", "route", "add", "172.16.0.0/12", "via", netlab.InternetAddr)
	check("a wider route", "child pool 172.30.0.0/16 overlaps route 172.16.0.0/12 via 198.51.100.1 dev up0")
	if err := b.Conflict(next); !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), "172.16.0.0/12 via 198.51.100.1 dev up0") {
		t.Errorf("Conflict under a wider route = %v", err)
	}
	netlab.Run(t, "ip", "route", "del", "172.16.0.0/12")

	netlab.Run(t, "ip", "route", "add", "172.30.7.0/24", "dev", "up0", "table", "52")
	check("another table", "child pool 172.30.0.0/16 overlaps route 172.30.7.0/24 dev up0 table 52")
	netlab.Run(t, "ip", "route", "flush", "table", "52")

	netlab.Run(t, "ip", "route", "add", "blackhole", "100.100.0.0/16")
	check("a blackhole", "transit pool 100.64.0.0/10 overlaps route blackhole 100.100.0.0/16")
	netlab.Run(t, "ip", "route", "del", "blackhole", "100.100.0.0/16")

	netlab.Run(t, "ip", "addr", "add", "172.30.9.1/24", "dev", "up0")
	check("an address", "child pool 172.30.0.0/16 overlaps address 172.30.9.1/24 of up0")
	netlab.Run(t, "ip", "addr", "del", "172.30.9.1/24", "dev", "up0")

	netlab.Run(t, "ip", "link", "add", "mkvpn0", "type", "veth", "peer", "name", "mkvpn1")
	defer netlab.Run(t, "ip", "link", "del", "mkvpn0")
	netlab.Run(t, "ip", "addr", "add", "100.64.9.1/24", "dev", "mkvpn0")
	check("a foreign mkv link", "transit pool 100.64.0.0/10 overlaps address 100.64.9.1/24 of mkvpn0")
}

// An endpoint that comes or goes while the host is read is never taken for foreign.
func TestOverlapsOfEndpointsUnderWay(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	pools := []Range{{"child pool", endpoint.DefaultPools.Child}}
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	netlab.Run(t, "ip", "addr", "add", "172.30.9.1/24", "dev", "up0")
	b.build(t, ep)
	seen, err := b.reached(ctx)
	if err != nil {
		t.Fatal(err)
	}
	foreign := []string{"child pool 172.30.0.0/16 overlaps address 172.30.9.1/24 of up0"}
	for _, now := range []string{"there", "gone"} {
		if got, err := seen.foreign(ctx, pools); err != nil || !slices.Equal(got, foreign) {
			t.Errorf("with an endpoint that is %s: %q, %v, want %q", now, got, err, foreign)
		}
		if now == "there" {
			b.tearDown(t, ep)
		}
	}
}
