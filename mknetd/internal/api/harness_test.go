package api_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"mknet/mknetd/internal/api"
	specapi "mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

const patience = 60 * time.Second

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == callAs {
		callAsMain(os.Args[2])
		return
	}
	netlab.Main(m)
}

// fake is an engine whose answers a test chooses. A nil function gives the zero
// answer.
type fake struct {
	create    func(context.Context, specapi.CreateRequest, *os.File, endpoint.Process) (endpoint.Endpoint, error)
	get       func(context.Context, endpoint.Generation) (endpoint.Endpoint, error)
	list      func(context.Context, api.Filter) ([]endpoint.Endpoint, error)
	check     func(context.Context, endpoint.Generation, specapi.Selector) (specapi.CheckReply, error)
	del       func(context.Context, specapi.DeleteRequest, *os.File, endpoint.Process) (specapi.DeleteReply, error)
	bind      func(context.Context, specapi.BindRequest, *os.File, endpoint.Process) (specapi.BindReply, error)
	unbind    func(context.Context, endpoint.Generation, specapi.UnbindRequest, endpoint.Process) error
	attach    func(context.Context, endpoint.Generation, specapi.AttachRequest, endpoint.Process) (specapi.AttachReply, []*os.File, error)
	provision func(context.Context, specapi.ProvisionRequest, endpoint.Process) (specapi.BindReply, error)
	release   func(context.Context, specapi.ReleaseRequest, endpoint.Process) (specapi.DeleteReply, error)
	counters  func(context.Context, endpoint.Generation) (specapi.CountersReply, error)
	report    func(context.Context, endpoint.Generation, specapi.CountersReport, endpoint.Process) error
	gc        func(context.Context, specapi.GCRequest, endpoint.Process) (specapi.GCReply, error)

	events []specapi.Event
	follow func(context.Context, specapi.EventsAfter, func(specapi.Event) error) error

	traces sync.WaitGroup // those that have begun and are not closed

	cleanup func() // after the server has ended, before leaks are counted
}

func (f *fake) Create(ctx context.Context, req specapi.CreateRequest, ns *os.File, peer endpoint.Process) (endpoint.Endpoint, error) {
	if f.create == nil {
		closeNS(ns)
		return sample(req.Attachment), nil
	}
	return f.create(ctx, req, ns, peer)
}

func (f *fake) Get(ctx context.Context, gen endpoint.Generation) (endpoint.Endpoint, error) {
	if f.get == nil {
		ep := sample(endpoint.Attachment{Network: "n", ContainerID: "c", IfName: "eth0"})
		ep.Generation = gen
		return ep, nil
	}
	return f.get(ctx, gen)
}

func (f *fake) List(ctx context.Context, filter api.Filter) ([]endpoint.Endpoint, error) {
	if f.list == nil {
		return nil, nil
	}
	return f.list(ctx, filter)
}

func (f *fake) Check(ctx context.Context, gen endpoint.Generation, sel specapi.Selector) (specapi.CheckReply, error) {
	if f.check == nil {
		ep, err := f.Get(ctx, gen)
		return specapi.CheckReply{Endpoint: ep}, err
	}
	return f.check(ctx, gen, sel)
}

func (f *fake) Delete(ctx context.Context, req specapi.DeleteRequest, ns *os.File, peer endpoint.Process) (specapi.DeleteReply, error) {
	if f.del == nil {
		closeNS(ns)
		return specapi.DeleteReply{}, nil
	}
	return f.del(ctx, req, ns, peer)
}

func (f *fake) Bind(ctx context.Context, req specapi.BindRequest, ns *os.File, peer endpoint.Process) (specapi.BindReply, error) {
	if f.bind == nil {
		closeNS(ns)
		return bound(req.Selector.Generation, req.Sandbox), nil
	}
	return f.bind(ctx, req, ns, peer)
}

func (f *fake) Unbind(ctx context.Context, gen endpoint.Generation, req specapi.UnbindRequest, peer endpoint.Process) error {
	if f.unbind == nil {
		return nil
	}
	return f.unbind(ctx, gen, req, peer)
}

func (f *fake) Attach(ctx context.Context, gen endpoint.Generation, req specapi.AttachRequest, peer endpoint.Process) (specapi.AttachReply, []*os.File, error) {
	if f.attach == nil {
		return specapi.AttachReply{}, nil, specapi.Errorf(specapi.FailedPrecondition, "not bound")
	}
	return f.attach(ctx, gen, req, peer)
}

