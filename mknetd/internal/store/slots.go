package store

import (
	"encoding/binary"
	"encoding/json"
	"time"

	bolt "go.etcd.io/bbolt"

	"mknet/spec/endpoint"
)

// Freed is a slot that was in use and is free again. The fields are those of the
// allocator's type of the same name.
type Freed struct {
	Slot   uint32        `json:"slot"`
	BootID string        `json:"bootID"` // the boot whose clock At is on
	At     time.Duration `json:"at"`     // CLOCK_BOOTTIME, nanoseconds
}

// A value of the slots bucket: who has the slot, or its turn in the queue. A slot
// without a value was never used.
const (
	slotLive  = 'L' // followed by the generation
	slotFreed = 'F' // followed by the turn

	slotLiveBytes  = 1 + 16
	slotFreedBytes = 1 + 8
)

func slotKey(slot uint32) []byte { return binary.BigEndian.AppendUint32(nil, slot) }

func claimSlot(tx *bolt.Tx, slot uint32, gen endpoint.Generation) error {
	slots := tx.Bucket(bucketSlots)
	if v := slots.Get(slotKey(slot)); len(v) == slotFreedBytes && v[0] == slotFreed {
		if err := tx.Bucket(bucketFreed).Delete(v[1:]); err != nil {
			return err
		}
	}
	return slots.Put(slotKey(slot), append([]byte{slotLive}, gen[:]...))
}

func queueSlot(tx *bolt.Tx, f Freed) error {
	queue := tx.Bucket(bucketFreed)
	turn, err := queue.NextSequence()
	if err != nil {
		return err
	}
	key := binary.BigEndian.AppendUint64(nil, turn)
	doc, err := json.Marshal(f)
	if err != nil {
		return err
	}
	if err := queue.Put(key, seal(bucketFreed, key, doc)); err != nil {
		return err
	}
	return tx.Bucket(bucketSlots).Put(slotKey(f.Slot), append([]byte{slotFreed}, key...))
}

// Slots returns what the allocator is made from: the slots of all records, and
// the queue of freed ones, oldest first.
func (s *Store) Slots() (live []uint32, freed []Freed, err error) {
	err = s.view(func(tx *bolt.Tx) error {
		if err := tx.Bucket(bucketSlots).ForEach(func(k, v []byte) error {
			if v[0] == slotLive {
				live = append(live, binary.BigEndian.Uint32(k))
			}
			return nil
		}); err != nil {
			return err
		}
		return tx.Bucket(bucketFreed).ForEach(func(k, v []byte) error {
			f, err := s.decodeFreed(k, v)
			freed = append(freed, f)
			return err
		})
	})
	return live, freed, err
}

func (s *Store) decodeFreed(key, value []byte) (Freed, error) {
	var f Freed
	doc, err := s.unseal(bucketFreed, key, value)
	if err != nil {
		return f, err
	}
	if err := json.Unmarshal(doc, &f); err != nil {
		return f, s.corrupt(bucketFreed, key, "%v", err)
	}
	return f, nil
}
