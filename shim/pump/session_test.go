package pump

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	wire "mknet/spec/pump"
	"mknet/tests/netlab"
)

// TestBothWays carries packets of many sizes over every combination of queues
// with and without virtio-net header, lanes and sealing.
func TestBothWays(t *testing.T) {
	for _, lanes := range []int{1, 2} {
		for _, sealed := range []bool{false, true} {
			for _, vnet := range [][2]bool{{true, true}, {true, false}, {false, true}, {false, false}} {
				t.Run(fmt.Sprintf("lanes=%d sealed=%t vnet=%t,%t", lanes, sealed, vnet[0], vnet[1]), func(t *testing.T) {
					bothWays(t, lanes, sealed, vnet)
				})
			}
		}
	}
}

func bothWays(t *testing.T, lanes int, sealed bool, vnet [2]bool) {
	var (
		queues  [2][]device
		kernels [2][]*os.File
		ends    [2][]Lane
		cfgs    = [2]Config{config(), config()}
	)
	cfgs[0].MTUBytes, cfgs[1].MTUBytes = 65000, 65000
	for i := range lanes {
		a, b := stream(t)
		la, lb := Lane{Conn: a}, Lane{Conn: b}
		if sealed {
			up, down := byte(2*i), byte(2*i+1)
			la.Seal, la.Open = newAEAD(t, up), newAEAD(t, down)
			lb.Seal, lb.Open = newAEAD(t, down), newAEAD(t, up)
		}
		ends[0], ends[1] = append(ends[0], la), append(ends[1], lb)
		for side := range 2 {
			q, k := newTun(t, vnet[side])
			queues[side], kernels[side] = append(queues[side], q), append(kernels[side], k)
		}
	}
	runs := [2]*running{start(t, cfgs[0], queues[0], ends[0]), start(t, cfgs[1], queues[1], ends[1])}

	const rounds = 300
	var sent uint64
	for lane := range lanes {
		for i := range uint32(rounds) {
			n := 24 + int(i*211)%1400
			if i%100 == 99 {
				n = 65000 // a largest frame between small ones
			}
			sent += uint64(n)
			for side := range 2 {
				want := packet(n, byte(2+side), i)
				put(t, kernels[side][lane], vnet[side], want)
				if got := get(t, kernels[1-side][lane], vnet[1-side]); !bytes.Equal(got, want) {
					t.Fatalf("side %d, lane %d, packet %d of %d bytes: arrived as %d bytes, differs", side, lane, i, n, len(got))
				}
			}
		}
	}
	for side, q := range queues {
		want := wire.AllOffloads
		if !vnet[side] {
			want = 0
		}
		if got := q[0].(*fakeTun).offloads; got != want {
			t.Errorf("side %d: offloads %s, want %s", side, got, want)
		}
	}
	runs[0].stop(&StopError{wire.Reconfigure, "new address"})
	var stopped *StopError
	if err := runs[0].wait(t); !errors.As(err, &stopped) {
		t.Errorf("stopped side: got %v, want its StopError", err)
	}
	var closed *PeerClosedError
	if err := runs[1].wait(t); !errors.As(err, &closed) || closed.Reason != wire.Reconfigure || closed.Text != "new address" {
		t.Errorf("other side: got %v, want the reason of the first", err)
	}
	for side, c := range cfgs {
		s := c.Counters.Snapshot()
		if n := uint64(rounds * lanes); s.RxPackets != n || s.TxPackets != n || s.RxBytes != sent || s.TxBytes != sent || s.Drops != nil {
			t.Errorf("side %d: counters %+v, want %d packets and %d bytes each way, no drops", side, s, n, sent)
		}
		if s.Sessions != 1 || s.Reconnects != 0 || s.RTT <= 0 {
			t.Errorf("side %d: counters %+v, want 1 session with an RTT", side, s)
		}
	}
}