func (f *fake) Provision(ctx context.Context, req specapi.ProvisionRequest, peer endpoint.Process) (specapi.BindReply, error) {
	if f.provision == nil {
		rep := bound(endpoint.NewGeneration(), req.Sandbox)
		rep.Endpoint.Attachment = req.Attachment
		return rep, nil
	}
	return f.provision(ctx, req, peer)
}

func (f *fake) Release(ctx context.Context, req specapi.ReleaseRequest, peer endpoint.Process) (specapi.DeleteReply, error) {
	if f.release == nil {
		return specapi.DeleteReply{Deleted: req.Generation}, nil
	}
	return f.release(ctx, req, peer)
}

func (f *fake) Counters(ctx context.Context, gen endpoint.Generation) (specapi.CountersReply, error) {
	if f.counters == nil {
		return specapi.CountersReply{Generation: gen}, nil
	}
	return f.counters(ctx, gen)
}

func (f *fake) ReportCounters(ctx context.Context, gen endpoint.Generation, req specapi.CountersReport, peer endpoint.Process) error {
	if f.report == nil {
		return nil
	}
	return f.report(ctx, gen, req, peer)
}

func (f *fake) GC(ctx context.Context, req specapi.GCRequest, peer endpoint.Process) (specapi.GCReply, error) {
	if f.gc == nil {
		return specapi.GCReply{}, nil
	}
	return f.gc(ctx, req, peer)
}

func (f *fake) Allocate(_ context.Context, req specapi.LeaseRequest, _ endpoint.Process) (specapi.Lease, error) {
	return specapi.Lease{ID: endpoint.NewGeneration().String(), Pool: "pods", Owner: req.Pod.Namespace + "/" + req.Pod.Name, ExpiresAt: time.Now().UTC()}, nil
}

func (f *fake) ReleaseLease(context.Context, string, endpoint.Process) error { return nil }

func (f *fake) Inventory(context.Context) (specapi.Inventory, error) {
	return specapi.Inventory{Items: []specapi.InventoryItem{{Kind: "veth", Object: "mkv0", Where: endpoint.InHost, Status: specapi.Recorded}}}, nil
}

func (f *fake) Explain(_ context.Context, req specapi.WayRequest) (specapi.Explanation, error) {
	a := netip.MustParseAddr("192.0.2.1")
	return specapi.Explanation{
		From: a, To: a, Protocol: "tcp", Port: req.Port, SourcePort: req.SourcePort, SizeBytes: req.SizeBytes, Verdict: specapi.Dropped, Because: "r",
		Way: []specapi.ExplainStep{{Where: endpoint.InHost, Object: "o", Outcome: specapi.Dropped, Why: "w", Inspect: "i", Rules: []specapi.Rule{{Chain: "c", Number: 1, Text: "-j DROP", Matches: "yes"}}}},
	}, nil
}

func (f *fake) Events(context.Context, specapi.EventsAfter) specapi.EventList {
	if f.events == nil {
		return specapi.EventList{Instance: "i"}
	}
	return specapi.EventList{Instance: "i", Events: f.events}
}

func (f *fake) Follow(ctx context.Context, after specapi.EventsAfter, send func(specapi.Event) error) error {
	if f.follow == nil {
		return nil
	}
	return f.follow(ctx, after, send)
}

func (f *fake) Health(context.Context) specapi.Health {
	return specapi.Health{Ready: true, Version: "t"}
}

func (f *fake) Config(context.Context) specapi.DaemonConfig {
	return specapi.DaemonConfig{Version: "t"}
}

func closeNS(f *os.File) {
	if f != nil {
		_ = f.Close()
	}
}

// sample is a whole endpoint.
func sample(a endpoint.Attachment) endpoint.Endpoint {
	gen := endpoint.NewGeneration()
	ad := endpoint.DefaultPools.At(5)
	now := time.Now().UTC()
	return endpoint.Endpoint{
		Generation: gen, Attachment: a, Mode: endpoint.Multikernel, State: endpoint.Ready,
		Namespace: endpoint.Namespace{BootID: "b", Cookie: 7, Path: "/run/netns/a"}, Slot: 5,
		Subnet: ad.Subnet, Gateway: ad.Gateway, Address: ad.Child, TransitHost: ad.TransitHost, TransitPeer: ad.TransitPeer,
		HostLink: gen.HostLink(), PeerLink: endpoint.PeerLink(0), Chain: gen.Chain(), MTUBytes: 1400, Egress: "ens4", Firewall: "nft",
		HostAccess: endpoint.Deny, PodAccess: endpoint.Deny, CreatedAt: now, UpdatedAt: now,
	}
}

