package endpoint_test

import (
	"fmt"
	"strings"
	"testing"

	"mknet/spec/endpoint"
)

// Truncated container IDs made the interface names of two pods equal. Ours are made
// of the generation, so 5,000 attachments whose IDs differ only at their ends have
// names of their own, and every name is one that Linux takes.
func TestC23_NamesOfIDsWithOnePrefix(t *testing.T) {
	const ids = 5000
	seen := map[string]string{}
	for i := range ids {
		att := endpoint.Attachment{Network: "mknet", ContainerID: strings.Repeat("a", 60) + fmt.Sprintf("%04x", i), IfName: "eth0"}
		if err := att.Validate(); err != nil {
			t.Fatalf("%s: %v", att, err)
		}
		g := endpoint.NewGeneration()
		for _, name := range []string{g.HostLink(), g.Chain(), g.OwnedNamespace()} {
			if other, taken := seen[name]; taken {
				t.Errorf("%s is the name of %s and of %s", name, other, att)
			}
			seen[name] = att.String()
		}
		if n := len(g.HostLink()); n > 15 { // IFNAMSIZ with its zero byte is 16
			t.Errorf("link %s has %d bytes", g.HostLink(), n)
		}
		if n := len(g.Chain()); n > 28 { // XT_EXTENSION_MAXNAMELEN of linux/netfilter/x_tables.h is 29
			t.Errorf("chain %s has %d bytes", g.Chain(), n)
		}
	}
}
