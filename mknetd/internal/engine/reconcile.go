package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"golang.org/x/sync/errgroup"

	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/store"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var (
	orphanRemoved = crash.New("engine.orphan-removed")
	shimResumed   = crash.New("engine.shim-resumed")
)

// reconcileParallel bounds how many endpoints are worked on at once at start-up.
const reconcileParallel = 8

// reconcile brings the kernel into agreement with the records, as a restarted
// daemon finds both: deletions are finished, half-made endpoints undone, READY
// ones verified and repaired where that is safe, and objects of ours that no
// record knows removed. Doing it again changes nothing. The rules may be of a moment
// ago: what they lack is looked at again.
func (e *Engine) reconcile(ctx context.Context, rules *ipt.Reading) error {
	all, err := e.store.List()
	if err != nil {
		return err
	}
	// What no record knows goes first: a left-over rule may stand in the way of
	// an endpoint that got the same address since.
	warn := func(what string) {
		e.announce(slog.LevelWarn, "orphan-removed", slog.String("object", what))
	}
	if err := e.removeOrphans(ctx, all, rules, warn); err != nil {
		return err
	}
	faults := firewallView(rules.Endpoints(all))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(reconcileParallel)
	for _, ep := range all {
		g.Go(func() error { return e.reconcileOne(ctx, ep, faults) })
	}
	return g.Wait()
}

// reconcileOne does it for one record. Only an error that concerns all of them
// is returned; what is wrong with this one is logged and tried again.
func (e *Engine) reconcileOne(ctx context.Context, ep endpoint.Endpoint, rules firewallView) error {
	switch ep.State {
	case endpoint.Allocating, endpoint.Deleting:
		if err := e.finishDelete(ctx, ep.Generation); err != nil {
			e.log.Warn("deletion is not finished", "generation", ep.Generation.String(), "err", err)
		}
		return context.Cause(ctx)
	}
	unlock, err := e.endpoints.lock(ctx, ep.Generation)
	if err != nil {
		return err
	}
	defer unlock()
	ns, err := e.reopen(ctx, ep)
	if err != nil {
		e.log.Error("open the namespace", "generation", ep.Generation.String(), "netns", ep.Namespace.Path, "err", err)
		return e.degrade(ep, []endpoint.Fault{{Kind: "netns", Object: ep.Namespace.Path, Where: endpoint.InHost, Problem: err.Error()}})
	}
	if ns == nil {
		return e.namespaceVanished(ctx, ep)
	}
	defer ns.Close()
	if err := e.verify(ctx, ep, ns, rules); err != nil {
		return err
	}
	return e.resumeShim(ctx, ep)
}

// namespaceVanished deals with a READY endpoint whose namespace cannot be found.
// Where it is gone for certain, with its links, nothing is left that could carry a
// packet, and the endpoint is released: a caller that has lost it, or knows it by
// another name now, will never say DEL. Else it is degraded.
func (e *Engine) namespaceVanished(ctx context.Context, ep endpoint.Endpoint) error {
	if !e.provenDead(ctx, ep) {
		return e.degrade(ep, []endpoint.Fault{namespaceGone(ep)})
	}
	e.killShimLocked(ctx, ep)
	if _, err := e.store.BeginDelete(ep.Generation, clearBinding); err != nil {
		return storeError(err)
	}
	deletingRecorded.Here()
	e.deleting(ep, endpoint.Process{}, "its namespace is gone")
	if err := e.finishLocked(ctx, ep); err != nil {
		e.log.Warn("deletion is not finished", "generation", ep.Generation.String(), "err", err)
	}
	return context.Cause(ctx)
}

// verify repairs a READY endpoint and records what could not be repaired.
func (e *Engine) verify(ctx context.Context, ep endpoint.Endpoint, ns *netns.Namespace, rules firewallView) error {
	unlock, err := e.namespaces.lock(ctx, ep.Namespace.Cookie)
	if err != nil {
		return err
	}
	defer unlock()
	// Under this lock an ADD whose caller has gone undoes what was READY, and an
	// endpoint becomes the heir of one that leaves.
	ep, err = e.store.Get(ep.Generation)
	if errors.Is(err, store.ErrNotFound) || err == nil && ep.State != endpoint.Ready {
		return nil
	}
	if err != nil {
		return storeError(err)
	}
	left, err := e.repair(ctx, ep, ns, rules)
	if err != nil {
		if len(ep.Degraded) == 0 {
			e.askForAudit() // what could not be looked at may be well
		}
		left = append(left, endpoint.Fault{Kind: "check", Object: ep.Generation.Short(), Where: endpoint.InHost, Problem: err.Error()})
	}
	return e.degrade(ep, left)
}

// resumeShim takes up the watch over a shim that outlived the daemon, and a DEL
// that waits for it.
func (e *Engine) resumeShim(ctx context.Context, ep endpoint.Endpoint) error {
	if shim := e.recordedShim(ep); shim != nil {
		watch, err := watchShim(*shim)
		switch {
		case err == nil && watch.alive():
			e.keepWatch(ep.Generation, watch)
			shimResumed.Here()
			if ep.DeleteRequested != nil {
				e.startGrace(ep)
			}
			return nil
		case err == nil:
			watch.close()
		case !errors.Is(err, errGone): // the next audit tries again
			e.log.Error("watch a shim that may be alive", "generation", ep.Generation.String(), "err", err)
			return nil
		}
	}
	if ep.DeleteRequested == nil {
		return nil
	}
	if _, err := e.deleteUnboundLocked(ctx, ep, endpoint.Process{}); err != nil {
		e.log.Warn("deletion is not finished", "generation", ep.Generation.String(), "err", err)
	}
	return context.Cause(ctx)
}

// removeOrphans removes what carries our mark and belongs to no record.
func (e *Engine) removeOrphans(ctx context.Context, records []endpoint.Endpoint, rules *ipt.Reading, say func(what string)) error {
	recorded := map[endpoint.Generation]bool{}
	for _, ep := range records {
		recorded[ep.Generation] = true
	}
	removed := map[endpoint.Generation]bool{} // one removal takes all rules of a generation
	for _, o := range rules.Owned() {
		if o.Generation.IsZero() || recorded[o.Generation] || removed[o.Generation] {
			continue
		}
		removed[o.Generation] = true
		if err := e.firewall.RemoveOwned(ctx, o.Generation); err != nil {
			return fmt.Errorf("remove the rules of orphan %s: %w", o.Generation, err)
		}
		orphanRemoved.At("iptables")
		say("iptables rules of " + o.Generation.String())
	}
	objects, err := e.host.Owned(ctx)
	if err != nil {
		return fmt.Errorf("list our links: %w", err)
	}
	for _, o := range objects {
		if recorded[o.Generation] {
			continue
		}
		if err := e.host.RemoveOwned(ctx, o); err != nil {
			return fmt.Errorf("remove orphan %s %s: %w", o.Kind, o.Name, err)
		}
		orphanRemoved.At(o.Kind)
		say(o.Kind + " " + o.Name)
	}
	programs, err := e.programOrphans(records)
	if err != nil || len(programs) == 0 {
		return err
	}
	if err := e.datapath().RemoveOrphans(knownLinks(records)); err != nil {
		return err
	}
	for _, o := range programs {
		say(o.Kind + " " + o.Object)
	}
	return nil
}
