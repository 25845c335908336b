package guest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// Offsets in the setup header of a bzImage, Documentation/arch/x86/boot.rst.
const (
	offSetupSectors  = 0x1f1 // u8: 512-byte sectors before the protected-mode part, less one
	offMagic         = 0x202 // "HdrS"
	offPayloadOffset = 0x248 // u32: of the compressed kernel in the protected-mode part
	offPayloadLength = 0x24c // u32: with the u32 of its unpacked size behind it
	setupHeaderEnd   = 0x250
)

// lz4Magic begins LZ4's legacy frame, as the kernel's build makes it.
const lz4Magic = 0x184c2102

// lz4Block is the most that one block of the legacy frame unpacks to.
const lz4Block = 8 << 20

// maxKernel bounds the unpacked kernel.
const maxKernel = 256 << 20

// unpackImage returns the ELF kernel inside a bzImage.
func unpackImage(b []byte) ([]byte, error) {
	if len(b) < setupHeaderEnd || string(b[offMagic:offMagic+4]) != "HdrS" {
		return nil, errors.New("is no bzImage")
	}
	start := (uint64(b[offSetupSectors])+1)*512 + uint64(binary.LittleEndian.Uint32(b[offPayloadOffset:]))
	length := uint64(binary.LittleEndian.Uint32(b[offPayloadLength:]))
	if length < 8 || start+length > uint64(len(b)) {
		return nil, errors.New("its payload lies outside of it")
	}
	payload := b[start : start+length]
	if binary.LittleEndian.Uint32(payload) != lz4Magic {
		return nil, fmt.Errorf("payload begins with %x: only LZ4 is understood", payload[:4])
	}
	size := binary.LittleEndian.Uint32(payload[length-4:])
	if size > maxKernel {
		return nil, fmt.Errorf("unpacks to %d bytes, the limit is %d", size, maxKernel)
	}
	image, err := unpackLZ4(payload[4:length-4], int(size))
	if err != nil {
		return nil, err
	}
	if len(image) != int(size) || !bytes.HasPrefix(image, []byte("\x7fELF")) {
		return nil, fmt.Errorf("unpacks to %d bytes, not to an ELF file of %d", len(image), size)
	}
	return image, nil
}

// unpackLZ4 unpacks the blocks of a legacy frame behind its magic number: each is
// a u32 length and that many bytes.
func unpackLZ4(b []byte, size int) ([]byte, error) {
	out := make([]byte, 0, size)
	for len(b) >= 4 {
		n := binary.LittleEndian.Uint32(b)
		if b = b[4:]; uint64(n) > uint64(len(b)) {
			return nil, fmt.Errorf("LZ4 block of %d bytes, %d are left", n, len(b))
		}
		before := len(out)
		var err error
		if out, err = appendLZ4(out, b[:n], min(size, before+lz4Block)); err != nil {
			return nil, err
		}
		b = b[n:]
	}
	return out, nil
}

var errLZ4 = errors.New("LZ4 block is damaged")

// appendLZ4 appends one unpacked block (lz4_Block_format.md) to out, which may
// grow to limit bytes. Matches reach back into this block only.
func appendLZ4(out, b []byte, limit int) ([]byte, error) {
	begin := len(out)
	for len(b) > 0 {
		token := b[0]
		b = b[1:]
		literals, rest, ok := lz4Length(int(token>>4), b)
		if !ok || literals > len(rest) || len(out)+literals > limit {
			return nil, errLZ4
		}
		out = append(out, rest[:literals]...)
		if b = rest[literals:]; len(b) == 0 {
			return out, nil // the last sequence has no match
		}
		if len(b) < 2 {
			return nil, errLZ4
		}
		distance := int(binary.LittleEndian.Uint16(b))
		match, rest, ok := lz4Length(int(token&15), b[2:])
		match += 4
		if !ok || distance == 0 || distance > len(out)-begin || len(out)+match > limit {
			return nil, errLZ4
		}
		for ; match > 0; match-- { // byte by byte: a match may overlap itself
			out = append(out, out[len(out)-distance])
		}
		b = rest
	}
	return out, nil
}

// lz4Length reads the rest of a length whose 4 bits are given.
func lz4Length(n int, b []byte) (length int, rest []byte, ok bool) {
	if n < 15 {
		return n, b, true
	}
	for i, c := range b {
		if n += int(c); c < 255 {
			return n, b[i+1:], true
		}
	}
	return 0, nil, false
}
