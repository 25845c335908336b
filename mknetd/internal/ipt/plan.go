package ipt

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"mknet/spec/endpoint"
)

// layout is what the rules depend on besides the endpoint's record.
type layout struct {
	guard     string // tableSecurity or tableMangle
	pool      netip.Prefix
	metadata  []netip.Addr
	connLimit int
}

// tables are the tables that hold rules of an endpoint, in ADD's order.
func (l layout) tables() []string {
	return []string{tableRaw, l.guard, tableNAT, tableFilter}
}

// part is what one endpoint has in one table. It is a pure function of the
// layout and the record.
type part struct {
	table    string
	chains   []chain    // wholly the endpoint's
	dispatch []dispatch // one for each tree of the table
}

// dispatch is the endpoint's rule in the leaf of a tree, and the way there.
type dispatch struct {
	leaf placed
	path []placed
}

// podLinks are the host veths of ordinary pods, endpointLinks those of children.
const (
	podLinks      = "lxc+"
	endpointLinks = endpoint.HostLinkPrefix + "+"
)

// Suffixes of an endpoint's chains besides the one that the record names.
const (
	outSuffix = "-OUT" // towards the endpoint
	inSuffix  = "-IN"  // from the endpoint to the primary itself
)

// part plans the endpoint's part of a table.
func (l layout) part(table string, ep endpoint.Endpoint) (part, error) {
	if err := renderable(ep); err != nil {
		return part{}, err
	}
	p := part{table: table}
	name := ep.Generation.Chain()
	switch table {
	case tableRaw:
		p.chains = []chain{{name, []rule{words("! -s %s/32 -j DROP", ep.Address)}}}
	case tableNAT:
		p.chains = []chain{{name, []rule{words("-s %s/32 -o %s -j MASQUERADE", ep.Address, ep.Egress)}}}
	case tableFilter:
		p.chains = l.filter(ep)
	case l.guard:
		p.chains = l.guardOf(ep)
	}
	mark := genMark + ep.Generation.String()
	for _, c := range p.chains {
		for i, r := range c.rules {
			c.rules[i] = r.marked(mark)
		}
	}
	for _, t := range l.trees(table) {
		path, leaf, err := t.path(ep)
		if err != nil {
			return part{}, err
		}
		match := ep.Generation.HostLink()
		if t.flag == "-s" {
			match = ep.Address.String() + "/32"
		}
		to := name
		switch t.root {
		case outRoot:
			to += outSuffix
		case inRoot:
			to += inSuffix
		}
		p.dispatch = append(p.dispatch, dispatch{
			leaf: placed{leaf, words("%s %s -g %s", t.flag, match, to).marked(mark)},
			path: path,
		})
	}
	return p, nil
}

// renderable checks what becomes a word of a rule.
func renderable(ep endpoint.Endpoint) error {
	switch {
	case ep.Generation.IsZero():
		return errors.New("endpoint has no generation")
	case !ep.Address.Is4():
		return fmt.Errorf("endpoint %s: address %q is not IPv4", ep.Generation.Short(), ep.Address)
	case ep.Egress == "" || len(ep.Egress) > endpoint.MaxIfNameBytes || strings.ContainsAny(ep.Egress, " \t\n\"'\\!+"):
		return fmt.Errorf("endpoint %s: egress %q is not a link that a rule can name", ep.Generation.Short(), ep.Egress)
	}
	return nil
}

// filter are the endpoint's chains in the filter table, without the mark.
func (l layout) filter(ep endpoint.Endpoint) []chain {
	name := ep.Generation.Chain()
	return []chain{
		{name, l.sends(ep)},
		{name + outSuffix, l.receives(ep)},
		{name + inSuffix, l.toPrimary(ep)},
	}
}

// sends judges what comes in through the endpoint's veth and is forwarded.
func (l layout) sends(ep endpoint.Endpoint) []rule {
	rules := []rule{
		words("! -s %s/32 -j DROP", ep.Address),
		words("-m conntrack --ctstate ESTABLISHED --ctdir REPLY -j ACCEPT"),
	}
	rules = append(rules, l.metadataRules(ep)...)
	egress := words("-o %s -j ACCEPT", ep.Egress)
	pods := words("-o %s -j DROP", podLinks)
	if ep.PodAccess == endpoint.Allow {
		pods = words("-m devgroup --dst-group %s -j ACCEPT", anyPod)
	}
	ours := []rule{words("-o %s -j DROP", endpointLinks), pods}
	if looksOurs(ep.Egress) {
		// An egress called mkvpn0 is not an endpoint: it goes before the wildcards.
		rules = append(append(rules, egress), ours...)
	} else {
		rules = append(append(rules, ours...), egress)
	}
	return append(rules, words("-j DROP"))
}

