package policy

import (
	"encoding/json"
	"net/netip"
	"strings"
)

// APIVersion is that of every document.
const APIVersion = "mknet/v1"

// Kind is the kind of a document.
type Kind string

// The kinds. KindList is only a wrapper: its items are read one by one.
const (
	KindNetworkACL    Kind = "NetworkACL"
	KindSecurityGroup Kind = "SecurityGroup"
	KindAttachment    Kind = "Attachment"
	KindList          Kind = "List"
)

// ParseKind reads a kind as the command line has it: in any case, in the plural,
// or short (acl, sg).
func ParseKind(s string) (Kind, bool) {
	switch strings.TrimSuffix(strings.ToLower(s), "s") {
	case "networkacl", "acl":
		return KindNetworkACL, true
	case "securitygroup", "sg":
		return KindSecurityGroup, true
	case "attachment":
		return KindAttachment, true
	}
	return "", false
}

// Key names a document; a set has at most one of each key.
type Key struct {
	Kind Kind   `json:"kind"`
	Name string `json:"name"`
}

func (k Key) String() string { return string(k.Kind) + "/" + k.Name }

// Compare orders keys by kind, then name.
func (k Key) Compare(o Key) int {
	if c := strings.Compare(string(k.Kind), string(o.Kind)); c != 0 {
		return c
	}
	return strings.Compare(k.Name, o.Name)
}

// Object is a *NetworkACL, a *SecurityGroup or an *Attachment.
type Object interface {
	Key() Key
}

// Header is what every document begins with.
type Header struct {
	APIVersion string   `json:"apiVersion"`
	Kind       Kind     `json:"kind"`
	Metadata   Metadata `json:"metadata"`
}

// Metadata names a document.
type Metadata struct {
	Name string `json:"name"`
}

// Key returns the key of the document.
func (h Header) Key() Key { return Key{h.Kind, h.Metadata.Name} }

// NetworkACL holds ordered rules, allowing and denying, for all endpoints of a
// subnet.
type NetworkACL struct {
	Header
	Spec NetworkACLSpec `json:"spec"`
}

// NetworkACLSpec has the rules of both directions, in the order of the document.
type NetworkACLSpec struct {
	Ingress []ACLRule `json:"ingress,omitempty"`
	Egress  []ACLRule `json:"egress,omitempty"`
}

// ACLRule is one rule; the lowest priority number that matches decides.
type ACLRule struct {
	Priority uint16       `json:"priority"` // 1 to 65535, unique in its direction
	Action   Action       `json:"action"`
	Protocol Protocol     `json:"protocol"`
	CIDR     netip.Prefix `json:"cidr,omitzero"`   // of the peer; zero: every peer
	Ports    []PortRange  `json:"ports,omitempty"` // destination ports; empty: every packet
}

// Action is what an ACL rule says of a packet.
type Action string

// The actions.
const (
	Allow Action = "allow"
	Deny  Action = "deny"
)

// SecurityGroup holds rules that allow, for the endpoints that hold the group.
type SecurityGroup struct {
	Header
	Spec SecurityGroupSpec `json:"spec"`
}

// SecurityGroupSpec has the rules of both directions.
type SecurityGroupSpec struct {
	Ingress []GroupIngress `json:"ingress,omitempty"`
	Egress  []GroupEgress  `json:"egress,omitempty"`
	// EgressDefault is what happens to what leaves where no attached group has an
	// egress rule. Empty means Allow.
	EgressDefault Action `json:"egressDefault,omitempty"`
}

// GroupIngress allows what comes from any of its peers.
type GroupIngress struct {
	From     []Peer      `json:"from,omitempty"` // empty: every peer
	Protocol Protocol    `json:"protocol"`
	Ports    []PortRange `json:"ports,omitempty"` // destination ports; empty: every packet
}

// GroupEgress allows what goes to any of its peers.
type GroupEgress struct {
	To       []Peer      `json:"to,omitempty"` // empty: every peer
	Protocol Protocol    `json:"protocol"`
	Ports    []PortRange `json:"ports,omitempty"` // destination ports; empty: every packet
}

// Peer is either addresses or the endpoints that hold a group.
type Peer struct {
	CIDR  netip.Prefix `json:"cidr,omitzero"`
	Group *Ref         `json:"securityGroupRef,omitempty"`
}

// Ref names another document.
type Ref struct {
	Name string `json:"name"`
}

// Attachment says where policies apply: a NetworkACL at subnets and pools,
// SecurityGroups at endpoints.
type Attachment struct {
	Header
	Spec AttachmentSpec `json:"spec"`
}

// AttachmentSpec has either half or both.
type AttachmentSpec struct {
	NetworkACL *Ref           `json:"networkACLRef,omitempty"`
	Subnets    []netip.Prefix `json:"subnets,omitempty"`
	Pools      []string       `json:"pools,omitempty"` // of the daemon's configuration; ChildPool: that of the children

	SecurityGroups []Ref      `json:"securityGroupRefs,omitempty"`
	Endpoints      []Selector `json:"endpoints,omitempty"`
}

// ChildPool is the name by which an Attachment means the pool of child kernels.
const ChildPool = "children"

// Selector selects endpoints; an empty field matches every one, and at least one
// is not empty.
type Selector struct {
	Network   string `json:"network,omitempty"`   // CNI network name
	Namespace string `json:"namespace,omitempty"` // of the pod
	Name      string `json:"name,omitempty"`      // see Endpoint.Name; a closing "*" matches any rest
}

// PortRange is destination ports From to To, both included, 1 to 65535.
type PortRange struct {
	From, To uint16
}

// MarshalJSON writes the form that documents have.
func (r PortRange) MarshalJSON() ([]byte, error) {
	if r.From == r.To {
		return json.Marshal(struct {
			Port uint16 `json:"port"`
		}{r.From})
	}
	type bounds struct {
		From uint16 `json:"from"`
		To   uint16 `json:"to"`
	}
	return json.Marshal(struct {
		Range bounds `json:"portRange"`
	}{bounds(r)})
}
