package ipt

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
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

// passes bounds what must arrive, drops is how long we wait for what must not.
const (
	passes = 20 * time.Second
	drops  = 400 * time.Millisecond
)

// bothFlavours runs a kernel test under each flavour, one after the other: they
// share the private host.
func bothFlavours(t *testing.T, f func(t *testing.T, flavour string)) {
	for _, flavour := range []string{NFT, Legacy} {
		t.Run(flavour, func(t *testing.T) {
			prime(t)
			netlab.Clean(t)
			f(t, flavour)
		})
	}
}

var primed sync.Once

// prime makes every built-in chain of both flavours exist, as they do for good
// once anything has used them, and our shared parts, which a daemon makes once,
// so that netlab.Clean compares endpoints only.
func prime(t testing.TB) {
	primed.Do(func() {
		for table, chains := range map[string]string{
			"raw": "PREROUTING OUTPUT", "mangle": "PREROUTING INPUT FORWARD OUTPUT POSTROUTING",
			"nat": "PREROUTING INPUT OUTPUT POSTROUTING", "filter": "INPUT FORWARD OUTPUT", "security": "INPUT FORWARD OUTPUT",
		} {
			for _, c := range strings.Fields(chains) {
				for _, flavour := range []string{NFT, Legacy} {
					netlab.Run(t, "iptables-"+flavour, "-t", table, "-P", c, "ACCEPT")
				}
			}
		}
		for _, flavour := range []string{NFT, Legacy} {
			share(t, flavour)
		}
	})
}

// share brings the shared parts of the default configuration back.
func share(t testing.TB, flavour string) {
	t.Helper()
	if err := open(t, flavour).EnsureShared(ctx(t)); err != nil {
		t.Fatal(err)
	}
}

// lab is a private host with an egress and our shared parts. A test that changes
// those brings them back.
type lab struct {
	t        testing.TB
	fw       *Firewall
	internet *netlab.Namespace
}

func newLab(t testing.TB, flavour string, change ...func(*Config)) *lab {
	t.Helper()
	l := &lab{t: t, fw: open(t, flavour, change...)}
	l.internet = netlab.Uplink(t, "1400")
	l.internet.AddAddr(t, "lo", "169.254.169.254/32")
	forward(t, netlab.UplinkName)
	// Else the kernel answers one peer with one ICMP error a second only.
	host.SetSysctl(t, "net.ipv4.icmp_ratelimit=0")
	t.Cleanup(func() {
		if t.Failed() { // it may have left the shared parts broken
			share(t, flavour)
		}
	})
	return l
}

func open(t testing.TB, flavour string, change ...func(*Config)) *Firewall {
	t.Helper()
	cfg := Config{Flavour: flavour, ChildPool: endpoint.DefaultPools.Child, TransitPool: endpoint.DefaultPools.Transit, ConnLimit: DefaultConnLimit}
	for _, c := range change {
		c(&cfg)
	}
	fw, err := Open(ctx(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return fw
}

// ctx is longer than any test needs: t.Context() ends before the clean-ups.
func ctx(testing.TB) context.Context { return context.Background() }

var host *netlab.Namespace // nil: the private host itself

func forward(t testing.TB, link string) {
	t.Helper()
	host.SetSysctl(t, "net.ipv4.conf."+link+".forwarding=1", "net.ipv4.conf."+link+".rp_filter=0")
}

// child is an endpoint and a namespace that stands for its CNI namespace and
// its child together: the child's address is on lo there.
type child struct {
	*netlab.Namespace
	ep endpoint.Endpoint
}

func (l *lab) child(slot uint32, change ...func(*endpoint.Endpoint)) *child {
	l.t.Helper()
	t := l.t
	g := endpoint.NewGeneration()
	ep := testEndpoint(g, slot)
	ep.Egress = netlab.UplinkName
	for _, c := range change {
		c(&ep)
	}
	c := &child{netlab.New(t), ep}
	netlab.Veth(t, netlab.End{Link: ep.HostLink, Addr: ep.TransitHost.String() + "/30"},
		netlab.End{NS: c.Namespace, Link: "mkhost0", Addr: ep.TransitPeer.String() + "/30"})
	forward(t, ep.HostLink)
	c.AddAddr(t, "lo", ep.Address.String()+"/32")
	// As from a child: the transit address is nobody's source.
	transit := netip.PrefixFrom(ep.TransitHost, 30).Masked().String()
	c.Run(t, "ip", "route", "replace", transit, "dev", "mkhost0", "src", ep.Address.String())
	c.AddRoute(t, netlab.Route{To: "0.0.0.0/0", Via: ep.TransitHost.String(), Link: "mkhost0", Src: ep.Address.String()})
	host.AddRoute(t, netlab.Route{To: ep.Subnet.String(), Via: ep.TransitPeer.String(), Link: ep.HostLink, Src: netlab.HostAddr})
	t.Cleanup(func() { l.remove(ep) })
	l.ensure(ep)
	return c
}

func (l *lab) ensure(ep endpoint.Endpoint) {
	l.t.Helper()
	for _, table := range l.fw.Tables(ep) {
		if err := table.Ensure(ctx(l.t)); err != nil {
			l.t.Fatal(err)
		}
	}
}

func (l *lab) remove(ep endpoint.Endpoint) {
	l.t.Helper()
	for _, table := range l.fw.Tables(ep) {
		if err := table.Remove(ctx(l.t)); err != nil {
			l.t.Error(err)
		}
	}
}

// faults are the problems that CHECK finds, one line each.
func (l *lab) faults(ep endpoint.Endpoint) []string {
	l.t.Helper()
	var all []string
	for _, table := range l.fw.Tables(ep) {
		all = append(all, l.faultsOf(table)...)
	}
	return all
}

func (l *lab) faultsOf(table *Table) []string {
	l.t.Helper()
	faults, err := table.Check(ctx(l.t))
	if err != nil {
		l.t.Fatal(err)
	}
	var all []string
	for _, f := range faults {
		all = append(all, f.Object+": "+f.Problem)
	}
	return all
}

// ipt runs iptables of the lab's flavour.
func (l *lab) ipt(args ...string) string {
	l.t.Helper()
	return netlab.Run(l.t, "iptables-"+l.fw.flavour, append([]string{"-w", "20"}, args...)...)
}

// packets is the counter of a chain's n-th rule, from 1.
func (l *lab) packets(table, chain string, n int) int {
	l.t.Helper()
	out := l.ipt("-t", table, "-nvxL", chain, strconv.Itoa(n))
	fields := strings.Fields(out)
	if len(fields) == 0 {
		l.t.Fatalf("table %s chain %s has no rule %d", table, chain, n)
	}
	count, err := strconv.Atoi(fields[0])
	if err != nil {
		l.t.Fatalf("counter of %s %s rule %d: %q", table, chain, n, out)
	}
	return count
}

// rules is everything in all tables of the flavour, without counters.
func (l *lab) rules() string {
	l.t.Helper()
	var b strings.Builder
	for _, table := range everyTable {
		b.WriteString(l.ipt("-t", table, "-S") + "\n")
	}
	return b.String()
}

// server answers every TCP connection and UDP packet with the peer's address as
// it sees it, and remembers those addresses.
type server struct {
	mu   sync.Mutex
	seen []string
}

func (s *server) note(a net.Addr) string {
	host, _, _ := net.SplitHostPort(a.String())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, host)
	return host
}

func (s *server) peers() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.seen...)
}

