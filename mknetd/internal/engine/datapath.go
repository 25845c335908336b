package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"mknet/mknetd/internal/datapath"
	"mknet/mknetd/internal/enforcer"
	"mknet/mknetd/internal/metrics"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// ebpf is the data path. It is opened for the first ordinary pod or the first
// policy, so that a node with children only loads no program; without it pods are
// forwarded by the kernel's own routing, and there is no policy.
type ebpf struct {
	mu     sync.Mutex
	dp     *datapath.Datapath
	err    error // why there is none, though there should be
	closed bool  // the engine has ended

	purging bool // what no record knows goes with all the rest, unlooked at

	opened   atomic.Pointer[datapath.Datapath] // dp, for those who do not open it
	policy   atomic.Pointer[enforcer.Enforcer] // nil: nothing is enforced
	status   atomic.Pointer[enforcer.Status]   // of policy, as last seen
	flows    atomic.Int64                      // entries of policy, as last collected
	children atomic.Bool                       // child kernels have programs too
}

// datapath returns the data path, nil where the kernel has none. One that could not
// be opened is tried again by the next audit, not by whoever asks.
func (e *Engine) datapath() *datapath.Datapath {
	e.ebpf.mu.Lock()
	defer e.ebpf.mu.Unlock()
	if e.ebpf.dp == nil && e.ebpf.err == nil {
		e.openDatapathLocked()
	}
	return e.ebpf.dp
}

// retryDatapath opens the data path where an earlier attempt failed. The endpoints
// get their programs as an audit gives them back what is missing; what an earlier
// daemon left of others is removed at the next start.
func (e *Engine) retryDatapath() {
	e.ebpf.mu.Lock()
	defer e.ebpf.mu.Unlock()
	if e.ebpf.err == nil {
		return
	}
	if e.openDatapathLocked(); e.ebpf.err == nil {
		e.log.Info("the eBPF data path works now")
	}
}

func (e *Engine) openDatapathLocked() {
	if e.cfg.OpenDatapath == nil || e.ebpf.closed {
		return
	}
	before := e.ebpf.err
	dp, err := e.cfg.OpenDatapath()
	if err == nil {
		err = e.openPolicy(dp)
	}
	if err == nil {
		err = e.followShaping(dp)
	}
	if err != nil {
		e.ebpf.policy.Store(nil)
		if dp != nil {
			err = errors.Join(err, dp.Close())
		}
		if before == nil || before.Error() != err.Error() {
			e.log.Warn("no eBPF data path: pods are forwarded by the host stack, policy is not enforced", "err", err)
		}
		e.ebpf.err = err
		return
	}
	e.ebpf.dp, e.ebpf.err = dp, nil
	e.ebpf.opened.Store(dp)
}

// pathCounters reads what the programs of an ordinary pod have counted.
func (e *Engine) pathCounters(ep endpoint.Endpoint) (api.CountersReply, error) {
	dp := e.datapath()
	if dp == nil {
		return api.CountersReply{}, api.Errorf(api.NotFound, "endpoint %s: pods are forwarded by the host stack, nothing counts them (see `causes` of GET /v1/daemon/health)", ep.Generation)
	}
	counts, err := dp.Counters(ep.Address)
	if errors.Is(err, datapath.ErrNoEndpoint) {
		return api.CountersReply{}, api.Errorf(api.NotFound, "endpoint %s: %v in the data path yet", ep.Generation, err)
	}
	if err != nil {
		return api.CountersReply{}, err
	}
	reply := api.CountersReply{Generation: ep.Generation, ReportedAt: time.Now()}
	for i, c := range counts {
		reply.Path = append(reply.Path, api.PathCount{Outcome: datapath.Outcome(i).String(), Packets: c.Packets, Bytes: c.Bytes})
	}
	return reply, nil
}

// pathFigures are what the programs of all endpoints have counted.
func (e *Engine) pathFigures() map[string]metrics.PathCount {
	dp := e.ebpf.opened.Load()
	if dp == nil {
		return nil
	}
	total, err := dp.Total()
	if err != nil {
		e.log.Error("read what the data path has counted", "err", err)
		return nil
	}
	out := map[string]metrics.PathCount{}
	for i, c := range total {
		out[datapath.Outcome(i).String()] = metrics.PathCount(c)
	}
	return out
}

// datapathTrouble is why pods have no data path that should have one.
func (e *Engine) datapathTrouble() error {
	if !e.ebpf.mu.TryLock() {
		return nil // it is being opened: nothing is known yet, and health waits for nobody
	}
	defer e.ebpf.mu.Unlock()
	return e.ebpf.err
}

