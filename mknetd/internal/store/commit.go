package store

import (
	"errors"
	"fmt"
	"runtime/debug"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

// bbolt writes pages, syncs, writes the header and syncs again in one call, which
// takes no point in between.
var (
	transactionFilled = crash.New("store.transaction-filled")
	transactionSynced = crash.New("store.transaction-synced") // nobody has been answered yet
)

// change is what one write does to Counts once it is durable. A nil end means
// that the record was not there before, or is not there after.
type change struct{ before, after *endpoint.Endpoint }

// write is one queued operation. do validates everything before it stores
// anything: an error of its own leaves the transaction as it was, so that others
// may share it. An error of bbolt is wrapped in brokenTx.
type write struct {
	do     func(*bolt.Tx) (change, error)
	result chan error
}

// brokenTx marks an error after which the whole transaction must be given up.
type brokenTx struct{ err error }

func (e *brokenTx) Error() string { return e.err.Error() }
func (e *brokenTx) Unwrap() error { return e.err }

// maxBatch bounds the writes that share one fsync.
const maxBatch = 256

// update runs do in a transaction and returns when it is durable.
func (s *Store) update(do func(*bolt.Tx) (change, error)) error {
	w := &write{do: do, result: make(chan error, 1)}
	select {
	case s.writes <- w:
		return <-w.result
	case <-s.closing:
		return ErrClosed
	}
}

// commitLoop is the only writer. Writes that arrive while one fsync is under way
// share the next: there is no artificial delay, and the cost of an fsync is
// divided among those who wait for it. Close ends it.
func (s *Store) commitLoop() {
	defer close(s.done)
	for {
		select {
		case <-s.closing:
			return
		case w := <-s.writes:
			batch := []*write{w}
		collect:
			for len(batch) < maxBatch {
				select {
				case w := <-s.writes:
					batch = append(batch, w)
				default:
					break collect
				}
			}
			s.commit(batch)
		}
	}
}

// commit runs a batch in one transaction and answers every write of it.
func (s *Store) commit(batch []*write) {
	if err := s.Broken(); err != nil {
		answer(batch, err)
		return
	}
	for len(batch) > 0 {
		stored, changes, failed, err := s.tryCommit(batch)
		if err == nil {
			s.account(changes)
			answer(stored, nil)
			return
		}
		if failed == nil { // the commit itself failed
			answer(stored, err)
			return
		}
		// One write broke the transaction: it alone gets the error.
		failed.result <- err
		batch = without(stored, failed)
	}
}

// tryCommit returns the writes that are still waiting for an answer: those that
// failed by themselves have had theirs. failed is the write that broke the
// transaction, if one did.
func (s *Store) tryCommit(batch []*write) (waiting []*write, changes []change, failed *write, err error) {
	tx, err := s.db.Begin(true)
	if err != nil {
		return batch, nil, nil, s.writeError(err, -1)
	}
	waiting = batch
	for i := 0; i < len(waiting); {
		w := waiting[i]
		c, err := safely(w.do, tx)
		var broken *brokenTx
		switch {
		case errors.As(err, &broken):
			return waiting, nil, w, errors.Join(&WriteError{Path: s.path, Err: broken.err}, tx.Rollback())
		case err != nil:
			w.result <- err
			waiting = without(waiting, w)
		default:
			changes = append(changes, c)
			i++
		}
	}
	if len(waiting) == 0 {
		return nil, nil, nil, tx.Rollback()
	}
	transactionFilled.Here()
	id := tx.ID()
	if err := tx.Commit(); err != nil {
		return waiting, nil, nil, s.writeError(err, id)
	}
	transactionSynced.Here()
	return waiting, changes, nil, nil
}

// writeError decides whether a failed commit is over and done with. A full disk
// stops bbolt before it writes the header that makes a transaction current; any
// other error, and one that shows up after the header was written, leaves open
// what the disk holds (after a failed fsync the page cache proves nothing), so
// the store then takes no further write.
func (s *Store) writeError(err error, tx int) error {
	we := &WriteError{Path: s.path, Err: err}
	full := errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
	if !full || s.current() >= tx && tx >= 0 {
		we.Broken = true
		s.mu.Lock()
		s.broken = we
		s.mu.Unlock()
	}
	return we
}

// current is the ID of the transaction that readers see now.
func (s *Store) current() int {
	id := -1
	_ = s.db.View(func(tx *bolt.Tx) error { id = tx.ID(); return nil })
	return id
}

// safely keeps a panic of one write from ending the committer, and the daemon
// with it. The transaction cannot be trusted afterwards.
func safely(do func(*bolt.Tx) (change, error), tx *bolt.Tx) (c change, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &brokenTx{fmt.Errorf("panic: %v\n%s", p, debug.Stack())}
		}
	}()
	return do(tx)
}

// account brings Counts up to date after a commit.
func (s *Store) account(changes []change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range changes {
		s.counts.add(c.before, -1)
		s.counts.add(c.after, +1)
	}
}

func (c *Counts) add(ep *endpoint.Endpoint, n int) {
	if ep == nil {
		return
	}
	if c.ByState == nil {
		c.ByState = map[endpoint.State]int{}
	}
	if c.ByKind == nil {
		c.ByKind = map[Kind]int{}
	}
	c.ByState[ep.State] += n
	c.Total += n
	kind := Kind{ep.Mode, ep.State, len(ep.Degraded) > 0, ep.Binding != nil}
	if c.ByKind[kind] += n; c.ByKind[kind] == 0 {
		delete(c.ByKind, kind)
	}
	if ep.State == endpoint.Ready && len(ep.Degraded) > 0 {
		c.Degraded += n
	}
}

func answer(batch []*write, err error) {
	for _, w := range batch {
		w.result <- err
	}
}

func without(batch []*write, w *write) []*write {
	kept := make([]*write, 0, len(batch))
	for _, b := range batch {
		if b != w {
			kept = append(kept, b)
		}
	}
	return kept
}
