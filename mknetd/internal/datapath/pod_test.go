package datapath

import (
	"net/netip"

	"mknet/spec/endpoint"
)

var gatewayAddr = netip.MustParseAddr("10.9.0.1")

// pod is the record of an ordinary pod, fresh.
func pod(addr string, mtuBytes int) endpoint.Endpoint {
	g := endpoint.NewGeneration()
	return endpoint.Endpoint{
		Generation: g,
		Mode:       endpoint.Veth,
		HostLink:   "lxc" + g.Short(),
		Address:    netip.MustParseAddr(addr),
		Gateway:    gatewayAddr,
		MTUBytes:   mtuBytes,
	}
}
