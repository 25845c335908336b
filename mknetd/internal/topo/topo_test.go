package topo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"mknet/mknetd/internal/netns"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// bench is one host with an uplink and an endpoint's namespace.
type bench struct {
	*Host
	lab *netlab.Namespace
	ns  *netns.Namespace
}

func newBench(t testing.TB) *bench {
	t.Helper()
	netlab.Clean(t)
	netlab.Uplink(t, "1400")
	h, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	lab := netlab.New(t)
	return &bench{h, lab, openNS(t, lab)}
}

func openNS(t testing.TB, lab *netlab.Namespace) *netns.Namespace {
	t.Helper()
	ns, err := netns.Open(lab.Path())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

func (b *bench) all(ep endpoint.Endpoint) []Object {
	return append(b.Devices(ep, b.ns), b.Live(ep, b.ns)...)
}

func (b *bench) build(t testing.TB, ep endpoint.Endpoint) {
	t.Helper()
	for _, o := range b.all(ep) {
		if err := o.Ensure(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { b.tearDown(t, ep) })
}

func (b *bench) tearDown(t testing.TB, ep endpoint.Endpoint) {
	t.Helper()
	for _, o := range slices.Backward(b.all(ep)) {
		if err := o.Remove(context.Background()); err != nil {
			t.Error(err)
		}
	}
}

// faults runs every Check and returns "kind object (where): problem" lines.
func (b *bench) faults(t testing.TB, ep endpoint.Endpoint) []string {
	t.Helper()
	var list []string
	for _, o := range b.all(ep) {
		found, err := o.Check(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range found {
			list = append(list, f.String())
			if f.Inspect == "" {
				t.Errorf("fault %s has no command to look at it", f)
			}
		}
	}
	return list
}

func (b *bench) healthy(t testing.TB, ep endpoint.Endpoint) {
	t.Helper()
	if f := b.faults(t, ep); len(f) != 0 {
		t.Errorf("faults of a healthy endpoint:\n  %s", strings.Join(f, "\n  "))
	}
}

// state is all that a test may compare: the host's and the namespace's.
func (b *bench) state(t testing.TB) string {
	t.Helper()
	var out strings.Builder
	for _, args := range [][]string{
		{"ip", "-o", "-4", "addr"},
		{"ip", "-4", "route", "show", "table", "all"},
		{"ip", "rule"},
		{"ip", "-o", "link"},
		{"sysctl", "net.ipv4.ip_forward"},
	} {
		out.WriteString(netlab.Run(t, args[0], args[1:]...) + "\n")
		out.WriteString(b.lab.Run(t, args[0], args[1:]...) + "\n")
	}
	return out.String()
}

func TestBuildCheckTearDown(t *testing.T) {
	b := newBench(t)
	before := b.state(t)
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	ep.Bandwidth = &endpoint.Bandwidth{IngressRate: 80_000_000, EgressRate: 8_000_000, EgressBurst: 4_000_000}
	for _, o := range b.all(ep) {
		for range 2 { // Ensure is idempotent
			if err := o.Ensure(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if f, err := o.Check(t.Context()); err != nil || len(f) != 0 {
			t.Errorf("%s %s right after Ensure: %v, %v", o.Kind(), o.Name(), f, err)
		}
	}
	b.healthy(t, ep)
	once := b.state(t)
	for _, o := range b.all(ep) {
		if err := o.Ensure(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if again := b.state(t); again != once {
		t.Errorf("a second round of Ensure changed something:\n%s\nwas:\n%s", again, once)
	}

	if out := netlab.Run(t, "ip", "route", "show", "172.30.0.0/30"); !strings.Contains(out, "via 100.64.0.2 dev "+ep.HostLink+" proto 109 src 198.51.100.10") {
		t.Errorf("route to the child: %q", out)
	}
	if out := b.lab.Run(t, "ip", "-d", "link", "show", "eth0"); !strings.Contains(out, "multi_queue") || !strings.Contains(out, "vnet_hdr") || !strings.Contains(out, "persist on") || !strings.Contains(out, "user root") {
		t.Errorf("the TUN: %s", out)
	}
	if out := b.lab.Run(t, "ip", "rule"); !strings.Contains(out, "iif eth0 lookup 7300") {
		t.Errorf("rules: %s", out)
	}
	// The primary reaches the gateway, which the namespace holds.
	netlab.Run(t, "ping", "-c1", "-W5", "172.30.0.1")

	for _, o := range slices.Backward(b.all(ep)) {
		for range 2 { // so is Remove
			if err := o.Remove(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if after := b.state(t); after != before {
		t.Errorf("left behind:\n%s\nwas:\n%s", after, before)
	}
	if f := b.faults(t, ep); len(f) < 3 {
		t.Errorf("faults without any object: %v", f)
	}
}

// Each object broken by hand gives exactly the expected fault, Ensure on the
// repairable objects heals it, and a second look finds nothing.
func TestEachFault(t *testing.T) {
	b := newBench(t)
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	ep.Bandwidth = &endpoint.Bandwidth{IngressRate: 80_000_000, EgressRate: 8_000_000}
	b.build(t, ep)
	host, peer := ep.HostLink, ep.PeerLink
	const inHost, inNS = "host", "ns"
	tests := []struct {
		name  string
		where string
		cmd   []string
		want  []string
	}{
		{"host mtu", inHost, []string{"ip", "link", "set", host, "mtu", "1500"}, []string{"mtu " + host + " (host): mtu is 1500, want 1400"}},
		{"peer mtu", inNS, []string{"ip", "link", "set", peer, "mtu", "1300"}, []string{"mtu mkhost0 (namespace): mtu is 1300, want 1400"}},
		{"tun mtu", inNS, []string{"ip", "link", "set", "eth0", "mtu", "9000"}, []string{"mtu eth0 (namespace): mtu is 9000, want 1400"}},
		{"host down", inHost, []string{"ip", "link", "set", host, "down"}, []string{
			"link " + host + " (host): is down, want up",
			"route 172.30.0.0/30 via 100.64.0.2 dev " + host + " (host): missing",
		}},
		{"peer down", inNS, []string{"ip", "link", "set", peer, "down"}, []string{
			"link mkhost0 (namespace): is down, want up",
			"route default via 100.64.0.1 dev mkhost0 table 7300 (namespace): missing",
			"route default via 100.64.0.1 dev mkhost0 (namespace): missing",
		}},
		{"tun down", inNS, []string{"ip", "link", "set", "eth0", "down"}, []string{
			"link eth0 (namespace): is down, want up", "route 172.30.0.0/30 dev eth0 (namespace): missing",
		}},
		{"host forwarding", inHost, []string{"sysctl", "-w", "net.ipv4.conf." + host + ".forwarding=0"}, []string{"sysctl net/ipv4/conf/" + host + "/forwarding (host): is 0, want 1"}},
		{"egress forwarding", inHost, []string{"sysctl", "-w", "net.ipv4.conf.up0.forwarding=0"}, []string{"sysctl net/ipv4/conf/up0/forwarding (host): is 0, want 1"}},
		{"ip_forward", inNS, []string{"sysctl", "-w", "net.ipv4.ip_forward=0"}, []string{"forward net/ipv4/ip_forward (namespace): is 0, want 1"}},
		{"rp_filter", inNS, []string{"sysctl", "-w", "net.ipv4.conf.mkhost0.rp_filter=1"}, []string{"sysctl net/ipv4/conf/mkhost0/rp_filter (namespace): is 1, want 2"}},
		{"ipv6", inNS, []string{"sysctl", "-w", "net.ipv6.conf.eth0.disable_ipv6=0"}, []string{"sysctl net/ipv6/conf/eth0/disable_ipv6 (namespace): is 0, want 1"}},
		{"host address", inHost, []string{"ip", "addr", "del", "100.64.0.1/30", "dev", host}, []string{
			"address 100.64.0.1/30 dev " + host + " (host): missing",
			"route 172.30.0.0/30 via 100.64.0.2 dev " + host + " (host): missing",
		}},
		{"gateway address", inNS, []string{"ip", "addr", "del", "172.30.0.1/30", "dev", "eth0"}, []string{
			"address 172.30.0.1/30 dev eth0 (namespace): missing", "route 172.30.0.0/30 dev eth0 (namespace): missing",
		}},
		{"route to the child", inNS, []string{"ip", "route", "del", "172.30.0.0/30", "dev", "eth0"}, []string{"route 172.30.0.0/30 dev eth0 (namespace): missing"}},
		{"rule", inNS, []string{"ip", "rule", "del", "priority", "7300"}, []string{"rule iif eth0 lookup 7300 (namespace): missing"}},
		{"table default", inNS, []string{"ip", "route", "del", "default", "via", "100.64.0.1", "table", "7300"}, []string{"route default via 100.64.0.1 dev mkhost0 table 7300 (namespace): missing"}},
		{"fall-back", inNS, []string{"ip", "route", "del", "unreachable", "default", "table", "7300"}, []string{"route unreachable default table 7300 (namespace): missing"}},
		{"main default", inNS, []string{"ip", "route", "del", "default"}, []string{"route default via 100.64.0.1 dev mkhost0 (namespace): missing"}},
		{"host route", inHost, []string{"ip", "route", "del", "172.30.0.0/30"}, []string{"route 172.30.0.0/30 via 100.64.0.2 dev " + host + " (host): missing"}},
		{"host route source", inHost, []string{"ip", "route", "replace", "172.30.0.0/30", "via", "100.64.0.2", "dev", host}, []string{
			"route 172.30.0.0/30 via 100.64.0.2 dev " + host + " (host): is 172.30.0.0/30 via 100.64.0.2 dev " + host + ", want 172.30.0.0/30 via 100.64.0.2 dev " + host + " src 198.51.100.10",
		}},
		{"qdisc", inHost, []string{"tc", "qdisc", "del", "dev", host, "root"}, []string{"qdisc " + host + " (host): missing"}},
		{"qdisc rate", inNS, []string{"tc", "qdisc", "change", "dev", peer, "root", "handle", "6d6b:", "tbf", "rate", "1mbit", "burst", "20k", "latency", "25ms"}, []string{
			"qdisc mkhost0 (namespace): rate is 1000000 bit/s, want 8000000 bit/s with burst 112000 bit",
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.where == inHost {
				netlab.Run(t, tt.cmd[0], tt.cmd[1:]...)
			} else {
				b.lab.Run(t, tt.cmd[0], tt.cmd[1:]...)
			}
			if got := b.faults(t, ep); !slices.Equal(got, tt.want) {
				t.Errorf("after %v\ngot:\n  %s\nwant:\n  %s", tt.cmd, strings.Join(got, "\n  "), strings.Join(tt.want, "\n  "))
			}
			for _, o := range b.all(ep) {
				if !o.Repairable() {
					continue
				}
				if err := o.Ensure(t.Context()); err != nil {
					t.Error(err)
				}
			}
			b.healthy(t, ep)
		})
	}
}

// A device that is gone is one fault, not one for everything on it.
func TestMissingDevices(t *testing.T) {
	b := newBench(t)
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	b.build(t, ep)
	b.lab.Run(t, "ip", "link", "del", "eth0")
	if got, want := b.faults(t, ep), []string{"tun eth0 (namespace): missing"}; !slices.Equal(got, want) {
		t.Errorf("without the TUN:\ngot %q\nwant %q", got, want)
	}
	if err := b.RecreateTun(t.Context(), ep, b.ns, nil); err != nil {
		t.Fatal(err)
	}
	b.healthy(t, ep)
	netlab.Run(t, "ip", "link", "del", ep.HostLink)
	got := b.faults(t, ep)
	want := []string{
		"veth " + ep.HostLink + " (host): missing",
		"peer mkhost0 (namespace): missing",
	}
	if !slices.Equal(got, want) {
		t.Errorf("without the veth:\ngot %q\nwant %q", got, want)
	}
	b.lab.Run(t, "ip", "link", "set", "eth0", "alias", "somebody")
	if got := b.faults(t, ep); !slices.ContainsFunc(got, func(s string) bool { return strings.HasPrefix(s, `tun eth0 (namespace): alias is "somebody"`) }) {
		t.Errorf("with a foreign alias: %q", got)
	}
	b.lab.Run(t, "ip", "link", "set", "eth0", "alias", ep.Generation.Alias())
}

func TestWrongDevices(t *testing.T) {
	b := newBench(t)
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	b.build(t, ep)
	alias := ep.Generation.Alias()
	for _, tt := range []struct {
		name, make, want string
	}{
		{"one queue", "ip tuntap add eth0 mode tun", "is not a multi-queue TUN"},
		{"tap", "ip tuntap add eth0 mode tap multi_queue", "is not a multi-queue TUN"},
		{"veth", "ip link add eth0 type veth peer name x1", "is a veth, want a tuntap"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b.lab.Run(t, "sh", "-c", "ip link del eth0 && "+tt.make+" && ip link set eth0 alias '"+alias+"'")
			var got []string
			for _, f := range b.faults(t, ep) {
				if strings.HasPrefix(f, "tun ") {
					got = append(got, f)
				}
			}
			if want := []string{"tun eth0 (namespace): " + tt.want}; !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
			if err := b.RecreateTun(t.Context(), ep, b.ns, nil); err != nil {
				t.Error(err)
			}
			b.healthy(t, ep)
		})
	}
}

// A foreign route that takes the child's packets away is reported by name, and
// stays.
func TestHiddenRoute(t *testing.T) {
	b := newBench(t)
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	b.build(t, ep)
	netlab.Run(t, "ip", "route", "add", "172.30.0.2/32", "dev", "up0")
	name := "route 172.30.0.0/30 via 100.64.0.2 dev " + ep.HostLink + " (host): "
	for range 2 {
		if got, want := b.faults(t, ep), []string{name + "hidden by a foreign route: 172.30.0.2/32 dev up0"}; !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
		live := b.Live(ep, b.ns)
		if err := live[len(live)-1].Ensure(t.Context()); err != nil && !errors.Is(err, ErrForeign) {
			t.Errorf("Ensure = %v", err)
		}
	}
	netlab.Run(t, "ip", "route", "del", "172.30.0.2/32", "dev", "up0")
	b.healthy(t, ep)
}

// What has our names and not our mark is refused and left alone (case C23).
func TestForeignObjects(t *testing.T) {
	g := endpoint.NewGeneration()
	ep := record(t, g, 0, "eth0")
	twin := g
	twin[15] ^= 1
	tests := []struct {
		name   string
		host   bool
		make   []string
		undo   []string
		object string // kind of the object that refuses
		want   error
	}{
		{"host link", true, []string{"ip", "link", "add", ep.HostLink, "type", "veth", "peer", "name", "x1"}, []string{"ip", "link", "del", ep.HostLink}, KindVeth, ErrForeign},
		{"host link of a twin", true, []string{"ip", "link", "add", ep.HostLink, "type", "veth", "peer", "name", "x1", "alias", twin.Alias()}, []string{"ip", "link", "del", ep.HostLink}, KindVeth, ErrForeign},
		{"host altname", true, []string{"ip", "link", "property", "add", "dev", "up0", "altname", ep.HostLink}, []string{"ip", "link", "property", "del", "dev", "up0", "altname", ep.HostLink}, KindVeth, ErrForeign},
		{"peer", false, []string{"ip", "link", "add", "mkhost0", "type", "veth", "peer", "name", "x1"}, []string{"ip", "link", "del", "mkhost0"}, KindVeth, ErrForeign},
		{"interface", false, []string{"ip", "link", "add", "eth0", "type", "veth", "peer", "name", "x1"}, []string{"ip", "link", "del", "eth0"}, KindTun, ErrExists},
		{"interface altname", false, []string{"sh", "-c", "ip link add x0 type veth peer name x1 && ip link property add dev x0 altname eth0"}, []string{"ip", "link", "del", "x0"}, KindTun, ErrExists},
		{"tun", false, []string{"ip", "tuntap", "add", "eth0", "mode", "tun", "multi_queue"}, []string{"ip", "link", "del", "eth0"}, KindTun, ErrExists},
		{"main default", false, []string{"sh", "-c", "ip link add x0 type veth peer name x1 && ip addr add 192.0.2.1/24 dev x0 && ip link set x0 up && ip link set x1 up && ip route add default via 192.0.2.2"}, []string{"ip", "link", "del", "x0"}, KindRoute, ErrForeign},
		{"host route", true, []string{"ip", "route", "add", "172.30.0.0/30", "dev", "up0"}, []string{"ip", "route", "del", "172.30.0.0/30", "dev", "up0"}, KindRoute, ErrForeign},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t)
			run := b.lab.Run
			if tt.host {
				run = func(t testing.TB, name string, args ...string) string { return netlab.Run(t, name, args...) }
			}
			run(t, tt.make[0], tt.make[1:]...)
			before := b.state(t)
			var err error
			var last Object
			for _, o := range b.all(ep) {
				if last = o; err == nil {
					if err = o.Ensure(t.Context()); err != nil {
						break
					}
				}
			}
			if !errors.Is(err, tt.want) || last.Kind() != tt.object {
				t.Errorf("Ensure of %s %s = %v, want %v from a %s", last.Kind(), last.Name(), err, tt.want, tt.object)
			}
			b.tearDown(t, ep)
			if after := b.state(t); after != before {
				t.Errorf("changed:\n%s\nwas:\n%s", after, before)
			}
			run(t, tt.undo[0], tt.undo[1:]...)
		})
	}
}

// A daemon that dies right after the kernel made the veth leaves one without an
// alias; it is still ours.
func TestHalfMadeVeth(t *testing.T) {
	for _, finish := range []bool{true, false} {
		t.Run(fmt.Sprintf("finish=%v", finish), func(t *testing.T) {
			b := newBench(t)
			ep := record(t, endpoint.NewGeneration(), 0, "eth0")
			veth := b.Devices(ep, b.ns)[0].(*object)
			if err := veth.makeVeth(site{route: b.route, host: b.Host}); err != nil {
				t.Fatal(err)
			}
			if finish {
				b.build(t, ep)
				b.healthy(t, ep)
				return
			}
			for _, o := range slices.Backward(b.Devices(ep, nil)) { // the namespace is gone
				if err := o.Remove(t.Context()); err != nil {
					t.Error(err)
				}
			}
			if out, err := netlab.Try("ip", "link", "show", ep.HostLink); err == nil {
				t.Errorf("still there: %s", out)
			}
		})
	}
}

func TestTwoAttachments(t *testing.T) {
	b := newBench(t)
	before := b.state(t)
	first, second := record(t, endpoint.NewGeneration(), 0, "eth0"), record(t, endpoint.NewGeneration(), 1, "net1")
	for n, ep := range []endpoint.Endpoint{first, second} {
		got, err := b.Survey(t.Context(), b.ns, ep.IfName)
		want := Site{PeerLink: ep.PeerLink, RouteTable: ep.RouteTable, MainDefault: ep.MainDefault}
		if err != nil || got != want {
			t.Errorf("Survey for attachment %d = %+v, %v, want %+v", n, got, err, want)
		}
		for _, o := range b.all(ep) {
			if err := o.Ensure(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := b.Survey(t.Context(), b.ns, "eth0"); !errors.Is(err, ErrExists) {
		t.Errorf("Survey for a name that exists = %v, want %v", err, ErrExists)
	}
	b.healthy(t, first)
	b.healthy(t, second)
	// The host reaches both, the second too, whose replies the main default does not carry.
	netlab.Run(t, "ping", "-c1", "-W5", "172.30.0.1")
	netlab.Run(t, "ping", "-c1", "-W5", "172.30.0.5")
	// From one TUN there is no way to the other but by the host.
	if out := b.lab.Run(t, "ip", "route", "get", "172.30.0.6", "from", "172.30.0.2", "iif", "eth0"); !strings.Contains(out, "via 100.64.0.1 dev mkhost0") {
		t.Errorf("from eth0 to the child of net1: %s", out)
	}
	if out := b.lab.Run(t, "ip", "route", "get", "203.0.113.1", "from", "172.30.0.6", "iif", "net1"); !strings.Contains(out, "via 100.64.0.5 dev mkhost1") {
		t.Errorf("from net1 to the world: %s", out)
	}

	b.tearDown(t, first)
	if out := b.lab.Run(t, "sysctl", "-n", "net.ipv4.ip_forward"); out != "1" {
		t.Errorf("ip_forward is %s while net1 stands", out)
	}
	b.healthy(t, second)
	if free, err := b.MainDefaultFree(t.Context(), b.ns); err != nil || !free {
		t.Errorf("MainDefaultFree = %v, %v, want true", free, err)
	}
	second.MainDefault = true
	if err := b.MainDefault(second, b.ns).Ensure(t.Context()); err != nil {
		t.Error(err)
	}
	if free, err := b.MainDefaultFree(t.Context(), b.ns); err != nil || free {
		t.Errorf("MainDefaultFree = %v, %v, want false", free, err)
	}
	b.healthy(t, second)
	b.tearDown(t, second)
	if after := b.state(t); after != before { // ip_forward is 0 again
		t.Errorf("left behind:\n%s\nwas:\n%s", after, before)
	}
}

func TestForwardingThatWasOnStaysOn(t *testing.T) {
	b := newBench(t)
	b.lab.Run(t, "sysctl", "-w", "net.ipv4.ip_forward=1")
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	b.build(t, ep)
	b.tearDown(t, ep)
	if out := b.lab.Run(t, "sysctl", "-n", "net.ipv4.ip_forward"); out != "1" {
		t.Errorf("ip_forward is %s, was 1 before", out)
	}
}

// Case C14: the namespace goes while objects are made, and after.
func TestNamespaceVanishes(t *testing.T) {
	steps := len(PlanFor(record(t, endpoint.NewGeneration(), 0, "eth0")).Devices)
	for _, at := range []int{0, 1, 3, steps / 2, steps} {
		t.Run(fmt.Sprintf("before step %d", at), func(t *testing.T) {
			b := newBench(t)
			before := netlab.Run(t, "ip", "-o", "-4", "addr")
			ep := record(t, endpoint.NewGeneration(), 0, "eth0")
			for i, o := range b.Devices(ep, b.ns) {
				if i == at {
					break
				}
				if err := o.Ensure(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			b.lab.Remove(t)
			if err := b.ns.Close(); err != nil {
				t.Fatal(err)
			}
			for _, o := range slices.Backward(append(b.Devices(ep, nil), b.Live(ep, nil)...)) {
				if o.Where() != endpoint.InHost {
					t.Errorf("%s %s is no object of the host", o.Kind(), o.Name())
				}
				if err := o.Remove(t.Context()); err != nil {
					t.Error(err)
				}
			}
			if after := netlab.Run(t, "ip", "-o", "-4", "addr"); after != before {
				t.Errorf("left behind:\n%s\nwas:\n%s", after, before)
			}
			err := b.Devices(ep, nil)[0].Ensure(t.Context())
			if err == nil {
				t.Error("Ensure of the veth without a namespace succeeded")
			}
		})
	}
}
