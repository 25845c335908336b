package session

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"mknet/spec/endpoint"
	"mknet/spec/pump"
)

// pipes is a listener whose connections are net.Pipe: they work inside a
// synctest bubble.
type pipes struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.once.Do(func() { close(p.done) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }

func (p *pipes) Dial(ctx context.Context) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case p.conns <- theirs:
		return ours, nil
	case <-p.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// recorder is a Handler that remembers what happened to it.
type recorder struct {
	mu      sync.Mutex
	configs []pump.LinkConfig
	events  []string
	running chan *Session // each session that began
	ended   chan error    // the cause of each that ended
	refuse  error
	lanes   int // what the agent can do; 0: 1
}

func newRecorder() *recorder {
	return &recorder{running: make(chan *Session, 64), ended: make(chan error, 64)}
}

func (r *recorder) Configure(_ context.Context, cfg pump.LinkConfig) (pump.Ack, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.configs = append(r.configs, cfg)
	r.events = append(r.events, "configure "+cfg.Link)
	if r.refuse != nil {
		return pump.Ack{}, r.refuse
	}
	lanes := min(cfg.Lanes, max(r.lanes, 1))
	return pump.Ack{VnetHdr: true, Offloads: 0x0f, Lanes: lanes, Windows: cfg.Windows[:lanes]}, nil
}

func (r *recorder) Run(ctx context.Context, s *Session) error {
	r.running <- s
	// A peer that goes away ends the session, as the pump does.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(ctx, func() { _ = s.Lanes[0].Conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := io.Copy(s.Lanes[0].Conn, s.Lanes[0].Conn); ctx.Err() == nil {
		cancel(errors.Join(io.EOF, err))
	}
	<-ctx.Done()
	r.mu.Lock()
	r.events = append(r.events, "end "+s.Config.Link)
	r.mu.Unlock()
	r.ended <- context.Cause(ctx)
	return context.Cause(ctx)
}

func (r *recorder) seen() (configs int, events []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.configs), append([]string(nil), r.events...)
}

func testIdentity(t testing.TB) Identity {
	g, err := endpoint.ParseGeneration("0123456789abcdef0123456789abcdef")
	if err != nil {
		t.Fatal(err)
	}
	return Identity{Sandbox: endpoint.Sandbox{ID: "sandbox-1", Generation: "7"}, Endpoint: g}
}

func testOffer() pump.LinkConfig {
	return pump.LinkConfig{
		Link: "mkn0", Address: netip.MustParsePrefix("172.30.0.2/30"), Gateway: netip.MustParseAddr("172.30.0.1"),
		MTUBytes: 1400, VnetHdr: true, Offloads: 0x6f, Lanes: 2, Windows: []pump.Window{{Bytes: 1 << 20, Messages: 4096}, {Bytes: 256 << 10, Messages: 1024}},
		Keepalive: pump.Milliseconds(5 * time.Second),
	}
}

var testToken = pump.Token{0: 1, 31: 2}

// agent is a server under test and what it needs.
type agent struct {
	srv *Server
	*recorder
	ctx    context.Context
	cancel context.CancelFunc
	served chan error
}

// startAgent serves l until the test ends or stop is called.
func startAgent(t testing.TB, l net.Listener, edit func(*Server, *recorder)) *agent {
	t.Helper()
	r := newRecorder()
	creds := Credentials{Identity: testIdentity(t), Token: testToken}
	a := &agent{recorder: r, served: make(chan error, 1), srv: &Server{
		Credentials: func() (Credentials, error) { return creds, nil },
		Handler:     r,
		Log:         slog.New(slog.DiscardHandler),
	}}
	if edit != nil {
		edit(a.srv, r)
	}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	t.Cleanup(a.cancel)
	go func() { a.served <- a.srv.Serve(a.ctx, l) }()
	return a
}

// stop ends the server and waits for it.
func (a *agent) stop(t testing.TB) {
	t.Helper()
	a.cancel()
	select {
	case err := <-a.served:
		if err != nil {
			t.Errorf("Serve: %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("Serve does not return after its context ended")
	}
}

func unixListener(t testing.TB) (net.Listener, func(context.Context) (net.Conn, error)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	return l, func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}
}

func testClient(t testing.TB, dial func(context.Context) (net.Conn, error)) *Client {
	return &Client{Dial: dial, Identity: testIdentity(t), Token: testToken}
}

func wait[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(time.Minute):
		t.Fatalf("no %s within a minute", what)
		panic("unreachable")
	}
}
