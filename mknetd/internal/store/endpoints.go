package store

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"

	"mknet/spec/endpoint"
)

// Begin stores a new ALLOCATING record and claims its slot, in one transaction.
// The slot leaves the queue of freed ones if it stands there. A live record with
// the same attachment, generation or slot is an *ExistsError. The stored copy is
// returned, with State, CreatedAt and UpdatedAt set.
func (s *Store) Begin(ep endpoint.Endpoint) (endpoint.Endpoint, error) {
	ep.State = endpoint.Allocating
	ep.CreatedAt = s.stamp()
	ep.UpdatedAt = ep.CreatedAt
	doc, err := s.encodeEndpoint(&ep)
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	err = s.update(func(tx *bolt.Tx) (change, error) {
		if err := s.mustBeFree(tx, &ep); err != nil {
			return change{}, err
		}
		if err := s.put(tx, nil, &ep, doc); err != nil {
			return change{}, &brokenTx{err}
		}
		return change{after: &ep}, nil
	})
	if err != nil {
		return endpoint.Endpoint{}, fmt.Errorf("begin endpoint %s: %w", ep.Generation.Short(), err)
	}
	return s.Get(ep.Generation)
}

// stamp is the present time as JSON keeps it: no monotonic reading, UTC.
func (s *Store) stamp() time.Time { return s.now().UTC().Round(0) }

func (s *Store) mustBeFree(tx *bolt.Tx, ep *endpoint.Endpoint) error {
	exists := func(what string, holder endpoint.Generation) error {
		e := &ExistsError{What: what, Holder: holder}
		if h, err := s.get(tx, holder); err == nil {
			e.State = h.State
		}
		return e
	}
	if v := tx.Bucket(bucketAttachments).Get(attachmentKey(ep.Attachment)); v != nil {
		return exists("attachment "+ep.Attachment.String(), endpoint.Generation(v))
	}
	if tx.Bucket(bucketEndpoints).Get(ep.Generation[:]) != nil {
		return exists("generation "+ep.Generation.String(), ep.Generation)
	}
	if v := tx.Bucket(bucketSlots).Get(slotKey(ep.Slot)); HasSlot(ep) && len(v) == slotLiveBytes && v[0] == slotLive {
		return exists(fmt.Sprintf("slot %d", ep.Slot), endpoint.Generation(v[1:]))
	}
	return nil
}

// Update changes a record that is in any state. f gets a copy and may be called
// again when the transaction has to be repeated; its error is returned as it is
// and nothing is stored. Identity, slot, addresses and state must stay: use
// MarkReady, BeginDelete and Finish for the last. The stored copy is returned.
func (s *Store) Update(gen endpoint.Generation, f func(*endpoint.Endpoint) error) (endpoint.Endpoint, error) {
	return s.change("update", gen, "", f)
}

// MarkReady takes a record from ALLOCATING to READY. f, which may be nil, sets
// what became known meanwhile.
func (s *Store) MarkReady(gen endpoint.Generation, f func(*endpoint.Endpoint) error) (endpoint.Endpoint, error) {
	return s.change("mark ready", gen, endpoint.Ready, f)
}

// BeginDelete takes a record from ALLOCATING or READY to DELETING. f may be nil.
func (s *Store) BeginDelete(gen endpoint.Generation, f func(*endpoint.Endpoint) error) (endpoint.Endpoint, error) {
	return s.change("begin to delete", gen, endpoint.Deleting, f)
}

// change applies f and the step to a state (none when empty).
func (s *Store) change(action string, gen endpoint.Generation, to endpoint.State, f func(*endpoint.Endpoint) error) (endpoint.Endpoint, error) {
	var stored endpoint.Endpoint
	err := s.update(func(tx *bolt.Tx) (change, error) {
		old, err := s.get(tx, gen)
		if err != nil {
			return change{}, err
		}
		if to != "" {
			if err := old.State.To(gen, to); err != nil {
				return change{}, err
			}
		}
		// Decoded once more: f may keep or change what pointers and slices of its
		// copy lead to.
		ep, err := s.get(tx, gen)
		if err != nil {
			return change{}, err
		}
		if f != nil {
			if err := f(ep); err != nil {
				return change{}, err
			}
		}
		if err := sameIdentity(old, ep); err != nil {
			return change{}, err
		}
		if to != "" {
			ep.State = to
		}
		ep.UpdatedAt = s.stamp()
		doc, err := s.encodeEndpoint(ep)
		if err != nil {
			return change{}, err
		}
		if err := s.put(tx, old, ep, doc); err != nil {
			return change{}, &brokenTx{err}
		}
		after, err := parseEndpoint(doc, s.pools)
		if err != nil {
			return change{}, &brokenTx{fmt.Errorf("read back: %w", err)}
		}
		stored = *after
		return change{before: old, after: after}, nil
	})
	if err != nil {
		return endpoint.Endpoint{}, fmt.Errorf("%s endpoint %s: %w", action, gen.Short(), err)
	}
	return stored, nil
}

