package endpoint

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
)

// Generation is the identity of one endpoint: 128 random bits, written as 32
// lower-case hexadecimal digits. The zero value means "not known".
type Generation [16]byte

// NewGeneration returns a fresh random generation.
func NewGeneration() Generation {
	var g Generation
	// crypto/rand.Read never fails since Go 1.24: it ends the process instead.
	_, _ = rand.Read(g[:])
	return g
}

// ParseGeneration reads the 32 lower-case hexadecimal digits of a generation.
// Upper case, any other length and the all-zero generation are refused.
func ParseGeneration(s string) (Generation, error) {
	var g Generation
	if len(s) != 2*len(g) {
		return Generation{}, &IdentifierError{Kind: "generation", Value: clip(s), Reason: "must be 32 lower-case hexadecimal digits"}
	}
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return Generation{}, &IdentifierError{Kind: "generation", Value: clip(s), Reason: "must be 32 lower-case hexadecimal digits"}
		}
	}
	if _, err := hex.Decode(g[:], []byte(s)); err != nil {
		return Generation{}, &IdentifierError{Kind: "generation", Value: clip(s), Reason: err.Error()}
	}
	if g.IsZero() {
		return Generation{}, &IdentifierError{Kind: "generation", Value: s, Reason: "must not be zero"}
	}
	return g, nil
}

// IsZero reports whether the generation is the zero value, "not known".
func (g Generation) IsZero() bool { return g == Generation{} }

// String returns the 32 lower-case hexadecimal digits.
func (g Generation) String() string { return hex.EncodeToString(g[:]) }

// MarshalText writes the hexadecimal digits; the zero generation is empty text.
func (g Generation) MarshalText() ([]byte, error) {
	if g.IsZero() {
		return nil, nil
	}
	return []byte(g.String()), nil
}

// UnmarshalText reads what MarshalText writes.
func (g *Generation) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*g = Generation{}
		return nil
	}
	parsed, err := ParseGeneration(string(text))
	if err != nil {
		return err
	}
	*g = parsed
	return nil
}

// HostLink is the host veth of a multikernel endpoint, in the primary's root
// namespace: "mkv" + the first 11 hex digits (14 of the 15 bytes that IFNAMSIZ
// allows).
func (g Generation) HostLink() string { return HostLinkPrefix + g.String()[:11] }

// Chain is the endpoint's iptables chain: "MK-" + the first 12 hex digits.
func (g Generation) Chain() string { return ChainPrefix + g.String()[:12] }

// OwnedNamespace is the name under /run/netns of a namespace that mknetd made
// for a runtime-owned endpoint: "mk-" + the first 12 hex digits.
func (g Generation) OwnedNamespace() string { return "mk-" + g.String()[:12] }

// AliasPrefix begins the alias of every link that mknetd makes.
const AliasPrefix = "mknet "

// Alias marks a link as ours: AliasPrefix + the full generation. A link without
// it is foreign, whatever its name is.
func (g Generation) Alias() string { return AliasPrefix + g.String() }

// HostMAC is the hardware address of the host veth: 02 (locally administered),
// then bytes 6 to 10 of the generation, those that follow the ones in the name.
// The kernel takes no alias when it creates a link, but an address: a veth whose
// maker died before it set the alias is still known by name and address.
func (g Generation) HostMAC() [6]byte { return [6]byte{0x02, g[6], g[7], g[8], g[9], g[10]} }

// PeerMAC is the hardware address of the veth peer: HostMAC with 06 in front.
func (g Generation) PeerMAC() [6]byte { return [6]byte{0x06, g[6], g[7], g[8], g[9], g[10]} }

// Short is the form for logs and tables: the first 12 hex digits, the same
// digits that a chain carries.
func (g Generation) Short() string { return g.String()[:12] }

// Names of kernel objects that do not depend on a generation.
const (
	HostLinkPrefix = "mkv" // host veth of a multikernel endpoint, see Generation.HostLink
	ChainPrefix    = "MK-" // an endpoint's iptables chain, see Generation.Chain
	// TraceTablePrefix begins the table of nf_tables of a running trace: it and 8 hex
	// digits at random.
	TraceTablePrefix = "mknet-trace-"
	PeerLinkPrefix   = "mkhost" // veth peer in the CNI namespace: mkhost0, mkhost1, ...
	ChildLink        = "mkn"    // TUN in the child: mkn0, mkn1, ...
)

// PeerLink is the veth peer inside the CNI namespace of the n-th attachment
// there, counted from 0: "mkhost0", "mkhost1", ...
func PeerLink(n int) string { return fmt.Sprintf("%s%d", PeerLinkPrefix, n) }

// Attachment is the CNI identity of an endpoint. At any time at most one live
// endpoint has it.
type Attachment struct {
	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
}

// String names the attachment for an operator: network/containerID/ifName.
func (a Attachment) String() string { return a.Network + "/" + a.ContainerID + "/" + a.IfName }

// Validate checks all three parts; the error is an *IdentifierError.
func (a Attachment) Validate() error {
	if err := ValidateIdentifier("network", a.Network); err != nil {
		return err
	}
	if err := ValidateIdentifier("containerID", a.ContainerID); err != nil {
		return err
	}
	return ValidateIfName(a.IfName)
}

// Sandbox is the identity of one incarnation of a child, given by the runtime.
type Sandbox struct {
	ID         string `json:"sandboxID"`
	Generation string `json:"sandboxGeneration"`
}

// String names the sandbox for an operator: ID@generation.
func (s Sandbox) String() string { return s.ID + "@" + s.Generation }

// Validate checks both parts; the error is an *IdentifierError.
func (s Sandbox) Validate() error {
	if err := ValidateIdentifier("sandboxID", s.ID); err != nil {
		return err
	}
	return ValidateIdentifier("sandboxGeneration", s.Generation)
}

// Namespace identifies a network namespace for as long as the host runs. Paths,
// PIDs and inodes are reused by the kernel, so only BootID and Cookie identify;
// the rest is for the operator's eyes.
type Namespace struct {
	BootID string `json:"bootID"`          // /proc/sys/kernel/random/boot_id
	Cookie uint64 `json:"cookie,string"`   // SO_NETNS_COOKIE, unique while the host is up
	Path   string `json:"path,omitempty"`  // as the caller gave it
	Device uint64 `json:"device"`          // st_dev of the nsfs file
	Inode  uint64 `json:"inode"`           // st_ino of the nsfs file
	Owned  bool   `json:"owned,omitempty"` // made by mknetd (PROVISION), removed with the endpoint
}

// Same reports whether both describe the same namespace.
func (n Namespace) Same(o Namespace) bool {
	return n.Cookie != 0 && n.Cookie == o.Cookie && n.BootID == o.BootID
}
