package topo

import (
	"fmt"
	"net/netip"
	"strings"

	"mknet/spec/endpoint"
)

// Numbers that mark or order what we put into routing tables.
const (
	// Protocol marks our routes and rules (`proto 109`). 109 is not assigned in
	// /etc/iproute2/rt_protos; ip-route(8): values from 5 up are free for use.
	Protocol = 109
	// RouteTableBase is table T of the first attachment of a namespace, and the
	// priority of its rule: before "main" (32766), after "local" (0).
	RouteTableBase = 7300
	// FallbackMetric orders the unreachable default of table T behind the real one.
	FallbackMetric = 65535
	// QdiscMajor is the major number of our queueing disciplines, "mk".
	QdiscMajor = 0x6d6b
)

// Kinds of objects, as in endpoint.Fault.Kind.
const (
	KindVeth    = "veth"    // the host veth; makes the pair
	KindPeer    = "peer"    // its other end, in the namespace
	KindTun     = "tun"     // the TUN in the namespace
	KindMTU     = "mtu"     // of one device
	KindSysctl  = "sysctl"  // one value, set
	KindForward = "forward" // ip_forward of the namespace, counted between attachments
	KindAddress = "address" // one address of one device
	KindRule    = "rule"    // `iif <TUN> lookup T`
	KindRoute   = "route"   // one route
	KindQdisc   = "qdisc"   // a token bucket, where a bandwidth is asked for
	KindUp      = "link"    // a device is up

	// Of ordinary pods only.
	KindPod      = "pod"       // the pod's end of the veth, under its final name
	KindMAC      = "mac"       // its hardware address
	KindGroup    = "group"     // the device group of the host veth
	KindRPFilter = "rp_filter" // of the host veth: not strict, whatever conf.all says
	KindNeigh    = "neighbour" // a permanent entry
)

// Step describes one object of a plan. Which fields count depends on Kind.
type Step struct {
	Kind  string
	Where string // endpoint.InHost or endpoint.InNamespace
	Link  string // the device that the object is, or hangs on; empty for none

	Peer      string       // veth: name of the other end; pod: its name before
	MTUBytes  int          // devices, mtu; route: of the route, 0 for none
	Prefix    netip.Prefix // address: with its host bits; route: destination
	Via, Src  netip.Addr   // route; neighbour: Via is its address
	Table     uint32       // route, rule; 0 is main
	Priority  uint32       // route: metric; rule: priority
	Blackhole bool         // route: unreachable, has no device
	Path      string       // sysctl, forward: below /proc/sys
	Value     string       // sysctl, forward
	Optional  bool         // sysctl: a missing file is fine
	Shared    bool         // sysctl: others rely on it too, never taken back
	RateBits  uint64       // qdisc: bits per second
	BurstBits uint64       // qdisc: bits

	MAC           endpoint.MAC // mac, neighbour
	Group         uint32       // group
	OnLink        bool         // route: scope link
	NoPrefixRoute bool         // address: the kernel adds no route to its prefix
}

// Plan is everything that one endpoint needs, in the order of building. The
// firewall is committed between Devices and Live.
type Plan struct {
	Devices []Step
	Live    []Step
}

