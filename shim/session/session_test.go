package session

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"mknet/spec/endpoint"
	"mknet/spec/pump"
)

func TestSession(t *testing.T) {
	for _, tt := range []struct {
		name              string
		offered, possible int
		sealed            bool
		want              int
	}{
		{"one lane", 1, 1, false, 1},
		{"agent has one", 2, 1, false, 1},
		{"shim has one", 1, 2, false, 1},
		{"two lanes", 2, 2, false, 2},
		{"two lanes, sealed", 2, 2, true, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l, dial := unixListener(t)
			a := startAgent(t, l, func(_ *Server, r *recorder) { r.lanes = tt.possible })
			offer := testOffer()
			offer.Lanes, offer.Windows, offer.Sealed = tt.offered, offer.Windows[:tt.offered], tt.sealed
			s, err := testClient(t, dial).Open(t.Context(), offer)
			if err != nil {
				t.Fatal(err)
			}
			theirs := wait(t, "session", a.running)
			if len(s.Lanes) != tt.want || len(theirs.Lanes) != tt.want {
				t.Fatalf("lanes: shim %d, agent %d, want %d", len(s.Lanes), len(theirs.Lanes), tt.want)
			}
			if theirs.Config.Address != offer.Address || theirs.Endpoint != testIdentity(t).Endpoint || s.Ack.Offloads != 0x0f || s.Version != 1 {
				t.Errorf("agent has %+v, shim has ack %+v", theirs, s.Ack)
			}
			checkKeys(t, s, theirs, tt.sealed)
			// The connections work and have no deadline left: the agent echoes on lane 0.
			go func() { _, _ = s.Lanes[0].Conn.Write([]byte("packet")) }()
			got := make([]byte, 6)
			if _, err := io.ReadFull(s.Lanes[0].Conn, got); err != nil || string(got) != "packet" {
				t.Errorf("echo: %q, %v", got, err)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			_ = wait(t, "end", a.ended) // whatever its cause
			a.stop(t)
		})
	}
}

// checkKeys: both ends hold the same keys, crosswise, and no two are equal.
func checkKeys(t *testing.T, ours, theirs *Session, sealed bool) {
	t.Helper()
	seen := map[Key]bool{}
	for i := range ours.Lanes {
		o, a := ours.Lanes[i], theirs.Lanes[i]
		if o.Number != i || a.Number != i {
			t.Errorf("lane %d is numbered %d and %d", i, o.Number, a.Number)
		}
		if !sealed {
			if o.Send != nil || o.Receive != nil || a.Send != nil || a.Receive != nil {
				t.Errorf("lane %d has keys though the session is not sealed", i)
			}
			continue
		}
		if *o.Send != *a.Receive || *o.Receive != *a.Send {
			t.Errorf("lane %d: the keys of the two ends differ", i)
		}
		for _, k := range []Key{*o.Send, *o.Receive} {
			if seen[k] || k == (Key{}) {
				t.Errorf("lane %d: a key is used twice or empty", i)
			}
			seen[k] = true
		}
	}
}

func TestOpenNamesWhatIsWrong(t *testing.T) {
	mismatch := func(f pump.Field) error { return &pump.MismatchError{Field: f} }
	for _, tt := range []struct {
		name string
		shim func(*Client)
		want error
	}{
		{"wrong token", func(c *Client) { c.Token[5] ^= 1 }, ErrAuthentication},
		{"no token", func(c *Client) { c.Token = pump.Token{} }, ErrAuthentication},
		{"other sandbox", func(c *Client) { c.Identity.Sandbox.ID = "sandbox-2" }, mismatch(pump.Sandbox)},
		{"older sandbox generation", func(c *Client) { c.Identity.Sandbox.Generation = "6" }, mismatch(pump.SandboxGeneration)},
		{"other endpoint", func(c *Client) { c.Identity.Endpoint = endpoint.Generation{1} }, mismatch(pump.EndpointGeneration)},
		{"wrong token and older generation", func(c *Client) { c.Token[5] ^= 1; c.Identity.Sandbox.Generation = "6" }, mismatch(pump.SandboxGeneration)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l, dial := unixListener(t)
			a := startAgent(t, l, nil)
			c := testClient(t, dial)
			tt.shim(c)
			s, err := c.Open(t.Context(), testOffer())
			if !errors.Is(err, tt.want) {
				t.Errorf("Open: got %v, %v; want %v", s, err, tt.want)
			}
			a.stop(t)
			if n, _ := a.seen(); n != 0 {
				t.Errorf("the agent configured its link %d times for a peer that it must refuse", n)
			}
		})
	}
}

