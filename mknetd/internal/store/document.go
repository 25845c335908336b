package store

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"

	"mknet/spec/endpoint"
)

// What a document says that it is.
const (
	DocumentFormat = "mknet-state"
	// DocumentVersion is that of the document's own form; the records in it have
	// the form of the schema that it names.
	DocumentVersion = 1
)

// Document is a store as JSON: what `mknetd state export` writes and `mknetd
// state import` reads. The indices are not in it, they follow from the records.
type Document struct {
	Format     string              `json:"format"`
	Version    int                 `json:"version"`
	ExportedAt time.Time           `json:"exportedAt"`
	Schema     int                 `json:"schema"`           // of the store it was read from; 0: it could not say
	Writer     string              `json:"writer,omitempty"` // the mknetd that wrote that store
	Pools      DocumentPools       `json:"pools"`
	Endpoints  []endpoint.Endpoint `json:"endpoints"`
	Freed      []Freed             `json:"freed,omitempty"` // oldest first
	Documents  []NamedContent      `json:"documents,omitempty"`
	LeftOut    []string            `json:"leftOut,omitempty"` // what could not be read, a line each
}

// DocumentPools is endpoint.Pools with names of its own.
type DocumentPools struct {
	Child   netip.Prefix `json:"child"`
	Transit netip.Prefix `json:"transit"`
}

// NamedContent is one document of Documents.
type NamedContent struct {
	Kind    string `json:"kind"`
	Name    string `json:"name"`
	Content []byte `json:"content"` // base64 in JSON
}

// sort gives a document the same order whatever order the pages were read in. The
// queue of freed slots has its own.
func (d *Document) sort() {
	slices.SortFunc(d.Endpoints, func(a, b endpoint.Endpoint) int {
		return cmp.Or(bytes.Compare(a.Generation[:], b.Generation[:]), b.UpdatedAt.Compare(a.UpdatedAt))
	})
	slices.SortFunc(d.Documents, func(a, b NamedContent) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
	})
}

// resolve removes what contradicts something else: of two records of one
// generation, attachment or slot the one that was written last stays. It returns
// a line for each one removed.
func (d *Document) resolve() (removed []string) {
	newest := slices.Clone(d.Endpoints)
	slices.SortStableFunc(newest, func(a, b endpoint.Endpoint) int { return b.UpdatedAt.Compare(a.UpdatedAt) })
	var have claims
	drop := map[int]bool{}
	for _, ep := range newest {
		if err := have.endpoint(&ep); err != nil {
			removed = append(removed, fmt.Sprintf("endpoint %s: %v", ep.Generation, err))
			drop[slices.IndexFunc(d.Endpoints, func(o endpoint.Endpoint) bool {
				return o.Generation == ep.Generation && o.UpdatedAt.Equal(ep.UpdatedAt)
			})] = true
		}
	}
	kept := []endpoint.Endpoint{}
	for i, ep := range d.Endpoints {
		if !drop[i] {
			kept = append(kept, ep)
		}
	}
	d.Endpoints = kept
	// A freed slot that has an owner, or stands twice, is only an order lost.
	d.Freed = slices.DeleteFunc(d.Freed, func(f Freed) bool { return have.freed(f, endpoint.Pools(d.Pools)) != nil })
	return removed
}

// claims are what at most one record may have.
type claims struct {
	generations map[endpoint.Generation]bool
	attachments map[endpoint.Attachment]endpoint.Generation
	slots       map[uint32]string // who has it
}

func (c *claims) endpoint(ep *endpoint.Endpoint) error {
	if c.generations == nil {
		c.generations, c.attachments, c.slots = map[endpoint.Generation]bool{}, map[endpoint.Attachment]endpoint.Generation{}, map[uint32]string{}
	}
	if c.generations[ep.Generation] {
		return errors.New("is there twice")
	}
	if other, taken := c.attachments[ep.Attachment]; taken {
		return fmt.Errorf("attachment %s belongs to endpoint %s", ep.Attachment, other)
	}
	if HasSlot(ep) {
		if other, taken := c.slots[ep.Slot]; taken {
			return fmt.Errorf("slot %d belongs to %s", ep.Slot, other)
		}
		c.slots[ep.Slot] = "endpoint " + ep.Generation.String()
	}
	c.generations[ep.Generation], c.attachments[ep.Attachment] = true, ep.Generation
	return nil
}

func (c *claims) freed(f Freed, pools endpoint.Pools) error {
	if c.slots == nil {
		c.slots = map[uint32]string{}
	}
	if f.Slot >= pools.Slots() {
		return fmt.Errorf("slot %d: the pool %s has %d", f.Slot, pools.Child, pools.Slots())
	}
	if other, taken := c.slots[f.Slot]; taken {
		return fmt.Errorf("freed slot %d: belongs to %s", f.Slot, other)
	}
	c.slots[f.Slot] = "the queue of freed ones"
	return nil
}

// maxDocumentBytes bounds what ReadDocument takes: JSON of a full store.
const maxDocumentBytes = MaxFileBytes

