package pump

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/shim/tun"
	wire "mknet/spec/pump"
	"mknet/tests/netlab"
)

const (
	mtu       = 1400
	primaryIP = "172.30.0.1"
	childIP   = "172.30.0.2"
)

// link is two namespaces with a TUN each, and what a pump between them needs.
type link struct {
	primary, child *netlab.Namespace
	queues         [2][]*tun.Queue // of primary and child
	offloads       [2]wire.Offloads
	counters       [2]*Counters
	runs           [2]chan error
	stop           context.CancelCauseFunc
	sealed         bool
}

type linkOption func(*linkSetup)

type linkSetup struct {
	vnet   [2]bool
	lanes  int
	sealed bool
}

func newLink(t *testing.T, options ...linkOption) *link {
	t.Helper()
	setup := linkSetup{vnet: [2]bool{true, true}, lanes: 2}
	for _, o := range options {
		o(&setup)
	}
	l := &link{primary: netlab.New(t), child: netlab.New(t), counters: [2]*Counters{new(Counters), new(Counters)}, sealed: setup.sealed}
	for i, side := range []struct {
		ns   *netlab.Namespace
		name string
		addr string
	}{{l.primary, "eth0", primaryIP + "/30"}, {l.child, "mkn0", childIP + "/30"}} {
		var err error
		side.ns.Do(t, func() {
			if setup.vnet[i] {
				l.queues[i], err = tun.Attach(side.name, setup.lanes, true)
				return
			}
			for range setup.lanes {
				var q *tun.Queue
				if q, err = tun.OpenPlain(side.name, false); err != nil {
					return
				}
				l.queues[i] = append(l.queues[i], q)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := tun.CloseAll(l.queues[i]); err != nil {
				t.Errorf("close the queues of %s: %v", side.name, err)
			}
		})
		if l.offloads[i], err = l.queues[i][0].ProbeOffloads(); err != nil {
			t.Fatal(err)
		}
		if setup.lanes > 1 {
			if err := l.queues[i][0].Steer(); err != nil {
				t.Fatal(err)
			}
		}
		side.ns.Run(t, "ip", "addr", "add", side.addr, "dev", side.name)
		side.ns.Run(t, "ip", "link", "set", side.name, "mtu", fmt.Sprint(mtu), "up")
	}
	return l
}

// begin starts a session on the queues.
func (l *link) begin(t *testing.T) {
	t.Helper()
	var lanes [2][]Lane
	for i := range l.queues[0] {
		a, b := stream(t)
		la, lb := Lane{Conn: a}, Lane{Conn: b}
		if l.sealed {
			up, down := byte(2*i), byte(2*i+1)
			la.Seal, la.Open, lb.Seal, lb.Open = newAEAD(t, up), newAEAD(t, down), newAEAD(t, down), newAEAD(t, up)
		}
		lanes[0], lanes[1] = append(lanes[0], la), append(lanes[1], lb)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	l.stop = cancel
	for i := range l.runs {
		cfg := Config{MTUBytes: mtu, LocalOffloads: l.offloads[i], PeerOffloads: l.offloads[1-i], Counters: l.counters[i]}
		if i == 0 {
			cfg.AllowedSource = netip.MustParseAddr(childIP)
		}
		done := make(chan error, 1)
		l.runs[i] = done
		go func() { done <- Run(ctx, cfg, l.queues[i], lanes[i]) }()
	}
	t.Cleanup(func() { l.end(t, nil) })
}

// end stops the session, if there is one, and checks that it ended as asked.
func (l *link) end(t *testing.T, cause error) {
	t.Helper()
	if l.stop == nil {
		return
	}
	l.stop(cause)
	l.stop = nil
	for i, done := range l.runs {
		select {
		case err := <-done:
			if cause == nil {
				cause = context.Canceled
			}
			// Whoever is told first may also hear it from the other side.
			if !errors.Is(err, cause) && !errors.As(err, new(*PeerClosedError)) {
				t.Errorf("side %d: session ended with %v, want %v", i, err, cause)
			}
		case <-time.After(limit):
			t.Fatalf("side %d: the session did not end within %s", i, limit)
		}
	}
}

func (l *link) ping(t *testing.T, args ...string) error {
	t.Helper()
	_, err := l.child.Try("ping", append([]string{"-n", "-c", "3", "-i", "0.05", "-W", "5"}, append(args, primaryIP)...)...)
	return err
}

func TestKernelPingAndMTU(t *testing.T) {
	for name, o := range linkVariants {
		t.Run(name, func(t *testing.T) {
			netlab.Clean(t)
			l := newLink(t, o)
			l.begin(t)
			if err := l.ping(t); err != nil {
				t.Error(err)
			}
			if err := l.ping(t, "-M", "do", "-s", "1372"); err != nil { // 1372 + 8 + 20 = 1400
				t.Errorf("a packet as long as the MTU: %v", err)
			}
			if err := l.ping(t, "-M", "do", "-s", "1373"); err == nil {
				t.Error("a packet longer than the MTU got through")
			}
			if err := l.ping(t, "-s", "8000"); err != nil {
				t.Errorf("fragments: %v", err)
			}
		})
	}
}

var linkVariants = map[string]linkOption{
	"full":            func(*linkSetup) {},
	"one lane":        func(s *linkSetup) { s.lanes = 1 },
	"sealed":          func(s *linkSetup) { s.sealed = true },
	"plain":           func(s *linkSetup) { s.vnet = [2]bool{false, false} },
	"primary plain":   func(s *linkSetup) { s.vnet[0] = false },
	"child plain":     func(s *linkSetup) { s.vnet[1] = false },
	"plain, one lane": func(s *linkSetup) { s.vnet, s.lanes = [2]bool{false, false}, 1 },
}

func TestKernelTCPBothWays(t *testing.T) {
	for name, o := range linkVariants {
		t.Run(name, func(t *testing.T) {
			netlab.Clean(t)
			l := newLink(t, o)
			l.begin(t)
			const size = 16 << 20
			transfer(t, l.child, l.primary, primaryIP, size)
			transfer(t, l.primary, l.child, childIP, size)
			for i, c := range l.counters {
				s := c.Snapshot()
				for reason, n := range s.Drops {
					if reason != "ipv6" { // router solicitations of the kernel
						t.Errorf("side %d: %d packets dropped as %s", i, n, reason)
					}
				}
				if s.RxBytes < size || s.TxBytes < size {
					t.Errorf("side %d: counters %+v, want more than %d bytes each way", i, s, size)
				}
				if n := s.TxBytes / s.TxPackets; l.offloads[0] != 0 && l.offloads[1] != 0 && n < 2*mtu {
					t.Errorf("side %d: %d bytes a packet with offloads, want more than %d", i, n, 2*mtu)
				}
			}
		})
	}
}

// transfer sends size random bytes over TCP and compares hashes.
func transfer(t *testing.T, from, to *netlab.Namespace, addr string, size int64) {
	t.Helper()
	var listener net.Listener
	var err error
	to.Do(t, func() { listener, err = net.Listen("tcp4", addr+":0") })
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	received := make(chan error, 1)
	var got [sha256.Size]byte
	go func() {
		c, err := listener.Accept()
		if err != nil {
			received <- err
			return
		}
		defer c.Close()
		h := sha256.New()
		_, err = io.Copy(h, c)
		copy(got[:], h.Sum(nil))
		received <- err
	}()
	var c net.Conn
	from.Do(t, func() { c, err = net.DialTimeout("tcp4", listener.Addr().String(), limit) })
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(2 * limit)); err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	if _, err := io.CopyN(io.MultiWriter(c, h), rand.NewChaCha8([32]byte{1}), size); err != nil {
		t.Fatalf("send to %s: %v", addr, err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if err := <-received; err != nil {
		t.Fatalf("receive at %s: %v", addr, err)
	}
	if !bytes.Equal(got[:], h.Sum(nil)) {
		t.Errorf("%d bytes to %s arrived with another hash", size, addr)
	}
}

// udp returns a socket that listens in to and one in from that is connected to it.
func udp(t *testing.T, from, to *netlab.Namespace, addr string) (sender, receiver *net.UDPConn) {
	t.Helper()
	var err error
	to.Do(t, func() { receiver, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(addr)}) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { receiver.Close() })
	from.Do(t, func() { sender, err = net.DialUDP("udp4", nil, receiver.LocalAddr().(*net.UDPAddr)) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sender.Close() })
	if err := receiver.SetReadDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	return sender, receiver
}

func TestKernelUDPKeepsBoundaries(t *testing.T) {
	for name, o := range linkVariants {
		t.Run(name, func(t *testing.T) {
			netlab.Clean(t)
			l := newLink(t, o)
			l.begin(t)
			sender, receiver := udp(t, l.child, l.primary, primaryIP)
			b := make([]byte, 1<<16)

			if _, err := sender.Write(bytes.Repeat([]byte{1}, 8192)); err != nil {
				t.Fatal(err)
			}
			if n, err := receiver.Read(b); err != nil || !bytes.Equal(b[:n], bytes.Repeat([]byte{1}, 8192)) {
				t.Errorf("datagram of 8192 bytes: got %d bytes, %v", n, err)
			}

			const size, count = 1200, 30
			raw, err := sender.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var inner error
			if err := raw.Control(func(fd uintptr) { inner = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, size) }); err != nil || inner != nil {
				t.Fatal(err, inner)
			}
			var all []byte
			for i := range byte(count) {
				all = append(all, bytes.Repeat([]byte{i}, size)...)
			}
			all = append(all, bytes.Repeat([]byte{count}, 77)...)
			if _, err := sender.Write(all); err != nil {
				t.Fatal(err)
			}
			for i := range byte(count + 1) {
				want := bytes.Repeat([]byte{i}, size)
				if i == count {
					want = want[:77]
				}
				if n, err := receiver.Read(b); err != nil || !bytes.Equal(b[:n], want) {
					t.Fatalf("datagram %d of %d: got %d bytes, %v, want %d", i, count, n, err, len(want))
				}
			}
		})
	}
}

func TestKernelSpoofedSource(t *testing.T) {
	netlab.Clean(t)
	l := newLink(t)
	l.begin(t)
	l.child.Run(t, "ip", "addr", "add", "172.30.0.6/32", "dev", "lo")
	if err := l.ping(t, "-I", "172.30.0.6", "-W", "1"); err == nil {
		t.Error("a packet with a foreign source address was answered")
	}
	if n := l.counters[0].Drops(wire.DropSource); n != 3 {
		t.Errorf("%d packets dropped as %s, want 3", n, wire.DropSource)
	}
	if err := l.ping(t); err != nil {
		t.Errorf("the session did not survive it: %v", err)
	}
}

// TestKernelHostileHeaders sends what the kernel would take and must not get.
func TestKernelHostileHeaders(t *testing.T) {
	netlab.Clean(t)
	l := newLink(t, linkVariants["one lane"])
	a, b := stream(t)
	p := &peer{Conn: b}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	cfg := Config{MTUBytes: mtu, LocalOffloads: l.offloads[0], PeerOffloads: l.offloads[0], Counters: l.counters[0], AllowedSource: netip.MustParseAddr(childIP)}
	go func() { done <- Run(ctx, cfg, l.queues[0], []Lane{{Conn: a}}) }()

	received := func() string {
		return l.primary.Run(t, "cat", "/proc/net/dev")
	}
	before := field(t, received(), "eth0", 1)
	header := wire.VnetHeader{Flags: wire.VnetNeedsCsum, GSOType: wire.GSOTCPv4, HdrLen: 40, GSOSize: 1, CsumStart: 20, CsumOffset: 16}
	amplifier := packet(60000, 2, 0)
	amplifier[9], amplifier[32] = 6, 5<<4
	p.send(t, wire.Append(nil, wire.DataVnet, append(header.Append(nil), amplifier...)))
	header.Flags, header.GSOSize = 0, 1360
	p.send(t, wire.Append(nil, wire.DataVnet, append(header.Append(nil), amplifier...)))
	p.send(t, wire.Append(nil, wire.DataVnet, append(wire.VnetHeader{}.Append(nil), packet(60000, 2, 0)...)))
	p.send(t, wire.Append(nil, wire.Data, packet(100, 2, 0))) // a good one behind them
	netlab.Eventually(t, limit, func() error {
		if s := l.counters[0].Snapshot(); s.RxPackets != 1 {
			return fmt.Errorf("counters %+v, want 1 packet", s)
		}
		return nil
	})
	s := l.counters[0].Snapshot()
	if s.Drops["gso_size"] != 1 || s.Drops["gso_without_checksum"] != 1 || s.Drops["mtu"] != 1 {
		t.Errorf("drops %v, want one each of gso_size, gso_without_checksum and mtu", s.Drops)
	}
	if n := field(t, received(), "eth0", 1) - before; n != 1 {
		t.Errorf("the kernel got %d packets, want 1", n)
	}

	l.primary.Run(t, "ip", "link", "set", "eth0", "down")
	p.send(t, wire.Append(nil, wire.Data, packet(100, 2, 0)))
	netlab.Eventually(t, limit, func() error {
		if n := l.counters[0].Drops(wire.DropTunDown); n != 1 {
			return fmt.Errorf("%d packets dropped as %s, want 1", n, wire.DropTunDown)
		}
		return nil
	})

	// The device goes away under the pump.
	l.primary.Run(t, "ip", "link", "del", "eth0")
	select {
	case err := <-done:
		if !errors.As(err, new(*QueueError)) {
			t.Errorf("device gone: got %v, want a QueueError", err)
		}
	case <-time.After(limit):
		t.Errorf("the session did not end within %s of its device", limit)
	}
	cancel()
	p.expectClose(t, wire.LocalFault)
}

// field returns the n-th number of a device in /proc/net/dev, 0 being received
// bytes and 1 received packets.
func field(t *testing.T, dev, name string, n int) (value int) {
	t.Helper()
	for line := range strings.Lines(dev) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), name+":"); ok {
			if _, err := fmt.Sscan(strings.Fields(rest)[n], &value); err != nil {
				t.Fatal(err)
			}
			return value
		}
	}
	t.Fatalf("device %s is not in\n%s", name, dev)
	return 0
}

