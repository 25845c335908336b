package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/classifier"
	"mknet/mknetd/internal/enforcer"
	"mknet/spec/policy"
)

// PolicyMaps are the maps of policy, as enforcer.Kernel wants them. They are
// pinned like all others: what they hold outlives the process and is enforced
// without it.
type PolicyMaps struct{ d *Datapath }

var _ enforcer.Kernel = (*PolicyMaps)(nil)

// Policy returns the maps of policy; they go with the data path.
func (d *Datapath) Policy() *PolicyMaps { return &PolicyMaps{d} }

// outer is the map of a class's tables.
func (p *PolicyMaps) outer(c classifier.Class) *ebpf.Map {
	return map[classifier.Class]*ebpf.Map{
		classifier.Small: p.d.objects.PolicySmall, classifier.Medium: p.d.objects.PolicyMedium, classifier.Large: p.d.objects.PolicyLarge,
	}[c]
}

// InsertTable makes an inner map and puts it into the outer one.
func (p *PolicyMaps) InsertTable(c classifier.Class, generation uint32, table []byte) error {
	inner, err := ebpf.NewMap(&ebpf.MapSpec{Name: "mk_" + c.String(), Type: ebpf.Array, KeySize: 4, ValueSize: uint32(c.Layout().Bytes), MaxEntries: 1})
	if err != nil {
		return fmt.Errorf("make an inner map: %w", err)
	}
	defer inner.Close()
	if err := inner.Put(uint32(0), table); err != nil {
		return fmt.Errorf("write an inner map: %w", err)
	}
	return p.outer(c).Update(generation, inner, ebpf.UpdateNoExist)
}

// ReadTable returns a table with its counts.
func (p *PolicyMaps) ReadTable(c classifier.Class, generation uint32) ([]byte, error) {
	var inner *ebpf.Map
	if err := p.outer(c).Lookup(generation, &inner); err != nil {
		return nil, err
	}
	defer inner.Close()
	return inner.LookupBytes(uint32(0))
}

