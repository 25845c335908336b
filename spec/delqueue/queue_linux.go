package delqueue

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/crash"
	"mknet/spec/endpoint"
	"mknet/spec/privdir"
)

var (
	entryQueued  = crash.New("delqueue.queued")
	entryClaimed = crash.New("delqueue.claimed")
	entryDone    = crash.New("delqueue.done") // its DEL was answered, the entry is still there
)

// DefaultDir is the queue's folder, fixed so that a caller's configuration cannot
// hide an entry from mknetd.
const DefaultDir = "/var/lib/mknet/deferred-del"

const (
	claimedSuffix = ".claimed"
	badSuffix     = ".bad"
	// keyBytes is the length of the first part of a name.
	keyBytes = 32
	// tempAge is after which a half-written file belongs to a dead writer.
	tempAge = 10 * time.Minute
)

// ErrFull is returned by Enqueue when the folder holds MaxEntries files: the DEL
// was not queued and must not be reported as done.
var ErrFull = errors.New("queue of deferred DELs is full: start mknetd, it empties the queue")

// Queue is an open queue. It is safe for concurrent use, also by other processes.
type Queue struct{ dir *privdir.Dir }

// Open opens the queue and makes its folder (0700) where it is missing.
func Open(path string) (*Queue, error) { return open(path, true) }

// OpenExisting opens the queue only where its folder exists; otherwise the error
// is fs.ErrNotExist, and nothing is queued.
func OpenExisting(path string) (*Queue, error) { return open(path, false) }

func open(path string, create bool) (*Queue, error) {
	dir, err := privdir.Open(path, create)
	if err != nil {
		return nil, fmt.Errorf("queue of deferred DELs: %w", err)
	}
	return &Queue{dir: dir}, nil
}

// Close releases the folder. Claims must have ended before.
func (q *Queue) Close() error { return q.dir.Close() }

// Enqueue writes the entry and returns once it is on disk. An entry of the same
// attachment and generation is replaced.
func (q *Queue) Enqueue(e Entry) error {
	data, err := e.encode()
	if err != nil {
		return fmt.Errorf("queue DEL of %s: %w", e.Attachment, err)
	}
	names, err := q.dir.Names()
	if err != nil {
		return fmt.Errorf("queue DEL of %s: %w", e.Attachment, err)
	}
	if len(names) >= MaxEntries {
		return fmt.Errorf("queue DEL of %s: %w", e.Attachment, ErrFull)
	}
	if err := q.dir.Publish(e.Name(), data, privdir.Synced); err != nil {
		return fmt.Errorf("queue DEL of %s: %w", e.Attachment, err)
	}
	entryQueued.Here()
	return nil
}

// Item is one file of the queue, for an operator to look at.
type Item struct {
	File    string
	Entry   Entry
	Claimed bool  // a worker is at it, or died at it
	Err     error // the file cannot be used, or not read now; Entry is empty
	// Unusable says that no worker will ever act on the file: it was set aside, is
	// not ours, or others could have touched it. Err says why.
	Unusable bool
}

// List reads the whole queue and changes nothing.
func (q *Queue) List() ([]Item, error) {
	names, err := q.dir.Names()
	if err != nil {
		return nil, err
	}
	items := make([]Item, 0, len(names))
	for _, name := range names {
		base, claimed := strings.CutSuffix(name, claimedSuffix)
		base, bad := strings.CutSuffix(base, badSuffix)
		item := Item{File: name, Claimed: claimed}
		if item.Entry, item.Err = q.read(name, base); errors.Is(item.Err, fs.ErrNotExist) {
			continue // settled meanwhile
		}
		if bad && item.Err == nil {
			item.Entry, item.Err = Entry{}, fmt.Errorf("deferred DEL %s: was set aside", name)
		}
		item.Unusable = bad || !isEntryName(base) || errors.As(item.Err, new(*contentError)) || errors.As(item.Err, new(*privdir.UnsafeError))
		items = append(items, item)
	}
	return items, nil
}

// Sweep removes files that a killed writer left half written.
func (q *Queue) Sweep() error {
	_, err := q.dir.Sweep(time.Now().Add(-tempAge))
	return err
}

// contentError says that a file was read, and that what is in it is no entry. It
// will be none later either, unlike a file that could only not be read.
type contentError struct {
	file string
	err  error
}

func (e *contentError) Error() string { return "deferred DEL " + e.file + ": " + e.err.Error() }
func (e *contentError) Unwrap() error { return e.err }

// read parses one file and holds it to the name it should have.
func (q *Queue) read(name, base string) (Entry, error) {
	data, err := q.dir.Read(name, MaxEntryBytes)
	if errors.Is(err, privdir.ErrTooLarge) {
		return Entry{}, &contentError{name, err}
	}
	if err != nil {
		return Entry{}, err
	}
	e, err := parse(data)
	if err == nil && e.Name() != base {
		err = fmt.Errorf("content belongs to file %s", e.Name())
	}
	if err != nil {
		return Entry{}, &contentError{name, err}
	}
	return e, nil
}

// Claim is an entry that this process alone works on. End it with Settle or
// Release, once.
type Claim struct {
	Entry
	q    *Queue
	lock *privdir.Lock
	name string // without claimedSuffix
	done bool
}

