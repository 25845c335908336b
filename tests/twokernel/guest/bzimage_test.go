package guest

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"
)

// block wraps LZ4 sequences into a legacy frame's block.
func block(sequences ...string) []byte {
	b := strings.Join(sequences, "")
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...)
}

func TestUnpackLZ4(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   []byte
		want string // empty: damaged
	}{
		{"literals", block("\x50hello"), "hello"},
		{"match", block("\x50hello\x05\x00", "\x10!"), "hellohell!"},
		{"match that overlaps itself", block("\x14a\x01\x00", "\x10b"), "a" + strings.Repeat("a", 8) + "b"},
		{"long lengths", block("\xff\x01" + strings.Repeat("x", 16) + "\x10\x00\xff\x02" + "\x10y"), strings.Repeat("x", 16+4+15+255+2) + "y"},
		{"two blocks", append(block("\x20ab"), block("\x20cd")...), "abcd"},
		{"match before the block", append(block("\x40abcd"), block("\x10e\x03\x00", "\x10f")...), ""},
		{"distance 0", block("\x10a\x00\x00", "\x10b"), ""},
		{"literals cut off", block("\x50hel"), ""},
		{"distance cut off", block("\x10a\x01"), ""},
		{"length cut off", block("\xf0\xff"), ""},
		{"block cut off", []byte{9, 0, 0, 0, 0x10, 'a'}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := unpackLZ4(tt.in, 1000)
			if (err != nil) != (tt.want == "") || err == nil && string(got) != tt.want {
				t.Errorf("%x gives %q, %v; want %q", tt.in, got, err, tt.want)
			}
		})
	}
	if _, err := unpackLZ4(block("\x50hello"), 4); err == nil {
		t.Error("5 bytes unpack into 4")
	}
}

// bzImage makes the smallest image whose payload is a frame of the blocks.
func bzImage(size uint32, blocks []byte) []byte {
	b := make([]byte, 1024)
	b[offSetupSectors] = 1
	copy(b[offMagic:], "HdrS")
	payload := binary.LittleEndian.AppendUint32(nil, lz4Magic)
	payload = append(payload, blocks...)
	payload = binary.LittleEndian.AppendUint32(payload, size)
	binary.LittleEndian.PutUint32(b[offPayloadOffset:], 16)
	binary.LittleEndian.PutUint32(b[offPayloadLength:], uint32(len(payload)))
	return append(append(b, make([]byte, 16)...), payload...)
}

func TestUnpackImage(t *testing.T) {
	elf := "\x7fELFkernel"
	good := bzImage(10, block("\xa0"+elf))
	got, err := unpackImage(good)
	if err != nil || string(got) != elf {
		t.Fatalf("%q, %v", got, err)
	}
	for name, bad := range map[string][]byte{
		"empty":           nil,
		"no header":       make([]byte, 2048),
		"wrong size":      bzImage(11, block("\xa0"+elf)),
		"no ELF":          bzImage(5, block("\x50hello")),
		"not LZ4":         bytes.Replace(good, []byte{0x02, 0x21, 0x4c, 0x18}, []byte{0x28, 0xb5, 0x2f, 0xfd}, 1),
		"cut off":         good[:len(good)-1],
		"size of 4 GiB":   bzImage(0xffffffff, block("\xa0"+elf)),
		"payload outside": func() []byte { b := bytes.Clone(good); b[offPayloadLength+2] = 1; return b }(),
	} {
		if _, err := unpackImage(bad); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
