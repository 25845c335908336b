package pump

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"mknet/spec/endpoint"
)

// The protocol versions that this code speaks, both ends included.
const (
	MinVersion = 1
	MaxVersion = 1
)

// Limits of a hello on the wire.
const (
	helloHeaderBytes = 10 // magic, body length, version range
	helloFixedBytes  = 1 + 1 + 1 + 16 + 1 + 1
	// MaxHelloBodyBytes bounds what follows the header. Version 1 needs at most
	// 277; the rest is room for a later version, whose hello must still be read
	// far enough to name the mismatch.
	MaxHelloBodyBytes = 512
	// MaxHelloBytes is the largest hello, header included.
	MaxHelloBytes = helloHeaderBytes + MaxHelloBodyBytes
)

// helloMagic begins every connection of this protocol: "MKNP".
const helloMagic uint32 = 0x4d4b4e50

// Role says which end wrote a hello.
type Role uint8

// The two ends.
const (
	RoleShim  Role = 1 // dials, in the primary
	RoleAgent Role = 2 // listens, in the child
)

func (r Role) String() string {
	switch r {
	case RoleShim:
		return "shim"
	case RoleAgent:
		return "agent"
	}
	return fmt.Sprintf("role %d", uint8(r))
}

// The lanes of one session; each is a connection of its own.
const (
	LaneBulk    = 0 // everything when there is only one, else bulk TCP and UDP
	LaneLatency = 1 // everything else, and the control frames
	MaxLanes    = 2
)

// HelloFlags are the bits of a hello that ask for something.
type HelloFlags uint8

// FlagSingleUse is set by an agent whose token came by a way that others can
// read (the kernel command line): the shim must send the next one with the link
// configuration.
const FlagSingleUse HelloFlags = 1 << 0

const knownFlags = FlagSingleUse

// Hello is what each end says in the clear before the handshake. Both raw hellos
// are the handshake's prologue, so that a changed byte fails it.
type Hello struct {
	MinVersion, MaxVersion uint16
	Role                   Role
	Lane                   uint8
	Flags                  HelloFlags
	// Endpoint is the endpoint generation; an agent that was not told it sends
	// zero, which matches every one.
	Endpoint endpoint.Generation
	Sandbox  endpoint.Sandbox
}

// ErrMalformedHello is returned for bytes that are not a hello of this
// protocol. The peer is something else, or broken: end the connection.
var ErrMalformedHello = errors.New("malformed hello")

func malformedHello(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformedHello, fmt.Sprintf(format, args...))
}

// Append appends the hello in wire form: all integers big endian,
//
//	u32 magic  u16 body length  u16 min version  u16 max version
//	body: u8 role  u8 lane  u8 flags  [16]endpoint generation
//	      u8 n [n]sandbox ID  u8 n [n]sandbox generation
//
// The header never changes between versions. It fails where Validate does.
func (h Hello) Append(b []byte) ([]byte, error) {
	if err := h.Validate(); err != nil {
		return nil, err
	}
	body := helloFixedBytes + len(h.Sandbox.ID) + len(h.Sandbox.Generation)
	b = binary.BigEndian.AppendUint32(b, helloMagic)
	b = binary.BigEndian.AppendUint16(b, uint16(body))
	b = binary.BigEndian.AppendUint16(b, h.MinVersion)
	b = binary.BigEndian.AppendUint16(b, h.MaxVersion)
	b = append(b, byte(h.Role), h.Lane, byte(h.Flags))
	b = append(b, h.Endpoint[:]...)
	b = append(b, byte(len(h.Sandbox.ID)))
	b = append(b, h.Sandbox.ID...)
	b = append(b, byte(len(h.Sandbox.Generation)))
	return append(b, h.Sandbox.Generation...), nil
}

// Validate checks every field of a version 1 hello.
func (h Hello) Validate() error {
	switch {
	case h.MinVersion == 0 || h.MinVersion > h.MaxVersion:
		return malformedHello("version range %d to %d", h.MinVersion, h.MaxVersion)
	case h.Role != RoleShim && h.Role != RoleAgent:
		return malformedHello("%v", h.Role)
	case h.Lane >= MaxLanes:
		return malformedHello("lane %d, at most %d exist", h.Lane, MaxLanes)
	case h.Flags&^knownFlags != 0:
		return malformedHello("unknown flags %#x", uint8(h.Flags&^knownFlags))
	case h.Role == RoleShim && h.Flags != 0:
		return malformedHello("flags %#x from a shim", uint8(h.Flags))
	case h.Role == RoleShim && h.Endpoint.IsZero():
		return malformedHello("no endpoint generation from a shim")
	}
	if err := h.Sandbox.Validate(); err != nil {
		return malformedHello("%v", err)
	}
	return nil
}

