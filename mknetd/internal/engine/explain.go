package engine

import (
	"context"
	"net/netip"
	"slices"
	"strings"

	"mknet/mknetd/internal/conntrack"
	"mknet/mknetd/internal/datapath"
	"mknet/mknetd/internal/explain"
	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Explain walks the way of a packet by the live state. It changes nothing.
func (e *Engine) Explain(ctx context.Context, req api.WayRequest) (api.Explanation, error) {
	protocol := req.Protocol
	if protocol == "" {
		protocol = "icmp"
		if req.Port != 0 {
			protocol = "tcp"
		}
	}
	switch {
	case protocol != "icmp" && protocol != "tcp" && protocol != "udp":
		return api.Explanation{}, api.Errorf(api.InvalidArgument, "proto %q: must be icmp, tcp or udp", req.Protocol)
	case (protocol == "icmp") != (req.Port == 0):
		return api.Explanation{}, api.Errorf(api.InvalidArgument, "proto %s with port %d: tcp and udp need a port, icmp has none", protocol, req.Port)
	case req.Port < 0 || req.Port > 65535:
		return api.Explanation{}, api.Errorf(api.InvalidArgument, "port %d: must be 1 to 65535", req.Port)
	}
	g := gathering{e: e, snap: explain.Snapshot{Protocol: protocol, Port: req.Port}}
	defer g.close()
	var err error
	if g.snap.From, g.fromNS, err = g.party(ctx, "from", req.From); err != nil {
		return api.Explanation{}, err
	}
	if g.snap.To, g.toNS, err = g.party(ctx, "to", req.To); err != nil {
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

// gathering reads what decides, in the namespaces of both ends and in the host.
type gathering struct {
	e            *Engine
	snap         explain.Snapshot
	fromNS, toNS *netns.Namespace // nil: no endpoint, or its namespace is gone
}

func (g *gathering) close() {
	for _, ns := range []*netns.Namespace{g.fromNS, g.toNS} {
		if ns != nil {
			ns.Close()
		}
	}
}

// party finds who is meant: an address, or an endpoint by the digits of its
// generation, its container ID or its attachment.
func (g *gathering) party(ctx context.Context, which, text string) (p explain.Party, ns *netns.Namespace, err error) {
	addr, addrErr := netip.ParseAddr(text)
	if addrErr == nil && !addr.Is4() {
		return p, nil, api.Errorf(api.InvalidArgument, "%s %q: must be IPv4", which, text)
	}
	all, err := g.e.store.List()
	if err != nil {
		return p, nil, err
	}
	var found []endpoint.Endpoint
	for _, ep := range all {
		if addrErr == nil && ep.Address == addr || addrErr != nil && text != "" &&
			(ep.Attachment.String() == text || ep.ContainerID == text || len(text) >= 4 && strings.HasPrefix(ep.Generation.String(), text)) {
			found = append(found, ep)
		}
	}
	switch {
	case len(found) > 1:
		return p, nil, api.Errorf(api.InvalidArgument, "%s %q: names %d endpoints, among them %s and %s", which, text, len(found), found[0].Generation, found[1].Generation)
	case len(found) == 0 && addrErr != nil:
		return p, nil, api.Errorf(api.InvalidArgument, "%s %q: is neither an IPv4 address nor an endpoint (see `mknetd endpoints`)", which, text)
	case len(found) == 0:
		p.Addr = addr
		return p, nil, nil
	}
	ep := found[0]
	p.Addr, p.Endpoint = ep.Address, &ep
	if ns, err = g.e.reopen(ctx, ep); err != nil {
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
	if p.Flows, err = conntrack.Count(ctx, ep.Address); err != nil {
		return err
	}
	if ns != nil {
		space, err := g.e.host.Look(ctx, ns)
		if err != nil {
			return err
		}
		p.Space = &space
	}
	if ep.Mode == endpoint.Veth {
		dp := g.e.datapath() != nil
		bad := func(kind string) bool {
			return slices.ContainsFunc(p.Faults, func(f endpoint.Fault) bool { return f.Kind == kind })
		}
		p.Programs, p.Entry = dp && !bad(datapath.KindAttachment), dp && !bad(datapath.KindEntry)
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
	if g.e.ebpf.policy.Load() != nil {
		says, err := g.e.ExplainPolicy(ctx, api.ExplainRequest{From: s.From.Addr.String(), To: s.To.Addr.String(), Protocol: s.Protocol, Port: uint16(s.Port)})
		if err != nil {
			return err
		}
		for _, p := range says.Points {
			// What the node itself sends may be let past (spec/policy.md, "Probes").
			if s.From.Local && g.e.cfg.NodeProbes && p.Direction == "ingress" {
				continue
			}
			s.Policy = append(s.Policy, p)
		}
	}
	flows := hostFlows()
	s.Full = flows.Limit > 0 && flows.Entries >= flows.Limit
	return nil
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
