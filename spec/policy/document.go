package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// readDocument reads one document, or those of a List. What is returned is only
// of use when no fault was added.
func readDocument(faults *Error, name string, tree any, restore bool) []Object {
	r := &reader{Error: faults, document: name, before: len(faults.Faults), restore: restore}
	m, ok := tree.(map[string]any)
	if !ok {
		r.fault("", "is %s, want an object with apiVersion, kind, metadata and spec", describe(tree))
		return nil
	}
	r.oneOf("", m, "apiVersion", true, APIVersion)
	kind := Kind(r.oneOf("", m, "kind", true, string(KindNetworkACL), string(KindSecurityGroup), string(KindAttachment), string(KindList)))
	if kind == KindList {
		r.object("", m, "apiVersion", "kind", "items")
		var out []Object
		for i, item := range r.list("", m, "items") {
			if inner, ok := item.(map[string]any); ok && inner["kind"] == string(KindList) {
				r.fault(index("items", i), "is a List inside of a List")
				continue
			}
			out = append(out, readDocument(faults, fmt.Sprintf("%s items[%d]", name, i), item, restore)...)
		}
		return out
	}
	r.object("", m, "apiVersion", "kind", "metadata", "spec")
	if _, ok := m["metadata"]; !ok {
		r.fault("metadata", "is missing")
		return nil
	}
	h := Header{APIVersion: APIVersion, Kind: kind}
	h.Metadata.Name = r.name("metadata", r.object("metadata", m["metadata"], "name"), "name")
	if _, ok := m["spec"]; !ok {
		r.fault("spec", "is missing")
		return nil
	}
	if validName(h.Metadata.Name) {
		r.document = h.Key().String()
	}
	switch kind {
	case KindNetworkACL:
		return []Object{r.networkACL(h, m["spec"])}
	case KindSecurityGroup:
		return []Object{r.securityGroup(h, m["spec"])}
	case KindAttachment:
		return []Object{r.attachment(h, m["spec"])}
	}
	return nil // an unknown kind, which oneOf has named
}

func (r *reader) networkACL(h Header, v any) *NetworkACL {
	a := &NetworkACL{Header: h}
	spec := r.object("spec", v, "ingress", "egress")
	a.Spec.Ingress = r.aclRules("spec.ingress", r.list("spec", spec, "ingress"))
	a.Spec.Egress = r.aclRules("spec.egress", r.list("spec", spec, "egress"))
	r.capacity(a.Rules(Ingress))
	r.capacity(a.Rules(Egress))
	return a
}

func (r *reader) aclRules(path string, items []any) []ACLRule {
	var out []ACLRule
	at := map[uint16]int{}
	for i, item := range items {
		p := index(path, i)
		m := r.object(p, item, "priority", "action", "protocol", "cidr", "ports")
		if m == nil {
			continue
		}
		rule := ACLRule{
			Priority: uint16(r.number(p, m, "priority", 1, 65535)),
			Action:   Action(r.oneOf(p, m, "action", true, string(Allow), string(Deny))),
			Protocol: r.protocol(p, m),
			CIDR:     r.optionalPrefix(p, m, "cidr"),
		}
		rule.Ports = r.ports(p, m, rule.Protocol)
		if first, ok := at[rule.Priority]; ok && m["priority"] != nil {
			r.fault(join(p, "priority"), "%d is also that of %s", rule.Priority, index(path, first))
		} else {
			at[rule.Priority] = i
		}
		out = append(out, rule)
	}
	return out
}

func (r *reader) securityGroup(h Header, v any) *SecurityGroup {
	g := &SecurityGroup{Header: h}
	spec := r.object("spec", v, "ingress", "egress", "egressDefault")
	g.Spec.EgressDefault = Action(r.oneOf("spec", spec, "egressDefault", false, string(Allow), string(Deny)))
	for i, item := range r.list("spec", spec, "ingress") {
		p := index("spec.ingress", i)
		if m := r.object(p, item, "from", "protocol", "ports"); m != nil {
			rule := GroupIngress{From: r.peers(p, m, "from"), Protocol: r.protocol(p, m)}
			rule.Ports = r.ports(p, m, rule.Protocol)
			g.Spec.Ingress = append(g.Spec.Ingress, rule)
		}
	}
	for i, item := range r.list("spec", spec, "egress") {
		p := index("spec.egress", i)
		if m := r.object(p, item, "to", "protocol", "ports"); m != nil {
			rule := GroupEgress{To: r.peers(p, m, "to"), Protocol: r.protocol(p, m)}
			rule.Ports = r.ports(p, m, rule.Protocol)
			g.Spec.Egress = append(g.Spec.Egress, rule)
		}
	}
	r.capacity(g.Rules(Ingress))
	r.capacity(g.Rules(Egress))
	return g
}

func (r *reader) peers(path string, m map[string]any, name string) []Peer {
	var out []Peer
	for i, item := range r.list(path, m, name) {
		p := index(join(path, name), i)
		f := r.object(p, item, "cidr", "securityGroupRef")
		if f == nil {
			continue
		}
		ref, group := f["securityGroupRef"]
		_, cidr := f["cidr"]
		switch {
		case group == cidr:
			r.fault(p, "needs exactly one of cidr and securityGroupRef")
		case group:
			to := r.ref(join(p, "securityGroupRef"), ref)
			out = append(out, Peer{Group: &to})
		default:
			out = append(out, Peer{CIDR: r.prefix(join(p, "cidr"), f["cidr"])})
		}
	}
	return out
}

