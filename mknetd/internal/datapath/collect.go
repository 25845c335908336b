package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"mknet/spec/policy"
)

// DefaultFlows is how many entries map policy_conntrack has; an admitted flow has
// two at each endpoint that has something attached.
const DefaultFlows = 262144

// flowMargin is how long past its time an entry stays: no program refreshes one
// that is past it, so that nothing live is ever taken.
const flowMargin = 30 * time.Second

// collectBatch is how many entries are read at a time.
const collectBatch = 4096

// Sizes of an entry's key and value.
const ctKeyBytes, ctValueBytes = 20, 32

// ctKey is struct ct_key. Like that of ctValue, its memory is copied as it is where
// many are read at once, since no field of it is blank.
type ctKey struct {
	Source, Destination         address
	SourcePort, DestinationPort [2]byte // as on the wire
	Protocol, Hook              uint8
	Scope                       uint16
	Zero                        uint32
}

// put writes the key as the map has it. The library would go through the fields by
// reflection for every single one.
func (k ctKey) put(b []byte) {
	copy(b[0:], k.Source[:])
	copy(b[4:], k.Destination[:])
	copy(b[8:], k.SourcePort[:])
	copy(b[10:], k.DestinationPort[:])
	b[12], b[13] = k.Protocol, k.Hook
	binary.NativeEndian.PutUint16(b[14:], k.Scope)
	binary.NativeEndian.PutUint32(b[16:], k.Zero)
}

// owner is the address of the endpoint that the entry belongs to.
func (k ctKey) owner() address {
	if policy.Direction(k.Hook) == policy.Egress {
		return k.Source
	}
	return k.Destination
}

// ctValue is struct ct.
type ctValue struct {
	Seen                   uint64 // CLOCK_MONOTONIC, ns
	AttachEpoch, PeerEpoch uint32
	Ack, Window, FIN       uint32
	State, Flags           uint8
	Scale, Zero            uint8
}

// States and flags of an entry, enum in bpf/policy_maps.h.
const (
	ctNew, ctEstablished, ctFINWait uint8 = 1, 2, 3
	ctReply                         uint8 = 1 << 0
)

// flowTTL is how long an entry lives without a packet, ttl in bpf/conntrack.h.
func flowTTL(k ctKey, v ctValue) time.Duration {
	switch {
	case k.Protocol == unix.IPPROTO_TCP && v.State == ctEstablished:
		return time.Hour
	case k.Protocol == unix.IPPROTO_TCP && v.State == ctFINWait, k.Protocol == unix.IPPROTO_UDP:
		return time.Minute
	case k.Protocol == unix.IPPROTO_ICMP:
		return 30 * time.Second
	}
	return 2 * time.Minute
}

// Collected is what one pass over the admitted flows found. All numbers are of
// entries.
type Collected struct {
	Entries  int // there were
	Expired  int // taken, since no packet came for their time
	Orphaned int // taken, since their endpoint is gone
	Kept     int // were to be taken, and were admitted anew meanwhile
	Took     time.Duration
}

// Monotonic is the clock of the entries.
func monotonic() (uint64, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0, fmt.Errorf("read the monotonic clock: %w", err)
	}
	return uint64(ts.Nano()), nil
}

// Collect removes the entries of flows that have ended and of endpoints that are
// gone.
func (p *PolicyMaps) Collect() (Collected, error) {
	now, err := monotonic()
	if err != nil {
		return Collected{}, err
	}
	return p.collectAt(now)
}

func (p *PolicyMaps) collectAt(now uint64) (Collected, error) {
	begin := time.Now()
	var out Collected
	points, err := p.Points()
	if err != nil {
		return out, fmt.Errorf("read the policy points: %w", err)
	}
	live := map[address]bool{}
	for a := range points {
		live[a.As4()] = true
	}
	take := newTaker(p.d.objects.PolicyConntrack)
	err = p.eachFlow(func(k ctKey, v ctValue) error {
		out.Entries++
		count := &out.Expired
		switch {
		case !live[k.owner()]:
			count = &out.Orphaned
		case int64(now-v.Seen) <= int64(flowTTL(k, v)+flowMargin):
			return nil
		}
		taken, err := take.entry(k, v)
		if taken {
			*count++
		} else {
			out.Kept++
		}
		return err
	})
	out.Took = time.Since(begin)
	if err != nil {
		return out, fmt.Errorf("collect ended flows: %w", err)
	}
	return out, nil
}

