package datapath

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

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

// A change of the shaping is reported also where the disciplines could not be listed
// when it came, or where nobody was subscribed to hear of it.
func TestShapingIsAskedForAgain(t *testing.T) {
	var log bytes.Buffer
	d := open(t, Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	pod := startPod(t, d, 2, 1500)
	list := d.listQdiscs
	var refuse atomic.Bool
	var listed, refused atomic.Int32
	d.listQdiscs = func() ([]netlink.Qdisc, error) {
		if refuse.Load() {
			refused.Add(1)
			return nil, unix.ENOBUFS
		}
		defer listed.Add(1)
		return list()
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	changed, err := d.FollowShaping(ctx)
	if err != nil {
		t.Fatal(err)
	}
	follow := func(what string) {
		t.Helper()
		select {
		case name := <-changed:
			if name != pod.HostLink {
				t.Fatalf("%s: %q was reported, want %q", what, name, pod.HostLink)
			}
		case <-time.After(patience):
			t.Fatalf("%s: no change was reported", what)
		}
	}
	reaches := func(what string, n *atomic.Int32, want int32) {
		t.Helper()
		netlab.Eventually(t, patience, func() error {
			if got := n.Load(); got < want {
				return fmt.Errorf("%s: %d times, want %d", what, got, want)
			}
			return nil
		})
	}
	reaches("listed at the start", &listed, 1)
	refuse.Store(true)
	netlab.Run(t, "tc", "qdisc", "add", "dev", pod.HostLink, "root", "tbf", "rate", "100mbit", "burst", "100kb", "latency", "50ms")
	reaches("refused", &refused, 2)
	refuse.Store(false)
	follow("a list that was refused")

	breakSubscription(t)
	netlab.Run(t, "tc", "qdisc", "del", "dev", pod.HostLink, "root")
	follow("a subscription that broke")

	cancel()
	for name := range changed {
		t.Errorf("%q was reported once more", name)
	}
	if got := strings.Count(log.String(), "asked for again"); got != 2 {
		t.Errorf("logged %d times, want once for each cause:\n%s", got, &log)
	}
}

// breakSubscription sends what is no netlink message to the socket of this namespace
// that hears of queueing disciplines, and waits until it is closed.
func breakSubscription(t *testing.T) {
	t.Helper()
	// subscribed has the sockets by inode with their port numbers.
	subscribed := func() map[string]uint32 {
		text, err := os.ReadFile("/proc/thread-self/net/netlink")
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]uint32{}
		for line := range strings.Lines(string(text)) {
			var port uint32 // columns: sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode
			if w := strings.Fields(line); len(w) == 10 && w[1] == fmt.Sprint(unix.NETLINK_ROUTE) && w[3] == fmt.Sprintf("%08x", 1<<(unix.RTNLGRP_TC-1)) {
				if _, err := fmt.Sscan(w[2], &port); err != nil {
					t.Fatal(err)
				}
				out[w[9]] = port
			}
		}
		return out
	}
	before := subscribed()
	if len(before) != 1 {
		t.Fatalf("subscribed are %v, want one socket", before)
	}
	for inode, port := range before {
		s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(s)
		if err := unix.Sendto(s, []byte{0}, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: port}); err != nil {
			t.Fatal(err)
		}
		netlab.Eventually(t, patience, func() error {
			if _, open := subscribed()[inode]; open {
				return fmt.Errorf("the subscription %s stands", inode)
			}
			return nil
		})
	}
}
