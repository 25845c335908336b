package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	data "mknet/shim/pump"
	"mknet/shim/session"
	"mknet/shim/transport"
	"mknet/shim/tun"
	"mknet/spec/endpoint"
	"mknet/spec/pump"
	"mknet/tests/netlab"
)

// The private host is the child here, and a namespace is the primary.
func TestMain(m *testing.M) { netlab.Main(m) }

const patience = time.Minute

var (
	sandbox = endpoint.Sandbox{ID: "sandbox-1", Generation: "1"}
	token   = pump.Token{4, 2}
)

// primary is the other end: a TUN in a namespace, and a client.
type primary struct {
	*netlab.Namespace
	queues   []*tun.Queue
	offloads pump.Offloads
	client   session.Client
}

func newPrimary(t *testing.T, a transport.Address) *primary {
	t.Helper()
	p := &primary{Namespace: netlab.New(t), client: session.Client{
		Token:    token,
		Identity: session.Identity{Sandbox: sandbox, Endpoint: endpoint.NewGeneration()},
		Dial:     func(ctx context.Context) (net.Conn, error) { return transport.Dial(ctx, a) },
	}}
	var err error
	p.Do(t, func() { p.queues, err = tun.Attach("eth0", 2, true) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tun.CloseAll(p.queues); err != nil {
			t.Error(err)
		}
	})
	if p.offloads, err = p.queues[0].ProbeOffloads(); err != nil {
		t.Fatal(err)
	}
	p.Run(t, "ip", "link", "set", "eth0", "up")
	return p
}

func (p *primary) offer() pump.LinkConfig {
	return pump.LinkConfig{
		Link: "mkn0", Address: netip.MustParsePrefix("172.30.0.2/30"), Gateway: netip.MustParseAddr("172.30.0.1"), MTUBytes: 1400,
		DNS:     endpoint.DNS{Nameservers: []string{"169.254.169.254"}},
		VnetHdr: true, Offloads: p.offloads, Lanes: 2, Windows: transport.Windows(2, false), Keepalive: pump.Milliseconds(5 * time.Second),
	}
}

// carry opens a session and carries it until the returned function is called.
func (p *primary) carry(t *testing.T, offer pump.LinkConfig) (*session.Session, func() error) {
	t.Helper()
	p.Run(t, "ip", "addr", "replace", netip.PrefixFrom(offer.Gateway, offer.Address.Bits()).String(), "dev", "eth0")
	s, err := p.client.Open(t.Context(), offer)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Carry(ctx, p.queues, 0, new(data.Counters)) }()
	ended := false
	end := func() error {
		if ended {
			return nil
		}
		ended = true
		cancel()
		return <-done
	}
	t.Cleanup(func() { _ = end() })
	return s, end
}

func (p *primary) ping(t *testing.T, address string) {
	t.Helper()
	netlab.Eventually(t, patience, func() error {
		if out, err := p.Try("ping", "-c1", "-W1", address); err != nil {
			return fmt.Errorf("%s: %w", out, err)
		}
		return nil
	})
}

// serve runs an agent; it is the first thing that a test's clean-up ends.
func serve(t *testing.T, resolvConf string) (transport.Address, *Agent, func()) {
	t.Helper()
	address, err := transport.Parse("unix://" + filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	a := New(resolvConf, false, log)
	server := &session.Server{Handler: a, Log: log, Credentials: func() (session.Credentials, error) {
		return session.Credentials{Identity: session.Identity{Sandbox: sandbox}, Token: token}, nil
	}}
	ctx, cancel := context.WithCancel(context.Background())
	l, err := transport.Listen(ctx, address, transport.Options{})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx, l) }()
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := errors.Join(<-done, a.Close()); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(stop)
	return address, a, stop
}

func removeDevice(t *testing.T) {
	t.Helper()
	t.Cleanup(func() { netlab.Run(t, "ip", "link", "del", "mkn0") })
}

