package engine

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/topo"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var heirRecorded = crash.New("engine.heir-recorded") // of the main default route

// What could not be done about the egress is tried again after egressAgain, then after
// twice as long, at most egressAgainMost.
const (
	egressAgain     = time.Second
	egressAgainMost = 30 * time.Second
)

// followEgress keeps endpoints leaving by the host's egress when that changes:
// another interface, or another address on it. It goes by what is recorded, not by the
// report alone: nobody watched while mknetd was away, and an ADD that was at work has
// still read the old one.
func (e *Engine) followEgress(changed <-chan struct{}) {
	again := time.NewTimer(0)
	defer again.Stop()
	wait := egressAgain
	for {
		select {
		case _, open := <-changed:
			if !open {
				return
			}
			e.askForAudit()
		case <-e.egressNow:
		case <-again.C:
		}
		err := e.matchEgress(e.ctx)
		switch {
		case e.ctx.Err() != nil:
			return
		case err == nil:
			wait = egressAgain
		default:
			e.log.Error("follow the egress", "err", err, "again", wait)
			again.Reset(wait)
			wait = min(2*wait, egressAgainMost)
		}
	}
}

// askForEgress has the endpoints compared with the egress soon.
func (e *Engine) askForEgress() {
	select {
	case e.egressNow <- struct{}{}:
	default:
	}
}

// matchEgress reads the egress and moves to it every endpoint that leaves by another.
// Where there is none they stay as they are.
func (e *Engine) matchEgress(ctx context.Context) error {
	before := e.readEgress()
	if err := e.refreshEgress(); err != nil {
		return err
	}
	now := e.readEgress()
	if now.Name == "" {
		return nil
	}
	if now.Name != before.Name || now.Addr != before.Addr {
		e.announce(slog.LevelInfo, "egress-changed", slog.String("link", now.Name), slog.String("address", now.Addr.String()), slog.String("was", before.Name))
	}
	return e.moveAll(ctx, now)
}

func leavesBy(ep endpoint.Endpoint, egress topo.Egress) bool {
	return ep.Egress == egress.Name && ep.EgressAddr == egress.Addr
}

func (e *Engine) readEgress() topo.Egress {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.egress
}

// moveAll moves every READY endpoint to the egress, past errors.
func (e *Engine) moveAll(ctx context.Context, to topo.Egress) error {
	all, err := e.store.List()
	if err != nil {
		return err
	}
	var first error
	failed := 0
	for _, ep := range all {
		if ep.State != endpoint.Ready || leavesBy(ep, to) {
			continue
		}
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if err := e.moveOne(ctx, ep.Generation, to); err != nil {
			if failed++; first == nil {
				first = fmt.Errorf("endpoint %s: %w", ep.Generation, err)
			}
		}
	}
	if failed > 0 {
		return fmt.Errorf("move to the egress %s: %d endpoints are not moved: %w", to.Name, failed, first)
	}
	return nil
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
	if err != nil || old.State != endpoint.Ready || leavesBy(old, to) {
		return nil // deleted or moved meanwhile
	}
	ep, err := e.store.Update(gen, func(ep *endpoint.Endpoint) error {
		ep.Egress, ep.EgressAddr = to.Name, to.Addr
		return nil
	})
	if err != nil {
		return storeError(err)
	}
	e.oweFlush(gen) // flows that were translated to the old address cannot go on
	ns, err := e.reopen(ctx, ep)
	if err != nil || ns == nil {
		return err // degraded, DEL is all that is left
	}
	defer ns.Close()
	if err := e.verify(ctx, ep, ns, nil); err != nil {
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
