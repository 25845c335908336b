package ipt

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mknet/spec/endpoint"
)

var update = flag.Bool("update", false, "rewrite the golden files")

const goldenGeneration = "0123456789abcdef0123456789abcdef"

func mustGeneration(s string) endpoint.Generation {
	g, err := endpoint.ParseGeneration(s)
	if err != nil {
		panic(err)
	}
	return g
}

// testEndpoint is a READY record of the given slot.
func testEndpoint(g endpoint.Generation, slot uint32) endpoint.Endpoint {
	a := endpoint.DefaultPools.At(slot)
	return endpoint.Endpoint{
		Generation: g, Mode: endpoint.Multikernel, State: endpoint.Ready, Slot: slot,
		Subnet: a.Subnet, Gateway: a.Gateway, Address: a.Child, TransitHost: a.TransitHost, TransitPeer: a.TransitPeer,
		HostLink: g.HostLink(), Chain: g.Chain(), Egress: "ens4",
		HostAccess: endpoint.Deny, PodAccess: endpoint.Deny,
	}
}

func testLayout() layout {
	return layout{
		guard: tableSecurity, pool: endpoint.DefaultPools.Child,
		metadata: []netip.Addr{DefaultMetadata}, connLimit: DefaultConnLimit,
	}
}

func TestRenderedText(t *testing.T) {
	for _, test := range []struct {
		name   string
		layout func(*layout)
		ep     func(*endpoint.Endpoint)
	}{
		{name: "default"},
		{name: "metadata-dns", ep: func(e *endpoint.Endpoint) { e.DNS.Nameservers = []string{"169.254.169.254"} }},
		{name: "local-dns", ep: func(e *endpoint.Endpoint) {
			e.DNS.Nameservers = []string{"10.0.0.53", "10.0.0.53", "127.0.0.53", "fd00::53", "not an address", "9.9.9.9"}
		}},
		{name: "host-access", ep: func(e *endpoint.Endpoint) { e.HostAccess = endpoint.Allow }},
		{name: "pod-access", ep: func(e *endpoint.Endpoint) { e.PodAccess = endpoint.Allow }},
		{name: "publishes", ep: func(e *endpoint.Endpoint) { e.Publishes = true }},
		{name: "publishes-pod-access", ep: func(e *endpoint.Endpoint) { e.Publishes, e.PodAccess = true, endpoint.Allow }},
		{name: "egress-looks-ours", ep: func(e *endpoint.Endpoint) { e.Egress, e.Publishes = "mkvpn0", true }},
		{name: "no-limit-mangle-two-metadata", layout: func(l *layout) {
			l.connLimit, l.guard = 0, tableMangle
			l.metadata = append(l.metadata, netip.MustParseAddr("100.100.100.200"))
		}},
		{name: "large-pool", layout: func(l *layout) { l.pool = netip.MustParsePrefix("172.16.0.0/12") }},
	} {
		t.Run(test.name, func(t *testing.T) {
			l, ep := testLayout(), testEndpoint(mustGeneration(goldenGeneration), 1930)
			if test.layout != nil {
				test.layout(&l)
			}
			if test.ep != nil {
				test.ep(&ep)
			}
			var b strings.Builder
			for _, table := range l.tables() {
				p, err := l.part(table, ep)
				if err != nil {
					t.Fatal(err)
				}
				fmt.Fprintf(&b, "*%s\n%s\nCOMMIT\n", table, strings.Join(p.create(), "\n"))
			}
			for _, table := range slices.Backward(l.tables()) {
				p, err := l.part(table, ep)
				if err != nil {
					t.Fatal(err)
				}
				fmt.Fprintf(&b, "*%s\n%s\nCOMMIT\n", table, strings.Join(p.destroy(), "\n"))
			}
			golden(t, test.name, b.String())
		})
	}
}

