package endpoint

import (
	"fmt"
	"net/netip"
)

// Limits of a resolver configuration. The kernel has none; these are generous for
// resolv.conf(5), whose own readers stop at 3 nameservers.
const (
	MaxNameservers   = 16
	MaxSearchDomains = 32
	MaxResolvOptions = 32
	MaxDomainBytes   = 253 // RFC 1035 section 2.3.4, in text form
)

// Validate checks what will become lines of a resolv.conf: nameservers are
// addresses without a zone, everything else is printable and without white space,
// so that no value can add a line or a word of its own. The error is an
// *IdentifierError.
func (d DNS) Validate() error {
	if n := len(d.Nameservers); n > MaxNameservers {
		return tooMany("dns nameservers", n, MaxNameservers)
	}
	for _, ns := range d.Nameservers {
		if a, err := netip.ParseAddr(ns); err != nil || a.Zone() != "" || a.IsUnspecified() || a.IsMulticast() {
			return &IdentifierError{Kind: "dns nameserver", Value: clip(ns), Reason: "must be the IP address of a host"}
		}
	}
	if err := resolvWord("dns domain", d.Domain, true); err != nil {
		return err
	}
	if n := len(d.Search); n > MaxSearchDomains {
		return tooMany("dns search domains", n, MaxSearchDomains)
	}
	for _, s := range d.Search {
		if err := resolvWord("dns search domain", s, false); err != nil {
			return err
		}
	}
	if n := len(d.Options); n > MaxResolvOptions {
		return tooMany("dns options", n, MaxResolvOptions)
	}
	for _, o := range d.Options {
		if err := resolvWord("dns option", o, false); err != nil {
			return err
		}
	}
	return nil
}

func tooMany(kind string, n, limit int) error {
	return &IdentifierError{Kind: kind, Value: fmt.Sprint(n), Reason: fmt.Sprintf("at most %d are allowed", limit)}
}

func resolvWord(kind, s string, emptyOK bool) error {
	switch {
	case s == "" && !emptyOK:
		return &IdentifierError{Kind: kind, Value: s, Reason: "must not be empty"}
	case len(s) > MaxDomainBytes:
		return &IdentifierError{Kind: kind, Value: clip(s), Reason: fmt.Sprintf("has %d bytes, at most %d are allowed", len(s), MaxDomainBytes)}
	}
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c > '~' || c == '#' || c == ';' {
			return &IdentifierError{Kind: kind, Value: clip(s), Reason: "must be printable ASCII without white space, '#' and ';'"}
		}
	}
	return nil
}
