package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"

	"mknet/spec/endpoint"
)

// Inspection is what a look at a store at rest has found.
type Inspection struct {
	Path   string
	Schema int
	// Faults is everything that is wrong with the file.
	Faults []*CorruptError
	// Whole is false when pages are damaged: then whether indices and records
	// agree could not be asked.
	Whole bool
	// Content is all that can be read, and LeftOut what of it could not be.
	Content Document
}

// inspectWait is how long Inspect waits for a store that is in use.
const inspectWait = 100 * time.Millisecond

// Inspect reads a store that no daemon has open, whatever its state, and changes
// nothing. pools are taken for those of a store that cannot say its own. Its
// errors are a *LockedError while a daemon runs, fs.ErrNotExist, a *VersionError,
// and those of the file system; damage is no error but a finding.
func Inspect(dir string, pools endpoint.Pools) (*Inspection, error) {
	return inspectFile(filepath.Join(dir, FileName), pools)
}

func inspectFile(path string, pools endpoint.Pools) (*Inspection, error) {
	f, err := openFile(path, false)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	if err := lockFile(f, path, false, inspectWait); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	in, err := inspect(f, path, pools)
	return in, errors.Join(err, f.Close())
}

func inspect(f *os.File, path string, pools endpoint.Pools) (*Inspection, error) {
	w, err := newWalker(f, path)
	if err != nil {
		return nil, err
	}
	r := &reader{Store: &Store{path: path, pools: pools}, places: map[string]int64{}, values: map[string][]value{}}
	w.collect, w.visit = true, r.take
	if err := w.note(w.walk()); err != nil {
		return nil, err
	}
	w.lost()
	in := &Inspection{Path: path, Whole: len(w.faults) == 0, Faults: w.faults}
	if err := r.read(in); err != nil {
		return nil, err
	}
	if !in.Whole {
		in.Faults = append(in.Faults, r.faults...)
	} else if err := r.compare(f, in); err != nil {
		return nil, err
	}
	for _, e := range append(slices.Clone(w.faults), r.faults...) {
		in.Content.LeftOut = append(in.Content.LeftOut, e.Fault())
	}
	in.Content.LeftOut = append(in.Content.LeftOut, r.notes...)
	if w.halved {
		in.Content.LeftOut = append(in.Content.LeftOut, "one of the two headers is damaged: if it was the newer one, the last write is missing")
	}
	return in, nil
}

// lost visits leaf pages that are in use but that no pointer leads to any more,
// because the page above is damaged. What lies on a free page is of the past and
// must not come back, so nothing is visited where the list of free pages is gone.
func (w *walker) lost() {
	if len(w.faults) == 0 || w.free == nil {
		return
	}
	for id := uint64(2); id < w.limit; id++ {
		if w.used[id] || w.free[id] {
			continue
		}
		// A page that is none (the rest of a long one) has not its own number.
		p, err := w.load(id)
		if err != nil || p.flags != flagLeaf || pageHeader+int(p.count)*pageElement > len(p.data) {
			continue
		}
		w.buckets = nil
		for i := range int(p.count) {
			if key, value, err := w.element(p, w.at(id), i); err == nil {
				w.visit(nil, key, value, w.at(id))
			}
		}
	}
}

type value struct{ key, value []byte }

// reader gathers the values that a walker meets and reads the records among them.
type reader struct {
	*Store
	values map[string][]value // by the buckets' names
	lost   []value            // of pages that no bucket leads to
	places map[string]int64   // offset by bucket and key
	faults []*CorruptError
	notes  []string
}

func place(bucket string, key []byte) string { return bucket + "\x00" + string(key) }

func (r *reader) take(buckets []string, key, val []byte, offset int64) {
	v := value{bytes.Clone(key), bytes.Clone(val)}
	switch {
	case len(buckets) == 0:
		r.lost = append(r.lost, v)
		return
	case len(buckets) == 2 && buckets[0] == string(bucketDocuments):
		buckets = []string{buckets[0] + "/" + buckets[1]}
	case len(buckets) != 1:
		return // none of ours
	}
	r.places[place(buckets[0], key)] = offset
	r.values[buckets[0]] = append(r.values[buckets[0]], v)
}

// found notes damage and adds where the record lies. Other errors are returned.
func (r *reader) found(err error) error {
	var corrupt *CorruptError
	if !errors.As(err, &corrupt) {
		return err
	}
	r.locate(corrupt)
	r.faults = append(r.faults, corrupt)
	return nil
}

