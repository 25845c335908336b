package datapath

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// patience bounds every wait for a packet; the machine may be busy.
const patience = 20 * time.Second

// livePod is a pod with a namespace and a veth, wired up as topo does it.
type livePod struct {
	endpoint.Endpoint
	ns *netlab.Namespace
	d  *Datapath
}

// startPod makes a pod with the address 10.9.0.n, attaches the programs and brings
// it up.
func startPod(t *testing.T, d *Datapath, n, mtuBytes int) *livePod {
	t.Helper()
	return startPodAs(t, d, n, mtuBytes, func(*endpoint.Endpoint) {})
}

// startPodAs is startPod for a record that differs.
func startPodAs(t *testing.T, d *Datapath, n, mtuBytes int, change func(*endpoint.Endpoint)) *livePod {
	t.Helper()
	p := &livePod{Endpoint: pod("10.9.0."+strconv.Itoa(n), mtuBytes), ns: netlab.New(t), d: d}
	change(&p.Endpoint)
	p.addLink(t)
	t.Cleanup(func() { p.remove(t) })
	p.heal(t)
	p.up(t)
	return p
}

func mac(m [6]byte) string { return net.HardwareAddr(m[:]).String() }

func (p *livePod) addLink(t *testing.T) {
	t.Helper()
	mtu := strconv.Itoa(p.MTUBytes)
	netlab.Run(t, "ip", "link", "add", p.HostLink, "address", mac(p.Generation.HostMAC()), "mtu", mtu,
		"type", "veth", "peer", "name", "eth0", "address", mac(p.Generation.PeerMAC()), "mtu", mtu, "netns", p.ns.Name)
	netlab.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf."+p.HostLink+".rp_filter=0")
}

func (p *livePod) up(t *testing.T) {
	t.Helper()
	netlab.Run(t, "ip", "link", "set", p.HostLink, "up")
	netlab.Run(t, "ip", "route", "add", p.Address.String()+"/32", "dev", p.HostLink)
	p.ns.Run(t, "ip", "addr", "add", p.Address.String()+"/32", "dev", "eth0")
	p.ns.Run(t, "ip", "link", "set", "eth0", "up")
	p.ns.Run(t, "ip", "route", "add", p.Gateway.String()+"/32", "dev", "eth0")
	p.ns.Run(t, "ip", "route", "add", "default", "via", p.Gateway.String())
}

func (p *livePod) remove(t *testing.T) {
	t.Helper()
	_, _ = netlab.Try("ip", "link", "del", p.HostLink) // a test may have done so
	objects := p.d.Objects(p.Endpoint)
	for i := len(objects) - 1; i >= 0; i-- {
		if err := objects[i].Remove(context.Background()); err != nil {
			t.Error(err)
		}
	}
}

func (p *livePod) faults(t *testing.T) []endpoint.Fault {
	t.Helper()
	var all []endpoint.Fault
	for _, o := range p.d.Objects(p.Endpoint) {
		f, err := o.Check(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, f...)
	}
	return all
}

func (p *livePod) healthy(t *testing.T) {
	t.Helper()
	if f := p.faults(t); len(f) > 0 {
		t.Fatalf("faults: %v", f)
	}
}

