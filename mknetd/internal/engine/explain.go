package engine

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"mknet/mknetd/internal/conntrack"
	"mknet/mknetd/internal/datapath"
	"mknet/mknetd/internal/explain"
	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

// Explain walks the way of a packet by the live state. It changes nothing.
func (e *Engine) Explain(ctx context.Context, req api.WayRequest) (api.Explanation, error) {
	from, to, err := e.ends(req.From, req.To)
	if err != nil {
		return api.Explanation{}, err
	}
	if req.SourcePort, err = onePort("from", req.From, from.port, req.SourcePort); err != nil {
		return api.Explanation{}, err
	}
	if req.Port, err = onePort("to", req.To, to.port, req.Port); err != nil {
		return api.Explanation{}, err
	}
	protocol, err := checkWay(req)
	if err != nil {
		return api.Explanation{}, err
	}
	g := gathering{e: e, snap: explain.Snapshot{Protocol: protocol, Port: req.Port, SourcePort: req.SourcePort, SizeBytes: req.SizeBytes}}
	defer g.close()
	if g.snap.From, g.fromNS, err = g.party(ctx, from); err != nil {
		return api.Explanation{}, err
	}
	if g.snap.To, g.toNS, err = g.party(ctx, to); err != nil {
		return api.Explanation{}, err
	}
	if g.snap.From.Addr == g.snap.To.Addr {
		return api.Explanation{}, api.Errorf(api.InvalidArgument, "from and to are both %s", g.snap.From.Addr)
	}
	if g.snap.From.Endpoint == nil && g.snap.To.Endpoint == nil {
		return api.Explanation{}, api.Errorf(api.InvalidArgument, "neither %s nor %s is an endpoint of this node (see `mknetd endpoints`)", req.From, req.To)
	}
	if err := g.gather(ctx); err != nil {
		return api.Explanation{}, err
	}
	return explain.Decide(g.snap), nil
}

// smallestPacket is that of an IP header and 8 bytes behind it.
const smallestPacket = 28

// checkWay returns the protocol that is meant.
func checkWay(req api.WayRequest) (string, error) {
	protocol := req.Protocol
	if protocol == "" {
		protocol = "icmp"
		if req.Port != 0 {
			protocol = "tcp"
		}
	}
	switch {
	case protocol != "icmp" && protocol != "tcp" && protocol != "udp":
		return "", api.Errorf(api.InvalidArgument, "proto %q: must be icmp, tcp or udp", req.Protocol)
	case (protocol == "icmp") != (req.Port == 0):
		return "", api.Errorf(api.InvalidArgument, "proto %s with port %d: tcp and udp need a port, icmp has none", protocol, req.Port)
	case req.Port < 0 || req.Port > 65535:
		return "", api.Errorf(api.InvalidArgument, "port %d: must be 1 to 65535", req.Port)
	case req.SourcePort < 0 || req.SourcePort > 65535:
		return "", api.Errorf(api.InvalidArgument, "source port %d: must be 1 to 65535", req.SourcePort)
	case req.SizeBytes != 0 && (req.SizeBytes < smallestPacket || req.SizeBytes > 65535):
		return "", api.Errorf(api.InvalidArgument, "size %d: must be %d to 65535 bytes, IP header included", req.SizeBytes, smallestPacket)
	}
	return protocol, nil
}

// gathering reads what decides, in the namespaces of both ends and in the host.
type gathering struct {
	e            *Engine
	snap         explain.Snapshot
	fromNS, toNS *netns.Namespace  // nil: no endpoint, or its namespace is gone
	flows        []conntrack.Entry // of both ends
}

func (g *gathering) close() {
	for _, ns := range []*netns.Namespace{g.fromNS, g.toNS} {
		if ns != nil {
			ns.Close()
		}
	}
}

