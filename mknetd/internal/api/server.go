package api

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"mknet/mknetd/internal/drain"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// undoWait is how long Serve waits for calls that it has broken off. It must
// exceed the engine's longest undo.
const undoWait = 20 * time.Second

// maxHeaderBytes bounds a request's head; ours have a few hundred bytes.
const maxHeaderBytes = 16 << 10

// Config is what New needs.
type Config struct {
	Engine Engine
	Log    *slog.Logger
	Socket string // absolute path of the Unix socket
	// SocketGID is the group whose members may call besides root; below 0: none.
	SocketGID int
	TCP       *TCP // nil: no TCP
	// Inherited are the sockets of the server before, instead of new ones.
	Inherited *Sockets
	Limits    Limits
	// Observe is told of each answered call: its route ("GET /v1/endpoints", or
	// "other"), the error's code (empty for none) and how long it took, below 0 for
	// a stream. nil: nobody.
	Observe func(route, code string, took time.Duration)
	// Metrics answers GET /metrics; nil: there are none.
	Metrics http.Handler
}

// Sockets are listening sockets on their way from one daemon to the next.
type Sockets struct {
	Unix *os.File
	TCP  *os.File // nil: no TCP
}

// TCP is the optional listener for CNI verbs and reads from other hosts.
type TCP struct {
	Address string // host:port
	// TLS must carry a certificate and the CAs of callers; the rest is set by New.
	TLS *tls.Config
}

// Server serves one engine. Make it with New, Listen, then Serve.
type Server struct {
	engine Engine
	log    *slog.Logger
	cfg    Config
	limits Limits

	changes, reads, checks, surveys *lane

	unix *net.UnixListener
	tcp  net.Listener
	file os.FileInfo // the socket's file, to remove only our own

	conns gauge // open connections
	calls gauge // at work

	followers gauge         // streams of events
	ending    chan struct{} // closed when Serve is told to end

	handedOver atomic.Bool // the sockets live on elsewhere

	turnedAway gauge // callers that are being told so
	closing    sync.Once
}

// New checks the configuration; nothing is opened.
func New(cfg Config) (*Server, error) {
	if cfg.Engine == nil || cfg.Log == nil {
		return nil, errors.New("api server: needs an engine and a log")
	}
	l := cfg.Limits.withDefaults()
	s := &Server{
		engine: cfg.Engine, log: cfg.Log, cfg: cfg, limits: l,
		changes: newLane("changes", l.Changes, l.QueuedEach, l.QueueWait, l.Change),
		reads:   newLane("reads", l.Reads, l.QueuedEach, l.QueueWait, l.Read),
		checks:  newLane("checks", l.Reads, l.QueuedEach, l.QueueWait, l.Read),
		surveys: newLane("surveys", l.Surveys, l.QueuedEach, l.QueueWait, l.Survey),
		ending:  make(chan struct{}),
	}
	if t := cfg.TCP; t != nil {
		if t.TLS == nil || t.TLS.ClientCAs == nil || len(t.TLS.Certificates) == 0 && t.TLS.GetCertificate == nil {
			return nil, errors.New("tcp listener: needs a certificate and the CAs of its callers: it serves mutual TLS only")
		}
		t.TLS = t.TLS.Clone()
		t.TLS.ClientAuth = tls.RequireAndVerifyClientCert
		t.TLS.MinVersion = tls.VersionTLS13
		t.TLS.NextProtos = []string{"http/1.1"}
	}
	return s, nil
}

// Listen makes the sockets. From here on callers may connect; they are answered
// once Serve runs.
func (s *Server) Listen(ctx context.Context) error {
	var err error
	if in := s.cfg.Inherited; in != nil {
		s.unix, s.tcp, err = inherit(in, s.cfg.Socket)
	} else {
		s.unix, err = listenUnix(ctx, s.cfg.Socket, s.cfg.SocketGID)
	}
	if err != nil {
		return err
	}
	if s.file, err = os.Lstat(s.cfg.Socket); err != nil {
		return errors.Join(&SocketError{Path: s.cfg.Socket, Reason: "look at it", Err: err}, s.Close())
	}
	if t := s.cfg.TCP; t != nil && s.tcp == nil {
		tcp, err := new(net.ListenConfig).Listen(ctx, "tcp", t.Address)
		if err != nil {
			return errors.Join(fmt.Errorf("tcp listener %s: %w", t.Address, err), s.Close())
		}
		s.tcp = tcp
	}
	return nil
}

