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