func TestAgentWithoutTokenServesNobody(t *testing.T) {
	l, dial := unixListener(t)
	a := startAgent(t, l, func(s *Server, _ *recorder) {
		s.Credentials = func() (Credentials, error) { return Credentials{Identity: testIdentity(t)}, nil }
	})
	if _, err := testClient(t, dial).Open(t.Context(), testOffer()); !errors.Is(err, ErrAuthentication) {
		t.Errorf("got %v, want ErrAuthentication", err)
	}
	a.stop(t)
}

// A later agent's hello is understood far enough to name the version.
func TestOpenNamesVersion(t *testing.T) {
	p := newPipes()
	go func() {
		conn, err := p.Accept()
		if err != nil {
			return
		}
		_, _, _ = pump.ReadHello(conn)
		_, _ = conn.Write([]byte("MKNP\x00\x03\x00\x02\x00\x05???"))
		_ = conn.Close()
	}()
	_, err := testClient(t, p.Dial).Open(t.Context(), testOffer())
	if !errors.Is(err, &pump.MismatchError{Field: pump.Version}) {
		t.Errorf("got %v, want a version mismatch", err)
	}
}

// A later shim is answered with our hello, so that it can name the version.
func TestAgentAnswersLaterVersion(t *testing.T) {
	l, dial := unixListener(t)
	a := startAgent(t, l, nil)
	conn, err := dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := conn.Write([]byte("MKNP\x00\x03\x00\x02\x00\x05???")); err != nil {
		t.Fatal(err)
	}
	h, _, err := pump.ReadHello(conn)
	if err != nil || h.MaxVersion != pump.MaxVersion || h.Role != pump.RoleAgent {
		t.Errorf("answer: %+v, %v", h, err)
	}
	var refused *pump.RefusedError
	if _, err := pump.ReadMessage(conn, pump.MsgReply); !errors.As(err, &refused) || refused.Reason != pump.RefusedMismatch {
		t.Errorf("after the hello: %v, want a refusal for mismatch", err)
	}
	_ = conn.Close()
	a.stop(t)
}

func TestConfigurationRefused(t *testing.T) {
	l, dial := unixListener(t)
	a := startAgent(t, l, func(_ *Server, r *recorder) { r.refuse = errors.New("set mtu: operation not permitted\n") })
	_, err := testClient(t, dial).Open(t.Context(), testOffer())
	var refused *RefusedError
	if !errors.As(err, &refused) || !strings.Contains(refused.Text, "set mtu: operation not permitted?") {
		t.Errorf("got %v, want the agent's reason", err)
	}
	a.stop(t)
}

func TestNewerSessionDisplacesOlder(t *testing.T) {
	l, dial := unixListener(t)
	a := startAgent(t, l, func(_ *Server, r *recorder) { r.lanes = 2 })
	c := testClient(t, dial)
	open := func(edit func(*pump.LinkConfig)) *Session {
		offer := testOffer()
		edit(&offer)
		s, err := c.Open(t.Context(), offer)
		if err != nil {
			t.Fatal(err)
		}
		wait(t, "session", a.running)
		return s
	}
	open(func(*pump.LinkConfig) {})
	second := open(func(o *pump.LinkConfig) { o.Link = "mkn1" })
	open(func(o *pump.LinkConfig) { o.MTUBytes = 9000 })
	if err := wait(t, "end of the first", a.ended); !errors.Is(err, ErrDisplaced) {
		t.Errorf("the first session ended with %v, want ErrDisplaced", err)
	}
	_, events := a.seen()
	if want := []string{"configure mkn0", "configure mkn1", "end mkn0", "configure mkn0"}; !slices.Equal(events, want) {
		t.Errorf("events %v, want %v", events, want)
	}
	// The session of the other link still runs.
	if _, err := second.Lanes[0].Conn.Write([]byte("x")); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(second.Lanes[0].Conn, make([]byte, 1)); err != nil {
		t.Errorf("the session of mkn1: %v", err)
	}
	a.stop(t)
}

