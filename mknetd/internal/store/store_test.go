package store

import (
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"mknet/spec/endpoint"
)

var testPools = endpoint.DefaultPools

// testEndpoint makes a valid ALLOCATING record in a slot.
func testEndpoint(slot uint32) endpoint.Endpoint {
	gen := endpoint.NewGeneration()
	a := testPools.At(slot)
	return endpoint.Endpoint{
		Generation: gen,
		Attachment: endpoint.Attachment{Network: "net", ContainerID: fmt.Sprintf("c%d", slot), IfName: "eth0"},
		Mode:       endpoint.Multikernel,
		State:      endpoint.Allocating,
		Slot:       slot,
		Subnet:     a.Subnet, Gateway: a.Gateway, Address: a.Child, TransitHost: a.TransitHost, TransitPeer: a.TransitPeer,
		HostLink: gen.HostLink(), Chain: gen.Chain(), PeerLink: endpoint.PeerLink(0),
		MTUBytes: 1400, HostAccess: endpoint.Deny, PodAccess: endpoint.Deny,
		Namespace: endpoint.Namespace{BootID: "boot-1", Cookie: 100 + uint64(slot)},
		Egress:    "eth0", Firewall: "nft",
	}
}

func open(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(Options{Dir: dir, Pools: testPools, LockTimeout: 20 * time.Second})
	if err != nil {
		t.Fatalf("open %s: %v", dir, err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

func begin(t testing.TB, s *Store, slot uint32) endpoint.Endpoint {
	t.Helper()
	ep, err := s.Begin(testEndpoint(slot))
	if err != nil {
		t.Fatalf("begin slot %d: %v", slot, err)
	}
	return ep
}

// must returns the value of a call that has to succeed.
func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func TestLifeSurvivesReopening(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := open(t, dir)
	ep := begin(t, s, 7)
	if ep.State != endpoint.Allocating || ep.CreatedAt.IsZero() {
		t.Fatalf("begun record: %+v", ep)
	}
	ready := must(s.MarkReady(ep.Generation, func(e *endpoint.Endpoint) error {
		e.Degraded = []string{"route missing"}
		e.Binding = &endpoint.Binding{Sandbox: endpoint.Sandbox{ID: "s", Generation: "1"}}
		return nil
	}))(t)
	other := begin(t, s, 9)
	if c := s.Counts(); c.Total != 2 || c.ByState[endpoint.Ready] != 1 || c.ByState[endpoint.Allocating] != 1 || c.Degraded != 1 {
		t.Errorf("counts: %+v", c)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = open(t, dir)
	if got := must(s.Get(ep.Generation))(t); !reflect.DeepEqual(got, ready) {
		t.Errorf("after reopening:\n got %+v\nwant %+v", got, ready)
	}
	if got := must(s.ByAttachment(ep.Attachment))(t); got.Generation != ep.Generation {
		t.Errorf("by attachment: %s", got.Generation)
	}
	if got := must(s.ByNamespace(ep.Namespace))(t); len(got) != 1 || got[0].Generation != ep.Generation {
		t.Errorf("by namespace: %+v", got)
	}
	if c := s.Counts(); c.Total != 2 || c.Degraded != 1 {
		t.Errorf("counts after reopening: %+v", c)
	}
	must(s.BeginDelete(ep.Generation, nil))(t)
	if err := s.Finish(ep.Generation, Freed{BootID: "b", At: 5}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = open(t, dir)
	if _, err := s.Get(ep.Generation); !errors.Is(err, ErrNotFound) {
		t.Errorf("a finished record: %v", err)
	}
	live, freed, err := s.Slots()
	if err != nil || len(live) != 1 || live[0] != other.Slot || len(freed) != 1 || freed[0] != (Freed{Slot: 7, BootID: "b", At: 5}) {
		t.Errorf("slots: live %v, freed %v, %v", live, freed, err)
	}
}

func TestStepsThatAreRefused(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "state"))
	ep := begin(t, s, 1)

	t.Run("the same attachment", func(t *testing.T) {
		again := testEndpoint(2)
		again.Attachment = ep.Attachment
		var exists *ExistsError
		if _, err := s.Begin(again); !errors.As(err, &exists) || exists.Holder != ep.Generation || exists.State != endpoint.Allocating {
			t.Errorf("got %v", err)
		}
	})
	t.Run("the same slot", func(t *testing.T) {
		again := testEndpoint(1)
		again.ContainerID = "another"
		var exists *ExistsError
		if _, err := s.Begin(again); !errors.As(err, &exists) || exists.What != "slot 1" {
			t.Errorf("got %v", err)
		}
	})
	t.Run("removal of a live record", func(t *testing.T) {
		var invalid *InvalidError
		if err := s.Finish(ep.Generation, Freed{}); !errors.As(err, &invalid) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("an absent record", func(t *testing.T) {
		if _, err := s.MarkReady(endpoint.NewGeneration(), nil); !errors.Is(err, ErrNotFound) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("an error of the callback", func(t *testing.T) {
		stop := errors.New("stop")
		if _, err := s.Update(ep.Generation, func(e *endpoint.Endpoint) error { e.MTUBytes = 9000; return stop }); !errors.Is(err, stop) {
			t.Errorf("got %v", err)
		}
	})
	for name, f := range map[string]func(*endpoint.Endpoint){
		"a new state":      func(e *endpoint.Endpoint) { e.State = endpoint.Ready },
		"a new generation": func(e *endpoint.Endpoint) { e.Generation = endpoint.NewGeneration() },
		"a new attachment": func(e *endpoint.Endpoint) { e.IfName = "net1" },
		"a new slot":       func(e *endpoint.Endpoint) { e.Slot++ },
		"a new address":    func(e *endpoint.Endpoint) { e.Address = e.Address.Next() },
		"a wrong mtu":      func(e *endpoint.Endpoint) { e.MTUBytes = 5 },
		"a foreign link":   func(e *endpoint.Endpoint) { e.PeerLink = "eth0" },
		"too many faults":  func(e *endpoint.Endpoint) { e.Degraded = make([]string, MaxRecordBytes) },
	} {
		t.Run(name, func(t *testing.T) {
			var invalid *InvalidError
			if _, err := s.Update(ep.Generation, func(e *endpoint.Endpoint) error { f(e); return nil }); !errors.As(err, &invalid) {
				t.Errorf("got %v, want an *InvalidError", err)
			}
		})
	}
	must(s.BeginDelete(ep.Generation, nil))(t)
	for name, step := range map[string]func() error{
		"revive":       func() error { _, err := s.MarkReady(ep.Generation, nil); return err },
		"delete twice": func() error { _, err := s.BeginDelete(ep.Generation, nil); return err },
	} {
		t.Run(name, func(t *testing.T) {
			var state *endpoint.StateError
			if err := step(); !errors.As(err, &state) {
				t.Errorf("got %v, want a *StateError", err)
			}
		})
	}
	got := must(s.Get(ep.Generation))(t)
	if got.MTUBytes != 1400 || got.State != endpoint.Deleting {
		t.Errorf("a refused step left its mark: %+v", got)
	}
}

// A callback that panics must cost its caller the call, and nobody else anything.
func TestPanicOfACallback(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "state"))
	ep := begin(t, s, 1)
	var we *WriteError
	if _, err := s.Update(ep.Generation, func(*endpoint.Endpoint) error { panic("no") }); !errors.As(err, &we) || we.Broken {
		t.Fatalf("got %v", err)
	}
	must(s.MarkReady(ep.Generation, nil))(t)
}

// Freed slots come back in the order they were freed, and one that is claimed by
// name leaves the queue in the same transaction.
func TestFreedQueue(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := open(t, dir)
	gens := map[uint32]endpoint.Generation{}
	for _, slot := range []uint32{3, 1, 2, 4} {
		gens[slot] = begin(t, s, slot).Generation
	}
	for i, slot := range []uint32{4, 2, 3} {
		must(s.BeginDelete(gens[slot], nil))(t)
		if err := s.Finish(gens[slot], Freed{BootID: "b", At: time.Duration(i)}); err != nil {
			t.Fatal(err)
		}
	}
	begin(t, s, 2)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	live, freed, err := s.Slots()
	want := []Freed{{Slot: 4, BootID: "b", At: 0}, {Slot: 3, BootID: "b", At: 2}}
	if err != nil || !reflect.DeepEqual(freed, want) || !reflect.DeepEqual(live, []uint32{1, 2}) {
		t.Errorf("live %v, freed %v, %v; want [1 2], %v", live, freed, err, want)
	}
}

// The namespace of a provisioned endpoint becomes known after ALLOCATING.
func TestNamespaceIndexFollows(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "state"))
	ep := testEndpoint(1)
	ns := ep.Namespace
	ep.Namespace = endpoint.Namespace{}
	begun := must(s.Begin(ep))(t)
	if _, err := s.MarkReady(begun.Generation, nil); err == nil {
		t.Error("READY without a namespace was stored")
	}
	second := begin(t, s, 2)
	must(s.MarkReady(begun.Generation, func(e *endpoint.Endpoint) error { e.Namespace = ns; return nil }))(t)
	must(s.Update(second.Generation, func(e *endpoint.Endpoint) error { e.Namespace = ns; return nil }))(t)
	got := must(s.ByNamespace(ns))(t)
	if len(got) != 2 || got[0].Generation != begun.Generation || got[1].Generation != second.Generation {
		t.Errorf("by namespace: %+v", got)
	}
	if left := must(s.ByNamespace(second.Namespace))(t); len(left) != 0 {
		t.Errorf("the old namespace still has %+v", left)
	}
}

func TestDocuments(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := open(t, dir)
	d := must(s.Documents("policy"))(t)
	if _, err := d.Get("a"); !errors.Is(err, ErrNotFound) {
		t.Errorf("absent: %v", err)
	}
	for _, name := range []string{"b", "a", "c"} {
		if err := d.Put(name, []byte("content of "+name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(d.Delete("c"), d.Delete("c")); err != nil {
		t.Fatal(err)
	}
	if err := d.Put("big", make([]byte, MaxDocumentBytes+1)); err == nil {
		t.Error("a document over the limit was stored")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	d = must(open(t, dir).Documents("policy"))(t)
	var names []string
	if err := d.Each(func(name string, content []byte) error {
		names = append(names, name+"="+string(content))
		return nil
	}); err != nil || !reflect.DeepEqual(names, []string{"a=content of a", "b=content of b"}) {
		t.Errorf("documents: %v, %v", names, err)
	}
}

func TestPoolsAreHeldTo(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := open(t, dir)
	ep := begin(t, s, 1)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	other := testPools
	if err := other.Child.UnmarshalText([]byte("10.0.0.0/24")); err != nil {
		t.Fatal(err)
	}
	var pools *PoolsError
	if _, err := Open(Options{Dir: dir, Pools: other}); !errors.As(err, &pools) || pools.Endpoints != 1 {
		t.Fatalf("got %v, want a *PoolsError", err)
	}
	s = open(t, dir)
	must(s.BeginDelete(ep.Generation, nil))(t)
	if err := errors.Join(s.Finish(ep.Generation, Freed{}), s.Close()); err != nil {
		t.Fatal(err)
	}
	s, err := Open(Options{Dir: dir, Pools: other})
	if err != nil {
		t.Fatalf("an empty store refuses new pools: %v", err)
	}
	defer s.Close()
	if live, freed, err := s.Slots(); len(live)+len(freed) != 0 || err != nil {
		t.Errorf("slots of the old pool are left: %v %v %v", live, freed, err)
	}
}

func TestClosed(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "state"))
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Begin(testEndpoint(1)); !errors.Is(err, ErrClosed) {
		t.Errorf("a write: %v", err)
	}
	if _, err := s.List(); !errors.Is(err, ErrClosed) {
		t.Errorf("a read: %v", err)
	}
}
