// Package crash kills mknetd at every one of its crash points and holds it to
// its promise: what was acknowledged survives, kernel and records agree, doing it
// again changes nothing, and nothing is left after DEL.
package crash

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

func TestMain(m *testing.M) { node.Main(m) }

// story is what a runtime does with a node in one run: every operation whose
// steps are crash points. It stops at the first error, which is the daemon dying,
// and remembers what was acknowledged.
type story struct {
	n     *node.Node
	pod   *netlab.Namespace
	alive map[endpoint.Generation]bool // acknowledged, and no removal was asked for
	maybe map[endpoint.Generation]bool // a removal was asked for and not acknowledged
}

func (s *story) run(t *testing.T) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), node.Patience)
	defer cancel()
	c := s.n.Client(t)
	sandbox := endpoint.Sandbox{ID: "s1", Generation: "g1"}

	ep, err := s.add(ctx, c, "eth0")
	if err != nil {
		return err
	}
	second, err := s.add(ctx, c, "net1")
	if err != nil {
		return err
	}
	bound, err := c.Bind(ctx, api.BindRequest{Selector: api.Selector{Generation: ep.Generation}, Sandbox: sandbox})
	if err != nil {
		return err
	}
	_, queues, err := c.Attach(ctx, ep.Generation, api.AttachRequest{Sandbox: sandbox, Nonce: bound.Nonce, Queues: 1})
	for _, f := range queues {
		f.Close()
	}
	if err != nil {
		return err
	}
	// This process is the shim, and alive: the DEL is refused and recorded.
	s.maybe[ep.Generation] = true
	if err := s.remove(ctx, c, ep.Generation); api.CodeOf(err) != api.FailedPrecondition {
		return fmt.Errorf("DEL of a bound endpoint: %w", err)
	}
	if err := c.Unbind(ctx, ep.Generation, api.UnbindRequest{Sandbox: sandbox}); err != nil {
		return err
	}
	delete(s.alive, ep.Generation)
	delete(s.maybe, ep.Generation)

	if _, err := c.Bind(ctx, api.BindRequest{Selector: api.Selector{Generation: second.Generation}, Sandbox: sandbox}); err != nil {
		return err
	}
	if err := c.Unbind(ctx, second.Generation, api.UnbindRequest{Sandbox: sandbox}); err != nil {
		return err
	}
	if err := s.remove(ctx, c, second.Generation); err != nil {
		return err
	}
	return s.provisionAndCollect(ctx, c, sandbox)
}

// provisionAndCollect is PROVISION, RELEASE and GC.
func (s *story) provisionAndCollect(ctx context.Context, c *client.Client, sandbox endpoint.Sandbox) error {
	req := api.ProvisionRequest{CreateRequest: api.CreateRequest{Attachment: endpoint.Attachment{Network: node.Network, ContainerID: "p1", IfName: "eth0"}}, Sandbox: sandbox}
	made, err := c.Provision(ctx, req)
	if err != nil {
		return err
	}
	gen := made.Endpoint.Generation
	s.alive[gen] = true
	s.maybe[gen] = true
	if _, err := c.Release(ctx, api.ReleaseRequest{Generation: gen, Sandbox: sandbox}); err != nil {
		return err
	}
	delete(s.alive, gen)
	delete(s.maybe, gen)

	third, err := s.add(ctx, c, "eth0")
	if err != nil {
		return err
	}
	s.maybe[third.Generation] = true
	if _, err := c.GC(ctx, api.GCRequest{Network: node.Network, Valid: &[]api.GCAttachment{}}); err != nil {
		return err
	}
	delete(s.alive, third.Generation)
	delete(s.maybe, third.Generation)
	return nil
}

func (s *story) add(ctx context.Context, c *client.Client, ifName string) (endpoint.Endpoint, error) {
	ns, err := os.Open(s.pod.Path())
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	defer ns.Close()
	ep, err := c.CreateEndpoint(ctx, api.CreateRequest{Attachment: endpoint.Attachment{Network: node.Network, ContainerID: "c1", IfName: ifName}, NetnsPath: s.pod.Path()}, ns)
	if err == nil {
		s.alive[ep.Generation] = true
	}
	return ep, err
}

func (s *story) remove(ctx context.Context, c *client.Client, gen endpoint.Generation) error {
	s.maybe[gen] = true
	_, err := c.DeleteEndpoint(ctx, gen)
	if err == nil {
		delete(s.alive, gen)
		delete(s.maybe, gen)
	}
	return err
}

