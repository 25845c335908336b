package pump

import (
	"encoding/binary"
	"strings"
)

// VnetHeaderBytes is the size of struct virtio_net_hdr without mergeable buffers
// (include/uapi/linux/virtio_net.h), the default of a TUN (TUNSETVNETHDRSZ).
const VnetHeaderBytes = 10

// Bits of VnetHeader.Flags and values of VnetHeader.GSOType
// (include/uapi/linux/virtio_net.h).
const (
	VnetNeedsCsum = 1    // the checksum at CsumStart+CsumOffset is partial
	VnetDataValid = 2    // the checksum was verified
	GSONone       = 0    // one packet
	GSOTCPv4      = 1    // TCP over IPv4
	GSOUDP        = 3    // UDP fragmentation (UFO), legacy
	GSOTCPv6      = 4    // TCP over IPv6
	GSOUDPL4      = 5    // UDP datagrams that keep their boundaries (USO)
	GSOECN        = 0x80 // flag on a TCP type: CWR is set
)

// VnetHeader is a virtio-net header. Its fields are in the machine's own byte
// order, as the TUN has them; both kernels run on the same machine.
type VnetHeader struct {
	Flags      uint8
	GSOType    uint8
	HdrLen     uint16 // bytes of headers, a hint
	GSOSize    uint16 // bytes of payload in each segment
	CsumStart  uint16 // bytes from the start of the IP header
	CsumOffset uint16 // bytes from CsumStart
}

// ParseVnet reads the first VnetHeaderBytes bytes of b, which must be there.
func ParseVnet(b []byte) VnetHeader {
	_ = b[VnetHeaderBytes-1]
	return VnetHeader{
		Flags: b[0], GSOType: b[1],
		HdrLen:     binary.NativeEndian.Uint16(b[2:]),
		GSOSize:    binary.NativeEndian.Uint16(b[4:]),
		CsumStart:  binary.NativeEndian.Uint16(b[6:]),
		CsumOffset: binary.NativeEndian.Uint16(b[8:]),
	}
}

// Append adds the header in native byte order to b.
func (h VnetHeader) Append(b []byte) []byte {
	b = append(b, h.Flags, h.GSOType)
	for _, v := range [...]uint16{h.HdrLen, h.GSOSize, h.CsumStart, h.CsumOffset} {
		b = binary.NativeEndian.AppendUint16(b, v)
	}
	return b
}

// Offloads are the TUN_F_* bits of include/uapi/linux/if_tun.h: what a kernel
// may hand to the reader of a TUN. They say nothing about what it accepts in
// writes.
type Offloads uint32

// Bits of Offloads.
const (
	OffloadCsum Offloads = 0x01 // partial checksums
	OffloadTSO4 Offloads = 0x02
	OffloadTSO6 Offloads = 0x04
	OffloadECN  Offloads = 0x08 // TSO with CWR set
	OffloadUSO4 Offloads = 0x20 // Linux 6.2 and later, always with USO6
	OffloadUSO6 Offloads = 0x40

	// AllOffloads is what a side that knows this version can take. The legacy UFO
	// (0x10) is not in it: the kernel only emulates it.
	AllOffloads = OffloadCsum | OffloadTSO4 | OffloadTSO6 | OffloadECN | OffloadUSO4 | OffloadUSO6
)

// OffloadLadder is what to try on a TUN, best first: Linux 6.2, older, none.
var OffloadLadder = [...]Offloads{AllOffloads, OffloadCsum | OffloadTSO4 | OffloadTSO6 | OffloadECN, 0}

// And returns what both sides can take, made valid: every offload needs partial
// checksums, USO4 and USO6 go together, and ECN needs a TSO
// (drivers/net/tun.c, set_offload).
func (o Offloads) And(p Offloads) Offloads {
	o &= p & AllOffloads
	if o&OffloadCsum == 0 {
		return 0
	}
	if uso := OffloadUSO4 | OffloadUSO6; o&uso != uso {
		o &^= uso
	}
	if o&(OffloadTSO4|OffloadTSO6) == 0 {
		o &^= OffloadECN
	}
	return o
}

func (o Offloads) String() string {
	if o == 0 {
		return "none"
	}
	var s []string
	for _, b := range []struct {
		bit  Offloads
		name string
	}{{OffloadCsum, "csum"}, {OffloadTSO4, "tso4"}, {OffloadTSO6, "tso6"}, {OffloadECN, "ecn"}, {OffloadUSO4, "uso4"}, {OffloadUSO6, "uso6"}} {
		if o&b.bit != 0 {
			s = append(s, b.name)
		}
	}
	return strings.Join(s, ",")
}
