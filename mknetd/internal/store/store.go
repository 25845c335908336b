package store

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"

	"mknet/spec/endpoint"
)

// Where and how the store lies on disk.
const (
	DefaultDir = "/var/lib/mknet"
	FileName   = "state.db"
	// SchemaVersion is written into the file; another one is refused.
	SchemaVersion = 1
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
)

// Store is the open store. All methods are safe for concurrent use. Endpoints
// that go in or come out are copies.
type Store struct {
	db    *bolt.DB
	path  string
	pools endpoint.Pools
	now   func() time.Time
	lock  *os.File // the folder, locked; nil when read-only

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
}

// Open opens the store in opts.Dir and makes it where there is none. The caller
// owns the store until Close; a second opener gets a *LockedError.
//
// The whole file is checked first: its pages, every record's checksum, content
// and place in the indices. What fails is a *CorruptError, *VersionError or
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
	if err := create(path, dir, opts.Pools); err != nil {
		return nil, fmt.Errorf("make store %s: %w", path, err)
	}
	s := &Store{path: path, pools: opts.Pools, now: opts.Now, closing: make(chan struct{}), done: make(chan struct{})}
	if err := s.load(true, opts.LockTimeout); err != nil {
		return nil, err
	}
	if err := s.adoptPools(opts.Pools); err != nil {
		return nil, errors.Join(err, s.db.Close())
	}
	return s, nil
}

// OpenReadOnly opens the store in dir for a look while no daemon runs. It
// changes nothing; a running daemon is a *LockedError, no store fs.ErrNotExist.
func OpenReadOnly(dir string) (*Store, error) {
	s := &Store{path: filepath.Join(dir, FileName), now: time.Now, closing: make(chan struct{}), done: make(chan struct{})}
	close(s.done)
	if err := s.load(false, 100*time.Millisecond); err != nil {
		return nil, err
	}
	return s, nil
}

// load opens, verifies and maps the file, then checks every record.
func (s *Store) load(writable bool, timeout time.Duration) error {
	f, err := openFile(s.path, writable)
	if err != nil {
		return fmt.Errorf("open store: %w", err)
	}
	if err := lockFile(f, s.path, writable, timeout); err != nil {
		return errors.Join(err, f.Close())
	}
	// bbolt maps the file and follows its pointers without asking: a damaged
	// page would end the process, so the pages are walked before.
	if err := verifyPages(f, s.path); err != nil {
		return errors.Join(err, f.Close())
	}
	db, err := bolt.Open(s.path, 0o600, &bolt.Options{
		ReadOnly: !writable,
		Timeout:  timeout,
		MaxSize:  MaxFileBytes,
		// The file is the one that was verified and locked; bbolt owns it now.
		OpenFile: func(string, int, os.FileMode) (*os.File, error) { return f, nil },
	})
	if err != nil {
		return fmt.Errorf("open store %s: %w", s.path, err)
	}
	s.db = db
	if err := db.View(s.verifyRecords); err != nil {
		return errors.Join(err, db.Close())
	}
	return nil
}

// create makes a store whole and then gives it its name, so that a crash at any
// moment leaves either none or a complete one.
func create(path string, dir *os.File, pools endpoint.Pools) error {
	fresh := path + ".new"
	if err := os.Remove(fresh); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the rest of an interrupted start: %w", err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		return err // it is there, or cannot be looked at
	}
	db, err := bolt.Open(fresh, 0o600, &bolt.Options{Timeout: time.Second})
	if err != nil {
		return errors.Join(err, removeIfThere(fresh))
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for _, name := range [][]byte{bucketMeta, bucketEndpoints, bucketAttachments, bucketSlots, bucketFreed, bucketNamespaces, bucketDocuments} {
			if _, err := tx.CreateBucket(name); err != nil {
				return fmt.Errorf("bucket %s: %w", name, err)
			}
		}
		if err := tx.Bucket(bucketMeta).Put(keySchema, seal(bucketMeta, keySchema, binary.BigEndian.AppendUint32(nil, SchemaVersion))); err != nil {
			return err
		}
		return putPools(tx, pools)
	})
	if err = errors.Join(err, db.Close()); err != nil {
		return errors.Join(err, removeIfThere(fresh))
	}
	if err := os.Rename(fresh, path); err != nil {
		return errors.Join(err, removeIfThere(fresh))
	}
	return dir.Sync()
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
	var p endpoint.Pools
	doc, err := s.unseal(bucketMeta, keyPools, tx.Bucket(bucketMeta).Get(keyPools))
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
