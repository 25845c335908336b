package explain

import (
	"fmt"
	"slices"
	"strings"

	"mknet/mknetd/internal/ipt"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// tablesOf are the tables of each hook, in the kernel's order.
var tablesOf = map[string][]string{
	"PREROUTING":  {"raw", "mangle", "nat"},
	"INPUT":       {"mangle", "filter", "security"},
	"FORWARD":     {"mangle", "filter", "security"},
	"OUTPUT":      {"raw", "mangle", "nat", "filter", "security"},
	"POSTROUTING": {"mangle", "nat"},
}

// crossesHost takes the packet through the host's stack: from the device that it
// comes in by, or a local process, to the device that it leaves by, or one.
func (w *walker) crossesHost() bool {
	p := w.packet()
	hostRules := rules{where: endpoint.InHost, tables: w.s.Tables, others: w.s.Others}
	if !w.tracked() {
		return false
	}
	local := w.from.Endpoint == nil && w.from.Local
	if !local && !w.asked(hostRules, "PREROUTING", &p, tablesOf["PREROUTING"]...) {
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
		return w.pass(endpoint.InHost, "route "+w.host.Route, "is an address of the host", look) && w.asked(hostRules, "INPUT", &p, tablesOf["INPUT"]...)
	}
	if ep := w.to.Endpoint; ep != nil && w.host.Dev != ep.HostLink {
		return w.broken(endpoint.InHost, "route "+w.host.Route, "leads out by "+w.host.Dev+", not to the endpoint by "+ep.HostLink, look)
	}
	if !w.pass(endpoint.InHost, "route "+w.host.Route, "decides", look) {
		return false
	}
	out := w.device(endpoint.InHost, &w.s.Host, w.to.Endpoint, w.host.Dev)
	if out == nil || !w.fits(endpoint.InHost, nil, *out, w.host) {
		return false
	}
	p.out, p.outGroup = out.Name, out.Group
	hook := "FORWARD"
	if local {
		hook = "OUTPUT"
	}
	return w.asked(hostRules, hook, &p, tablesOf[hook]...) && w.asked(hostRules, "POSTROUTING", &p, tablesOf["POSTROUTING"]...) && w.leaves()
}

// tracked is what the host's connection tracking makes of the packet.
func (w *walker) tracked() bool {
	s := api.ExplainStep{Where: endpoint.InHost, Object: "connection tracking", Outcome: api.Passes, Inspect: "conntrack -L -s " + w.s.From.Addr.String()}
	as := w.trackedAs(w.s.Flow)
	direction := map[bool]string{false: "ORIGINAL", true: "REPLY"}[as.reply]
	switch f := w.s.Flow; {
	case w.answer || f != nil && f.OrigDestination == f.ReplSource:
		s.Why = fmt.Sprintf("an existing flow: rules that ask for %s, %s match", as.state, direction)
	case f != nil:
		s.Outcome, s.Why = api.Unknown, fmt.Sprintf("the flow was translated from %s to %s when it began: ask for where that leads", f.OrigDestination, f.ReplSource)
	case w.s.Full:
		s.Outcome, s.Why, s.Inspect = api.Dropped, "the table is full: new flows are dropped", "sysctl net.netfilter.nf_conntrack_count net.netfilter.nf_conntrack_max"
	default:
		s.Why = "a new flow: rules that ask for NEW match"
		if w.s.Alike > 0 {
			s.Why += fmt.Sprintf("; %d flows like it exist, and one of these is asked for by its source port", w.s.Alike)
		}
	}
	return w.add(s)
}

// leaves asks whether the answer will find its way.
func (w *walker) leaves() bool {
	ep := w.from.Endpoint
	if w.answer || w.trackedAs(w.s.Flow).reply || w.to.Endpoint != nil || w.to.Local || ep == nil {
		return true
	}
	if !w.translated && (w.from.child() || ep.IPMasq) {
		why := "no rule translates " + w.from.Addr.String()
		if w.s.Flow != nil {
			why = "the flow began without being translated from " + w.from.Addr.String()
		}
		return w.broken(endpoint.InHost, "iptables nat POSTROUTING", why+": it leaves under an address that nobody out there can answer", "iptables -t nat -S | grep "+w.from.Addr.String())
	}
	return true
}

// packet is the packet as it comes into the host's stack.
func (w *walker) packet() packet {
	p := packet{
		src: w.from.Addr, dst: w.to.Addr, protocol: w.s.Protocol, tracking: w.trackedAs(w.s.Flow),
		origDst: w.s.To.Addr, origDport: w.s.Port, replySrc: w.s.To.Addr, flows: w.from.Flows, icmpType: 8,
	}
	p.sport, p.dport = w.s.SourcePort, w.s.Port
	if w.answer {
		p.sport, p.dport = p.dport, p.sport
	}
	if p.reply {
		p.icmpType = 0
	}
	if f := w.s.Flow; f != nil {
		p.origDst, p.origDport, p.replySrc = f.OrigDestination.Addr(), int(f.OrigDestination.Port()), f.ReplSource.Addr()
	}
	if p.protocol == "icmp" {
		p.sport, p.dport, p.origDport = 0, 0, 0
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

// rules are those of one namespace.
type rules struct {
	where  string
	tables []ipt.Saved
	others []ipt.BaseChain
	in     func(command string) string // runs a command there; nil in the host
}

func (r rules) look(command string) string {
	if r.in == nil {
		return command
	}
	return r.in(command)
}

// asked runs the packet through one hook: the tables of both flavours in the
// kernel's order, and base chains of somebody else.
func (w *walker) asked(r rules, hook string, p *packet, tables ...string) bool {
	for _, name := range tables {
		for _, t := range r.tables {
			if t.Table != name || name == "nat" && !p.begins {
				continue // nat is asked for the first packet of a flow alone
			}
			d, there := run(t, hook, p)
			if there && !w.decided(r, t.Flavour, name, hook, d) {
				return false
			}
		}
	}
	for _, c := range r.others {
		if c.IPTables() || c.Hook != strings.ToLower(hook) || c.Family != "ip" && c.Family != "inet" || c.Type == "nat" && !p.begins {
			continue
		}
		if !w.foreign(r, c) {
			return false
		}
	}
	return true
}

// foreign is a base chain of somebody else: of its rules is known what they may do, not
// whether they match. One that no packet can fail in is left out where it is empty.
func (w *walker) foreign(r rules, c ipt.BaseChain) bool {
	s := api.ExplainStep{Where: r.where, Object: "nftables " + c.String(), Inspect: r.look("nft list chain " + c.String())}
	at := fmt.Sprintf("a base chain of somebody else, hook %s, priority %d: ", c.Hook, c.Priority)
	switch {
	case c.TakesAll:
		s.Outcome, s.Why = api.Dropped, at+"a rule of it drops or rejects every packet"
	case c.Drops && c.Rules == 0:
		s.Outcome, s.Why = api.Dropped, at+"its policy is drop and it has no rule"
	case c.Drops:
		s.Outcome, s.Why = api.Unknown, fmt.Sprintf("%sits policy is drop; whether one of its rules (%d) accepts the packet is not judged here", at, c.Rules)
	case c.MayStop:
		s.Outcome, s.Why = api.Unknown, fmt.Sprintf("%sit may decide; whether one of its rules (%d) drops or changes the packet is not judged here", at, c.Rules)
	case c.Rules > 0:
		s.Outcome, s.Why = api.Passes, fmt.Sprintf("%snone of its rules (%d) can drop or change a packet", at, c.Rules)
	default:
		return true
	}
	return w.add(s)
}

// decided makes a station of what a table came to; a table that nothing in decided
// and that shows no rule of an endpoint is left out.
func (w *walker) decided(r rules, flavour, table, hook string, d decision) bool {
	s := api.ExplainStep{
		Where: r.where, Object: "iptables " + table + " " + hook, Outcome: api.Passes, Why: d.rule, Rules: d.asked,
		Inspect: fmt.Sprintf("iptables-%s -t %s -vnL %s", flavour, table, hook),
	}
	if chain, _, _ := strings.Cut(d.rule, " "); chain != "" {
		s.Inspect = fmt.Sprintf("iptables-%s -t %s -vnL %s", flavour, table, strings.TrimSuffix(chain, ":"))
	}
	s.Inspect = r.look(s.Inspect)
	switch target := d.target; {
	case target == "DROP" || target == "REJECT":
		s.Outcome = api.Dropped
		if d.maybe != "" {
			s.Outcome, s.Why = api.Unknown, d.rule+"; unless an earlier rule accepts it: "+d.maybe
		}
	case (target == "MASQUERADE" || target == "SNAT") && r.where == endpoint.InHost:
		w.translated = true
	case target == "MASQUERADE" && w.from.pod():
		s.Why = d.rule + ": the pod's address stays what it is"
	case slices.Contains([]string{"DNAT", "REDIRECT", "NETMAP", "TPROXY", "SNAT", "MASQUERADE"}, target):
		s.Outcome, s.Why = api.Unknown, "translated by "+d.rule+": ask for where that leads"
	case target == "ACCEPT" || target == "":
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