// alone starts a session whose peer is the test.
func alone(t *testing.T, edit func(*Config, []Lane)) (*running, []*peer, *os.File, *Counters) {
	t.Helper()
	cfg := config()
	var lanes []Lane
	var peers []*peer
	for range 2 {
		a, b := stream(t)
		lanes, peers = append(lanes, Lane{Conn: a}), append(peers, &peer{Conn: b})
	}
	if edit != nil {
		edit(&cfg, lanes)
	}
	q, kernel := newTun(t, true)
	return start(t, cfg, []device{q}, lanes), peers, kernel, cfg.Counters
}

func TestMalformedEndsTheSession(t *testing.T) {
	data := func(n int) []byte { return wire.Append(nil, wire.Data, packet(n, 2, 0)) }
	for _, tt := range []struct {
		name string
		in   []byte
	}{
		{"random bytes", []byte("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n")},
		{"length 0", []byte{0, 0, 0, 0, 0}},
		{"length of 4 GiB", []byte{0xff, 0xff, 0xff, 0xff, 1}},
		{"unknown type", wire.Append(nil, 99, nil)},
		{"sealed frame in a plain session", wire.Append(nil, wire.Sealed, make([]byte, 100))},
		{"report of what was never sent", wire.AppendCredit(nil, wire.Credit{Bytes: 1, Frames: 1})},
		{"report for a third lane", wire.AppendCredit(nil, wire.Credit{Lane: 2})},
		{"good frame, then bad", append(data(100), 0, 0, 0, 0, 0)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, peers, _, _ := alone(t, nil)
			peers[0].send(t, tt.in)
			var protocol *ProtocolError
			if err := r.wait(t); !errors.As(err, &protocol) || protocol.Lane != 0 {
				t.Errorf("got %v, want a ProtocolError on lane 0", err)
			}
			for _, p := range peers {
				p.expectClose(t, wire.Protocol)
			}
		})
	}
}

func TestBeyondCreditEndsTheSession(t *testing.T) {
	// The pump reports with a quarter of the window, so that a peer that takes no
	// notice must be stopped by what it sends in one go: a batch that comes in with
	// one read is judged before anything is reported.
	r, peers, _, _ := alone(t, func(c *Config, _ []Lane) {
		c.Grant = []wire.Window{wire.BulkWindow, {Bytes: wire.MinWindowBytes, Messages: wire.MinWindowMessages}}
	})
	var b []byte
	for range wire.MinWindowMessages + 1 {
		b = append(b, wire.Append(nil, wire.Data, packet(30, 2, 0))...)
	}
	peers[1].send(t, b)
	var broken *wire.CreditError
	if err := r.wait(t); !errors.As(err, &broken) {
		t.Errorf("got %v, want a CreditError", err)
	}
	peers[1].expectClose(t, wire.Protocol)
}

func TestWithoutCreditNothingIsRead(t *testing.T) {
	const window = wire.MinWindowBytes
	r, peers, kernel, c := alone(t, func(c *Config, _ []Lane) {
		c.Granted = []wire.Window{{Bytes: window, Messages: 1000}, wire.LatencyWindow}
		c.MTUBytes = 65000
	})
	// The kernel offers more than the window holds, until it would have to wait.
	go func() {
		p := append(wire.VnetHeader{}.Append(nil), packet(60000, 2, 0)...)
		for {
			if _, err := kernel.Write(p); err != nil {
				return // the test is over
			}
		}
	}()
	var got wire.Credit
	for got.Bytes < window/2 {
		f := peers[0].next(t, wire.Ping)
		got.Bytes += uint64(f.Bytes)
		got.Frames++
	}
	netlab.Eventually(t, limit, func() error {
		if c.Snapshot().CreditWaits == 0 {
			return errors.New("the pump has not begun to wait for credit")
		}
		return nil
	})
	// A report brings the next frames, and never more than the window.
	for range 20 {
		peers[1].send(t, wire.AppendCredit(nil, wire.Credit{Lane: 0, Bytes: got.Bytes, Frames: got.Frames}))
		f := peers[0].next(t, wire.Ping)
		got.Bytes += uint64(f.Bytes)
		got.Frames++
	}
	r.stop(nil)
	if err := r.wait(t); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want canceled", err)
	}
	for { // what is still under way fits into the window
		f := peers[0].next(t, wire.Ping)
		if f.Type == wire.Close {
			break
		}
		got.Bytes += uint64(f.Bytes)
	}
	if s := c.Snapshot(); s.TxBytes+s.TxPackets*(wire.HeaderBytes+wire.VnetHeaderBytes) != got.Bytes {
		t.Errorf("the pump counts %d packets and %d bytes, the peer got frames of %d bytes", s.TxPackets, s.TxBytes, got.Bytes)
	}
}

