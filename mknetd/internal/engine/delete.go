package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"mknet/mknetd/internal/alloc"
	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/store"
	"mknet/spec/api"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var (
	deletingRecorded = crash.New("engine.deleting-recorded")
	recordRemoved    = crash.New("engine.record-removed")
	namespaceRemoved = crash.New("engine.namespace-removed")
	deleteRequested  = crash.New("engine.delete-requested-recorded")
)

// Delete removes an endpoint (CNI DEL). Nothing there is success. An endpoint
// whose shim is alive is refused as retryable and goes by itself later.
func (e *Engine) Delete(ctx context.Context, req api.DeleteRequest, nsFile *os.File, peer endpoint.Process) (api.DeleteReply, error) {
	ep, err := e.find(req.Selector, nsFile)
	if errors.Is(err, store.ErrNotFound) {
		// The caller tears something down that has another name here, perhaps.
		e.askForAudit()
		return api.DeleteReply{}, nil
	}
	// A caller that means another namespace than the recorded one can only mean
	// what is left of the attachment, where the recorded one is gone.
	elsewhere := req.Generation.IsZero() && api.CodeOf(err) == api.StaleIdentity
	if err != nil && (!elsewhere || !e.provenDead(ctx, ep)) {
		return api.DeleteReply{}, err
	}
	if req.NotAfter != nil && ep.MadeAfter(*req.NotAfter, req.NotAfterBoot) {
		return api.DeleteReply{}, nil // a newer endpoint of the same attachment
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteBudget)
	defer cancel()
	// An ADD of the same attachment holds this lock until it stands or is undone.
	unlockAttachment, err := e.attachments.lock(ctx, ep.Attachment)
	if err != nil {
		return api.DeleteReply{}, busy("attachment "+ep.Attachment.String(), err)
	}
	defer unlockAttachment()
	unlock, err := e.endpoints.lock(ctx, ep.Generation)
	if err != nil {
		return api.DeleteReply{}, busy("endpoint "+ep.Generation.Short(), err)
	}
	defer unlock()
	deleted, err := e.deleteLocked(ctx, ep.Generation, peer)
	if err != nil {
		return api.DeleteReply{}, err
	}
	if !deleted {
		return api.DeleteReply{}, nil
	}
	return api.DeleteReply{Deleted: ep.Generation}, nil
}

// deleteLocked deletes an endpoint unless a live shim has it. It reports whether
// there was an endpoint. The caller holds the locks of attachment and endpoint.
func (e *Engine) deleteLocked(ctx context.Context, gen endpoint.Generation, peer endpoint.Process) (bool, error) {
	ep, err := e.store.Get(gen)
	if errors.Is(err, store.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	switch ep.State {
	case endpoint.Deleting:
	case endpoint.Ready:
		if shim := e.liveShim(ep); shim != nil {
			return false, e.postponeLocked(ep, *shim, peer)
		}
		if _, err := e.store.BeginDelete(gen, clearBinding); err != nil {
			return false, storeError(err)
		}
		deletingRecorded.Here()
		e.deleting(ep, peer, "")
	case endpoint.Allocating: // what an ADD could not undo
		if err := e.abandon(ep); err != nil {
			return false, err
		}
	}
	if err := e.finishLocked(ctx, ep); err != nil {
		return false, &api.Error{
			Code: api.Unavailable, Retryable: true,
			Message: fmt.Sprintf("endpoint %s: not all of it could be removed, it is tried again every %s", gen, retryEvery), Details: lines(err),
		}
	}
	return true, nil
}

// clearBinding is what happens to a record that begins to be deleted.
func clearBinding(ep *endpoint.Endpoint) error {
	ep.Binding, ep.DeleteRequested, ep.Degraded = nil, nil, nil
	return nil
}

// postponeLocked records that a bound endpoint is to go as soon as its shim
// lets it, and refuses the call as one to be tried again.
func (e *Engine) postponeLocked(ep endpoint.Endpoint, shim, peer endpoint.Process) error {
	if ep.DeleteRequested == nil {
		now := time.Now()
		updated, err := e.store.Update(ep.Generation, func(ep *endpoint.Endpoint) error { ep.DeleteRequested = &now; return nil })
		if err != nil {
			return storeError(err)
		}
		deleteRequested.Here()
		ep = updated
		e.audit("delete-requested", ep, peer)
	}
	e.startGrace(ep)
	return api.Retryablef(api.FailedPrecondition,
		"endpoint %s: is bound to sandbox %s and mk-shim (pid %d) is alive: it is deleted on UNBIND, when the shim ends, or after %s",
		ep.Generation, ep.Binding.Sandbox, shim.PID, e.cfg.ShimGrace)
}

// startGrace arms the timer after which the shim of an endpoint that is to go is
// fenced. Armed once per endpoint.
func (e *Engine) startGrace(ep endpoint.Endpoint) {
	e.armGrace(ep.Generation, graceLeft(ep, e.cfg.ShimGrace, time.Now(), e.now().At))
}

// clockSlack is how far the wall clock may be from the clock since boot, against the
// moment at which an endpoint was made, and not count as set: the record's two readings
// are not one.
const clockSlack = 2 * time.Second

// graceLeft is what is left of the grace period at a moment that both clocks tell. A
// record says when its DEL came on the wall clock alone. Where that was set since the
// endpoint was made, as both clocks in the record show, nobody knows how long ago the
// DEL came, and the grace begins again.
func graceLeft(ep endpoint.Endpoint, grace time.Duration, wall time.Time, sinceBoot time.Duration) time.Duration {
	set := wall.Sub(ep.CreatedAt) - (sinceBoot - ep.CreatedSinceBoot)
	if ep.CreatedSinceBoot == 0 || set.Abs() > clockSlack {
		return grace
	}
	return min(max(ep.DeleteRequested.Add(grace).Sub(wall), 0), grace)
}

func (e *Engine) armGrace(gen endpoint.Generation, left time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed || e.graces[gen] != nil {
		return
	}
	e.work.Add(1)
	e.graces[gen] = time.AfterFunc(left, func() {
		defer e.work.Done()
		e.graceOver(gen)
	})
}

// stopGrace disarms it.
func (e *Engine) stopGrace(gen endpoint.Generation) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.graces[gen]; t != nil {
		if t.Stop() {
			e.work.Done()
		}
		delete(e.graces, gen)
	}
}

