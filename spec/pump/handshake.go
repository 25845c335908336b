package pump

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// MessageType is the kind of a handshake message.
type MessageType uint8

// The handshake messages, in the order in which they travel. See
// spec/pump-protocol.md.
const (
	MsgInit    MessageType = 1 // shim: Noise message 1, no payload
	MsgReply   MessageType = 2 // agent: Noise message 2, no payload
	MsgConfirm MessageType = 3 // shim: the handshake hash, sealed
	MsgConfig  MessageType = 4 // shim: LinkConfig, sealed (bulk lane only)
	MsgAck     MessageType = 5 // agent: Ack, sealed; on the latency lane the handshake hash
	MsgRefuse  MessageType = 6 // either: one Refusal byte in the clear, then the connection ends
)

// Sizes of handshake messages in bytes, without the 3-byte header.
const (
	tagBytes           = 16            // AES-GCM and Poly1305
	noiseMessageBytes  = 32 + tagBytes // X25519 key, tag of the empty payload
	confirmBytes       = 32 + tagBytes // SHA-256 handshake hash
	MaxLinkConfigBytes = 4096          // JSON
	MaxAckBytes        = 1024          // JSON
	messageHeaderBytes = 3             // u8 type, u16 length
	maxMessageBytes    = MaxLinkConfigBytes + tagBytes
)

// sizes bounds each type before a byte of the message is read.
var sizes = map[MessageType]struct{ min, max int }{
	MsgInit:    {noiseMessageBytes, noiseMessageBytes},
	MsgReply:   {noiseMessageBytes, noiseMessageBytes},
	MsgConfirm: {confirmBytes, confirmBytes},
	MsgConfig:  {tagBytes + 1, MaxLinkConfigBytes + tagBytes},
	MsgAck:     {tagBytes + 1, MaxAckBytes + tagBytes},
	MsgRefuse:  {1, 1},
}

// ErrMalformedMessage is returned for handshake bytes that this protocol does
// not have at that place. End the connection.
var ErrMalformedMessage = errors.New("malformed handshake message")

// Refusal is why the peer ends a handshake. It travels in the clear and is not
// authenticated: it may name a reason, never grant anything.
type Refusal uint8

// The refusals.
const (
	RefusedMismatch  Refusal = 1 // the hellos do not match; compare them
	RefusedAuth      Refusal = 2 // wrong token, or a changed byte
	RefusedMalformed Refusal = 3 // not this protocol
	RefusedNoSession Refusal = 4 // a latency lane without its session
	RefusedBusy      Refusal = 5 // too many handshakes at once; retry
	RefusedInternal  Refusal = 6 // the peer cannot serve now; retry
)

func (r Refusal) String() string {
	switch r {
	case RefusedMismatch:
		return "identity mismatch"
	case RefusedAuth:
		return "authentication failed"
	case RefusedMalformed:
		return "malformed handshake"
	case RefusedNoSession:
		return "no such session"
	case RefusedBusy:
		return "busy"
	case RefusedInternal:
		return "cannot serve now"
	}
	return fmt.Sprintf("refusal %d", uint8(r))
}

// RefusedError is returned by ReadMessage when the peer refused.
type RefusedError struct{ Reason Refusal }

func (e *RefusedError) Error() string { return "refused by the peer: " + e.Reason.String() }

// AppendMessage appends one handshake message: u8 type, u16 length, body. It
// panics on a length that the type does not have: the callers build the bodies.
func AppendMessage(b []byte, t MessageType, body []byte) []byte {
	if s, ok := sizes[t]; !ok || len(body) < s.min || len(body) > s.max {
		panic(fmt.Sprintf("handshake message %d of %d bytes", t, len(body)))
	}
	b = append(b, byte(t))
	b = binary.BigEndian.AppendUint16(b, uint16(len(body)))
	return append(b, body...)
}

// ReadMessage reads one handshake message of the wanted type. Any other type,
// and a length that the type does not have, is ErrMalformedMessage before the
// body is read; a MsgRefuse is a *RefusedError. Reader errors are returned as
// they are. It reads no byte beyond the message.
func ReadMessage(r io.Reader, want MessageType) ([]byte, error) {
	var header [messageHeaderBytes]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return nil, err
	}
	t, n := MessageType(header[0]), int(binary.BigEndian.Uint16(header[1:]))
	if t != want && t != MsgRefuse {
		return nil, fmt.Errorf("%w: type %d, want %d", ErrMalformedMessage, t, want)
	}
	if s, ok := sizes[t]; !ok || n < s.min || n > s.max {
		return nil, fmt.Errorf("%w: type %d with %d bytes", ErrMalformedMessage, t, n)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, err
	}
	if t == MsgRefuse && want != MsgRefuse {
		return nil, &RefusedError{Reason: Refusal(body[0])}
	}
	return body, nil
}
