package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/ti-mo/conntrack"

	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

var (
	child   = netip.MustParseAddr("172.30.0.2")
	sibling = netip.MustParseAddr("172.30.0.6")
	third   = netip.MustParseAddr("172.30.0.22") // the same leading digits as the child
	server  = netip.MustParseAddr("198.51.100.1")
	primary = netip.MustParseAddr("198.51.100.10")
)

// entry puts one entry into the private host's table.
func entry(t *testing.T, orig, reply conntrack.Tuple) {
	t.Helper()
	c, err := conntrack.Dial(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	f := conntrack.Flow{TupleOrig: orig, TupleReply: reply, Timeout: 600}
	f.Status = conntrack.StatusConfirmed | conntrack.StatusSeenReply
	if err := c.Create(f); err != nil {
		t.Fatalf("create %s: %v", orig, err)
	}
}

func tuple(src netip.Addr, sport uint16, dst netip.Addr, dport uint16) conntrack.Tuple {
	return conntrack.Tuple{
		IP:    conntrack.IPTuple{SourceAddress: src, DestinationAddress: dst},
		Proto: conntrack.ProtoTuple{Protocol: 17, SourcePort: sport, DestinationPort: dport},
	}
}

// fill makes: two masqueraded flows of the child, one flow published to it, one
// that begins at the primary, and one flow each of its sibling and a third.
func fill(t *testing.T) {
	t.Helper()
	for i := range uint16(2) {
		entry(t, tuple(child, 1000+i, server, 53), tuple(server, 53, primary, 2000+i))
	}
	entry(t, tuple(server, 3000, primary, 80), tuple(child, 8080, server, 3000))
	entry(t, tuple(primary, 3001, child, 80), tuple(child, 80, primary, 3001))
	entry(t, tuple(sibling, 1000, server, 53), tuple(server, 53, primary, 2100))
	entry(t, tuple(third, 1000, server, 53), tuple(server, 53, primary, 2101))
	t.Cleanup(func() {
		if err := Flush(context.Background(), child, sibling, third); err != nil {
			t.Error(err)
		}
	})
}

func want(t *testing.T, counts map[netip.Addr]int) {
	t.Helper()
	for a, n := range counts {
		got, err := Count(t.Context(), a)
		if err != nil || got != n {
			t.Errorf("entries of %s: got %d, %v, want %d", a, got, err, n)
		}
	}
}

func TestFlushTakesBothDirectionsOfOneAddress(t *testing.T) {
	for _, test := range []struct {
		name  string
		flush func(context.Context, ...netip.Addr) error
	}{
		{"in the kernel", kernelOnly},
		{"by dump", func(ctx context.Context, a ...netip.Addr) error { return flushByDump(ctx, a) }},
		{"as exported", Flush},
	} {
		t.Run(test.name, func(t *testing.T) {
			netlab.Clean(t)
			fill(t)
			want(t, map[netip.Addr]int{child: 4, sibling: 1, third: 1})
			if err := test.flush(t.Context(), child); err != nil {
				t.Fatal(err)
			}
			want(t, map[netip.Addr]int{child: 0, sibling: 1, third: 1})
			if err := test.flush(t.Context(), child); err != nil {
				t.Errorf("again: %v", err)
			}
			if err := test.flush(t.Context(), child, sibling, third); err != nil {
				t.Error(err)
			}
			want(t, map[netip.Addr]int{child: 0, sibling: 0, third: 0})
		})
	}
}

// kernelOnly is Flush without its fall-back.
func kernelOnly(ctx context.Context, addrs ...netip.Addr) error {
	c, err := dial(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	for _, a := range addrs {
		for _, side := range []uint16{ctaTupleOrig, ctaTupleReply} {
			if err := c.deleteBySource(a, side); err != nil {
				return fmt.Errorf("this kernel cannot filter a delete: %w", err)
			}
		}
	}
	return nil
}

func TestListShowsNAT(t *testing.T) {
	netlab.Clean(t)
	fill(t)
	entries, err := List(t.Context(), child)
	if err != nil {
		t.Fatal(err)
	}
	published := Entry{
		Protocol:   17,
		OrigSource: netip.AddrPortFrom(server, 3000), OrigDestination: netip.AddrPortFrom(primary, 80),
		ReplSource: netip.AddrPortFrom(child, 8080), ReplDestination: netip.AddrPortFrom(server, 3000),
		Answered: true,
	}
	if !slices.Contains(entries, published) {
		t.Errorf("got %+v, want among them %+v", entries, published)
	}
	for _, c := range []struct {
		name     string
		from, to netip.AddrPort
		reply    bool
	}{
		{"as it began", published.OrigSource, published.OrigDestination, false},
		{"its answer, before it is translated back", published.ReplSource, published.OrigSource, true},
	} {
		if e, reply, ok := Of(entries, 17, c.from, c.to); !ok || reply != c.reply || e != published {
			t.Errorf("%s: got %+v, reply %v, %v", c.name, e, reply, ok)
		}
	}
	if e, _, ok := Of(entries, 6, published.OrigSource, published.OrigDestination); ok {
		t.Errorf("of another protocol: %+v", e)
	}
	if e, _, ok := Of(entries, 17, published.OrigSource, netip.AddrPortFrom(primary, 81)); ok {
		t.Errorf("of another port: %+v", e)
	}
}

// C21: a client that never stops sending keeps a stale entry alive. Without the
// flush its packets go on to where the entry says.
func TestStaleTranslationEnds(t *testing.T) {
	// The table exists for good once it was used.
	netlab.Run(t, "iptables-legacy", "-t", "nat", "-S")
	netlab.Clean(t)
	client := netlab.New(t)
	netlab.Run(t, "ip", "link", "add", "c0", "type", "veth", "peer", "name", "eth0", "netns", client.Name)
	t.Cleanup(func() { netlab.Run(t, "ip", "link", "del", "c0") })
	netlab.Run(t, "ip", "addr", "add", "10.1.1.1/24", "dev", "c0")
	netlab.Run(t, "ip", "link", "set", "c0", "up")
	client.Run(t, "ip", "addr", "add", "10.1.1.2/24", "dev", "eth0")
	client.Run(t, "ip", "link", "set", "eth0", "up")
	old, fresh := netip.MustParseAddr("10.1.2.1"), netip.MustParseAddr("10.1.2.2")
	for _, a := range []netip.Addr{old, fresh} {
		netlab.Run(t, "ip", "addr", "add", a.String()+"/32", "dev", "lo")
		t.Cleanup(func() { netlab.Run(t, "ip", "addr", "del", a.String()+"/32", "dev", "lo") })
	}
	publish := func(op string, to netip.Addr) {
		netlab.Run(t, "iptables-legacy", "-w", "20", "-t", "nat", op, "PREROUTING", "-i", "c0", "-p", "udp", "--dport", "99", "-j", "DNAT", "--to-destination", to.String())
	}

	received := make(chan netip.Addr, 1024)
	for _, a := range []netip.Addr{old, fresh} {
		l, err := net.ListenPacket("udp4", netip.AddrPortFrom(a, 99).String())
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		t.Cleanup(func() { l.Close(); <-done })
		go func() {
			defer close(done)
			buf := make([]byte, 16)
			for {
				if _, _, err := l.ReadFrom(buf); err != nil {
					return
				}
				select {
				case received <- a:
				default:
				}
			}
		}()
	}
	var conn net.Conn
	client.Do(t, func() {
		var err error
		if conn, err = net.Dial("udp4", "10.1.1.1:99"); err != nil {
			t.Error(err)
		}
	})
	if t.Failed() {
		return
	}
	defer conn.Close()
	// arrives sends until a packet arrives and returns where.
	arrives := func() netip.Addr {
		t.Helper()
		var at netip.Addr
		netlab.Eventually(t, 20*time.Second, func() error {
			for len(received) > 0 {
				<-received
			}
			if _, err := conn.Write([]byte("x")); err != nil {
				return err
			}
			select {
			case at = <-received:
				return nil
			case <-time.After(time.Second):
				return errors.New("nothing arrived")
			}
		})
		return at
	}
	publish("-A", old)
	if got := arrives(); got != old {
		t.Fatalf("first packet arrived at %s, want %s", got, old)
	}
	publish("-D", old)
	publish("-A", fresh)
	defer publish("-D", fresh)
	if got := arrives(); got != old {
		t.Fatalf("before the flush: arrived at %s; the entry was expected to hold %s", got, old)
	}
	if err := Flush(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	if got := arrives(); got != fresh {
		t.Errorf("after the flush: arrived at %s, want %s", got, fresh)
	}
	if err := Flush(t.Context(), fresh); err != nil {
		t.Error(err)
	}
}

func TestFlushRefusesWhatIsNoAddress(t *testing.T) {
	fill(t)
	for _, a := range []netip.Addr{{}, netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		if err := Flush(t.Context(), child, a); err == nil {
			t.Errorf("address %q: no error", a)
		}
	}
	want(t, map[netip.Addr]int{child: 4})
	if err := Flush(t.Context()); err != nil {
		t.Errorf("no address: %v", err)
	}
	want(t, map[netip.Addr]int{child: 4})
}

func TestEndedContext(t *testing.T) {
	fill(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Flush(ctx, child); !errors.Is(err, context.Canceled) {
		t.Errorf("Flush: got %v", err)
	}
	if _, err := List(ctx, child); !errors.Is(err, context.Canceled) {
		t.Errorf("List: got %v", err)
	}
}
