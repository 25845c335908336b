package pump

import (
	"encoding/binary"
	"fmt"
)

// A frame is
//
//	offset 0  u32  length, big endian: bytes that follow this field, at least 1
//	offset 4  u8   type
//	offset 5       body, length-1 bytes
//
// Sizes of frames, in bytes.
const (
	HeaderBytes    = 5     // length and type
	MaxPacketBytes = 65535 // an IPv4 packet's total length is 16 bits (RFC 791)

	// MaxFrameBytes is the largest frame that carries a packet, header included.
	MaxFrameBytes = HeaderBytes + VnetHeaderBytes + MaxPacketBytes

	// BatchBytes is where a sender stops to collect frames for one write; the last
	// frame of a batch may go beyond it. Measured: a larger batch gains nothing.
	BatchBytes = 256 << 10
	// MaxBatchBytes is the largest batch, the plain text of one Sealed frame.
	MaxBatchBytes = BatchBytes + MaxFrameBytes

	// SealOverheadBytes is the tag of AES-GCM (SP 800-38D) and of
	// ChaCha20-Poly1305 (RFC 8439).
	SealOverheadBytes = 16
	// MaxSealedBytes is the largest Sealed frame, header included.
	MaxSealedBytes = HeaderBytes + MaxBatchBytes + SealOverheadBytes

	// MaxCloseTextBytes bounds the explanation in a Close frame.
	MaxCloseTextBytes = 256
)

// Type says what a frame's body is.
type Type uint8

// Types of frames. Data, DataVnet and nothing else need credit.
const (
	Data     Type = 1 // an IP packet
	DataVnet Type = 2 // a virtio-net header (10 bytes, native endian), then an IP packet
	Credits  Type = 3 // see Credit
	Ping     Type = 4 // u64 token, opaque to the receiver
	Pong     Type = 5 // the token of the ping it answers
	Close    Type = 6 // u16 reason, then at most 256 bytes of text: the last frame of a connection
	Sealed   Type = 7 // whole frames of the other types, encrypted as one; all frames of a sealed session
)

// body bounds the body of each type, in bytes. A type that is not here is
// refused: a version that adds one says so in its hello.
var body = [...]struct{ min, max int }{
	Data:     {0, MaxPacketBytes},
	DataVnet: {VnetHeaderBytes, VnetHeaderBytes + MaxPacketBytes},
	Credits:  {creditBytes, creditBytes},
	Ping:     {8, 8},
	Pong:     {8, 8},
	Close:    {2, 2 + MaxCloseTextBytes},
	Sealed:   {HeaderBytes + SealOverheadBytes, MaxSealedBytes - HeaderBytes},
}

func (t Type) String() string {
	names := [...]string{"", "data", "data-vnet", "credit", "ping", "pong", "close", "sealed"}
	if t == 0 || int(t) >= len(names) {
		return fmt.Sprintf("type %d", uint8(t))
	}
	return names[t]
}

// FrameError is returned for bytes that are no frame. The stream cannot be
// trusted any more: the session ends, nothing is skipped.
type FrameError struct {
	Type        Type   // as sent, may be unknown
	LengthBytes uint32 // the length field, as sent
	Problem     string
}

func (e *FrameError) Error() string {
	return fmt.Sprintf("malformed frame (%s, length %d): %s", e.Type, e.LengthBytes, e.Problem)
}

// Frame is one frame in the buffer it was read into.
type Frame struct {
	Type  Type
	Body  []byte // points into the buffer
	Bytes int    // size of the whole frame, header included
}

// Next returns the first frame of b. Where b holds only a part of it, Next
// returns a zero Frame and no error, so that the caller reads more; the header is
// checked as soon as it is there, so a caller that offers room for MaxFrameBytes
// (MaxSealedBytes in a sealed session) always makes progress. Sealed frames are
// accepted only when sealed is set, and then nothing else is. The error is a
// *FrameError.
func Next(b []byte, sealed bool) (Frame, error) {
	if len(b) < HeaderBytes {
		// The length alone already tells a stream that is out of step.
		if len(b) >= 4 {
			if n := binary.BigEndian.Uint32(b); n == 0 || n > MaxSealedBytes-4 {
				return Frame{}, &FrameError{LengthBytes: n, Problem: "length out of range"}
			}
		}
		return Frame{}, nil
	}
	length, t := binary.BigEndian.Uint32(b), Type(b[4])
	switch {
	case length == 0 || length > MaxSealedBytes-4:
		return Frame{}, &FrameError{t, length, "length out of range"}
	case t == 0 || int(t) >= len(body):
		return Frame{}, &FrameError{t, length, "unknown type"}
	case sealed != (t == Sealed):
		return Frame{}, &FrameError{t, length, "plain frame in a sealed session or sealed frame in a plain one"}
	}
	n := int(length) - 1
	if n < body[t].min || n > body[t].max {
		return Frame{}, &FrameError{t, length, fmt.Sprintf("body must have %d to %d bytes", body[t].min, body[t].max)}
	}
	if len(b) < HeaderBytes+n {
		return Frame{}, nil
	}
	return Frame{Type: t, Body: b[HeaderBytes : HeaderBytes+n], Bytes: HeaderBytes + n}, nil
}

// PutHeader writes the header of a frame whose body has bodyBytes bytes to
// b[:HeaderBytes].
func PutHeader(b []byte, t Type, bodyBytes int) {
	_ = b[HeaderBytes-1]
	binary.BigEndian.PutUint32(b, uint32(bodyBytes)+1)
	b[4] = byte(t)
}

// Append adds a frame with the given body to b.
func Append(b []byte, t Type, body []byte) []byte {
	var h [HeaderBytes]byte
	PutHeader(h[:], t, len(body))
	return append(append(b, h[:]...), body...)
}

// AppendPing adds a Ping or Pong frame to b.
func AppendPing(b []byte, t Type, token uint64) []byte {
	return Append(b, t, binary.BigEndian.AppendUint64(nil, token))
}

// PingToken reads the body of a Ping or Pong frame; Next has checked its size.
func PingToken(body []byte) uint64 { return binary.BigEndian.Uint64(body) }
