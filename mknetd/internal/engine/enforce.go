package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"mknet/mknetd/internal/datapath"
	"mknet/mknetd/internal/enforcer"
	"mknet/mknetd/internal/metrics"
	"mknet/mknetd/internal/store"
	wire "mknet/spec/api"
	"mknet/spec/endpoint"
)

// collectEvery is how often admitted flows that have ended are removed
// (spec/policy-datapath.md, "GC").
const collectEvery = 30 * time.Second

// openPolicy brings the policy maps to the documents and records. It is done before
// the first program is attached by this process; those of an earlier one have
// enforced what that one knew.
func (e *Engine) openPolicy(dp *datapath.Datapath) error {
	enforce, err := enforcer.Open(dp.Policy(), policyPools(e.cfg))
	if err != nil {
		return err
	}
	var endpoints []enforcer.Endpoint
	err = e.store.Each(func(ep endpoint.Endpoint) error {
		// Also of one that is being deleted: its link may still be up.
		if ep.Mode == endpoint.Veth || e.ebpf.children.Load() {
			endpoints = append(endpoints, e.enforcedEndpoint(ep))
		}
		return nil
	})
	if err != nil {
		return err
	}
	err = enforce.Apply(e.rules.Set(), e.rules.Numbers(), endpoints)
	if err != nil && enforce.Status().Err == nil {
		return err // nothing of it could be begun
	}
	e.ebpf.policy.Store(enforce) // what is left is tried again by the audit
	if err != nil {
		e.log.Error("policy is not in the kernel yet, it is tried again", "err", err)
		e.askForAudit()
	}
	return nil
}

// enforcedEndpoint is what the policy maps hold of an endpoint.
func (e *Engine) enforcedEndpoint(ep endpoint.Endpoint) enforcer.Endpoint {
	return enforcer.Endpoint{Endpoint: policyEndpoint(ep), ID: datapath.Identity(ep.Generation), Probes: e.cfg.NodeProbes}
}

// policyStatus is how far the kernel is; where a change is under way, as it was
// before: who asks for health waits for no kernel.
func (e *Engine) policyStatus() (enforcer.Status, bool) {
	enforce := e.ebpf.policy.Load()
	if enforce == nil {
		return enforcer.Status{}, false
	}
	if s, ok := enforce.TryStatus(); ok {
		e.ebpf.status.Store(&s)
	}
	if s := e.ebpf.status.Load(); s != nil {
		return *s, true
	}
	return enforcer.Status{}, true
}

// canEnforce refuses policies on a node that could not enforce them.
func (e *Engine) canEnforce() error {
	if e.datapath() == nil {
		why := e.datapathTrouble()
		if why == nil {
			why = errors.New("none is configured")
		}
		return wire.Errorf(wire.FailedPrecondition, "policy cannot be enforced here: no eBPF data path: %v", why)
	}
	return nil
}

// enforceLocked brings the kernel to the documents. The caller holds policyMu.
func (e *Engine) enforceLocked(ctx context.Context) error {
	if e.ebpf.opened.Load() == nil && len(e.rules.Entries()) == 0 {
		return nil // nothing is, and nothing was
	}
	e.datapath()
	enforce := e.ebpf.policy.Load()
	if enforce == nil {
		return e.canEnforce()
	}
	return errors.Join(enforce.SetPolicies(e.rules.Set(), e.rules.Numbers()), e.policeChildren(ctx))
}

// policeChildren gives the children that stand their programs, once: those that
// are made later get them with the rest.
func (e *Engine) policeChildren(ctx context.Context) error {
	if e.ebpf.children.Swap(true) {
		return nil
	}
	all, err := e.store.List()
	if err != nil {
		return err
	}
	var errs []error
	for _, ep := range all {
		if ep.Mode != endpoint.Multikernel || ep.State == endpoint.Deleting {
			continue
		}
		if err := e.policeChild(ctx, ep); err != nil {
			errs = append(errs, fmt.Errorf("endpoint %s: %w", ep.Generation, err))
		}
	}
	if len(errs) > 0 {
		e.askForAudit() // which makes what is missing
	}
	return errors.Join(errs...)
}

func (e *Engine) policeChild(ctx context.Context, ep endpoint.Endpoint) error {
	ctx, cancel := context.WithTimeout(ctx, createBudget)
	defer cancel()
	if ep.State == endpoint.Allocating {
		// Its ADD may have read the table of objects before; it holds this lock.
		unlock, err := e.attachments.lock(ctx, ep.Attachment)
		if err != nil {
			return busy("attachment "+ep.Attachment.String(), err)
		}
		defer unlock()
	}
	unlock, err := e.endpoints.lock(ctx, ep.Generation)
	if err != nil {
		return busy("endpoint "+ep.Generation.Short(), err)
	}
	defer unlock()
	now, err := e.store.Get(ep.Generation)
	if errors.Is(err, store.ErrNotFound) || err == nil && now.State != endpoint.Ready {
		return nil
	}
	if err != nil {
		return err
	}
	return ensureAll(ctx, e.programs(now), e.changes(now))
}

// policyFigures are what the programs have counted.
func (e *Engine) policyFigures() metrics.Policy {
	dp := e.ebpf.opened.Load()
	if dp == nil {
		return metrics.Policy{}
	}
	reasons, err := dp.Policy().Reasons()
	if err != nil {
		e.log.Error("read what policy has counted", "err", err)
		return metrics.Policy{}
	}
	out := metrics.Policy{Packets: map[string]uint64{}, Flows: int(e.ebpf.flows.Load())}
	for r, n := range reasons {
		out.Packets[r.String()] = n
	}
	return out
}

// policyPoint is what the policy maps hold of one endpoint.
type policyPoint struct {
	enforce *enforcer.Enforcer
	ep      enforcer.Endpoint
	inspect string

	changed bool
}

func (p *policyPoint) Kind() string  { return kindPolicy }
func (p *policyPoint) Name() string  { return p.ep.Address.String() }
func (p *policyPoint) Where() string { return endpoint.InHost }
func (p *policyPoint) Changed() bool { return p.changed }

func (p *policyPoint) Ensure(context.Context) (err error) {
	p.changed, err = p.enforce.SetEndpoint(p.ep)
	return err
}

func (p *policyPoint) Remove(context.Context) (err error) {
	p.changed, err = p.enforce.RemoveEndpoint(p.ep)
	return err
}

// Check compares the maps with what was written. A change of documents that could
// not be written yet is in health, for all endpoints at once.
func (p *policyPoint) Check(context.Context) ([]endpoint.Fault, error) {
	problems, err := p.enforce.CheckEndpoint(p.ep.Address)
	var faults []endpoint.Fault
	for _, problem := range problems {
		faults = append(faults, endpoint.Fault{Kind: p.Kind(), Object: p.Name(), Where: p.Where(), Problem: problem, Inspect: p.inspect})
	}
	return faults, err
}

// collectFlows removes admitted flows that have ended, for as long as the engine
// lives.
func (e *Engine) collectFlows() {
	tick := time.NewTicker(collectEvery)
	defer tick.Stop()
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-tick.C:
		}
		dp := e.ebpf.opened.Load()
		if dp == nil {
			continue
		}
		c, err := dp.Policy().Collect()
		if err != nil {
			e.log.Error("collect the flows that policy admitted", "err", err)
			continue
		}
		e.ebpf.flows.Store(int64(c.Entries - c.Expired - c.Orphaned))
		e.log.Debug("collected flows", "entries", c.Entries, "expired", c.Expired, "orphaned", c.Orphaned, "kept", c.Kept, "took", c.Took)
	}
}
