package endpoint

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// PodLinkPrefix begins the host veth of an ordinary pod, see PodHostLink.
const PodLinkPrefix = "lxc"

// PodHostLink is the host veth of an ordinary pod: "lxc" + the first 12 hex
// digits of sha256(containerID ":" ifName), the 15 bytes that IFNAMSIZ allows.
// Unlike a child's it does not depend on the generation, so that an operator
// finds it from the container; two attachments that differ in the network alone
// have the same one, and the second is refused.
func PodHostLink(containerID, ifName string) string {
	sum := sha256.Sum256([]byte(containerID + ":" + ifName))
	return PodLinkPrefix + hex.EncodeToString(sum[:])[:12]
}

// TempLink is what the pod end of a veth is called until it gets CNI_IFNAME:
// "mkt" + the first 12 hex digits. Nothing else has that name, and a link that
// was left half made does not occupy the name that the runtime asked for.
func (g Generation) TempLink() string { return "mkt" + g.String()[:12] }

// MAC is a hardware address of a veth; the zero value means "none asked for".
type MAC [6]byte

// ParseMAC reads a unicast hardware address of 6 bytes.
func ParseMAC(s string) (MAC, error) {
	hw, err := net.ParseMAC(s)
	if err != nil || len(hw) != len(MAC{}) {
		return MAC{}, &IdentifierError{Kind: "mac", Value: clip(s), Reason: "must be a MAC address of 6 bytes"}
	}
	m := MAC(hw)
	switch {
	case m.IsZero():
		return MAC{}, &IdentifierError{Kind: "mac", Value: s, Reason: "must not be zero"}
	case m[0]&1 != 0:
		return MAC{}, &IdentifierError{Kind: "mac", Value: s, Reason: "is a group address, an interface has its own"}
	}
	return m, nil
}

// IsZero reports whether there is none.
func (m MAC) IsZero() bool { return m == MAC{} }

// String is the usual form: 02:00:5e:10:00:01.
func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// MarshalText writes the usual form; the zero value is empty text.
func (m MAC) MarshalText() ([]byte, error) {
	if m.IsZero() {
		return nil, nil
	}
	return []byte(m.String()), nil
}

// UnmarshalText reads what MarshalText writes.
func (m *MAC) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*m = MAC{}
		return nil
	}
	parsed, err := ParseMAC(string(text))
	if err != nil {
		return err
	}
	*m = parsed
	return nil
}

// PodMAC is the hardware address of a pod's end of the veth: the requested one,
// else the generation's.
func (e Endpoint) PodMAC() MAC {
	if e.MAC.IsZero() {
		return e.Generation.PeerMAC()
	}
	return e.MAC
}

// PodRoutes are the destinations that a pod reaches by its gateway. One whose
// namespace has a default route of somebody else reaches its own subnet at least.
func (e Endpoint) PodRoutes() []netip.Prefix {
	anywhere := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	subnet := e.Subnet.Masked()
	var routes []netip.Prefix
	switch {
	case e.MainDefault:
		routes = append(routes, anywhere)
	case subnet.Bits() < 32:
		routes = append(routes, subnet)
	}
	for _, r := range e.Routes {
		if r = r.Masked(); r != anywhere && !slices.Contains(routes, r) {
			routes = append(routes, r)
		}
	}
	return routes
}

// The device group of a pod's host veth: PodGroup and its flags. One firewall
// rule with PodGroup/PodGroupMask matches every pod's link and no foreign one,
// whatever that is called, and a flag costs no rule for each pod.
const (
	PodGroup     = 0x6d6b0100 // "mk", 1
	PodGroupMask = 0xffffff00 // without the flags

	PodGroupPodAccess = 1 << 0 // podAccess is allow
	PodGroupHostDeny  = 1 << 1 // hostAccess is deny
	PodGroupNoMasq    = 1 << 2 // ipMasq is off
)

// LinkGroup is the device group of the endpoint's host veth; 0, the default
// group, for a multikernel endpoint.
func (e Endpoint) LinkGroup() uint32 {
	if e.Mode != Veth {
		return 0
	}
	g := uint32(PodGroup)
	if e.PodAccess == Allow {
		g |= PodGroupPodAccess
	}
	if e.HostAccess == Deny {
		g |= PodGroupHostDeny
	}
	if !e.IPMasq {
		g |= PodGroupNoMasq
	}
	return g
}

// Pool is a range that mknetd gives addresses to ordinary pods from.
type Pool struct {
	Name       string
	Prefix     netip.Prefix // IPv4, canonical, /14 to /30
	Gateway    netip.Addr   // what pods take for their router; inside the prefix it is nobody's address
	Namespaces []string     // Kubernetes namespaces that it is for; empty: for all that no other pool lists
}

// Bounds of a pool's prefix.
const (
	MinPoolBits = 14 // 2^18 addresses, the allocator's limit
	MaxPoolBits = 30 // a network, a gateway, a pod, a broadcast address
)

// Validate checks one pool.
func (p Pool) Validate() error {
	if err := ValidateIdentifier("pool", p.Name); err != nil {
		return err
	}
	switch {
	case !p.Prefix.IsValid() || !p.Prefix.Addr().Is4():
		return fmt.Errorf("prefix %q: must be an IPv4 prefix", p.Prefix)
	case p.Prefix != p.Prefix.Masked():
		return fmt.Errorf("prefix %s: has host bits set, did you mean %s", p.Prefix, p.Prefix.Masked())
	case p.Prefix.Bits() < MinPoolBits || p.Prefix.Bits() > MaxPoolBits:
		return fmt.Errorf("prefix %s: must be /%d to /%d", p.Prefix, MinPoolBits, MaxPoolBits)
	case p.Prefix.Addr().IsMulticast() || p.Prefix.Addr().IsLoopback() || p.Prefix.Addr().IsLinkLocalUnicast() || p.Prefix.Addr().IsUnspecified():
		return fmt.Errorf("prefix %s: is not one that hosts may have", p.Prefix)
	}
	if err := ValidateGateway(p.Prefix, p.Gateway); err != nil {
		return err
	}
	for _, ns := range p.Namespaces {
		if err := ValidateIdentifier("namespace", ns); err != nil {
			return err
		}
	}
	return nil
}

