package carrier

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"mknet/shim/internal/binding"
	data "mknet/shim/pump"
	"mknet/shim/session"
	"mknet/shim/transport"
	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/spec/pump"
	"mknet/tests/netlab"
)

func TestCarriesAndLeavesInOrder(t *testing.T) {
	netlab.Clean(t)
	d, c := newDaemon(t), newChild(t)
	c.serve()
	s := start(t, d, c, func(cfg *Config) { cfg.Sealed = true })
	c.ping(t)
	st := s.Status()
	if st.State != "connected" || st.Lanes < 1 || st.Address != "172.30.0.2/30" || st.Counters.RxPackets == 0 || st.Counters.TxPackets == 0 {
		t.Errorf("status %+v", st)
	}
	s.stop(t)
	if len(d.unbound) != 1 || !strings.Contains(d.unbound[0], "NO-CARRIER") {
		t.Errorf("at UNBIND the TUN was %q: want one UNBIND, with every queue closed", d.unbound)
	}
}

func TestComesBackWithTheAgent(t *testing.T) {
	netlab.Clean(t)
	d, c := newDaemon(t), newChild(t)
	s := start(t, d, c, nil) // the child boots later
	netlab.Eventually(t, patience, func() error {
		if s.Status().LastError == "" {
			return errors.New("the shim has not tried yet")
		}
		return nil
	})
	for round := range 3 {
		c.serve()
		back := time.Now()
		select {
		case began := <-c.begun:
			t.Logf("round %d: session %s after the agent's return", round, began.Sub(back).Round(time.Millisecond))
		case <-time.After(patience):
			t.Fatal("the shim does not come back")
		}
		c.ping(t)
		d.answer(unreachable) // mknetd may be away meanwhile
		c.halt()
	}
	if n := s.Status().Counters; n.Sessions != 3 || n.RxPackets < 3 {
		t.Errorf("counters %+v, want those of 3 sessions together", n)
	}
	d.answer(nil)
	s.stop(t)
}

func TestKeepsCarryingWithoutTheDaemon(t *testing.T) {
	netlab.Clean(t)
	d, c := newDaemon(t), newChild(t)
	c.serve()
	s := start(t, d, c, nil)
	c.ping(t)
	d.answer(unreachable)
	c.ping(t)
	s.cancel()
	if err := s.end(t); !errors.Is(err, unreachable) {
		t.Errorf("end without mknetd: got %v, want the UNBIND's error", err)
	}
}

func TestWaitsForTheDaemon(t *testing.T) {
	netlab.Clean(t)
	d, c := newDaemon(t), newChild(t)
	c.serve()
	d.answer(unreachable)
	time.AfterFunc(300*time.Millisecond, func() { d.answer(nil) })
	s := start(t, d, c, nil)
	c.ping(t)
	s.stop(t)
}

