package engine

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var (
	bindRecorded   = crash.New("engine.bind-recorded")
	unbindRecorded = crash.New("engine.unbind-recorded")
	attachRecorded = crash.New("engine.attach-recorded")
	queuesOpened   = crash.New("engine.queues-opened")
	tunReplaced    = crash.New("engine.tun-replaced")
)

// Bind joins a READY endpoint to one exact sandbox generation. The same one
// again gets a new nonce; another one is refused, unless the shim of the bound
// one was attached and is proven dead.
func (e *Engine) Bind(ctx context.Context, req api.BindRequest, nsFile *os.File, peer endpoint.Process) (api.BindReply, error) {
	if err := req.Sandbox.Validate(); err != nil {
		return api.BindReply{}, api.Errorf(api.InvalidArgument, "%v", err)
	}
	found, err := e.find(req.Selector, nsFile)
	if err != nil {
		return api.BindReply{}, notFound(err)
	}
	unlock, err := e.endpoints.lock(ctx, found.Generation)
	if err != nil {
		return api.BindReply{}, busy("endpoint "+found.Generation.Short(), err)
	}
	defer unlock()
	return e.bindLocked(ctx, found.Generation, req.Sandbox, peer)
}

func (e *Engine) bindLocked(ctx context.Context, gen endpoint.Generation, sandbox endpoint.Sandbox, peer endpoint.Process) (api.BindReply, error) {
	ep, err := e.store.Get(gen)
	switch {
	case err != nil:
		return api.BindReply{}, notFound(err)
	case ep.Mode == endpoint.Veth:
		return api.BindReply{}, notAPod(ep, "bind")
	case ep.State != endpoint.Ready:
		return api.BindReply{}, api.Errorf(api.FailedPrecondition, "endpoint %s: is %s, only a READY one can be bound", gen, ep.State)
	case ep.DeleteRequested != nil:
		return api.BindReply{}, api.Errorf(api.FailedPrecondition, "endpoint %s: is to be deleted, its DEL came at %s", gen, ep.DeleteRequested.Format(time.RFC3339))
	}
	if ep.Binding == nil || ep.Binding.Sandbox != sandbox {
		if ep, err = e.rebindLocked(ctx, ep, sandbox, peer); err != nil {
			return api.BindReply{}, err
		}
	}
	nonce := newNonce()
	e.mu.Lock()
	e.nonces[gen] = nonce
	e.mu.Unlock()
	return api.BindReply{Endpoint: ep, Nonce: nonce}, nil
}

// rebindLocked records a binding to a sandbox that is not the bound one.
func (e *Engine) rebindLocked(ctx context.Context, ep endpoint.Endpoint, sandbox endpoint.Sandbox, peer endpoint.Process) (endpoint.Endpoint, error) {
	if b := ep.Binding; b != nil {
		if b.Shim == nil {
			return ep, api.Errorf(api.FailedPrecondition, "endpoint %s: is bound to sandbox %s (since %s, by %s): UNBIND that one first",
				ep.Generation, b.Sandbox, b.BoundAt.Format(time.RFC3339), processName(b.By))
		}
		if shim := e.liveShim(ep); shim != nil {
			return ep, api.Errorf(api.FailedPrecondition, "endpoint %s: is bound to sandbox %s and its %s is alive: stop it or UNBIND first",
				ep.Generation, b.Sandbox, processName(*shim))
		}
	}
	ep, err := e.freshTun(ctx, ep)
	if err != nil {
		return ep, err
	}
	bound, err := e.store.Update(ep.Generation, func(ep *endpoint.Endpoint) error {
		ep.Binding = &endpoint.Binding{Sandbox: sandbox, BoundAt: time.Now(), By: peer}
		return nil
	})
	if err != nil {
		return ep, storeError(err)
	}
	bindRecorded.Here()
	e.forgetShim(ep.Generation)
	e.audit("bound", bound, peer, slog.String("sandbox", sandbox.String()))
	return bound, nil
}

