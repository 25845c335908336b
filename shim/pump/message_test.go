package pump

import (
	"bytes"
	"errors"
	"testing"
	"time"

	wire "mknet/spec/pump"
	"mknet/tests/netlab"
)

// TestMessageTransport runs over a fake of the multikernel transport: messages of
// 4 KiB, 64 slots, no flow control, and a receiver that is slower than the
// sender. With the window for such a ring the pump never finds it full; with a
// larger one it finds it full, waits and loses nothing either.
func TestMessageTransport(t *testing.T) {
	const messageBytes, slots, packets = 4096, 64, 2000
	for _, tt := range []struct {
		name   string
		window wire.Window
		full   bool // whether the ring may be found full
	}{
		{"window for the ring", wire.RingWindow(slots, messageBytes), false},
		{"default window", wire.BulkWindow, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newRingConns(slots)
			b.pace = 200 * time.Microsecond
			cfgs := [2]Config{config(), config()}
			for i := range cfgs {
				cfgs[i].MaxMessageBytes = messageBytes
				cfgs[i].MTUBytes = 65000
				cfgs[i].Grant, cfgs[i].Granted = []wire.Window{tt.window}, []wire.Window{tt.window}
			}
			q0, k0 := newTun(t, false)
			q1, k1 := newTun(t, false)
			r0 := start(t, cfgs[0], []device{q0}, []Lane{{Conn: a}})
			r1 := start(t, cfgs[1], []device{q1}, []Lane{{Conn: b}})
			size := func(i uint32) int {
				if i%50 == 49 {
					return 30000
				}
				return 24 + int(i*97)%1400
			}
			sent := make(chan error, 1)
			go func() {
				for i := range uint32(packets) {
					if _, err := k0.Write(packet(size(i), 2, i)); err != nil {
						sent <- err
						return
					}
				}
				sent <- nil
			}()
			for i := range uint32(packets) {
				if got, want := get(t, k1, false), packet(size(i), 2, i); !bytes.Equal(got, want) {
					t.Fatalf("packet %d of %d bytes: got %d bytes, differs", i, len(want), len(got))
				}
			}
			if err := <-sent; err != nil {
				t.Fatal(err)
			}
			r0.stop(nil)
			_ = r0.wait(t) // canceled, as asked
			var closed *PeerClosedError
			if err := r1.wait(t); !errors.As(err, &closed) || closed.Reason != wire.Shutdown {
				t.Errorf("other side: got %v, want a shutdown", err)
			}
			for i, r := range []*ring{a.in, a.out} {
				if r.longest > messageBytes {
					t.Errorf("ring %d: message of %d bytes, want at most %d", i, r.longest, messageBytes)
				}
				if r.full > 0 && !tt.full {
					t.Errorf("ring %d: found full %d times, want never (most %d of %d)", i, r.full, r.most, slots)
				}
			}
			s := cfgs[0].Counters.Snapshot()
			if tt.full && (a.out.full == 0 || s.TransportRetries != uint64(a.out.full)) {
				t.Errorf("ring found full %d times, %d retries are counted", a.out.full, s.TransportRetries)
			}
			// Bounded back-off: far fewer attempts than a spin makes.
			if a.out.full > packets {
				t.Errorf("%d attempts on a full ring for %d packets", a.out.full, packets)
			}
			t.Logf("most slots used %d and %d, found full %d times", a.out.most, a.in.most, a.out.full)
		})
	}
}

// TestMessageTransportStuck ends the session when the ring never empties.
func TestMessageTransportStuck(t *testing.T) {
	a, _ := newRingConns(2)
	cfg := config()
	cfg.MaxMessageBytes, cfg.DeadAfter = 4096, 300*time.Millisecond
	q, kernel := newTun(t, false)
	r := start(t, cfg, []device{q}, []Lane{{Conn: a}})
	for i := range uint32(20) {
		put(t, kernel, false, packet(1000, 2, i))
	}
	var lost *LaneError
	var dead *DeadPeerError
	if err := r.wait(t); !errors.As(err, &lost) && !errors.As(err, &dead) {
		t.Errorf("got %v, want a LaneError or DeadPeerError", err)
	}
	netlab.Eventually(t, limit, func() error {
		a.out.mu.Lock()
		defer a.out.mu.Unlock()
		if !a.out.closed {
			return errors.New("the connection is open")
		}
		return nil
	})
}
