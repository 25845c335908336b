package pump

import (
	"encoding/binary"
	"fmt"
)

// creditBytes is the body of a Credits frame: u8 lane, u64 bytes, u64 frames,
// both big endian and counted from the start of the session.
const creditBytes = 1 + 8 + 8

// Default windows: what may be under way on a lane, data frames with their
// headers that the receiver has not yet reported as consumed. A message is one
// data frame. Larger ones gain no throughput, but deliver more stale
// packets after a stall.
var (
	BulkWindow    = Window{Bytes: 1 << 20, Messages: 16384}
	LatencyWindow = Window{Bytes: 256 << 10, Messages: 4096}
)

// Bounds of a window. Two largest frames keep a sender from waiting with every
// frame for an answer.
const (
	MinWindowBytes    = 2 * MaxFrameBytes
	MinWindowMessages = 4
	MaxWindowBytes    = 64 << 20
	MaxWindowMessages = 1 << 20
)

// RingWindow is the window for a transport that queues at most slots messages of
// at most messageBytes each and has no flow control of its own. Every write
// carries at least one frame, so that messages under way are at most
// Bytes/messageBytes + Messages; one eighth of the slots stays free for control
// frames. Where two largest frames do not fit in the ring the smallest valid
// window is returned, and the sender must be ready to find the ring full.
func RingWindow(slots, messageBytes int) Window {
	full := (MinWindowBytes + messageBytes - 1) / messageBytes
	messages := slots - slots/8 - full
	return Window{Bytes: MinWindowBytes, Messages: uint32(max(messages, MinWindowMessages))}
}

// Validate checks a window that a peer or a configuration asks for.
func (w Window) Validate() error {
	if w.Bytes < MinWindowBytes || w.Bytes > MaxWindowBytes {
		return fmt.Errorf("credit window of %d bytes: must be from %d to %d", w.Bytes, MinWindowBytes, MaxWindowBytes)
	}
	if w.Messages < MinWindowMessages || w.Messages > MaxWindowMessages {
		return fmt.Errorf("credit window of %d messages: must be from %d to %d", w.Messages, MinWindowMessages, MaxWindowMessages)
	}
	return nil
}

// Credit reports what a receiver has consumed on a lane since the session began.
// Totals, not differences: a later report replaces one that still waits.
type Credit struct {
	Lane   uint8
	Bytes  uint64
	Frames uint64
}

// AppendCredit adds a Credits frame to b.
func AppendCredit(b []byte, c Credit) []byte {
	body := append(make([]byte, 0, creditBytes), c.Lane)
	body = binary.BigEndian.AppendUint64(body, c.Bytes)
	return Append(b, Credits, binary.BigEndian.AppendUint64(body, c.Frames))
}

// CreditOf reads the body of a Credits frame; Next has checked its size.
func CreditOf(body []byte) Credit {
	return Credit{Lane: body[0], Bytes: binary.BigEndian.Uint64(body[1:]), Frames: binary.BigEndian.Uint64(body[9:])}
}

// CreditError is returned when a peer breaks the rules of credit: it sent beyond
// its window, or reported more than it was sent, or less than before.
type CreditError struct{ Problem string }

func (e *CreditError) Error() string { return "credit broken by the peer: " + e.Problem }

// total counts data frames since the start of a session.
type total struct{ bytes, frames uint64 }

// Sender keeps the account of one lane at its sending end. Not for concurrent
// use.
type Sender struct {
	window         Window
	sent, consumed total
}

// NewSender starts an account with nothing sent.
func NewSender(w Window) *Sender { return &Sender{window: w} }

// Room is what may be sent now: bytes and messages.
func (s *Sender) Room() (bytes, messages int) {
	return int(uint64(s.window.Bytes) - (s.sent.bytes - s.consumed.bytes)),
		int(uint64(s.window.Messages) - (s.sent.frames - s.consumed.frames))
}

// Spend takes note of data frames that were sent. The caller stays within Room.
func (s *Sender) Spend(bytes, messages int) {
	s.sent.bytes += uint64(bytes)
	s.sent.frames += uint64(messages)
}

// Update takes in a report. The error is a *CreditError.
func (s *Sender) Update(c Credit) error {
	switch {
	case c.Bytes > s.sent.bytes || c.Frames > s.sent.frames:
		return &CreditError{fmt.Sprintf("lane %d: reports %d bytes and %d frames, was sent %d and %d", c.Lane, c.Bytes, c.Frames, s.sent.bytes, s.sent.frames)}
	case c.Bytes < s.consumed.bytes || c.Frames < s.consumed.frames:
		return &CreditError{fmt.Sprintf("lane %d: reports %d bytes and %d frames after %d and %d", c.Lane, c.Bytes, c.Frames, s.consumed.bytes, s.consumed.frames)}
	}
	s.consumed = total{c.Bytes, c.Frames}
	return nil
}

// Receiver keeps the account of one lane at its receiving end. Not for
// concurrent use.
type Receiver struct {
	lane      uint8
	window    Window
	got, told total
}

// NewReceiver starts an account with nothing received.
func NewReceiver(lane uint8, w Window) *Receiver { return &Receiver{lane: lane, window: w} }

// Receive takes note of one data frame of frameBytes bytes, header included. The
// error is a *CreditError: the peer sent more than it may.
func (r *Receiver) Receive(frameBytes int) error {
	r.got.bytes += uint64(frameBytes)
	r.got.frames++
	if bytes, frames := r.open(); bytes > uint64(r.window.Bytes) || frames > uint64(r.window.Messages) {
		return &CreditError{fmt.Sprintf("lane %d: %d bytes in %d messages under way, the window is %d and %d",
			r.lane, bytes, frames, r.window.Bytes, r.window.Messages)}
	}
	return nil
}

// open is what was received since the last report.
func (r *Receiver) open() (bytes, frames uint64) {
	return r.got.bytes - r.told.bytes, r.got.frames - r.told.frames
}

// Due returns the report to send once a quarter of the window is consumed. Less
// often starves a sender that needs room for a largest frame; more often costs
// writes.
func (r *Receiver) Due() (Credit, bool) {
	if bytes, frames := r.open(); bytes < uint64(r.window.Bytes)/4 && frames < uint64(r.window.Messages)/4 {
		return Credit{}, false
	}
	r.told = r.got
	return Credit{Lane: r.lane, Bytes: r.got.bytes, Frames: r.got.frames}, true
}