// Unbind ends a binding. The previous shim is killed unless it is the caller, and
// the TUN that it may still hold is replaced. A postponed DEL then runs.
func (e *Engine) Unbind(ctx context.Context, gen endpoint.Generation, req api.UnbindRequest, peer endpoint.Process) error {
	if err := req.Sandbox.Validate(); err != nil {
		return api.Errorf(api.InvalidArgument, "%v", err)
	}
	// A caller that hangs up in the middle must not leave the TUN half replaced.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteBudget)
	defer cancel()
	unlock, err := e.endpoints.lock(ctx, gen)
	if err != nil {
		return busy("endpoint "+gen.Short(), err)
	}
	defer unlock()
	ep, err := e.store.Get(gen)
	switch {
	case err != nil:
		return notFound(err)
	case ep.Binding == nil:
		return nil
	case ep.Binding.Sandbox != req.Sandbox:
		return api.Errorf(api.StaleGeneration, "endpoint %s: is bound to sandbox %s, not to %s", gen, ep.Binding.Sandbox, req.Sandbox)
	}
	return e.unbindLocked(ctx, ep, peer)
}

func (e *Engine) unbindLocked(ctx context.Context, ep endpoint.Endpoint, peer endpoint.Process) error {
	if shim := e.liveShim(ep); shim != nil && !same(*shim, peer) {
		e.killShimLocked(ctx, ep)
	}
	if ep.DeleteRequested != nil {
		_, err := e.deleteUnboundLocked(ctx, ep, peer)
		return err
	}
	ep, err := e.freshTun(ctx, ep)
	if err != nil {
		return err
	}
	unbound, err := e.store.Update(ep.Generation, func(ep *endpoint.Endpoint) error { ep.Binding = nil; return nil })
	if err != nil {
		return storeError(err)
	}
	unbindRecorded.Here()
	e.forgetShim(ep.Generation)
	e.mu.Lock()
	delete(e.nonces, ep.Generation)
	e.mu.Unlock()
	e.audit("unbound", unbound, peer, slog.String("sandbox", ep.Binding.Sandbox.String()))
	return nil
}

// deleteUnboundLocked runs the DEL that was postponed for a shim which is gone
// or is letting go now.
func (e *Engine) deleteUnboundLocked(ctx context.Context, ep endpoint.Endpoint, peer endpoint.Process) (bool, error) {
	if _, err := e.store.BeginDelete(ep.Generation, clearBinding); err != nil {
		return false, storeError(err)
	}
	deletingRecorded.Here()
	e.deleting(ep, peer, "deleteRequested")
	return true, e.finishLocked(ctx, ep)
}

// freshTun replaces a TUN whose descriptors have left the daemon. A descriptor
// cannot be revoked; only deleting the link ends it.
func (e *Engine) freshTun(ctx context.Context, ep endpoint.Endpoint) (endpoint.Endpoint, error) {
	if !ep.TunUsed {
		return ep, nil
	}
	return e.remakeTun(ctx, ep)
}

// remakeTun replaces the TUN, or makes the one that is missing.
func (e *Engine) remakeTun(ctx context.Context, ep endpoint.Endpoint) (endpoint.Endpoint, error) {
	ns, err := e.reopen(ctx, ep)
	switch {
	case err != nil:
		return ep, err
	case ns == nil: // the TUN went with its namespace
		return ep, nil
	}
	defer ns.Close()
	unlock, err := e.namespaces.lock(ctx, ep.Namespace.Cookie)
	if err != nil {
		return ep, busy("namespace "+ns.String(), err)
	}
	defer unlock()
	if err := e.host.RecreateTun(ctx, ep, ns, e.tunChanges(ep)); err != nil {
		return ep, err
	}
	tunReplaced.Here()
	fresh, err := e.store.Update(ep.Generation, func(ep *endpoint.Endpoint) error { ep.TunUsed = false; return nil })
	return fresh, storeError(err)
}

// tunChanges tells what becomes of the objects of a TUN that is made again.
func (e *Engine) tunChanges(ep endpoint.Endpoint) func(o topo.Object, removed bool) {
	return func(o topo.Object, removed bool) {
		what := api.ObjectMade
		if removed {
			what = api.ObjectRemoved
		}
		e.changed(what, ep, o)
	}
}

