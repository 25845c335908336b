package session

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"mknet/spec/pump"
)

func sprint(format string, v any) string { return fmt.Sprintf(format, v) }

// tap records what is written to a connection and may change one byte of it.
type tap struct {
	net.Conn
	mu     sync.Mutex
	sent   []byte
	flipAt int // index of the byte of sent that is changed; -1: none
}

func (c *tap) Write(b []byte) (int, error) {
	c.mu.Lock()
	out := bytes.Clone(b)
	if i := c.flipAt - len(c.sent); c.flipAt >= 0 && i >= 0 && i < len(out) {
		out[i] ^= 0x10
	}
	c.sent = append(c.sent, b...)
	c.mu.Unlock()
	return c.Conn.Write(out)
}

// record opens a session and returns every byte that the shim sent on its first
// connection.
func record(t *testing.T, dial func(context.Context) (net.Conn, error)) (*Session, []byte) {
	t.Helper()
	var first *tap
	c := testClient(t, func(ctx context.Context) (net.Conn, error) {
		conn, err := dial(ctx)
		if err != nil || first != nil {
			return conn, err
		}
		first = &tap{Conn: conn, flipAt: -1}
		return first, nil
	})
	s, err := c.Open(t.Context(), testOffer())
	if err != nil {
		t.Fatal(err)
	}
	return s, first.sent
}

// A recorded connection, whole or cut at any byte, neither configures the link
// nor displaces the session that it was recorded from.
func TestReplayAchievesNothing(t *testing.T) {
	l, dial := unixListener(t)
	a := startAgent(t, l, nil)
	live, sent := record(t, dial)
	wait(t, "session", a.running)
	for n := 0; n <= len(sent); n++ {
		conn, err := dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(sent[:n]); err == nil {
			_ = conn.(*net.UnixConn).CloseWrite()
			_, _ = io.Copy(io.Discard, conn) // until the agent has given up
		}
		_ = conn.Close()
	}
	if n, events := a.seen(); n != 1 {
		t.Errorf("a replayed connection configured the link: %v", events)
	}
	if _, err := live.Lanes[0].Conn.Write([]byte("x")); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(live.Lanes[0].Conn, make([]byte, 1)); err != nil {
		t.Errorf("the live session ended: %v", err)
	}
	a.stop(t)
}

// No byte of the handshake can be changed, in either direction.
func TestChangedByteEndsTheHandshake(t *testing.T) {
	l, dial := unixListener(t)
	a := startAgent(t, l, func(s *Server, _ *recorder) { s.Timeout = 2 * time.Second })
	live, sent := record(t, dial)
	wait(t, "session", a.running)
	_ = live.Close()
	_ = wait(t, "end", a.ended) // whatever its cause
	for at := range sent {
		c := testClient(t, func(ctx context.Context) (net.Conn, error) {
			conn, err := dial(ctx)
			if err != nil {
				return nil, err
			}
			return &tap{Conn: conn, flipAt: at}, nil
		})
		// A length that claims more than comes is ended by the deadline of one side.
		c.Timeout = 200 * time.Millisecond
		if s, err := c.Open(t.Context(), testOffer()); err == nil {
			t.Errorf("byte %d of %d changed and the session %+v began", at, len(sent), s.Config)
		}
	}
	if n, _ := a.seen(); n != 1 {
		t.Errorf("changed bytes configured the link %d times", n-1)
	}
	a.stop(t)
}

// flipListener changes one byte of what the agent sends.
type flipListener struct {
	net.Listener
	mu sync.Mutex
	at int
}

func (f *flipListener) Accept() (net.Conn, error) {
	conn, err := f.Listener.Accept()
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return &tap{Conn: conn, flipAt: f.at}, nil
}

func TestChangedByteOfTheAgentEndsTheHandshake(t *testing.T) {
	l, dial := unixListener(t)
	f := &flipListener{Listener: l, at: -1}
	a := startAgent(t, f, func(s *Server, _ *recorder) { s.Timeout = 2 * time.Second })
	hello, err := pump.Hello{MinVersion: 1, MaxVersion: 1, Role: pump.RoleAgent, Endpoint: testIdentity(t).Endpoint, Sandbox: testIdentity(t).Sandbox}.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	total := len(hello) + 3 + 48 + 3 + 16 // hello, reply, and the head of the answer
	for at := range total {
		f.mu.Lock()
		f.at = at
		f.mu.Unlock()
		c := testClient(t, dial)
		c.Timeout = 200 * time.Millisecond
		if s, err := c.Open(t.Context(), testOffer()); err == nil {
			t.Errorf("byte %d of the agent changed and the session %+v began", at, s.Config)
		}
	}
	a.stop(t)
}

func TestSlowPeerIsCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipes()
		a := startAgent(t, p, nil)
		_, sent := record(t, p.Dial)
		wait(t, "session", a.running)
		begin := time.Now()
		conn, err := p.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = io.Copy(io.Discard, conn) }()
		for i := 0; err == nil && i < len(sent); i++ {
			_, err = conn.Write(sent[i : i+1])
			time.Sleep(time.Second)
		}
		if got := time.Since(begin); err == nil || got > DefaultTimeout+2*time.Second {
			t.Errorf("a peer that sends one byte a second was served for %s, %v", got, err)
		}
		_ = conn.Close()
		a.stop(t)
	})
}

