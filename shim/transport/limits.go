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

// Windows are what one end grants the other, one a lane.
func Windows(lanes int, multikernel bool) []pump.Window {
	if multikernel {
		w := make([]pump.Window, lanes)
		for i := range w {
			w[i] = pump.RingWindow(multikernelSlots/lanes, multikernelMessageBytes)
		}
		return w
	}
	return append([]pump.Window(nil), []pump.Window{pump.BulkWindow, pump.LatencyWindow}[:lanes]...)
}