// party is one end, with what only an endpoint has.
func (g *gathering) party(ctx context.Context, en end) (p explain.Party, ns *netns.Namespace, err error) {
	p.Addr, p.Endpoint = en.addr, en.ep
	if en.ep == nil {
		return p, nil, nil
	}
	if ns, err = g.e.reopen(ctx, *en.ep); err != nil {
		return p, nil, err
	}
	return p, ns, g.endpoint(ctx, &p, ns)
}

// endpoint reads what only an endpoint has.
func (g *gathering) endpoint(ctx context.Context, p *explain.Party, ns *netns.Namespace) (err error) {
	ep := *p.Endpoint
	if p.Faults, err = g.e.faults(ctx, ep); err != nil {
		return err
	}
	flows, err := conntrack.List(ctx, ep.Address)
	if err != nil {
		return err
	}
	p.Flows, g.flows = len(flows), append(g.flows, flows...)
	if ns != nil {
		space, err := g.e.host.Look(ctx, ns)
		if err != nil {
			return err
		}
		p.Space = &space
		if p.Rules, p.Chains, err = g.e.firewall.DumpIn(ctx, ns); err != nil {
			return err
		}
	}
	if err := g.programs(p); err != nil {
		return err
	}
	if ep.Mode == endpoint.Veth {
		return nil
	}
	switch shim := g.e.liveShim(ep); {
	case ep.Binding == nil:
		p.Shim = "the endpoint is not bound to a sandbox: nobody carries packets"
	case ep.Binding.Shim == nil:
		p.Shim = "no mk-shim has attached for sandbox " + ep.Binding.Sandbox.String() + ": nobody carries packets"
	case shim == nil:
		p.Shim = "mk-shim (pid " + processName(*ep.Binding.Shim) + ") has ended: nobody carries packets"
	case p.Space != nil && p.Space.Links[ep.IfName].Up && !p.Space.Links[ep.IfName].Carrier:
		p.Shim = processName(*shim) + " lives and holds no queue of the TUN: nobody carries packets"
	}
	return nil
}

// programs reads what the data path has of an endpoint.
func (g *gathering) programs(p *explain.Party) error {
	if p.Endpoint.Mode != endpoint.Veth && !g.e.ebpf.children.Load() {
		return nil
	}
	dp := g.e.datapath()
	if dp == nil {
		return nil
	}
	view, err := dp.Look(*p.Endpoint)
	if err != nil {
		return err
	}
	p.Path = &view
	point, err := dp.Policy().ReadPoint(p.Addr)
	if err != nil {
		return fmt.Errorf("read the policy point of %s: %w", p.Addr, err)
	}
	p.Unjudged = point == nil
	p.Doubtful = !p.Unjudged && slices.ContainsFunc(p.Faults, func(f endpoint.Fault) bool { return f.Kind == kindPolicy })
	return nil
}

// gather asks the kernel for the ways there and back, and reads links and rules.
func (g *gathering) gather(ctx context.Context) (err error) {
	host := g.e.host
	s := &g.snap
	if s.Host, err = host.Look(ctx, nil); err != nil {
		return err
	}
	s.From.Local, s.To.Local = s.From.Endpoint == nil && s.Host.Has(s.From.Addr), s.To.Endpoint == nil && s.Host.Has(s.To.Addr)
	ask := func(to *topo.Way, ns *netns.Namespace, dst, src netip.Addr, in string) {
		if err == nil {
			*to, err = host.Way(ctx, ns, dst, src, in)
		}
	}
	none := netip.Addr{}
	ask(&s.Ways.ReversePath, nil, s.From.Addr, none, "")
	ask(&s.Ways.BackReversePath, nil, s.To.Addr, none, "")
	g.leave(ask, &s.Ways.Leave, s.From, g.fromNS, s.To.Addr)
	g.leave(ask, &s.Ways.BackLeave, s.To, g.toNS, s.From.Addr)
	g.cross(ask, &s.Ways.Host, s.From, s.To, s.Ways.ReversePath)
	g.cross(ask, &s.Ways.BackHost, s.To, s.From, s.Ways.BackReversePath)
	g.arrive(ask, &s.Ways.Arrive, s.To, g.toNS, s.From.Addr, false)
	g.arrive(ask, &s.Ways.BackArrive, s.From, g.fromNS, s.To.Addr, s.Ways.Leave.Local)
	if err != nil {
		return err
	}
	if s.Tables, err = g.e.firewall.Dump(ctx); err != nil {
		return err
	}
	if s.Others, err = ipt.BaseChains(); err != nil {
		return err
	}
	if err := g.existing(ctx); err != nil {
		return err
	}
	if err := g.policy(); err != nil {
		return err
	}
	flows := hostFlows()
	s.Full = flows.Limit > 0 && flows.Entries >= flows.Limit
	return nil
}