func TestDeadPeer(t *testing.T) {
	begin := time.Now()
	r, peers, _, _ := alone(t, func(c *Config, _ []Lane) { c.DeadAfter = 300 * time.Millisecond })
	// One lane alone does not keep the session alive.
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			if _, err := peers[0].Write(wire.AppendPing(nil, wire.Ping, 7)); err != nil {
				return
			}
			time.Sleep(10 * time.Millisecond) // a peer with a clock of its own
		}
	}()
	var dead *DeadPeerError
	if err := r.wait(t); !errors.As(err, &dead) || dead.Lane != 1 {
		t.Errorf("got %v, want a DeadPeerError on lane 1", err)
	}
	if took := time.Since(begin); took < 300*time.Millisecond {
		t.Errorf("dead after %s, want not before 300ms", took)
	}
	peers[1].expectClose(t, wire.Unresponsive)
	<-done
}

func TestPingIsAnswered(t *testing.T) {
	r, peers, _, c := alone(t, nil)
	for i, p := range peers {
		p.send(t, wire.AppendPing(nil, wire.Ping, uint64(100+i)))
		if f := p.next(t, wire.Ping); f.Type != wire.Pong || wire.PingToken(f.Body) != uint64(100+i) {
			t.Errorf("lane %d: got %s %x, want a pong with token %d", i, f.Type, f.Body, 100+i)
		}
		p.send(t, wire.AppendPing(nil, wire.Pong, 1)) // answers nothing: ignored
	}
	if rtt := c.Snapshot().RTT; rtt != 0 {
		t.Errorf("RTT of %s from an answer to nothing", rtt)
	}
	r.stop(nil)
	_ = r.wait(t) // canceled, as asked
}

func TestLostConnection(t *testing.T) {
	r, peers, _, _ := alone(t, nil)
	peers[1].send(t, []byte{0, 0, 1}) // cut in a header
	if err := peers[1].Close(); err != nil {
		t.Fatal(err)
	}
	var lost *LaneError
	if err := r.wait(t); !errors.As(err, &lost) || lost.Lane != 1 {
		t.Errorf("got %v, want a LaneError on lane 1", err)
	}
}

func TestQueueGone(t *testing.T) {
	r, peers, kernel, _ := alone(t, nil)
	if err := kernel.Close(); err != nil {
		t.Fatal(err)
	}
	var gone *QueueError
	if err := r.wait(t); !errors.As(err, &gone) {
		t.Errorf("got %v, want a QueueError", err)
	}
	peers[0].expectClose(t, wire.LocalFault)
}

func TestSpoofedIsDropped(t *testing.T) {
	r, peers, kernel, c := alone(t, func(c *Config, _ []Lane) { c.AllowedSource = netip.MustParseAddr("172.30.0.2") })
	for i, src := range []byte{3, 2, 4, 2} {
		peers[0].send(t, wire.Append(nil, wire.Data, packet(100, src, uint32(i))))
	}
	peers[0].send(t, wire.Append(nil, wire.Data, packet(1401, 2, 4)))
	peers[0].send(t, wire.Append(nil, wire.Data, packet(100, 2, 5)))
	for _, number := range []uint32{1, 3, 5} {
		if got := get(t, kernel, true); !bytes.Equal(got, packet(100, 2, number)) {
			t.Errorf("delivered %x, want packet %d", got, number)
		}
	}
	r.stop(nil)
	_ = r.wait(t) // canceled, as asked
	if s := c.Snapshot(); s.Drops["source_address"] != 2 || s.Drops["mtu"] != 1 || s.RxPackets != 3 || s.RxBytes != 300 {
		t.Errorf("counters %+v, want 2 drops by source address, 1 by mtu, 3 packets", s)
	}
}