// capacity adds a fault for every limit that a direction is over.
func (r *reader) capacity(rules Rules) {
	if r.restore || len(r.Faults) > r.before {
		return // the rules may be half read
	}
	for _, over := range rules.Size().Over() {
		r.fault("spec."+rules.Direction.String(), "%s", over)
	}
}

func (r *reader) attachment(h Header, v any) *Attachment {
	a := &Attachment{Header: h}
	m := r.object("spec", v, "networkACLRef", "subnets", "pools", "securityGroupRefs", "endpoints")
	if m == nil {
		return a
	}
	if ref, ok := m["networkACLRef"]; ok {
		to := r.ref("spec.networkACLRef", ref)
		a.Spec.NetworkACL = &to
	}
	for i, item := range r.list("spec", m, "subnets") {
		a.Spec.Subnets = append(a.Spec.Subnets, r.prefix(index("spec.subnets", i), item))
	}
	for i, item := range r.list("spec", m, "pools") {
		s, _ := item.(string)
		if !validName(s) {
			r.fault(index("spec.pools", i), "is %s, want the name of a pool", describe(item))
		}
		a.Spec.Pools = append(a.Spec.Pools, s)
	}
	for i, item := range r.list("spec", m, "securityGroupRefs") {
		a.Spec.SecurityGroups = append(a.Spec.SecurityGroups, r.ref(index("spec.securityGroupRefs", i), item))
	}
	for i, item := range r.list("spec", m, "endpoints") {
		a.Spec.Endpoints = append(a.Spec.Endpoints, r.selector(index("spec.endpoints", i), item))
	}
	r.halves(a)
	return a
}

// halves checks that what applies and where it applies come together, and once.
func (r *reader) halves(a *Attachment) {
	places := len(a.Spec.Subnets) + len(a.Spec.Pools)
	groups, selectors := len(a.Spec.SecurityGroups), len(a.Spec.Endpoints)
	switch {
	case a.Spec.NetworkACL == nil && places > 0:
		r.fault("spec.networkACLRef", "is missing: subnets and pools say where one applies")
	case a.Spec.NetworkACL != nil && places == 0:
		r.fault("spec", "needs subnets or pools for its networkACLRef")
	}
	switch {
	case groups == 0 && selectors > 0:
		r.fault("spec.securityGroupRefs", "is missing: endpoints say where groups apply")
	case groups > 0 && selectors == 0:
		r.fault("spec.endpoints", "is missing: securityGroupRefs need endpoints")
	case groups > MaxGroupsPerEndpoint:
		r.fault("spec.securityGroupRefs", "has %d groups, an endpoint holds at most %d", groups, MaxGroupsPerEndpoint)
	case groups == 0 && a.Spec.NetworkACL == nil && places == 0:
		r.fault("spec", "attaches nothing: give networkACLRef or securityGroupRefs")
	}
	if twice, ok := repeated(a.Spec.SecurityGroups, func(x, y Ref) int { return strings.Compare(x.Name, y.Name) }); ok {
		r.fault("spec.securityGroupRefs", "has %q twice", twice.Name)
	}
	if twice, ok := repeated(a.Spec.Subnets, netip.Prefix.Compare); ok {
		r.fault("spec.subnets", "has %s twice", twice)
	}
	if twice, ok := repeated(a.Spec.Pools, strings.Compare); ok {
		r.fault("spec.pools", "has %q twice", twice)
	}
	if _, ok := repeated(a.Spec.Endpoints, Selector.compare); ok {
		r.fault("spec.endpoints", "has the same selector twice")
	}
}

func (s Selector) compare(o Selector) int {
	return cmp.Or(strings.Compare(s.Network, o.Network), strings.Compare(s.Namespace, o.Namespace), strings.Compare(s.Name, o.Name))
}

// repeated returns a value that occurs twice.
func repeated[T any](list []T, compare func(a, b T) int) (twice T, ok bool) {
	sorted := slices.SortedFunc(slices.Values(list), compare)
	for i := 1; i < len(sorted); i++ {
		if compare(sorted[i-1], sorted[i]) == 0 {
			return sorted[i], true
		}
	}
	return twice, false
}

func (r *reader) selector(path string, v any) Selector {
	m := r.object(path, v, "network", "namespace", "name")
	if m == nil {
		return Selector{}
	}
	word := func(field string) string {
		s, ok := r.text(path, m, field, false)
		if bad := strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c > '~' }); ok && (s == "" || len(s) > 253 || bad) {
			r.fault(join(path, field), "must be 1 to 253 printable ASCII characters without white space")
		}
		return s
	}
	s := Selector{Network: word("network"), Namespace: word("namespace"), Name: word("name")}
	if i := strings.IndexByte(s.Name, '*'); i >= 0 && i != len(s.Name)-1 {
		r.fault(join(path, "name"), "has a '*' that is not at its end")
	}
	if s == (Selector{}) {
		r.fault(path, "selects nothing in particular: give network, namespace or name")
	}
	return s
}
