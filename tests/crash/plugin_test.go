package crash

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// plugin is what a runtime does with mk-cni, one call after the other: each is a
// process that may die.
var plugin = story{name: "mk-cni-calls", play: func(t *testing.T, n *node.Node, v *victim, o *outcome) {
	n.Start(t)
	r := &runtime{n: n, v: v, pods: map[string]*netlab.Namespace{}, added: map[string]bool{}}
	r.play(t)
	switch {
	case v.at == nil && r.dead:
		t.Fatal("a call was killed in the story without a crash")
	case r.dead:
		o.Reached = true
	}
	r.judge(t, o)
}}

// runtime makes the calls and remembers what each container was told.
type runtime struct {
	n    *node.Node
	v    *victim
	pods map[string]*netlab.Namespace
	// added are the containers whose last ADD succeeded and that no DEL was begun
	// for; gone those whose last DEL succeeded.
	added map[string]bool
	gone  []string
	dead  bool
	broke string // container of the call that died
}

func (r *runtime) play(t *testing.T) {
	t.Helper()
	// Through a second name of the socket mknetd can be away for some calls only; it
	// leaves DELs alone that were queued for another name.
	away := map[string]any{"socket": r.n.Dir + "/other.sock"}
	r.call(t, "add", node.Call{Verb: "ADD", ContainerID: "a"}, true)
	r.call(t, "check", node.Call{Verb: "CHECK", ContainerID: "a"}, true)
	r.call(t, "status", node.Call{Verb: "STATUS"}, true)
	r.call(t, "del", node.Call{Verb: "DEL", ContainerID: "a"}, true)
	r.call(t, "add-b", node.Call{Verb: "ADD", ContainerID: "b"}, true)
	r.call(t, "add-away", node.Call{Verb: "ADD", ContainerID: "c", Config: away}, false)
	r.call(t, "del-away", node.Call{Verb: "DEL", ContainerID: "b", Config: away}, true)
	r.reach(t)
	r.call(t, "add-settles", node.Call{Verb: "ADD", ContainerID: "b", Config: away}, true)
	r.unreach(t)
	r.call(t, "del-away-again", node.Call{Verb: "DEL", ContainerID: "b", Config: away}, true)
	r.reach(t)
	r.call(t, "del-replays", node.Call{Verb: "DEL", ContainerID: "nobody", Config: away}, true)
	r.rollBack(t)
	r.call(t, "add-d", node.Call{Verb: "ADD", ContainerID: "d"}, true)
	r.call(t, "gc", node.Call{Verb: "GC", Config: map[string]any{"cni.dev/valid-attachments": []any{}}}, true)
}

func (r *runtime) reach(t *testing.T) {
	t.Helper()
	if err := os.Symlink(r.n.Socket, r.n.Dir+"/other.sock"); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
}

func (r *runtime) unreach(t *testing.T) {
	t.Helper()
	if err := os.Remove(r.n.Dir + "/other.sock"); err != nil {
		t.Fatal(err)
	}
}

// call makes one call unless an earlier one has died.
func (r *runtime) call(t *testing.T, step string, c node.Call, succeeds bool) {
	t.Helper()
	if r.dead {
		return
	}
	if c.ContainerID != "" {
		c.IfName, c.Netns = "eth0", r.pod(t, c.ContainerID).Path()
	}
	if c.Verb == "CHECK" {
		c.Config = map[string]any{"prevResult": node.PrevResult(r.endpoint(t, c.ContainerID))}
	}
	before := r.added[c.ContainerID]
	if c.Verb != "CHECK" {
		delete(r.added, c.ContainerID)
	}
	c.Env = append(c.Env, r.v.env(step)...)
	out, err := r.n.CNI(t, c)
	complete := err == nil
	if killed(err) {
		r.dead, r.broke = true, c.ContainerID
		// What was printed whole was acknowledged, whoever died then.
		var printed types100.Result // an error object has no addresses
		complete = c.Verb == "ADD" && json.Unmarshal(out, &printed) == nil && len(printed.IPs) > 0
	} else if (err == nil) != succeeds {
		t.Fatalf("%s: %v, success expected: %t", step, err, succeeds)
	}
	switch {
	case c.Verb == "ADD" && complete:
		r.added[c.ContainerID] = true
	case c.Verb == "DEL" && complete:
		r.gone = append(r.gone, c.ContainerID)
	case c.Verb == "GC":
		r.added = map[string]bool{}
	case c.Verb == "CHECK" && before:
		r.added[c.ContainerID] = true
	}
}

