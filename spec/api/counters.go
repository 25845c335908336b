package api

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"mknet/spec/endpoint"
)

// Counters are what the shims of an endpoint have carried since it was made: a
// shim that begins takes them over and counts on, so that they never go down.
// "Rx" is from the child, "Tx" to it; bytes are those of IP packets.
type Counters struct {
	RxPackets        uint64  `json:"rxPackets"`
	RxBytes          uint64  `json:"rxBytes"`
	TxPackets        uint64  `json:"txPackets"`
	TxBytes          uint64  `json:"txBytes"`
	Drops            []Drops `json:"drops,omitempty"` // in the order of reasons, none twice
	Sessions         uint64  `json:"sessions"`
	Batches          uint64  `json:"batches"`
	CreditWaits      uint64  `json:"creditWaits"`
	TransportRetries uint64  `json:"transportRetries"`
	RTTNanoseconds   int64   `json:"rttNanoseconds"` // the last round trip; not a total
}

// Drops are the packets from the child that were not delivered for one reason.
type Drops struct {
	Reason  string `json:"reason"`
	Packets uint64 `json:"packets"`
}

// CountersReport is what the bound shim's process tells of an endpoint:
// POST /v1/endpoints/{generation}/counters -> 204. Totals, not differences. A
// figure below what mknetd has is refused with FAILED_PRECONDITION: read the
// counters first and add to them. From any other process it is STALE_GENERATION.
type CountersReport struct {
	endpoint.Sandbox
	Counters Counters `json:"counters"`
}

// CountersReply is the answer to GET /v1/endpoints/{generation}/counters. Of a
// child it has the shims' counters, NOT_FOUND until a shim has reported to this
// daemon; they are kept in memory and go with the endpoint. Of an ordinary pod it
// has Path, read from the kernel now, NOT_FOUND where the node has no eBPF data
// path, and Counters are zero.
type CountersReply struct {
	Generation endpoint.Generation `json:"generation"`
	ReportedAt time.Time           `json:"reportedAt"`
	Counters   Counters            `json:"counters"`
	Path       []PathCount         `json:"path,omitempty"`
}

// PathCount is how many frames of an ordinary pod the data path's programs sent one
// way since the pod was made, whatever became of mknetd; spec/datapath.md names the
// outcomes. A frame that the device cuts later (GSO) counts as one; bytes have the
// Ethernet header.
type PathCount struct {
	Outcome string `json:"outcome"` // "peer", "stack", "drop-address", ...
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// Bounds of the reasons in a report.
const (
	maxDropReasons     = 64
	maxDropReasonBytes = 64
)

// Validate bounds what a shim may make the daemon keep.
func (c Counters) Validate() error {
	if len(c.Drops) > maxDropReasons {
		return Errorf(InvalidArgument, "drops: %d reasons, at most %d are allowed", len(c.Drops), maxDropReasons)
	}
	for i, d := range c.Drops {
		if d.Reason == "" || len(d.Reason) > maxDropReasonBytes {
			return Errorf(InvalidArgument, "drops: a reason of %d bytes, must be 1 to %d", len(d.Reason), maxDropReasonBytes)
		}
		for j := range len(d.Reason) {
			if b := d.Reason[j]; (b < 'a' || b > 'z') && (b < '0' || b > '9') && b != '_' {
				return Errorf(InvalidArgument, "drops: reason %q: must be of a-z, 0-9 and _", d.Reason)
			}
		}
		if i > 0 && d.Reason <= c.Drops[i-1].Reason {
			return Errorf(InvalidArgument, "drops: reason %q comes after %q: must be sorted, none twice", d.Reason, c.Drops[i-1].Reason)
		}
	}
	if c.RTTNanoseconds < 0 {
		return Errorf(InvalidArgument, "rttNanoseconds %d: must not be negative", c.RTTNanoseconds)
	}
	return nil
}

// Below names the first figure that is lower than before; empty when none is.
func (c Counters) Below(before Counters) string {
	for _, f := range []struct {
		name      string
		now, then uint64
	}{
		{"rxPackets", c.RxPackets, before.RxPackets},
		{"rxBytes", c.RxBytes, before.RxBytes},
		{"txPackets", c.TxPackets, before.TxPackets},
		{"txBytes", c.TxBytes, before.TxBytes},
		{"sessions", c.Sessions, before.Sessions},
		{"batches", c.Batches, before.Batches},
		{"creditWaits", c.CreditWaits, before.CreditWaits},
		{"transportRetries", c.TransportRetries, before.TransportRetries},
	} {
		if f.now < f.then {
			return fmt.Sprintf("%s %d after %d", f.name, f.now, f.then)
		}
	}
	for _, then := range before.Drops {
		if now := c.dropped(then.Reason); now < then.Packets {
			return fmt.Sprintf("drops %s %d after %d", then.Reason, now, then.Packets)
		}
	}
	return ""
}

// dropped is how many packets were dropped for a reason.
func (c Counters) dropped(reason string) uint64 {
	i, found := slices.BinarySearchFunc(c.Drops, reason, func(d Drops, r string) int { return strings.Compare(d.Reason, r) })
	if !found {
		return 0
	}
	return c.Drops[i].Packets
}

// Plus adds what came before; the round trip is the newer one where there is one.
func (c Counters) Plus(before Counters) Counters {
	sum := Counters{
		RxPackets: c.RxPackets + before.RxPackets, RxBytes: c.RxBytes + before.RxBytes,
		TxPackets: c.TxPackets + before.TxPackets, TxBytes: c.TxBytes + before.TxBytes,
		Sessions: c.Sessions + before.Sessions, Batches: c.Batches + before.Batches,
		CreditWaits: c.CreditWaits + before.CreditWaits, TransportRetries: c.TransportRetries + before.TransportRetries,
		RTTNanoseconds: c.RTTNanoseconds,
	}
	if sum.RTTNanoseconds == 0 {
		sum.RTTNanoseconds = before.RTTNanoseconds
	}
	for _, d := range c.Drops {
		sum.Drops = append(sum.Drops, Drops{d.Reason, d.Packets + before.dropped(d.Reason)})
	}
	for _, d := range before.Drops {
		if c.dropped(d.Reason) == 0 {
			sum.Drops = append(sum.Drops, d)
		}
	}
	slices.SortFunc(sum.Drops, func(a, b Drops) int { return strings.Compare(a.Reason, b.Reason) })
	sum.Drops = slices.CompactFunc(sum.Drops, func(a, b Drops) bool { return a.Reason == b.Reason })
	return sum
}
