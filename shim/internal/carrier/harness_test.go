package carrier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/shim/internal/binding"
	data "mknet/shim/pump"
	"mknet/shim/session"
	"mknet/shim/transport"
	"mknet/shim/tun"
	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
	"mknet/spec/pump"
	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

const patience = time.Minute

// daemon plays mknetd for one endpoint whose TUN eth0 is in pod.
type daemon struct {
	t   *testing.T
	pod *netlab.Namespace

	mu       sync.Mutex
	ep       endpoint.Endpoint
	err      error // what every call answers instead
	edit     func(*api.AttachReply)
	attached int
	unbound  []string // what `ip link` showed of the TUN at each UNBIND
}

func newDaemon(t *testing.T) *daemon {
	t.Helper()
	d := &daemon{t: t, pod: netlab.New(t)}
	d.ep = record(endpoint.NewGeneration())
	d.makeTun()
	return d
}

// record is an endpoint's record.
func record(gen endpoint.Generation) endpoint.Endpoint {
	return endpoint.Endpoint{
		Generation: gen, Attachment: endpoint.Attachment{Network: "net", ContainerID: "c1", IfName: "eth0"},
		Mode: endpoint.Multikernel, State: endpoint.Ready, Subnet: netip.MustParsePrefix("172.30.0.0/30"),
		Gateway: netip.MustParseAddr("172.30.0.1"), Address: netip.MustParseAddr("172.30.0.2"), MTUBytes: 1400,
	}
}

func (d *daemon) makeTun() {
	d.t.Helper()
	var err error
	d.pod.Do(d.t, func() { err = tun.Create("eth0") })
	if err != nil {
		d.t.Fatal(err)
	}
	d.pod.Run(d.t, "ip", "addr", "add", "172.30.0.1/30", "dev", "eth0")
	d.pod.Run(d.t, "ip", "link", "set", "eth0", "mtu", "1400", "up")
}

// answer makes every call fail with err; nil ends that.
func (d *daemon) answer(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err = err
}

func (d *daemon) Bind(_ context.Context, req api.BindRequest) (api.BindReply, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil {
		return api.BindReply{}, d.err
	}
	d.ep.Binding = &endpoint.Binding{Sandbox: req.Sandbox}
	return api.BindReply{Endpoint: d.ep, Nonce: strings.Repeat("0", 32)}, nil
}

func (d *daemon) Attach(_ context.Context, _ endpoint.Generation, req api.AttachRequest) (api.AttachReply, []*os.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil {
		return api.AttachReply{}, nil, d.err
	}
	if d.ep.Binding == nil { // the runtime's own BIND
		d.ep.Binding = &endpoint.Binding{Sandbox: req.Sandbox}
	}
	var files []*os.File
	var err error
	d.pod.Do(d.t, func() { files, err = openFiles("eth0", req.Queues) })
	if err != nil {
		return api.AttachReply{}, nil, err
	}
	d.attached++
	rep := api.AttachReply{Endpoint: d.ep, Queues: len(files), VnetHdr: true}
	if d.edit != nil {
		d.edit(&rep)
	}
	return rep, files, nil
}

// openFiles opens queues as descriptors that another process passed.
func openFiles(name string, n int) ([]*os.File, error) {
	queues, err := tun.Attach(name, n, true)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	for _, q := range queues {
		var fd int
		_ = q.SyscallConn().Control(func(from uintptr) { fd, err = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 0) })
		if err != nil {
			return nil, err
		}
		files = append(files, os.NewFile(uintptr(fd), "queue"))
	}
	return files, tun.CloseAll(queues)
}

func (d *daemon) Unbind(_ context.Context, _ endpoint.Generation, req api.UnbindRequest) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil {
		return d.err
	}
	if d.ep.Binding == nil || d.ep.Binding.Sandbox != req.Sandbox {
		return api.Errorf(api.StaleGeneration, "not bound to %s", req.Sandbox)
	}
	d.ep.Binding = nil
	out, err := d.pod.Try("ip", "link", "show", "eth0")
	d.unbound = append(d.unbound, fmt.Sprint(out, err))
	return nil
}

func (d *daemon) GetEndpoint(context.Context, endpoint.Generation) (endpoint.Endpoint, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.ep, d.err
}

// child plays mk-agent in a namespace of its own.
type child struct {
	*netlab.Namespace
	t      *testing.T
	url    transport.Address
	server *session.Server

	mu     sync.Mutex
	queues []*tun.Queue
	config pump.LinkConfig
	stop   func()
	begun  chan time.Time // each confirmed session
}

