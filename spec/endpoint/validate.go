package endpoint

import (
	"fmt"
	"strings"
)

// Limits of identifiers.
const (
	MaxIdentifierBytes = 128 // network, container ID, sandbox ID and generation
	MaxIfNameBytes     = 15  // IFNAMSIZ - 1, linux/if.h
	MinMTU             = 576 // RFC 791: every host must accept 576 bytes
	MaxMTU             = 65515
	DefaultMTU         = 1400 // where the egress has none that we can read
)

// IdentifierError says which identifier is not acceptable and why. It is
// returned by every Validate function of this package.
type IdentifierError struct {
	Kind   string // "network", "containerID", "ifName", ...
	Value  string // clipped to 64 bytes
	Reason string
}

func (e *IdentifierError) Error() string {
	return fmt.Sprintf("%s %q: %s", e.Kind, e.Value, e.Reason)
}

// ValidateIdentifier checks a name that comes from a caller against
// [A-Za-z0-9][A-Za-z0-9_.-]* and at most 128 bytes (CNI SPEC section 2).
func ValidateIdentifier(kind, s string) error {
	switch {
	case s == "":
		return &IdentifierError{Kind: kind, Value: s, Reason: "must not be empty"}
	case len(s) > MaxIdentifierBytes:
		return &IdentifierError{Kind: kind, Value: clip(s), Reason: fmt.Sprintf("has %d bytes, at most %d are allowed", len(s), MaxIdentifierBytes)}
	}
	for i := range len(s) {
		c := s[i]
		alnum := c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !alnum && (i == 0 || c != '_' && c != '.' && c != '-') {
			return &IdentifierError{Kind: kind, Value: clip(s), Reason: "must match [A-Za-z0-9][A-Za-z0-9_.-]*"}
		}
	}
	return nil
}

// ValidateIfName checks the name of an interface that a caller wants in its
// namespace: what Linux accepts, and none of the names that mean something else
// to the kernel or to mknet.
func ValidateIfName(s string) error {
	bad := func(reason string) error { return &IdentifierError{Kind: "ifName", Value: clip(s), Reason: reason} }
	switch {
	case s == "":
		return bad("must not be empty")
	case len(s) > MaxIfNameBytes:
		return bad(fmt.Sprintf("has %d bytes, Linux allows %d", len(s), MaxIfNameBytes))
	case s == "." || s == "..":
		return bad("is not a name that Linux accepts")
	case s == "lo" || s == "all" || s == "default":
		return bad("is reserved by the kernel")
	case strings.HasPrefix(s, PeerLinkPrefix), strings.HasPrefix(s, HostLinkPrefix):
		return bad("begins with a prefix that mknet uses for its own links")
	}
	for i := range len(s) {
		// '%' is expanded by the kernel (dev_alloc_name); bytes above 0x7e are
		// legal but unreadable in every tool.
		if c := s[i]; c <= ' ' || c > '~' || c == '/' || c == ':' || c == '%' {
			return bad("must be printable and without '/', ':', '%' and white space")
		}
	}
	return nil
}

// ValidateMTU checks an MTU in bytes; 0 means "follow the egress" and is valid.
func ValidateMTU(mtuBytes int) error {
	if mtuBytes != 0 && (mtuBytes < MinMTU || mtuBytes > MaxMTU) {
		return &IdentifierError{Kind: "mtu", Value: fmt.Sprint(mtuBytes), Reason: fmt.Sprintf("must be from %d to %d bytes", MinMTU, MaxMTU)}
	}
	return nil
}

// clip bounds what an error repeats of a hostile value.
func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "..."
	}
	return s
}