func (r *reader) locate(e *CorruptError) {
	if at, ok := r.places[place(e.Bucket, e.raw)]; ok {
		e.Offset = at
	}
}

// read makes the document of what was gathered.
func (r *reader) read(in *Inspection) error {
	doc := &in.Content
	doc.Format, doc.Version = DocumentFormat, DocumentVersion
	if err := r.readMeta(in); err != nil {
		return err
	}
	doc.Pools = DocumentPools(r.pools)
	for _, v := range r.values[string(bucketEndpoints)] {
		ep, err := r.decodeEndpoint(v.key, v.value)
		if err != nil {
			if err := r.found(err); err != nil {
				return err
			}
			continue
		}
		doc.Endpoints = append(doc.Endpoints, *ep)
	}
	for _, v := range r.values[string(bucketFreed)] {
		f, err := r.decodeFreed(v.key, v.value)
		if err != nil {
			if err := r.found(err); err != nil {
				return err
			}
			continue
		}
		doc.Freed = append(doc.Freed, f)
	}
	for bucket, values := range r.values {
		kind, ok := bytes.CutPrefix([]byte(bucket), []byte("documents/"))
		if !ok {
			continue
		}
		for _, v := range values {
			content, err := r.unseal((&Documents{kind: kind}).scope(), v.key, v.value)
			if err != nil {
				if err := r.found(err); err != nil {
					return err
				}
				continue
			}
			doc.Documents = append(doc.Documents, NamedContent{Kind: string(kind), Name: string(v.key), Content: content})
		}
	}
	r.readLost(doc)
	doc.sort()
	r.notes = append(r.notes, doc.resolve()...)
	return nil
}

func (r *reader) readMeta(in *Inspection) error {
	for _, v := range r.values[string(bucketMeta)] {
		var err error
		switch string(v.key) {
		case string(keySchema):
			in.Schema, err = r.decodeSchema(v.value)
		case string(keyWriter):
			var payload []byte
			if payload, err = r.unseal(bucketMeta, keyWriter, v.value); err == nil {
				var w writer
				if jsonErr := json.Unmarshal(payload, &w); jsonErr != nil {
					err = r.corrupt(bucketMeta, keyWriter, "%v", jsonErr)
				}
				in.Content.Writer = w.Version
			}
		case string(keyPools):
			var p endpoint.Pools
			if p, err = r.decodePools(v.value); err == nil {
				r.pools = p
			}
		}
		if err := r.found(err); err != nil {
			return err
		}
	}
	if in.Schema > SchemaVersion {
		return &VersionError{Path: r.path, Got: in.Schema, Want: SchemaVersion, Writer: in.Content.Writer}
	}
	in.Content.Schema = in.Schema
	return nil
}

// readLost takes what a checksum proves to be a record of ours.
func (r *reader) readLost(doc *Document) {
	kinds := map[string]bool{}
	for _, d := range doc.Documents {
		kinds[d.Kind] = true
	}
	for _, v := range r.lost {
		if ep, err := r.decodeEndpoint(v.key, v.value); err == nil {
			doc.Endpoints = append(doc.Endpoints, *ep)
			continue
		}
		if f, err := r.decodeFreed(v.key, v.value); err == nil {
			doc.Freed = append(doc.Freed, f)
			continue
		}
		for kind := range kinds {
			if content, err := r.unseal((&Documents{kind: []byte(kind)}).scope(), v.key, v.value); err == nil {
				doc.Documents = append(doc.Documents, NamedContent{Kind: kind, Name: string(v.key), Content: content})
			}
		}
	}
}

// compare asks whether indices and records agree, in a file whose pages are sound.
func (r *reader) compare(f *os.File, in *Inspection) error {
	// bbolt closes what it is given.
	again, err := openFile(f.Name(), false)
	if err != nil {
		return err
	}
	db, err := openVerified(again, r.path, true)
	if err != nil {
		return err
	}
	s := &Store{path: r.path, pools: r.pools, db: db}
	v := &verifier{Store: s, report: func(e *CorruptError) error {
		r.locate(e)
		in.Faults = append(in.Faults, e)
		return nil
	}}
	err = db.View(func(tx *bolt.Tx) error {
		schema, err := s.readSchema(tx)
		if err == nil {
			err = s.knows(tx, schema)
		}
		if err != nil {
			return v.found(err)
		}
		return v.verify(tx, schema)
	})
	return errors.Join(err, db.Close())
}