func bound(gen endpoint.Generation, sb endpoint.Sandbox) specapi.BindReply {
	ep := sample(endpoint.Attachment{Network: "n", ContainerID: "c", IfName: "eth0"})
	if !gen.IsZero() {
		ep.Generation = gen
	}
	ep.Binding = &endpoint.Binding{Sandbox: sb, BoundAt: time.Now().UTC()}
	return specapi.BindReply{Endpoint: ep, Nonce: strings.Repeat("ab", 16)}
}

// served is a running server.
type served struct {
	socket string
	stop   context.CancelFunc
	ended  chan error
	log    *lines
}

// serve runs a server until the test ends, and then compares descriptors and
// goroutines with before.
func serve(t *testing.T, f *fake, change ...func(*api.Config)) *served {
	t.Helper()
	checkLeaks(t)
	dir := t.TempDir()
	s := &served{socket: filepath.Join(dir, "mknetd.sock"), ended: make(chan error, 1), log: &lines{}}
	cfg := api.Config{Engine: f, Log: slog.New(slog.NewTextHandler(s.log, &slog.HandlerOptions{Level: slog.LevelDebug})), Socket: s.socket, SocketGID: -1}
	for _, c := range change {
		c(&cfg)
	}
	s.socket = cfg.Socket
	srv, err := api.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := srv.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	var ctx context.Context
	ctx, s.stop = context.WithCancel(context.Background())
	go func() { s.ended <- srv.Serve(ctx) }()
	t.Cleanup(func() {
		s.stop()
		select {
		case err := <-s.ended:
			if err != nil {
				t.Errorf("serve: %v", err)
			}
		case <-time.After(patience):
			t.Error("serve did not end")
		}
		if f.cleanup != nil {
			f.cleanup()
		}
		if t.Failed() {
			t.Logf("log:\n%s", s.log)
		}
	})
	return s
}

func (s *served) client(t *testing.T) *client.Client {
	t.Helper()
	c, err := client.New("unix://" + s.socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func (s *served) dial(t *testing.T) net.Conn {
	t.Helper()
	conn, err := net.Dial("unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// ask sends raw text and returns the answer.
func (s *served) ask(t *testing.T, text string) (int, http.Header, []byte) {
	t.Helper()
	conn, err := net.Dial("unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return resp.StatusCode, resp.Header, body
}

// do sends one request.
func (s *served) do(t *testing.T, method, path, body string) (int, specapi.Error, []byte) {
	t.Helper()
	text := method + " " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
	if body != "" {
		text += "Content-Length: " + itoa(len(body)) + "\r\n"
	}
	status, _, out := s.ask(t, text+"\r\n"+body)
	var e specapi.Error
	if status >= 400 {
		if err := json.Unmarshal(out, &e); err != nil {
			t.Fatalf("%s %s: status %d with %q", method, path, status, out)
		}
	}
	return status, e, out
}

// lines is a log that tests can read.
type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// shared is a value that the server's goroutines and the test both use.
type shared[T any] struct {
	mu sync.Mutex
	v  T
}

func (s *shared[T]) set(v T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.v = v
}

func (s *shared[T]) get() T {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.v
}

// checkLeaks fails the test when it leaves descriptors or goroutines behind. Call
// it before anything that is to be cleaned up.
func checkLeaks(t *testing.T) {
	t.Helper()
	fds, goroutines := countFDs(t), runtime.NumGoroutine()
	t.Cleanup(func() {
		deadline := time.Now().Add(20 * time.Second)
		for countFDs(t) > fds || runtime.NumGoroutine() > goroutines {
			if time.Now().After(deadline) {
				buf := make([]byte, 1<<20)
				t.Errorf("leak: %d descriptors, before %d; %d goroutines, before %d\n%s", countFDs(t), fds, runtime.NumGoroutine(), goroutines, buf[:runtime.Stack(buf, true)])
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
}

// countFDs leaves the runtime's own (epoll, eventfd) out: they come once and stay.
func countFDs(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range entries {
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.Contains(target, "anon_inode:[event") {
			n++
		}
	}
	return n
}