// taker removes entries one by one: the kernel has no call that removes many and says
// what they were. Its memory is used again for each, and handed to the library as
// bytes, which it passes on without looking.
type taker struct {
	m        *ebpf.Map
	key, now []byte
	// The same slices, converted once.
	keyArg, nowArg any
}

func newTaker(m *ebpf.Map) *taker {
	t := &taker{m: m, key: make([]byte, ctKeyBytes), now: make([]byte, ctValueBytes)}
	t.keyArg, t.nowArg = t.key, t.now
	return t
}

// entry removes an entry unless it is younger than v, which was read before: its
// tuple was admitted anew then.
func (t *taker) entry(k ctKey, v ctValue) (bool, error) {
	k.put(t.key)
	switch err := t.m.LookupAndDelete(t.keyArg, t.nowArg); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return true, nil
	case err != nil:
		return false, err
	}
	if binary.NativeEndian.Uint64(t.now) == v.Seen {
		return true, nil
	}
	if err := t.m.Update(t.keyArg, t.nowArg, ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return false, err
	}
	return false, nil
}

// eachFlow calls f with every entry. Those that come and go meanwhile may be left
// out.
func (p *PolicyMaps) eachFlow(f func(ctKey, ctValue) error) error {
	m := p.d.objects.PolicyConntrack
	keys, values := make([]ctKey, collectBatch), make([]ctValue, collectBatch)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return err
		}
		for i := range n {
			if err := f(keys[i], values[i]); err != nil {
				return err
			}
		}
		if last {
			return nil
		}
	}
}

// Flow is one direction of an admitted flow at one enforcement point. It has no
// pointers: a list of a full table is long.
type Flow struct {
	source, destination         address
	SourcePort, DestinationPort uint16 // ICMP queries: the identifier, in both
	Protocol                    policy.Protocol
	Hook                        policy.Direction
	Reply                       bool  // the reply direction of what was admitted
	State                       uint8 // TCP: 1 NEW, 2 ESTABLISHED, 3 FIN_WAIT; else 0
	Idle                        time.Duration
}

// Source is the sender of this direction's packets.
func (f Flow) Source() netip.Addr { return netip.AddrFrom4(f.source) }

// Destination is their receiver.
func (f Flow) Destination() netip.Addr { return netip.AddrFrom4(f.destination) }

// EachFlow calls f with every admitted flow that has not ended, until f fails: that
// error is returned as it is.
func (p *PolicyMaps) EachFlow(f func(Flow) error) error {
	now, err := monotonic()
	if err != nil {
		return err
	}
	return p.eachFlow(func(k ctKey, v ctValue) error {
		idle := time.Duration(max(int64(now-v.Seen), 0))
		if idle > flowTTL(k, v) {
			return nil
		}
		return f(Flow{
			Hook: policy.Direction(k.Hook), Reply: v.Flags&ctReply != 0, source: k.Source, destination: k.Destination,
			SourcePort: binary.BigEndian.Uint16(k.SourcePort[:]), DestinationPort: binary.BigEndian.Uint16(k.DestinationPort[:]),
			Protocol: policy.Protocol(k.Protocol), State: v.State, Idle: idle,
		})
	})
}

// Flows lists the admitted flows that have not ended.
func (p *PolicyMaps) Flows() ([]Flow, error) {
	// A growing list would be copied, and its memory touched, many times; what of this
	// one is never used costs nothing.
	out := make([]Flow, 0, p.d.objects.PolicyConntrack.MaxEntries())
	err := p.EachFlow(func(f Flow) error {
		out = append(out, f)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list admitted flows: %w", err)
	}
	return out, nil
}
