package engine

import (
	"context"
	"testing"
	"time"

	"mknet/spec/endpoint"
)

// The fence comes again where another call had the endpoint for all of its time.
func TestFenceIsNotLostToABusyEndpoint(t *testing.T) {
	ctx, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	gen := endpoint.NewGeneration()
	e := &Engine{ctx: ctx, graces: map[endpoint.Generation]*time.Timer{}}
	unlock, err := e.endpoints.lock(t.Context(), gen)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	e.graces[gen] = time.NewTimer(time.Hour) // the one that has just fired
	fired := e.graces[gen]
	e.graceOver(gen)
	if now := e.graces[gen]; now == nil || now == fired {
		t.Error("no timer is armed for the fence")
	}
	e.stopGrace(gen)
	e.work.Wait()

	e.closed = true
	e.graceOver(gen)
	if e.graces[gen] != nil {
		t.Error("a closing engine arms a timer")
	}
}

// A flush that failed is owed until one has worked.
func TestFlushIsOwedUntilItWorked(t *testing.T) {
	gen := endpoint.NewGeneration()
	e := &Engine{flushes: map[endpoint.Generation]bool{}}
	ep := endpoint.Endpoint{Generation: gen}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := e.payFlush(ctx, ep); err != nil {
		t.Errorf("nothing is owed: %v", err)
	}
	e.oweFlush(gen)
	if err := e.payFlush(ctx, ep); err == nil || !e.flushes[gen] {
		t.Errorf("a flush that fails: %v, owed %t", err, e.flushes[gen])
	}
}

// The time that a shim is given goes on over a restart of mknetd, and a wall clock that
// was set meanwhile does not take it away.
func TestGraceAfterARestart(t *testing.T) {
	const grace, made, day = 30 * time.Second, time.Hour, 24 * time.Hour // made: since boot
	created := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	asked := created.Add(time.Minute)
	for _, c := range []struct {
		name    string
		made    time.Duration // as recorded
		elapsed time.Duration // since the DEL
		set     time.Duration // the wall clock, since
		want    time.Duration
	}{
		{"at once", made, 0, 0, grace},
		{"in time", made, 10 * time.Second, 0, 20 * time.Second},
		{"too late", made, time.Minute, 0, 0},
		{"a clock that differs by its reading", made, 10 * time.Second, time.Second, 19 * time.Second},
		{"set forward", made, time.Second, day, grace},
		{"set forward by a little", made, time.Second, 29 * time.Second, grace},
		{"set back", made, time.Minute, -day, grace},
		{"a record that has one clock", 0, 10 * time.Second, 0, grace},
	} {
		ep := endpoint.Endpoint{CreatedAt: created, CreatedSinceBoot: c.made, DeleteRequested: &asked}
		if got := graceLeft(ep, grace, asked.Add(c.elapsed+c.set), made+time.Minute+c.elapsed); got != c.want {
			t.Errorf("%s: %v is left, want %v", c.name, got, c.want)
		}
	}
}
