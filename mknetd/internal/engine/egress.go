package engine

import (
	"context"
	"log/slog"

	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/topo"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var heirRecorded = crash.New("engine.heir-recorded") // of the main default route

// followEgress keeps endpoints leaving by the host's egress when that changes:
// another interface, or another address on it.
func (e *Engine) followEgress(changed <-chan struct{}) {
	for range changed {
		before := e.readEgress()
		if err := e.refreshEgress(); err != nil {
			e.log.Error("read the egress", "err", err)
			continue
		}
		e.askForAudit()
		now := e.readEgress()
		if now.Name == "" || now.Name == before.Name && now.Addr == before.Addr {
			continue
		}
		e.announce(slog.LevelInfo, "egress-changed", slog.String("link", now.Name), slog.String("address", now.Addr.String()), slog.String("was", before.Name))
		if err := e.moveAll(e.ctx, now); err != nil && e.ctx.Err() == nil {
			e.log.Error("move endpoints to the new egress", "link", now.Name, "err", err)
		}
	}
}

func (e *Engine) readEgress() topo.Egress {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.egress
}

// moveAll moves every READY endpoint to the egress.
func (e *Engine) moveAll(ctx context.Context, to topo.Egress) error {
	all, err := e.store.List()
	if err != nil {
		return err
	}
	for _, ep := range all {
		if ep.State != endpoint.Ready || ep.Egress == to.Name && ep.EgressAddr == to.Addr {
			continue
		}
		if err := e.moveOne(ctx, ep.Generation, to); err != nil {
			e.log.Error("move an endpoint to the new egress", "generation", ep.Generation.String(), "link", to.Name, "err", err)
		}
	}
	return context.Cause(ctx)
}

// moveOne records the new egress and makes the objects that depend on it again.
// The record comes first: a daemon that dies in between repairs at its start.
func (e *Engine) moveOne(ctx context.Context, gen endpoint.Generation, to topo.Egress) error {
	ctx, cancel := context.WithTimeout(ctx, createBudget)
	defer cancel()
	unlock, err := e.endpoints.lock(ctx, gen)
	if err != nil {
		return err
	}
	defer unlock()
	old, err := e.store.Get(gen)
	if err != nil || old.State != endpoint.Ready {
		return nil // deleted meanwhile
	}
	ep, err := e.store.Update(gen, func(ep *endpoint.Endpoint) error {
		ep.Egress, ep.EgressAddr = to.Name, to.Addr
		return nil
	})
	if err != nil {
		return storeError(err)
	}
	ns, err := e.reopen(ctx, ep)
	if err != nil || ns == nil {
		return err // degraded, DEL is all that is left
	}
	defer ns.Close()
	if err := e.verify(ctx, ep, ns, nil); err != nil {
		return err
	}
	// Flows that were translated to the old address cannot go on.
	if err := e.flush(ctx, ep.Address); err != nil {
		return err
	}
	e.audit("egress-changed", ep, endpoint.Process{}, slog.String("link", to.Name), slog.String("was", old.Egress))
	return nil
}

// handOver gives the main default route of a namespace, which went with the
// endpoint that had it, to another one there. The caller holds the namespace's
// lock.
func (e *Engine) handOver(ctx context.Context, gone endpoint.Endpoint, ns *netns.Namespace) error {
	if !gone.MainDefault {
		return nil
	}
	left, err := e.store.ByNamespace(gone.Namespace)
	if err != nil {
		return err
	}
	for _, ep := range left {
		if ep.Generation == gone.Generation || ep.State != endpoint.Ready {
			continue
		}
		heir, err := e.store.Update(ep.Generation, func(ep *endpoint.Endpoint) error { ep.MainDefault = true; return nil })
		if err != nil {
			return storeError(err)
		}
		heirRecorded.Here()
		return ensureAll(ctx, []object{e.host.MainDefault(heir, ns)}, e.changes(heir))
	}
	return nil
}
