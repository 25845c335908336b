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
	for _, s := range shares {
		for i := range sum {
			sum[i].Packets += s[i].Packets
			sum[i].Bytes += s[i].Bytes
		}
	}
	return sum, nil
}