// TestEveryCrashPoint walks all points that one run of the story reaches.
func TestEveryCrashPoint(t *testing.T) {
	node.Build(t, "-tags", "crashpoints")
	points := reachedPoints(t)
	if len(points) < 40 {
		t.Fatalf("only %d crash points were reached: %v", len(points), points)
	}
	n := node.Prepare(t)
	passed := 0
	for _, point := range points {
		ok := t.Run(point, func(t *testing.T) { killAt(t, n, point) })
		if ok {
			passed++
		}
	}
	t.Logf("%d passed, %d failed", passed, len(points)-passed)
}

// reachedPoints runs the whole story once and returns every visit of a point.
func reachedPoints(t *testing.T) []string {
	t.Helper()
	var points []string
	t.Run("trace", func(t *testing.T) {
		n := node.Prepare(t)
		trace := n.Dir + "/trace"
		n.Start(t, "MKNET_CRASH_TRACE="+trace)
		s := newStory(t, n)
		if err := s.run(t); err != nil {
			t.Fatalf("the story without a crash: %v", err)
		}
		text, err := os.ReadFile(trace)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			point := strings.TrimSpace(line)
			// The first visit of each point is what every change must pass; the long
			// walk makes all of them.
			if strings.HasSuffix(point, "#1") || os.Getenv("MKNET_CRASH_WALK") == "all" {
				points = append(points, point)
			}
		}
	})
	slices.Sort(points)
	return slices.Compact(points)
}

func newStory(t *testing.T, n *node.Node) *story {
	t.Helper()
	return &story{n: n, pod: netlab.New(t), alive: map[endpoint.Generation]bool{}, maybe: map[endpoint.Generation]bool{}}
}

// killAt runs the story into one crash point and makes the four checks.
func killAt(t *testing.T, n *node.Node, point string) {
	n.Start(t, "MKNET_CRASH="+point)
	s := newStory(t, n)
	if err := s.run(t); err == nil {
		t.Error("the story ended without the daemon dying")
	}
	n.WaitDead(t)

	n.Start(t)
	have := map[endpoint.Generation]bool{}
	for _, ep := range n.List(t) {
		have[ep.Generation] = true
		if ep.State == endpoint.Ready && len(ep.Degraded) > 0 {
			t.Errorf("endpoint %s came back degraded: %v", ep.Generation, ep.Degraded)
		}
	}
	for gen := range s.alive {
		if !have[gen] && !s.maybe[gen] {
			t.Errorf("1: endpoint %s was acknowledged and is gone", gen)
		}
	}
	n.CheckInventory(t) // 2: kernel equals records

	before := state(t, n)
	n.Kill(t)
	n.Start(t)
	if after := state(t, n); after != before {
		t.Errorf("3: a second reconciliation changed something:\n--- before\n%s\n--- after\n%s", before, after)
	}

	c := n.Client(t)
	for gen := range have {
		if ep := n.Endpoint(t, gen); ep != nil && ep.Binding != nil {
			if err := c.Unbind(t.Context(), gen, api.UnbindRequest{Sandbox: ep.Binding.Sandbox}); err != nil {
				t.Errorf("unbind %s: %v", gen, err)
			}
		}
		if _, err := c.DeleteEndpoint(t.Context(), gen); err != nil {
			t.Errorf("4: delete %s: %v", gen, err)
		}
	}
	n.CheckInventory(t)
	if left := n.List(t); len(left) > 0 {
		t.Errorf("4: %d endpoints are left", len(left))
	}
	n.Stop(t)
}

// state is everything of ours in kernel and records, as text.
func state(t *testing.T, n *node.Node) string {
	t.Helper()
	var out []string
	for _, ep := range n.List(t) {
		out = append(out, fmt.Sprintf("%s %s %s %v %v", ep.Generation, ep.State, ep.Address, ep.Binding, ep.Degraded))
	}
	for _, cmd := range [][]string{{"ip", "-o", "link"}, {"ip", "-4", "route", "show", "table", "all"}, {"iptables-save"}} {
		for line := range strings.Lines(netlab.Run(t, cmd[0], cmd[1:]...)) {
			if !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, ":") {
				out = append(out, strings.TrimSpace(line))
			}
		}
	}
	return strings.Join(out, "\n")
}