func TestEndsForGood(t *testing.T) {
	stale := api.Errorf(api.StaleGeneration, "bound to sandbox-1@2")
	for _, tt := range []struct {
		name  string
		edit  func(*daemon, *child)
		shim  func(*Config)
		is    error
		as    any
		leave bool
	}{
		{name: "stale generation", edit: func(d *daemon, _ *child) { d.err = stale }, is: stale},
		{name: "wrong token", shim: func(c *Config) { c.Tokens.current[0]++ }, is: session.ErrAuthentication},
		{name: "other sandbox generation", shim: func(c *Config) { c.Request.Sandbox.Generation = "2" }, is: &pump.MismatchError{Field: pump.SandboxGeneration}},
		{name: "no multikernel transport", shim: func(c *Config) {
			c.Dial = func(context.Context, transport.Address) (conn, error) {
				return nil, &transport.DialError{Kind: transport.Unsupported, Err: errors.New("no")}
			}
		}, is: &transport.DialError{Kind: transport.Unsupported}},
		{name: "never reached", shim: func(c *Config) {
			c.ConnectTimeout = 100 * time.Millisecond
			c.Dial = func(context.Context, transport.Address) (conn, error) {
				return nil, &transport.DialError{Kind: transport.NoDevice, Err: errors.New("no")}
			}
		}, is: &transport.DialError{Kind: transport.NoDevice}},
		{name: "other interface", edit: func(d *daemon, _ *child) { d.edit = func(r *api.AttachReply) { r.Endpoint.IfName = "net1" } }, as: new(*binding.MismatchError)},
		{name: "other address", edit: func(d *daemon, _ *child) {
			d.edit = func(r *api.AttachReply) { r.Endpoint.Address = netip.MustParseAddr("10.0.0.1") }
		}, as: new(*binding.MismatchError)},
		{name: "other endpoint", edit: func(d *daemon, _ *child) {
			d.edit = func(r *api.AttachReply) { r.Endpoint.Generation = endpoint.Generation{1} }
		}, as: new(*binding.MismatchError)},
		{name: "other sandbox", edit: func(d *daemon, _ *child) {
			d.edit = func(r *api.AttachReply) {
				r.Endpoint.Binding = &endpoint.Binding{Sandbox: endpoint.Sandbox{ID: "x", Generation: "1"}}
			}
		}, as: new(*binding.MismatchError)},
		{name: "other count", edit: func(d *daemon, _ *child) { d.edit = func(r *api.AttachReply) { r.Queues++ } }, as: new(*binding.MismatchError)},
		{name: "other header", edit: func(d *daemon, _ *child) { d.edit = func(r *api.AttachReply) { r.VnetHdr = false } }, as: new(*binding.MismatchError)},
		{name: "unusable mtu", edit: func(d *daemon, _ *child) { d.ep.MTUBytes = 100 }, as: new(*binding.MismatchError), leave: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			netlab.Clean(t)
			d, c := newDaemon(t), newChild(t)
			if tt.edit != nil {
				tt.edit(d, c)
			}
			c.serve()
			err := start(t, d, c, tt.shim).end(t)
			if tt.is != nil && !errors.Is(err, tt.is) || tt.as != nil && !errors.As(err, tt.as) {
				t.Errorf("got %v, want %v%T", err, tt.is, tt.as)
			}
			if (len(d.unbound) != 0) != tt.leave {
				t.Errorf("%d UNBINDs; want one: %t (only of a BIND without an ATTACH)", len(d.unbound), tt.leave)
			}
		})
	}
}

func TestEndsWithItsBinding(t *testing.T) {
	netlab.Clean(t)
	for _, tt := range []struct {
		name string
		gone func(*daemon)
	}{
		{"deleted", func(d *daemon) { d.answer(api.Errorf(api.NotFound, "no such endpoint")) }},
		{"bound to another", func(d *daemon) {
			d.mu.Lock()
			d.ep.Binding = &endpoint.Binding{Sandbox: endpoint.Sandbox{ID: "sandbox-1", Generation: "2"}}
			d.mu.Unlock()
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d, c := newDaemon(t), newChild(t)
			c.serve()
			s := start(t, d, c, nil)
			c.ping(t)
			tt.gone(d)
			d.pod.Run(t, "ip", "link", "del", "eth0")
			if err := s.end(t); !errors.Is(err, binding.ErrGone) {
				t.Errorf("got %v, want ErrGone", err)
			}
		})
	}
}

// Without an agent the shim asks now and then whether it is still needed.
func TestEndsWithItsBindingWhileItDials(t *testing.T) {
	netlab.Clean(t)
	d, c := newDaemon(t), newChild(t)
	s := start(t, d, c, nil)
	netlab.Eventually(t, patience, func() error {
		if s.Status().State != "connecting" {
			return errors.New("the shim has not attached yet")
		}
		return nil
	})
	d.mu.Lock()
	d.ep.State = endpoint.Deleting
	d.mu.Unlock()
	if err := s.end(t); !errors.Is(err, binding.ErrGone) {
		t.Errorf("got %v, want ErrGone", err)
	}
}

