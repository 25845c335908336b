package engine

import (
	"context"
	"errors"
	"fmt"

	"mknet/mknetd/internal/store"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var shimKilled = crash.New("engine.shim-killed")

// shimWatch follows one attached mk-shim until it ends.
type shimWatch struct {
	*process
	cancel context.CancelFunc
	done   chan struct{} // closed when the watcher has let go of the process
}

// watchShim takes a handle on a process; nothing is watched yet.
func watchShim(who endpoint.Process) (*shimWatch, error) {
	p, err := openProcess(who)
	if err != nil {
		return nil, err
	}
	return &shimWatch{process: p, done: make(chan struct{})}, nil
}

// keepWatch begins to watch, in place of an earlier shim of the endpoint.
func (e *Engine) keepWatch(gen endpoint.Generation, w *shimWatch) {
	e.forgetShim(gen)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		w.close()
		return
	}
	var ctx context.Context
	ctx, w.cancel = context.WithCancel(e.ctx)
	e.shims[gen] = w
	e.work.Go(func() {
		err := w.wait(ctx)
		w.close()
		close(w.done)
		if err == nil {
			e.shimEnded(gen, w)
		}
	})
}

// watches tells whether a shim of the endpoint is watched.
func (e *Engine) watches(gen endpoint.Generation) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.shims[gen] != nil
}

// forgetShim stops watching.
func (e *Engine) forgetShim(gen endpoint.Generation) {
	e.mu.Lock()
	w := e.shims[gen]
	delete(e.shims, gen)
	e.mu.Unlock()
	if w != nil {
		w.cancel()
		<-w.done
	}
}

// shimEnded runs the DEL that waited for the shim.
func (e *Engine) shimEnded(gen endpoint.Generation, w *shimWatch) {
	ctx, cancel := context.WithTimeout(e.ctx, deleteBudget)
	defer cancel()
	unlock, err := e.endpoints.lock(ctx, gen)
	if err != nil {
		return
	}
	defer unlock()
	e.mu.Lock()
	if e.shims[gen] == w {
		delete(e.shims, gen)
	}
	e.mu.Unlock()
	ep, err := e.store.Get(gen)
	if err != nil || ep.Binding == nil || ep.Binding.Shim == nil || !same(*ep.Binding.Shim, w.who) {
		return // unbound, deleted or attached by another one meanwhile
	}
	e.audit("shim-ended", ep, w.who)
	if ep.DeleteRequested == nil {
		return // the binding stands: the runtime may start another shim
	}
	if _, err := e.deleteUnboundLocked(ctx, ep, endpoint.Process{}); err != nil && !errors.Is(err, store.ErrNotFound) {
		e.log.Warn("deletion is not finished", "generation", gen.String(), "err", err)
	}
}

// recordedShim returns the shim that attached last; nil when there is none, or its
// record is of another boot. Process IDs and start times count from a boot, so that
// those of another name nobody, or somebody else.
func (e *Engine) recordedShim(ep endpoint.Endpoint) *endpoint.Process {
	if ep.Binding == nil || ep.Namespace.BootID != e.bootID {
		return nil
	}
	return ep.Binding.Shim
}

// liveShim returns the shim that has the endpoint's TUN, nil when there is none
// or its death is proven.
func (e *Engine) liveShim(ep endpoint.Endpoint) *endpoint.Process {
	shim := e.recordedShim(ep)
	if shim == nil {
		return nil
	}
	p, err := openProcess(*shim)
	if errors.Is(err, errGone) {
		return nil
	}
	if err != nil {
		return shim // not proven dead
	}
	defer p.close()
	if !p.alive() {
		return nil
	}
	return shim
}

// killShimLocked ends the shim that attached last and reports whether its death
// is proven; true when there was none. The caller holds the endpoint's lock.
func (e *Engine) killShimLocked(ctx context.Context, ep endpoint.Endpoint) bool {
	shim := e.recordedShim(ep)
	if shim == nil {
		return true
	}
	e.forgetShim(ep.Generation)
	p, err := openProcess(*shim)
	if errors.Is(err, errGone) {
		return true
	}
	if err != nil {
		e.log.Error("open the previous shim", "generation", ep.Generation.String(), "err", err)
		return false
	}
	defer p.close()
	if !p.alive() {
		return true
	}
	proven := p.kill(ctx)
	shimKilled.Here()
	e.audit("shim-killed", ep, *shim)
	return proven
}

// processName names a process for an operator.
func processName(p endpoint.Process) string {
	if p.Comm == "" {
		return fmt.Sprintf("process (pid %d)", p.PID)
	}
	return fmt.Sprintf("%s (pid %d)", p.Comm, p.PID)
}
