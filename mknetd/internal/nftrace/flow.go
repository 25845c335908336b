package nftrace

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
)

// Packet is one packet of the flow as it was when it was marked.
type Packet struct {
	Number                      int // from 1
	Source, Destination         netip.Addr
	SourcePort, DestinationPort uint16 // 0 where there are none
	TCPFlags                    uint8
	Reply                       bool // from To to From
	Bytes                       int  // its length in its IP header
}

// Step is a rule that has matched a packet, or the policy of a base chain.
type Step struct {
	At     time.Time // when it was read
	Packet Packet
	// Family is "ip" or "inet"; chains of iptables-nft are "ip".
	Family, Table, Chain string
	Handle               uint64 // of the rule; 0: it is the chain's policy
	Verdict              string // accept, drop, return, continue, queue, stolen
}

// Bounds of what a flow remembers of packets: no more of them at once, none longer.
// A packet is through a host in less than a millisecond, but a queue may hold it.
const (
	maxPackets = 512
	packetLife = 10 * time.Second
)

var familyNames = map[uint8]string{unix.AF_INET: "ip", 1: "inet"}

// flow makes steps of messages. It is used by one goroutine.
type flow struct {
	table   string
	filter  Filter
	packets map[uint32]*begun // by id
	order   []uint32          // ids, the oldest first
	number  int
}

type begun struct {
	packet Packet
	at     time.Time
}

func newFlow(table string, f Filter) *flow {
	return &flow{table: table, filter: f, packets: map[uint32]*begun{}}
}

// next is what a message says of a packet of the flow; false where it says nothing:
// it is of another packet, of a table of this package, or leads to another chain,
// whose own rules speak for themselves.
func (f *flow) next(m message, now time.Time) (Step, bool) {
	// A rule of our own table marks the packet: only then it is of this flow. Ids come
	// again when memory does, so that this also parts packets with the same id.
	if m.table == f.table {
		if m.matched() {
			f.begin(m, now)
		}
		return Step{}, false
	}
	b := f.packets[m.id]
	family, known := familyNames[m.family]
	if b == nil || now.Sub(b.at) > packetLife || !known || strings.HasPrefix(m.table, endpoint.TraceTablePrefix) {
		return Step{}, false
	}
	if m.kind != byPolicy && (!m.matched() || m.verdict == unix.NFT_JUMP || m.verdict == unix.NFT_GOTO) {
		return Step{}, false
	}
	return Step{At: now, Packet: b.packet, Family: family, Table: m.table, Chain: m.chain, Handle: m.handle, Verdict: verdictName(m.verdict, m.target)}, true
}

func (f *flow) begin(m message, now time.Time) {
	p, ok := packetOf(m, f.filter)
	if !ok {
		return
	}
	if f.packets[m.id] != nil {
		f.order = slices.DeleteFunc(f.order, func(id uint32) bool { return id == m.id })
	} else if len(f.order) == maxPackets {
		delete(f.packets, f.order[0])
		f.order = f.order[1:]
	}
	f.number++
	p.Number = f.number
	f.packets[m.id] = &begun{p, now}
	f.order = append(f.order, m.id)
}

// packetOf reads the headers of a message (RFC 791, 9293); false where they are not
// those of IPv4.
func packetOf(m message, f Filter) (Packet, bool) {
	h := m.network
	if len(h) < 20 || h[0]>>4 != 4 {
		return Packet{}, false
	}
	p := Packet{
		Source: netip.AddrFrom4([4]byte(h[sourceOffset:])), Destination: netip.AddrFrom4([4]byte(h[destinationOffset:])),
		Bytes: int(binary.BigEndian.Uint16(h[2:])),
	}
	p.Reply = p.Source == f.To && p.Destination == f.From
	t := m.transport
	switch proto := h[9]; {
	case binary.BigEndian.Uint16(h[6:])&0x1fff != 0: // a later fragment has no ports
	case (proto == unix.IPPROTO_TCP || proto == unix.IPPROTO_UDP || proto == unix.IPPROTO_SCTP) && len(t) >= 4:
		p.SourcePort, p.DestinationPort = binary.BigEndian.Uint16(t), binary.BigEndian.Uint16(t[2:])
		if proto == unix.IPPROTO_TCP && len(t) >= 14 {
			p.TCPFlags = t[13]
		}
	}
	return p, true
}