// ParseHello reads one hello that fills raw. For a version range that this code
// does not speak it returns a *MismatchError of field Version without looking
// further; everything else that is wrong is ErrMalformedHello.
func ParseHello(raw []byte) (Hello, error) {
	if len(raw) < helloHeaderBytes {
		return Hello{}, malformedHello("%d bytes, the header has %d", len(raw), helloHeaderBytes)
	}
	n, err := helloBody(raw[:helloHeaderBytes])
	if err != nil {
		return Hello{}, err
	}
	body := raw[helloHeaderBytes:]
	if len(body) != n {
		return Hello{}, malformedHello("body of %d bytes, announced %d", len(body), n)
	}
	h := Hello{MinVersion: binary.BigEndian.Uint16(raw[6:]), MaxVersion: binary.BigEndian.Uint16(raw[8:])}
	if h.MinVersion == 0 || h.MinVersion > h.MaxVersion {
		return Hello{}, malformedHello("version range %d to %d", h.MinVersion, h.MaxVersion)
	}
	if h.MinVersion > MaxVersion || h.MaxVersion < MinVersion {
		return h, &MismatchError{Field: Version, Ours: versionRange(MinVersion, MaxVersion), Theirs: versionRange(h.MinVersion, h.MaxVersion)}
	}
	if len(body) < helloFixedBytes {
		return Hello{}, malformedHello("body of %d bytes, at least %d are needed", len(body), helloFixedBytes)
	}
	h.Role, h.Lane, h.Flags = Role(body[0]), body[1], HelloFlags(body[2])
	copy(h.Endpoint[:], body[3:19])
	rest := body[19:]
	if h.Sandbox.ID, rest, err = helloString(rest); err != nil {
		return Hello{}, err
	}
	if h.Sandbox.Generation, rest, err = helloString(rest); err != nil {
		return Hello{}, err
	}
	if len(rest) != 0 {
		return Hello{}, malformedHello("%d bytes after the last field", len(rest))
	}
	if err := h.Validate(); err != nil {
		return Hello{}, err
	}
	return h, nil
}

func helloBody(header []byte) (int, error) {
	if m := binary.BigEndian.Uint32(header); m != helloMagic {
		return 0, malformedHello("begins with %#08x, not with %#08x", m, helloMagic)
	}
	n := int(binary.BigEndian.Uint16(header[4:]))
	if n > MaxHelloBodyBytes {
		return 0, malformedHello("body of %d bytes, at most %d are allowed", n, MaxHelloBodyBytes)
	}
	return n, nil
}

func helloString(b []byte) (string, []byte, error) {
	if len(b) == 0 {
		return "", nil, malformedHello("ends before a field")
	}
	n := int(b[0])
	if len(b) < 1+n {
		return "", nil, malformedHello("ends %d bytes inside a field of %d", len(b)-1, n)
	}
	return string(b[1 : 1+n]), b[1+n:], nil
}

// ReadHello reads one hello and returns it with its raw bytes, which the
// prologue needs. It reads no byte beyond it and at most MaxHelloBytes. A
// *MismatchError leaves raw set. Reader errors are returned as they are.
func ReadHello(r io.Reader) (h Hello, raw []byte, err error) {
	var header [helloHeaderBytes]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return Hello{}, nil, err
	}
	n, err := helloBody(header[:])
	if err != nil {
		return Hello{}, nil, err
	}
	raw = append(make([]byte, 0, helloHeaderBytes+n), header[:]...)[:helloHeaderBytes+n]
	if _, err := io.ReadFull(r, raw[helloHeaderBytes:]); err != nil {
		return Hello{}, nil, err
	}
	h, err = ParseHello(raw)
	return h, raw, err
}

func versionRange(lo, hi uint16) string {
	if lo == hi {
		return fmt.Sprint(lo)
	}
	return fmt.Sprintf("%d to %d", lo, hi)
}
