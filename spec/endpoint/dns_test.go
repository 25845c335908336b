package endpoint_test

import (
	"errors"
	"strings"
	"testing"

	"mknet/spec/endpoint"
)

func TestDNSValidate(t *testing.T) {
	for _, c := range []struct {
		name, kind string // kind of the error; empty: accepted
		dns        endpoint.DNS
	}{
		{"nothing", "", endpoint.DNS{}},
		{"all", "", endpoint.DNS{Nameservers: []string{"169.254.169.254", "2001:db8::1"}, Domain: "a.example", Search: []string{"b.example", "."}, Options: []string{"ndots:5"}}},
		{"name as nameserver", "dns nameserver", endpoint.DNS{Nameservers: []string{"ns.example"}}},
		{"a second line", "dns nameserver", endpoint.DNS{Nameservers: []string{"1.1.1.1\nnameserver 2.2.2.2"}}},
		{"unspecified", "dns nameserver", endpoint.DNS{Nameservers: []string{"0.0.0.0"}}},
		{"zone", "dns nameserver", endpoint.DNS{Nameservers: []string{"fe80::1%eth0"}}},
		{"line in a domain", "dns domain", endpoint.DNS{Domain: "a\nsearch b"}},
		{"two search words", "dns search domain", endpoint.DNS{Search: []string{"a b"}}},
		{"empty search", "dns search domain", endpoint.DNS{Search: []string{""}}},
		{"comment", "dns option", endpoint.DNS{Options: []string{"rotate#"}}},
		{"long domain", "dns domain", endpoint.DNS{Domain: strings.Repeat("a", 254)}},
		{"many nameservers", "dns nameservers", endpoint.DNS{Nameservers: make([]string, 17)}},
		{"many search domains", "dns search domains", endpoint.DNS{Search: make([]string, 33)}},
		{"many options", "dns options", endpoint.DNS{Options: make([]string, 33)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.dns.Validate()
			var id *endpoint.IdentifierError
			if c.kind == "" && err != nil || c.kind != "" && (!errors.As(err, &id) || id.Kind != c.kind) {
				t.Errorf("%+v: got %v, want kind %q", c.dns, err, c.kind)
			}
		})
	}
}