// Sockets returns descriptors of the sockets, which the caller closes.
func (s *Server) Sockets() (*Sockets, error) {
	u, err := s.unix.File()
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", s.cfg.Socket, err)
	}
	out := &Sockets{Unix: u}
	if t, ok := s.tcp.(*net.TCPListener); ok {
		if out.TCP, err = t.File(); err != nil {
			return nil, errors.Join(fmt.Errorf("tcp listener: %w", err), u.Close())
		}
	}
	return out, nil
}

// HandOver says that the sockets live on with who has the descriptors: the end of
// Serve leaves the socket's file, and callers who were not answered yet wait for
// the next server. Calls at work get Limits.HandOver.
func (s *Server) HandOver() { s.handedOver.Store(true) }

// TCPAddr is where the TCP listener listens; nil when there is none.
func (s *Server) TCPAddr() net.Addr {
	if s.tcp == nil {
		return nil
	}
	return s.tcp.Addr()
}

// Close stops listening and removes the socket if it is still ours. Serve does
// it; only a server that never served needs it. It may be called twice.
func (s *Server) Close() error {
	var err error
	s.closing.Do(func() {
		if s.unix != nil {
			// First the file: who finds it can still connect and be answered.
			if now, statErr := os.Lstat(s.cfg.Socket); !s.handedOver.Load() && statErr == nil && s.file != nil && os.SameFile(now, s.file) {
				err = os.Remove(s.cfg.Socket)
			}
			err = errors.Join(err, ignoreClosed(s.unix.Close()))
		}
		if s.tcp != nil {
			err = errors.Join(err, ignoreClosed(s.tcp.Close()))
		}
	})
	return err
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Serve answers callers until ctx ends. Then it stops listening, lets the calls
// at work finish for Limits.Drain, and breaks off what is left. It returns when no
// call is at work any more; nil when ctx was the reason.
func (s *Server) Serve(ctx context.Context) error {
	base, breakOff := context.WithCancelCause(context.WithoutCancel(ctx))
	defer breakOff(nil)
	srv := &http.Server{
		Handler:           http.HandlerFunc(s.handle),
		ReadHeaderTimeout: s.limits.Header,
		IdleTimeout:       s.limits.Idle,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		BaseContext:       func(net.Listener) context.Context { return base },
		ConnContext:       withConn,
		Protocols:         new(http.Protocols),
	}
	srv.Protocols.SetHTTP1(true)
	callers := drain.Watch(srv)

	ended := make(chan error, 2)
	var serving sync.WaitGroup
	serving.Go(func() { ended <- srv.Serve(&unixListener{s}) })
	if s.tcp != nil {
		serving.Go(func() { ended <- srv.Serve(tls.NewListener(&tcpListener{s.tcp, s}, s.cfg.TCP.TLS)) })
	}
	var cause error
	select {
	case <-ctx.Done():
	case cause = <-ended: // a listener failed by itself
	}
	close(s.ending) // streams end by themselves
	closeErr := s.Close()
	drainFor := s.limits.Drain
	if s.handedOver.Load() {
		drainFor = min(drainFor, s.limits.HandOver)
	}
	atWork, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainFor)
	defer cancel()
	serving.Wait()
	callers.Wait()
	err := srv.Shutdown(atWork)
	deadline, _ := atWork.Deadline()
	if errors.Is(err, context.DeadlineExceeded) || s.conns.wait(time.Until(deadline)) > 0 {
		s.log.Warn("calls are still at work, breaking off", "after", drainFor.String())
		breakOff(errors.New("mknetd is ending"))
		closeErr = errors.Join(closeErr, ignoreClosed(srv.Close()))
	}
	// Calls that were broken off undo what they began, under the engine's own
	// time-outs; this bound is only for a call that hangs.
	s.turnedAway.wait(2 * lingerTime)
	if n := s.calls.wait(undoWait); n > 0 {
		closeErr = errors.Join(closeErr, fmt.Errorf("%d calls did not end within %s", n, undoWait))
	}
	if errors.Is(cause, http.ErrServerClosed) {
		cause = nil
	}
	return errors.Join(cause, closeErr)
}

// unixListener lets in whoever may call, as a passConn.
type unixListener struct{ s *Server }

