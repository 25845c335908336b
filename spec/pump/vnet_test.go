package pump

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"
)

var (
	child   = netip.MustParseAddr("172.30.0.2")
	other   = netip.MustParseAddr("172.30.0.6")
	gateway = netip.MustParseAddr("172.30.0.1")
)

// ipv4 builds a packet of n bytes; edits come after the header is complete.
func ipv4(n int, proto byte, src netip.Addr, edits ...func(p []byte)) []byte {
	p := make([]byte, max(n, 20))
	p[0], p[8], p[9] = 0x45, 64, proto
	binary.BigEndian.PutUint16(p[2:], uint16(n))
	s, d := src.As4(), gateway.As4()
	copy(p[12:], s[:])
	copy(p[16:], d[:])
	if proto == protoTCP && n >= 40 {
		p[20+12] = 5 << 4
	}
	for _, e := range edits {
		e(p)
	}
	return p[:n]
}

func set(at int, b byte) func([]byte) { return func(p []byte) { p[at] = b } }
func set16(at int, v uint16) func([]byte) {
	return func(p []byte) { binary.BigEndian.PutUint16(p[at:], v) }
}

func tso(mss uint16) VnetHeader { return VnetHeader{VnetNeedsCsum, GSOTCPv4, 40, mss, 20, 16} }

func uso(size uint16) VnetHeader                        { return VnetHeader{VnetNeedsCsum, GSOUDPL4, 28, size, 20, 6} }
func with(h VnetHeader, f func(*VnetHeader)) VnetHeader { f(&h); return h }

