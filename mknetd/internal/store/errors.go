package store

import (
	"errors"
	"fmt"

	"mknet/spec/endpoint"
)

var (
	// ErrClosed is returned by every method after Close.
	ErrClosed = errors.New("store is closed")
	// ErrNotFound is what a *NotFoundError and a missing document match.
	ErrNotFound = errors.New("no such record")
)

// NotFoundError says that no record has this generation or attachment.
type NotFoundError struct{ What string }

func (e *NotFoundError) Error() string        { return e.What + ": no such endpoint" }
func (e *NotFoundError) Is(target error) bool { return target == ErrNotFound }

// ExistsError is returned by Begin when a live record already has the
// attachment, the generation or the slot.
type ExistsError struct {
	What   string // "attachment a/b/c", "generation ...", "slot 7"
	Holder endpoint.Generation
	State  endpoint.State // of the holder
}

func (e *ExistsError) Error() string {
	return fmt.Sprintf("%s: belongs to endpoint %s (%s)", e.What, e.Holder.Short(), e.State)
}

// InvalidError is returned by a write whose record would be refused at the next
// Open. It is a defect of the caller.
type InvalidError struct {
	Generation endpoint.Generation
	Why        string
}

func (e *InvalidError) Error() string {
	return fmt.Sprintf("record of endpoint %s: %s", e.Generation.Short(), e.Why)
}

// CorruptError is returned where the file is not what mknetd wrote. Nothing has
// been changed.
type CorruptError struct {
	Path   string
	Bucket string // empty when the file's structure itself is damaged
	Key    string // printable
	Offset int64  // of the page in the file; -1 when not known
	Why    string

	raw []byte // the key
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("store %s: is damaged: %s (nothing was changed; `mknetd state check` names every fault, `mknetd state export` saves what can be read and `mknetd state import` makes a store of it)", e.Path, e.Fault())
}

// Fault is where the damage is and what it is, without advice.
func (e *CorruptError) Fault() string {
	where := ""
	if e.Offset >= 0 {
		where = fmt.Sprintf("at byte %d: ", e.Offset)
	}
	if e.Bucket != "" {
		where += fmt.Sprintf("%s %s: ", e.Bucket, e.Key)
	}
	return where + e.Why
}

// LockedError is returned by Open when another process has the store.
type LockedError struct {
	Path   string
	Holder int    // PID, 0 when not known
	Comm   string // its name, empty when not known
}

func (e *LockedError) Error() string {
	who := "another process"
	if e.Holder != 0 {
		who = fmt.Sprintf("process %d (%s)", e.Holder, e.Comm)
	}
	return fmt.Sprintf("store %s: is in use by %s: only one mknetd may run", e.Path, who)
}

// VersionError is returned for a store of a newer schema than this program knows.
type VersionError struct {
	Path      string
	Got, Want int
	Writer    string // the version of mknetd that wrote it; empty when not known
}

func (e *VersionError) Error() string {
	who := "the version of mknetd that wrote it"
	if e.Writer != "" {
		who = "mknetd " + e.Writer + ", which wrote it, or a later one"
	}
	return fmt.Sprintf("store %s: has schema version %d, this mknetd knows up to %d (run %s)", e.Path, e.Got, e.Want, who)
}

// PoolsError is returned by Open when records exist that were cut from other
// pools than those now configured.
type PoolsError struct {
	Path      string
	Got, Want endpoint.Pools // in the store, as configured
	Endpoints int
}

func (e *PoolsError) Error() string {
	return fmt.Sprintf("store %s: its %d endpoints were made with childPool %s and transitPool %s, the configuration says %s and %s: restore the setting or delete the endpoints first",
		e.Path, e.Endpoints, e.Got.Child, e.Got.Transit, e.Want.Child, e.Want.Transit)
}

// WriteError is returned by a write that could not be made durable; nothing of
// it is stored. A full disk (errors.Is ENOSPC, EDQUOT) may be tried again when
// there is room. With Broken set the file's state on disk is not known: every
// later write fails the same way until mknetd is restarted.
type WriteError struct {
	Path   string
	Broken bool
	Err    error
}

func (e *WriteError) Error() string {
	if e.Broken {
		return fmt.Sprintf("store %s: write: %v (state on disk not known, restart mknetd)", e.Path, e.Err)
	}
	return fmt.Sprintf("store %s: write: %v", e.Path, e.Err)
}

func (e *WriteError) Unwrap() error { return e.Err }
