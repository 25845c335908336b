package e2e

import (
	"errors"
	"fmt"
	"iter"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mknet/spec/api"
	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// queued counts the deferred DELs in the fixed folder.
func queued(t *testing.T, n *node.Node) int {
	t.Helper()
	q, err := delqueue.OpenExisting(n.DeferredDir)
	if errors.Is(err, os.ErrNotExist) {
		return 0
	}
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	items, err := q.List()
	if err != nil {
		t.Fatal(err)
	}
	return len(items)
}

// allReplayed waits until no DEL is queued.
func allReplayed(t *testing.T, n *node.Node, within time.Duration) {
	t.Helper()
	netlab.Eventually(t, within, func() error {
		if left := queued(t, n); left != 0 {
			return fmt.Errorf("%d DELs are still queued", left)
		}
		return nil
	})
}

// Hundreds of DELs were queued while the daemon was away, beside endpoints that
// are to live.
func TestManyDeferredDels(t *testing.T) {
	const live, dead = 50, 500
	n := node.New(t)
	pod := netlab.New(t)
	var keep, drop []endpoint.Endpoint
	for i := range live {
		keep = append(keep, n.Add(t, fmt.Sprintf("live%d", i), netlab.New(t), "eth0"))
	}
	drop = append(drop, n.Add(t, "dead0", pod, "eth0"))
	n.Stop(t)
	if err := n.Del(t, drop[0]); err != nil {
		t.Fatal(err)
	}
	q, err := delqueue.Open(n.DeferredDir)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	for i := 1; i < dead; i++ { // as mk-cni writes them: of endpoints that are gone
		err := q.Enqueue(delqueue.Entry{
			Attachment: endpoint.Attachment{Network: node.Network, ContainerID: fmt.Sprintf("dead%d", i), IfName: "eth0"},
			Generation: endpoint.NewGeneration(), BootID: keep[0].Namespace.BootID, Daemon: "unix://" + n.Socket, QueuedAt: time.Now(),
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	n.Start(t)
	allReplayed(t, n, 2*node.Patience)
	if n.Endpoint(t, drop[0].Generation) != nil {
		t.Error("a deferred DEL was lost")
	}
	for _, ep := range keep {
		if n.Endpoint(t, ep.Generation) == nil {
			t.Errorf("endpoint %s of %s was lost", ep.Generation, ep.Attachment)
		}
	}
}

// While hundreds of DELs wait no ADD makes more of it: somebody else works on them
// all, as mknetd itself would when it is slow.
func TestDeferredDelsGoFirst(t *testing.T) {
	const waiting = 257
	n := node.New(t)
	kept := n.Add(t, "kept", netlab.New(t), "eth0")
	n.Stop(t)
	q, err := delqueue.Open(n.DeferredDir)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	enqueue := func(i int, daemon string) endpoint.Attachment {
		att := endpoint.Attachment{Network: node.Network, ContainerID: fmt.Sprintf("gone%d", i), IfName: "eth0"}
		if err := q.Enqueue(delqueue.Entry{
			Attachment: att, Generation: endpoint.NewGeneration(), BootID: kept.Namespace.BootID, Daemon: daemon, QueuedAt: time.Now(),
		}); err != nil {
			t.Fatal(err)
		}
		return att
	}
	var claims []*delqueue.Claim
	for i := range waiting {
		enqueue(waiting+i, "unix:///run/another.sock") // of no concern to ours
		next, stop := iter.Pull2(q.ClaimsOf(enqueue(i, "unix://"+n.Socket)))
		defer stop()
		c, err, _ := next()
		if err != nil || c == nil {
			t.Fatalf("claim %d: %v", i, err)
		}
		claims = append(claims, c)
	}
	n.Start(t)
	pod := netlab.New(t)
	netlab.Eventually(t, node.Patience, func() error {
		if _, err := n.CNI(t, node.Call{Verb: "STATUS"}); err == nil {
			return errors.New("STATUS is 0")
		}
		return nil
	})
	_, err = n.CNI(t, node.Call{Verb: "STATUS"})
	node.WantCode(t, err, 50, "deferred-dels")
	_, err = n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c1", Netns: pod.Path(), IfName: "eth0"})
	node.WantCode(t, err, 11, "deferred DELs wait")
	if err := n.Check(t, kept); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	for _, c := range claims {
		if err := c.Settle(); err != nil {
			t.Fatal(err)
		}
	}
	netlab.Eventually(t, node.Patience, func() error {
		_, err := n.CNI(t, node.Call{Verb: "STATUS"})
		return err
	})
	for _, ep := range []endpoint.Endpoint{n.Add(t, "c1", pod, "eth0"), kept} {
		if err := n.Del(t, ep); err != nil {
			t.Error(err)
		}
	}
}

// An unknown generation's deferred DEL never deletes a younger endpoint.
func TestDeferredDelSparesAYoungerEndpoint(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	before := ep.CreatedAt.Add(-time.Second)
	reply, err := n.Client(t).Delete(t.Context(), api.DeleteRequest{Selector: api.Selector{Attachment: ep.Attachment}, NotAfter: &before}, nil)
	if err != nil || !reply.Deleted.IsZero() {
		t.Errorf("got %v, %v; want nothing deleted", reply, err)
	}
	if n.Endpoint(t, ep.Generation) == nil {
		t.Fatal("a DEL from before the endpoint's time deleted it")
	}
}

// The wall clock jumps a day between ADD and DEL, either way: the deferred DEL still
// takes what was there when it was queued, and nothing younger.
func TestDeferredDelsOverAClockJump(t *testing.T) {
	const day = 24 * time.Hour
	n := node.New(t)
	type jump struct {
		ep      endpoint.Endpoint
		deleted bool
	}
	var cases []jump
	var entries []delqueue.Entry
	for _, off := range []time.Duration{-day, day} {
		for _, later := range []time.Duration{time.Millisecond, -time.Millisecond} {
			ep := n.Add(t, fmt.Sprintf("c%d", len(cases)), netlab.New(t), "eth0")
			cases = append(cases, jump{ep, later > 0})
			entries = append(entries, delqueue.Entry{
				Attachment: ep.Attachment, BootID: ep.Namespace.BootID, Daemon: "unix://" + n.Socket,
				QueuedAt: ep.CreatedAt.Add(off), SinceBoot: ep.CreatedSinceBoot + later,
			})
		}
	}
	n.Stop(t)
	q, err := delqueue.Open(n.DeferredDir)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	for _, e := range entries {
		if err := q.Enqueue(e); err != nil {
			t.Fatal(err)
		}
	}
	n.Start(t)
	allReplayed(t, n, node.Patience)
	for i, c := range cases {
		if gone := n.Endpoint(t, c.ep.Generation) == nil; gone != c.deleted {
			t.Errorf("clock %v off, DEL queued %v after the ADD: deleted %t, want %t", entries[i].QueuedAt.Sub(c.ep.CreatedAt), entries[i].SinceBoot-c.ep.CreatedSinceBoot, gone, c.deleted)
		}
	}
	observed(t, finding{"the wall clock jumps a day, forth or back, between ADD and a deferred DEL", "the DEL takes what was there when it was queued and spares what is younger; quarantines and leases are not on that clock"})
}

// A killed ADD in another namespace than that of the cache's endpoint, which mknetd has
// no more: what it made goes with the deferred DEL.
func TestDeferredDelOfAKilledAddElsewhere(t *testing.T) {
	n := node.New(t)
	first := n.Add(t, "c1", netlab.New(t), "eth0")
	if _, err := n.Client(t).DeleteEndpoint(t.Context(), first.Generation); err != nil {
		t.Fatal(err)
	}
	pod := netlab.New(t)
	deaf := n.Dir + "/deaf.sock" // what mknetd answers never comes
	ln, err := net.Listen("unix", deaf)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	_, err = n.CNI(t, node.Call{
		Verb: "ADD", ContainerID: "c1", Netns: pod.Path(), IfName: "eth0", Config: map[string]any{"socket": deaf},
		Started: func(p *os.Process) {
			netlab.Eventually(t, node.Patience, func() error { return cacheSays(n, `"adding"`) })
			_ = p.Kill()
		},
	})
	if err == nil {
		t.Fatal("the ADD was not killed")
	}
	made, err := n.Client(t).CreateEndpoint(t.Context(), api.CreateRequest{Attachment: first.Attachment, Mode: endpoint.Multikernel, NetnsPath: pod.Path()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	n.Stop(t)
	if err := n.Del(t, made); err != nil {
		t.Fatal(err)
	}
	n.Start(t)
	allReplayed(t, n, node.Patience)
	if n.Endpoint(t, made.Generation) != nil {
		t.Error("the deferred DEL was acknowledged and the endpoint stands")
	}
}

// cacheSays tells whether an entry of the generation cache has a text in it.
func cacheSays(n *node.Node, text string) error {
	entries, err := filepath.Glob(n.Dir + "/cache/*")
	if err != nil {
		return err
	}
	for _, name := range entries {
		if found, err := os.ReadFile(name); err == nil && strings.Contains(string(found), text) {
			return nil
		}
	}
	return fmt.Errorf("no entry of the cache has %s", text)
}
