package pump

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mknet/spec/endpoint"
)

var updateSession = flag.Bool("update-session", false, "rewrite the golden files of hello and link configuration")

// goldenSession compares got with testdata/session/name.golden.
func goldenSession(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", "session", name+".golden")
	if *updateSession {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", path, got, want)
	}
}

func testGeneration(t testing.TB) endpoint.Generation {
	g, err := endpoint.ParseGeneration("0123456789abcdef0123456789abcdef")
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func testHello(t testing.TB, role Role) Hello {
	return Hello{
		MinVersion: MinVersion, MaxVersion: MaxVersion, Role: role, Endpoint: testGeneration(t),
		Sandbox: endpoint.Sandbox{ID: "sandbox-1", Generation: "7"},
	}
}

func TestHelloGolden(t *testing.T) {
	agent := testHello(t, RoleAgent)
	agent.Endpoint, agent.Flags = endpoint.Generation{}, FlagSingleUse
	latency := testHello(t, RoleShim)
	latency.Lane = LaneLatency
	longest := testHello(t, RoleShim)
	longest.Sandbox = endpoint.Sandbox{ID: strings.Repeat("a", 128), Generation: strings.Repeat("9", 128)}
	for _, tt := range []struct {
		name string
		h    Hello
	}{{"hello-shim", testHello(t, RoleShim)}, {"hello-agent", agent}, {"hello-latency", latency}, {"hello-longest", longest}} {
		t.Run(tt.name, func(t *testing.T) {
			raw, err := tt.h.Append(nil)
			if err != nil {
				t.Fatal(err)
			}
			goldenSession(t, tt.name, hex.Dump(raw))
			// One byte at a time, and something of the next message behind it.
			got, again, err := ReadHello(io.MultiReader(&oneByte{raw}, strings.NewReader("next")))
			if err != nil || got != tt.h || !bytes.Equal(raw, again) {
				t.Errorf("ReadHello: got %+v, %v; want %+v", got, err, tt.h)
			}
		})
	}
}

// oneByte is a reader that gives one byte a call.
type oneByte struct{ b []byte }

func (r *oneByte) Read(p []byte) (int, error) {
	if len(r.b) == 0 {
		return 0, io.EOF
	}
	p[0], r.b = r.b[0], r.b[1:]
	return 1, nil
}

func TestHelloAppendRefuses(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*Hello)
	}{
		{"no version", func(h *Hello) { h.MinVersion = 0 }},
		{"reversed versions", func(h *Hello) { h.MinVersion = 2 }},
		{"no role", func(h *Hello) { h.Role = 0 }},
		{"third lane", func(h *Hello) { h.Lane = 2 }},
		{"unknown flag", func(h *Hello) { h.Role, h.Flags = RoleAgent, 0x80 }},
		{"shim with a flag", func(h *Hello) { h.Flags = FlagSingleUse }},
		{"shim without a generation", func(h *Hello) { h.Endpoint = endpoint.Generation{} }},
		{"empty sandbox", func(h *Hello) { h.Sandbox.ID = "" }},
		{"empty sandbox generation", func(h *Hello) { h.Sandbox.Generation = "" }},
		{"long sandbox", func(h *Hello) { h.Sandbox.ID = strings.Repeat("a", 129) }},
		{"sandbox with a newline", func(h *Hello) { h.Sandbox.ID = "a\nb" }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := testHello(t, RoleShim)
			tt.edit(&h)
			if _, err := h.Append(nil); !errors.Is(err, ErrMalformedHello) {
				t.Errorf("Append(%+v): got %v, want ErrMalformedHello", h, err)
			}
		})
	}
}

