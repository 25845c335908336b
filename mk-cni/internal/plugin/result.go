package plugin

import (
	"bytes"
	"fmt"
	"net"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"mknet/spec/endpoint"
)

// noMACAddress stands for the MAC address that a TUN does not have: Podman takes
// no result whose interfaces inside the container lack one.
const noMACAddress = "00:00:00:00:00:00"

// result is what ADD prints, in the form of the caller's version. See
// spec/cni-result.md for what a caller may rely on.
func result(cniVersion string, ep endpoint.Endpoint, sandbox string) ([]byte, error) {
	mac := ep.Generation.HostMAC()
	inside := &types100.Interface{Name: ep.IfName, Mac: noMACAddress, Sandbox: sandbox}
	outside := &types100.Interface{Name: ep.HostLink, Mac: net.HardwareAddr(mac[:]).String()}
	if cniVersion == "1.1.0" { // the first with an interface's MTU
		inside.Mtu, outside.Mtu = ep.MTUBytes, ep.MTUBytes
	}
	r := &types100.Result{
		CNIVersion: types100.ImplementedSpecVersion,
		Interfaces: []*types100.Interface{inside, outside},
		IPs: []*types100.IPConfig{{
			Interface: types100.Int(0),
			Address:   ipNet(ep.Address, ep.Subnet.Bits()),
			Gateway:   ep.Gateway.AsSlice(),
		}},
		Routes: []*types.Route{{Dst: net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, GW: ep.Gateway.AsSlice()}},
		DNS:    types.DNS{Nameservers: ep.DNS.Nameservers, Domain: ep.DNS.Domain, Search: ep.DNS.Search, Options: ep.DNS.Options},
	}
	return document(cniVersion, r)
}

// podResult is what ADD prints for an ordinary pod: the host's end of the veth,
// then the pod's.
func podResult(cniVersion string, ep endpoint.Endpoint, sandbox string) ([]byte, error) {
	hostMAC := endpoint.MAC(ep.Generation.HostMAC())
	outside := &types100.Interface{Name: ep.HostLink, Mac: hostMAC.String()}
	inside := &types100.Interface{Name: ep.IfName, Mac: ep.PodMAC().String(), Sandbox: sandbox}
	gateway := ep.Gateway.AsSlice()
	routes := []*types.Route{{Dst: ipNet(ep.Gateway, 32)}}
	for _, dst := range ep.PodRoutes() {
		routes = append(routes, &types.Route{Dst: ipNet(dst.Addr(), dst.Bits()), GW: gateway, MTU: ep.MTUBytes})
	}
	if cniVersion == "1.1.0" { // the first with an interface's MTU and a route's
		inside.Mtu, outside.Mtu = ep.MTUBytes, ep.MTUBytes
	} else {
		for _, r := range routes {
			r.MTU = 0
		}
	}
	return document(cniVersion, &types100.Result{
		CNIVersion: types100.ImplementedSpecVersion,
		Interfaces: []*types100.Interface{outside, inside},
		IPs:        []*types100.IPConfig{{Interface: types100.Int(1), Address: ipNet(ep.Address, ep.Subnet.Bits()), Gateway: gateway}},
		Routes:     routes,
		DNS:        types.DNS{Nameservers: ep.DNS.Nameservers, Domain: ep.DNS.Domain, Search: ep.DNS.Search, Options: ep.DNS.Options},
	})
}

// document writes a result in the form of a version.
func document(cniVersion string, r *types100.Result) ([]byte, error) {
	in, err := r.GetAsVersion(cniVersion)
	if err != nil {
		return nil, fmt.Errorf("result in the form of version %s: %w", cniVersion, err)
	}
	var buf bytes.Buffer
	if err := in.PrintTo(&buf); err != nil {
		return nil, fmt.Errorf("result in the form of version %s: %w", cniVersion, err)
	}
	return append(buf.Bytes(), '\n'), nil
}
