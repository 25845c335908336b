package datapath

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"mknet/spec/endpoint"
)

// The maps' keys and values, as bpf/maps.h has them; a test compares them with
// the objects' BTF. Numbers are in the machine's order, addresses as they are on
// the wire.

// address is an IPv4 address in network byte order: four bytes, as in a packet.
type address [4]byte

func addressOf(a netip.Addr) (address, error) {
	if !a.Is4() {
		return address{}, fmt.Errorf("address %q: must be IPv4", a)
	}
	return a.As4(), nil
}

// Flags of an endpoint, see enum in bpf/maps.h.
const (
	flagStackOnly uint16 = 1 << 0
	flagPassOther uint16 = 1 << 1
)

// endpointValue is struct endpoint.
type endpointValue struct {
	IfIndex uint32
	MTU     uint16 // bytes
	Flags   uint16
	PodMAC  [6]byte
	HostMAC [6]byte
	Gateway address
	ID      uint64 // see Identity
}

// attachmentValue is struct attachment.
type attachmentValue struct {
	Address address
	Name    [16]byte // NUL-terminated
}

func (v attachmentValue) link() string {
	for i, c := range v.Name {
		if c == 0 {
			return string(v.Name[:i])
		}
	}
	return string(v.Name[:])
}

// flowKey is struct flow_key: the side with the numerically lower address, read
// as a little-endian number, comes first.
type flowKey struct {
	Address  [2]address
	Port     [2][2]byte // as on the wire
	Protocol uint8
	_        [3]byte
}

// Values of flowValue.Path, enum path.
const (
	byRedirect uint8 = 1
	byStack    uint8 = 2
)

// flowValue is struct flow.
type flowValue struct {
	Seen uint32 // CLOCK_MONOTONIC in units of 2^30 ns
	Path uint8
	_    [3]byte
}

// Identity tells what the maps hold of one generation from that of another with
// the same address.
func Identity(g endpoint.Generation) uint64 { return binary.BigEndian.Uint64(g[:8]) }

// valueOf is what the endpoint map holds for ep, whose host end has the index.
func (d *Datapath) valueOf(ep endpoint.Endpoint, ifIndex int) (endpointValue, error) {
	gateway, err := addressOf(ep.Gateway)
	if err != nil {
		return endpointValue{}, fmt.Errorf("gateway: %w", err)
	}
	if ep.MTUBytes < 0 || ep.MTUBytes > endpoint.MaxMTU {
		return endpointValue{}, fmt.Errorf("mtu %d: must be 0 to %d bytes", ep.MTUBytes, endpoint.MaxMTU)
	}
	v := endpointValue{
		IfIndex: uint32(ifIndex),
		MTU:     uint16(ep.MTUBytes),
		PodMAC:  ep.PodMAC(),
		HostMAC: ep.Generation.HostMAC(),
		Gateway: gateway,
		ID:      Identity(ep.Generation),
	}
	if ep.Mode != endpoint.Veth || ep.Bandwidth != nil || d.isShaped(ifIndex) {
		// A queueing discipline shapes only what passes it.
		v.Flags |= flagStackOnly
	}
	if ep.Mode != endpoint.Veth || d.cfg.PassOther {
		v.Flags |= flagPassOther
	}
	return v, nil
}