func index(t *testing.T) string {
	t.Helper()
	i, _, _ := strings.Cut(netlab.Run(t, "ip", "-o", "link", "show", "mkn0"), ":")
	return i
}

func TestSessionsFollowEachOther(t *testing.T) {
	netlab.Clean(t)
	removeDevice(t)
	resolv := filepath.Join(t.TempDir(), "resolv.conf")
	address, a, _ := serve(t, resolv)
	p := newPrimary(t, address)
	s, end := p.carry(t, p.offer())
	if s.Ack.Offloads == 0 || !s.Ack.VnetHdr {
		t.Errorf("the agent offers %+v", s.Ack)
	}
	p.ping(t, "172.30.0.2")
	first := index(t)
	if err := end(); !errors.Is(err, context.Canceled) {
		t.Errorf("end: %v", err)
	}

	// A clone: other address, MTU and resolver, on the same device.
	offer := p.offer()
	offer.Address, offer.Gateway, offer.MTUBytes = netip.MustParsePrefix("172.30.9.2/30"), netip.MustParseAddr("172.30.9.1"), 9000
	offer.DNS.Nameservers = []string{"192.0.2.53"}
	p.carry(t, offer)
	p.ping(t, "172.30.9.2")
	out := netlab.Run(t, "ip", "addr", "show", "mkn0")
	if !strings.Contains(out, "172.30.9.2/30") || strings.Contains(out, "172.30.0.2") || !strings.Contains(out, "mtu 9000") || index(t) != first {
		t.Errorf("after the second session, index %s, was %s:\n%s", index(t), first, out)
	}
	if b, err := os.ReadFile(resolv); err != nil || !strings.Contains(string(b), "nameserver 192.0.2.53") {
		t.Errorf("resolver %q, %v", b, err)
	}
	if n := a.links["mkn0"].counters.Snapshot(); n.Sessions != 2 || n.RxPackets < 2 {
		t.Errorf("counters %+v, want those of both sessions", n)
	}
}

func TestDeviceStaysAcrossARestart(t *testing.T) {
	netlab.Clean(t)
	removeDevice(t)
	address, _, stop := serve(t, "")
	p := newPrimary(t, address)
	p.carry(t, p.offer())
	p.ping(t, "172.30.0.2")
	first := index(t)
	stop()
	if out := netlab.Run(t, "ip", "addr", "show", "mkn0"); !strings.Contains(out, "172.30.0.2/30") {
		t.Errorf("without an agent:\n%s", out)
	}
	address, _, _ = serve(t, "")
	p.client.Dial = func(ctx context.Context) (net.Conn, error) { return transport.Dial(ctx, address) }
	p.carry(t, p.offer())
	p.ping(t, "172.30.0.2")
	if got := index(t); got != first {
		t.Errorf("index %s, was %s", got, first)
	}
}

// A TUN that somebody removed in the child is made again by the next session.
func TestLostDeviceIsMadeAgain(t *testing.T) {
	netlab.Clean(t)
	removeDevice(t)
	address, _, _ := serve(t, "")
	p := newPrimary(t, address)
	p.carry(t, p.offer())
	p.ping(t, "172.30.0.2")
	netlab.Run(t, "ip", "link", "del", "mkn0")
	p.carry(t, p.offer())
	p.ping(t, "172.30.0.2")
}

func TestConfigureIsRefused(t *testing.T) {
	netlab.Clean(t)
	netlab.Run(t, "ip", "link", "add", "mkn0", "type", "veth", "peer", "name", "other0")
	removeDevice(t)
	address, _, _ := serve(t, "")
	p := newPrimary(t, address)
	_, err := p.client.Open(t.Context(), p.offer())
	var refused *session.RefusedError
	if !errors.As(err, &refused) || !strings.Contains(refused.Text, "not ours") {
		t.Errorf("got %v, want the agent's reason", err)
	}
}
