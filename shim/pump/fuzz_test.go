package pump

import (
	"encoding/hex"
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	wire "mknet/spec/pump"
)

// goldenFrames reads the frames that spec/pump fixes: both ends parse them.
func goldenFrames(t testing.TB) map[string][]byte {
	t.Helper()
	text, err := os.ReadFile("../../spec/pump/testdata/frames.golden")
	if err != nil {
		t.Fatal(err)
	}
	frames := map[string][]byte{}
	for line := range strings.Lines(string(text)) {
		name, digits, _ := strings.Cut(strings.TrimSpace(line), " ")
		if frames[name], err = hex.DecodeString(digits); err != nil {
			t.Fatal(err)
		}
	}
	return frames
}

func TestGoldenFramesAreUnderstood(t *testing.T) {
	frames := goldenFrames(t)
	r, peers, kernel, c := alone(t, nil)
	peers[0].send(t, frames["data"])
	peers[0].send(t, frames["data-vnet"])
	for range 2 {
		if got := hex.EncodeToString(get(t, kernel, true)); !strings.HasSuffix(hex.EncodeToString(frames["data"]), got) || got == "" {
			t.Errorf("delivered %s", got)
		}
	}
	peers[0].send(t, frames["ping"])
	f := peers[0].next(t, wire.Ping)
	if got := wire.Append(nil, f.Type, f.Body); string(got) != string(frames["pong"]) {
		t.Errorf("ping is answered with %x, want %x", got, frames["pong"])
	}
	peers[0].send(t, frames["data-empty"])
	peers[0].send(t, frames["close"])
	var closed *PeerClosedError
	if err := r.wait(t); !errors.As(err, &closed) || closed.Reason != wire.Unbound || closed.Text != "endpoint deleted" {
		t.Errorf("got %v, want the reason of the golden frame", err)
	}
	if s := c.Snapshot(); s.RxPackets != 2 || s.Drops["short"] != 1 {
		t.Errorf("counters %+v, want 2 packets and 1 short", s)
	}
}

// FuzzInbox feeds what a peer may send to the part that takes it apart, in pieces
// of any size. It must end with an error or leave less than one frame.
func FuzzInbox(f *testing.F) {
	golden := goldenFrames(f)
	var all []byte
	for _, name := range []string{"data", "data-vnet", "data-empty", "ping", "pong"} {
		f.Add(golden[name], uint16(3), false, true)
		all = append(all, golden[name]...)
	}
	f.Add(golden["credit"], uint16(100), false, false)
	f.Add(append(all, golden["close"]...), uint16(17), false, true)
	seal := make([]byte, wire.HeaderBytes, 1000)
	wire.PutHeader(seal, wire.Sealed, len(all)+wire.SealOverheadBytes)
	nonce := nonceOf(0)
	f.Add(newAEAD(f, 1).Seal(seal, nonce[:], all, seal), uint16(50), true, false)

	null := os.NewFile(uintptr(must(unix.Open("/dev/null", unix.O_WRONLY|unix.O_CLOEXEC, 0))), "null")
	defer null.Close()
	raw := mustRaw(null.SyscallConn())
	f.Fuzz(func(t *testing.T, b []byte, piece uint16, sealed, vnet bool) {
		lane := Lane{Conn: discard{}}
		if sealed {
			lane.Seal, lane.Open = newAEAD(t, 1), newAEAD(t, 1)
		}
		cfg := config()
		q := &fakeTun{File: null, raw: raw, vnet: vnet}
		s, err := newSession(cfg, []device{q}, []Lane{lane})
		if err != nil {
			t.Fatal(err)
		}
		in := newInbox(s, s.lanes[0], q)
		for len(b) > 0 {
			if len(in.buf) == in.end {
				t.Fatalf("no room to read with %d bytes waiting", in.end-in.next)
			}
			n := copy(in.buf[in.end:], b[:min(len(b), int(piece)+1)])
			b, in.end = b[n:], in.end+n
			if err := in.pass(); err != nil {
				return
			}
			if in.next < headroom || in.next > in.end || in.end-in.next >= in.largest || in.inner != 0 {
				t.Fatalf("impossible state: next %d, end %d, inner %d", in.next, in.end, in.inner)
			}
		}
		if s.ended() {
			t.Fatal("the session ended without an error")
		}
	})
}