// HasTable reports whether a table is there.
func (p *PolicyMaps) HasTable(c classifier.Class, generation uint32) (bool, error) {
	var id uint32
	err := p.outer(c).Lookup(generation, &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	return err == nil, err
}

// DeleteTable removes a table; absent is success.
func (p *PolicyMaps) DeleteTable(c classifier.Class, generation uint32) error {
	return remove(p.outer(c), generation)
}

// Tables lists the generations of a class.
func (p *PolicyMaps) Tables(c classifier.Class) ([]uint32, error) {
	var out []uint32
	var generation, id uint32
	it := p.outer(c).Iterate()
	for it.Next(&generation, &id) {
		out = append(out, generation)
	}
	return out, it.Err()
}

// SetSlot writes one slot.
func (p *PolicyMaps) SetSlot(index uint32, s enforcer.Slot) error {
	return p.d.objects.PolicySlots.Put(index, s.Word())
}

// Slots returns those that are not zero.
func (p *PolicyMaps) Slots() (map[uint32]enforcer.Slot, error) {
	out := map[uint32]enforcer.Slot{}
	keys, words := make([]uint32, enforcer.Slots), make([]uint64, enforcer.Slots)
	var cursor ebpf.MapBatchCursor
	n, err := p.d.objects.PolicySlots.BatchLookup(&cursor, keys, words, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, err
	}
	for i := range n {
		if words[i] != 0 {
			out[keys[i]] = enforcer.SlotOf(words[i])
		}
	}
	return out, nil
}

// ReadSlot returns one slot.
func (p *PolicyMaps) ReadSlot(index uint32) (enforcer.Slot, error) {
	var word uint64
	err := p.d.objects.PolicySlots.Lookup(index, &word)
	return enforcer.SlotOf(word), err
}

// ReadPoint returns the value as it stands, nil where there is none.
func (p *PolicyMaps) ReadPoint(a netip.Addr) ([]byte, error) {
	return readValue(p.d.objects.PolicyPoints, a)
}

// ReadIdentity returns the value as it stands, nil where there is none.
func (p *PolicyMaps) ReadIdentity(a netip.Addr) ([]byte, error) {
	return readValue(p.d.objects.PolicyIdentity, a)
}

func readValue(m *ebpf.Map, a netip.Addr) ([]byte, error) {
	key, err := addressOf(a)
	if err != nil {
		return nil, err
	}
	return m.LookupBytes(key) // nil, nil where there is no such key
}

// PutPoint writes what applies to an endpoint.
func (p *PolicyMaps) PutPoint(a netip.Addr, v enforcer.Point) error {
	key, err := addressOf(a)
	if err != nil {
		return err
	}
	return p.d.objects.PolicyPoints.Put(key, v.Encode(a))
}

// DeletePoint removes it; absent is success.
func (p *PolicyMaps) DeletePoint(a netip.Addr) error {
	key, err := addressOf(a)
	if err != nil {
		return err
	}
	return remove(p.d.objects.PolicyPoints, key)
}

// Points returns all.
func (p *PolicyMaps) Points() (map[netip.Addr]enforcer.Point, error) {
	out := map[netip.Addr]enforcer.Point{}
	var key address
	var value [enforcer.PointBytes]byte
	it := p.d.objects.PolicyPoints.Iterate()
	for it.Next(&key, &value) {
		a, v, err := enforcer.DecodePoint(value[:])
		if err != nil {
			return nil, err
		}
		out[a] = v
	}
	return out, it.Err()
}

// PutIdentity writes the groups of a peer.
func (p *PolicyMaps) PutIdentity(a netip.Addr, v enforcer.Identity) error {
	key, err := addressOf(a)
	if err != nil {
		return err
	}
	return p.d.objects.PolicyIdentity.Put(key, v.Encode(a))
}

// DeleteIdentity removes them; absent is success.
func (p *PolicyMaps) DeleteIdentity(a netip.Addr) error {
	key, err := addressOf(a)
	if err != nil {
		return err
	}
	return remove(p.d.objects.PolicyIdentity, key)
}

// Identities returns all.
func (p *PolicyMaps) Identities() (map[netip.Addr]enforcer.Identity, error) {
	out := map[netip.Addr]enforcer.Identity{}
	var key address
	var value [enforcer.IdentityBytes]byte
	it := p.d.objects.PolicyIdentity.Iterate()
	for it.Next(&key, &value) {
		a, v, err := enforcer.DecodeIdentity(value[:])
		if err != nil {
			return nil, err
		}
		out[a] = v
	}
	return out, it.Err()
}

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL (include/uapi/linux/membarrier.h).
const membarrierGlobal = 1

// Barrier waits for programs at work.
func (p *PolicyMaps) Barrier() error {
	_, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0)
	if errno == 0 {
		return nil
	}
	// Refused with nohz_full CPUs. A change of an outer map waits for programs too
	// (kernel/bpf/syscall.c: maybe_wait_bpf_programs); no slot ever names 0.
	if err := p.DeleteTable(classifier.Small, 0); err != nil {
		return err
	}
	if err := p.InsertTable(classifier.Small, 0, make([]byte, classifier.Small.Layout().Bytes)); err != nil {
		return errors.Join(fmt.Errorf("membarrier: %w", errno), err)
	}
	return p.DeleteTable(classifier.Small, 0)
}

// firstReason and reasons are of map policy_reasons, bpf/policy_maps.h.
const (
	firstReason policy.Reason = 200
	reasons     int           = 128
)

// Reasons returns how often packets met each reason since the maps were made, on
// all endpoints with something attached; a packet may meet more than one.
func (p *PolicyMaps) Reasons() (map[policy.Reason]uint64, error) {
	out := map[policy.Reason]uint64{}
	for i := range uint32(reasons) {
		var shares []uint64
		if err := p.d.objects.PolicyReasons.Lookup(i, &shares); err != nil {
			return nil, fmt.Errorf("map policy_reasons: %w", err)
		}
		for _, n := range shares {
			if n != 0 {
				out[firstReason+policy.Reason(i)] += n
			}
		}
	}
	return out, nil
}