// PlanFor derives the plan from a record. It is pure.
func PlanFor(ep endpoint.Endpoint) Plan {
	if ep.Mode == endpoint.Veth {
		return podPlan(ep)
	}
	const host, ns = endpoint.InHost, endpoint.InNamespace
	var p Plan
	dev := func(s Step) { p.Devices = append(p.Devices, s) }
	live := func(s Step) { p.Live = append(p.Live, s) }

	dev(Step{Kind: KindVeth, Where: host, Link: ep.HostLink, Peer: ep.PeerLink, MTUBytes: ep.MTUBytes})
	dev(Step{Kind: KindPeer, Where: ns, Link: ep.PeerLink, Peer: ep.HostLink})
	dev(Step{Kind: KindTun, Where: ns, Link: ep.IfName, MTUBytes: ep.MTUBytes})
	dev(Step{Kind: KindMTU, Where: host, Link: ep.HostLink, MTUBytes: ep.MTUBytes})
	dev(Step{Kind: KindMTU, Where: ns, Link: ep.PeerLink, MTUBytes: ep.MTUBytes})
	dev(Step{Kind: KindMTU, Where: ns, Link: ep.IfName, MTUBytes: ep.MTUBytes})

	// IPv6 is off until dual stack is built. A kernel without IPv6, and a device
	// whose MTU is below 1280 (RFC 8200, section 5), have no such file.
	dev(sysctl(host, ep.HostLink, "ipv6", "disable_ipv6", "1").optional())
	dev(sysctl(ns, ep.PeerLink, "ipv6", "disable_ipv6", "1").optional())
	dev(sysctl(ns, ep.IfName, "ipv6", "disable_ipv6", "1").optional())
	// Per interface, never globally: a packet is forwarded when the interface
	// that it comes in by forwards (net/ipv4/route.c, ip_route_input_slow).
	dev(sysctl(host, ep.HostLink, "ipv4", "forwarding", "1"))
	if ep.Egress != "" {
		dev(sysctl(host, ep.Egress, "ipv4", "forwarding", "1").shared())
	}
	// Only one attachment has the main default route, so that packets from the
	// world come in by the others "by the wrong interface": loose. The kernel takes the larger of
	// conf.all and conf.<device> (Documentation/networking/ip-sysctl.rst), 2 is the largest.
	dev(sysctl(ns, ep.PeerLink, "ipv4", "rp_filter", "2"))

	dev(Step{Kind: KindAddress, Where: host, Link: ep.HostLink, Prefix: netip.PrefixFrom(ep.TransitHost, endpoint.SlotBits)})
	dev(Step{Kind: KindAddress, Where: ns, Link: ep.PeerLink, Prefix: netip.PrefixFrom(ep.TransitPeer, endpoint.SlotBits)})
	dev(Step{Kind: KindAddress, Where: ns, Link: ep.IfName, Prefix: netip.PrefixFrom(ep.Gateway, endpoint.SlotBits)})

	// The fall-back and the rule stand before anything can flow: what comes from
	// the TUN never sees the namespace's main table.
	dev(Step{Kind: KindRoute, Where: ns, Prefix: anywhere, Table: ep.RouteTable, Priority: FallbackMetric, Blackhole: true})
	dev(Step{Kind: KindRule, Where: ns, Link: ep.IfName, Table: ep.RouteTable, Priority: ep.RouteTable})

	if b := ep.Bandwidth; b != nil {
		if b.IngressRate != 0 {
			dev(Step{Kind: KindQdisc, Where: host, Link: ep.HostLink, MTUBytes: ep.MTUBytes, RateBits: b.IngressRate, BurstBits: b.IngressBurst})
		}
		if b.EgressRate != 0 {
			dev(Step{Kind: KindQdisc, Where: ns, Link: ep.PeerLink, MTUBytes: ep.MTUBytes, RateBits: b.EgressRate, BurstBits: b.EgressBurst})
		}
	}
	dev(Step{Kind: KindForward, Where: ns, Link: ep.PeerLink, Path: "net/ipv4/ip_forward", Value: "1"})

	live(Step{Kind: KindUp, Where: host, Link: ep.HostLink})
	live(Step{Kind: KindUp, Where: ns, Link: ep.PeerLink})
	live(Step{Kind: KindUp, Where: ns, Link: ep.IfName})
	// The kernel makes it with the address. It is named here because plugins that
	// come later in a chain take it away (sbr moves a link's routes to a table of its
	// own), and the way back to the child goes with it.
	live(Step{Kind: KindRoute, Where: ns, Link: ep.IfName, Prefix: ep.Subnet, Src: ep.Gateway})
	live(Step{Kind: KindRoute, Where: ns, Link: ep.PeerLink, Prefix: anywhere, Table: ep.RouteTable, Via: ep.TransitHost})
	if ep.MainDefault {
		live(mainDefault(ep))
	}
	live(Step{Kind: KindRoute, Where: host, Link: ep.HostLink, Prefix: ep.Subnet, Via: ep.TransitPeer, Src: ep.EgressAddr})
	return p
}

var anywhere = netip.PrefixFrom(netip.IPv4Unspecified(), 0)

func mainDefault(ep endpoint.Endpoint) Step {
	if ep.Mode == endpoint.Veth {
		return Step{Kind: KindRoute, Where: endpoint.InNamespace, Link: ep.IfName, Prefix: anywhere, Via: ep.Gateway, MTUBytes: ep.MTUBytes}
	}
	return Step{Kind: KindRoute, Where: endpoint.InNamespace, Link: ep.PeerLink, Prefix: anywhere, Via: ep.TransitHost}
}

