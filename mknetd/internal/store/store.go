package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"

	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var (
	storeFilled = crash.New("store.file-filled") // under its temporary name
	storeNamed  = crash.New("store.file-named")
)

// Where and how the store lies on disk.
const (
	DefaultDir = "/var/lib/mknet"
	FileName   = "state.db"
	// SchemaVersion is written into the file; an older one is brought up to it, see
	// migrations, a newer one is refused. A field that is added to
	// endpoint.Endpoint is a new version, if only so that a mknetd which would lose
	// the field refuses the store by name.
	SchemaVersion = 2
	// DefaultLockTimeout is how long Open waits for another holder to let go:
	// long enough for a daemon that is just ending.
	DefaultLockTimeout = 2 * time.Second
	// MaxFileBytes bounds the file: 2^18 endpoints (a /12) of 2 KiB, twice over
	// for the pages that copy-on-write leaves free.
	MaxFileBytes = 1 << 30
)

// Options configure Open.
type Options struct {
	// Dir is the folder, made with mode 0700 where it is missing.
	Dir string
	// Pools are those that slots are cut from; every record is held to them.
	Pools endpoint.Pools
	// Writer is the version of the program, kept in the file for the message of one
	// that is too old for it.
	Writer string
	// LockTimeout is how long to wait for another holder; 0 is DefaultLockTimeout.
	LockTimeout time.Duration
	// Now is the clock of CreatedAt and UpdatedAt; nil is time.Now.
	Now func() time.Time
}

// The buckets. meta and documents hold what is not an endpoint; attachments,
// slots and namespaces are indices of endpoints and are checked against it.
var (
	bucketMeta        = []byte("meta")
	bucketEndpoints   = []byte("endpoints")   // generation -> record
	bucketAttachments = []byte("attachments") // network NUL containerID NUL ifName -> generation
	bucketSlots       = []byte("slots")       // slot -> 'L' generation | 'F' turn
	bucketFreed       = []byte("freed")       // turn -> record of Freed, oldest first
	bucketNamespaces  = []byte("namespaces")  // bootID NUL cookie generation -> nothing
	bucketDocuments   = []byte("documents")   // kind -> bucket of name -> record

	keySchema = []byte("schema")
	keyPools  = []byte("pools")
	keyWriter = []byte("writer") // since schema 2
)

// Store is the open store. All methods are safe for concurrent use. Endpoints
// that go in or come out are copies.
type Store struct {
	db    *bolt.DB
	path  string
	pools endpoint.Pools
	now   func() time.Time
	lock  *os.File // the folder, locked

	writes  chan *write
	closing chan struct{}
	done    chan struct{} // closed when the committer has ended

	mu     sync.Mutex
	closed bool
	counts Counts
	broken *WriteError
}

// Counts are the numbers of records, kept up to date with every commit.
type Counts struct {
	ByState  map[endpoint.State]int
	Degraded int // of the READY ones
	Total    int
	ByKind   map[Kind]int // only those above zero
}

// Kind is what else records are counted by.
type Kind struct {
	Mode            endpoint.Mode
	State           endpoint.State
	Degraded, Bound bool
}

