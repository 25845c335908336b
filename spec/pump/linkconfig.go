package pump

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"mknet/spec/endpoint"
)

// Limits of a LinkConfig.
const (
	maxDNSEntries  = 16
	maxDNSBytes    = 253 // RFC 1035 section 2.3.4, without the trailing dot
	MinKeepalive   = 100 * time.Millisecond
	MaxKeepalive   = 10 * time.Minute
	maxRefusedText = 256
	maxOffloads    = 0xff // TUN_F_* bits, those of later kernels included
)

// Window is the credit that a receiver grants one lane at the start of a
// connection.
type Window struct {
	Bytes    uint32 `json:"bytes"`
	Messages uint32 `json:"messages"`
}

// LinkConfig is what a confirmed session tells the agent: how its device looks
// and how the data plane runs. It travels sealed. A later session may carry
// another; the agent applies the difference.
type LinkConfig struct {
	Link     string       `json:"link"`    // "mkn0", "mkn1", ...
	Address  netip.Prefix `json:"address"` // the child's own address and its prefix length
	Gateway  netip.Addr   `json:"gateway"`
	MTUBytes int          `json:"mtu"`
	DNS      endpoint.DNS `json:"dns,omitzero"`

	VnetHdr  bool     `json:"vnetHdr"`  // the shim's TUN has the virtio-net header
	Offloads Offloads `json:"offloads"` // TUN_F_* bits that the shim's kernel gives
	Lanes    int      `json:"lanes"`    // what the shim would run; the agent answers with at most this
	Windows  []Window `json:"windows"`  // what the shim grants, one a lane

	Keepalive Milliseconds `json:"keepaliveMs"` // silence after which the peer is dead
	Sealed    bool         `json:"sealed"`      // data frames are encrypted too
	// NextToken replaces the token of this session from now on; nil keeps it.
	NextToken *Token `json:"nextToken,omitempty"`
}

// Ack is the agent's answer to a LinkConfig, sealed. Refused is set when the
// link could not be configured; everything else is then zero.
type Ack struct {
	VnetHdr  bool     `json:"vnetHdr"`
	Offloads Offloads `json:"offloads"`
	Lanes    int      `json:"lanes"`
	Windows  []Window `json:"windows"`
	Refused  string   `json:"refused,omitempty"` // at most 256 bytes of printable ASCII
}

// Milliseconds is a duration in whole milliseconds on the wire.
type Milliseconds time.Duration

// MarshalJSON writes the number of milliseconds.
func (m Milliseconds) MarshalJSON() ([]byte, error) {
	return json.Marshal(time.Duration(m).Milliseconds())
}

// UnmarshalJSON reads what MarshalJSON writes.
func (m *Milliseconds) UnmarshalJSON(b []byte) error {
	var n uint32
	if err := json.Unmarshal(b, &n); err != nil {
		return err
	}
	*m = Milliseconds(time.Duration(n) * time.Millisecond)
	return nil
}

// ErrMalformedConfig is returned for a LinkConfig or an Ack that is not
// acceptable, by both encoder and decoder.
var ErrMalformedConfig = errors.New("malformed link configuration")

func badConfig(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformedConfig, fmt.Sprintf(format, args...))
}

