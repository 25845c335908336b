package topo

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// TestPod builds a pod twice, reaches it, looks at it, and removes it.
func TestPod(t *testing.T) {
	b := newBench(t)
	ep := podRecord(t, endpoint.NewGeneration(), "c1", "eth0")
	before := b.state(t)
	b.build(t, ep)
	for _, o := range b.all(ep) {
		if err := o.Ensure(t.Context()); err != nil {
			t.Errorf("a second Ensure: %v", err)
		}
	}
	b.healthy(t, ep)
	netlab.Run(t, "ping", "-c1", "-W20", ep.Address.String())
	b.lab.Run(t, "ping", "-c1", "-W20", ep.Gateway.String())
	b.lab.Run(t, "ping", "-c1", "-W20", netlab.HostAddr)
	if out := b.lab.Run(t, "ip", "route"); !strings.Contains(out, "default via 10.91.0.1 dev eth0 proto 109 mtu 1400") || strings.Contains(out, "10.91.0.0/24") {
		t.Errorf("routes in the pod:\n%s", out)
	}
	if out := b.lab.Run(t, "ip", "-o", "link"); strings.Contains(out, "mkt") {
		t.Errorf("the temporary name stays:\n%s", out)
	}
	if err := b.Conflict(ep); err != nil {
		t.Errorf("Conflict with itself = %v", err)
	}
	other := podRecord(t, endpoint.NewGeneration(), "c2", "eth0") // the same address
	if err := b.Conflict(other); !errors.Is(err, ErrForeign) {
		t.Errorf("Conflict over an address in use = %v", err)
	}
	b.tearDown(t, ep)
	if after := b.state(t); after != before {
		t.Errorf("after Remove:\n%s\nwant\n%s", after, before)
	}
}

// TestPodFaults damages one object at a time: Check names it, Ensure mends it.
func TestPodFaults(t *testing.T) {
	b := newBench(t)
	ep := podRecord(t, endpoint.NewGeneration(), "c1", "eth0")
	b.build(t, ep)
	host := ep.HostLink
	for _, tt := range []struct {
		name, want string
		damage     func()
	}{
		{"host MTU", "mtu " + host + " (host): mtu is 1300, want 1400", func() { netlab.Run(t, "ip", "link", "set", host, "mtu", "1300") }},
		{"pod MTU", "mtu eth0 (namespace): mtu is 1300, want 1400", func() { b.lab.Run(t, "ip", "link", "set", "eth0", "mtu", "1300") }},
		{"MAC", "mac eth0 (namespace): is 02:00:00:00:00:09, want " + ep.PodMAC().String(), func() { b.lab.Run(t, "ip", "link", "set", "eth0", "address", "02:00:00:00:00:09") }},
		{"group", "group " + host + " (host): is 0x0, want 0x6d6b0100", func() { netlab.Run(t, "ip", "link", "set", host, "group", "0") }},
		{"strict reverse path", "rp_filter net/ipv4/conf/" + host + "/rp_filter (host): is 1 and conf/all has 0, which is strict", func() { netlab.Run(t, "sysctl", "-w", "net/ipv4/conf/"+host+"/rp_filter=1") }},
		{"gateway's address", "address 10.91.0.1/32 dev " + host + " (host): missing", func() { netlab.Run(t, "ip", "addr", "flush", "dev", host) }},
		{"neighbour of the host", "neighbour 10.91.0.7 dev " + host + " (host): missing", func() { netlab.Run(t, "ip", "neigh", "del", "10.91.0.7", "dev", host) }},
		{"neighbour of the pod", "neighbour 10.91.0.1 dev eth0 (namespace): missing", func() { b.lab.Run(t, "ip", "neigh", "del", "10.91.0.1", "dev", "eth0") }},
		{"route to the pod", "route 10.91.0.7/32 dev " + host + " (host): missing", func() { netlab.Run(t, "ip", "route", "del", "10.91.0.7/32") }},
		{"route's MTU", "route default via 10.91.0.1 dev eth0 (namespace): is default via 10.91.0.1 dev eth0 mtu 1000, want default via 10.91.0.1 dev eth0 mtu 1400", func() {
			b.lab.Run(t, "ip", "route", "replace", "default", "via", "10.91.0.1", "dev", "eth0", "mtu", "1000")
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.damage()
			if got := b.faults(t, ep); !slices.Contains(got, tt.want) {
				t.Errorf("faults:\n  %s\nwant\n  %s", strings.Join(got, "\n  "), tt.want)
			}
			for _, o := range b.all(ep) {
				if err := o.Ensure(t.Context()); err != nil {
					t.Errorf("mend: %v", err)
				}
			}
			b.healthy(t, ep)
		})
	}
	t.Run("conf/all is strict", func(t *testing.T) {
		netlab.Run(t, "sysctl", "-w", "net.ipv4.conf.all.rp_filter=1")
		defer netlab.Run(t, "sysctl", "-w", "net.ipv4.conf.all.rp_filter=0")
		if got := b.faults(t, ep); len(got) != 1 || !strings.HasPrefix(got[0], "rp_filter") {
			t.Errorf("faults: %q", got)
		}
		for _, o := range b.all(ep) {
			if err := o.Ensure(t.Context()); err != nil {
				t.Error(err)
			}
		}
		b.healthy(t, ep)
	})
	t.Run("routes moved to a table", func(t *testing.T) { // as sbr does
		b.lab.Run(t, "ip", "route", "add", "10.91.0.1", "dev", "eth0", "scope", "link", "table", "100")
		b.lab.Run(t, "ip", "route", "add", "default", "via", "10.91.0.1", "dev", "eth0", "mtu", "1400", "table", "100")
		b.lab.Run(t, "ip", "route", "flush", "table", "main", "dev", "eth0")
		b.healthy(t, ep)
	})
}

// TestPodNames: the wanted name exists, and two attachments have one host link.
func TestPodNames(t *testing.T) {
	b := newBench(t)
	ep := podRecord(t, endpoint.NewGeneration(), "c1", "eth0")
	b.lab.Run(t, "ip", "link", "add", "eth0", "type", "bridge")
	ensure := func(ep endpoint.Endpoint) error {
		for _, o := range b.all(ep) {
			if err := o.Ensure(t.Context()); err != nil {
				return err
			}
		}
		return nil
	}
	before := b.state(t)
	if err := ensure(ep); !errors.Is(err, ErrExists) {
		t.Errorf("with an eth0 of somebody else: %v", err)
	}
	b.tearDown(t, ep)
	if after := b.state(t); after != before {
		t.Errorf("after Remove:\n%s\nwant\n%s", after, before)
	}
	b.lab.Run(t, "ip", "link", "del", "eth0")
	b.build(t, ep)
	second := podRecord(t, endpoint.NewGeneration(), "c1", "eth0")
	second.Network, second.Address = "other", second.Address.Next()
	if err := b.LinkTaken(second); !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), ep.Generation.String()) {
		t.Errorf("LinkTaken = %v", err)
	}
	if err := ensure(second); !errors.Is(err, ErrForeign) {
		t.Errorf("a second pod with the same host link: %v", err)
	}
	for _, o := range slices.Backward(b.all(second)) {
		if err := o.Remove(t.Context()); err != nil {
			t.Error(err)
		}
	}
	b.healthy(t, ep)
	if b.LinkGone(ep) || !b.LinkGone(second) {
		t.Errorf("LinkGone: of the first %v, of the second %v; want false, true", b.LinkGone(ep), b.LinkGone(second))
	}
}
