package pump

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the golden frames")

// goldenFrames are the frames whose bytes are fixed in testdata/frames.golden,
// which the data plane's tests read too.
func goldenFrames() []struct {
	name  string
	bytes []byte
} {
	packet := []byte{0x45, 0, 0, 21, 0, 0, 0x40, 0, 64, 17, 0, 0, 172, 30, 0, 2, 172, 30, 0, 1, 0xaa}
	return []struct {
		name  string
		bytes []byte
	}{
		{"data", Append(nil, Data, packet)},
		{"data-vnet", Append(nil, DataVnet, append(VnetHeader{}.Append(nil), packet...))},
		{"data-empty", Append(nil, Data, nil)},
		{"credit", AppendCredit(nil, Credit{Lane: 1, Bytes: 0x0102030405060708, Frames: 9})},
		{"ping", AppendPing(nil, Ping, 0x1122334455667788)},
		{"pong", AppendPing(nil, Pong, 0x1122334455667788)},
		{"close", AppendClose(nil, Unbound, "endpoint deleted")},
		{"close-without-text", AppendClose(nil, Shutdown, "")},
	}
}

func TestFrameGolden(t *testing.T) {
	const path = "testdata/frames.golden"
	var got strings.Builder
	for _, f := range goldenFrames() {
		got.WriteString(f.name + " " + hex.EncodeToString(f.bytes) + "\n")
	}
	if *update {
		if err := os.WriteFile(path, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got.String() != string(want) {
		t.Errorf("frames differ from %s (-update writes it):\ngot\n%swant\n%s", path, got.String(), want)
	}
}

func TestNextReadsWhatWasWritten(t *testing.T) {
	for _, f := range goldenFrames() {
		for n := range f.bytes {
			if got, err := Next(f.bytes[:n], false); err != nil || got.Bytes != 0 {
				t.Errorf("%s: first %d of %d bytes: got %+v, %v, want neither frame nor error", f.name, n, len(f.bytes), got, err)
			}
		}
		got, err := Next(append(bytes.Clone(f.bytes), 0xff, 0xff), false)
		if err != nil || got.Bytes != len(f.bytes) || !bytes.Equal(Append(nil, got.Type, got.Body), f.bytes) {
			t.Errorf("%s: got %+v, %v", f.name, got, err)
		}
	}
}

func TestFrameBodies(t *testing.T) {
	c := Credit{Lane: 1, Bytes: 1 << 60, Frames: 77}
	if f, err := Next(AppendCredit(nil, c), false); err != nil || f.Type != Credits || CreditOf(f.Body) != c {
		t.Errorf("credit: got %+v, %v", f, err)
	}
	if f, err := Next(AppendPing(nil, Pong, 42), false); err != nil || f.Type != Pong || PingToken(f.Body) != 42 {
		t.Errorf("pong: got %+v, %v", f, err)
	}
	for _, tt := range []struct{ in, want string }{
		{"bye", "bye"},
		{"a\nlevel=ERROR msg=forged\x1b[2J\x00", "a?level=ERROR msg=forged?[2J?"},
		{"\xff\u009b", "??"},
		{strings.Repeat("x", 1000), strings.Repeat("x", MaxCloseTextBytes)},
	} {
		f, err := Next(AppendClose(nil, Protocol, tt.in), false)
		if err != nil || f.Type != Close {
			t.Fatalf("close %q: got %+v, %v", tt.in, f, err)
		}
		if r, text := CloseText(f.Body); r != Protocol || text != tt.want {
			t.Errorf("close %q: got %s, %q, want %s, %q", tt.in, r, text, Protocol, tt.want)
		}
	}
}

// header builds a header with any length field.
func header(length uint32, t Type) []byte {
	return append(binary.BigEndian.AppendUint32(nil, length), byte(t))
}

func TestNextRefuses(t *testing.T) {
	for _, tt := range []struct {
		name   string
		in     []byte
		sealed bool
	}{
		{"length 0", header(0, Data), false},
		{"length 0, no type yet", []byte{0, 0, 0, 0}, false},
		{"huge length, no type yet", []byte{0xff, 0xff, 0xff, 0xff}, false},
		{"huge length", header(1<<31, Data), false},
		{"one beyond the largest data frame", header(1+MaxPacketBytes+1, Data), false},
		{"one beyond the largest vnet frame", header(1+VnetHeaderBytes+MaxPacketBytes+1, DataVnet), false},
		{"vnet header cut", header(1+VnetHeaderBytes-1, DataVnet), false},
		{"type 0", header(5, 0), false},
		{"type 8", header(5, 8), false},
		{"type 255", header(5, 255), false},
		{"long ping", header(1+9, Ping), false},
		{"short pong", header(1+7, Pong), false},
		{"short credit", header(1+creditBytes-1, Credits), false},
		{"close without reason", header(1+1, Close), false},
		{"close with a novel", header(1+2+MaxCloseTextBytes+1, Close), false},
		{"sealed frame in a plain session", header(1+100, Sealed), false},
		{"plain frame in a sealed session", header(1+8, Ping), true},
		{"sealed frame without room for a frame", header(1+SealOverheadBytes+HeaderBytes-1, Sealed), true},
		{"one beyond the largest sealed frame", header(uint32(MaxSealedBytes-4+1), Sealed), true},
	} {
		f, err := Next(tt.in, tt.sealed)
		var frame *FrameError
		if !errors.As(err, &frame) || f.Bytes != 0 {
			t.Errorf("%s: %x: got %+v, %v, want a FrameError from the header alone", tt.name, tt.in, f, err)
		}
	}
	largest := Append(nil, DataVnet, make([]byte, VnetHeaderBytes+MaxPacketBytes))
	if f, err := Next(largest, false); err != nil || f.Bytes != MaxFrameBytes {
		t.Errorf("largest data frame: got %d bytes, %v, want %d", f.Bytes, err, MaxFrameBytes)
	}
	largest = Append(nil, Sealed, make([]byte, MaxBatchBytes+SealOverheadBytes))
	if f, err := Next(largest, true); err != nil || f.Bytes != MaxSealedBytes {
		t.Errorf("largest sealed frame: got %d bytes, %v, want %d", f.Bytes, err, MaxSealedBytes)
	}
}

func FuzzFrames(f *testing.F) {
	var all []byte
	for _, g := range goldenFrames() {
		f.Add(g.bytes, false)
		all = append(all, g.bytes...)
	}
	f.Add(all, false)
	f.Add(Append(nil, Sealed, make([]byte, 100)), true)
	f.Fuzz(func(t *testing.T, b []byte, sealed bool) {
		for len(b) > 0 {
			f, err := Next(b, sealed)
			if err != nil {
				var frame *FrameError
				if !errors.As(err, &frame) || f.Bytes != 0 {
					t.Fatalf("got frame %+v with error %v", f, err)
				}
				return
			}
			if f.Bytes == 0 {
				if len(b) >= MaxSealedBytes {
					t.Fatalf("asks for more than %d bytes", MaxSealedBytes)
				}
				return
			}
			if f.Bytes != HeaderBytes+len(f.Body) || f.Bytes > len(b) || sealed != (f.Type == Sealed) {
				t.Fatalf("impossible frame %s of %d bytes with a body of %d in %d", f.Type, f.Bytes, len(f.Body), len(b))
			}
			if again := Append(nil, f.Type, f.Body); !bytes.Equal(again, b[:f.Bytes]) {
				t.Fatalf("encoding is not unique: read %x, wrote %x", b[:f.Bytes], again)
			}
			switch f.Type {
			case Credits:
				if again := AppendCredit(nil, CreditOf(f.Body)); !bytes.Equal(again, b[:f.Bytes]) {
					t.Fatalf("credit: read %x, wrote %x", b[:f.Bytes], again)
				}
			case Close:
				r, text := CloseText(f.Body)
				if strings.ContainsAny(text, "\n\r\x1b\x00") {
					t.Fatalf("close %s: text %q can forge a log line", r, text)
				}
			}
			b = b[f.Bytes:]
		}
	})
}