func TestCheckVnet(t *testing.T) {
	const mtu = 1400
	tests := []struct {
		name string
		h    VnetHeader
		p    []byte
		want Drop
	}{
		{"full packet", VnetHeader{}, ipv4(mtu, protoUDP, child), DropNone},
		{"smallest packet", VnetHeader{}, ipv4(20, 1, child), DropNone},
		{"checksum verified", VnetHeader{Flags: VnetDataValid}, ipv4(100, protoTCP, child), DropNone},
		{"partial checksum", VnetHeader{VnetNeedsCsum, 0, 0, 0, 20, 16}, ipv4(40, protoTCP, child), DropNone},
		{"TSO", tso(1360), ipv4(65000, protoTCP, child), DropNone},
		{"TSO, largest", tso(1360), ipv4(65535, protoTCP, child), DropNone},
		{"TSO with ECN", with(tso(1360), func(h *VnetHeader) { h.GSOType |= GSOECN }), ipv4(5000, protoTCP, child), DropNone},
		{"TSO, one segment", tso(1000), ipv4(500, protoTCP, child), DropNone},
		{"TSO, header length left out", with(tso(1360), func(h *VnetHeader) { h.HdrLen = 0 }), ipv4(5000, protoTCP, child), DropNone},
		{"TSO with TCP options", tso(1348), ipv4(5000, protoTCP, child, set(32, 8<<4)), DropNone},
		{"TSO, smallest segment", tso(MinGSOBytes), ipv4(5000, protoTCP, child), DropNone},
		{"USO", uso(1200), ipv4(28+36000, protoUDP, child), DropNone},
		{"USO, most segments", uso(100), ipv4(28+12800, protoUDP, child), DropNone},
		{"fragment", VnetHeader{}, ipv4(1396, protoUDP, child, set16(6, 0x2000)), DropNone},

		{"empty", VnetHeader{}, nil, DropShort},
		{"cut header", VnetHeader{}, ipv4(40, 1, child)[:19], DropShort},
		{"IPv6", VnetHeader{}, append([]byte{0x60}, make([]byte, 39)...), DropIPv6},
		{"version 0", VnetHeader{}, make([]byte, 40), DropVersion},
		{"version 15", VnetHeader{}, bytes.Repeat([]byte{0xff}, 60), DropVersion},
		{"header of 4 words", VnetHeader{}, ipv4(40, 1, child, set(0, 0x44)), DropHeaderLength},
		{"header beyond the packet", VnetHeader{}, ipv4(40, 1, child, set(0, 0x4f)), DropHeaderLength},
		{"total length too small", VnetHeader{}, ipv4(100, 1, child, set16(2, 99)), DropTotalLength},
		{"total length too large", VnetHeader{}, ipv4(100, 1, child, set16(2, 101)), DropTotalLength},
		{"spoofed", VnetHeader{}, ipv4(100, 1, other), DropSource},
		{"spoofed TSO", tso(1360), ipv4(5000, protoTCP, other), DropSource},
		{"longer than the MTU", VnetHeader{}, ipv4(mtu+1, protoUDP, child), DropMTU},
		{"longer than the MTU, partial checksum", VnetHeader{VnetNeedsCsum, 0, 0, 0, 20, 6}, ipv4(mtu+1, protoUDP, child), DropMTU},
		{"segments longer than the MTU", tso(1361), ipv4(5000, protoTCP, child), DropMTU},
		{"datagrams longer than the MTU", uso(1373), ipv4(5000, protoUDP, child), DropMTU},
		{"unknown flag", VnetHeader{Flags: 4}, ipv4(100, 1, child), DropVnetFlags},
		{"header length beyond the packet", VnetHeader{HdrLen: 101}, ipv4(100, 1, child), DropVnetLength},
		{"checksum past the end", VnetHeader{VnetNeedsCsum, 0, 0, 0, 20, 79}, ipv4(100, protoUDP, child), DropCsumRange},
		{"checksum start past the end", VnetHeader{VnetNeedsCsum, 0, 0, 0, 5000, 6}, ipv4(100, protoUDP, child), DropCsumRange},
		{"checksum sum wraps", VnetHeader{VnetNeedsCsum, 0, 0, 0, 65535, 65535}, ipv4(100, protoUDP, child), DropCsumRange},
		{"checksum over the source address", VnetHeader{VnetNeedsCsum, 0, 0, 0, 0, 12}, ipv4(100, protoUDP, child), DropCsumRange},
		{"partial checksum on a fragment", VnetHeader{VnetNeedsCsum, 0, 0, 0, 20, 6}, ipv4(100, protoUDP, child, set16(6, 0x2000)), DropCsumRange},
		{"unknown type", with(tso(1360), func(h *VnetHeader) { h.GSOType = 0x7f }), ipv4(5000, protoTCP, child), DropGSOType},
		{"ECN alone", with(tso(1360), func(h *VnetHeader) { h.GSOType = GSOECN }), ipv4(100, protoTCP, child), DropGSOType},
		{"ECN on UDP", with(uso(1200), func(h *VnetHeader) { h.GSOType |= GSOECN }), ipv4(5000, protoUDP, child), DropGSOType},
		{"TCPv6 on IPv4", with(tso(1360), func(h *VnetHeader) { h.GSOType = GSOTCPv6 }), ipv4(5000, protoTCP, child), DropGSOType},
		{"UFO", with(uso(1200), func(h *VnetHeader) { h.GSOType = GSOUDP }), ipv4(5000, protoUDP, child), DropGSOLegacy},
		{"USO on TCP", uso(1200), ipv4(5000, protoTCP, child), DropGSOProtocol},
		{"TSO on UDP", tso(1200), ipv4(5000, protoUDP, child), DropGSOProtocol},
		{"TSO without a partial checksum", with(tso(1360), func(h *VnetHeader) { h.Flags = 0 }), ipv4(5000, protoTCP, child), DropGSONoCsum},
		{"TSO of a fragment", tso(1360), ipv4(5000, protoTCP, child, set16(6, 0x0001)), DropGSOFragment},
		{"TSO without a TCP header", with(tso(1360), func(h *VnetHeader) { h.HdrLen = 0 }), ipv4(39, protoTCP, child), DropGSOHeader},
		{"TSO, TCP header of 4 words", tso(1360), ipv4(5000, protoTCP, child, set(32, 4<<4)), DropGSOHeader},
		{"TSO, TCP header beyond the packet", tso(1360), ipv4(50, protoTCP, child, set(32, 15<<4)), DropGSOHeader},
		{"TSO, checksum elsewhere", with(tso(1360), func(h *VnetHeader) { h.CsumOffset = 4 }), ipv4(5000, protoTCP, child), DropGSOHeader},
		{"TSO, checksum of something else", with(tso(1360), func(h *VnetHeader) { h.CsumStart = 24 }), ipv4(5000, protoTCP, child), DropGSOHeader},
		{"amplification", tso(1), ipv4(60000, protoTCP, child), DropGSOSize},
		{"no segment size", tso(0), ipv4(5000, protoTCP, child), DropGSOSize},
		{"UDP amplification", uso(1), ipv4(28+128, protoUDP, child), DropGSOSize},
		{"too many datagrams", uso(100), ipv4(28+12801, protoUDP, child), DropGSOSize},
	}
	seen := map[Drop]bool{}
	c := Check{MTUBytes: mtu, Source: child}
	for _, tt := range tests {
		b := append(tt.h.Append(nil), tt.p...)
		if ParseVnet(b) != tt.h {
			t.Errorf("%s: header %+v is read as %+v", tt.name, tt.h, ParseVnet(b))
		}
		if got := c.Vnet(b); got != tt.want {
			t.Errorf("%s: header %+v, packet of %d bytes: got %s, want %s", tt.name, tt.h, len(tt.p), got, tt.want)
		}
		seen[tt.want] = true
		if tt.h == (VnetHeader{}) {
			if got := c.Plain(tt.p); got != tt.want {
				t.Errorf("%s: without header: got %s, want %s", tt.name, got, tt.want)
			}
		}
	}
	for d := DropNone; d < DropNoOffload; d++ {
		if !seen[d] {
			t.Errorf("no packet is refused as %s", d)
		}
	}
	any := Check{MTUBytes: mtu}
	if got := any.Plain(ipv4(100, 1, other)); got != DropNone {
		t.Errorf("any source: got %s, want none", got)
	}
	if got := new(Check).Plain(ipv4(20, 1, child)); got == DropNone {
		t.Error("the zero Check lets a packet through")
	}
}

