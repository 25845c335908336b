package policy

import (
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Set is documents that are valid together. It is not changed once it is made;
// the zero Set is empty.
type Set struct {
	acls        map[string]*NetworkACL
	groups      map[string]*SecurityGroup
	attachments []*Attachment // by name
}

// NewSet puts documents together. Where one refers to something that is not among
// them, or where two contradict each other, the error is an *Error.
func NewSet(objects ...Object) (*Set, error) {
	s := &Set{acls: map[string]*NetworkACL{}, groups: map[string]*SecurityGroup{}}
	faults := &Error{}
	seen := map[Key]bool{}
	for _, o := range objects {
		if seen[o.Key()] {
			faults.add(o.Key().String(), "", "occurs twice")
			continue
		}
		seen[o.Key()] = true
		switch o := o.(type) {
		case *NetworkACL:
			s.acls[o.Metadata.Name] = o
		case *SecurityGroup:
			s.groups[o.Metadata.Name] = o
		case *Attachment:
			s.attachments = append(s.attachments, o)
		}
	}
	if len(objects) > MaxDocuments {
		faults.add("all documents", "", "are %d, at most %d are kept", len(objects), MaxDocuments)
	}
	slices.SortFunc(s.attachments, func(a, b *Attachment) int { return strings.Compare(a.Metadata.Name, b.Metadata.Name) })
	s.checkRules(faults)
	s.checkAttachments(faults)
	if err := faults.err(); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *Set) checkRules(faults *Error) {
	for _, name := range slices.Sorted(maps.Keys(s.groups)) {
		g := s.groups[name]
		check := func(path string, peers []Peer) {
			for i, p := range peers {
				if p.Group != nil && s.groups[p.Group.Name] == nil {
					faults.add(g.Key().String(), index(path, i)+".securityGroupRef.name", "SecurityGroup %q does not exist", p.Group.Name)
				}
			}
		}
		for i, r := range g.Spec.Ingress {
			check(index("spec.ingress", i)+".from", r.From)
		}
		for i, r := range g.Spec.Egress {
			check(index("spec.egress", i)+".to", r.To)
		}
	}
}

func (s *Set) checkAttachments(faults *Error) {
	type claim struct{ acl, by string }
	subnets, pools := map[netip.Prefix]claim{}, map[string]claim{}
	for _, a := range s.attachments {
		doc := a.Key().String()
		for i, ref := range a.Spec.SecurityGroups {
			if s.groups[ref.Name] == nil {
				faults.add(doc, index("spec.securityGroupRefs", i)+".name", "SecurityGroup %q does not exist", ref.Name)
			}
		}
		if a.Spec.NetworkACL == nil {
			continue
		}
		mine := claim{a.Spec.NetworkACL.Name, a.Metadata.Name}
		if s.acls[mine.acl] == nil {
			faults.add(doc, "spec.networkACLRef.name", "NetworkACL %q does not exist", mine.acl)
		}
		for i, p := range a.Spec.Subnets {
			if first, ok := subnets[p]; ok && first.acl != mine.acl {
				faults.add(doc, index("spec.subnets", i), "%s has NetworkACL %q by Attachment %q", p, first.acl, first.by)
			} else {
				subnets[p] = mine
			}
		}
		for i, p := range a.Spec.Pools {
			if first, ok := pools[p]; ok && first.acl != mine.acl {
				faults.add(doc, index("spec.pools", i), "pool %q has NetworkACL %q by Attachment %q", p, first.acl, first.by)
			} else {
				pools[p] = mine
			}
		}
	}
}

// All iterates over the documents in the order of their keys.
func (s *Set) All() iter.Seq[Object] {
	return func(yield func(Object) bool) {
		for _, o := range s.Objects() {
			if !yield(o) {
				return
			}
		}
	}
}

// Objects returns the documents in the order of their keys.
func (s *Set) Objects() []Object {
	var out []Object
	for _, a := range s.attachments {
		out = append(out, a)
	}
	for _, name := range slices.Sorted(maps.Keys(s.acls)) {
		out = append(out, s.acls[name])
	}
	for _, name := range slices.Sorted(maps.Keys(s.groups)) {
		out = append(out, s.groups[name])
	}
	return out
}

// NetworkACL returns a document, or nil.
func (s *Set) NetworkACL(name string) *NetworkACL { return s.acls[name] }

// SecurityGroup returns a document, or nil.
func (s *Set) SecurityGroup(name string) *SecurityGroup { return s.groups[name] }

// UnknownPools has a fault for every pool that an Attachment names and that is not
// configured. Only the daemon can know: there it is a fault at apply.
func (s *Set) UnknownPools(pools Pools) error {
	faults := &Error{}
	for _, a := range s.attachments {
		for i, p := range a.Spec.Pools {
			if _, ok := pools[p]; !ok {
				faults.add(a.Key().String(), index("spec.pools", i), "pool %q is not configured (known: %s)", p, strings.Join(slices.Sorted(maps.Keys(pools)), ", "))
			}
		}
	}
	return faults.err()
}

// Pools are the address pools of a daemon by name, see ChildPool.
type Pools map[string]netip.Prefix

// Endpoint is what policy knows of an endpoint.
type Endpoint struct {
	Address   netip.Addr `json:"address"`
	Network   string     `json:"network,omitempty"`
	Namespace string     `json:"namespace,omitempty"` // of the pod, empty without one
	// Name is the pod's; of an endpoint without a pod, the container ID.
	Name string `json:"name,omitempty"`
}

// Match reports whether the selector means the endpoint.
func (s Selector) Match(e Endpoint) bool {
	prefix, any := strings.CutSuffix(s.Name, "*")
	return (s.Network == "" || s.Network == e.Network) && (s.Namespace == "" || s.Namespace == e.Namespace) &&
		(s.Name == "" || s.Name == e.Name || any && strings.HasPrefix(e.Name, prefix))
}

// Policies is what applies to one endpoint.
type Policies struct {
	ACL    *NetworkACL      // nil: none attached
	Groups []*SecurityGroup // by name
	// TooMany is set where more than MaxGroupsPerEndpoint groups are attached.
	// Every packet is denied by this layer then, in both directions.
	TooMany bool
}

// GroupNames returns the names of the groups, in order.
func (p Policies) GroupNames() []string {
	out := make([]string, len(p.Groups))
	for i, g := range p.Groups {
		out[i] = g.Metadata.Name
	}
	return out
}

// For resolves the attachments for one endpoint. Of several subnets and pools that
// hold its address, the longest prefix gives the NetworkACL; of two equal ones, a
// subnet goes before a pool.
func (s *Set) For(e Endpoint, pools Pools) Policies {
	var out Policies
	best := -1
	take := func(p netip.Prefix, bonus int, acl string) {
		if p.IsValid() && p.Contains(e.Address) && 2*p.Bits()+bonus > best {
			best, out.ACL = 2*p.Bits()+bonus, s.acls[acl]
		}
	}
	groups := map[string]*SecurityGroup{}
	for _, a := range s.attachments {
		if a.Spec.NetworkACL != nil {
			for _, p := range a.Spec.Subnets {
				take(p, 1, a.Spec.NetworkACL.Name)
			}
			for _, name := range a.Spec.Pools {
				take(pools[name], 0, a.Spec.NetworkACL.Name)
			}
		}
		if slices.ContainsFunc(a.Spec.Endpoints, func(sel Selector) bool { return sel.Match(e) }) {
			for _, ref := range a.Spec.SecurityGroups {
				groups[ref.Name] = s.groups[ref.Name]
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		out.Groups = append(out.Groups, groups[name])
	}
	out.TooMany = len(out.Groups) > MaxGroupsPerEndpoint
	return out
}
