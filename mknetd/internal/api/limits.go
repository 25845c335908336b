package api

import (
	"context"
	"sync/atomic"
	"time"

	"mknet/spec/api"
)

// Limits bound what callers can make the server hold. The zero value of a field
// is the default of DefaultLimits.
type Limits struct {
	Conns      int // open connections; further ones get RESOURCE_EXHAUSTED
	Changes    int // calls at work that change something
	Reads      int // reads of records at work, and as many CHECKs, each counted apart: they pass waiting ADDs, and a kernel that hangs a CHECK
	Surveys    int // inventories and GCs at work: each visits every endpoint
	Followers  int // streams of events
	QueuedEach int // calls that wait for a place, for each of the four
	QueueWait  time.Duration

	Change time.Duration // deadline of one call that changes something
	Read   time.Duration // of one read
	Survey time.Duration // of one inventory or GC

	Header time.Duration // reading a request's head
	Body   time.Duration // reading a request's body
	Reply  time.Duration // writing a reply
	Idle   time.Duration // a connection between two requests
	Drain  time.Duration // calls at work when the server is told to end
	// HandOver is Drain where callers wait for the next server meanwhile: with the
	// start of that one it is below what mk-cni waits for an answer.
	HandOver time.Duration
}

// DefaultLimits fit mk-cni's 20 s for an ADD: waiting, the call and the reply
// come to less, so that mk-cni hears the reason instead of giving up.
var DefaultLimits = Limits{
	Conns: 1024, Changes: 32, Reads: 32, Surveys: 2, Followers: 16, QueuedEach: 512, QueueWait: 4 * time.Second,
	Change: 15 * time.Second, Read: 20 * time.Second, Survey: 60 * time.Second,
	Header: 5 * time.Second, Body: 5 * time.Second, Reply: 10 * time.Second, Idle: 60 * time.Second,
	Drain: 20 * time.Second, HandOver: 5 * time.Second,
}

func (l Limits) withDefaults() Limits {
	set := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	setD := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	d := DefaultLimits
	set(&l.Conns, d.Conns)
	set(&l.Changes, d.Changes)
	set(&l.Reads, d.Reads)
	set(&l.Surveys, d.Surveys)
	set(&l.Followers, d.Followers)
	set(&l.QueuedEach, d.QueuedEach)
	setD(&l.QueueWait, d.QueueWait)
	setD(&l.Change, d.Change)
	setD(&l.Read, d.Read)
	setD(&l.Survey, d.Survey)
	setD(&l.Header, d.Header)
	setD(&l.Body, d.Body)
	setD(&l.Reply, d.Reply)
	setD(&l.Idle, d.Idle)
	setD(&l.Drain, d.Drain)
	setD(&l.HandOver, d.HandOver)
	return l
}

// lane bounds the calls of one kind that are at work, and those that wait. A
// call is counted only between its last byte in and its first byte out: a slow
// caller holds a connection, never a place.
type lane struct {
	name     string
	places   chan struct{}
	waiting  atomic.Int32
	maxWait  int32
	wait     time.Duration
	deadline time.Duration
}

func newLane(name string, places, maxWaiting int, wait, deadline time.Duration) *lane {
	return &lane{name: name, places: make(chan struct{}, places), maxWait: int32(maxWaiting), wait: wait, deadline: deadline}
}

// enter waits for a place and returns how to leave it. The errors are retryable.
func (l *lane) enter(ctx context.Context) (leave func(), err error) {
	leave = func() { <-l.places }
	select {
	case l.places <- struct{}{}:
		return leave, nil
	default:
	}
	if l.waiting.Add(1) > l.maxWait {
		l.waiting.Add(-1)
		return nil, api.Retryablef(api.ResourceExhausted, "%d %s are at work and %d wait: try again later", cap(l.places), l.name, l.maxWait)
	}
	defer l.waiting.Add(-1)
	timer := time.NewTimer(l.wait)
	defer timer.Stop()
	select {
	case l.places <- struct{}{}:
		return leave, nil
	case <-timer.C:
		return nil, api.Retryablef(api.Unavailable, "waited %s behind %d other %s: try again later", l.wait, cap(l.places), l.name)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
