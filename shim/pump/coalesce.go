package pump

import (
	"bytes"
	"encoding/binary"

	wire "mknet/spec/pump"
)

// Offsets in what a TUN gives with a virtio-net header: that header, an IPv4 header
// without options (RFC 791) and a UDP header (RFC 768).
const (
	atIP       = wire.VnetHeaderBytes
	atTOS      = atIP + 1
	atTotal    = atIP + 2
	atFragment = atIP + 6
	atTTL      = atIP + 8
	atIPSum    = atIP + 10
	atSource   = atIP + 12
	atUDP      = atIP + 20
	atUDPTotal = atUDP + 4
	atUDPSum   = atUDP + 6
	atPayload  = atUDP + 8
)

// maxCoalesced is UDP_MAX_SEGMENTS of Linux before 6.10: what every kernel that
// takes such frames cuts.
const maxCoalesced = 64

// uncut is the head of a datagram that the kernel leaves to be finished: a partial
// checksum over UDP, and nothing to cut.
var uncut = wire.VnetHeader{Flags: wire.VnetNeedsCsum, CsumStart: 20, CsumOffset: 6}

// datagram returns the payload's size in bytes of a packet that may be joined to
// others: IPv4 without options, not to be fragmented (so that its identification
// means nothing, RFC 6864 section 4.1), UDP whose checksum the next kernel makes, and
// lengths that agree. Otherwise it returns 0.
func datagram(p []byte) int {
	if len(p) <= atPayload || p[atIP] != 0x45 || p[atIP+9] != 17 ||
		binary.BigEndian.Uint16(p[atFragment:]) != 0x4000 ||
		int(binary.BigEndian.Uint16(p[atTotal:])) != len(p)-atIP ||
		int(binary.BigEndian.Uint16(p[atUDPTotal:])) != len(p)-atUDP {
		return 0
	}
	h := wire.ParseVnet(p)
	if h.HdrLen = 0; h != uncut { // the length of headers is a hint
		return 0
	}
	return len(p) - atPayload
}

// sameFlow reports whether two datagrams differ in nothing but lengths, checksums and
// what they carry.
func sameFlow(p, q []byte) bool {
	return p[atTOS] == q[atTOS] && p[atTTL] == q[atTTL] && bytes.Equal(p[atSource:atUDPTotal], q[atSource:atUDPTotal])
}

// coalescer joins datagrams of one flow that come one after the other into one frame,
// which the peer's kernel cuts again where the receiver needs it (USO). That spares
// the peer a write each.
type coalescer struct {
	on       bool // both sides have USO
	open     bool // the last frame of the batch is a datagram that more may join
	at       int  // of its packet in the buffer
	size     int  // payload of all its datagrams but the last, in bytes
	segments int
}

// begin looks at a packet that begins a frame at offset at.
func (c *coalescer) begin(p []byte, at int) {
	c.open = false
	if !c.on {
		return
	}
	// The peer refuses smaller ones (wire.MinGSOBytes).
	if n := datagram(p); n >= wire.MinGSOBytes {
		c.open, c.at, c.size, c.segments = true, at, n, 1
	}
}

// join appends a packet, which lies behind the last frame, to the packet of the last
// frame, which ends at end. It returns how many bytes it is longer for that; 0 where
// the packet does not fit, and begins a frame of its own.
func (c *coalescer) join(buf []byte, end int, p []byte) int {
	if !c.open {
		return 0
	}
	n, head := datagram(p), buf[c.at:end]
	if n == 0 || n > c.size || len(head)-atIP+n > wire.MaxPacketBytes || !sameFlow(head, p) {
		return 0
	}
	copy(buf[end:], p[atPayload:]) // downwards: p lies behind end
	head = buf[c.at : end+n]
	c.segments++
	c.open = n == c.size && c.segments < maxCoalesced
	if c.segments == 2 {
		h := wire.VnetHeader{Flags: wire.VnetNeedsCsum, GSOType: wire.GSOUDPL4, HdrLen: atPayload - atIP, GSOSize: uint16(c.size), CsumStart: uncut.CsumStart, CsumOffset: uncut.CsumOffset}
		h.Append(head[:0])
	}
	lengthen(head[atTotal:], head[atIPSum:], n, true)
	lengthen(head[atUDPTotal:], head[atUDPSum:], n, false)
	return n
}

// lengthen adds to a length field, and to the checksum over it (RFC 1624), which is
// complemented or, where a kernel will finish it, not.
func lengthen(length, sum []byte, by int, complemented bool) {
	was := binary.BigEndian.Uint16(length)
	now := was + uint16(by)
	binary.BigEndian.PutUint16(length, now)
	s := binary.BigEndian.Uint16(sum)
	if complemented {
		s = ^s
	}
	t := uint32(s) + uint32(^was) + uint32(now)
	t = t&0xFFFF + t>>16
	t = t&0xFFFF + t>>16
	if s = uint16(t); complemented {
		s = ^s
	}
	binary.BigEndian.PutUint16(sum, s)
}