func (l *unixListener) Addr() net.Addr { return l.s.unix.Addr() }
func (l *unixListener) Close() error   { return l.s.Close() }

func (l *unixListener) Accept() (net.Conn, error) {
	for {
		c, err := l.s.unix.AcceptUnix()
		if err != nil {
			return nil, err
		}
		who, ok, err := admit(c, l.s.cfg.SocketGID)
		switch {
		case err != nil:
			e := toError(fmt.Errorf("who is calling: %w", err))
			l.s.turnAway(c, e, e.Code.HTTPStatus())
		case !ok:
			l.s.log.Warn("caller refused", "peerPid", who.PID, "peerUid", who.UID, "peerComm", who.Comm)
			l.s.turnAway(c, api.Errorf(api.FailedPrecondition, "uid %d may not call mknetd: only root and the configured socketGroup may", who.UID), http.StatusForbidden)
		case l.s.conns.add(1) > l.s.limits.Conns:
			l.s.conns.add(-1)
			l.s.turnAway(c, api.Retryablef(api.ResourceExhausted, "%d connections are open: try again later", l.s.limits.Conns), http.StatusTooManyRequests)
		default:
			return &passConn{UnixConn: c, peer: who, onEnd: func() { l.s.conns.add(-1) }}, nil
		}
	}
}

// Callers that are turned away are listened to for a moment, so that they read the
// reason instead of failing to write their request; not so many that it matters.
const (
	lingerMax  = 64
	lingerTime = time.Second
)

// turnAway answers a connection without looking at what it asks. The reply fits
// into the socket's buffer, so that it does not block the listener.
func (s *Server) turnAway(c *net.UnixConn, e *api.Error, status int) {
	_ = c.SetDeadline(time.Now().Add(lingerTime))
	_, _ = c.Write(errorReply(status, e))
	if s.turnedAway.add(1) > lingerMax {
		_ = c.Close()
		s.turnedAway.add(-1)
		return
	}
	_ = c.CloseWrite()
	go func() { // Serve waits for it
		defer s.turnedAway.add(-1)
		_, _ = io.Copy(io.Discard, c)
		_ = c.Close()
	}()
}

// tcpListener counts connections like those of the Unix socket.
type tcpListener struct {
	net.Listener
	s *Server
}

func (l *tcpListener) Close() error { return ignoreClosed(l.Listener.Close()) }

func (l *tcpListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.s.conns.add(1) > l.s.limits.Conns {
			l.s.conns.add(-1)
			_ = c.Close() // before the handshake there is no way to say why
			continue
		}
		return &countedConn{Conn: c, s: l.s}, nil
	}
}

type countedConn struct {
	net.Conn
	s    *Server
	once sync.Once
}

func (c *countedConn) Close() error {
	c.once.Do(func() { c.s.conns.add(-1) })
	return c.Conn.Close()
}

// gauge counts calls or connections. Unlike a WaitGroup it may be waited for while
// calls still begin, and with a bound.
type gauge struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // made by wait, closed when n is 0
}

func (g *gauge) add(n int) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n += n
	if g.n == 0 && g.idle != nil {
		close(g.idle)
		g.idle = nil
	}
	return g.n
}

// wait returns how many there still are after the limit.
func (g *gauge) wait(limit time.Duration) int {
	g.mu.Lock()
	if g.n == 0 {
		g.mu.Unlock()
		return 0
	}
	if g.idle == nil {
		g.idle = make(chan struct{})
	}
	idle := g.idle
	g.mu.Unlock()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-idle:
		return 0
	case <-timer.C:
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.n
}

type connKey struct{}

// withConn makes the connection known to the handlers of its requests.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// callerOf returns the connection of a request, nil where it came by TCP, and who
// is calling.
func callerOf(r *http.Request) (*passConn, endpoint.Process) {
	if c, ok := r.Context().Value(connKey{}).(*passConn); ok {
		return c, c.peer
	}
	who := endpoint.Process{Comm: "tls"}
	if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		who.Comm = "tls:" + printableName(r.TLS.PeerCertificates[0].Subject.CommonName)
	}
	return nil, who
}

// printableName bounds a name from a certificate for logs and audit events.
func printableName(s string) string {
	b := []byte(s)
	if len(b) > 64 {
		b = b[:64]
	}
	for i, c := range b {
		if c <= ' ' || c > '~' {
			b[i] = '?'
		}
	}
	return string(b)
}
