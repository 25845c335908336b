package probe_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/probe"
	"mknet/spec/policy"
	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

func TestProbe(t *testing.T) {
	ns := netlab.New(t)
	netlab.Run(t, "ip", "link", "add", "probe0", "type", "veth", "peer", "name", "eth0", "netns", ns.Name)
	netlab.Run(t, "ip", "addr", "add", "192.0.2.1/24", "dev", "probe0")
	netlab.Run(t, "ip", "link", "set", "probe0", "up")
	t.Cleanup(func() { netlab.Run(t, "ip", "link", "del", "probe0") })
	ns.Run(t, "ip", "addr", "add", "192.0.2.2/24", "dev", "eth0")
	ns.Run(t, "ip", "link", "set", "eth0", "up")
	tcp, err := net.Listen("tcp4", "192.0.2.1:7")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	udp, err := net.ListenPacket("udp4", "192.0.2.1:7")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 64)
		for {
			n, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			if _, err := udp.WriteTo(buf[:n], from); err != nil {
				return
			}
		}
	}()
	defer func() { udp.Close(); <-done }()
	in, err := netns.Open(ns.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	host := netip.MustParseAddr("192.0.2.1")
	for _, c := range []struct {
		name  string
		proto policy.Protocol
		to    netip.Addr
		port  uint16
		want  string
	}{
		{"TCP to a server", policy.TCP, host, 7, "answered: connected"},
		{"TCP to nobody", policy.TCP, host, 8, "refused: connection refused"},
		{"UDP to a server", policy.UDP, host, 7, "answered: 11 bytes"},
		{"UDP to nobody", policy.UDP, host, 8, "refused: connection refused"},
		{"echo", policy.ICMP, host, 0, "answered: echo reply"},
		{"into the dark", policy.UDP, netip.MustParseAddr("192.0.2.255"), 9, ""},
	} {
		p, err := probe.Send(in, probe.Packet{From: netip.MustParseAddr("192.0.2.2"), To: c.to, Protocol: c.proto, Port: c.port})
		if c.want == "" {
			if err == nil || !strings.Contains(err.Error(), "send a probe from 192.0.2.2 to 192.0.2.255: ") {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got, err := p.Answer(context.Background()); got != c.want || err != nil {
			t.Errorf("%s: %q, %v, want %q", c.name, got, err, c.want)
		}
	}
	if _, err := probe.Send(in, probe.Packet{From: host, To: host, Protocol: policy.GRE}); !errors.Is(err, probe.ErrProtocol) {
		t.Errorf("GRE: %v", err)
	}
	// Nobody answers: a blackhole. ctx ends the waiting.
	ns.Run(t, "ip", "neigh", "add", "192.0.2.9", "lladdr", "02:00:00:00:00:09", "dev", "eth0")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	p, err := probe.Send(in, probe.Packet{From: netip.MustParseAddr("192.0.2.2"), To: netip.MustParseAddr("192.0.2.9"), Protocol: policy.TCP, Port: 7})
	if err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	if got, err := p.Answer(ctx); !strings.HasPrefix(got, "no answer") || err != nil || time.Since(begun) > probe.Wait {
		t.Errorf("%q, %v", got, err)
	}
}