func (p *livePod) heal(t *testing.T) {
	t.Helper()
	for _, o := range p.d.Objects(p.Endpoint) {
		if err := o.Ensure(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	p.healthy(t)
}

func (p *livePod) counters(t *testing.T) Counters {
	t.Helper()
	c, err := p.d.Counters(p.Address)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// ping sends n echo requests of the given size and returns how many were answered.
func (p *livePod) ping(t *testing.T, to netip.Addr, n int, args ...string) int {
	t.Helper()
	out, _ := p.ns.Try("ping", append([]string{"-n", "-c", strconv.Itoa(n), "-i", "0.02", "-W", "5", to.String()}, args...)...)
	_, rest, ok := strings.Cut(out, "packets transmitted, ")
	got, err := strconv.Atoi(strings.SplitN(rest, " ", 2)[0])
	if !ok || err != nil {
		t.Fatalf("ping %s: %s", to, out)
	}
	return got
}

func (p *livePod) mustPing(t *testing.T, to netip.Addr, args ...string) {
	t.Helper()
	if got := p.ping(t, to, 3, args...); got != 3 {
		t.Fatalf("%s: %d of 3 pings to %s answered", p.HostLink, got, to)
	}
}

// serve echoes whatever comes by TCP and UDP to the port until the test ends.
func (p *livePod) serve(t *testing.T, port int) {
	t.Helper()
	var l net.Listener
	var u net.PacketConn
	p.ns.Do(t, func() {
		var err error
		at := net.JoinHostPort(p.Address.String(), strconv.Itoa(port))
		if l, err = net.Listen("tcp4", at); err != nil {
			t.Error(err)
		}
		if u, err = net.ListenPacket("udp4", at); err != nil {
			t.Error(err)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	var wg sync.WaitGroup
	t.Cleanup(func() { l.Close(); u.Close(); wg.Wait() })
	wg.Go(func() {
		buf := make([]byte, 65536)
		for {
			n, from, err := u.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = u.WriteTo(buf[:n], from)
		}
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(3 * patience))
				buf := make([]byte, 1<<16)
				for {
					n, err := c.Read(buf)
					if err != nil {
						return
					}
					if _, err := c.Write(buf[:n]); err != nil {
						return
					}
				}
			})
		}
	})
}

// dial connects from inside the pod; the caller closes it.
func (p *livePod) dial(t *testing.T, network string, to netip.Addr, port int) net.Conn {
	t.Helper()
	var c net.Conn
	p.ns.Do(t, func() {
		var err error
		d := net.Dialer{Timeout: patience}
		if c, err = d.Dial(network, net.JoinHostPort(to.String(), strconv.Itoa(port))); err != nil {
			t.Errorf("dial %s %s:%d: %v", network, to, port, err)
		}
	})
	if c == nil {
		t.FailNow()
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

// echo sends n bytes and wants them back. A datagram is sent once.
func echo(t *testing.T, c net.Conn, n int) {
	t.Helper()
	sent, got := make([]byte, n), make([]byte, n)
	for i := range sent {
		sent[i] = byte(i * 7)
	}
	done := make(chan error, 1)
	go func() { _, err := c.Write(sent); done <- err }()
	for at := 0; at < n; {
		m, err := c.Read(got[at:])
		if err != nil {
			t.Fatalf("echo of %d bytes: %d came back: %v", n, at, err)
		}
		at += m
	}
	if err := <-done; err != nil {
		t.Fatalf("echo: %v", err)
	}
	if hex.EncodeToString(sent) != hex.EncodeToString(got) {
		t.Fatalf("echo of %d bytes came back changed", n)
	}
}

func (p *livePod) echo(t *testing.T, network string, to netip.Addr, port, n int) {
	t.Helper()
	c := p.dial(t, network, to, port)
	defer c.Close()
	echo(t, c, n)
}

// grew is what the counters of a pod gained while f ran, in packets.
func (p *livePod) grew(t *testing.T, f func()) Counters {
	t.Helper()
	before := p.counters(t)
	f()
	after := p.counters(t)
	for i := range after {
		after[i].Packets -= before[i].Packets
		after[i].Bytes -= before[i].Bytes
	}
	return after
}

// ways runs f for both ways to attach and both ways to redirect.
func ways(t *testing.T, f func(t *testing.T, d *Datapath, by Outcome)) {
	t.Helper()
	for _, c := range []Config{{Attach: TCX}, {Attach: Clsact, NoPeer: true}} {
		way(t, c, f)
	}
}

func way(t *testing.T, c Config, f func(t *testing.T, d *Datapath, by Outcome)) {
	t.Helper()
	by := Peer
	if c.NoPeer {
		by = Redirect
	}
	t.Run(fmt.Sprintf("%s-%s", c.Attach, by), func(t *testing.T) {
		netlab.Clean(t)
		f(t, open(t, c), by)
	})
}