// rollBack is an ADD whose caller goes away before it reads the result.
func (r *runtime) rollBack(t *testing.T) {
	t.Helper()
	if r.dead {
		return
	}
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	reader.Close()
	_, err = r.n.CNI(t, node.Call{Verb: "ADD", ContainerID: "e", IfName: "eth0", Netns: r.pod(t, "e").Path(), Out: writer, Env: r.v.env("add-unheard")})
	switch {
	case killed(err):
		r.dead, r.broke = true, "e"
	case err == nil:
		t.Fatal("an ADD succeeded though nobody could read its result")
	default:
		r.gone = append(r.gone, "e")
	}
}

func (r *runtime) pod(t *testing.T, container string) *netlab.Namespace {
	t.Helper()
	if r.pods[container] == nil {
		r.pods[container] = netlab.New(t)
	}
	return r.pods[container]
}

// endpoint is the record of a container; the zero value when there is none.
func (r *runtime) endpoint(t *testing.T, container string) endpoint.Endpoint {
	t.Helper()
	for _, ep := range r.n.List(t) {
		if ep.ContainerID == container {
			return ep
		}
	}
	return endpoint.Endpoint{}
}

// judge makes the four checks. A runtime whose plugin died calls DEL for that
// container; what else it has, it deletes at the end.
func (r *runtime) judge(t *testing.T, o *outcome) {
	t.Helper()
	r.settle(t)
	var alive []endpoint.Generation
	for container := range r.added {
		ep := r.endpoint(t, container)
		if ep.State != endpoint.Ready {
			o.fault(acknowledged, "the ADD of %s succeeded and it is %q", container, ep.State)
			continue
		}
		alive = append(alive, ep.Generation)
		if err := r.n.Check(t, ep); err != nil {
			o.fault(acknowledged, "CHECK of %s: %v", container, err)
		}
	}
	for _, container := range r.gone {
		if ep := r.endpoint(t, container); !r.added[container] && container != r.broke && !ep.Generation.IsZero() {
			o.fault(acknowledged, "the DEL of %s succeeded and it is %s", container, ep.State)
		}
	}
	judge(t, r.n, o, alive, func() {
		for container := range r.pods {
			if _, err := r.n.CNI(t, node.Call{Verb: "DEL", ContainerID: container, IfName: "eth0", Netns: r.pods[container].Path()}); err != nil {
				o.fault(clean, "DEL of %s: %v", container, err)
			}
		}
		r.filesGone(t, o)
	})
}

// settle has the DELs replayed that are queued for the other name. One call works
// at it for 200 ms only, so it takes a few on a slow machine.
func (r *runtime) settle(t *testing.T) {
	t.Helper()
	r.reach(t)
	defer r.unreach(t)
	netlab.Eventually(t, node.Patience, func() error {
		if _, err := r.n.CNI(t, node.Call{Verb: "DEL", ContainerID: "nobody", IfName: "eth0", Config: map[string]any{"socket": r.n.Dir + "/other.sock"}}); err != nil {
			return fmt.Errorf("DEL of nobody, which replays the queue: %w", err)
		}
		for _, ep := range r.n.List(t) {
			if ep.State != endpoint.Ready {
				return fmt.Errorf("endpoint %s is %s", ep.Attachment, ep.State)
			}
		}
		q, err := delqueue.OpenExisting(r.n.DeferredDir)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		defer q.Close()
		items, err := q.List()
		if err == nil && len(items) > 0 {
			err = fmt.Errorf("%d deferred DELs stay queued: %v", len(items), items)
		}
		return err
	})
}

// filesGone checks that the cache forgot every container. What a killed writer
// left half written has a name that begins with a dot, and goes with a later GC.
func (r *runtime) filesGone(t *testing.T, o *outcome) {
	t.Helper()
	entries, err := os.ReadDir(r.n.Dir + "/cache")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name()[0] != '.' {
			o.fault(clean, "the cache still has %s", e.Name())
		}
	}
}

// killed reports whether a process ended with SIGKILL.
func killed(err error) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}
