package explain

import (
	"fmt"
	"slices"
	"strings"

	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Decide walks the way of the first packet of a new flow, and that of its answer.
func Decide(s Snapshot) api.Explanation {
	x := api.Explanation{
		From: s.From.Addr, To: s.To.Addr, Protocol: s.Protocol, Port: s.Port,
		Way: []api.ExplainStep{}, Back: []api.ExplainStep{}, Faults: append([]endpoint.Fault{}, s.From.Faults...), Verdict: api.Passes,
		Because: "every station lets it pass, and the answer too",
	}
	x.Faults = append(x.Faults, s.To.Faults...)
	there := walker{s: &s, from: s.From, to: s.To, leave: s.Ways.Leave, host: s.Ways.Host, arrive: s.Ways.Arrive, reverse: s.Ways.ReversePath}
	there.walk()
	x.Way = append(x.Way, there.steps...)
	if there.stopped != "" {
		x.Verdict, x.Because = there.stopped, there.because
		return x
	}
	back := walker{
		s: &s, reply: true, from: s.To, to: s.From, translated: there.translated,
		leave: s.Ways.BackLeave, host: s.Ways.BackHost, arrive: s.Ways.BackArrive, reverse: s.Ways.BackReversePath,
	}
	back.walk()
	x.Back = append(x.Back, back.steps...)
	switch {
	case back.stopped != "":
		x.Verdict, x.Because = back.stopped, "the packet arrives, its answer does not come back: "+back.because
	case there.doubt != "":
		x.Verdict, x.Because = api.Unknown, there.doubt
	case back.doubt != "":
		x.Verdict, x.Because = api.Unknown, "of the answer: "+back.doubt
	}
	return x
}

// walker goes one way, station by station, until something stops the packet.
type walker struct {
	s        *Snapshot
	from, to Party
	reply    bool

	leave, host, arrive, reverse topo.Way
	// translated is set once the packet leaves under the host's address.
	translated bool

	steps   []api.ExplainStep
	stopped api.Outcome
	because string
	doubt   string
}

func (w *walker) add(s api.ExplainStep) bool {
	w.steps = append(w.steps, s)
	switch {
	case s.Outcome == api.Dropped || s.Outcome == api.Broken:
		w.stopped, w.because = s.Outcome, fmt.Sprintf("%s (%s): %s", s.Object, s.Where, s.Why)
	case s.Outcome == api.Unknown && w.doubt == "":
		w.doubt = fmt.Sprintf("%s (%s): %s", s.Object, s.Where, s.Why)
	}
	return w.stopped == ""
}

func (w *walker) pass(where, object, why, look string) bool {
	return w.add(api.ExplainStep{Where: where, Object: object, Outcome: api.Passes, Why: why, Inspect: look})
}

func (w *walker) broken(where, object, why, look string) bool {
	return w.add(api.ExplainStep{Where: where, Object: object, Outcome: api.Broken, Why: why, Inspect: look})
}

// Stations besides endpoint.InHost and endpoint.InNamespace.
const (
	inChild = "child"
	inWorld = "world"
)

func (w *walker) walk() {
	if w.reply && w.s.Ways.Leave.Local {
		w.answersInside()
		return
	}
	if !w.departs() {
		return
	}
	if w.leave.Local || !w.policed("egress", w.from) { // local: to the namespace itself
		return
	}
	if w.redirected() {
		w.pass(endpoint.InHost, "bpf-program of "+w.from.Endpoint.HostLink, "both ends are pods of this node: redirected into "+w.to.Endpoint.HostLink+" past the host's stack and its rules", "mknetd inventory | grep bpf")
	} else if !w.crossesHost() {
		return
	}
	w.arrives()
}

// policed asks what policy says of a new flow; answers of one that it has admitted
// pass.
func (w *walker) policed(direction string, p Party) bool {
	for _, point := range w.s.Policy {
		if w.reply || p.Endpoint == nil || point.Direction != direction || point.Endpoint != p.Addr || len(point.Steps) == 0 {
			continue
		}
		last := point.Steps[len(point.Steps)-1]
		s := api.ExplainStep{
			Where: endpoint.InHost, Object: "policy " + direction + " of " + p.Addr.String(), Outcome: api.Passes,
			Inspect: fmt.Sprintf("mknetd policy explain --from %s --to %s --proto %s --port %d", w.from.Addr, w.to.Addr, w.s.Protocol, w.s.Port),
		}
		for _, step := range point.Steps {
			s.Rules = append(s.Rules, api.Rule{Chain: step.Layer + " " + step.Policy, Number: int(step.Priority), Text: step.Rule, Matches: step.Why})
		}
		s.Why = strings.TrimSpace(last.Layer+" "+last.Policy+" "+last.Rule) + ": " + last.Why
		if !point.Allowed {
			s.Outcome = api.Dropped
		}
		return w.add(s)
	}
	return true
}

// answersInside is the answer of the endpoint's own namespace.
func (w *walker) answersInside() {
	ep := w.to.Endpoint
	look := in(ep, fmt.Sprintf("ip route get %s from %s", w.to.Addr, w.from.Addr))
	switch {
	case w.to.pod():
		w.pass(endpoint.InNamespace, "address "+w.from.Addr.String(), "answers inside the namespace", look)
	case w.arrive.Err != "":
		w.broken(endpoint.InNamespace, "route to "+w.to.Addr.String(), w.arrive.Err, look)
	case w.arrive.Dev != ep.IfName:
		w.broken(endpoint.InNamespace, "route "+w.arrive.Route, "leads to "+w.arrive.Dev+", not to the child by "+ep.IfName, look)
	default:
		_ = w.pass(endpoint.InNamespace, "route "+w.arrive.Route, "decides", look) && w.device(endpoint.InNamespace, w.to.Space, ep, ep.IfName) != nil && w.pump(ep)
	}
}

// redirected reports whether the data path carries the packet by itself.
func (w *walker) redirected() bool {
	return w.from.pod() && w.to.pod() && w.from.Programs && w.to.Entry && w.from.Entry &&
		w.from.Endpoint.Bandwidth == nil && w.to.Endpoint.Bandwidth == nil
}

// in runs a command in an endpoint's namespace.
func in(ep *endpoint.Endpoint, command string) string {
	if ep.Namespace.Path == "" {
		return command + " (in the namespace of " + ep.Generation.Short() + ")"
	}
	return "nsenter --net=" + ep.Namespace.Path + " " + command
}

// device finds a link that must be there and up; nil where the packet stops.
func (w *walker) device(where string, space *topo.Space, ep *endpoint.Endpoint, name string) *topo.Device {
	look := "ip -d link show " + name
	if where == endpoint.InNamespace {
		look = in(ep, look)
	}
	d, there := space.Links[name]
	switch {
	case !there:
		w.broken(where, "link "+name, "is missing", look)
		return nil
	case !d.Up:
		w.broken(where, "link "+name, "is down", look)
		return nil
	}
	return &d
}

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
	if !w.pass(inChild, fmt.Sprintf("route default via %s dev %s", ep.Gateway, endpoint.ChildLink+"0"), "as it was configured; mknetd cannot look into the child", "ip route (in the child)") || !w.pump(ep) {
		return false
	}
	if w.device(endpoint.InNamespace, w.from.Space, ep, ep.IfName) == nil {
		return false
	}
	look := in(ep, fmt.Sprintf("ip route get %s from %s iif %s", w.to.Addr, w.from.Addr, ep.IfName))
	switch {
	case w.leave.Err != "":
		return w.broken(endpoint.InNamespace, "route to "+w.to.Addr.String(), w.leave.Err, look)
	case w.leave.Local:
		return w.pass(endpoint.InNamespace, "route "+w.leave.Route, "is the namespace's own address: delivered here", look)
	case w.leave.Dev != ep.PeerLink:
		return w.broken(endpoint.InNamespace, "route "+w.leave.Route, "leads out by "+w.leave.Dev+", not by "+ep.PeerLink, look)
	}
	if !w.pass(endpoint.InNamespace, "route "+w.leave.Route, "decides", look) || !w.veth(ep, ep.PeerLink) {
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

// veth is both ends of an endpoint's pair.
func (w *walker) veth(ep *endpoint.Endpoint, inner string) bool {
	space := w.from.Space
	if w.to.Endpoint == ep {
		space = w.to.Space
	}
	if w.device(endpoint.InHost, &w.s.Host, ep, ep.HostLink) == nil || w.device(endpoint.InNamespace, space, ep, inner) == nil {
		return false
	}
	return w.pass(endpoint.InHost, "veth "+inner+" - "+ep.HostLink, "both ends are up", "ip -d link show "+ep.HostLink)
}

func (w *walker) departsPod() bool {
	ep := w.from.Endpoint
	look := in(ep, fmt.Sprintf("ip route get %s from %s", w.to.Addr, w.from.Addr))
	if w.device(endpoint.InNamespace, w.from.Space, ep, ep.IfName) == nil {
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
	if !w.pass(endpoint.InNamespace, "route "+w.leave.Route, "decides", look) || !w.veth(ep, ep.IfName) || !w.neighbour(ep, true) {
		return false
	}
	return w.program(ep, true)
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
	case !permanent && leaving && !w.s.Host.Has(of) && !w.from.Programs:
		return w.broken(where, "neighbour "+of.String(), "is missing, and nobody answers ARP for the gateway", look)
	}
	return true
}

// program is what the data path makes of a pod's frames.
func (w *walker) program(ep *endpoint.Endpoint, leaving bool) bool {
	party := w.to
	if leaving {
		party = w.from
	}
	inner := party.Space.Links[ep.IfName]
	look := "mknetd inventory | grep bpf"
	switch {
	case !party.Programs:
		return w.pass(endpoint.InHost, "bpf-program of "+ep.HostLink, "is not attached as it should be, or there is no data path: the host's stack decides", look)
	case !party.Entry:
		return w.broken(endpoint.InHost, "bpf-endpoint "+ep.Address.String(), "is not as it should be: the programs drop frames of a link that they do not know", look)
	case leaving && inner.MAC != ep.PodMAC():
		return w.broken(endpoint.InNamespace, "mac "+ep.IfName, fmt.Sprintf("is %s, and the program lets only %s pass", inner.MAC, ep.PodMAC()), in(ep, "ip link show "+ep.IfName))
	}
	return w.pass(endpoint.InHost, "bpf-program of "+ep.HostLink, "source and destination are the endpoint's own", look)
}

// arrives takes the packet from the host's end of the veth to its receiver.
func (w *walker) arrives() {
	ep := w.to.Endpoint
	switch {
	case ep == nil && w.to.Local:
		w.pass(endpoint.InHost, "process with "+w.to.Addr.String(), "is handed the packet, if one listens", "ss -tulnp")
		return
	case ep == nil:
		w.pass(inWorld, w.to.Addr.String(), "what lies beyond this host is not looked at", "")
		return
	case w.to.Space == nil:
		w.broken(endpoint.InHost, "netns "+ep.Namespace.Path, "the endpoint's namespace is gone", "ip netns list")
		return
	}
	inner := ep.PeerLink
	if w.to.pod() {
		inner = ep.IfName
	}
	if !w.veth(ep, inner) || !w.policed("ingress", w.to) {
		return
	}
	look := in(ep, fmt.Sprintf("ip route get %s from %s iif %s", w.to.Addr, w.from.Addr, inner))
	if w.to.pod() {
		// The data path knows both hardware addresses by itself.
		if !w.redirected() && !w.neighbour(ep, false) || !w.program(ep, false) {
			return
		}
		switch {
		case w.arrive.Err != "":
			w.broken(endpoint.InNamespace, "address "+w.to.Addr.String(), w.arrive.Err, look)
		case !w.arrive.Local:
			w.broken(endpoint.InNamespace, "address "+w.to.Addr.String(), "is not on "+ep.IfName+": "+w.arrive.Route, in(ep, "ip addr show dev "+ep.IfName))
		default:
			w.pass(endpoint.InNamespace, "address "+w.to.Addr.String(), "is the pod's: delivered, if something listens", in(ep, "ss -tulnp"))
		}
		return
	}
	if via := w.host.Via; via.IsValid() && !w.to.Space.Has(via) {
		w.broken(endpoint.InNamespace, "address "+via.String(), "is missing on "+ep.PeerLink+": nobody answers ARP for the way to the child", in(ep, "ip addr show dev "+ep.PeerLink))
		return
	}
	switch {
	case w.arrive.Err != "":
		w.broken(endpoint.InNamespace, "route to "+w.to.Addr.String(), w.arrive.Err, look)
		return
	case w.arrive.Local || w.arrive.Dev != ep.IfName:
		w.broken(endpoint.InNamespace, "route "+w.arrive.Route, "leads to "+w.arrive.Dev+", not to the child by "+ep.IfName, look)
		return
	}
	if !w.pass(endpoint.InNamespace, "route "+w.arrive.Route, "decides", look) || w.device(endpoint.InNamespace, w.to.Space, ep, ep.IfName) == nil || !w.pump(ep) {
		return
	}
	w.pass(inChild, "address "+w.to.Addr.String(), "is the child's; mknetd cannot look into it", "ss -tulnp (in the child)")
}

// crossesHost takes the packet through the host's stack: from the device that it
// comes in by, or a local process, to the device that it leaves by, or one.
func (w *walker) crossesHost() bool {
	p := w.packet()
	if !w.s.Full || w.reply {
		w.pass(endpoint.InHost, "connection tracking", fmt.Sprintf("%s flow: rules that ask for %s match", map[bool]string{false: "a new", true: "an established"}[w.reply], map[bool]string{false: "NEW", true: "ESTABLISHED, REPLY"}[w.reply]), "conntrack -L -s "+w.s.From.Addr.String())
	} else if !w.add(api.ExplainStep{Where: endpoint.InHost, Object: "connection tracking", Outcome: api.Dropped, Why: "the table is full: new flows are dropped", Inspect: "sysctl net.netfilter.nf_conntrack_count net.netfilter.nf_conntrack_max"}) {
		return false
	}
	local := w.from.Endpoint == nil && w.from.Local
	if !local && !w.asked("PREROUTING", &p, "raw", "mangle", "nat") {
		return false
	}
	look := fmt.Sprintf("ip route get %s from %s", w.to.Addr, w.from.Addr)
	if p.in != "" {
		look += " iif " + p.in
	}
	if w.host.Err != "" {
		return w.broken(endpoint.InHost, "route to "+w.to.Addr.String(), w.host.Err, look)
	}
	if w.host.Local {
		if !w.to.Local {
			return w.broken(endpoint.InHost, "route "+w.host.Route, "delivers to the host itself", look)
		}
		return w.pass(endpoint.InHost, "route "+w.host.Route, "is an address of the host", look) && w.asked("INPUT", &p, "mangle", "filter", "security")
	}
	if ep := w.to.Endpoint; ep != nil && w.host.Dev != ep.HostLink {
		return w.broken(endpoint.InHost, "route "+w.host.Route, "leads out by "+w.host.Dev+", not to the endpoint by "+ep.HostLink, look)
	}
	if !w.pass(endpoint.InHost, "route "+w.host.Route, "decides", look) {
		return false
	}
	p.out, p.outGroup = w.host.Dev, w.s.Host.Links[w.host.Dev].Group
	hook, tables := "FORWARD", []string{"mangle", "filter", "security"}
	if local {
		hook, tables = "OUTPUT", []string{"raw", "mangle", "nat", "filter", "security"}
	}
	if w.to.Endpoint == nil && w.device(endpoint.InHost, &w.s.Host, nil, p.out) == nil {
		return false
	}
	return w.asked(hook, &p, tables...) && w.asked("POSTROUTING", &p, "mangle", "nat") && w.leaves()
}

// leaves asks whether the answer will find its way.
func (w *walker) leaves() bool {
	ep := w.from.Endpoint
	if w.reply || w.to.Endpoint != nil || w.to.Local || ep == nil {
		return true
	}
	if !w.translated && (w.from.child() || ep.IPMasq) {
		return w.broken(endpoint.InHost, "iptables nat POSTROUTING", "no rule translates "+w.from.Addr.String()+": it leaves under an address that nobody out there can answer", "iptables -t nat -S | grep "+w.from.Addr.String())
	}
	return true
}

// packet is the packet as it comes into the host's stack.
func (w *walker) packet() packet {
	p := packet{
		src: w.from.Addr, dst: w.to.Addr, protocol: w.s.Protocol, reply: w.reply,
		origDst: w.s.To.Addr, origDport: w.s.Port, replySrc: w.s.To.Addr, flows: w.from.Flows, icmpType: 8,
	}
	if w.reply {
		p.sport, p.icmpType = w.s.Port, 0
	} else {
		p.dport = w.s.Port
	}
	switch {
	case w.from.Endpoint != nil:
		p.in = w.from.Endpoint.HostLink
	case !w.from.Local:
		p.in = w.reverse.Dev
	}
	p.inGroup = w.s.Host.Links[p.in].Group
	p.reversePath = w.reverse.Dev == p.in && w.reverse.Err == ""
	return p
}

// asked runs the packet through one hook: the tables of both flavours in the
// kernel's order, and base chains of somebody else.
func (w *walker) asked(hook string, p *packet, tables ...string) bool {
	for _, name := range tables {
		for _, t := range w.s.Tables {
			if t.Table != name || name == "nat" && w.reply {
				continue // nat is asked for the first packet of a flow alone
			}
			d, there := run(t, hook, p)
			if there && !w.decided(t.Flavour, name, hook, d) {
				return false
			}
		}
	}
	for _, c := range w.s.Others {
		if c.IPTables() || c.Hook != strings.ToLower(hook) || c.Family != "ip" && c.Family != "inet" {
			continue
		}
		s := api.ExplainStep{Where: endpoint.InHost, Object: "nftables " + c.String(), Inspect: "nft list chain " + c.String()}
		switch {
		case c.TakesAll:
			s.Outcome, s.Why = api.Dropped, "a rule of it drops or rejects every packet"
		case c.Drops && c.Rules == 0:
			s.Outcome, s.Why = api.Dropped, "its policy is drop and it has no rule"
		case c.Drops:
			s.Outcome, s.Why = api.Unknown, "its policy is drop; whether one of its rules accepts the packet is not judged here"
		default:
			continue
		}
		if !w.add(s) {
			return false
		}
	}
	return true
}

// decided makes a station of what a table came to; a table that nothing in decided
// and that shows no rule of an endpoint is left out.
func (w *walker) decided(flavour, table, hook string, d decision) bool {
	s := api.ExplainStep{
		Where: endpoint.InHost, Object: "iptables " + table + " " + hook, Outcome: api.Passes, Why: d.rule, Rules: d.asked,
		Inspect: fmt.Sprintf("iptables-%s -t %s -vnL %s", flavour, table, hook),
	}
	if chain, _, _ := strings.Cut(d.rule, " "); chain != "" {
		s.Inspect = fmt.Sprintf("iptables-%s -t %s -vnL %s", flavour, table, strings.TrimSuffix(chain, ":"))
	}
	switch d.target {
	case "DROP", "REJECT":
		s.Outcome = api.Dropped
		if d.maybe != "" {
			s.Outcome, s.Why = api.Unknown, d.rule+"; unless an earlier rule accepts it: "+d.maybe
		}
	case "MASQUERADE", "SNAT":
		w.translated = true
	case "DNAT", "REDIRECT", "NETMAP", "TPROXY":
		s.Outcome, s.Why = api.Unknown, "translated by "+d.rule+": ask for where that leads"
	case "ACCEPT", "":
		if d.maybe != "" {
			s.Outcome, s.Why = api.Unknown, "a rule cannot be judged: "+d.maybe
		} else if len(d.asked) == 0 && slices.Contains([]string{"", hook + ": the policy ACCEPT"}, d.rule) {
			return true
		}
	default:
		s.Outcome, s.Why = api.Unknown, "target "+d.target+" of "+d.rule+" is not judged here"
	}
	if s.Why == "" {
		s.Why = "no rule decides: it goes on"
	}
	return w.add(s)
}