func sysctl(where, link, family, key, value string) Step {
	return Step{Kind: KindSysctl, Where: where, Link: link, Path: "net/" + family + "/conf/" + link + "/" + key, Value: value}
}

func (s Step) optional() Step { s.Optional = true; return s }
func (s Step) shared() Step   { s.Shared = true; return s }

// Name is what `ip` or `sysctl` call the object. Sysctls are written with
// slashes, which sysctl(8) accepts and which a dot in a device's name survives.
func (s Step) Name() string {
	switch s.Kind {
	case KindSysctl, KindForward, KindRPFilter:
		return s.Path
	case KindNeigh:
		return s.Via.String() + " dev " + s.Link
	case KindAddress:
		return s.Prefix.String() + " dev " + s.Link
	case KindRule:
		return fmt.Sprintf("iif %s lookup %d", s.Link, s.Table)
	case KindRoute:
		return s.route()
	}
	return s.Link
}

// route is the route as `ip route` takes it, without source and protocol.
func (s Step) route() string {
	var b strings.Builder
	if s.Blackhole {
		b.WriteString("unreachable ")
	}
	if s.Prefix == anywhere {
		b.WriteString("default")
	} else {
		b.WriteString(s.Prefix.String())
	}
	if s.Via.IsValid() {
		b.WriteString(" via " + s.Via.String())
	}
	if s.Link != "" {
		b.WriteString(" dev " + s.Link)
	}
	if s.Table != 0 {
		fmt.Fprintf(&b, " table %d", s.Table)
	}
	return b.String()
}

// Repairable reports whether making the object right is safe under a running
// pump: all but making a device.
func (s Step) Repairable() bool {
	switch s.Kind {
	case KindVeth, KindPeer, KindTun, KindPod:
		return false
	}
	return true
}

// Look is a command that shows the object, without the part that enters the
// namespace.
func (s Step) Look() string {
	switch s.Kind {
	case KindSysctl, KindForward, KindRPFilter:
		return "sysctl " + s.Path
	case KindNeigh:
		return "ip neigh show dev " + s.Link
	case KindAddress:
		return "ip addr show dev " + s.Link
	case KindRule:
		return "ip rule show"
	case KindRoute:
		switch {
		case s.Table != 0:
			return fmt.Sprintf("ip route show table %d", s.Table)
		case s.Where == endpoint.InNamespace:
			return "ip route show"
		}
		return "ip route show " + s.Prefix.String()
	case KindQdisc:
		return "tc qdisc show dev " + s.Link
	}
	return "ip -d link show " + s.Link
}

// String is one line of a plan, for operators and golden files.
func (s Step) String() string {
	line := s.Where + ": " + s.Kind + " " + s.Name()
	switch s.Kind {
	case KindVeth:
		line += fmt.Sprintf(" peer %s mtu %d", s.Peer, s.MTUBytes)
	case KindTun, KindMTU:
		line += fmt.Sprintf(" mtu %d", s.MTUBytes)
	case KindSysctl, KindForward:
		line += " = " + s.Value
	case KindRPFilter:
		line += " = 0 (2 where conf/all has 1)"
	case KindPod:
		line += " made as " + s.Peer
	case KindMAC, KindNeigh:
		line += " " + s.MAC.String()
	case KindGroup:
		line += fmt.Sprintf(" %#x", s.Group)
	case KindAddress:
		if s.NoPrefixRoute {
			line += " noprefixroute"
		}
	case KindUp:
		line += " up"
	case KindRule:
		line += fmt.Sprintf(" priority %d", s.Priority)
	case KindRoute:
		if s.Priority != 0 {
			line += fmt.Sprintf(" metric %d", s.Priority)
		}
		if s.Src.IsValid() {
			line += " src " + s.Src.String()
		}
		if s.OnLink {
			line += " scope link"
		}
		if s.MTUBytes != 0 {
			line += fmt.Sprintf(" mtu %d", s.MTUBytes)
		}
	case KindQdisc:
		line += fmt.Sprintf(" rate %d bit/s burst %d bit", s.RateBits, s.burstBits())
	}
	if s.Optional {
		line += " (if there is such a file)"
	}
	if s.Shared {
		line += " (shared, stays)"
	}
	return line
}