// Validate checks every field and the relations between them.
func (c LinkConfig) Validate() error {
	if !strings.HasPrefix(c.Link, endpoint.ChildLink) {
		return badConfig("link %q: must begin with %q", clipText(c.Link), endpoint.ChildLink)
	}
	if n := c.Link[len(endpoint.ChildLink):]; n == "" || len(n) > 3 || strings.Trim(n, "0123456789") != "" || n != "0" && n[0] == '0' {
		return badConfig("link %q: must be %q and a number below 1000", clipText(c.Link), endpoint.ChildLink)
	}
	switch a := c.Address.Addr(); {
	case !c.Address.IsValid() || !a.Is4():
		return badConfig("address %q: must be an IPv4 prefix", c.Address)
	case c.Address.Bits() < 8 || c.Address.Bits() > 31:
		return badConfig("address %s: prefix length must be 8 to 31", c.Address)
	case !a.IsGlobalUnicast():
		return badConfig("address %s: must be unicast", c.Address)
	case !c.Gateway.Is4() || !c.Gateway.IsGlobalUnicast() || !c.Address.Contains(c.Gateway) || c.Gateway == a:
		return badConfig("gateway %q: must be another unicast address in %s", c.Gateway, c.Address.Masked())
	case c.MTUBytes < endpoint.MinMTU || c.MTUBytes > endpoint.MaxMTU:
		return badConfig("mtu %d: must be from %d to %d bytes", c.MTUBytes, endpoint.MinMTU, endpoint.MaxMTU)
	case c.Offloads > maxOffloads || !c.VnetHdr && c.Offloads != 0:
		return badConfig("offloads %#x with vnetHdr %t", c.Offloads, c.VnetHdr)
	case time.Duration(c.Keepalive) < MinKeepalive || time.Duration(c.Keepalive) > MaxKeepalive:
		return badConfig("keepalive %s: must be from %s to %s", time.Duration(c.Keepalive), MinKeepalive, MaxKeepalive)
	case time.Duration(c.Keepalive)%time.Millisecond != 0:
		return badConfig("keepalive %s: must be whole milliseconds", time.Duration(c.Keepalive))
	}
	if c.NextToken != nil && *c.NextToken == (Token{}) {
		return badConfig("next token is all zero")
	}
	if err := checkLanes(c.Lanes, c.Windows); err != nil {
		return err
	}
	return ValidateDNS(c.DNS)
}

// ValidateDNS checks that a resolver configuration can be written into
// resolv.conf without adding a line of its own.
func ValidateDNS(d endpoint.DNS) error {
	for _, l := range []struct {
		name    string
		entries []string
	}{{"nameservers", d.Nameservers}, {"search", d.Search}, {"options", d.Options}} {
		if len(l.entries) > maxDNSEntries {
			return badConfig("dns %s: %d entries, at most %d are allowed", l.name, len(l.entries), maxDNSEntries)
		}
		for _, s := range l.entries {
			if err := checkWord("dns "+l.name, s); err != nil {
				return err
			}
		}
	}
	for _, s := range d.Nameservers {
		if _, err := netip.ParseAddr(s); err != nil {
			return badConfig("dns nameserver %q: is not an IP address", clipText(s))
		}
	}
	if d.Domain != "" {
		return checkWord("dns domain", d.Domain)
	}
	return nil
}

// checkWord refuses what would end the line or the word in resolv.conf.
func checkWord(kind, s string) error {
	if s == "" || len(s) > maxDNSBytes {
		return badConfig("%s: entry of %d bytes", kind, len(s))
	}
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' || s[i] == '#' || s[i] == ';' {
			return badConfig("%s %q: must be printable, without white space, '#' and ';'", kind, clipText(s))
		}
	}
	return nil
}

func checkLanes(lanes int, windows []Window) error {
	switch {
	case lanes < 1 || lanes > MaxLanes:
		return badConfig("%d lanes, must be 1 to %d", lanes, MaxLanes)
	case len(windows) != lanes:
		return badConfig("%d windows for %d lanes", len(windows), lanes)
	}
	for _, w := range windows {
		if err := w.Validate(); err != nil {
			return badConfig("%v", err)
		}
	}
	return nil
}

// Validate checks every field.
func (a Ack) Validate() error {
	if a.Refused != "" {
		if a.VnetHdr || a.Offloads != 0 || a.Lanes != 0 || a.Windows != nil {
			return badConfig("refusal with values")
		}
		if Printable(a.Refused) != a.Refused {
			return badConfig("refusal text is not printable or longer than %d bytes", maxRefusedText)
		}
		return nil
	}
	if a.Offloads > maxOffloads || !a.VnetHdr && a.Offloads != 0 {
		return badConfig("offloads %#x with vnetHdr %t", a.Offloads, a.VnetHdr)
	}
	return checkLanes(a.Lanes, a.Windows)
}

// Printable makes any text fit for Ack.Refused: printable ASCII, at most 256
// bytes.
func Printable(s string) string {
	b := []byte(s)
	if len(b) > maxRefusedText {
		b = b[:maxRefusedText]
	}
	for i, c := range b {
		if c < ' ' || c > '~' {
			b[i] = '?'
		}
	}
	return string(b)
}
