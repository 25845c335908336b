package topo

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/netns"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// Case C25: a kernel without IPv6 has no such tree.
func TestWithoutIPv6(t *testing.T) {
	b := newBench(t)
	const tree = "/proc/sys/net/ipv6"
	if err := unix.Mount("tmpfs", tree, "tmpfs", 0, "size=4k"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(tree, 0); err != nil {
			t.Error(err)
		}
	}()
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	b.build(t, ep)
	b.healthy(t, ep)
	b.tearDown(t, ep)
}

// Devices below IPv6's smallest MTU have no IPv6 settings either; the largest
// MTU fits everywhere (case C24).
func TestMTUBounds(t *testing.T) {
	for _, mtuBytes := range []int{endpoint.MinMTU, endpoint.MaxMTU} {
		t.Run(fmt.Sprint(mtuBytes), func(t *testing.T) {
			b := newBench(t)
			ep := record(t, endpoint.NewGeneration(), 0, "eth0")
			ep.MTUBytes = mtuBytes
			b.build(t, ep)
			b.healthy(t, ep)
			for _, out := range []string{netlab.Run(t, "ip", "link", "show", ep.HostLink), b.lab.Run(t, "ip", "link", "show", ep.PeerLink), b.lab.Run(t, "ip", "link", "show", "eth0")} {
				if !strings.Contains(out, fmt.Sprintf("mtu %d ", mtuBytes)) {
					t.Errorf("want mtu %d: %s", mtuBytes, out)
				}
			}
		})
	}
}