// sameIdentity refuses a change of what a record is for ever.
func sameIdentity(old, now *endpoint.Endpoint) error {
	frozen := func(ep *endpoint.Endpoint) endpoint.Endpoint {
		return endpoint.Endpoint{
			Generation: ep.Generation, Attachment: ep.Attachment, Mode: ep.Mode, State: ep.State, Slot: ep.Slot,
			Subnet: ep.Subnet, Gateway: ep.Gateway, Address: ep.Address, TransitHost: ep.TransitHost, TransitPeer: ep.TransitPeer,
			HostLink: ep.HostLink, Chain: ep.Chain,
		}
	}
	a, b := frozen(old), frozen(now)
	switch {
	case a.Generation != b.Generation, a.Attachment != b.Attachment, a.Mode != b.Mode:
		return &InvalidError{Generation: old.Generation, Why: "an update must not change generation, attachment or mode"}
	case a.State != b.State:
		return &InvalidError{Generation: old.Generation, Why: fmt.Sprintf("an update must not change the state from %s to %s", a.State, b.State)}
	case a.Slot != b.Slot || a.Subnet != b.Subnet || a.Gateway != b.Gateway || a.Address != b.Address ||
		a.TransitHost != b.TransitHost || a.TransitPeer != b.TransitPeer || a.HostLink != b.HostLink || a.Chain != b.Chain:
		return &InvalidError{Generation: old.Generation, Why: "an update must not change slot, addresses or names"}
	case !old.CreatedAt.Equal(now.CreatedAt) || old.CreatedSinceBoot != now.CreatedSinceBoot:
		return &InvalidError{Generation: old.Generation, Why: "an update must not change createdAt"}
	}
	return nil
}

// Finish removes a DELETING record and queues its slot, or its address of a pod
// pool, as freed, in one transaction. freed.Slot is ignored: the record knows its
// own.
func (s *Store) Finish(gen endpoint.Generation, freed Freed) error {
	err := s.update(func(tx *bolt.Tx) (change, error) {
		ep, err := s.get(tx, gen)
		if err != nil {
			return change{}, err
		}
		if ep.State != endpoint.Deleting {
			return change{}, &InvalidError{Generation: gen, Why: fmt.Sprintf("is %s, only a DELETING one can be removed", ep.State)}
		}
		if err := s.remove(tx, ep, freed); err != nil {
			return change{}, &brokenTx{err}
		}
		return change{before: ep}, nil
	})
	if err != nil {
		return fmt.Errorf("finish endpoint %s: %w", gen.Short(), err)
	}
	return nil
}

// Get returns one record; an absent one is a *NotFoundError.
func (s *Store) Get(gen endpoint.Generation) (endpoint.Endpoint, error) {
	var out endpoint.Endpoint
	err := s.view(func(tx *bolt.Tx) error {
		ep, err := s.get(tx, gen)
		if err == nil {
			out = *ep
		}
		return err
	})
	return out, err
}

// ByAttachment returns the live record of an attachment; none is a
// *NotFoundError.
func (s *Store) ByAttachment(a endpoint.Attachment) (endpoint.Endpoint, error) {
	var out endpoint.Endpoint
	err := s.view(func(tx *bolt.Tx) error {
		v := tx.Bucket(bucketAttachments).Get(attachmentKey(a))
		if v == nil {
			return &NotFoundError{What: "attachment " + a.String()}
		}
		ep, err := s.get(tx, endpoint.Generation(v))
		if err == nil {
			out = *ep
		}
		return err
	})
	return out, err
}