// Attach opens the queues of the TUN for the bound sandbox's shim, against the
// nonce of its BIND. A shim that attached before is killed first.
func (e *Engine) Attach(ctx context.Context, gen endpoint.Generation, req api.AttachRequest, peer endpoint.Process) (api.AttachReply, []*os.File, error) {
	none := api.AttachReply{}
	if err := req.Sandbox.Validate(); err != nil {
		return none, nil, api.Errorf(api.InvalidArgument, "%v", err)
	}
	if req.Queues < 1 || req.Queues > api.MaxQueues {
		return none, nil, api.Errorf(api.InvalidArgument, "queues %d: must be 1 to %d", req.Queues, api.MaxQueues)
	}
	unlock, err := e.endpoints.lock(ctx, gen)
	if err != nil {
		return none, nil, busy("endpoint "+gen.Short(), err)
	}
	defer unlock()
	ep, err := e.store.Get(gen)
	switch {
	case err != nil:
		return none, nil, notFound(err)
	case ep.Mode == endpoint.Veth:
		return none, nil, notAPod(ep, "attach to")
	case ep.State != endpoint.Ready || ep.Binding == nil:
		return none, nil, api.Errorf(api.FailedPrecondition, "endpoint %s: is not bound", gen)
	case ep.Binding.Sandbox != req.Sandbox:
		return none, nil, api.Errorf(api.StaleGeneration, "endpoint %s: is bound to sandbox %s, not to %s", gen, ep.Binding.Sandbox, req.Sandbox)
	case !e.takeNonce(gen, req.Nonce):
		return none, nil, api.Errorf(api.StaleGeneration, "endpoint %s: the nonce is not the one of the last BIND, or was used (BIND again)", gen)
	case ep.DeleteRequested != nil:
		return none, nil, api.Errorf(api.FailedPrecondition, "endpoint %s: is to be deleted", gen)
	}
	return e.attachLocked(ctx, ep, req.Queues, peer)
}

func (e *Engine) attachLocked(ctx context.Context, ep endpoint.Endpoint, queues int, peer endpoint.Process) (api.AttachReply, []*os.File, error) {
	none := api.AttachReply{}
	watch, err := watchShim(peer)
	if errors.Is(err, errGone) {
		return none, nil, api.Errorf(api.FailedPrecondition, "endpoint %s: the calling %s has ended", ep.Generation, processName(peer))
	}
	if err != nil {
		return none, nil, fmt.Errorf("endpoint %s: watch the calling %s: %w", ep.Generation, processName(peer), err)
	}
	// A shim that attaches again, after a queue of it has failed, keeps its TUN.
	again := ep.Binding.Shim != nil && same(*ep.Binding.Shim, peer)
	if !again && (!e.killShimLocked(ctx, ep) || ep.Binding.Shim == nil) {
		if ep, err = e.freshTun(ctx, ep); err != nil {
			watch.close()
			return none, nil, err
		}
	}
	ns, err := e.reopen(ctx, ep)
	if err == nil && ns == nil {
		err = api.Errorf(api.FailedPrecondition, "endpoint %s: its namespace %s is gone (DEL it)", ep.Generation, ep.Namespace.Path)
	}
	if err != nil {
		watch.close()
		return none, nil, err
	}
	defer ns.Close()
	// One that somebody deleted has ended every queue with it, had it any: another may
	// be made.
	if found, err := e.host.HasTun(ctx, ep, ns); err == nil && !found {
		if ep, err = e.remakeTun(ctx, ep); err != nil {
			watch.close()
			return none, nil, err
		}
	}
	// Recorded before a descriptor exists: a daemon that dies in between assumes
	// that it was handed out.
	ep, err = e.store.Update(ep.Generation, func(ep *endpoint.Endpoint) error {
		ep.TunUsed, ep.Binding.Shim = true, &peer
		return nil
	})
	if err != nil {
		watch.close()
		return none, nil, storeError(err)
	}
	attachRecorded.Here()
	files, vnet, err := e.host.OpenQueues(ctx, ep, ns, queues)
	if err != nil {
		watch.close()
		return none, nil, err
	}
	queuesOpened.Here()
	e.keepWatch(ep.Generation, watch)
	e.audit("attached", ep, peer, slog.String("sandbox", ep.Binding.Sandbox.String()), slog.Int("queues", len(files)))
	return api.AttachReply{Endpoint: ep, Queues: len(files), VnetHdr: vnet}, files, nil
}

// takeNonce reports whether nonce is the one that the last BIND gave out. It is
// spent by a correct guess only; 128 bits are not guessed.
func (e *Engine) takeNonce(gen endpoint.Generation, nonce string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	want, ok := e.nonces[gen]
	if !ok || subtle.ConstantTimeCompare([]byte(want), []byte(nonce)) != 1 {
		return false
	}
	delete(e.nonces, gen)
	return true
}

func newNonce() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails since Go 1.24
	return hex.EncodeToString(b[:])
}

// same reports whether both are the same process.
func same(a, b endpoint.Process) bool { return a.PID == b.PID && a.StartTime == b.StartTime }
