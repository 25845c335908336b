package engine

import (
	"context"
	"log/slog"
	"slices"
	"strings"

	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/metrics"
	"mknet/mknetd/internal/netns"
	"mknet/spec/api"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var (
	repaired         = crash.New("engine.repaired")
	degradedRecorded = crash.New("engine.degraded-recorded")
)

// Check compares every kernel object of an endpoint with its record (CNI CHECK).
func (e *Engine) Check(ctx context.Context, gen endpoint.Generation, sel api.Selector) (api.CheckReply, error) {
	if sel.Generation.IsZero() {
		sel.Generation = gen
	}
	ep, err := e.find(sel, nil)
	if err != nil {
		return api.CheckReply{}, notFound(err)
	}
	if sel.Namespace != nil && !ep.Namespace.Same(*sel.Namespace) {
		return api.CheckReply{}, api.Errorf(api.StaleIdentity, "endpoint %s: is in another namespace (%s) than the one given", ep.Generation, ep.Namespace.Path)
	}
	if ep.State != endpoint.Ready {
		return api.CheckReply{}, api.Errorf(api.FailedPrecondition, "endpoint %s: is %s", ep.Generation, ep.State)
	}
	unlock, err := e.endpoints.lock(ctx, ep.Generation)
	if err != nil {
		return api.CheckReply{}, busy("endpoint "+ep.Generation.Short(), err)
	}
	defer unlock()
	if ep, err = e.store.Get(ep.Generation); err != nil {
		return api.CheckReply{}, notFound(err)
	}
	faults, err := e.faults(ctx, ep)
	if err != nil {
		return api.CheckReply{}, err
	}
	shared, err := e.firewall.CheckShared(ctx)
	if err != nil {
		return api.CheckReply{}, err
	}
	faults = append(faults, shared...)
	e.tally.found(metrics.ByCheck, faults)
	return api.CheckReply{Endpoint: ep, Faults: faults}, nil
}

// faults looks at every object of one endpoint.
func (e *Engine) faults(ctx context.Context, ep endpoint.Endpoint) ([]endpoint.Fault, error) {
	ns, err := e.reopen(ctx, ep)
	if err != nil {
		return nil, err
	}
	faults := []endpoint.Fault{}
	if ns == nil {
		faults = append(faults, namespaceGone(ep))
	} else {
		defer ns.Close()
	}
	found, err := checkAll(ctx, e.table(ep, ns))
	return append(faults, found...), err
}

func namespaceGone(ep endpoint.Endpoint) endpoint.Fault {
	return endpoint.Fault{Kind: "netns", Object: ep.Namespace.Path, Where: endpoint.InHost, Problem: "missing", Inspect: "ip netns list"}
}

// degrade records what is wrong with a READY endpoint, if that has changed.
func (e *Engine) degrade(ep endpoint.Endpoint, faults []endpoint.Fault) error {
	var reasons []string
	for _, f := range faults {
		reasons = append(reasons, f.String())
	}
	if slices.Equal(reasons, ep.Degraded) {
		return nil
	}
	updated, err := e.store.Update(ep.Generation, func(ep *endpoint.Endpoint) error { ep.Degraded = reasons; return nil })
	if err != nil {
		return storeError(err)
	}
	degradedRecorded.Here()
	if len(reasons) > 0 {
		e.degraded(updated, reasons)
	} else {
		e.audit("healthy", updated, endpoint.Process{})
	}
	return nil
}

// degraded tells what is wrong with an endpoint from now on.
func (e *Engine) degraded(ep endpoint.Endpoint, reasons []string) {
	e.events.add(api.Event{
		Kind: api.EventEndpoint, What: "degraded", Endpoint: ep.Attachment.String(), Generation: ep.Generation, State: ep.State,
		Details: map[string]string{"faults": strings.Join(reasons, "; ")},
	})
	e.log.Warn("endpoint is degraded", "generation", ep.Generation.String(), "faults", reasons)
}

// repair makes again what may be made again under a running pump, and returns
// the faults that are left.
func (e *Engine) repair(ctx context.Context, ep endpoint.Endpoint, ns *netns.Namespace, rules firewallView) ([]endpoint.Fault, error) {
	var left []endpoint.Fault
	for i, o := range e.table(ep, ns) {
		found, err := rules.check(ctx, ep, o)
		if err != nil {
			return left, err
		}
		if len(found) == 0 {
			continue
		}
		e.tally.found(metrics.ByAudit, found)
		if !repairable(o) {
			left = append(left, found...)
			continue
		}
		err = o.Ensure(ctx)
		e.tally.repaired(o.Kind(), err)
		if err != nil {
			e.log.Warn("repair", "generation", ep.Generation.String(), "object", o.Kind()+" "+o.Name(), "err", err)
		} else {
			e.changed(api.ObjectRepaired, ep, o, slog.String("was", found[0].Problem))
			if strings.HasPrefix(o.Name(), "nat ") {
				e.oweFlush(ep.Generation) // a flow that began while the rule was missing stays untranslated
			}
		}
		repaired.At(place(i, o))
		if found, err = o.Check(ctx); err != nil {
			return left, err
		}
		left = append(left, found...)
	}
	return left, e.payFlush(ctx, ep)
}

// oweFlush notes that the flows of an endpoint are to be forgotten once its rules are
// right. The note stays until that has worked.
func (e *Engine) oweFlush(gen endpoint.Generation) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.flushes[gen] = true
}

// payFlush does it where it is owed. The caller holds the endpoint's lock.
func (e *Engine) payFlush(ctx context.Context, ep endpoint.Endpoint) error {
	e.mu.Lock()
	owed := e.flushes[ep.Generation]
	e.mu.Unlock()
	if !owed {
		return nil
	}
	if err := e.flush(ctx, ep.Address); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.flushes, ep.Generation)
	return nil
}

// firewallView is one reading of the rules of many endpoints, so that looking at
// all of them does not read the whole ruleset once for each. A nil view reads
// afresh.
type firewallView map[endpoint.Generation][]endpoint.Fault

// check is o.Check, spared where the view has shown that the rules of the
// endpoint are as they should be.
func (v firewallView) check(ctx context.Context, ep endpoint.Endpoint, o object) ([]endpoint.Fault, error) {
	if _, rules := o.(*ipt.Table); rules && v != nil && len(v[ep.Generation]) == 0 {
		return nil, nil
	}
	return o.Check(ctx)
}