func TestSharedText(t *testing.T) {
	for _, test := range []struct{ name, pool string }{
		{"shared", "172.30.0.0/16"},
		{"shared-pool-24", "192.168.7.0/24"},
		{"shared-pool-18", "10.1.64.0/18"},
	} {
		l := testLayout()
		l.pool = netip.MustParsePrefix(test.pool)
		var b strings.Builder
		tables := []string{tableNAT}
		if test.pool == "172.30.0.0/16" {
			tables = []string{tableRaw, tableNAT} // the other trees differ from raw's in their names only
		}
		for _, table := range tables {
			fmt.Fprintf(&b, "*%s\n%s\nCOMMIT\n", table, strings.Join(sharedRepair(newView(table), sharedOf(l.trees(table))), "\n"))
		}
		golden(t, test.name, b.String())
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v (run with -update to write it)", err)
	}
	if got != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", path, got, want)
	}
}

func TestUnrenderable(t *testing.T) {
	for _, test := range []struct {
		name string
		ep   func(*endpoint.Endpoint)
		want string
	}{
		{"no generation", func(e *endpoint.Endpoint) { e.Generation = endpoint.Generation{} }, "endpoint has no generation"},
		{"no address", func(e *endpoint.Endpoint) { e.Address = netip.Addr{} }, `endpoint 0123456789ab: address "invalid IP" is not IPv4`},
		{"no egress", func(e *endpoint.Endpoint) { e.Egress = "" }, `endpoint 0123456789ab: egress "" is not a link that a rule can name`},
		{"egress with words", func(e *endpoint.Endpoint) { e.Egress = "a -j ACCEPT" }, `endpoint 0123456789ab: egress "a -j ACCEPT" is not a link that a rule can name`},
		{"egress with a wildcard", func(e *endpoint.Endpoint) { e.Egress = "ens+" }, `endpoint 0123456789ab: egress "ens+" is not a link that a rule can name`},
		{"address outside the pool", func(e *endpoint.Endpoint) { e.Address = netip.MustParseAddr("10.1.2.3") }, "endpoint 0123456789ab: address 10.1.2.3 is not in the child pool 172.30.0.0/16"},
	} {
		ep := testEndpoint(mustGeneration(goldenGeneration), 3)
		test.ep(&ep)
		_, err := testLayout().part(tableNAT, ep)
		if err == nil || err.Error() != test.want {
			t.Errorf("%s: got error %v, want %s", test.name, err, test.want)
		}
	}
}

// The kernel takes chain names up to 28 bytes (XT_EXTENSION_MAXNAMELEN - 1), and
// every goto must lead to a chain that the tree declares.
func TestTreesAreClosed(t *testing.T) {
	for bits := 12; bits <= 30; bits++ {
		for _, base := range []string{"10.255.255.252", "172.31.255.252", "192.168.255.252"} {
			pool, _ := netip.MustParseAddr(base).Prefix(bits)
			l := testLayout()
			l.pool = pool
			for _, table := range l.tables() {
				for _, tr := range l.trees(table) {
					chains := tr.chains()
					for i, name := range chains {
						if len(name) > 28 {
							t.Errorf("pool %s: chain %s has %d bytes", pool, name, len(name))
						}
						if slices.Contains(chains[i+1:min(len(chains), i+300)], name) {
							t.Errorf("pool %s: chain %s is declared twice", pool, name)
						}
					}
					ep := testEndpoint(mustGeneration(goldenGeneration), 0)
					ep.Address = netip.MustParseAddr(base).Next().Next()
					path, leaf, err := tr.path(ep)
					if err != nil {
						t.Fatal(err)
					}
					at := tr.base
					for _, p := range path {
						if p.chain != at {
							t.Errorf("pool %s: step %s does not continue from %s", pool, p, at)
						}
						at = p.rule.target()
						if !slices.Contains(chains, at) {
							t.Errorf("pool %s: step %s leads to an undeclared chain", pool, p)
						}
					}
					if at != leaf {
						t.Errorf("pool %s: way ends in %s, leaf is %s", pool, at, leaf)
					}
				}
			}
		}
	}
}