// Open opens the store in opts.Dir and makes it where there is none. The caller
// owns the store until Close; a second opener gets a *LockedError.
//
// The whole file is checked first: its pages, every record's checksum, content
// and place in the indices. A store of an older schema is migrated, and a copy of
// the file as it was stays beside it. What fails is a *CorruptError, *VersionError or
// *PoolsError, and the file is as it was. A folder or file that others than its
// owner may write, or that is a symbolic link, is refused.
func Open(opts Options) (*Store, error) {
	if err := opts.Pools.Validate(); err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	if opts.LockTimeout == 0 {
		opts.LockTimeout = DefaultLockTimeout
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	dir, err := openDir(opts.Dir)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	path := filepath.Join(opts.Dir, FileName)
	if err := lockFile(dir, path, true, opts.LockTimeout); err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	s, err := openLocked(path, dir, opts)
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	s.lock = dir
	s.writes = make(chan *write)
	go s.commitLoop()
	return s, nil
}

func openLocked(path string, dir *os.File, opts Options) (*Store, error) {
	if err := create(path, dir, opts.Pools, opts.Writer); err != nil {
		return nil, fmt.Errorf("make store %s: %w", path, err)
	}
	s := newStore(path, opts)
	if err := s.load(opts); err != nil {
		return nil, err
	}
	err := s.adoptPools(opts.Pools)
	if err == nil {
		err = s.sign(opts.Writer)
	}
	if err != nil {
		return nil, errors.Join(err, s.db.Close())
	}
	return s, nil
}

func newStore(path string, opts Options) *Store {
	return &Store{path: path, pools: opts.Pools, now: opts.Now, closing: make(chan struct{}), done: make(chan struct{})}
}

// load opens, verifies and maps the file, then checks every record.
func (s *Store) load(opts Options) error {
	f, err := openFile(s.path, true)
	if err != nil {
		return fmt.Errorf("open store: %w", err)
	}
	if err := lockFile(f, s.path, true, opts.LockTimeout); err != nil {
		return errors.Join(err, f.Close())
	}
	// bbolt maps the file and follows its pointers without asking: a damaged
	// page would end the process, so the pages are walked before.
	if err := verifyPages(f, s.path); err != nil {
		return errors.Join(err, f.Close())
	}
	if s.db, err = openVerified(f, s.path, false); err != nil {
		return err
	}
	var schema int
	err = s.db.View(func(tx *bolt.Tx) (err error) {
		if schema, err = s.readSchema(tx); err != nil {
			return err
		}
		if err := s.knows(tx, schema); err != nil {
			return err
		}
		return (&verifier{Store: s, report: firstFault}).verify(tx, schema)
	})
	if err == nil && schema < SchemaVersion {
		err = s.migrate(schema, opts.Writer)
	}
	if err != nil {
		return errors.Join(err, s.db.Close())
	}
	return nil
}

// openVerified gives a file that was verified and locked to bbolt, which owns it
// from then on, also on error.
func openVerified(f *os.File, path string, readOnly bool) (*bolt.DB, error) {
	db, err := bolt.Open(path, 0o600, &bolt.Options{
		ReadOnly: readOnly,
		Timeout:  time.Second,
		MaxSize:  MaxFileBytes,
		OpenFile: func(string, int, os.FileMode) (*os.File, error) { return f, nil },
	})
	if err != nil {
		return nil, fmt.Errorf("open store %s: %w", path, err)
	}
	return db, nil
}

// create makes a store whole and then gives it its name, so that a crash at any
// moment leaves either none or a complete one.
func create(path string, dir *os.File, pools endpoint.Pools, writer string) error {
	fresh := path + ".new"
	if err := removeIfThere(fresh); err != nil {
		return fmt.Errorf("remove the rest of an interrupted start: %w", err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		return err // it is there, or cannot be looked at
	}
	if err := build(fresh, pools, writer, func(*bolt.Tx) error { return nil }); err != nil {
		return err
	}
	storeFilled.Here()
	if err := os.Rename(fresh, path); err != nil {
		return errors.Join(err, removeIfThere(fresh))
	}
	storeNamed.Here()
	return dir.Sync()
}

// build makes a store file under a name of its own, which on error it removes.
// fill adds what else shall be in it.
func build(fresh string, pools endpoint.Pools, writer string, fill func(*bolt.Tx) error) error {
	db, err := bolt.Open(fresh, 0o600, &bolt.Options{Timeout: time.Second})
	if err != nil {
		return errors.Join(err, removeIfThere(fresh))
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for _, name := range allBuckets {
			if _, err := tx.CreateBucket(name); err != nil {
				return fmt.Errorf("bucket %s: %w", name, err)
			}
		}
		if err := errors.Join(putSchema(tx, SchemaVersion), putWriter(tx, writer), putPools(tx, pools)); err != nil {
			return err
		}
		return fill(tx)
	})
	if err = errors.Join(err, db.Close()); err != nil {
		return errors.Join(err, removeIfThere(fresh))
	}
	return nil
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func putPools(tx *bolt.Tx, pools endpoint.Pools) error {
	doc, err := json.Marshal(pools)
	if err != nil {
		return err
	}
	return tx.Bucket(bucketMeta).Put(keyPools, seal(bucketMeta, keyPools, doc))
}

// adoptPools holds the records to the configured pools. A store without records
// takes new pools over; the queue of freed slots means nothing then.
func (s *Store) adoptPools(want endpoint.Pools) error {
	var got endpoint.Pools
	if err := s.db.View(func(tx *bolt.Tx) (err error) { got, err = s.readPools(tx); return err }); err != nil {
		return err
	}
	if got == want {
		return nil
	}
	if s.counts.Total > 0 {
		return &PoolsError{Path: s.path, Got: got, Want: want, Endpoints: s.counts.Total}
	}
	err := s.db.Update(func(tx *bolt.Tx) error {
		for _, name := range [][]byte{bucketFreed, bucketSlots} {
			if err := tx.DeleteBucket(name); err != nil {
				return err
			}
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		return putPools(tx, want)
	})
	if err != nil {
		return &WriteError{Path: s.path, Err: err}
	}
	s.pools = want
	return nil
}

func (s *Store) readPools(tx *bolt.Tx) (endpoint.Pools, error) {
	return s.decodePools(tx.Bucket(bucketMeta).Get(keyPools))
}

func (s *Store) decodePools(value []byte) (endpoint.Pools, error) {
	var p endpoint.Pools
	doc, err := s.unseal(bucketMeta, keyPools, value)
	if err != nil {
		return p, err
	}
	if err := json.Unmarshal(doc, &p); err != nil {
		return p, s.corrupt(bucketMeta, keyPools, "%v", err)
	}
	if err := p.Validate(); err != nil {
		return p, s.corrupt(bucketMeta, keyPools, "%v", err)
	}
	return p, nil
}

// Close waits for the writes that have begun, refuses further ones and lets the
// file go. It may be called twice.
func (s *Store) Close() error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.mu.Unlock()
	if !first {
		<-s.done
		return nil
	}
	close(s.closing)
	<-s.done
	err := s.db.Close()
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close())
	}
	return err
}

// Path is the file, for messages.
func (s *Store) Path() string { return s.path }

// Counts returns the numbers of records; the map is the caller's.
func (s *Store) Counts() Counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.counts
	c.ByState = make(map[endpoint.State]int, len(s.counts.ByState))
	for k, v := range s.counts.ByState {
		c.ByState[k] = v
	}
	c.ByKind = maps.Clone(s.counts.ByKind)
	return c
}

// Broken returns the error that made the store refuse all writes, or nil.
func (s *Store) Broken() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken == nil {
		return nil
	}
	return s.broken
}