// ByNamespace returns every record whose namespace is ns (boot ID and cookie),
// oldest first. Its cost does not depend on the other endpoints.
func (s *Store) ByNamespace(ns endpoint.Namespace) ([]endpoint.Endpoint, error) {
	var out []endpoint.Endpoint
	prefix := namespacePrefix(ns)
	if prefix == nil {
		return nil, nil
	}
	err := s.view(func(tx *bolt.Tx) error {
		c := tx.Bucket(bucketNamespaces).Cursor()
		for k, _ := c.Seek(prefix); bytes.HasPrefix(k, prefix); k, _ = c.Next() {
			ep, err := s.get(tx, endpoint.Generation(k[len(prefix):]))
			if err != nil {
				return err
			}
			out = append(out, *ep)
		}
		return nil
	})
	slices.SortStableFunc(out, func(a, b endpoint.Endpoint) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return out, err
}

// Each calls f with every record of one moment, in the order of generations, and
// stops at its first error. f must not call a method that writes.
func (s *Store) Each(f func(endpoint.Endpoint) error) error {
	return s.view(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketEndpoints).ForEach(func(k, v []byte) error {
			ep, err := s.decodeEndpoint(k, v)
			if err != nil {
				return err
			}
			return f(*ep)
		})
	})
}

// List returns every record, in the order of generations.
func (s *Store) List() ([]endpoint.Endpoint, error) {
	out := []endpoint.Endpoint{}
	err := s.Each(func(ep endpoint.Endpoint) error { out = append(out, ep); return nil })
	return out, err
}

// view runs a read. bbolt lets readers see the last commit without waiting.
func (s *Store) view(f func(*bolt.Tx) error) error {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return ErrClosed
	}
	return s.db.View(f)
}

func (s *Store) get(tx *bolt.Tx, gen endpoint.Generation) (*endpoint.Endpoint, error) {
	v := tx.Bucket(bucketEndpoints).Get(gen[:])
	if v == nil {
		return nil, &NotFoundError{What: "generation " + gen.String()}
	}
	return s.decodeEndpoint(gen[:], v)
}

// put stores a record and brings the indices from old, which may be nil, to ep.
func (s *Store) put(tx *bolt.Tx, old, ep *endpoint.Endpoint, doc []byte) error {
	if err := tx.Bucket(bucketEndpoints).Put(ep.Generation[:], seal(bucketEndpoints, ep.Generation[:], doc)); err != nil {
		return err
	}
	if old == nil {
		if err := tx.Bucket(bucketAttachments).Put(attachmentKey(ep.Attachment), ep.Generation[:]); err != nil {
			return err
		}
		if HasSlot(ep) {
			if err := claimSlot(tx, ep.Slot, ep.Generation); err != nil {
				return err
			}
		}
		if HasPooledAddress(ep) {
			if err := claimAddress(tx, ep.Address); err != nil {
				return err
			}
		}
	} else if k := namespaceKey(old); k != nil && !old.Namespace.Same(ep.Namespace) {
		if err := tx.Bucket(bucketNamespaces).Delete(k); err != nil {
			return err
		}
	}
	if k := namespaceKey(ep); k != nil {
		return tx.Bucket(bucketNamespaces).Put(k, []byte{})
	}
	return nil
}

func (s *Store) remove(tx *bolt.Tx, ep *endpoint.Endpoint, freed Freed) error {
	if err := tx.Bucket(bucketEndpoints).Delete(ep.Generation[:]); err != nil {
		return err
	}
	if err := tx.Bucket(bucketAttachments).Delete(attachmentKey(ep.Attachment)); err != nil {
		return err
	}
	if k := namespaceKey(ep); k != nil {
		if err := tx.Bucket(bucketNamespaces).Delete(k); err != nil {
			return err
		}
	}
	switch {
	case HasPooledAddress(ep):
		return queueAddress(tx, ep.Address, freed)
	case !HasSlot(ep):
		return nil
	}
	freed.Slot = ep.Slot
	return queueSlot(tx, freed)
}

// attachmentKey joins the parts with NUL, which none of them may contain.
func attachmentKey(a endpoint.Attachment) []byte {
	return []byte(a.Network + "\x00" + a.ContainerID + "\x00" + a.IfName)
}

// namespacePrefix is nil for a namespace that is not known yet.
func namespacePrefix(ns endpoint.Namespace) []byte {
	if ns.Cookie == 0 || ns.BootID == "" {
		return nil
	}
	return binary.BigEndian.AppendUint64([]byte(ns.BootID+"\x00"), ns.Cookie)
}

func namespaceKey(ep *endpoint.Endpoint) []byte {
	prefix := namespacePrefix(ep.Namespace)
	if prefix == nil {
		return nil
	}
	return append(prefix, ep.Generation[:]...)
}