var (
	testSandbox = endpoint.Sandbox{ID: "sandbox-1", Generation: "1"}
	testToken   = pump.Token{1, 2, 3}
)

func newChild(t *testing.T) *child {
	t.Helper()
	a, err := transport.Parse("unix://" + filepath.Join(t.TempDir(), "agent.sock"))
	if err != nil {
		t.Fatal(err)
	}
	c := &child{Namespace: netlab.New(t), t: t, url: a, begun: make(chan time.Time, 1024), stop: func() {}}
	c.server = &session.Server{Handler: c, Log: slog.New(slog.DiscardHandler), Credentials: func() (session.Credentials, error) {
		return session.Credentials{Identity: session.Identity{Sandbox: testSandbox}, Token: testToken}, nil
	}}
	c.Do(t, func() { c.queues, err = tun.Attach("mkn0", 2, true) })
	if err != nil {
		t.Fatal(err)
	}
	if err := c.queues[0].Steer(); err != nil {
		t.Logf("one lane only: %v", err)
	}
	t.Cleanup(func() {
		c.halt()
		if err := tun.CloseAll(c.queues); err != nil {
			t.Error(err)
		}
	})
	return c
}

// serve listens until halt is called.
func (c *child) serve() {
	c.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l, err := transport.Listen(ctx, c.url, transport.Options{})
	if err != nil {
		cancel()
		c.t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- c.server.Serve(ctx, l) }()
	c.stop = func() {
		cancel()
		if err := <-done; err != nil {
			c.t.Error(err)
		}
		c.stop = func() {}
	}
}

func (c *child) halt() { c.stop() }

// Configure is part of session.Handler.
func (c *child) Configure(_ context.Context, cfg pump.LinkConfig) (pump.Ack, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if cfg.Address != c.config.Address {
		c.ip("addr", "replace", cfg.Address.String(), "dev", "mkn0")
		c.ip("link", "set", "mkn0", "mtu", fmt.Sprint(cfg.MTUBytes), "up")
	}
	c.config = cfg
	return pump.Ack{VnetHdr: true, Lanes: cfg.Lanes, Windows: transport.Windows(cfg.Lanes, false)}, nil
}

// ip is an ip command inside the child.
func (c *child) ip(args ...string) { c.Namespace.Run(c.t, "ip", args...) }

// Run is part of session.Handler.
func (c *child) Run(ctx context.Context, s *session.Session) error {
	c.begun <- time.Now()
	return s.Carry(ctx, c.queues, 0, new(data.Counters))
}

// shim is a Carrier that runs.
type shim struct {
	*Carrier
	cancel context.CancelFunc
	done   chan error
}

func tokenFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "token")
	if err := session.CreateTokenFile(path, testToken); err != nil {
		t.Fatal(err)
	}
	return path
}

func start(t *testing.T, d *daemon, c *child, edit func(*Config)) *shim {
	t.Helper()
	tokens, err := LoadTokens(tokenFile(t))
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Daemon: d, Request: binding.Request{Select: api.Selector{Generation: d.ep.Generation}, Sandbox: testSandbox, Queues: 2},
		Agent: c.url, Dial: transport.Dial, Tokens: tokens, ChildLink: "mkn0", Keepalive: 5 * time.Second, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
	if edit != nil {
		edit(&cfg)
	}
	s := &shim{Carrier: New(cfg), done: make(chan error, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	go func() { s.done <- s.Run(ctx, func(endpoint.Endpoint) {}) }()
	t.Cleanup(cancel)
	return s
}

// end waits for the shim to end.
func (s *shim) end(t *testing.T) error {
	t.Helper()
	select {
	case err := <-s.done:
		return err
	case <-time.After(patience):
		t.Fatalf("the shim does not end; it is %+v", s.Status())
		return nil
	}
}

func (s *shim) stop(t *testing.T) {
	t.Helper()
	s.cancel()
	if err := s.end(t); err != nil {
		t.Errorf("orderly end: %v", err)
	}
}

// ping waits until the gateway answers in the child.
func (c *child) ping(t *testing.T) {
	t.Helper()
	netlab.Eventually(t, patience, func() error {
		out, err := c.Try("ping", "-c1", "-W1", "172.30.0.1")
		if err != nil {
			return fmt.Errorf("%s: %w", out, err)
		}
		return nil
	})
}

var unreachable = &client.UnreachableError{Addr: "test", Reason: client.Refused, Err: errors.New("down")}

type conn = net.Conn