func TestSealedRefusesWhatItDidNotSeal(t *testing.T) {
	// What an honest peer sends as its first two batches.
	key := func() Lane { return Lane{Seal: newAEAD(t, 1), Open: newAEAD(t, 2)} }
	seal := func(n uint64, frames []byte) []byte {
		b := make([]byte, wire.HeaderBytes, 2000)
		wire.PutHeader(b, wire.Sealed, len(frames)+wire.SealOverheadBytes)
		nonce := nonceOf(n)
		return newAEAD(t, 2).Seal(b, nonce[:], frames, b)
	}
	ping := wire.AppendPing(nil, wire.Ping, 1)
	flipped := seal(0, ping)
	flipped[len(flipped)-1] ^= 1
	longer := seal(0, append(bytes.Clone(ping), 1, 2, 3))
	for _, tt := range []struct {
		name   string
		in     []byte
		unseal bool // want ErrUnsealed, else another protocol error
	}{
		{"plain frame", ping, false},
		{"altered", flipped, true},
		{"reordered", seal(1, ping), true},
		{"repeated", append(seal(0, ping), seal(0, ping)...), true},
		{"sealed within sealed", seal(0, seal(0, ping)), false},
		{"cut frame inside", longer, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, peers, _, _ := alone(t, func(_ *Config, l []Lane) {
				for i := range l {
					k := key()
					l[i].Seal, l[i].Open = k.Seal, k.Open
				}
			})
			peers[0].send(t, tt.in)
			var protocol *ProtocolError
			if err := r.wait(t); !errors.As(err, &protocol) || errors.Is(err, ErrUnsealed) != tt.unseal {
				t.Errorf("got %v, want a ProtocolError, ErrUnsealed %t", err, tt.unseal)
			}
		})
	}
}

// TestRestart ends sessions in every way and begins the next on the same queue.
func TestRestart(t *testing.T) {
	before := runtime.NumGoroutine()
	q, kernel := newTun(t, true)
	cfg := config()
	var last Snapshot
	for i := range 60 {
		a, b := stream(t)
		p := &peer{Conn: b}
		r := start(t, cfg, []device{q}, []Lane{{Conn: a}})
		put(t, kernel, true, packet(100, 2, uint32(i)))
		p.send(t, wire.Append(nil, wire.Data, packet(200, 2, uint32(i))))
		if f := p.next(t, wire.Ping); f.Type != wire.DataVnet || !bytes.Equal(f.Body[wire.VnetHeaderBytes:], packet(100, 2, uint32(i))) {
			t.Fatalf("session %d: got %s of %d bytes", i, f.Type, f.Bytes)
		}
		if got := get(t, kernel, true); !bytes.Equal(got, packet(200, 2, uint32(i))) {
			t.Fatalf("session %d: delivered %x", i, got)
		}
		switch i % 4 {
		case 0:
			r.stop(nil)
		case 1:
			p.send(t, wire.AppendClose(nil, wire.Displaced, ""))
		case 2:
			p.send(t, make([]byte, 100))
		}
		if i%4 != 0 {
			p.Close()
		}
		if err := r.wait(t); err == nil {
			t.Fatalf("session %d ended without a cause", i)
		}
		p.Close()
		s := cfg.Counters.Snapshot()
		if s.Sessions != uint64(i+1) || s.RxPackets != last.RxPackets+1 || s.TxPackets != last.TxPackets+1 || s.RxBytes != last.RxBytes+200 || s.TxBytes != last.TxBytes+100 {
			t.Fatalf("session %d: counters went from %+v to %+v", i, last, s)
		}
		last = s
	}
	if last.Reconnects != 59 {
		t.Errorf("%d reconnects, want 59", last.Reconnects)
	}
	netlab.Eventually(t, limit, func() error {
		if n := runtime.NumGoroutine(); n > before+2 {
			buf := make([]byte, 1<<16)
			return fmt.Errorf("%d goroutines, %d before:\n%s", n, before, buf[:runtime.Stack(buf, true)])
		}
		return nil
	})
}

