package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// Each rtnetlink request of an ADD, a CHECK and a DEL meets EBUSY once, for a child
// and for a pod.
func TestBusyNetlink(t *testing.T) {
	n := node.Prepare(t, "pools: [{name: pods, prefix: 10.91.0.0/24}]", "auditInterval: 10h")
	s := supervise(t, n)
	for _, mode := range []endpoint.Mode{endpoint.Multikernel, endpoint.Veth} {
		t.Run(string(mode), func(t *testing.T) { busyNetlink(t, n, s, mode) })
	}
	observed(t, finding{"any one rtnetlink request of an ADD, CHECK or DEL is answered with EBUSY", "ADD 11 and nothing of it stays, CHECK 11, DEL 11 and a second DEL finishes it"})
}

func busyNetlink(t *testing.T, n *node.Node, s *supervisor, mode endpoint.Mode) {
	pod := netlab.New(t)
	c := n.Client(t)
	add := func() (endpoint.Endpoint, error) {
		ctx, cancel := context.WithTimeout(t.Context(), node.Patience)
		defer cancel()
		return c.CreateEndpoint(ctx, api.CreateRequest{
			Attachment: endpoint.Attachment{Network: node.Network, ContainerID: "c1", IfName: "eth0"},
			Mode:       mode, NetnsPath: pod.Path(),
		}, nil)
	}
	check := func(ep endpoint.Endpoint) error {
		ctx, cancel := context.WithTimeout(t.Context(), node.Patience)
		defer cancel()
		_, err := c.CheckEndpoint(ctx, ep.Generation, api.Selector{})
		return err
	}
	remove := func(ep endpoint.Endpoint) error {
		ctx, cancel := context.WithTimeout(t.Context(), node.Patience)
		defer cancel()
		_, err := c.DeleteEndpoint(ctx, ep.Generation)
		return err
	}
	ep, err := add() // what is made once for all endpoints stands from here on
	if err != nil {
		t.Fatal(err)
	}
	if err := remove(ep); err != nil {
		t.Fatal(err)
	}
	rules := ruleset(t)
	refused := s.walk(t, "ADD", unix.EBUSY, func(stop func() *request) error {
		ep, err := add()
		stop()
		if err == nil {
			if err := check(ep); err != nil {
				t.Errorf("CHECK after an ADD that worked: %v", err)
			}
			if err := remove(ep); err != nil {
				t.Errorf("DEL after an ADD that worked: %v", err)
			}
		}
		nothingOf(t, n, pod, rules)
		return err
	})
	if ep, err = add(); err != nil {
		t.Fatal(err)
	}
	refused += s.walk(t, "CHECK", unix.EBUSY, func(func() *request) error { return check(ep) })
	refused += s.walk(t, "DEL", unix.EBUSY, func(stop func() *request) error {
		err := remove(ep)
		stop()
		if again := remove(ep); again != nil {
			t.Errorf("second DEL: %v", again)
		}
		nothingOf(t, n, pod, rules)
		var failed error
		if ep, failed = add(); failed != nil {
			t.Fatal(failed)
		}
		return err
	})
	if err := remove(ep); err != nil {
		t.Error(err)
	}
	t.Logf("%d requests refused", refused)
}

// Each request of a start meets EBUSY once.
func TestBusyNetlinkAtStart(t *testing.T) {
	n := node.New(t, "auditInterval: 10h")
	ep := n.Add(t, "c1", netlab.New(t), "eth0")
	n.Stop(t)
	refused, served := 0, 0
	for i := 1; ; i++ {
		_, from := logSince(t, n, 0)
		var stop func() *request
		_, ended := superviseWith(t, n, func(s *supervisor) { stop = s.failNth(i, unix.EBUSY) })
		failed := stop()
		if ended != nil {
			refused++
			if said, _ := logSince(t, n, from); !strings.Contains(said, "device or resource busy") {
				t.Errorf("request %d (%v): mknetd does not say why it ended:\n%s", i, failed, said)
			}
			continue
		}
		served++
		netlab.Eventually(t, node.Patience, func() error { return n.Check(t, ep) })
		if failed == nil {
			break
		}
		n.Stop(t)
	}
	if refused == 0 || served < 2 {
		t.Errorf("mknetd ended %d times and served %d times", refused, served)
	}
	observed(t, finding{"any one rtnetlink request of a start is answered with EBUSY", "mknetd does not start and says which, or serves and looks again within seconds"})
}

// Links come and go in the namespace while mknetd lists them: the kernel calls such a
// list inconsistent (NLM_F_DUMP_INTR).
func TestInterruptedDumps(t *testing.T) {
	n := node.Prepare(t)
	s := supervise(t, n)
	pod := netlab.New(t)
	for i := range 40 { // more than one message holds
		pod.Run(t, "ip", "link", "add", fmt.Sprintf("many%d", i), "type", "veth", "peer", "name", fmt.Sprintf("more%d", i))
	}
	rules := ruleset(t)
	lists := 0
	for _, most := range []int{0, 3, 1000} {
		stop := s.interruptDumps(t, pod, most)
		call := node.Call{Verb: "ADD", ContainerID: "c1", Netns: pod.Path(), IfName: "eth0"}
		_, err := n.CNI(t, call)
		got := stop()
		t.Logf("%d lists of links, %d interrupted: %v", got, min(most, got), err)
		switch most {
		case 0:
			lists = got
			fallthrough
		case 3:
			if err != nil || got < lists+most {
				t.Errorf("%d of %d lists interrupted: %v; want an ADD that works and repeats each", most, got, err)
			}
			call.Verb = "DEL"
			if _, err := n.CNI(t, call); err != nil {
				t.Errorf("DEL: %v", err)
			}
		default:
			node.WantCode(t, err, 11, "results may be incomplete or inconsistent")
		}
		nothingOf(t, n, pod, rules)
	}
	observed(t, finding{"the kernel interrupts a list of links, three times or for ever", "ADD repeats it and works; where it does not end, ADD 11 and nothing of it stays"})
}