// Settle removes the entry: its endpoint is deleted.
func (c *Claim) Settle() error {
	defer c.end()
	entryDone.Here()
	if err := c.q.dir.Remove(c.name + claimedSuffix); err != nil {
		return err
	}
	return c.q.dir.Sync()
}

// Release puts the entry back for a later turn.
func (c *Claim) Release() error {
	defer c.end()
	err := c.q.dir.Rename(c.name+claimedSuffix, c.name)
	if errors.Is(err, fs.ErrExist) { // queued again meanwhile, and that one is younger
		return c.q.dir.Remove(c.name + claimedSuffix)
	}
	return err
}

func (c *Claim) end() {
	if !c.done {
		c.done = true
		c.lock.Unlock()
	}
}

// Claims goes through the queue as it is now and claims each entry that match
// accepts, those of dead workers included. What the loop neither settles nor
// releases is released. An error concerns one file, which is left alone (or, if
// its content is unusable, set aside as NAME.bad); the loop may go on.
func (q *Queue) Claims(match func(Entry) bool) iter.Seq2[*Claim, error] {
	return q.claims("", match)
}

// ClaimsOf is Claims for the entries of one attachment, found by name.
func (q *Queue) ClaimsOf(a endpoint.Attachment) iter.Seq2[*Claim, error] {
	return q.claims(attachmentKey(a)+"-", func(e Entry) bool { return e.Attachment == a })
}

func (q *Queue) claims(prefix string, match func(Entry) bool) iter.Seq2[*Claim, error] {
	return func(yield func(*Claim, error) bool) {
		names, err := q.dir.Names()
		if err != nil {
			yield(nil, err)
			return
		}
		for _, name := range names {
			base, claimed := strings.CutSuffix(name, claimedSuffix)
			if !strings.HasPrefix(base, prefix) || !isEntryName(base) {
				continue
			}
			c, err := q.claim(base, claimed, match)
			if c == nil && err == nil {
				continue
			}
			goOn := yield(c, err)
			if c != nil && !c.done {
				_ = c.Release() // at worst the file stays claimed without a lock, which the next worker takes over
			}
			if !goOn {
				return
			}
		}
	}
}

// isEntryName reports whether a file is one of ours, by name.
func isEntryName(base string) bool {
	key, tag, ok := strings.Cut(base, "-")
	if !ok || len(key) != keyBytes || strings.Trim(key, "0123456789abcdef") != "" {
		return false
	}
	_, err := endpoint.ParseGeneration(tag)
	return tag == unknownTag || err == nil
}

// claim takes one file. Both results are nil where there is nothing to take.
func (q *Queue) claim(base string, claimed bool, match func(Entry) bool) (*Claim, error) {
	name := base
	if claimed {
		name += claimedSuffix
	}
	lock, ok, err := q.dir.TryLock(name)
	if err != nil || !ok {
		return nil, err
	}
	c := &Claim{q: q, lock: lock, name: base}
	keep := false
	defer func() {
		if !keep {
			c.end()
		}
	}()
	if c.Entry, err = q.read(name, base); err != nil {
		return nil, q.setAside(name, base, err)
	}
	if !match(c.Entry) {
		return nil, nil
	}
	if !claimed {
		err := q.dir.Rename(name, base+claimedSuffix)
		if errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist) {
			return nil, nil // another worker is at the same attachment
		}
		if err != nil {
			return nil, err
		}
		// Enqueue may have replaced the file between the lock and the rename: then
		// the claimed one is not the one that was read.
		if !q.dir.Means(base+claimedSuffix, lock) {
			return nil, q.dir.Rename(base+claimedSuffix, base)
		}
	}
	keep = true
	entryClaimed.Here()
	return c, nil
}

// setAside keeps a file whose content is no entry where an operator finds it and no
// worker does. What could not be read may be in order, and stays where it is.
func (q *Queue) setAside(name, base string, cause error) error {
	switch {
	case errors.Is(cause, fs.ErrNotExist), errors.As(cause, new(*privdir.ChangedError)):
		return nil
	case !errors.As(cause, new(*contentError)):
		return cause
	}
	err := q.dir.Rename(name, base+badSuffix)
	if errors.Is(err, fs.ErrExist) {
		err = q.dir.Remove(name)
	}
	return errors.Join(fmt.Errorf("%w (kept as %s/%s)", cause, q.dir.Path(), base+badSuffix), err)
}

// Replay runs do on at most limit entries that match, settles those whose outcome
// is Finished and releases the others. It stops when ctx ends. Errors are those of
// single entries, joined.
func (q *Queue) Replay(ctx context.Context, limit int, match func(Entry) bool, do func(context.Context, Entry) error) (settled, kept int, err error) {
	var errs []error
	if limit <= 0 || ctx.Err() != nil {
		return 0, 0, nil
	}
	for c, err := range q.Claims(match) {
		if err != nil {
			errs = append(errs, err)
			if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
				break // none of the others could be opened either
			}
			continue
		}
		if outcome := do(ctx, c.Entry); Finished(outcome) {
			settled++
			err = c.Settle()
		} else {
			kept++
			err = errors.Join(fmt.Errorf("replay DEL of %s: %w", c.Attachment, outcome), c.Release())
		}
		if err != nil {
			errs = append(errs, err)
		}
		if settled+kept >= limit || ctx.Err() != nil {
			break
		}
	}
	return settled, kept, errors.Join(errs...)
}
