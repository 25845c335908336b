// Package cache is mk-cni's generation cache: which endpoint generation an
// attachment got, so that a DEL deletes that endpoint and no younger one. It is
// not the authority; mknetd's record is.
//
// One attachment is one file in a private folder (see package privdir), named by
// sha256(network NUL containerID NUL ifName). ADD writes it twice: before mknetd
// is asked ("adding", perhaps with the generation of an older endpoint), which also
// proves that the folder can be written, and when the answer stands. A DEL that
// finds "adding" knows that an ADD began and its end is not known, and then also
// deletes by attachment.
package cache

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	"mknet/spec/endpoint"
	"mknet/spec/privdir"
)

const (
	// maxEntryBytes bounds one file: two identifiers of 128 bytes and fixed fields.
	maxEntryBytes = 2048
	formatVersion = 1
	// tempAge is after which a half-written file belongs to a dead writer.
	tempAge = 10 * time.Minute
)

// ErrSuperseded is returned by Commit where the attachment was deleted or added
// again since Begin: the endpoint must be rolled back.
var ErrSuperseded = errors.New("attachment was deleted or added again meanwhile")

// CorruptError is returned by Get for a file that is not this attachment's entry:
// empty, cut off, changed or another's. The generation is then not known.
type CorruptError struct {
	Path   string
	Reason string
}

func (e *CorruptError) Error() string {
	return "cache entry " + e.Path + ": " + e.Reason
}

// Entry is what is known of an attachment.
type Entry struct {
	endpoint.Attachment
	Generation endpoint.Generation // zero: not known
	Cookie     uint64              // SO_NETNS_COOKIE of the endpoint's namespace; 0: not known
	BootID     string              // of the ADD
	Adding     string              // not empty: an ADD with this nonce began and has not ended
}

// wireEntry is the JSON form.
type wireEntry struct {
	V           int                 `json:"v"`
	Network     string              `json:"network"`
	ContainerID string              `json:"containerID"`
	IfName      string              `json:"ifName"`
	Generation  endpoint.Generation `json:"generation,omitzero"`
	Cookie      uint64              `json:"netnsCookie,string,omitempty"`
	BootID      string              `json:"bootID"`
	Adding      string              `json:"adding,omitempty"`
}

func (e Entry) encode() ([]byte, error) {
	return json.Marshal(wireEntry{formatVersion, e.Network, e.ContainerID, e.IfName, e.Generation, e.Cookie, e.BootID, e.Adding})
}

// parse reads a file strictly: only the exact bytes that encode writes are an
// entry.
func parse(data []byte) (Entry, error) {
	if len(data) == 0 {
		return Entry{}, errors.New("is empty")
	}
	var w wireEntry
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&w); err != nil {
		return Entry{}, fmt.Errorf("is damaged: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Entry{}, errors.New("is damaged: it goes on after its end")
	}
	if w.V != formatVersion {
		return Entry{}, fmt.Errorf("has format version %d, this mk-cni knows %d", w.V, formatVersion)
	}
	e := Entry{endpoint.Attachment{Network: w.Network, ContainerID: w.ContainerID, IfName: w.IfName}, w.Generation, w.Cookie, w.BootID, w.Adding}
	if err := e.Validate(); err != nil {
		return Entry{}, fmt.Errorf("is damaged: %w", err)
	}
	if len(e.BootID) > 64 || len(e.Adding) > 64 {
		return Entry{}, errors.New("is damaged: a field is too long")
	}
	canonical, err := e.encode()
	if err != nil || !bytes.Equal(canonical, data) {
		return Entry{}, errors.New("is damaged: not in the form that mk-cni writes")
	}
	return e, nil
}

func fileName(a endpoint.Attachment) string {
	sum := sha256.Sum256([]byte(a.Network + "\x00" + a.ContainerID + "\x00" + a.IfName))
	return hex.EncodeToString(sum[:])
}

// Cache is an open cache folder.
type Cache struct{ dir *privdir.Dir }

// Open opens the cache; with create it makes the folder (0700) where it is
// missing, else that is fs.ErrNotExist.
func Open(path string, create bool) (*Cache, error) {
	dir, err := privdir.Open(path, create)
	if err != nil {
		return nil, fmt.Errorf("generation cache: %w", err)
	}
	return &Cache{dir}, nil
}

// Close releases the folder.
func (c *Cache) Close() { _ = c.dir.Close() }

// Get reads the attachment's entry: fs.ErrNotExist where there is none, a
// *CorruptError where it cannot be used.
func (c *Cache) Get(a endpoint.Attachment) (Entry, error) {
	name := fileName(a)
	e, err := c.read(name)
	if err == nil && e.Attachment != a {
		return Entry{}, &CorruptError{Path: c.dir.Path() + "/" + name, Reason: "is that of " + e.Attachment.String()}
	}
	return e, err
}

