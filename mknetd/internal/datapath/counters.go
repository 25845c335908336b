package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
)

// Outcome is what became of a frame.
type Outcome uint32

// The outcomes, enum outcome in bpf/maps.h.
const (
	Peer        Outcome = iota // to a pod of this node by bpf_redirect_peer; counted at the sender
	Redirect                   // the same by bpf_redirect
	Stack                      // from the endpoint to the host stack
	Delivered                  // from the host stack to the endpoint
	ARP                        // request for the gateway, answered
	Other                      // neither IPv4 nor ARP, or tagged; let through
	DropAddress                // source address is not the endpoint's
	DropMAC                    // source hardware address is not the endpoint's
	DropHeader                 // IPv4 or ARP header missing or malformed
	DropOther                  // neither IPv4 nor ARP
	DropVLAN                   // tagged
	DropUnknown                // no endpoint is known on the link; counted under 0.0.0.0
	DropACL                    // the NetworkACL denies; counted at the endpoint whose it is
	DropGroup                  // the SecurityGroups deny, likewise
	DropPolicy                 // cannot be judged where policy is enforced, or a policy map is broken
	outcomes
)

var outcomeNames = [outcomes]string{
	"peer", "redirect", "stack", "delivered", "arp", "other",
	"drop-address", "drop-mac", "drop-header", "drop-other", "drop-vlan", "drop-unknown",
	"drop-acl", "drop-group", "drop-policy",
}

func (o Outcome) String() string {
	if o < outcomes {
		return outcomeNames[o]
	}
	return fmt.Sprintf("outcome-%d", uint32(o))
}

// Dropped reports whether the frame went no further.
func (o Outcome) Dropped() bool { return o >= DropAddress }

// Count is a number of frames and of their bytes, Ethernet header included. A
// GSO frame, which the device cuts later, counts as one.
type Count struct {
	Packets, Bytes uint64
}

// Counters are the counts of one endpoint by Outcome. They begin at zero when the
// endpoint is made and survive the daemon.
type Counters [outcomes]Count

// countersValue is struct counters: one CPU's share.
type countersValue [16]Count

// Unknown is the address under which DropUnknown is counted.
var Unknown = netip.AddrFrom4([4]byte{})

// Counters returns the counts of the endpoint with the address, summed over all
// CPUs. The error is ErrNoEndpoint where there is none.
func (d *Datapath) Counters(addr netip.Addr) (Counters, error) {
	key, err := addressOf(addr)
	if err != nil {
		return Counters{}, err
	}
	var shares []countersValue
	if err := d.objects.Counts.Lookup(key, &shares); err != nil {
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			err = ErrNoEndpoint
		}
		return Counters{}, fmt.Errorf("counters of %s: %w", addr, err)
	}
	var sum Counters
	for i := range shares {
		sum.add(&shares[i])
	}
	return sum, nil
}

// totalBatchBytes bounds what Total reads from the kernel at a time.
const totalBatchBytes = 2 << 20

// Total returns the counts of all endpoints, and of those that this process has
// removed: they never go down. It waits for no endpoint's work but the removal of one
// from the maps.
func (d *Datapath) Total() (Counters, error) {
	cpus := ebpf.MustPossibleCPU()
	batch := max(16, totalBatchBytes/(cpus*countersBytes))
	keys, shares := make([]address, batch), make([]countersValue, batch*cpus)
	d.countsMu.Lock()
	defer d.countsMu.Unlock()
	sum := d.gone
	var cursor ebpf.MapBatchCursor
	for {
		n, err := d.objects.Counts.BatchLookup(&cursor, keys, shares, nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return Counters{}, fmt.Errorf("counters of all endpoints: %w", err)
		}
		for i := range shares[:n*cpus] {
			sum.add(&shares[i])
		}
		if last {
			return sum, nil
		}
	}
}

// countersBytes is the size of countersValue.
const countersBytes = 16 * 16

func (c *Counters) add(share *countersValue) {
	for i := range c {
		c[i].Packets += share[i].Packets
		c[i].Bytes += share[i].Bytes
	}
}

// dropCounts removes the counts of an address, which Total goes on to count.
func (d *Datapath) dropCounts(key address) error {
	d.countsMu.Lock()
	defer d.countsMu.Unlock()
	var shares []countersValue
	found, err := lookup(d.objects.Counts, key, &shares)
	if err != nil || !found {
		return err
	}
	if err := remove(d.objects.Counts, key); err != nil {
		return err
	}
	for i := range shares {
		d.gone.add(&shares[i])
	}
	return nil
}