// receives judges what is forwarded towards the endpoint's veth.
func (l layout) receives(ep endpoint.Endpoint) []rule {
	rules := []rule{words("-i %s -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", ep.Egress)}
	if ep.Publishes && looksOurs(ep.Egress) {
		rules = append(rules, words("-i %s -m conntrack --ctstate DNAT -j ACCEPT", ep.Egress))
	}
	if ep.PodAccess == endpoint.Allow {
		// A pod that may reach children, and the answers of every pod.
		rules = append(rules, words("-m devgroup --src-group %s -j ACCEPT", podReaches),
			words("-m devgroup --src-group %s -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", anyPod))
	}
	if ep.Publishes {
		rules = append(rules, words("-i %s -j DROP", endpointLinks), words("-i %s -j DROP", podLinks))
		rules = append(rules, words("-m conntrack --ctstate DNAT -j ACCEPT"))
	}
	return append(rules, words("-j DROP"))
}

// toPrimary judges what the endpoint sends to any address of the primary.
func (l layout) toPrimary(ep endpoint.Endpoint) []rule {
	rules := []rule{
		words("! -s %s/32 -j DROP", ep.Address),
		// RELATED lets an ICMP error answer the primary, but only about a flow
		// whose other end is this child: an error may quote anybody's packet.
		words("-m conntrack --ctstate RELATED,ESTABLISHED --ctreplsrc %s --ctdir REPLY -j ACCEPT", ep.Address),
	}
	for _, ns := range nameservers(ep) {
		if !slices.Contains(l.metadata, ns) {
			rules = append(rules, dnsRules(ns)...)
		}
	}
	rules = append(rules, l.metadataRules(ep)...)
	if ep.HostAccess == endpoint.Allow {
		return append(rules, words("-j ACCEPT"))
	}
	return append(rules, words("-p icmp -m icmp --icmp-type 8 -j ACCEPT"), words("-j DROP"))
}

// metadataRules let through only DNS, and only where the metadata address is the
// endpoint's resolver. They match the original destination, because a DNAT of
// somebody else would otherwise hide it.
func (l layout) metadataRules(ep endpoint.Endpoint) []rule {
	var rules []rule
	servers := nameservers(ep)
	for _, m := range l.metadata {
		if slices.Contains(servers, m) {
			rules = append(rules, dnsRules(m)...)
		}
		rules = append(rules, words("-m conntrack --ctorigdst %s -j REJECT --reject-with icmp-port-unreachable", m))
	}
	return rules
}

func dnsRules(server netip.Addr) []rule {
	return []rule{
		words("-p udp -m conntrack --ctorigdst %s --ctorigdstport 53 -j ACCEPT", server),
		words("-p tcp -m conntrack --ctorigdst %s --ctorigdstport 53 -j ACCEPT", server),
	}
}

// nameservers are the endpoint's resolvers that a rule can name, without
// repetition: IPv4, and not the child's own loopback.
func nameservers(ep endpoint.Endpoint) []netip.Addr {
	var out []netip.Addr
	for _, s := range ep.DNS.Nameservers {
		a, err := netip.ParseAddr(s)
		if err == nil && a.Is4() && !a.IsLoopback() && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// guardOf derives the guard from the filter chains: the same decisions, except
// that what filter accepts goes on to the next chain and what it rejects is
// dropped, plus the connection limit. An ACCEPT that somebody else puts before
// our jump in filter does not skip it.
func (l layout) guardOf(ep endpoint.Endpoint) []chain {
	chains := l.filter(ep)
	for i := range chains {
		c := &chains[i]
		c.rules = guardRules(c.rules)
		if l.connLimit == 0 || strings.HasSuffix(c.name, outSuffix) {
			continue
		}
		// After spoofed packets and replies, before anything that begins a flow.
		c.rules = slices.Insert(c.rules, 2, words(
			"-m conntrack --ctstate NEW -m connlimit --connlimit-above %s --connlimit-mask 32 --connlimit-saddr -j DROP", strconv.Itoa(l.connLimit)))
	}
	return chains
}

func guardRules(rules []rule) []rule {
	var out []rule
	for i, r := range rules {
		r = slices.Clone(r)
		at := slices.Index(r, "-j")
		switch r[at+1] {
		case "ACCEPT":
			if i == len(rules)-1 {
				continue // the end of a chain returns by itself
			}
			r = append(r[:at], "-j", "RETURN")
		case "REJECT":
			r = append(r[:at], "-j", "DROP")
		}
		out = append(out, r)
	}
	return out
}

// looksOurs reports whether a wildcard of ours matches the name of a link that
// is none of ours.
func looksOurs(link string) bool {
	return strings.HasPrefix(link, endpoint.HostLinkPrefix) || strings.HasPrefix(link, strings.TrimSuffix(podLinks, "+"))
}
