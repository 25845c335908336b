package pump

import (
	"errors"
	"math/rand/v2"
	"testing"
)

func TestCreditKeepsBothEndsInStep(t *testing.T) {
	// Any window, any sizes: the sender always gets to send the next largest frame
	// once the receiver has told what is due, and never goes beyond the window.
	rng := rand.New(rand.NewPCG(1, 2))
	for _, w := range []Window{BulkWindow, LatencyWindow, {MinWindowBytes, MinWindowMessages}, {MinWindowBytes + 1, 4096}, {MaxWindowBytes, MinWindowMessages}} {
		s, r := NewSender(w), NewReceiver(1, w)
		for range 20000 {
			n := HeaderBytes + 20 + rng.IntN(MaxFrameBytes-HeaderBytes-20+1)
			if bytes, messages := s.Room(); bytes < MaxFrameBytes || messages < 1 {
				t.Fatalf("window %+v: room for %d bytes and %d messages, though the receiver has nothing to tell", w, bytes, messages)
			}
			s.Spend(n, 1)
			if err := r.Receive(n); err != nil {
				t.Fatalf("window %+v: honest sender: %v", w, err)
			}
			if c, due := r.Due(); due {
				if err := s.Update(c); err != nil {
					t.Fatalf("window %+v: honest receiver: %v", w, err)
				}
			}
		}
	}
}

func TestCreditBroken(t *testing.T) {
	s := NewSender(LatencyWindow)
	s.Spend(1000, 2)
	if err := s.Update(Credit{Bytes: 600, Frames: 1}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []Credit{{Bytes: 1001, Frames: 2}, {Bytes: 1000, Frames: 3}, {Bytes: 599, Frames: 1}, {Bytes: 600, Frames: 0}, {Bytes: ^uint64(0), Frames: ^uint64(0)}} {
		var broken *CreditError
		if err := s.Update(c); !errors.As(err, &broken) {
			t.Errorf("report %+v after 1000 bytes and 2 frames: got %v, want a CreditError", c, err)
		}
	}
	if bytes, messages := s.Room(); bytes != int(LatencyWindow.Bytes)-400 || messages != int(LatencyWindow.Messages)-1 {
		t.Errorf("refused reports changed the account: room %d and %d", bytes, messages)
	}

	for _, w := range []Window{{Bytes: 1000, Messages: 100}, {Bytes: 1 << 20, Messages: 10}} {
		r := NewReceiver(0, w)
		var err error
		for n := 0; n < 10; n++ {
			err = errors.Join(err, r.Receive(100))
		}
		if err != nil {
			t.Errorf("window %+v, 10 frames of 100 bytes: %v", w, err)
		}
		var broken *CreditError
		if err := r.Receive(1); !errors.As(err, &broken) {
			t.Errorf("window %+v, one more: got %v, want a CreditError", w, err)
		}
	}
}

func TestWindows(t *testing.T) {
	for _, w := range []Window{BulkWindow, LatencyWindow, {MinWindowBytes, MinWindowMessages}, {MaxWindowBytes, MaxWindowMessages}} {
		if err := w.Validate(); err != nil {
			t.Errorf("%+v: %v", w, err)
		}
	}
	for _, w := range []Window{{}, {MinWindowBytes - 1, 100}, {1 << 20, MinWindowMessages - 1}, {MaxWindowBytes + 1, 100}, {1 << 20, MaxWindowMessages + 1}} {
		if w.Validate() == nil {
			t.Errorf("%+v: got no error", w)
		}
	}
	for _, tt := range []struct{ slots, bytes int }{{64, 4096}, {64, 16384}, {256, 4096}, {16, 4096}, {1, 1}} {
		w := RingWindow(tt.slots, tt.bytes)
		if err := w.Validate(); err != nil {
			t.Errorf("RingWindow(%d, %d): %v", tt.slots, tt.bytes, err)
		}
		underWay := (int(w.Bytes)+tt.bytes-1)/tt.bytes + int(w.Messages)
		if w.Messages > MinWindowMessages && underWay > tt.slots {
			t.Errorf("RingWindow(%d, %d) = %+v: %d messages under way", tt.slots, tt.bytes, w, underWay)
		}
	}
}
