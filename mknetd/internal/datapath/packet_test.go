package datapath

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// frame describes an Ethernet frame that a test crafts; bytes builds it.
type frame struct {
	dst, src [6]byte
	typ      uint16
	ip       *ipv4
	raw      []byte // behind the Ethernet header where ip is nil
}

// ipv4 is the header of a crafted packet. Zero values get what a sane packet has.
type ipv4 struct {
	src, dst netip.Addr
	proto    uint8
	ttl      uint8
	id       uint16
	frag     uint16 // flags and offset as in the header
	options  []byte // a multiple of 4 bytes
	first    uint8  // version and header length, where not the right one
	payload  []byte
}

func (f frame) bytes() []byte {
	b := append(append([]byte{}, f.dst[:]...), f.src[:]...)
	typ := f.typ
	if typ == 0 {
		typ = unix.ETH_P_IP
	}
	b = binary.BigEndian.AppendUint16(b, typ)
	if f.ip == nil {
		return append(b, f.raw...)
	}
	return append(b, f.ip.bytes()...)
}

func (p ipv4) bytes() []byte {
	h := make([]byte, 20, 20+len(p.options)+len(p.payload))
	h[0] = p.first
	if h[0] == 0 {
		h[0] = 0x45 + uint8(len(p.options)/4)
	}
	h[8] = p.ttl
	if h[8] == 0 {
		h[8] = 64
	}
	binary.BigEndian.PutUint16(h[2:], uint16(20+len(p.options)+len(p.payload)))
	binary.BigEndian.PutUint16(h[4:], p.id)
	binary.BigEndian.PutUint16(h[6:], p.frag)
	h[9] = p.proto
	src, dst := p.src.As4(), p.dst.As4()
	copy(h[12:], src[:])
	copy(h[16:], dst[:])
	h = append(h, p.options...)
	binary.BigEndian.PutUint16(h[10:], checksum(h))
	return append(h, p.payload...)
}

// checksum is RFC 1071's; 0 over data that carries its own.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(b[i]) << 8
		if i+1 < len(b) {
			sum += uint32(b[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

const (
	synFlag = 0x02
	ackFlag = 0x10
)

func tcp(sport, dport uint16, flags uint8, payload ...byte) []byte {
	h := binary.BigEndian.AppendUint16(nil, sport)
	h = binary.BigEndian.AppendUint16(h, dport)
	h = append(h, make([]byte, 16)...)
	h[12], h[13] = 5<<4, flags
	return append(h, payload...)
}

func udp(sport, dport uint16, payload ...byte) []byte {
	h := binary.BigEndian.AppendUint16(nil, sport)
	h = binary.BigEndian.AppendUint16(h, dport)
	h = binary.BigEndian.AppendUint16(h, uint16(8+len(payload)))
	return append(append(h, 0, 0), payload...)
}

// icmp is a message of 8 bytes and what follows; rest is bytes 4 to 7.
func icmp(typ, code uint8, rest uint32, payload ...byte) []byte {
	h := binary.BigEndian.AppendUint32([]byte{typ, code, 0, 0}, rest)
	h = append(h, payload...)
	binary.BigEndian.PutUint16(h[2:], checksum(h))
	return h
}

// arpPacket is RFC 826's for IPv4 over Ethernet.
func arpPacket(op uint16, senderMAC [6]byte, sender netip.Addr, targetMAC [6]byte, target netip.Addr) []byte {
	b := []byte{0, 1, 8, 0, 6, 4, byte(op >> 8), byte(op)}
	s, t := sender.As4(), target.As4()
	b = append(append(b, senderMAC[:]...), s[:]...)
	return append(append(b, targetMAC[:]...), t[:]...)
}

func keyOf(proto uint8, src, dst netip.Addr, sport, dport uint16) flowKey {
	a, b := address(src.As4()), address(dst.As4())
	var p, q [2]byte
	binary.BigEndian.PutUint16(p[:], sport)
	binary.BigEndian.PutUint16(q[:], dport)
	if binary.NativeEndian.Uint32(a[:]) > binary.NativeEndian.Uint32(b[:]) {
		a, b, p, q = b, a, q, p
	}
	return flowKey{Address: [2]address{a, b}, Port: [2][2]byte{p, q}, Protocol: proto}
}
