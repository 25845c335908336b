package engine

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"time"

	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
)

const (
	// replayEvery is how often the queue of deferred DELs is looked at. mk-cni
	// writes it only while the daemon cannot be reached, so it is nearly always
	// empty, and a look is one read of a folder.
	replayEvery = 5 * time.Second
	// replayBatch bounds one pass, so that Close never waits for a whole queue.
	replayBatch = 64
)

// replayDeferred runs the DELs that mk-cni queued while the daemon was away:
// now, and again every replayEvery.
func (e *Engine) replayDeferred() {
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
	settled, kept, err := q.Replay(ctx, replayBatch, e.meantForUs, func(ctx context.Context, entry delqueue.Entry) error {
		if entry.Obsolete(e.bootID) {
			return nil
		}
		_, err := e.Delete(ctx, entry.DeleteRequest(), nil, endpoint.Process{Comm: "deferred DEL"})
		return err
	})
	if err != nil && ctx.Err() == nil {
		e.log.Error("replay deferred DELs", "err", err)
	}
	if settled > 0 || kept > 0 {
		e.log.Info("replayed deferred DELs", "settled", settled, "kept", kept)
	}
	return settled == replayBatch && ctx.Err() == nil
}

// meantForUs reports whether a deferred DEL was meant for this daemon: a node may
// run a second one, on another socket, for tests.
func (e *Engine) meantForUs(entry delqueue.Entry) bool {
	return entry.Daemon == "unix://"+e.cfg.Socket || entry.Daemon == "unix://"+realPath(e.cfg.Socket)
}

// realPath is the socket's path with the links of its folder followed, which is
// how mk-cni writes it.
func realPath(socket string) string {
	dir, err := filepath.EvalSymlinks(filepath.Dir(socket))
	if err != nil {
		return socket
	}
	return filepath.Join(dir, filepath.Base(socket))
}