// ReadDocument reads and checks a document. Nothing in it is skipped: a field or a
// version that is not known, and a record that Open would refuse, is an error.
func ReadDocument(r io.Reader) (*Document, error) {
	d := new(Document)
	dec := json.NewDecoder(io.LimitReader(r, maxDocumentBytes))
	dec.DisallowUnknownFields()
	if err := dec.Decode(d); err != nil {
		return nil, fmt.Errorf("is not a document of mknetd state export: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("the document is followed by other data")
	}
	return d, d.validate()
}

func (d *Document) validate() error {
	switch {
	case d.Format != DocumentFormat:
		return fmt.Errorf("format is %q, want %q", d.Format, DocumentFormat)
	case d.Version != DocumentVersion:
		return fmt.Errorf("document version is %d, this mknetd knows %d", d.Version, DocumentVersion)
	case d.Schema < 0 || d.Schema > SchemaVersion:
		return fmt.Errorf("its records have schema %d, this mknetd knows up to %d (import it with mknetd %s or a later one)", d.Schema, SchemaVersion, d.Writer)
	}
	pools := endpoint.Pools(d.Pools)
	if err := pools.Validate(); err != nil {
		return err
	}
	var have claims
	var errs []error
	for i := range d.Endpoints {
		ep := &d.Endpoints[i]
		err := validate(ep, pools)
		if err == nil {
			err = have.endpoint(ep)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("endpoint %s: %w", ep.Generation, err))
		}
	}
	for _, f := range d.Freed {
		errs = append(errs, have.freed(f, pools))
	}
	names := map[[2]string]bool{}
	for _, n := range d.Documents {
		errs = append(errs, endpoint.ValidateIdentifier("document kind", n.Kind))
		if n.Name == "" || len(n.Name) > maxNameBytes || len(n.Content) > MaxDocumentBytes || names[[2]string{n.Kind, n.Name}] {
			errs = append(errs, fmt.Errorf("document %s %q: has no name, is too long, or is there twice", n.Kind, n.Name))
		}
		names[[2]string{n.Kind, n.Name}] = true
	}
	return errors.Join(errs...)
}

// Import makes a store in dir of a document that ReadDocument has returned. An
// existing store is fs.ErrExist; with force it is replaced, in one step, and kept
// under the name that is returned. A running daemon is a *LockedError.
func Import(dir string, d *Document, writer string, force bool) (kept string, err error) {
	folder, err := openDir(dir)
	if err != nil {
		return "", fmt.Errorf("import into store: %w", err)
	}
	path := filepath.Join(dir, FileName)
	if err := lockFile(folder, path, true, inspectWait); err != nil {
		return "", errors.Join(err, folder.Close())
	}
	kept, err = importLocked(path, d, writer, force)
	return kept, errors.Join(err, folder.Sync(), folder.Close())
}

func importLocked(path string, d *Document, writer string, force bool) (kept string, err error) {
	_, err = os.Lstat(path)
	exists := err == nil
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	if exists && !force {
		return "", fmt.Errorf("store %s: %w (--force replaces it and keeps a copy)", path, os.ErrExist)
	}
	fresh := path + ".new"
	if err := removeIfThere(fresh); err != nil {
		return "", err
	}
	s := &Store{path: fresh, pools: endpoint.Pools(d.Pools)}
	if err := build(fresh, s.pools, writer, func(tx *bolt.Tx) error { return s.fill(tx, d) }); err != nil {
		return "", fmt.Errorf("import into store %s: %w", path, err)
	}
	if err := mustBeSound(fresh, s.pools); err != nil {
		return "", errors.Join(fmt.Errorf("import into store %s: what was made: %w", path, err), removeIfThere(fresh))
	}
	if exists {
		// A second name for the old file first: at no moment is there no store.
		kept = path + ".replaced-" + time.Now().UTC().Format("20060102T150405.000Z")
		if err := os.Link(path, kept); err != nil {
			return "", errors.Join(fmt.Errorf("keep the present store: %w", err), removeIfThere(fresh))
		}
	}
	return kept, os.Rename(fresh, path)
}

// mustBeSound reads a fresh store back as Open would.
func mustBeSound(path string, pools endpoint.Pools) error {
	in, err := inspectFile(path, pools)
	if err != nil {
		return err
	}
	if len(in.Faults) > 0 {
		return in.Faults[0]
	}
	return nil
}

// fill puts everything of a document into an empty store.
func (s *Store) fill(tx *bolt.Tx, d *Document) error {
	// Records of an older schema are stored as such: the next Open migrates them.
	if d.Schema > 0 {
		if err := putSchema(tx, d.Schema); err != nil {
			return err
		}
	}
	for i := range d.Endpoints {
		ep := &d.Endpoints[i]
		doc, err := s.encodeEndpoint(ep)
		if err == nil {
			err = s.put(tx, nil, ep, doc)
		}
		if err != nil {
			return err
		}
	}
	for _, f := range d.Freed {
		if err := queueSlot(tx, f); err != nil {
			return err
		}
	}
	for _, n := range d.Documents {
		b, err := tx.Bucket(bucketDocuments).CreateBucketIfNotExists([]byte(n.Kind))
		if err == nil {
			err = b.Put([]byte(n.Name), seal((&Documents{kind: []byte(n.Kind)}).scope(), []byte(n.Name), n.Content))
		}
		if err == nil && n.Kind == string(kindFreed) {
			err = continueTurns(b, n.Content)
		}
		if err != nil {
			return fmt.Errorf("document %s %q: %w", n.Kind, n.Name, err)
		}
	}
	return nil
}