func (e *Engine) closeDatapath() {
	e.ebpf.mu.Lock()
	defer e.ebpf.mu.Unlock()
	e.ebpf.closed = true
	if e.ebpf.dp == nil {
		return
	}
	e.ebpf.policy.Store(nil)
	e.ebpf.opened.Store(nil)
	if err := e.ebpf.dp.Close(); err != nil {
		e.log.Error("close the data path", "err", err)
	}
}

// followShaping makes the entries of endpoints again whose host link somebody begins
// or ceases to shape, for as long as the engine lives.
func (e *Engine) followShaping(dp *datapath.Datapath) error {
	links, err := dp.FollowShaping(e.ctx)
	if err != nil {
		return err
	}
	e.work.Go(func() {
		for link := range links {
			if err := e.reshape(link, dp); err != nil && e.ctx.Err() == nil {
				e.log.Error("follow the shaping of a link", "link", link, "err", err)
			}
		}
	})
	return nil
}

func (e *Engine) reshape(link string, dp *datapath.Datapath) error {
	ctx, cancel := context.WithTimeout(e.ctx, createBudget)
	defer cancel()
	var gen endpoint.Generation
	err := e.store.Each(func(ep endpoint.Endpoint) error {
		// One whose link is gone may have a follower with a link of the same name.
		if ep.HostLink == link && ep.Mode == endpoint.Veth && !e.host.LinkGone(ep) {
			gen = ep.Generation
		}
		return nil
	})
	if err != nil || gen.IsZero() {
		return err
	}
	unlock, err := e.endpoints.lock(ctx, gen)
	if err != nil {
		return err
	}
	defer unlock()
	ep, err := e.store.Get(gen)
	if err != nil || ep.State != endpoint.Ready {
		return nil // it goes, or its ADD has not come to the entry yet
	}
	for _, o := range dp.Objects(ep) {
		if o.Kind() != datapath.KindEntry {
			continue
		}
		if err := o.Ensure(ctx); err != nil {
			return err
		}
		e.log.Info("shaping of a link changed", "generation", gen.String(), "link", link)
	}
	return nil
}

// programs are the objects of the data path of one endpoint, and what policy says
// of it, which stands before its first packet and goes after its last.
func (e *Engine) programs(ep endpoint.Endpoint) []object {
	if ep.Mode != endpoint.Veth && !e.ebpf.children.Load() {
		return nil
	}
	dp := e.datapath()
	enforce := e.ebpf.policy.Load()
	if dp == nil || enforce == nil {
		if len(e.rules.Entries()) > 0 {
			return []object{unpoliced{ep}}
		}
		return nil
	}
	list := []object{&policyPoint{enforce: enforce, ep: e.enforcedEndpoint(ep), inspect: dp.Inspect("policy_points")}}
	for _, o := range dp.Objects(ep) {
		list = append(list, o)
	}
	return list
}

// kindPolicy is the kind of what the policy maps hold of an endpoint.
const kindPolicy = "policy"

// unpoliced stands for the programs of an endpoint where policy is in force and
// there is no data path to enforce it: none is made then.
type unpoliced struct{ ep endpoint.Endpoint }

func (u unpoliced) Kind() string  { return kindPolicy }
func (u unpoliced) Name() string  { return u.ep.Address.String() }
func (u unpoliced) Where() string { return endpoint.InHost }
func (u unpoliced) Ensure(context.Context) error {
	return fmt.Errorf("policy of %s: is in force, and there is no eBPF data path to enforce it (mknetd's log has the reason; or `mknetd policy delete`)", u.Name())
}
func (u unpoliced) Check(context.Context) ([]endpoint.Fault, error) { return nil, nil }
func (u unpoliced) Remove(context.Context) error                    { return nil }
func (u unpoliced) Changed() bool                                   { return false }

// servesPods reports whether the node has, or is to have, ordinary pods.
func (e *Engine) servesPods(records []endpoint.Endpoint) bool {
	for _, ep := range records {
		if ep.Mode == endpoint.Veth {
			return true
		}
	}
	return len(e.cfg.PodPools) > 0
}

// knownLinks are the host links that records have.
func knownLinks(records []endpoint.Endpoint) func(string) bool {
	known := map[string]bool{}
	for _, ep := range records {
		known[ep.HostLink] = true
	}
	return func(link string) bool { return known[link] }
}

// programOrphans lists what of the data path belongs to no record.
func (e *Engine) programOrphans(records []endpoint.Endpoint) ([]api.InventoryItem, error) {
	if e.servesPods(records) && !e.ebpf.purging {
		e.datapath()
	}
	dp := e.ebpf.opened.Load()
	if dp == nil {
		return nil, nil
	}
	faults, err := dp.Orphans(knownLinks(records))
	var items []api.InventoryItem
	for _, f := range faults {
		items = append(items, api.InventoryItem{Kind: f.Kind, Object: f.Object, Where: f.Where, Status: api.Orphan, Problem: f.Problem, Inspect: f.Inspect})
	}
	return items, err
}
