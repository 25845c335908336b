package store

import (
	"bytes"
	"encoding/binary"

	bolt "go.etcd.io/bbolt"

	"mknet/spec/endpoint"
)

// verifyRecords checks everything that Open relies on, beyond the structure that
// verifyPages has proven: schema version, every record, and that the indices and
// the records say the same. It fills in pools (where read-only) and counts.
func (s *Store) verifyRecords(tx *bolt.Tx) error {
	for _, name := range [][]byte{bucketMeta, bucketEndpoints, bucketAttachments, bucketSlots, bucketFreed, bucketNamespaces, bucketDocuments} {
		if tx.Bucket(name) == nil {
			return s.corrupt(name, nil, "the bucket is missing")
		}
	}
	version, err := s.unseal(bucketMeta, keySchema, tx.Bucket(bucketMeta).Get(keySchema))
	if err != nil {
		return err
	}
	if len(version) != 4 {
		return s.corrupt(bucketMeta, keySchema, "has %d bytes, want 4", len(version))
	}
	if got := int(binary.BigEndian.Uint32(version)); got != SchemaVersion {
		return &VersionError{Path: s.path, Got: got, Want: SchemaVersion}
	}
	// Records are held to the pools they were cut from; whether those are the
	// configured ones is asked afterwards.
	if s.pools, err = s.readPools(tx); err != nil {
		return err
	}
	slots, err := s.verifyEndpoints(tx)
	if err != nil {
		return err
	}
	if err := s.verifySlots(tx, slots); err != nil {
		return err
	}
	return s.verifyDocuments(tx)
}

// verifyEndpoints checks every record and its index entries, then that the
// indices hold nothing else. It returns who has which slot.
func (s *Store) verifyEndpoints(tx *bolt.Tx) (map[uint32]endpoint.Generation, error) {
	slots := map[uint32]endpoint.Generation{}
	attachments, namespaces := tx.Bucket(bucketAttachments), tx.Bucket(bucketNamespaces)
	inNamespace := 0
	s.counts = Counts{}
	err := tx.Bucket(bucketEndpoints).ForEach(func(k, v []byte) error {
		ep, err := s.decodeEndpoint(k, v)
		if err != nil {
			return err
		}
		if got := attachments.Get(attachmentKey(ep.Attachment)); !bytes.Equal(got, k) {
			return s.corrupt(bucketAttachments, attachmentKey(ep.Attachment), "is %x, want endpoint %s", got, ep.Generation)
		}
		if key := namespaceKey(ep); key != nil {
			inNamespace++
			if namespaces.Get(key) == nil {
				return s.corrupt(bucketNamespaces, key, "is missing, endpoint %s is in that namespace", ep.Generation)
			}
		}
		if HasSlot(ep) {
			if other, taken := slots[ep.Slot]; taken {
				return s.corrupt(bucketEndpoints, k, "has slot %d, and so has endpoint %s", ep.Slot, other)
			}
			slots[ep.Slot] = ep.Generation
		}
		s.counts.add(ep, +1)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if n := count(attachments); n != s.counts.Total {
		return nil, s.corrupt(bucketAttachments, nil, "the index has %d entries for %d records", n, s.counts.Total)
	}
	if n := count(namespaces); n != inNamespace {
		return nil, s.corrupt(bucketNamespaces, nil, "the index has %d entries for %d records", n, inNamespace)
	}
	return slots, nil
}

func count(b *bolt.Bucket) int {
	n := 0
	_ = b.ForEach(func(_, _ []byte) error { n++; return nil })
	return n
}

// verifySlots checks that the slots bucket holds exactly the slots of the
// records and those of the queue of freed ones.
func (s *Store) verifySlots(tx *bolt.Tx, live map[uint32]endpoint.Generation) error {
	turns := map[uint32]uint64{}
	queue := tx.Bucket(bucketFreed)
	err := queue.ForEach(func(k, v []byte) error {
		f, err := s.decodeFreed(k, v)
		if err != nil {
			return err
		}
		if len(k) != 8 {
			return s.corrupt(bucketFreed, k, "the key has %d bytes, want 8", len(k))
		}
		turn := binary.BigEndian.Uint64(k)
		_, twice := turns[f.Slot]
		switch {
		case f.Slot >= s.pools.Slots():
			return s.corrupt(bucketFreed, k, "slot %d: the pool has %d", f.Slot, s.pools.Slots())
		case twice:
			return s.corrupt(bucketFreed, k, "slot %d is queued twice", f.Slot)
		case turn > queue.Sequence():
			return s.corrupt(bucketFreed, k, "turn %d was never given out", turn)
		}
		turns[f.Slot] = turn
		return nil
	})
	if err != nil {
		return err
	}
	entries := 0
	err = tx.Bucket(bucketSlots).ForEach(func(k, v []byte) error {
		entries++
		if len(k) != 4 || len(v) == 0 {
			return s.corrupt(bucketSlots, k, "is not a slot")
		}
		slot := binary.BigEndian.Uint32(k)
		switch {
		case v[0] == slotLive && len(v) == slotLiveBytes:
			if gen, ok := live[slot]; !ok || gen != endpoint.Generation(v[1:]) {
				return s.corrupt(bucketSlots, k, "belongs to endpoint %x, which does not have it", v[1:])
			}
		case v[0] == slotFreed && len(v) == slotFreedBytes:
			if turn, ok := turns[slot]; !ok || turn != binary.BigEndian.Uint64(v[1:]) {
				return s.corrupt(bucketSlots, k, "has turn %x, the queue does not", v[1:])
			}
		default:
			return s.corrupt(bucketSlots, k, "is neither live nor freed")
		}
		return nil
	})
	if err != nil {
		return err
	}
	if entries != len(live)+len(turns) {
		return s.corrupt(bucketSlots, nil, "has %d entries for %d live and %d freed slots", entries, len(live), len(turns))
	}
	return nil
}

func (s *Store) verifyDocuments(tx *bolt.Tx) error {
	kinds := tx.Bucket(bucketDocuments)
	return kinds.ForEach(func(kind, v []byte) error {
		b := kinds.Bucket(kind)
		if b == nil {
			return s.corrupt(bucketDocuments, kind, "is not a bucket")
		}
		scope := (&Documents{kind: kind}).scope()
		return b.ForEach(func(k, v []byte) error {
			_, err := s.unseal(scope, k, v)
			return err
		})
	})
}
