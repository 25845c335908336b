package pump

import (
	"sync/atomic"
	"time"

	wire "mknet/spec/pump"
)

// Counters count what a link carries. They outlive sessions, so that they never
// go down when one ends; the zero value is ready. "Rx" is from the peer to the
// TUN, "Tx" from the TUN to the peer. Bytes are those of IP packets, without any
// header of ours; a packet that the kernel is to segment counts once.
type Counters struct {
	rxPackets, rxBytes, txPackets, txBytes atomic.Uint64
	drops                                  [wire.NumDrops]atomic.Uint64
	sessions                               atomic.Uint64
	batches                                atomic.Uint64
	creditWaits                            atomic.Uint64
	transportRetries                       atomic.Uint64
	rtt                                    atomic.Int64
}

// Snapshot is the counters at one moment.
type Snapshot struct {
	RxPackets uint64 `json:"rxPackets"` // written to the TUN
	RxBytes   uint64 `json:"rxBytes"`
	TxPackets uint64 `json:"txPackets"` // handed to the transport
	TxBytes   uint64 `json:"txBytes"`

	// Drops are packets from the peer that were not delivered, by the text of
	// wire.Drop; only those above zero.
	Drops map[string]uint64 `json:"drops,omitempty"`

	Sessions         uint64 `json:"sessions"`         // begun
	Reconnects       uint64 `json:"reconnects"`       // sessions after the first
	Batches          uint64 `json:"batches"`          // writes of data frames
	CreditWaits      uint64 `json:"creditWaits"`      // how often a queue was not read for want of credit
	TransportRetries uint64 `json:"transportRetries"` // writes that found no room in a message transport

	RTT time.Duration `json:"rttNanoseconds"` // last round trip on the last lane; 0 before the first
}

// Snapshot reads the counters. Each is exact; together they are not of the same
// instant.
func (c *Counters) Snapshot() Snapshot {
	s := Snapshot{
		RxPackets: c.rxPackets.Load(), RxBytes: c.rxBytes.Load(),
		TxPackets: c.txPackets.Load(), TxBytes: c.txBytes.Load(),
		Sessions: c.sessions.Load(), Batches: c.batches.Load(),
		CreditWaits: c.creditWaits.Load(), TransportRetries: c.transportRetries.Load(),
		RTT: time.Duration(c.rtt.Load()),
	}
	s.Reconnects = max(s.Sessions, 1) - 1
	for d := range c.drops {
		if n := c.drops[d].Load(); n > 0 {
			if s.Drops == nil {
				s.Drops = map[string]uint64{}
			}
			s.Drops[wire.Drop(d).String()] = n
		}
	}
	return s
}

// Drops returns how many packets were dropped for one reason.
func (c *Counters) Drops(d wire.Drop) uint64 { return c.drops[d].Load() }