// ValidateGateway checks what pods of a subnet shall take for their router. It
// may lie outside the subnet: pods have a route of its own to it.
func ValidateGateway(subnet netip.Prefix, gateway netip.Addr) error {
	switch {
	case !gateway.Is4() || gateway.IsUnspecified() || gateway.IsMulticast() || gateway.IsLoopback() || gateway == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return fmt.Errorf("gateway %q: must be the IPv4 address of a host", gateway)
	case subnet.Bits() < 31 && (gateway == subnet.Masked().Addr() || gateway == last(subnet)):
		return fmt.Errorf("gateway %s: is the first or last address of %s, which no host has", gateway, subnet)
	}
	return nil
}

// last is the broadcast address of a prefix.
func last(p netip.Prefix) netip.Addr { return offset(p.Masked().Addr(), 1<<(32-p.Bits())-1) }

// FirstAddress is the first usable address of the prefix, the usual gateway.
func FirstAddress(p netip.Prefix) netip.Addr { return offset(p.Masked().Addr(), 1) }

// Serves reports whether the pool lists the Kubernetes namespace.
func (p Pool) Serves(namespace string) bool {
	return namespace != "" && slices.Contains(p.Namespaces, namespace)
}

// gatewayOffset is the gateway's place among the addresses, 0 when it lies outside.
func (p Pool) gatewayOffset() uint32 {
	if !p.Prefix.Contains(p.Gateway) {
		return 0
	}
	return toUint(p.Gateway) - toUint(p.Prefix.Addr())
}

// Slots is the number of pods that the pool holds: its addresses without
// network, broadcast and gateway.
func (p Pool) Slots() uint32 {
	n := uint32(1)<<(32-p.Prefix.Bits()) - 2
	if p.gatewayOffset() != 0 {
		n--
	}
	return n
}

// At returns the address of a slot, which must be below Slots.
func (p Pool) At(slot uint32) netip.Addr {
	n := slot + 1
	if g := p.gatewayOffset(); g != 0 && n >= g {
		n++
	}
	return offset(p.Prefix.Addr(), n)
}

// SlotOf returns the slot of an address that a pod may have.
func (p Pool) SlotOf(addr netip.Addr) (uint32, error) {
	if !p.Prefix.Contains(addr) {
		return 0, fmt.Errorf("address %s: is not in pool %s (%s)", addr, p.Name, p.Prefix)
	}
	n, g := toUint(addr)-toUint(p.Prefix.Addr()), p.gatewayOffset()
	switch {
	case n == 0 || addr == last(p.Prefix):
		return 0, fmt.Errorf("address %s: is the first or last of pool %s (%s), which no host has", addr, p.Name, p.Prefix)
	case g != 0 && n == g:
		return 0, fmt.Errorf("address %s: is the gateway of pool %s", addr, p.Name)
	case g != 0 && n > g:
		n--
	}
	return n - 1, nil
}

// PoolFor returns the pool of a pod: the one asked for by name, else the first
// that lists its Kubernetes namespace, else the first that lists none.
func PoolFor(pools []Pool, name, namespace string) (int, error) {
	byDefault := -1
	for i, p := range pools {
		switch {
		case name != "" && p.Name == name, name == "" && p.Serves(namespace):
			return i, nil
		case byDefault < 0 && len(p.Namespaces) == 0:
			byDefault = i
		}
	}
	switch {
	case name != "":
		return 0, fmt.Errorf("pool %q: is not configured", clip(name))
	case byDefault >= 0:
		return byDefault, nil
	case len(pools) == 0:
		return 0, errors.New("no pool for ordinary pods is configured (add one under `pools`)")
	}
	return 0, fmt.Errorf("no pool lists the Kubernetes namespace %q and none is for all", clip(namespace))
}

// CheckPools checks all of them against each other and against what else is given.
func CheckPools(pods []Pool, children Pools) error {
	taken := map[string]netip.Prefix{"the child pool": children.Child, "the transit pool": children.Transit}
	for i, p := range pods {
		if err := p.Validate(); err != nil {
			return fmt.Errorf("pool %q: %w", clip(p.Name), err)
		}
		for _, q := range pods[:i] {
			switch {
			case q.Name == p.Name:
				return fmt.Errorf("pool %q: occurs twice", p.Name)
			case q.Prefix.Overlaps(p.Prefix):
				return fmt.Errorf("pool %q: %s overlaps %s of pool %q", p.Name, p.Prefix, q.Prefix, q.Name)
			}
		}
		for what, prefix := range taken {
			if prefix.IsValid() && prefix.Overlaps(p.Prefix) {
				return fmt.Errorf("pool %q: %s overlaps %s %s", p.Name, p.Prefix, what, prefix)
			}
			if prefix.IsValid() && prefix.Contains(p.Gateway) {
				return fmt.Errorf("pool %q: gateway %s lies in %s %s", p.Name, p.Gateway, what, prefix)
			}
		}
	}
	return nil
}