func TestParseHelloRefuses(t *testing.T) {
	good, err := testHello(t, RoleShim).Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	edit := func(f func(b []byte) []byte) []byte { return f(bytes.Clone(good)) }
	for _, tt := range []struct {
		name string
		raw  []byte
	}{
		{"empty", nil},
		{"magic", edit(func(b []byte) []byte { b[0] ^= 1; return b })},
		{"oversized", edit(func(b []byte) []byte { binary.BigEndian.PutUint16(b[4:], MaxHelloBodyBytes+1); return b })},
		{"announced too long", edit(func(b []byte) []byte { b[5]++; return b })},
		{"announced too short", edit(func(b []byte) []byte { b[5]--; return b })},
		{"byte after the last field", edit(func(b []byte) []byte { b[5]++; return append(b, 0) })},
		{"field longer than the body", edit(func(b []byte) []byte { b[helloHeaderBytes+19] = 255; return b })},
		{"version zero", edit(func(b []byte) []byte { b[7] = 0; return b })},
		{"role", edit(func(b []byte) []byte { b[helloHeaderBytes] = 9; return b })},
		{"no body", append(bytes.Clone(good[:4]), 0, 0, 0, 1, 0, 1)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if h, err := ParseHello(tt.raw); !errors.Is(err, ErrMalformedHello) {
				t.Errorf("ParseHello(%x): got %+v, %v; want ErrMalformedHello", tt.raw, h, err)
			}
		})
	}
	for n := range good {
		if _, err := ParseHello(good[:n]); !errors.Is(err, ErrMalformedHello) {
			t.Errorf("first %d bytes: got %v, want ErrMalformedHello", n, err)
		}
		if _, _, err := ReadHello(bytes.NewReader(good[:n])); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("stream of %d bytes: got %v, want an end of file", n, err)
		}
	}
}

func TestLaterVersionIsNamed(t *testing.T) {
	// A later version may have any body of at most MaxHelloBodyBytes.
	raw := binary.BigEndian.AppendUint32(nil, helloMagic)
	raw = binary.BigEndian.AppendUint16(raw, 3)
	raw = binary.BigEndian.AppendUint16(raw, 2)
	raw = binary.BigEndian.AppendUint16(raw, 5)
	raw = append(raw, "???"...)
	_, got, err := ReadHello(bytes.NewReader(raw))
	want := &MismatchError{Field: Version, Ours: "1", Theirs: "2 to 5"}
	var m *MismatchError
	if !errors.As(err, &m) || *m != *want || !bytes.Equal(got, raw) {
		t.Errorf("got %v, raw %x; want %v", err, got, want)
	}
}

func TestMatch(t *testing.T) {
	other := endpoint.Generation{15: 1}
	for _, tt := range []struct {
		name string
		edit func(*Hello)
		want Field
	}{
		{"same", func(*Hello) {}, ""},
		{"agent without a generation", func(h *Hello) { h.Endpoint = endpoint.Generation{} }, ""},
		{"later version too", func(h *Hello) { h.MaxVersion = 9 }, ""},
		{"version", func(h *Hello) { h.MinVersion, h.MaxVersion, h.Sandbox.ID = 2, 3, "x" }, Version},
		{"sandbox", func(h *Hello) { h.Sandbox = endpoint.Sandbox{ID: "x", Generation: "8"} }, Sandbox},
		{"sandbox generation", func(h *Hello) { h.Sandbox.Generation, h.Endpoint = "8", other }, SandboxGeneration},
		{"endpoint generation", func(h *Hello) { h.Endpoint, h.Lane = other, 1 }, EndpointGeneration},
		{"lane", func(h *Hello) { h.Lane = 1 }, Lane},
	} {
		t.Run(tt.name, func(t *testing.T) {
			theirs := testHello(t, RoleAgent)
			tt.edit(&theirs)
			err := Match(testHello(t, RoleShim), theirs)
			if tt.want == "" && err != nil || tt.want != "" && !errors.Is(err, &MismatchError{Field: tt.want}) {
				t.Errorf("got %v, want a mismatch of %q", err, tt.want)
			}
		})
	}
	if err := Match(testHello(t, RoleShim), testHello(t, RoleShim)); !errors.Is(err, ErrMalformedHello) {
		t.Errorf("two shims: got %v, want ErrMalformedHello", err)
	}
}

func FuzzHello(f *testing.F) {
	for _, role := range []Role{RoleShim, RoleAgent} {
		raw, err := testHello(f, role).Append(nil)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
		f.Add(raw[:len(raw)-3])
	}
	f.Add([]byte("MKNP\x00\x03\x00\x02\x00\x05???"))
	f.Add([]byte("MKNP\xff\xff\x00\x01\x00\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, raw, err := ReadHello(bytes.NewReader(b))
		if len(raw) > MaxHelloBytes {
			t.Fatalf("%d raw bytes", len(raw))
		}
		if err != nil {
			return
		}
		again, err := h.Append(nil)
		if err != nil || !bytes.Equal(again, raw) {
			t.Fatalf("%x parses as %+v and encodes as %x, %v", raw, h, again, err)
		}
	})
}
