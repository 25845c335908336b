package engine

import (
	"context"
	"errors"
	"io/fs"
	"sync"
	"time"

	"mknet/spec/api"
	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
)

const (
	// replayEvery is how often the queue of deferred DELs is looked at. mk-cni
	// writes it only while the daemon cannot be reached, so it is nearly always
	// empty, and a look is one read of a folder.
	replayEvery = 5 * time.Second
	// Workers of a pass, so that DELs share their commits to the firewall, and the
	// entries of each, so that Close never waits for a whole queue.
	replayWorkers = 8
	replayBatch   = 8

	// maxDeferred is how many may wait before ADDs are told to come again later. On
	// a node that has more to do than it can, each DEL that mk-cni queues lets its
	// caller go on with an ADD, and each endpoint more makes all changes of the
	// firewall dearer: it would never catch up.
	maxDeferred = 256
)

// replayDeferred runs the DELs that mk-cni queued while the daemon was away:
// now, and again every replayEvery. What killed writers left half written goes first.
func (e *Engine) replayDeferred() {
	e.sweepDeferred()
	tick := time.NewTicker(replayEvery)
	defer tick.Stop()
	for {
		for e.replayOnce(e.ctx) {
		}
		select {
		case <-e.ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// sweepDeferred removes entries of the queue that were never finished.
func (e *Engine) sweepDeferred() {
	q, err := delqueue.OpenExisting(e.cfg.DeferredDir)
	if err != nil {
		return // replayOnce tells why
	}
	defer q.Close()
	if err := q.Sweep(); err != nil {
		e.log.Warn("sweep the queue of deferred DELs", "err", err)
	}
}

// replayOnce runs one batch and reports whether it may have left some that would
// work now.
func (e *Engine) replayOnce(ctx context.Context) (more bool) {
	q, err := delqueue.OpenExisting(e.cfg.DeferredDir)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			e.log.Error("open the queue of deferred DELs", "err", err)
		}
		return false
	}
	defer q.Close()
	var mu sync.Mutex
	tried := map[delqueue.Entry]bool{} // what one worker could not settle is not for the next
	match := func(entry delqueue.Entry) bool {
		mu.Lock()
		defer mu.Unlock()
		if tried[entry] || !e.meantForUs(entry) {
			return false
		}
		tried[entry] = true
		return true
	}
	var settled, kept int
	var errs []error
	var workers sync.WaitGroup
	for range replayWorkers {
		workers.Go(func() {
			done, left, err := q.Replay(ctx, replayBatch, match, e.deferred)
			mu.Lock()
			defer mu.Unlock()
			settled, kept, more = settled+done, kept+left, more || done == replayBatch
			errs = append(errs, err)
		})
	}
	workers.Wait()
	if err := errors.Join(errs...); err != nil && ctx.Err() == nil {
		e.log.Error("replay deferred DELs", "err", err)
	}
	if settled > 0 || kept > 0 {
		e.log.Info("replayed deferred DELs", "settled", settled, "kept", kept)
	}
	return more && ctx.Err() == nil
}

// watchDeferred counts the queue now and again. Not with each batch of the replay: a
// count reads the whole queue, and there may be hundreds of batches in it.
func (e *Engine) watchDeferred() {
	tick := time.NewTicker(replayEvery)
	defer tick.Stop()
	for {
		e.countDeferred()
		select {
		case <-e.ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// countDeferred notes how many DELs wait, and says in the log when ADDs are held up
// for them and when no more.
func (e *Engine) countDeferred() {
	n, _ := e.queuedDels()
	switch before := e.waiting.Swap(int64(n)); {
	case n > maxDeferred && before <= maxDeferred:
		e.log.Warn("ADDs are refused until deferred DELs are done", "queued", n, "limit", maxDeferred)
	case n <= maxDeferred && before > maxDeferred:
		e.log.Info("ADDs are accepted again", "queued", n)
	}
}

// tooManyDeferred refuses an ADD while too many DELs wait; they go first.
func (e *Engine) tooManyDeferred() error {
	if n := e.waiting.Load(); n > maxDeferred {
		return api.Errorf(api.Unavailable, "%d deferred DELs wait, more than %d: they are done first (see mknet_deferred_dels; the queue is %s)", n, maxDeferred, e.cfg.DeferredDir)
	}
	return nil
}

// deferred does one DEL of the queue.
func (e *Engine) deferred(ctx context.Context, entry delqueue.Entry) error {
	if entry.Obsolete(e.bootID) {
		return nil
	}
	_, err := e.Delete(ctx, entry.DeleteRequest(), nil, endpoint.Process{Comm: "deferred DEL"})
	return err
}

// meantForUs reports whether a deferred DEL was meant for this daemon: a node may
// run a second one, on another socket, for tests.
func (e *Engine) meantForUs(entry delqueue.Entry) bool {
	return entry.MeantFor("unix://" + e.cfg.Socket)
}