// graceOver fences the shim and deletes the endpoint. Where it cannot, it comes again.
func (e *Engine) graceOver(gen endpoint.Generation) {
	ctx, cancel := context.WithTimeout(e.ctx, deleteBudget)
	defer cancel()
	unlock, err := e.endpoints.lock(ctx, gen)
	e.mu.Lock()
	delete(e.graces, gen)
	e.mu.Unlock()
	if err != nil {
		// Another call hangs in it, or the engine is closing and the record keeps
		// deleteRequested.
		e.armGrace(gen, retryEvery)
		return
	}
	defer unlock()
	ep, err := e.store.Get(gen)
	if err != nil || ep.DeleteRequested == nil {
		return
	}
	e.killShimLocked(ctx, ep)
	if _, err := e.store.BeginDelete(gen, clearBinding); err != nil {
		e.log.Error("delete after the grace period", "generation", gen.String(), "err", err)
		e.armGrace(gen, retryEvery)
		return
	}
	deletingRecorded.Here()
	e.deleting(ep, endpoint.Process{}, "deleteRequested and the shim did not end in time")
	if err := e.finishLocked(ctx, ep); err != nil {
		e.log.Warn("deletion is not finished", "generation", gen.String(), "err", err)
	}
}

// finishDelete takes the endpoint's lock and finishes a deletion.
func (e *Engine) finishDelete(ctx context.Context, gen endpoint.Generation) error {
	unlock, err := e.endpoints.lock(ctx, gen)
	if err != nil {
		return err
	}
	defer unlock()
	ep, err := e.store.Get(gen)
	switch {
	case errors.Is(err, store.ErrNotFound):
		return nil
	case err != nil:
		return err
	case ep.State == endpoint.Allocating:
		// Nobody else works on it: its ADD would hold the attachment's lock.
		if err := e.abandon(ep); err != nil {
			return err
		}
	case ep.State == endpoint.Ready:
		return nil
	}
	return e.finishLocked(ctx, ep)
}

// abandon begins the deletion of an endpoint that was never READY.
func (e *Engine) abandon(ep endpoint.Endpoint) error {
	if _, err := e.store.BeginDelete(ep.Generation, nil); err != nil {
		return storeError(err)
	}
	deletingRecorded.Here()
	e.deleting(ep, endpoint.Process{}, "its ADD was not finished")
	return nil
}

// deleting tells that a deletion has begun.
func (e *Engine) deleting(ep endpoint.Endpoint, by endpoint.Process, why string) {
	ep.State = endpoint.Deleting
	if why == "" {
		e.audit("deleting", ep, by)
		return
	}
	e.audit("deleting", ep, by, slog.String("why", why))
}

