package explain

import (
	"fmt"

	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// departs takes the packet from its sender to the host's end of the veth.
func (w *walker) departs() bool {
	switch {
	case w.from.Endpoint == nil && w.from.Local:
		return w.pass(endpoint.InHost, "process with "+w.from.Addr.String(), "sends", "ss -tunap")
	case w.from.Endpoint == nil:
		return w.pass(inWorld, w.from.Addr.String(), "sends; what lies beyond this host is not looked at", "")
	case w.from.Space == nil:
		return w.broken(endpoint.InHost, "netns "+w.from.Endpoint.Namespace.Path, "the endpoint's namespace is gone", "ip netns list")
	case w.from.child():
		return w.departsChild()
	}
	return w.departsPod()
}

func (w *walker) departsChild() bool {
	ep := w.from.Endpoint
	if !w.pass(inChild, fmt.Sprintf("route default via %s dev %s", ep.Gateway, endpoint.ChildLink+"0"), "as it was configured; mknetd cannot look into the child", "ip route (in the child)") ||
		!w.fits(inChild, ep, topo.Device{Name: endpoint.ChildLink + "0", MTUBytes: ep.MTUBytes}, topo.Way{}) || !w.pump(ep) {
		return false
	}
	if w.device(endpoint.InNamespace, w.from.Space, ep, ep.IfName) == nil {
		return false
	}
	p := w.packet()
	p.in, p.inGroup = ep.IfName, w.from.Space.Links[ep.IfName].Group
	if !w.inside(w.from, "PREROUTING", &p) {
		return false
	}
	look := in(ep, fmt.Sprintf("ip route get %s from %s iif %s", w.to.Addr, w.from.Addr, ep.IfName))
	switch {
	case w.leave.Err != "":
		return w.broken(endpoint.InNamespace, "route to "+w.to.Addr.String(), w.leave.Err, look)
	case w.leave.Local:
		return w.pass(endpoint.InNamespace, "route "+w.leave.Route, "is the namespace's own address: delivered here", look) && w.inside(w.from, "INPUT", &p)
	case w.leave.Dev != ep.PeerLink:
		return w.broken(endpoint.InNamespace, "route "+w.leave.Route, "leads out by "+w.leave.Dev+", not by "+ep.PeerLink, look)
	}
	if !w.pass(endpoint.InNamespace, "route "+w.leave.Route, "decides", look) {
		return false
	}
	out := w.device(endpoint.InNamespace, w.from.Space, ep, ep.PeerLink)
	if out == nil || !w.fits(endpoint.InNamespace, ep, *out, w.leave) {
		return false
	}
	p.out, p.outGroup = out.Name, out.Group
	if !w.inside(w.from, "FORWARD", &p) || !w.inside(w.from, "POSTROUTING", &p) || !w.veth(ep, ep.PeerLink, true) {
		return false
	}
	if via := w.leave.Via; via.IsValid() && !w.s.Host.Has(via) {
		return w.broken(endpoint.InHost, "address "+via.String(), "is missing on "+ep.HostLink+": nobody answers ARP for the namespace's router", "ip addr show dev "+ep.HostLink)
	}
	return true
}

// pump is the way between a child and its TUN.
func (w *walker) pump(ep *endpoint.Endpoint) bool {
	party := w.from
	if w.to.Endpoint == ep {
		party = w.to
	}
	if party.Shim != "" {
		return w.add(api.ExplainStep{Where: endpoint.InNamespace, Object: "pump of " + ep.IfName, Outcome: api.Dropped, Why: party.Shim, Inspect: "mknetd endpoints " + ep.Generation.Short()})
	}
	return w.pass(endpoint.InNamespace, "pump of "+ep.IfName, fmt.Sprintf("mk-shim (pid %d) carries packets to and from sandbox %s", ep.Binding.Shim.PID, ep.Binding.Sandbox), "mk-shim stats; mknetd endpoints "+ep.Generation.Short())
}

// veth takes the packet through an endpoint's pair, out of its namespace or into it.
func (w *walker) veth(ep *endpoint.Endpoint, inner string, leaving bool) bool {
	space := w.to.Space
	if leaving {
		space = w.from.Space
	}
	outside := w.device(endpoint.InHost, &w.s.Host, ep, ep.HostLink)
	if outside == nil {
		return false
	}
	inside := w.device(endpoint.InNamespace, space, ep, inner)
	switch {
	case inside == nil:
		return false
	case leaving && !w.taken(endpoint.InHost, ep, *outside):
		return false
	case !leaving && !w.redirects && !w.taken(endpoint.InNamespace, ep, *inside): // a redirected packet meets no device
		return false
	}
	return w.pass(endpoint.InHost, "veth "+inner+" - "+ep.HostLink, "both ends are up", "ip -d link show "+ep.HostLink)
}

func (w *walker) departsPod() bool {
	ep := w.from.Endpoint
	look := in(ep, fmt.Sprintf("ip route get %s from %s", w.to.Addr, w.from.Addr))
	out := w.device(endpoint.InNamespace, w.from.Space, ep, ep.IfName)
	if out == nil {
		return false
	}
	switch {
	case w.leave.Err != "":
		return w.broken(endpoint.InNamespace, "route to "+w.to.Addr.String(), w.leave.Err, look)
	case w.leave.Local:
		return w.pass(endpoint.InNamespace, "route "+w.leave.Route, "is the namespace's own address: delivered here", look)
	case w.leave.Dev != ep.IfName:
		return w.broken(endpoint.InNamespace, "route "+w.leave.Route, "leads out by "+w.leave.Dev+", not by "+ep.IfName, look)
	}
	if !w.pass(endpoint.InNamespace, "route "+w.leave.Route, "decides", look) || !w.fits(endpoint.InNamespace, ep, *out, w.leave) {
		return false
	}
	p := w.packet()
	p.in, p.inGroup, p.out, p.outGroup = "", 0, out.Name, out.Group
	return w.inside(w.from, "OUTPUT", &p) && w.inside(w.from, "POSTROUTING", &p) &&
		w.veth(ep, ep.IfName, true) && w.neighbour(ep, true) && w.program(true)
}

// answersInside is the answer of the endpoint's own namespace.
func (w *walker) answersInside() {
	ep := w.to.Endpoint
	look := in(ep, fmt.Sprintf("ip route get %s from %s", w.to.Addr, w.from.Addr))
	if w.to.pod() {
		w.pass(endpoint.InNamespace, "address "+w.from.Addr.String(), "answers inside the namespace", look)
		return
	}
	p := w.packet()
	p.in, p.inGroup = "", 0
	w.intoTun(ep, look, "OUTPUT", &p)
}

// intoTun takes the packet from the namespace's route by a hook into the TUN, and to
// the child.
func (w *walker) intoTun(ep *endpoint.Endpoint, look, hook string, p *packet) bool {
	switch {
	case w.arrive.Err != "":
		return w.broken(endpoint.InNamespace, "route to "+w.to.Addr.String(), w.arrive.Err, look)
	case w.arrive.Local || w.arrive.Dev != ep.IfName:
		return w.broken(endpoint.InNamespace, "route "+w.arrive.Route, "leads to "+w.arrive.Dev+", not to the child by "+ep.IfName, look)
	}
	if !w.pass(endpoint.InNamespace, "route "+w.arrive.Route, "decides", look) {
		return false
	}
	tun := w.device(endpoint.InNamespace, w.to.Space, ep, ep.IfName)
	if tun == nil || !w.fits(endpoint.InNamespace, ep, *tun, w.arrive) {
		return false
	}
	p.out, p.outGroup = tun.Name, tun.Group
	return w.inside(w.to, hook, p) && w.inside(w.to, "POSTROUTING", p) && w.pump(ep)
}

// neighbour checks the hardware address that a packet between a pod and the host
// is sent to: the permanent entry, or what ARP would find.
func (w *walker) neighbour(ep *endpoint.Endpoint, leaving bool) bool {
	pod, host := w.to.Space, w.s.Host.Links
	if leaving {
		pod = w.from.Space
	}
	inner, outer := pod.Links[ep.IfName], host[ep.HostLink]
	where, at, of, want := endpoint.InHost, outer, ep.Address, inner.MAC
	if leaving {
		where, at, of, want = endpoint.InNamespace, inner, ep.Gateway, outer.MAC
	}
	look := "ip neigh show dev " + at.Name
	if leaving {
		look = in(ep, look)
	}
	have, permanent := at.Neighbours[of]
	switch {
	case permanent && have != want:
		return w.broken(where, "neighbour "+of.String(), fmt.Sprintf("has %s, the other end is %s", have, want), look)
	case !permanent && leaving && !w.s.Host.Has(of) && !w.answersARP():
		return w.broken(where, "neighbour "+of.String(), "is missing, and nobody answers ARP for the gateway", look)
	}
	return true
}

// arrives takes the packet from the host's end of the veth to its receiver.
func (w *walker) arrives() {
	ep := w.to.Endpoint
	switch {
	case ep == nil && w.to.Local:
		w.pass(endpoint.InHost, "process with "+w.to.Addr.String(), "is handed the packet, if one listens", "ss -tulnp")
	case ep == nil:
		w.pass(inWorld, w.to.Addr.String(), "what lies beyond this host is not looked at", "")
	case w.to.Space == nil:
		w.broken(endpoint.InHost, "netns "+ep.Namespace.Path, "the endpoint's namespace is gone", "ip netns list")
	case w.to.pod():
		w.arrivesPod(ep)
	default:
		w.arrivesChild(ep)
	}
}

func (w *walker) arrivesPod(ep *endpoint.Endpoint) {
	// The data path knows both hardware addresses by itself.
	if !w.veth(ep, ep.IfName, false) || !w.redirects && !w.attached(w.to, false) || !w.policed("ingress", w.to) ||
		!w.redirects && !w.neighbour(ep, false) || !w.program(false) {
		return
	}
	look := in(ep, fmt.Sprintf("ip route get %s from %s iif %s", w.to.Addr, w.from.Addr, ep.IfName))
	p := w.packet()
	p.in, p.inGroup = ep.IfName, w.to.Space.Links[ep.IfName].Group
	if !w.inside(w.to, "PREROUTING", &p) {
		return
	}
	switch {
	case w.arrive.Err != "":
		w.broken(endpoint.InNamespace, "address "+w.to.Addr.String(), w.arrive.Err, look)
		return
	case !w.arrive.Local:
		w.broken(endpoint.InNamespace, "address "+w.to.Addr.String(), "is not on "+ep.IfName+": "+w.arrive.Route, in(ep, "ip addr show dev "+ep.IfName))
		return
	}
	if w.inside(w.to, "INPUT", &p) {
		w.pass(endpoint.InNamespace, "address "+w.to.Addr.String(), "is the pod's: delivered, if something listens", in(ep, "ss -tulnp"))
	}
}

func (w *walker) arrivesChild(ep *endpoint.Endpoint) {
	if !w.veth(ep, ep.PeerLink, false) || !w.attached(w.to, false) || !w.policed("ingress", w.to) {
		return
	}
	look := in(ep, fmt.Sprintf("ip route get %s from %s iif %s", w.to.Addr, w.from.Addr, ep.PeerLink))
	if via := w.host.Via; via.IsValid() && !w.to.Space.Has(via) {
		w.broken(endpoint.InNamespace, "address "+via.String(), "is missing on "+ep.PeerLink+": nobody answers ARP for the way to the child", in(ep, "ip addr show dev "+ep.PeerLink))
		return
	}
	p := w.packet()
	p.in, p.inGroup = ep.PeerLink, w.to.Space.Links[ep.PeerLink].Group
	if w.inside(w.to, "PREROUTING", &p) && w.intoTun(ep, look, "FORWARD", &p) {
		w.pass(inChild, "address "+w.to.Addr.String(), "is the child's; mknetd cannot look into it", "ss -tulnp (in the child)")
	}
}

// inside runs the packet through one hook of an endpoint's namespace, whose
// connection tracking is its own.
func (w *walker) inside(p Party, hook string, pk *packet) bool {
	if len(p.Rules) == 0 && len(p.Chains) == 0 {
		return true
	}
	copied := *pk
	copied.reversePath, copied.tracking = true, w.trackedAs(p.Flow)
	ok := w.asked(rules{where: endpoint.InNamespace, tables: p.Rules, others: p.Chains, in: func(c string) string { return in(p.Endpoint, c) }}, hook, &copied, tablesOf[hook]...)
	pk.mark = copied.mark
	return ok
}