func TestInvalidConfigurationClosesTheLanes(t *testing.T) {
	q, _ := newTun(t, true)
	chunky, err := newChunky()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		edit func(*Config, *Lane)
		want string
	}{
		{"no MTU", func(c *Config, _ *Lane) { c.MTUBytes = 0 }, "mtu"},
		{"small window", func(c *Config, _ *Lane) { c.Grant = []wire.Window{{Bytes: 4096, Messages: 64}} }, "window"},
		{"windows for two lanes", func(c *Config, _ *Lane) { c.Granted = []wire.Window{wire.BulkWindow, wire.BulkWindow} }, "windows"},
		{"half sealed", func(_ *Config, l *Lane) { l.Seal = newAEAD(t, 1) }, "sealed"},
		{"other cipher", func(_ *Config, l *Lane) { l.Seal, l.Open = chunky, chunky }, "nonce"},
		{"dead at once", func(c *Config, _ *Lane) { c.DeadAfter = time.Millisecond }, "dead after"},
	} {
		a, b := stream(t)
		cfg, lane := config(), Lane{Conn: a}
		tt.edit(&cfg, &lane)
		err := run(context.Background(), cfg, []device{q}, []Lane{lane})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want an error about %q", tt.name, err, tt.want)
		}
		if err := a.Close(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s: the connection was left open", tt.name)
		}
		b.Close()
	}
	if err := run(context.Background(), config(), []device{q}, nil); err == nil {
		t.Error("no lanes: got no error")
	}
}

// TestQueuesAndLanesDiffer has two queues on each side share one lane, and one
// queue on one side face two lanes.
func TestQueuesAndLanesDiffer(t *testing.T) {
	for _, tt := range []struct {
		lanes  int
		queues [2]int
	}{{1, [2]int{2, 2}}, {2, [2]int{1, 2}}} {
		var (
			queues  [2][]device
			kernels [2][]*os.File
			ends    [2][]Lane
			cfgs    = [2]Config{config(), config()}
		)
		for range tt.lanes {
			a, b := stream(t)
			ends[0], ends[1] = append(ends[0], Lane{Conn: a}), append(ends[1], Lane{Conn: b})
		}
		for side := range 2 {
			// Little credit, so that both queues often find none.
			w := wire.Window{Bytes: wire.MinWindowBytes, Messages: wire.MinWindowMessages}
			cfgs[side].Grant = []wire.Window{w, w}[:tt.lanes]
			cfgs[side].Granted = cfgs[side].Grant
			for range tt.queues[side] {
				q, k := newTun(t, true)
				queues[side], kernels[side] = append(queues[side], q), append(kernels[side], k)
			}
		}
		runs := [2]*running{start(t, cfgs[0], queues[0], ends[0]), start(t, cfgs[1], queues[1], ends[1])}
		const packets = 1000
		for side, from := range kernels {
			for _, k := range from {
				go func() {
					for i := range uint32(packets) {
						p := append(wire.VnetHeader{}.Append(nil), packet(100, byte(2+side), i)...)
						if _, err := k.Write(p); err != nil {
							return // the other end says what is missing
						}
					}
				}()
			}
		}
		done := make(chan error, 4)
		for side, to := range kernels {
			for i, k := range to {
				// All that the far side sends by the lanes that end in this queue.
				want := packets * tt.queues[1-side]
				if last := len(to) - 1; tt.lanes > 1 && len(to) > 1 {
					want = packets
					if tt.queues[1-side] == 1 && i == last {
						want = 0
					}
				} else if tt.lanes == 1 && i > 0 {
					want = 0
				}
				go func() {
					b := make([]byte, 2000)
					for range want {
						if _, err := k.Read(b); err != nil {
							done <- err
							return
						}
					}
					done <- nil
				}()
			}
		}
		for range tt.queues[0] + tt.queues[1] {
			if err := <-done; err != nil {
				t.Errorf("%d lanes, queues %v: %v", tt.lanes, tt.queues, err)
			}
		}
		runs[0].stop(nil)
		for _, r := range runs {
			_ = r.wait(t) // canceled, or told so
		}
	}
}