// finishLocked removes the kernel objects of a DELETING endpoint and then its
// record. The caller holds the endpoint's lock.
func (e *Engine) finishLocked(ctx context.Context, ep endpoint.Endpoint) error {
	e.stopGrace(ep.Generation)
	e.forgetShim(ep.Generation)
	ns, err := e.reopen(ctx, ep)
	if err != nil {
		return err
	}
	if ns != nil {
		defer ns.Close()
		unlock, err := e.namespaces.lock(ctx, ep.Namespace.Cookie)
		if err != nil {
			return busy("namespace "+ns.String(), err)
		}
		defer unlock()
	}
	// Another endpoint that left the namespace meanwhile may have made this one its heir.
	now, err := e.store.Get(ep.Generation)
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return storeError(err)
	}
	return e.dismantle(ctx, now, ns)
}

// dismantle removes the objects and the record. The caller holds the locks of
// the endpoint (or of its attachment, in an ADD) and of the namespace.
func (e *Engine) dismantle(ctx context.Context, ep endpoint.Endpoint, ns *netns.Namespace) error {
	if err := removeAll(ctx, e.table(ep, ns), e.changes(ep)); err != nil {
		return err
	}
	if ns != nil {
		if err := e.handOver(ctx, ep, ns); err != nil {
			return err
		}
	}
	if ep.Namespace.Owned {
		if err := netns.Remove(ep.Generation); err != nil {
			return err
		}
		namespaceRemoved.Here()
	}
	now := e.now()
	if err := e.store.Finish(ep.Generation, store.Freed{Slot: ep.Slot, BootID: now.BootID, At: now.At}); err != nil {
		return storeError(err)
	}
	recordRemoved.Here()
	e.figures.drop(ep.Generation)
	e.mu.Lock()
	delete(e.nonces, ep.Generation)
	delete(e.flushes, ep.Generation)
	e.mu.Unlock()
	if err := e.freeAddress(ep, now); err != nil {
		e.log.Error("free a slot", "generation", ep.Generation.String(), "err", err)
	}
	e.leaveSubnet(ctx, ep)
	ep.State = endpoint.Deleting
	e.audit("deleted", ep, endpoint.Process{})
	return nil
}

// freeAddress gives the address of an endpoint back whose record is gone.
func (e *Engine) freeAddress(ep endpoint.Endpoint, now alloc.Instant) error {
	if ep.Mode == endpoint.Veth {
		return e.addresses.release(ep.Address, now, false)
	}
	return e.slots.Free(ep.Slot, now)
}

// reopen finds an endpoint's namespace again; nil when it is gone.
func (e *Engine) reopen(ctx context.Context, ep endpoint.Endpoint) (*netns.Namespace, error) {
	if ep.Namespace.BootID != e.bootID {
		return nil, nil
	}
	if ep.Namespace.Owned {
		ns, err := netns.FindOwned(ep.Generation)
		if err == nil && !ns.ID().Same(ep.Namespace) {
			ns.Close()
			return nil, nil
		}
		if errors.Is(err, netns.ErrGone) {
			return nil, nil
		}
		return ns, err
	}
	ns, err := netns.Find(ctx, ep.Namespace)
	if errors.Is(err, netns.ErrGone) {
		return nil, nil
	}
	return ns, err
}

// retryDeletions finishes what an earlier deletion had to leave, and undoes what
// an ADD could not even record as DELETING.
func (e *Engine) retryDeletions() {
	tick := time.NewTicker(retryEvery)
	defer tick.Stop()
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-tick.C:
		}
		if n := e.store.Counts().ByState; n[endpoint.Deleting]+n[endpoint.Allocating] == 0 {
			continue
		}
		all, err := e.store.List()
		if err != nil {
			e.log.Error("list endpoints", "err", err)
			continue
		}
		for _, ep := range all {
			if ep.State == endpoint.Ready {
				continue
			}
			ctx, cancel := context.WithTimeout(e.ctx, deleteBudget)
			if err := e.retryDeletion(ctx, ep); err != nil {
				e.log.Warn("deletion is not finished", "generation", ep.Generation.String(), "err", err)
			}
			cancel()
		}
	}
}

// retryDeletion finishes one deletion, or undoes an ADD whose call has ended. Who
// holds the attachment does it by himself: an ADD that is at work, or that is undoing
// and has no lock of the endpoint, or a DEL.
func (e *Engine) retryDeletion(ctx context.Context, ep endpoint.Endpoint) error {
	unlock, ok := e.attachments.tryLock(ep.Attachment)
	if !ok {
		return nil
	}
	defer unlock()
	return e.finishDelete(ctx, ep.Generation)
}