func (c *Cache) read(name string) (Entry, error) {
	var data []byte
	var err error
	for range 8 { // a file that is replaced while it is opened is read again
		data, err = c.dir.Read(name, maxEntryBytes)
		var changed *privdir.ChangedError
		if !errors.As(err, &changed) {
			break
		}
	}
	var unsafeErr *privdir.UnsafeError
	switch {
	case errors.Is(err, privdir.ErrTooLarge):
		return Entry{}, &CorruptError{Path: c.dir.Path() + "/" + name, Reason: "is too large for an entry"}
	case errors.As(err, &unsafeErr):
		return Entry{}, &CorruptError{Path: unsafeErr.Path, Reason: unsafeErr.Reason}
	case err != nil:
		return Entry{}, err
	}
	e, err := parse(data)
	if err != nil {
		return Entry{}, &CorruptError{Path: c.dir.Path() + "/" + name, Reason: err.Error()}
	}
	return e, nil
}

// Remove forgets the attachment; an absent entry is success, and a damaged one is
// removed too.
func (c *Cache) Remove(a endpoint.Attachment) error { return c.dir.Remove(fileName(a)) }

// Entries returns the usable entries of one network and removes what killed
// writers left behind.
func (c *Cache) Entries(network string) ([]Entry, error) {
	names, err := c.dir.Names()
	if err != nil {
		return nil, err
	}
	var list []Entry
	for _, name := range names {
		if e, err := c.read(name); err == nil && e.Network == network && fileName(e.Attachment) == name {
			list = append(list, e)
		}
	}
	_, err = c.dir.Sweep(time.Now().Add(-tempAge))
	return list, err
}

// Pending is an ADD that has begun. End it with Commit or Abort; where the outcome
// at mknetd is not known, do neither.
type Pending struct {
	c         *Cache
	entry     Entry
	before    *Entry
	committed endpoint.Generation
}

// Begin records that an ADD of the attachment begins. The file need not survive a
// crash of the machine: then there is nothing left to delete.
func (c *Cache) Begin(a endpoint.Attachment, bootID string) (*Pending, error) {
	p := &Pending{c: c, entry: Entry{Attachment: a, BootID: bootID, Adding: rand.Text()}}
	before, err := c.Get(a)
	var corrupt *CorruptError
	switch {
	case err == nil:
		p.before = &before
		p.entry.Generation, p.entry.Cookie = before.Generation, before.Cookie
	case errors.Is(err, fs.ErrNotExist), errors.As(err, &corrupt):
	default:
		return nil, err
	}
	return p, c.write(p.entry, privdir.Unsynced)
}

// Commit makes the generation durable. ErrSuperseded means that a DEL or another
// ADD came in between.
func (p *Pending) Commit(g endpoint.Generation, cookie uint64) error {
	if !p.ours() {
		return ErrSuperseded
	}
	p.committed = g
	done := p.entry
	done.Generation, done.Cookie, done.Adding = g, cookie, ""
	return p.c.write(done, privdir.Synced)
}

// Abort takes Begin back: the ADD made nothing. What was known before is known
// again.
func (p *Pending) Abort() error {
	switch {
	case !p.ours():
		return nil
	case p.before != nil:
		return p.c.write(*p.before, privdir.Synced)
	}
	return p.c.Remove(p.entry.Attachment)
}

// Forget removes the entry where it names this generation: the endpoint was rolled
// back after Commit.
func (p *Pending) Forget(g endpoint.Generation) error {
	if now, err := p.c.Get(p.entry.Attachment); err != nil || now.Generation != g || now.Adding != "" {
		return nil
	}
	return p.c.Remove(p.entry.Attachment)
}

// Superseded reports whether another ADD of the attachment has begun since, or has
// ended by now: what belongs to the attachment is that one's.
func (p *Pending) Superseded() bool {
	now, err := p.c.Get(p.entry.Attachment)
	switch {
	case err != nil, now.Adding == p.entry.Adding:
		return false
	case now.Adding != "":
		return true
	}
	return now.Generation != p.committed && (p.before == nil || now.Generation != p.before.Generation)
}

func (p *Pending) ours() bool {
	now, err := p.c.Get(p.entry.Attachment)
	return err == nil && now.Adding == p.entry.Adding
}

func (c *Cache) write(e Entry, durable privdir.Durability) error {
	data, err := e.encode()
	if err != nil {
		return fmt.Errorf("cache entry of %s: %w", e.Attachment, err)
	}
	return c.dir.Publish(fileName(e.Attachment), data, durable)
}
