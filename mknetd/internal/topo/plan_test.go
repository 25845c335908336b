package topo

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mknet/spec/endpoint"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// record returns a complete record; n is slot and attachment number.
func record(t testing.TB, g endpoint.Generation, n int, ifName string) endpoint.Endpoint {
	t.Helper()
	a := endpoint.DefaultPools.At(uint32(n))
	return endpoint.Endpoint{
		Generation:  g,
		Attachment:  endpoint.Attachment{Network: "net", ContainerID: "c1", IfName: ifName},
		Mode:        endpoint.Multikernel,
		Slot:        uint32(n),
		Subnet:      a.Subnet,
		Gateway:     a.Gateway,
		Address:     a.Child,
		TransitHost: a.TransitHost,
		TransitPeer: a.TransitPeer,
		HostLink:    g.HostLink(),
		PeerLink:    endpoint.PeerLink(n),
		Chain:       g.Chain(),
		RouteTable:  RouteTableBase + uint32(n),
		MainDefault: n == 0,
		MTUBytes:    1400,
		Egress:      "up0",
		EgressAddr:  netip.MustParseAddr("198.51.100.10"),
	}
}

// podRecord is a complete record of an ordinary pod.
func podRecord(t testing.TB, g endpoint.Generation, containerID, ifName string) endpoint.Endpoint {
	t.Helper()
	return endpoint.Endpoint{
		Generation: g,
		Attachment: endpoint.Attachment{Network: "net", ContainerID: containerID, IfName: ifName},
		Mode:       endpoint.Veth,
		Pool:       "pods", Subnet: netip.MustParsePrefix("10.91.0.0/24"),
		Gateway: netip.MustParseAddr("10.91.0.1"), Address: netip.MustParseAddr("10.91.0.7"),
		HostLink: endpoint.PodHostLink(containerID, ifName), PeerLink: ifName, Chain: g.Chain(),
		MainDefault: true, MTUBytes: 1400, Egress: "up0", EgressAddr: netip.MustParseAddr("198.51.100.10"),
		HostAccess: endpoint.Allow, PodAccess: endpoint.Deny, IPMasq: true,
	}
}

func generation(t testing.TB, digits string) endpoint.Generation {
	t.Helper()
	g, err := endpoint.ParseGeneration(digits)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestPlanFor(t *testing.T) {
	g := generation(t, "0123456789abcdef0123456789abcdef")
	tests := []struct {
		name   string
		change func(*endpoint.Endpoint)
	}{
		{"first", func(*endpoint.Endpoint) {}},
		{"second", func(ep *endpoint.Endpoint) {
			*ep = record(t, g, 1, "net1")
		}},
		{"bandwidth", func(ep *endpoint.Endpoint) {
			ep.Bandwidth = &endpoint.Bandwidth{IngressRate: 8_000_000, IngressBurst: 1_000_000, EgressRate: 1000}
		}},
		{"no-egress", func(ep *endpoint.Endpoint) {
			ep.Egress, ep.EgressAddr = "", netip.Addr{}
		}},
		{"pod", func(ep *endpoint.Endpoint) { *ep = podRecord(t, g, "c1", "eth0") }},
		{"pod-delegated", func(ep *endpoint.Endpoint) {
			*ep = podRecord(t, g, "c1", "net1")
			ep.MainDefault, ep.IPAM, ep.Pool, ep.MAC = false, "host-local", "", endpoint.MAC{2, 0, 0x5e, 1, 2, 3}
			ep.Routes = []netip.Prefix{anywhere, netip.MustParsePrefix("10.9.0.0/16")}
			ep.HostAccess, ep.PodAccess, ep.IPMasq = endpoint.Deny, endpoint.Allow, false
			ep.Bandwidth = &endpoint.Bandwidth{IngressRate: 8_000_000, EgressRate: 1000}
		}},
		{"dotted", func(ep *endpoint.Endpoint) { ep.Egress, ep.IfName = "eth0.100", "a.b" }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ep := record(t, g, 0, "eth0")
			tt.change(&ep)
			plan := PlanFor(ep)
			var b strings.Builder
			for _, list := range []struct {
				title string
				steps []Step
			}{{"devices", plan.Devices}, {"live", plan.Live}} {
				b.WriteString(list.title + "\n")
				for _, s := range list.steps {
					b.WriteString("  " + s.String() + "\n    # " + s.Look() + "\n")
				}
			}
			golden(t, tt.name, b.String())
		})
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", "plan-"+name+".golden")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("plan differs from %s (run with -update):\ngot:\n%s\nwant:\n%s", path, got, want)
	}
}

func TestEveryKindOfAPlanHasOperations(t *testing.T) {
	g := generation(t, "0123456789abcdef0123456789abcdef")
	seen := map[string]bool{}
	for _, ep := range []endpoint.Endpoint{record(t, g, 0, "eth0"), podRecord(t, g, "c1", "eth0")} {
		ep.Bandwidth = &endpoint.Bandwidth{IngressRate: 1, EgressRate: 1}
		plan := PlanFor(ep)
		for _, s := range append(plan.Devices, plan.Live...) {
			seen[s.Kind] = true
			if ops := kinds[s.Kind]; ops.ensure == nil || ops.check == nil || ops.remove == nil {
				t.Errorf("kind %q has no operations", s.Kind)
			}
		}
	}
	for kind := range kinds {
		if !seen[kind] {
			t.Errorf("kind %q is in no plan", kind)
		}
	}
}

func TestMark(t *testing.T) {
	g := generation(t, "0123456789abcdef0123456789abcdef")
	for _, m := range []mark{{generation: g}, {generation: g, restoreForward: true}} {
		if got, ok := parseMark(m.String()); !ok || got != m {
			t.Errorf("parseMark(%q) = %+v, %v, want %+v", m, got, ok, m)
		}
	}
	for _, alias := range []string{"", "mknet", "mknet ", "mknet 0123", "mknet " + strings.Repeat("0", 32), "x" + g.Alias(), g.Alias() + " ", g.Alias() + " ip_forward=1", strings.ToUpper(g.Alias())} {
		if got, ok := parseMark(alias); ok {
			t.Errorf("parseMark(%q) = %+v, want a foreign alias", alias, got)
		}
	}
}

func TestBurstHoldsPackets(t *testing.T) {
	for _, tt := range []struct {
		rate, burst uint64
		mtuBytes    int
		want        uint64 // bits
	}{
		{1_000_000_000, 0, 1500, 10_000_000},
		{1000, 0, 1500, 120_000},
		{1000, 1, 1500, 120_000},
		{1000, 500_000, 1500, 500_000},
	} {
		s := Step{RateBits: tt.rate, BurstBits: tt.burst, MTUBytes: tt.mtuBytes}
		if got := s.burstBits(); got != tt.want {
			t.Errorf("burstBits of rate %d, burst %d, mtu %d = %d, want %d", tt.rate, tt.burst, tt.mtuBytes, got, tt.want)
		}
	}
}