// serve listens with both protocols inside ns (nil: the host) until the test ends.
func serve(t testing.TB, ns *netlab.Namespace, addr string) *server {
	t.Helper()
	s := &server{}
	var (
		tcp net.Listener
		udp net.PacketConn
	)
	within(t, ns, func() {
		var err error
		if tcp, err = net.Listen("tcp4", addr); err != nil {
			t.Error(err)
		}
		if udp, err = net.ListenPacket("udp4", addr); err != nil {
			t.Error(err)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(60 * time.Second))
				fmt.Fprint(c, s.note(c.RemoteAddr()))
				_ = c.(*net.TCPConn).CloseWrite()
				_, _ = io.Copy(io.Discard, c) // open for as long as the client likes
			})
		}
	})
	wg.Go(func() {
		buf := make([]byte, 64)
		for {
			_, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo([]byte(s.note(from)), from)
		}
	})
	t.Cleanup(func() { _, _ = tcp.Close(), udp.Close(); wg.Wait() })
	return s
}

func within(t testing.TB, ns *netlab.Namespace, f func()) {
	t.Helper()
	if ns == nil {
		f()
		return
	}
	ns.Do(t, f)
}

// dial opens a connection from inside ns (nil: the host).
func dial(t testing.TB, ns *netlab.Namespace, network, from, to string, limit time.Duration) (net.Conn, error) {
	t.Helper()
	d := net.Dialer{Timeout: limit}
	if from != "" {
		ip := net.ParseIP(from)
		if network == "tcp4" {
			d.LocalAddr = &net.TCPAddr{IP: ip}
		} else {
			d.LocalAddr = &net.UDPAddr{IP: ip}
		}
	}
	var (
		c   net.Conn
		err error
	)
	within(t, ns, func() { c, err = d.Dial(network, to) })
	return c, err
}

// ask returns what a server says about us, or an error.
func ask(t testing.TB, ns *netlab.Namespace, network, from, to string, limit time.Duration) (string, error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	c, err := dial(t, ns, network, from, to, limit)
	if err != nil {
		return "", err
	}
	defer c.Close()
	buf := make([]byte, 64)
	for {
		if network == "udp4" {
			if _, err := c.Write([]byte("?")); err != nil {
				return "", err
			}
		}
		step := deadline
		if network == "udp4" && time.Until(deadline) > time.Second {
			step = time.Now().Add(time.Second) // a datagram may be lost; ask again
		}
		_ = c.SetReadDeadline(step)
		n, err := c.Read(buf)
		var timeout net.Error
		if errors.As(err, &timeout) && timeout.Timeout() && time.Now().Before(deadline) {
			continue
		}
		return string(buf[:n]), err
	}
}

func mustReach(t testing.TB, ns *netlab.Namespace, network, to, seenAs string) {
	t.Helper()
	got, err := ask(t, ns, network, "", to, passes)
	if err != nil || got != seenAs {
		t.Errorf("%s to %s: got %q, %v, want to be seen as %s", network, to, got, err, seenAs)
	}
}

func mustNotReach(t testing.TB, ns *netlab.Namespace, network, to string) error {
	t.Helper()
	got, err := ask(t, ns, network, "", to, drops)
	if err == nil {
		t.Errorf("%s to %s: was answered %q, want nothing", network, to, got)
	}
	return err
}

// stranger is a generation whose names differ from the endpoint's in the last
// digits only.
func stranger(g endpoint.Generation) endpoint.Generation {
	b := g
	b[15] ^= 0xff
	if hex.EncodeToString(b[:6]) != g.Short() {
		panic("the digits of a chain's name changed")
	}
	return b
}

func addrPort(a netip.Addr, port int) string {
	return netip.AddrPortFrom(a, uint16(port)).String()
}
