package operate

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// watch follows the events of a node until the test ends.
type watch struct {
	mu   sync.Mutex
	seen []api.Event
}

func follow(t *testing.T, n *node.Node) *watch {
	t.Helper()
	w := &watch{}
	var following sync.WaitGroup
	ctx, stop := context.WithCancel(context.Background())
	c := n.Client(t)
	following.Go(func() {
		// Its only end is the test's.
		_ = c.Follow(ctx, api.EventsAfter{}, func(ev api.Event) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.seen = append(w.seen, ev)
			return nil
		})
	})
	t.Cleanup(func() { stop(); following.Wait() })
	return w
}

func (w *watch) events() []api.Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]api.Event(nil), w.seen...)
}

// until waits for an event.
func (w *watch) until(t *testing.T, what string, match func(api.Event) bool) {
	t.Helper()
	netlab.Eventually(t, node.Patience, func() error {
		for _, ev := range w.events() {
			if match(ev) {
				return nil
			}
		}
		return fmt.Errorf("no event: %s", what)
	})
}

func is(gen endpoint.Generation, what string) func(api.Event) bool {
	return func(ev api.Event) bool { return ev.Generation == gen && ev.What == what }
}

// asWanted are the kinds of objects that may be right before mknetd looks: the
// kernel's defaults, and what is made together with a device.
const asWanted = " peer mtu sysctl forward mac group rp_filter route link conntrack "

// Every change of an endpoint's state and of each of its kernel objects is told
// once, in order, through ADD, a first policy, a repair and DEL, of children and of a
// pod.
func TestEachChangeIsToldOnce(t *testing.T) {
	n := node.New(t, "auditInterval: 300ms", "pools: [{name: pods, prefix: 10.90.0.0/24}]")
	w := follow(t, n)
	early := n.Add(t, "c0", netlab.New(t), "eth0") // its programs come with the first policy
	if err := os.WriteFile(n.Dir+"/policy.yaml", []byte(denied), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		netlab.Run(t, n.Daemon, "policy", "apply", "--config", n.Config, "-f", n.Dir+"/policy.yaml")
	}
	child := n.Add(t, "c1", netlab.New(t), "eth0")
	pod := n.AddPod(t, "p1", netlab.New(t))
	all := []endpoint.Endpoint{early, child, pod}
	netlab.Run(t, "ip", "route", "del", child.Subnet.String())
	w.until(t, "the route is repaired", func(ev api.Event) bool {
		return ev.What == api.ObjectRepaired && ev.Object.Kind == "route" && ev.Object.Where == endpoint.InHost && ev.Generation == child.Generation
	})
	recorded := map[endpoint.Generation][]string{}
	inv, err := n.Client(t).Inventory(within(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, it := range inv.Items {
		if it.Status == api.Recorded {
			recorded[it.Generation] = append(recorded[it.Generation], it.Kind+" "+it.Object+" "+it.Where)
		}
	}
	for _, ep := range all {
		if err := n.Del(t, ep); err != nil {
			t.Fatal(err)
		}
		if err := n.Del(t, ep); err != nil { // again: nothing changes any more
			t.Fatal(err)
		}
		w.until(t, "deleted", is(ep.Generation, "deleted"))
	}
	events := w.events()
	for i, ev := range events {
		if ev.Seq != uint64(i+1) || ev.Instance != events[0].Instance {
			t.Fatalf("event %d has the number %d", i+1, ev.Seq)
		}
	}
	for _, ep := range all {
		var life []string
		objects := map[string][]string{}
		for _, ev := range events {
			switch {
			case ev.Generation != ep.Generation:
			case ev.Kind == api.EventEndpoint:
				life = append(life, ev.What+":"+string(ev.State))
			default:
				key := ev.Object.Kind + " " + ev.Object.Name + " " + ev.Object.Where
				objects[key] = append(objects[key], ev.What)
			}
		}
		if got := strings.Join(life, " "); got != "allocating:ALLOCATING created:READY deleting:DELETING deleted:DELETING" {
			t.Errorf("%s: its life was told as %s", ep.Mode, got)
		}
		if len(recorded[ep.Generation]) < 15 {
			t.Errorf("%s: only %d objects", ep.Mode, len(recorded[ep.Generation]))
		}
		for _, o := range recorded[ep.Generation] {
			kind, _, _ := strings.Cut(o, " ")
			if len(objects[o]) == 0 && !strings.Contains(asWanted, " "+kind+" ") {
				t.Errorf("%s: nobody told of %s", ep.Mode, o)
			}
		}
		for o, told := range objects {
			kind, _, _ := strings.Cut(o, " ")
			made, removed := 0, 0
			for i, what := range told {
				switch what {
				case api.ObjectMade:
					made++
					if i != 0 {
						t.Errorf("%s: %s was told as %v", ep.Mode, o, told)
					}
				case api.ObjectRemoved:
					removed++
					if i != len(told)-1 {
						t.Errorf("%s: %s was told as %v", ep.Mode, o, told)
					}
				}
			}
			// The pair goes with its other end, routes and addresses with their device.
			if made > 1 || removed > 1 || (made == 1) != (removed == 1) && !strings.Contains(asWanted+"veth neighbour address ", " "+kind+" ") {
				t.Errorf("%s: %s was told as %v", ep.Mode, o, told)
			}
		}
		for _, kind := range []string{"policy", "bpf-program", "bpf-endpoint"} {
			n := 0
			for o := range objects {
				if strings.HasPrefix(o, kind+" ") {
					n++
				}
			}
			if want := map[string]int{"policy": 1, "bpf-program": 2, "bpf-endpoint": 1}[kind]; n != want {
				t.Errorf("%s: %d of kind %s were told of, want %d", ep.ContainerID, n, kind, want)
			}
		}
	}
}
