package transport

import "mknet/spec/pump"

// Limits of the multikernel transport: one message carries at most about 4 KiB,
// and its ring between two kernels has 64 places that all connections share. It
// has no flow control of its own, so the windows have to fit the ring.
const (
	multikernelMessageBytes = 4000
	multikernelSlots        = 64
)

// MessageBytes bounds one write to a connection; 0 for a stream.
func MessageBytes(multikernel bool) int {
	if multikernel {
		return multikernelMessageBytes
	}
	return 0
}

// Lanes is how many lanes a session has of those that both kernels can steer to.
// By the multikernel transport it is one: two would share its ring, and half of it
// leaves room for 4 messages beside two largest frames.
func Lanes(able int, multikernel bool) int {
	if multikernel {
		return 1
	}
	return min(able, pump.MaxLanes)
}

// Windows are what one end grants the other, one a lane. lanes is what Lanes
// allows.
func Windows(lanes int, multikernel bool) []pump.Window {
	if multikernel {
		return []pump.Window{pump.RingWindow(multikernelSlots, multikernelMessageBytes)}
	}
	return append([]pump.Window(nil), []pump.Window{pump.BulkWindow, pump.LatencyWindow}[:lanes]...)
}
