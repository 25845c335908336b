package store

import (
	"bytes"
	"fmt"

	bolt "go.etcd.io/bbolt"

	"mknet/spec/endpoint"
)

// maxNameBytes bounds a document's name.
const maxNameBytes = 1024

// Documents is a set of named byte strings of one kind ("policy", "lease"), with
// the durability and checksums of the endpoint records.
type Documents struct {
	store *Store
	kind  []byte
}

// Documents returns the set of a kind; nothing is stored before the first Put.
// The kind must be an identifier.
func (s *Store) Documents(kind string) (*Documents, error) {
	if err := endpoint.ValidateIdentifier("document kind", kind); err != nil {
		return nil, err
	}
	return &Documents{store: s, kind: []byte(kind)}, nil
}

// scope is what the checksum takes for the bucket.
func (d *Documents) scope() []byte { return append([]byte("documents/"), d.kind...) }

// Put stores a document, replacing one of the same name. The name has 1 to 1024
// bytes, the content at most MaxDocumentBytes.
func (d *Documents) Put(name string, content []byte) error {
	return d.Update(map[string][]byte{name: content}, nil)
}

// Delete removes a document; absent is success.
func (d *Documents) Delete(name string) error { return d.Update(nil, []string{name}) }

// Update stores and removes several documents in one transaction: all of it is
// done, or nothing.
func (d *Documents) Update(put map[string][]byte, remove []string) error {
	sealed := make(map[string][]byte, len(put))
	for name, content := range put {
		if name == "" || len(name) > maxNameBytes {
			return fmt.Errorf("document of kind %s: name has %d bytes, must have 1 to %d", d.kind, len(name), maxNameBytes)
		}
		if len(content) > MaxDocumentBytes {
			return fmt.Errorf("document %s %q: has %d bytes, at most %d can be stored", d.kind, name, len(content), MaxDocumentBytes)
		}
		sealed[name] = seal(d.scope(), []byte(name), content)
	}
	err := d.store.update(func(tx *bolt.Tx) (change, error) {
		if err := d.change(tx, sealed, remove); err != nil {
			return change{}, &brokenTx{err}
		}
		return change{}, nil
	})
	if err != nil {
		return fmt.Errorf("store %d and remove %d documents of kind %s: %w", len(put), len(remove), d.kind, err)
	}
	return nil
}

func (d *Documents) change(tx *bolt.Tx, put map[string][]byte, remove []string) error {
	b := tx.Bucket(bucketDocuments).Bucket(d.kind)
	if b == nil {
		if len(put) == 0 {
			return nil
		}
		var err error
		if b, err = tx.Bucket(bucketDocuments).CreateBucket(d.kind); err != nil {
			return err
		}
	}
	for name, value := range put {
		if err := b.Put([]byte(name), value); err != nil {
			return err
		}
	}
	for _, name := range remove {
		if err := b.Delete([]byte(name)); err != nil {
			return err
		}
	}
	return nil
}

// Get returns a copy of a document; an absent one matches ErrNotFound.
func (d *Documents) Get(name string) ([]byte, error) {
	var out []byte
	err := d.store.view(func(tx *bolt.Tx) error {
		b := tx.Bucket(bucketDocuments).Bucket(d.kind)
		var v []byte
		if b != nil {
			v = b.Get([]byte(name))
		}
		if v == nil {
			return fmt.Errorf("document %s %q: %w", d.kind, name, ErrNotFound)
		}
		content, err := d.store.unseal(d.scope(), []byte(name), v)
		out = bytes.Clone(content)
		return err
	})
	return out, err
}

// Each calls f with a copy of every document of the kind, in the order of names,
// and stops at its first error. f must not call a method that writes.
func (d *Documents) Each(f func(name string, content []byte) error) error {
	return d.store.view(func(tx *bolt.Tx) error {
		b := tx.Bucket(bucketDocuments).Bucket(d.kind)
		if b == nil {
			return nil
		}
		return b.ForEach(func(k, v []byte) error {
			content, err := d.store.unseal(d.scope(), k, v)
			if err != nil {
				return err
			}
			return f(string(k), bytes.Clone(content))
		})
	})
}