// protocols are the numbers of what Explain knows.
var protocols = map[string]policy.Protocol{"icmp": policy.ICMP, "tcp": policy.TCP, "udp": policy.UDP}

// ends are the ends of the flow that is asked for; ICMP has its identifier in both.
func (g *gathering) ends() (from, to netip.AddrPort) {
	s := &g.snap
	port := s.Port
	if s.Protocol == "icmp" {
		port = s.SourcePort
	}
	return netip.AddrPortFrom(s.From.Addr, uint16(s.SourcePort)), netip.AddrPortFrom(s.To.Addr, uint16(port))
}

// existing finds the flow that is asked for, by its source port, in the host's
// connection tracking and in the data path.
func (g *gathering) existing(ctx context.Context) (err error) {
	s := &g.snap
	from, to := g.ends()
	protocol := protocols[s.Protocol]
	if s.SourcePort == 0 {
		for _, e := range g.flows {
			if e.Protocol == uint8(protocol) && e.OrigSource.Addr() == from.Addr() && e.OrigDestination.Addr() == to.Addr() && (s.Port == 0 || e.OrigDestination == to) {
				s.Alike++
			}
		}
		return nil
	}
	s.Flow = flowOf(g.flows, protocol, from, to)
	for p, ns := range map[*explain.Party]*netns.Namespace{&s.From: g.fromNS, &s.To: g.toNS} {
		if len(p.Rules) == 0 {
			continue // then it tracks nothing, or nobody asks
		}
		var inside []conntrack.Entry
		err := ns.Do(func() (err error) {
			inside, err = conntrack.List(ctx, p.Addr)
			return err
		})
		if err != nil {
			return fmt.Errorf("namespace %s: %w", ns, err)
		}
		p.Flow = flowOf(inside, protocol, from, to)
	}
	if s.From.Path != nil && s.To.Path != nil {
		s.Path, err = g.e.datapath().Path(from, to, protocol)
	}
	return err
}

// flowOf returns the flow of the packet from a to b, nil where it is not known.
func flowOf(entries []conntrack.Entry, protocol policy.Protocol, a, b netip.AddrPort) *explain.Flow {
	e, reply, ok := conntrack.Of(entries, uint8(protocol), a, b)
	if !ok {
		return nil
	}
	return &explain.Flow{
		Reply: reply, Answered: e.Answered,
		OrigSource: e.OrigSource, OrigDestination: e.OrigDestination, ReplSource: e.ReplSource, ReplDestination: e.ReplDestination,
	}
}