func TestStrangersAreBoundedInNumber(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipes()
		a := startAgent(t, p, func(s *Server, _ *recorder) { s.MaxHandshakes = 3 })
		var silent []net.Conn
		for range 3 {
			conn, err := p.Dial(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			silent = append(silent, conn)
		}
		synctest.Wait()
		if _, err := testClient(t, p.Dial).Open(t.Context(), testOffer()); !errors.Is(err, ErrClosed) {
			t.Errorf("a fourth peer: got %v, want ErrClosed", err)
		}
		// The silent ones are cut off, and then there is room.
		for _, conn := range silent {
			if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
				t.Errorf("silent peer: %v, want EOF", err)
			}
		}
		synctest.Wait()
		if _, err := testClient(t, p.Dial).Open(t.Context(), testOffer()); err != nil {
			t.Errorf("after that: %v", err)
		}
		a.stop(t)
	})
}

func TestShimDoesNotWaitForASilentAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipes()
		go func() {
			conn, err := p.Accept()
			if err == nil {
				_, _ = io.Copy(io.Discard, conn)
			}
		}()
		begin := time.Now()
		_, err := testClient(t, p.Dial).Open(t.Context(), testOffer())
		if got := time.Since(begin); !errors.Is(err, ErrTimeout) || got != DefaultTimeout {
			t.Errorf("got %v after %s, want ErrTimeout after %s", err, got, DefaultTimeout)
		}
	})
}

func TestLatencyLaneNeedsItsSession(t *testing.T) {
	l, dial := unixListener(t)
	a := startAgent(t, l, func(_ *Server, r *recorder) { r.lanes = 2 })
	c := testClient(t, dial)
	if _, err := c.connect(t.Context(), pump.LaneLatency, testToken); !errors.Is(err, ErrNoSession) {
		t.Errorf("a latency lane alone: got %v, want ErrNoSession", err)
	}
	bulk, err := c.connect(t.Context(), pump.LaneBulk, testToken)
	if err != nil {
		t.Fatal(err)
	}
	s, laneToken, err := c.configure(t.Context(), bulk, testOffer())
	if err != nil {
		t.Fatal(err)
	}
	// The sandbox token is not enough: it proves the child, not the session.
	if _, err := c.connect(t.Context(), pump.LaneLatency, testToken); !errors.Is(err, ErrAuthentication) {
		t.Errorf("a latency lane under the sandbox token: got %v, want ErrAuthentication", err)
	}
	if err := c.addLatencyLane(t.Context(), s, laneToken); err != nil {
		t.Fatal(err)
	}
	if theirs := wait(t, "session", a.running); len(theirs.Lanes) != 2 {
		t.Errorf("%d lanes, want 2", len(theirs.Lanes))
	}
	if err := c.addLatencyLane(t.Context(), s, laneToken); err == nil {
		t.Error("a third connection was taken into the session")
	}
	a.stop(t)
}

func TestSessionDoesNotWaitForItsLatencyLane(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPipes()
		a := startAgent(t, p, func(_ *Server, r *recorder) { r.lanes = 2 })
		c := testClient(t, p.Dial)
		bulk, err := c.connect(t.Context(), pump.LaneBulk, testToken)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := c.configure(t.Context(), bulk, testOffer()); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if _, err := bulk.conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) || time.Since(begin) > DefaultTimeout {
			t.Errorf("the agent waited %s for the second lane, %v", time.Since(begin), err)
		}
		a.stop(t)
	})
}

func FuzzAgent(f *testing.F) {
	raw, err := pump.Hello{MinVersion: 1, MaxVersion: 1, Role: pump.RoleShim, Endpoint: testIdentity(f).Endpoint, Sandbox: testIdentity(f).Sandbox}.Append(nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add(append(bytes.Clone(raw), pump.AppendMessage(nil, pump.MsgInit, make([]byte, 48))...))
	f.Add(append(bytes.Clone(raw), 1, 0xff, 0xff))
	f.Add([]byte("MKNP\x00\x03\x00\x02\x00\x05???"))
	l, dial := unixListener(f)
	a := startAgent(f, l, func(s *Server, _ *recorder) { s.Timeout = time.Second })
	f.Fuzz(func(t *testing.T, b []byte) {
		conn, err := dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write(b)
		_ = conn.(*net.UnixConn).CloseWrite()
		_, _ = io.Copy(io.Discard, conn)
		_ = conn.Close()
		if n, _ := a.seen(); n != 0 {
			t.Fatalf("%x configured the link", b)
		}
	})
}

func FuzzShim(f *testing.F) {
	raw, err := pump.Hello{MinVersion: 1, MaxVersion: 1, Role: pump.RoleAgent, Sandbox: testIdentity(f).Sandbox}.Append(nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add(append(bytes.Clone(raw), pump.AppendMessage(nil, pump.MsgReply, make([]byte, 48))...))
	f.Add(append(bytes.Clone(raw), pump.AppendMessage(nil, pump.MsgRefuse, []byte{2})...))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := testClient(t, func(context.Context) (net.Conn, error) {
			ours, theirs := net.Pipe()
			go func() { _, _ = io.Copy(io.Discard, theirs) }()
			go func() { _, _ = theirs.Write(b); _ = theirs.Close() }()
			return ours, nil
		})
		if s, err := c.Open(t.Context(), testOffer()); err == nil {
			t.Fatalf("%x opened %+v", b, s)
		}
	})
}