// A TUN that is made again under a binding that stands is attached again.
func TestAttachesAgain(t *testing.T) {
	netlab.Clean(t)
	d, c := newDaemon(t), newChild(t)
	c.serve()
	s := start(t, d, c, nil)
	c.ping(t)
	d.mu.Lock() // the shim's BIND waits until the new one stands
	d.pod.Run(t, "ip", "link", "del", "eth0")
	d.makeTun()
	d.mu.Unlock()
	c.ping(t)
	s.stop(t)
	if d.attached != 2 {
		t.Errorf("attached %d times, want 2", d.attached)
	}
}

func TestBoundByTheRuntime(t *testing.T) {
	netlab.Clean(t)
	d, c := newDaemon(t), newChild(t)
	c.serve()
	s := start(t, d, c, func(cfg *Config) { cfg.Request.Nonce, cfg.KeepBound = strings.Repeat("1", 32), true })
	c.ping(t)
	s.stop(t)
	if len(d.unbound) != 0 {
		t.Error("UNBIND of a binding that is the runtime's")
	}
}

func TestDisplacedShimDoesNotComeBack(t *testing.T) {
	netlab.Clean(t)
	d, c := newDaemon(t), newChild(t)
	c.serve()
	first := start(t, d, c, nil)
	c.ping(t)
	client := &session.Client{
		Dial:     func(ctx context.Context) (conn, error) { return transport.Dial(ctx, c.url) },
		Identity: session.Identity{Sandbox: testSandbox, Endpoint: d.ep.Generation}, Token: testToken,
	}
	cfg := c.config
	cfg.Lanes, cfg.Windows = 1, cfg.Windows[:1]
	s, err := client.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	err = first.end(t)
	var closed *data.PeerClosedError
	if !errors.As(err, &closed) || closed.Reason != pump.Displaced {
		t.Errorf("got %v, want that the agent displaced it", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestTokenIsReplaced(t *testing.T) {
	netlab.Clean(t)
	d, c := newDaemon(t), newChild(t)
	held, single := testToken, true
	c.server.Credentials = func() (session.Credentials, error) {
		return session.Credentials{Identity: session.Identity{Sandbox: testSandbox}, Token: held, SingleUse: single}, nil
	}
	c.server.KeepToken = func(next pump.Token) error { held, single = next, false; return nil }
	c.serve()
	path := tokenFile(t)
	runOnce := func() {
		t.Helper()
		tokens, err := LoadTokens(path)
		if err != nil {
			t.Fatal(err)
		}
		s := start(t, d, c, func(cfg *Config) { cfg.Tokens = tokens })
		c.ping(t)
		s.stop(t)
		got, err := session.LoadToken(path)
		if err != nil || got != held || single {
			t.Errorf("file and agent hold the same token: %t, %v", got == held, err)
		}
		if _, err := os.Stat(path + nextSuffix); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the next token's file is left: %v", err)
		}
	}
	runOnce()
	if held == testToken {
		t.Fatal("the single-use token was not replaced")
	}
	runOnce()
	// A shim that died after the agent took the next token.
	next := session.NewToken()
	if err := session.ReplaceTokenFile(path+nextSuffix, next); err != nil {
		t.Fatal(err)
	}
	held = next
	runOnce()
	// A shim that died before.
	if err := session.ReplaceTokenFile(path+nextSuffix, session.NewToken()); err != nil {
		t.Fatal(err)
	}
	single = true
	runOnce()
}

func TestBackoff(t *testing.T) {
	var b backoff
	if d := b.delay(); d > 50*time.Millisecond {
		t.Errorf("first delay %s, want at most 50ms", d)
	}
	for range 20 {
		if d := b.delay(); d > maxDelay || d < firstDelay/2 {
			t.Errorf("delay %s, want at most %s", d, maxDelay)
		}
	}
	if d := b.delay(); d < maxDelay/2 {
		t.Errorf("delay after many attempts %s, want at least %s", d, maxDelay/2)
	}
	b.reset()
	if d := b.delay(); d > 50*time.Millisecond {
		t.Errorf("delay after reset %s, want at most 50ms", d)
	}
}
