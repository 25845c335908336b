package topo

import (
	"net/netip"

	"mknet/spec/endpoint"
)

// podPlan is the plan of an ordinary pod (mode veth): a veth pair, and routes by
// a gateway that is a neighbour behind it. See spec/topology.md.
func podPlan(ep endpoint.Endpoint) Plan {
	const host, ns = endpoint.InHost, endpoint.InNamespace
	var p Plan
	dev := func(s Step) { p.Devices = append(p.Devices, s) }
	live := func(s Step) { p.Live = append(p.Live, s) }

	// The pod's end gets its final name once it is in the namespace and marked: two
	// pods that are made at once both want "eth0".
	dev(Step{Kind: KindVeth, Where: host, Link: ep.HostLink, Peer: ep.Generation.TempLink(), MTUBytes: ep.MTUBytes})
	dev(Step{Kind: KindPod, Where: ns, Link: ep.IfName, Peer: ep.Generation.TempLink()})
	dev(Step{Kind: KindMTU, Where: host, Link: ep.HostLink, MTUBytes: ep.MTUBytes})
	dev(Step{Kind: KindMTU, Where: ns, Link: ep.IfName, MTUBytes: ep.MTUBytes})
	dev(Step{Kind: KindMAC, Where: ns, Link: ep.IfName, MAC: ep.PodMAC()})
	dev(Step{Kind: KindGroup, Where: host, Link: ep.HostLink, Group: ep.LinkGroup()})

	dev(sysctl(host, ep.HostLink, "ipv6", "disable_ipv6", "1").optional())
	dev(sysctl(ns, ep.IfName, "ipv6", "disable_ipv6", "1").optional())
	dev(sysctl(host, ep.HostLink, "ipv4", "forwarding", "1"))
	if ep.Egress != "" {
		dev(sysctl(host, ep.Egress, "ipv4", "forwarding", "1").shared())
	}
	dev(Step{Kind: KindRPFilter, Where: host, Link: ep.HostLink, Path: "net/ipv4/conf/" + ep.HostLink + "/rp_filter"})

	// The gateway's address is on every pod's host veth, so that the host answers
	// for it, where no program on the link does, and signs its ICMP errors with it.
	dev(Step{Kind: KindAddress, Where: host, Link: ep.HostLink, Prefix: single(ep.Gateway)})
	// Without the prefix route: everything but the gateway is behind the gateway.
	dev(Step{Kind: KindAddress, Where: ns, Link: ep.IfName, Prefix: netip.PrefixFrom(ep.Address, ep.Subnet.Bits()), NoPrefixRoute: true})
	if b := ep.Bandwidth; b != nil {
		if b.IngressRate != 0 {
			dev(Step{Kind: KindQdisc, Where: host, Link: ep.HostLink, MTUBytes: ep.MTUBytes, RateBits: b.IngressRate, BurstBits: b.IngressBurst})
		}
		if b.EgressRate != 0 {
			dev(Step{Kind: KindQdisc, Where: ns, Link: ep.IfName, MTUBytes: ep.MTUBytes, RateBits: b.EgressRate, BurstBits: b.EgressBurst})
		}
	}

	live(Step{Kind: KindUp, Where: host, Link: ep.HostLink})
	live(Step{Kind: KindUp, Where: ns, Link: ep.IfName})
	// Permanent, because the kernel's table of neighbours is one for all namespaces
	// and holds 1024 that are not (net/core/neighbour.c, gc_thresh3).
	live(Step{Kind: KindNeigh, Where: ns, Link: ep.IfName, Via: ep.Gateway, MAC: ep.Generation.HostMAC()})
	live(Step{Kind: KindNeigh, Where: host, Link: ep.HostLink, Via: ep.Address, MAC: ep.PodMAC()})
	live(Step{Kind: KindRoute, Where: ns, Link: ep.IfName, Prefix: single(ep.Gateway), OnLink: true})
	for _, r := range ep.PodRoutes() {
		if r == anywhere {
			live(mainDefault(ep))
		} else {
			live(Step{Kind: KindRoute, Where: ns, Link: ep.IfName, Prefix: r, Via: ep.Gateway, MTUBytes: ep.MTUBytes})
		}
	}
	live(Step{Kind: KindRoute, Where: host, Link: ep.HostLink, Prefix: single(ep.Address), Src: ep.EgressAddr, OnLink: true})
	return p
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
