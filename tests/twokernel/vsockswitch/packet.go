package vsockswitch

import (
	"encoding/binary"
	"fmt"
)

// Operations, virtio 1.2 section 5.10.6.
const (
	opRequest       = 1
	opResponse      = 2
	opReset         = 3
	opShutdown      = 4
	opData          = 5
	opCreditUpdate  = 6
	opCreditRequest = 7
)

// Flags of opShutdown: what the sender will not do any more.
const (
	shutdownReceive = 1
	shutdownSend    = 2
	shutdownBoth    = shutdownReceive | shutdownSend
)

const (
	typeStream = 1
	// hostCID is the address that every guest knows its host by.
	hostCID = 2
	// headerBytes is the size of struct virtio_vsock_hdr.
	headerBytes = 44
	// maxPayload is the largest payload of one packet, VIRTIO_VSOCK_MAX_PKT_BUF_SIZE
	// in include/linux/virtio_vsock.h.
	maxPayload = 64 << 10
)

// header is struct virtio_vsock_hdr, little-endian on the ring.
type header struct {
	srcCID, dstCID   uint64
	srcPort, dstPort uint32
	length           uint32 // bytes of payload that follow
	kind, op         uint16
	flags            uint32
	bufAlloc, fwdCnt uint32 // the sender's receive window: its size, and bytes taken out of it so far
}

// put writes the header into the first headerBytes of b.
func (h *header) put(b []byte) {
	le := binary.LittleEndian
	le.PutUint64(b, h.srcCID)
	le.PutUint64(b[8:], h.dstCID)
	le.PutUint32(b[16:], h.srcPort)
	le.PutUint32(b[20:], h.dstPort)
	le.PutUint32(b[24:], h.length)
	le.PutUint16(b[28:], h.kind)
	le.PutUint16(b[30:], h.op)
	le.PutUint32(b[32:], h.flags)
	le.PutUint32(b[36:], h.bufAlloc)
	le.PutUint32(b[40:], h.fwdCnt)
}

// parseHeader reads the first headerBytes of b.
func parseHeader(b []byte) header {
	le := binary.LittleEndian
	return header{
		srcCID: le.Uint64(b), dstCID: le.Uint64(b[8:]),
		srcPort: le.Uint32(b[16:]), dstPort: le.Uint32(b[20:]),
		length: le.Uint32(b[24:]), kind: le.Uint16(b[28:]), op: le.Uint16(b[30:]),
		flags: le.Uint32(b[32:]), bufAlloc: le.Uint32(b[36:]), fwdCnt: le.Uint32(b[40:]),
	}
}

// resetFor is the answer to a packet that nobody takes.
func (h *header) resetFor() header {
	return header{srcCID: h.dstCID, dstCID: h.srcCID, srcPort: h.dstPort, dstPort: h.srcPort, kind: h.kind, op: opReset}
}

// gather splits the readable buffers of a chain into header and payload. The
// payload lies in the guest's memory where one buffer holds it, else in scratch,
// which must have room for maxPayload.
func gather(buffers [][]byte, scratch []byte) (header, []byte, error) {
	var raw [headerBytes]byte
	have := 0
	for have < headerBytes {
		if len(buffers) == 0 {
			return header{}, nil, fmt.Errorf("packet of %d bytes is shorter than its header", have)
		}
		n := copy(raw[have:], buffers[0])
		have += n
		if buffers[0] = buffers[0][n:]; len(buffers[0]) == 0 {
			buffers = buffers[1:]
		}
	}
	h := parseHeader(raw[:])
	if h.length > maxPayload {
		return h, nil, fmt.Errorf("payload of %d bytes, the limit is %d", h.length, maxPayload)
	}
	want := int(h.length)
	if want == 0 {
		return h, nil, nil
	}
	if len(buffers) > 0 && len(buffers[0]) >= want {
		return h, buffers[0][:want], nil
	}
	got := 0
	for _, b := range buffers {
		got += copy(scratch[got:want], b)
	}
	if got < want {
		return h, nil, fmt.Errorf("packet announces %d bytes of payload and has %d", want, got)
	}
	return h, scratch[:want], nil
}

// scatter writes header and as much of the payload as fits into the writable
// buffers of a chain. It returns how much of the payload that is; the header's
// length says the same.
func scatter(buffers [][]byte, h header, payload []byte) (int, error) {
	room := -headerBytes
	for _, b := range buffers {
		room += len(b)
	}
	if room < 0 || (room == 0 && len(payload) > 0) {
		return 0, fmt.Errorf("receive buffer of %d bytes holds no packet", room+headerBytes)
	}
	payload = payload[:min(len(payload), room)]
	h.length = uint32(len(payload))
	var raw [headerBytes]byte
	h.put(raw[:])
	for _, part := range [][]byte{raw[:], payload} {
		for len(part) > 0 {
			n := copy(buffers[0], part)
			part = part[n:]
			if buffers[0] = buffers[0][n:]; len(buffers[0]) == 0 {
				buffers = buffers[1:]
			}
		}
	}
	return len(payload), nil
}