func TestKernelRestart(t *testing.T) {
	netlab.Clean(t)
	l := newLink(t)
	sender, receiver := udp(t, l.child, l.primary, primaryIP)
	if err := receiver.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	arrivals := make(chan byte, 1<<16)
	go func() {
		defer close(arrivals)
		b := make([]byte, 100)
		for {
			if _, err := receiver.Read(b); err != nil {
				return
			}
			arrivals <- b[0]
		}
	}()
	best := limit
	var last [2]Snapshot
	for round := range byte(10) {
		begun := time.Now()
		l.begin(t)
		for arrived := false; !arrived; {
			if _, err := sender.Write([]byte{round}); err != nil {
				t.Fatal(err)
			}
			select {
			case n := <-arrivals:
				arrived = n == round
			case <-time.After(5 * time.Millisecond): // the rate of the test traffic
			}
			if time.Since(begun) > limit {
				t.Fatalf("session %d: no packet arrived within %s", round, limit)
			}
		}
		best = min(best, time.Since(begun))
		l.end(t, &StopError{Reason: wire.Reconfigure})
		for i, c := range l.counters {
			s := c.Snapshot()
			if s.Sessions != uint64(round)+1 || s.RxPackets < last[i].RxPackets || s.TxPackets < last[i].TxPackets || s.RxBytes < last[i].RxBytes || s.TxBytes < last[i].TxBytes {
				t.Errorf("side %d: counters went from %+v to %+v", i, last[i], s)
			}
			last[i] = s
		}
	}
	// The best of ten: the others may only show that the machine is busy.
	if best > time.Second {
		t.Errorf("the link carried packets %s after the session began, want at most 1 s", best)
	}
	t.Logf("the link carried packets %s after the session began", best)
}