func TestForeignRuleInFront(t *testing.T) {
	b := newBench(t)
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	b.build(t, ep)
	b.lab.Run(t, "ip", "rule", "add", "priority", "100", "lookup", "main")
	got, want := b.faults(t, ep), []string{"rule iif eth0 lookup 7300 (namespace): a foreign rule with priority 100 comes before it"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	// A rule for another interface does not matter.
	b.lab.Run(t, "ip", "rule", "del", "priority", "100")
	b.lab.Run(t, "ip", "rule", "add", "priority", "100", "iif", "lo", "lookup", "main")
	b.healthy(t, ep)
	b.lab.Run(t, "ip", "rule", "del", "priority", "100")
}

// The source that the route names may leave the host.
func TestEgressAddressVanishes(t *testing.T) {
	b := newBench(t)
	netlab.Run(t, "ip", "addr", "add", "192.0.2.9/32", "dev", "up0")
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	ep.EgressAddr = netip.MustParseAddr("192.0.2.9")
	b.build(t, ep)
	netlab.Run(t, "ip", "addr", "del", "192.0.2.9/32", "dev", "up0")
	route := "route 172.30.0.0/30 via 100.64.0.2 dev " + ep.HostLink + " (host): missing"
	if got := b.faults(t, ep); !slices.Equal(got, []string{route}) {
		t.Errorf("got %q, want %q", got, route)
	}
	live := b.Live(ep, b.ns)
	if err := live[len(live)-1].Ensure(t.Context()); err == nil || !strings.Contains(err.Error(), "192.0.2.9") {
		t.Errorf("Ensure with a source that is gone = %v, want an error that names it", err)
	}
	ep.EgressAddr = netip.MustParseAddr(netlab.HostAddr) // what the engine does
	for _, o := range b.Live(ep, b.ns) {
		if err := o.Ensure(t.Context()); err != nil {
			t.Error(err)
		}
	}
	b.healthy(t, ep)
}

// Case C15: many endpoints at once, each in its own namespace, half of them made
// by us; nothing is left and every thread is at home.
func TestManyAtOnce(t *testing.T) {
	netlab.Clean(t)
	netlab.Uplink(t, "1400")
	h := host(t)
	const parallel, rounds = 16, 3
	home, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range parallel {
		all.Go(func() {
			for round := range rounds {
				if err := cycle(t, h, uint32(i*rounds+round)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if got, err := os.Readlink("/proc/self/task/" + e.Name() + "/ns/net"); err == nil && got != home {
			t.Errorf("thread %s is in %s, want %s", e.Name(), got, home)
		}
	}
	if out := netlab.Run(t, "ip", "-br", "link"); strings.Contains(out, "eth0") || strings.Contains(out, "mkhost") {
		t.Errorf("stray links in the host:\n%s", out)
	}
}

// cycle is the life of one endpoint in a namespace of its own.
func cycle(t testing.TB, h *Host, slot uint32) error {
	ep := record(t, endpoint.NewGeneration(), 0, "eth0")
	a := endpoint.DefaultPools.At(slot)
	ep.Slot, ep.Subnet, ep.Gateway, ep.Address, ep.TransitHost, ep.TransitPeer = slot, a.Subnet, a.Gateway, a.Child, a.TransitHost, a.TransitPeer
	ns, err := netns.Make(ep.Generation)
	if err != nil {
		return err
	}
	objects := append(h.Devices(ep, ns), h.Live(ep, ns)...)
	for _, o := range objects {
		if e := o.Ensure(t.Context()); e != nil {
			err = errors.Join(err, e)
		}
	}
	for _, o := range objects {
		faults, e := o.Check(t.Context())
		for _, f := range faults {
			e = errors.Join(e, fmt.Errorf("fault: %s", f))
		}
		err = errors.Join(err, e)
	}
	for _, o := range slices.Backward(objects) {
		err = errors.Join(err, o.Remove(t.Context()))
	}
	return errors.Join(err, ns.Close(), netns.Remove(ep.Generation))
}

// BenchmarkEndpoint is the cost of one endpoint's objects beside others; it must
// not grow with their number. The others share one namespace, so that what is
// measured is the host.
func BenchmarkEndpoint(b *testing.B) {
	for _, others := range []int{10, 1000} {
		b.Run(fmt.Sprintf("others=%d", others), func(b *testing.B) {
			bench := newBench(b)
			crowd := netlab.New(b)
			// With one ip -batch: their making is not what is measured.
			var batch strings.Builder
			for i := range others {
				g := endpoint.NewGeneration()
				a := endpoint.DefaultPools.At(uint32(i + 10))
				fmt.Fprintf(&batch, "link add %s type veth peer name p%d netns %s\n", g.HostLink(), i, crowd.Name)
				fmt.Fprintf(&batch, "link set %s alias \"%s\" up\naddr add %s/30 dev %s\n", g.HostLink(), g.Alias(), a.TransitHost, g.HostLink())
				fmt.Fprintf(&batch, "route add %s via %s dev %s\n", a.Subnet, a.TransitPeer, g.HostLink())
			}
			file := b.TempDir() + "/batch"
			if err := os.WriteFile(file, []byte(batch.String()), 0o600); err != nil {
				b.Fatal(err)
			}
			// As on endpoints; else the kernel is busy with their IPv6 for seconds.
			netlab.Run(b, "sysctl", "-w", "net.ipv6.conf.default.disable_ipv6=1")
			crowd.Run(b, "sysctl", "-w", "net.ipv6.conf.default.disable_ipv6=1")
			b.Cleanup(func() { netlab.Run(b, "sysctl", "-w", "net.ipv6.conf.default.disable_ipv6=0") })
			netlab.Run(b, "ip", "-batch", file)
			b.Cleanup(func() { crowd.Remove(b) })

			ep := record(b, endpoint.NewGeneration(), 0, "eth0")
			objects := bench.all(ep)
			var ensure, check, remove time.Duration
			for b.Loop() {
				start := time.Now()
				for _, o := range objects {
					if err := o.Ensure(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
				made := time.Now()
				for _, o := range objects {
					if f, err := o.Check(b.Context()); err != nil || len(f) > 0 {
						b.Fatal(f, err)
					}
				}
				checked := time.Now()
				for _, o := range slices.Backward(objects) {
					if err := o.Remove(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
				ensure, check, remove = ensure+made.Sub(start), check+checked.Sub(made), remove+time.Since(checked)
			}
			per := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 / float64(b.N) }
			b.ReportMetric(per(ensure), "ensure-ms/op")
			b.ReportMetric(per(check), "check-ms/op")
			b.ReportMetric(per(remove), "remove-ms/op")
		})
	}
}
