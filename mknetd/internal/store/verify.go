package store

import (
	"bytes"
	"encoding/binary"
	"errors"

	bolt "go.etcd.io/bbolt"

	"mknet/spec/endpoint"
)

// verifier checks what Open relies on, beyond the structure that verifyPages has
// proven: schema version, every record, and that the indices and the records say
// the same. It sets the store's pools and counts.
type verifier struct {
	*Store
	// report gets each fault; the error that it returns ends the check.
	report func(*CorruptError) error
}

// firstFault is the report of Open: the first fault is the end.
func firstFault(e *CorruptError) error { return e }

// found passes a fault to report; any other error, and nil, is returned.
func (v *verifier) found(err error) error {
	var corrupt *CorruptError
	if errors.As(err, &corrupt) {
		return v.report(corrupt)
	}
	return err
}

var allBuckets = [][]byte{bucketMeta, bucketEndpoints, bucketAttachments, bucketSlots, bucketFreed, bucketNamespaces, bucketDocuments}

// verify checks a store of the given schema version.
func (v *verifier) verify(tx *bolt.Tx, schema int) error {
	for _, name := range allBuckets {
		if tx.Bucket(name) == nil {
			// Without one of them the rest cannot be compared.
			return v.found(v.corrupt(name, nil, "the bucket is missing"))
		}
	}
	var err error
	if schema >= 2 {
		_, err = v.readWriter(tx)
		if err := v.found(err); err != nil {
			return err
		}
	}
	// Records are held to the pools they were cut from; whether those are the
	// configured ones is asked afterwards.
	if v.pools, err = v.readPools(tx); err != nil {
		return v.found(err)
	}
	slots, err := v.verifyEndpoints(tx)
	if err != nil {
		return err
	}
	if err := v.verifySlots(tx, slots); err != nil {
		return err
	}
	return v.verifyDocuments(tx)
}

// readSchema returns the version that the file says it has.
func (s *Store) readSchema(tx *bolt.Tx) (int, error) {
	b := tx.Bucket(bucketMeta)
	if b == nil {
		return 0, s.corrupt(bucketMeta, nil, "the bucket is missing")
	}
	return s.decodeSchema(b.Get(keySchema))
}

func (s *Store) decodeSchema(value []byte) (int, error) {
	version, err := s.unseal(bucketMeta, keySchema, value)
	if err != nil {
		return 0, err
	}
	if len(version) != 4 {
		return 0, s.corrupt(bucketMeta, keySchema, "has %d bytes, want 4", len(version))
	}
	return int(binary.BigEndian.Uint32(version)), nil
}

// verifyEndpoints checks every record and its index entries, then that the
// indices hold nothing else. It returns who has which slot.
func (v *verifier) verifyEndpoints(tx *bolt.Tx) (map[uint32]endpoint.Generation, error) {
	slots := map[uint32]endpoint.Generation{}
	attachments, namespaces := tx.Bucket(bucketAttachments), tx.Bucket(bucketNamespaces)
	inNamespace := 0
	v.counts = Counts{}
	err := tx.Bucket(bucketEndpoints).ForEach(func(k, value []byte) error {
		ep, err := v.decodeEndpoint(k, value)
		if err != nil {
			return v.found(err)
		}
		v.counts.add(ep, +1)
		if got := attachments.Get(attachmentKey(ep.Attachment)); !bytes.Equal(got, k) {
			if err := v.fault(bucketAttachments, attachmentKey(ep.Attachment), "is %x, want endpoint %s", got, ep.Generation); err != nil {
				return err
			}
		}
		if key := namespaceKey(ep); key != nil {
			inNamespace++
			if namespaces.Get(key) == nil {
				if err := v.fault(bucketNamespaces, key, "is missing, endpoint %s is in that namespace", ep.Generation); err != nil {
					return err
				}
			}
		}
		if HasSlot(ep) {
			if other, taken := slots[ep.Slot]; taken {
				return v.fault(bucketEndpoints, k, "has slot %d, and so has endpoint %s", ep.Slot, other)
			}
			slots[ep.Slot] = ep.Generation
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if n := count(attachments); n != v.counts.Total {
		if err := v.fault(bucketAttachments, nil, "the index has %d entries for %d records", n, v.counts.Total); err != nil {
			return nil, err
		}
	}
	if n := count(namespaces); n != inNamespace {
		if err := v.fault(bucketNamespaces, nil, "the index has %d entries for %d records", n, inNamespace); err != nil {
			return nil, err
		}
	}
	return slots, nil
}

// fault reports one.
func (v *verifier) fault(bucket, key []byte, format string, args ...any) error {
	return v.report(v.corrupt(bucket, key, format, args...))
}

func count(b *bolt.Bucket) int {
	n := 0
	_ = b.ForEach(func(_, _ []byte) error { n++; return nil })
	return n
}

// verifySlots checks that the slots bucket holds exactly the slots of the
// records and those of the queue of freed ones.
func (v *verifier) verifySlots(tx *bolt.Tx, live map[uint32]endpoint.Generation) error {
	turns := map[uint32]uint64{}
	queue := tx.Bucket(bucketFreed)
	err := queue.ForEach(func(k, value []byte) error {
		f, err := v.decodeFreed(k, value)
		if err != nil {
			return v.found(err)
		}
		if len(k) != 8 {
			return v.fault(bucketFreed, k, "the key has %d bytes, want 8", len(k))
		}
		turn := binary.BigEndian.Uint64(k)
		_, twice := turns[f.Slot]
		switch {
		case f.Slot >= v.pools.Slots():
			return v.fault(bucketFreed, k, "slot %d: the pool has %d", f.Slot, v.pools.Slots())
		case twice:
			return v.fault(bucketFreed, k, "slot %d is queued twice", f.Slot)
		case turn > queue.Sequence():
			return v.fault(bucketFreed, k, "turn %d was never given out", turn)
		}
		turns[f.Slot] = turn
		return nil
	})
	if err != nil {
		return err
	}
	entries := 0
	err = tx.Bucket(bucketSlots).ForEach(func(k, value []byte) error {
		entries++
		if len(k) != 4 || len(value) == 0 {
			return v.fault(bucketSlots, k, "is not a slot")
		}
		slot := binary.BigEndian.Uint32(k)
		switch {
		case value[0] == slotLive && len(value) == slotLiveBytes:
			if gen, ok := live[slot]; !ok || gen != endpoint.Generation(value[1:]) {
				return v.fault(bucketSlots, k, "belongs to endpoint %x, which does not have it", value[1:])
			}
		case value[0] == slotFreed && len(value) == slotFreedBytes:
			if turn, ok := turns[slot]; !ok || turn != binary.BigEndian.Uint64(value[1:]) {
				return v.fault(bucketSlots, k, "has turn %x, the queue does not", value[1:])
			}
		default:
			return v.fault(bucketSlots, k, "is neither live nor freed")
		}
		return nil
	})
	if err != nil {
		return err
	}
	if entries != len(live)+len(turns) {
		return v.fault(bucketSlots, nil, "has %d entries for %d live and %d freed slots", entries, len(live), len(turns))
	}
	return nil
}

func (v *verifier) verifyDocuments(tx *bolt.Tx) error {
	kinds := tx.Bucket(bucketDocuments)
	return kinds.ForEach(func(kind, _ []byte) error {
		b := kinds.Bucket(kind)
		if b == nil {
			return v.fault(bucketDocuments, kind, "is not a bucket")
		}
		scope := (&Documents{kind: kind}).scope()
		return b.ForEach(func(k, value []byte) error {
			_, err := v.unseal(scope, k, value)
			return v.found(err)
		})
	})
}
