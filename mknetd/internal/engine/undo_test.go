package engine

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/store"
	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

const patience = time.Minute

// witness is told of every object that an engine makes or removes, while that waits.
type witness struct {
	slog.Handler
	told func(event, object string)
}

func (w witness) Handle(_ context.Context, r slog.Record) error {
	said := map[string]string{}
	r.Attrs(func(a slog.Attr) bool { said[a.Key] = a.Value.String(); return true })
	if r.Message == "object" {
		w.told(said["event"], said["where"]+" "+said["object"])
	}
	return nil
}

func (w witness) Enabled(context.Context, slog.Level) bool { return true }

// kernelEngine makes an engine on this private host that is not started, so that
// nothing goes on beside the test.
func kernelEngine(t *testing.T, told func(event, object string)) *Engine {
	t.Helper()
	netlab.Clean(t)
	netlab.Uplink(t, "1400")
	st, err := store.Open(store.Options{Dir: filepath.Join(t.TempDir(), "state"), Pools: endpoint.DefaultPools})
	if err != nil {
		t.Fatal(err)
	}
	host, err := topo.Open()
	if err != nil {
		t.Fatal(err)
	}
	firewall, err := ipt.Open(t.Context(), ipt.Config{ChildPool: endpoint.DefaultPools.Child, TransitPool: endpoint.DefaultPools.Transit})
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(witness{slog.DiscardHandler, told})
	e, err := New(Config{Pools: endpoint.DefaultPools}, log, host, firewall, st)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Close()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := errors.Join(firewall.RemoveShared(ctx), host.Close(), st.Close()); err != nil {
			t.Error(err)
		}
	})
	if err := errors.Join(e.refreshEgress(), firewall.EnsureShared(t.Context())); err != nil {
		t.Fatal(err)
	}
	return e
}

// An ADD that is undoing holds its attachment, not its endpoint. The next try of
// unfinished deletions leaves it alone: with the namespace gone it would take the
// objects a second time, perhaps from the attachment's next endpoint.
func TestADeletionAtWorkIsNotTriedAgain(t *testing.T) {
	const half = 20 // objects of an endpoint; most go with their link
	ctx, callerGone := context.WithCancel(t.Context())
	defer callerGone()
	undoing, goOn := make(chan struct{}), make(chan struct{})
	proceed := sync.OnceFunc(func() { close(goOn) })
	defer proceed()
	var mu sync.Mutex
	made := 0
	var removed []string
	e := kernelEngine(t, func(event, object string) {
		mu.Lock()
		if event == api.ObjectMade {
			if made++; made == half {
				callerGone()
			}
			mu.Unlock()
			return
		}
		removed = append(removed, object)
		first := len(removed) == 1
		mu.Unlock()
		if first {
			close(undoing)
			<-goOn
		}
	})
	pod := netlab.New(t)
	req := api.CreateRequest{Attachment: endpoint.Attachment{Network: "mknet", ContainerID: "c1", IfName: "eth0"}, NetnsPath: pod.Path()}
	failed := make(chan error, 1)
	go func() {
		_, err := e.Create(ctx, req, nil, endpoint.Process{})
		failed <- err
	}()
	select {
	case <-undoing:
	case err := <-failed:
		t.Fatalf("the ADD ended without an undo: %v", err)
	case <-time.After(patience):
		t.Fatal("the ADD does not get to its undo")
	}
	ep, err := e.store.ByAttachment(req.Attachment)
	if err != nil || ep.State != endpoint.Deleting {
		t.Fatalf("the record is %s, %v; want %s", ep.State, err, endpoint.Deleting)
	}
	pod.Remove(t)
	if err := e.retryDeletion(t.Context(), ep); err != nil {
		t.Errorf("the next try: %v", err)
	}
	mu.Lock()
	if len(removed) != 1 {
		t.Errorf("beside the undo were removed %v", removed[1:])
	}
	mu.Unlock()
	if _, err := e.store.Get(ep.Generation); err != nil {
		t.Errorf("the record that the undo is at: %v", err)
	}
	proceed()
	select {
	case err := <-failed:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("the ADD ended with %v, want its caller gone", err)
		}
	case <-time.After(patience):
		t.Fatal("the ADD does not end")
	}
	slices.Sort(removed)
	if len(removed) == 1 || len(slices.Compact(slices.Clone(removed))) != len(removed) {
		t.Errorf("the undo removed %v; want several, each once", removed)
	}
	if left, err := e.store.List(); err != nil || len(left) != 0 {
		t.Errorf("records %v, %v; want none", left, err)
	}
}

// An ADD whose caller has gone takes back what was READY for a moment, under the lock
// of the namespace. An audit that waits for that lock meanwhile makes nothing of it again.
func TestAnAuditBehindAnUndoMakesNothing(t *testing.T) {
	var mu sync.Mutex
	undone := false
	var after []string // objects that were made once all were removed
	e := kernelEngine(t, func(event, object string) {
		mu.Lock()
		defer mu.Unlock()
		if undone {
			after = append(after, event+" "+object)
		}
	})
	pod := netlab.New(t)
	req := api.CreateRequest{Attachment: endpoint.Attachment{Network: "mknet", ContainerID: "c1", IfName: "eth0"}, NetnsPath: pod.Path()}
	ep, err := e.Create(t.Context(), req, nil, endpoint.Process{})
	if err != nil {
		t.Fatal(err)
	}
	ns, err := netns.Open(pod.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	cookie := ep.Namespace.Cookie
	unlock, err := e.namespaces.lock(t.Context(), cookie)
	if err != nil {
		t.Fatal(err)
	}
	audited := make(chan error, 1)
	go func() { audited <- e.auditEndpoint(t.Context(), ep.Generation, nil) }()
	netlab.Eventually(t, patience, func() error {
		e.namespaces.mu.Lock()
		defer e.namespaces.mu.Unlock()
		if e.namespaces.held[cookie].waiting < 2 {
			return errors.New("the audit does not wait for the namespace")
		}
		return nil
	})
	if err := e.undo(t.Context(), ep, ns, context.Canceled); !errors.Is(err, context.Canceled) {
		t.Errorf("undo: %v", err)
	}
	mu.Lock()
	undone = true
	mu.Unlock()
	unlock()
	if err := <-audited; err != nil {
		t.Errorf("audit: %v", err)
	}
	if len(after) > 0 {
		t.Errorf("of an endpoint that is gone: %v", after)
	}
}