// policy asks both enforcement points: whether the flow is admitted already, and
// what the documents say where it is not, or where they have changed since.
func (g *gathering) policy() error {
	s := &g.snap
	dp := g.e.ebpf.opened.Load()
	if dp == nil || g.e.ebpf.policy.Load() == nil {
		return nil
	}
	world, err := g.e.policyWorld()
	if err != nil {
		return err
	}
	from, to := g.ends()
	protocol := protocols[s.Protocol]
	ask := func(from, to *explain.Party, a, b netip.AddrPort) (points []api.PolicyPoint, err error) {
		packet := policy.Packet{Source: from.Addr, Destination: to.Addr, Protocol: uint8(protocol), DestinationPort: b.Port(), FromNode: from.Local}
		for _, at := range []struct {
			d policy.Direction
			p *explain.Party
		}{{policy.Egress, from}, {policy.Ingress, to}} {
			if at.p.Endpoint == nil || at.p.Path == nil {
				continue
			}
			var known *datapath.Admission
			if s.SourcePort != 0 {
				if known, err = dp.Policy().Admission(at.d, a, b, protocol); err != nil {
					return nil, err
				}
			}
			points = append(points, wirePoint(judgeKnown(world, at.d, at.p.Addr, packet, a.Port(), known)))
		}
		return points, nil
	}
	if s.Policy, err = ask(&s.From, &s.To, from, to); err != nil {
		return err
	}
	if from.Port() == 0 {
		from = netip.AddrPortFrom(from.Addr(), anyPort)
	}
	s.Answers, err = ask(&s.To, &s.From, to, from)
	return err
}

// anyPort stands for the source port of a flow that has none yet: one that Linux
// would choose (Documentation/networking/ip-sysctl.rst: ip_local_port_range).
const anyPort = 50000

// judgeKnown is the verdict on a packet whose flow policy may have admitted: one that
// was admitted under what applies now passes, another one is judged again as it began
// (spec/policy-datapath.md, "Conntrack").
func judgeKnown(world *policy.World, d policy.Direction, self netip.Addr, p policy.Packet, sourcePort uint16, known *datapath.Admission) policy.Decision {
	const flow policy.Layer = "conntrack"
	switch {
	case known == nil:
		return world.Judge(d, self, p)
	case known.Current:
		return policy.Decision{Direction: d, Endpoint: self, Allowed: true, Steps: []policy.Step{{Layer: flow, Reason: policy.ConntrackHit, Why: "the flow is admitted, and nothing that concerns it has changed since"}}}
	}
	as := d
	if known.Reply {
		as = policy.Egress + policy.Ingress - d
		p.Source, p.Destination, p.DestinationPort, p.FromNode = p.Destination, p.Source, sourcePort, false
	}
	p.FromNode = known.Probe
	again := world.Judge(as, self, p)
	again.Direction = d
	again.Steps = append([]policy.Step{{Layer: flow, Reason: policy.ConntrackOld, Why: "the flow was admitted before a change: judged again, as " + as.String()}}, again.Steps...)
	return again
}

type asking func(to *topo.Way, ns *netns.Namespace, dst, src netip.Addr, in string)

// leave is the way out of the sender's namespace: what a child sends comes in by
// the TUN, what a pod sends begins there.
func (g *gathering) leave(ask asking, to *topo.Way, from explain.Party, ns *netns.Namespace, dst netip.Addr) {
	switch {
	case ns == nil:
	case from.Endpoint.Mode == endpoint.Veth:
		ask(to, ns, dst, from.Addr, "")
	default:
		ask(to, ns, dst, from.Addr, from.Endpoint.IfName)
	}
}

// cross is the way through the host.
func (g *gathering) cross(ask asking, to *topo.Way, from, dst explain.Party, reverse topo.Way) {
	switch {
	case from.Endpoint != nil:
		ask(to, nil, dst.Addr, from.Addr, from.Endpoint.HostLink)
	case from.Local:
		ask(to, nil, dst.Addr, from.Addr, "")
	case reverse.Err != "":
		*to = topo.Way{Asked: true, Err: "where " + from.Addr.String() + " would come in: " + reverse.Err}
	default:
		ask(to, nil, dst.Addr, from.Addr, reverse.Dev)
	}
}

// arrive is the way into the receiver's namespace; inside says that the packet
// begins there.
func (g *gathering) arrive(ask asking, to *topo.Way, dst explain.Party, ns *netns.Namespace, src netip.Addr, inside bool) {
	if ns == nil {
		return
	}
	in := dst.Endpoint.PeerLink
	if dst.Endpoint.Mode == endpoint.Veth {
		in = dst.Endpoint.IfName
	}
	if inside {
		in = ""
	}
	ask(to, ns, dst.Addr, src, in)
}
