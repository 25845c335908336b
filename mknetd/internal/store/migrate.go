package store

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
)

// migration brings a store from the schema before to its own.
type migration struct {
	to    int
	what  string // for the log and for who reads this table
	apply func(tx *bolt.Tx, writer string) error
}

// migrations are all steps, oldest first. What a step once did stays as it is:
// stores of every schema remain under testdata/schema and are migrated by the
// tests. Since a step's result is verified as its schema asks before it is
// committed, a step that forgets something changes nothing.
var migrations = []migration{
	{to: 2, what: "keeps the version of the mknetd that wrote it", apply: putWriter},
}

// migrate brings a verified store from an older schema to the present one, in one
// transaction. The file as it was stays beside it as state.db.schema-N: the mknetd
// of before can run from it.
func (s *Store) migrate(from int, writer string) error {
	if err := s.keepCopy(fmt.Sprintf("%s.schema-%d", s.path, from)); err != nil {
		return fmt.Errorf("store %s: keep a copy before its migration from schema %d: %w", s.path, from, err)
	}
	err := s.db.Update(func(tx *bolt.Tx) error {
		for _, m := range migrations {
			if m.to <= from {
				continue
			}
			if err := m.apply(tx, writer); err != nil {
				return fmt.Errorf("to schema %d, which %s: %w", m.to, m.what, err)
			}
			if err := putSchema(tx, m.to); err != nil {
				return err
			}
		}
		return (&verifier{Store: s, report: firstFault}).verify(tx, SchemaVersion)
	})
	if err != nil {
		return fmt.Errorf("store %s: migrate from schema %d to %d (nothing was changed): %w", s.path, from, SchemaVersion, err)
	}
	return nil
}

// keepCopy copies the file, durably and under its name only when it is whole.
func (s *Store) keepCopy(to string) error {
	fresh := to + ".new"
	out, err := os.OpenFile(fresh, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	// A transaction's view of the file is one moment of it.
	err = s.db.View(func(tx *bolt.Tx) error {
		_, err := tx.WriteTo(out)
		return err
	})
	if err = errors.Join(err, out.Sync(), out.Close()); err != nil {
		return errors.Join(err, removeIfThere(fresh))
	}
	return errors.Join(os.Rename(fresh, to), syncFolder(filepath.Dir(to)))
}

// knows refuses a schema that this program has no code for.
func (s *Store) knows(tx *bolt.Tx, schema int) error {
	switch {
	case schema > SchemaVersion:
		e := &VersionError{Path: s.path, Got: schema, Want: SchemaVersion}
		if w, err := s.readWriter(tx); err == nil { // a later schema may keep it elsewhere
			e.Writer = w.Version
		}
		return e
	case schema < 1:
		return s.corrupt(bucketMeta, keySchema, "is %d, the first was 1", schema)
	}
	return nil
}

// writer names the program that opened the store last.
type writer struct {
	Version string    `json:"version"`
	Since   time.Time `json:"since"`
}

func putSchema(tx *bolt.Tx, schema int) error {
	return tx.Bucket(bucketMeta).Put(keySchema, seal(bucketMeta, keySchema, binary.BigEndian.AppendUint32(nil, uint32(schema))))
}

func putWriter(tx *bolt.Tx, version string) error {
	doc, err := json.Marshal(writer{Version: version, Since: time.Now().UTC().Truncate(time.Second)})
	if err != nil {
		return err
	}
	return tx.Bucket(bucketMeta).Put(keyWriter, seal(bucketMeta, keyWriter, doc))
}

func (s *Store) readWriter(tx *bolt.Tx) (w writer, err error) {
	doc, err := s.unseal(bucketMeta, keyWriter, tx.Bucket(bucketMeta).Get(keyWriter))
	if err != nil {
		return w, err
	}
	if err := json.Unmarshal(doc, &w); err != nil {
		return w, s.corrupt(bucketMeta, keyWriter, "%v", err)
	}
	return w, nil
}

// sign notes who writes from now on.
func (s *Store) sign(version string) error {
	var w writer
	if err := s.db.View(func(tx *bolt.Tx) (err error) { w, err = s.readWriter(tx); return err }); err != nil {
		return err
	}
	if version == "" || w.Version == version {
		return nil
	}
	if err := s.db.Update(func(tx *bolt.Tx) error { return putWriter(tx, version) }); err != nil {
		return &WriteError{Path: s.path, Err: err}
	}
	return nil
}
