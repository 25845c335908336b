package pump

import (
	"encoding/binary"
	"net/netip"
)

// Drop says why a packet was not delivered. Its text is the label of a counter.
type Drop uint8

// Reasons of drops. Those up to DropNoOffload are verdicts of Check; the rest
// come from the kernel, when a packet that passed is written to the TUN.
const (
	DropNone         Drop = iota // not dropped
	DropShort                    // shorter than an IPv4 header
	DropVersion                  // neither IPv4 nor IPv6
	DropIPv6                     // IPv6 is not carried yet
	DropHeaderLength             // IPv4 header length below 5 words or beyond the packet
	DropTotalLength              // IPv4 total length differs from the packet's
	DropSource                   // not from the address that belongs to the peer
	DropMTU                      // longer than the MTU, or made of segments that are
	DropVnetFlags                // unknown flag in the virtio-net header
	DropVnetLength               // header length hint beyond the packet
	DropCsumRange                // partial checksum outside the payload, or on a fragment
	DropGSOType                  // unknown type, or one that does not fit the packet
	DropGSOLegacy                // UFO
	DropGSONoCsum                // segmentation without a partial checksum
	DropGSOProtocol              // TCP segmentation on what is not TCP, UDP on what is not UDP
	DropGSOHeader                // transport header beyond the packet, checksum field elsewhere
	DropGSOSize                  // segments too small or too many
	DropGSOFragment              // segmentation of a fragment
	DropNoOffload                // needs an offload that this side's TUN has not
	DropTunDown                  // EIO: the TUN is not up
	DropTunInvalid               // EINVAL: the kernel refused the packet
	DropTunMemory                // ENOBUFS, ENOMEM: no memory for the packet
	DropTunOther                 // any other error that leaves the TUN usable
	NumDrops                     // how many there are
)

var dropNames = [NumDrops]string{
	"none", "short", "ip_version", "ipv6", "ip_header_length", "ip_total_length", "source_address", "mtu",
	"vnet_flags", "vnet_header_length", "checksum_range", "gso_type", "gso_legacy_ufo", "gso_without_checksum",
	"gso_protocol", "gso_header", "gso_size", "gso_fragment", "no_offload", "tun_down", "tun_invalid", "tun_memory", "tun_other",
}

func (d Drop) String() string {
	if d >= NumDrops {
		return "unknown"
	}
	return dropNames[d]
}

// Bounds of segmentation.
const (
	// MinGSOBytes is the smallest payload of a segment. The kernel takes 1, which
	// lets a peer turn one frame into 65,000 packets; its own TCP stays at 48 or
	// above (sysctl net.ipv4.tcp_min_snd_mss).
	MinGSOBytes = 48
	// MaxUDPSegments is UDP_MAX_SEGMENTS of include/linux/udp.h.
	MaxUDPSegments = 128
)

// Check decides whether a packet from an untrusted peer may be written to the
// TUN. The zero value refuses everything: MTUBytes must be set.
type Check struct {
	MTUBytes int
	Source   netip.Addr // exact source address; the zero Addr allows any
}

const (
	protoTCP = 6
	protoUDP = 17
)

// Plain decides about a packet without a virtio-net header.
func (c *Check) Plain(p []byte) Drop {
	d, _ := c.ip(p)
	if d == DropNone && len(p) > c.MTUBytes {
		return DropMTU
	}
	return d
}

// Vnet decides about a virtio-net header, which must be there, and the packet
// behind it. The kernel takes more than this lets through (measured on 6.18):
// see the single reasons. A partial checksum must begin behind the IP header, so
// that it cannot rewrite the source address after it was checked.
func (c *Check) Vnet(b []byte) Drop {
	h, p := ParseVnet(b), b[VnetHeaderBytes:]
	d, ihl := c.ip(p)
	if d != DropNone {
		return d
	}
	if h.Flags&^(VnetNeedsCsum|VnetDataValid) != 0 {
		return DropVnetFlags
	}
	if int(h.HdrLen) > len(p) {
		return DropVnetLength
	}
	// More fragments, or an offset: RFC 791 section 3.1.
	fragment := binary.BigEndian.Uint16(p[6:])&0x3fff != 0
	if h.GSOType != GSONone {
		return c.gso(h, p, ihl, fragment)
	}
	if h.Flags&VnetNeedsCsum != 0 {
		start := int(h.CsumStart)
		if fragment || start < ihl || start+int(h.CsumOffset)+2 > len(p) {
			return DropCsumRange
		}
	}
	if len(p) > c.MTUBytes {
		return DropMTU
	}
	return DropNone
}

// ip checks the IPv4 header of p and returns its length in bytes.
func (c *Check) ip(p []byte) (Drop, int) {
	if len(p) < 1 {
		return DropShort, 0
	}
	switch p[0] >> 4 {
	case 4:
	case 6:
		return DropIPv6, 0
	default:
		return DropVersion, 0
	}
	if len(p) < 20 {
		return DropShort, 0
	}
	ihl := int(p[0]&15) * 4
	switch {
	case ihl < 20 || ihl > len(p):
		return DropHeaderLength, 0
	case int(binary.BigEndian.Uint16(p[2:])) != len(p):
		return DropTotalLength, 0
	case c.Source.IsValid() && netip.AddrFrom4([4]byte(p[12:16])) != c.Source:
		return DropSource, 0
	}
	return DropNone, ihl
}

func (c *Check) gso(h VnetHeader, p []byte, ihl int, fragment bool) Drop {
	proto, csumOffset, l4 := byte(protoTCP), uint16(16), 20
	switch h.GSOType {
	case GSOTCPv4, GSOTCPv4 | GSOECN:
	case GSOUDPL4:
		proto, csumOffset, l4 = protoUDP, 6, 8
	case GSOUDP:
		return DropGSOLegacy
	default:
		return DropGSOType
	}
	switch {
	case p[9] != proto:
		return DropGSOProtocol
	case h.Flags&VnetNeedsCsum == 0:
		return DropGSONoCsum
	case fragment:
		return DropGSOFragment
	case ihl+l4 > len(p) || int(h.CsumStart) != ihl || h.CsumOffset != csumOffset:
		return DropGSOHeader
	}
	if proto == protoTCP {
		if l4 = int(p[ihl+12]>>4) * 4; l4 < 20 || ihl+l4 > len(p) {
			return DropGSOHeader
		}
	}
	size := int(h.GSOSize)
	switch {
	case size < MinGSOBytes:
		return DropGSOSize
	case ihl+l4+size > c.MTUBytes:
		return DropMTU
	case proto == protoUDP && len(p)-ihl-l4 > MaxUDPSegments*size:
		return DropGSOSize
	}
	return DropNone
}

// NeedsOffload reports whether the packet behind the virtio-net header b can only
// be written to a TUN that has virtio-net headers: its checksum is not complete or
// it is more than one packet.
func NeedsOffload(b []byte) bool { return b[0]&VnetNeedsCsum != 0 || b[1] != GSONone }