func TestSingleUseTokenIsReplaced(t *testing.T) {
	l, dial := unixListener(t)
	next := pump.Token{7, 7}
	kept := make(chan pump.Token, 1)
	current, single := testToken, true
	a := startAgent(t, l, func(s *Server, _ *recorder) {
		s.Credentials = func() (Credentials, error) {
			return Credentials{Identity: testIdentity(t), Token: current, SingleUse: single}, nil
		}
		s.KeepToken = func(tok pump.Token) error { current, single = tok, false; kept <- tok; return nil }
	})
	c := testClient(t, dial)
	if _, err := c.Open(t.Context(), testOffer()); err == nil {
		t.Fatal("a single-use token was used without a next one")
	}
	c.NextToken = func() (pump.Token, error) { return next, nil }
	s, err := c.Open(t.Context(), testOffer())
	if err != nil {
		t.Fatal(err)
	}
	if got := wait(t, "token", kept); got != next || !s.Rotated || s.Config.NextToken != nil {
		t.Errorf("kept %x, rotated %t, next left in the session %t", got[:], s.Rotated, s.Config.NextToken != nil)
	}
	if theirs := wait(t, "session", a.running); theirs.Config.NextToken != nil {
		t.Error("the agent's session still holds the token")
	}
	if _, err := c.Open(t.Context(), testOffer()); !errors.Is(err, ErrAuthentication) {
		t.Errorf("the used token again: got %v, want ErrAuthentication", err)
	}
	c.Token = next
	if s, err := c.Open(t.Context(), testOffer()); err != nil || s.Rotated {
		t.Errorf("with the next token: %v", err)
	}
	a.stop(t)
}

func TestOpenEndsWithItsContext(t *testing.T) {
	p := newPipes()
	ctx, cancel := context.WithCancelCause(t.Context())
	reason := errors.New("stopping")
	go func() {
		conn, err := p.Accept()
		if err != nil {
			return
		}
		_, _, _ = pump.ReadHello(conn) // and never answers
		cancel(reason)
	}()
	if _, err := testClient(t, p.Dial).Open(ctx, testOffer()); !errors.Is(err, reason) {
		t.Errorf("got %v, want %v", err, reason)
	}
}

func TestNoLeak(t *testing.T) {
	l, dial := unixListener(t)
	a := startAgent(t, l, func(_ *Server, r *recorder) { r.lanes = 2 })
	good, bad := testClient(t, dial), testClient(t, dial)
	bad.Token[0] ^= 1
	round := func() {
		s, err := good.Open(t.Context(), testOffer())
		if err != nil {
			t.Fatal(err)
		}
		wait(t, "session", a.running)
		if _, err := bad.Open(t.Context(), testOffer()); !errors.Is(err, ErrAuthentication) {
			t.Fatal(err)
		}
		conn, err := dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
		_, _ = io.Copy(io.Discard, conn)
		_ = conn.Close()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		_ = wait(t, "end", a.ended) // whatever its cause
	}
	round()
	fds, goroutines := settled(t, 1<<30, 1<<30)
	for range 100 {
		round()
	}
	settled(t, fds, goroutines)
	a.stop(t)
}

// settled waits until at most so many descriptors and goroutines are left.
func settled(t *testing.T, fds, goroutines int) (int, int) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		names, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		f, g := len(names), runtime.NumGoroutine()
		if f <= fds && g <= goroutines {
			return f, g
		}
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			t.Fatalf("%d descriptors and %d goroutines, had %d and %d\n%s", f, g, fds, goroutines, buf[:runtime.Stack(buf, true)])
		}
	}
}

func TestSecretsDoNotPrint(t *testing.T) {
	var out bytes.Buffer
	k := Key{1, 2, 3}
	for _, v := range []any{k, &k, Lane{Send: &k}, Credentials{Token: testToken}, Client{Token: testToken}} {
		_, _ = out.WriteString(strings.ToLower(strings.Join([]string{sprint("%v", v), sprint("%+v", v), sprint("%#v", v)}, " ")))
	}
	for _, leak := range []string{"1 2 3", "0x1, 0x2", "010203"} {
		if strings.Contains(out.String(), leak) {
			t.Errorf("prints %q: %s", leak, out.String())
		}
	}
}

var _ net.Listener = (*pipes)(nil)
