package crash

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"mknet/spec/client"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// startUp is a daemon that starts after all that can have happened before: see
// wreck. It dies at every step of the repair.
var startUp = story{name: "mknetd-start-up", play: func(t *testing.T, n *node.Node, v *victim, o *outcome) {
	w := newWreck(t, n)
	err := n.TryStart(t, v.env("serve")...)
	if err == nil {
		// What is left to do now is done beside the calls.
		netlab.Eventually(t, node.Patience, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), node.Patience)
			defer cancel()
			list, listErr := n.Client(t).Endpoints(ctx, client.Filter{})
			if err = listErr; err != nil {
				return nil // it died
			}
			if len(list) > len(w.keep) {
				return fmt.Errorf("%d endpoints", len(list))
			}
			return nil
		})
	}
	switch {
	case v.at == nil && err != nil:
		t.Fatalf("the start without a crash: %v", err)
	case err == nil:
		n.Kill(t)
	default:
		n.WaitDead(t)
		o.Reached = true
	}
	w.namespaceReturns(t)
	n.Start(t)
	netlab.Eventually(t, node.Patience, func() error {
		if left := len(n.List(t)); left > len(w.keep) {
			return fmt.Errorf("%d endpoints, want only %v", left, w.keep)
		}
		return nil
	})
	judge(t, n, o, w.keep, func() { w.caller.deleteAll(t, o) })
	w.orphansGone(t, o)
}}

// wreck is what a start finds: a READY endpoint with a living shim, whose route,
// rules and link somebody spoiled; one whose namespace is gone, one whose namespace
// is out of sight for a while; one with a queued DEL; one in DELETING, one in
// ALLOCATING; and a link and rules that no record knows.
type wreck struct {
	caller *caller
	keep   []endpoint.Generation
	hidden *netlab.Namespace
	held   *os.File // keeps the hidden namespace alive
}

const orphan = "0badc0de0badc0de0badc0de0badc0de"

func newWreck(t *testing.T, n *node.Node) *wreck {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), storyBudget)
	defer cancel()
	c := newCaller(t, n)
	// The sixth ADD dies between its objects.
	n.Start(t, "MKNET_CRASH="+middleObject(ctx, t, n)+"#6")
	daemon := n.Client(t)
	add := func(id string, ns *netlab.Namespace) endpoint.Endpoint {
		t.Helper()
		ep, err := c.addTo(ctx, daemon, ns, id, "eth0")
		if err != nil {
			t.Fatal(err)
		}
		return ep
	}
	spoiled, gone := add("spoiled", netlab.New(t)), netlab.New(t)
	w := &wreck{caller: c, hidden: netlab.New(t)}
	add("gone", gone)
	hidden := add("hidden", w.hidden)
	w.keep = []endpoint.Generation{spoiled.Generation, hidden.Generation}
	queuedIn := netlab.New(t)
	queued := n.Add(t, "queued", queuedIn, "eth0")
	deleting := add("deleting", netlab.New(t))
	if err := c.attachShim(ctx, t, daemon, spoiled.Generation, endpoint.Sandbox{ID: "s1", Generation: "g1"}); err != nil {
		t.Fatal(err)
	}
	// A foreign rule holds a chain, so that its endpoint stays in DELETING.
	foreign := []string{"FORWARD", "-i", "nobody0", "-j", deleting.Chain}
	netlab.Run(t, "iptables", append([]string{"-A"}, foreign...)...)
	if _, err := daemon.DeleteEndpoint(ctx, deleting.Generation); err == nil {
		t.Fatal("a DEL succeeded though a foreign rule holds the chain")
	}
	if _, err := c.addTo(ctx, daemon, netlab.New(t), "allocating", "eth0"); err == nil {
		t.Fatal("the sixth ADD did not end mknetd")
	}
	n.WaitDead(t)
	netlab.Run(t, "iptables", append([]string{"-D"}, foreign...)...)

	if err := n.Del(t, queued); err != nil {
		t.Fatalf("DEL without mknetd: %v", err)
	}
	gone.Remove(t)
	netlab.Run(t, "ip", "route", "del", spoiled.Subnet.String())
	netlab.Run(t, "iptables", "-F", spoiled.Chain)
	netlab.Run(t, "iptables", "-t", "nat", "-F", spoiled.Chain)
	netlab.Run(t, "ip", "link", "set", spoiled.HostLink, "down")
	w.held = w.hidden.Open(t)
	t.Cleanup(func() { w.held.Close() })
	netlab.Run(t, "ip", "netns", "del", w.hidden.Name)
	makeOrphans(t)
	return w
}

// middle is a point among the objects of an ADD, after the devices and some of the
// rules, once it has been looked up.
var middle string

// middleObject looks at the trace of one ADD: the table of objects numbers them.
func middleObject(ctx context.Context, t *testing.T, n *node.Node) string {
	t.Helper()
	if middle != "" {
		return middle
	}
	trace := filepath.Join(t.TempDir(), "trace")
	n.Start(t, "MKNET_CRASH_TRACE="+trace)
	c := newCaller(t, n)
	ep, err := c.add(ctx, n.Client(t), "eth0")
	if err == nil {
		err = c.remove(ctx, n.Client(t), ep.Generation)
	}
	if err != nil {
		t.Fatal(err)
	}
	n.Stop(t)
	reset(t, n)
	text, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	var rules []string
	for line := range strings.Lines(string(text)) {
		point, _, visit := strings.Cut(strings.TrimSpace(line), "#")
		if visit && strings.HasPrefix(point, "engine.object-made/") && strings.HasSuffix(point, "-iptables-"+endpoint.InHost) {
			rules = append(rules, point)
		}
	}
	if len(rules) < 2 {
		t.Fatalf("an ADD made the rules %v, want some tables of them", rules)
	}
	middle = rules[len(rules)/2]
	return middle
}

func makeOrphans(t *testing.T) {
	t.Helper()
	gen, err := endpoint.ParseGeneration(orphan)
	if err != nil {
		t.Fatal(err)
	}
	netlab.Run(t, "ip", "link", "add", gen.HostLink(), "type", "veth", "peer", "name", "mkhost0", "netns", netlab.New(t).Name)
	netlab.Run(t, "ip", "link", "set", gen.HostLink(), "alias", gen.Alias())
	netlab.Run(t, "iptables", "-N", gen.Chain())
	netlab.Run(t, "iptables", "-A", gen.Chain(), "-m", "comment", "--comment", gen.Alias(), "-j", "DROP")
}

// namespaceReturns gives the hidden namespace its name back.
func (w *wreck) namespaceReturns(t *testing.T) {
	t.Helper()
	if err := os.WriteFile(w.hidden.Path(), nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", w.held.Fd()), w.hidden.Path(), "", unix.MS_BIND, ""); err != nil {
		t.Fatalf("mount the namespace at its old path: %v", err)
	}
}

func (w *wreck) orphansGone(t *testing.T, o *outcome) {
	t.Helper()
	if rules := node.Rules(t, orphan); len(rules) > 0 {
		o.fault(clean, "rules of an orphan are left: %v", rules)
	}
	if links := netlab.Run(t, "ip", "link"); strings.Contains(links, orphan) {
		o.fault(clean, "a link of an orphan is left:\n%s", links)
	}
}
