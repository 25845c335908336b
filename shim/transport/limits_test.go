package transport

import (
	"testing"

	"mknet/spec/pump"
)

// What is granted must be what the data plane of the other end accepts, and on
// the multikernel transport it must fit its ring.
func TestWindows(t *testing.T) {
	for _, tt := range []struct {
		name        string
		able        int
		multikernel bool
		want        int
	}{
		{"stream, one queue", 1, false, 1},
		{"stream, two queues", 2, false, 2},
		{"stream, more queues than lanes", 4, false, 2},
		{"ring, one queue", 1, true, 1},
		{"ring, two queues", 2, true, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			lanes := Lanes(tt.able, tt.multikernel)
			if lanes != tt.want {
				t.Fatalf("%d lanes, want %d", lanes, tt.want)
			}
			windows := Windows(lanes, tt.multikernel)
			if len(windows) != lanes {
				t.Fatalf("%d windows for %d lanes", len(windows), lanes)
			}
			for i, w := range windows {
				if err := w.Validate(); err != nil {
					t.Errorf("lane %d: %v", i, err)
				}
			}
			if !tt.multikernel {
				return
			}
			w := windows[0]
			underWay := int(w.Bytes+multikernelMessageBytes-1)/multikernelMessageBytes + int(w.Messages)
			if underWay > multikernelSlots-multikernelSlots/8 || w.Messages <= 4*pump.MinWindowMessages {
				t.Errorf("window %+v: %d messages under way in a ring of %d", w, underWay, multikernelSlots)
			}
		})
	}
}