func TestDropNames(t *testing.T) {
	seen := map[string]bool{}
	for d := range NumDrops {
		if n := d.String(); n == "" || n == "unknown" || seen[n] {
			t.Errorf("drop %d is called %q", d, n)
		}
		seen[d.String()] = true
	}
	if NumDrops.String() != "unknown" {
		t.Error("a drop out of range has a name")
	}
}

func TestOffloadsAnd(t *testing.T) {
	for _, tt := range []struct{ a, b, want Offloads }{
		{AllOffloads, AllOffloads, AllOffloads},
		{AllOffloads, 0x0f, 0x0f},
		{AllOffloads, 0, 0},
		{AllOffloads, OffloadCsum, OffloadCsum},
		{AllOffloads, AllOffloads &^ OffloadCsum, 0},
		{AllOffloads, AllOffloads &^ OffloadUSO6, 0x0f},
		{OffloadCsum | OffloadECN, AllOffloads, OffloadCsum},
		{OffloadCsum | OffloadTSO4 | OffloadECN, AllOffloads, OffloadCsum | OffloadTSO4 | OffloadECN},
		{0xffffffff, 0xffffffff, AllOffloads}, // never UFO
	} {
		if got := tt.a.And(tt.b); got != tt.want {
			t.Errorf("%#x and %#x: got %s, want %s", uint32(tt.a), uint32(tt.b), got, tt.want)
		}
		if got := tt.b.And(tt.a); got != tt.want {
			t.Errorf("%#x and %#x: got %s, want %s", uint32(tt.b), uint32(tt.a), got, tt.want)
		}
	}
}

func FuzzVnet(f *testing.F) {
	for _, p := range [][]byte{
		append(VnetHeader{}.Append(nil), ipv4(100, protoUDP, child)...),
		append(tso(1360).Append(nil), ipv4(5000, protoTCP, child)...),
		append(uso(1200).Append(nil), ipv4(5000, protoUDP, child)...),
		append(tso(1).Append(nil), ipv4(5000, protoTCP, child)...),
		append(VnetHeader{VnetNeedsCsum, 0, 0, 0, 20, 6}.Append(nil), ipv4(60, protoUDP, child)...),
	} {
		f.Add(p, uint16(1400))
	}
	f.Fuzz(func(t *testing.T, b []byte, mtu uint16) {
		if len(b) < VnetHeaderBytes {
			return
		}
		c := Check{MTUBytes: int(mtu), Source: child}
		h, p := ParseVnet(b), b[VnetHeaderBytes:]
		if !bytes.Equal(h.Append(nil), b[:VnetHeaderBytes]) {
			t.Fatalf("header %x is written as %x", b[:VnetHeaderBytes], h.Append(nil))
		}
		if c.Plain(p) == DropNone && (len(p) > int(mtu) || !fromChild(p)) {
			t.Fatalf("plain packet %x passed at MTU %d", p, mtu)
		}
		if c.Vnet(b) != DropNone {
			return
		}
		// What must hold of whatever passed, said another way than the check does.
		if !fromChild(p) || int(h.HdrLen) > len(p) {
			t.Fatalf("%x passed", b)
		}
		ihl := int(p[0]&15) * 4
		if h.Flags&VnetNeedsCsum != 0 {
			if at := int(h.CsumStart) + int(h.CsumOffset); int(h.CsumStart) < ihl || at+2 > len(p) {
				t.Fatalf("%x passed: checksum at %d", b, at)
			}
		}
		if h.GSOType == GSONone {
			if len(p) > int(mtu) {
				t.Fatalf("%d bytes passed at MTU %d", len(p), mtu)
			}
			return
		}
		if h.Flags&VnetNeedsCsum == 0 || h.GSOSize < MinGSOBytes || ihl+8+int(h.GSOSize) > int(mtu) {
			t.Fatalf("header %+v passed at MTU %d", h, mtu)
		}
		if n := len(p) / int(h.GSOSize); n > 65535/MinGSOBytes {
			t.Fatalf("%d segments passed", n)
		}
	})
}

func fromChild(p []byte) bool {
	s := child.As4()
	return len(p) >= 20 && p[0]>>4 == 4 && bytes.Equal(p[12:16], s[:]) && int(p[2])<<8|int(p[3]) == len(p)
}
