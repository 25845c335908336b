package engine

import (
	"context"
	"sync"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// figures is what shims have reported, in memory only: a shim that outlives the
// daemon reports its totals to the next one.
type figures struct {
	mu sync.Mutex
	of map[endpoint.Generation]api.CountersReply // made by the first report
	// gone is what endpoints carried that are no more: totals never go down.
	gone api.Counters
}

// drop forgets an endpoint whose record is gone.
func (f *figures) drop(gen endpoint.Generation) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if rep, ok := f.of[gen]; ok {
		f.gone = rep.Counters.Plus(f.gone)
		f.gone.RTTNanoseconds = 0
	}
	delete(f.of, gen)
}

// total is what all endpoints have carried; its round trip is the longest one.
func (f *figures) total() api.Counters {
	f.mu.Lock()
	defer f.mu.Unlock()
	sum := f.gone
	longest := int64(0)
	for _, rep := range f.of {
		sum = rep.Counters.Plus(sum)
		longest = max(longest, rep.Counters.RTTNanoseconds)
	}
	sum.RTTNanoseconds = longest
	return sum
}

// Counters returns the last report about an endpoint; of an ordinary pod what the
// programs of its data path count.
func (e *Engine) Counters(_ context.Context, gen endpoint.Generation) (api.CountersReply, error) {
	ep, err := e.store.Get(gen)
	if err != nil {
		return api.CountersReply{}, notFound(err)
	}
	if ep.Mode == endpoint.Veth {
		return e.pathCounters(ep)
	}
	e.figures.mu.Lock()
	defer e.figures.mu.Unlock()
	rep, ok := e.figures.of[gen]
	if !ok {
		return rep, api.Errorf(api.NotFound, "endpoint %s: no shim has reported its counters to this mknetd (a running one does every few seconds)", gen)
	}
	return rep, nil
}

// ReportCounters keeps what the attached shim says that the endpoint's shims have
// carried. It takes no lock of an endpoint: a shim reports while a DEL works.
func (e *Engine) ReportCounters(_ context.Context, gen endpoint.Generation, req api.CountersReport, peer endpoint.Process) error {
	// The record is read under the lock that drop takes after the record is gone, so
	// that no report stays behind.
	e.figures.mu.Lock()
	defer e.figures.mu.Unlock()
	ep, err := e.store.Get(gen)
	switch {
	case err != nil:
		return notFound(err)
	case ep.Binding == nil || ep.Binding.Sandbox != req.Sandbox:
		return api.Errorf(api.StaleGeneration, "endpoint %s: is not bound to sandbox %s", gen, req.Sandbox)
	case ep.Binding.Shim == nil || !same(*ep.Binding.Shim, peer):
		return api.Errorf(api.StaleGeneration, "endpoint %s: %s is not the shim that attached last", gen, processName(peer))
	}
	if below := req.Counters.Below(e.figures.of[gen].Counters); below != "" {
		return api.Errorf(api.FailedPrecondition, "endpoint %s: %s: counters never go down (read them first and add to them)", gen, below)
	}
	if e.figures.of == nil {
		e.figures.of = map[endpoint.Generation]api.CountersReply{}
	}
	e.figures.of[gen] = api.CountersReply{Generation: gen, ReportedAt: time.Now(), Counters: req.Counters}
	return nil
}
