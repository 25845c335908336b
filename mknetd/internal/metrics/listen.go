package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"time"

	"mknet/mknetd/internal/drain"
	"mknet/spec/api"
)

// ParseAddress reads where the listener is to be: an IP address of the loopback
// interface and a port. Names are refused too: what they mean may change.
func ParseAddress(s string) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(s)
	switch {
	case err != nil:
		return a, fmt.Errorf("%q must be an IP address and a port, such as 127.0.0.1:9464", s)
	case !a.Addr().IsLoopback():
		return a, fmt.Errorf("%q is not a loopback address: metrics go in clear and to everybody who can connect (let a proxy with TLS stand before it, or scrape the API's TCP listener)", s)
	}
	return a, nil
}

// Listener serves /metrics, /healthz and /readyz on the loopback interface.
type Listener struct {
	listener net.Listener
	server   *http.Server
	callers  *drain.Callers
	ended    chan error
}

// Listen begins to serve at a loopback address; Close ends it.
func (s *Set) Listen(ctx context.Context, address string, log *slog.Logger) (*Listener, error) {
	if _, err := ParseAddress(address); err != nil {
		return nil, fmt.Errorf("metrics listener: %w", err)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("metrics listener: %w", err)
	}
	return s.serve(l, log), nil
}

// Inherit is Listen on the socket of another process, which may go on to answer from
// it; f stays the caller's.
func (s *Set) Inherit(f *os.File, log *slog.Logger) (*Listener, error) {
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("metrics listener: %w", err)
	}
	return s.serve(l, log), nil
}

func (s *Set) serve(l net.Listener, log *slog.Logger) *Listener {
	m := &Listener{listener: l, ended: make(chan error, 1), server: &http.Server{
		Handler: s.mux(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 5 * time.Second, WriteTimeout: 15 * time.Second,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}}
	m.callers = drain.Watch(m.server)
	go func() { m.ended <- m.server.Serve(l) }() // Close waits for it
	return m
}

// File returns a descriptor of the socket to pass on; the caller closes it.
func (l *Listener) File() (*os.File, error) {
	t, ok := l.listener.(*net.TCPListener)
	if !ok {
		return nil, errors.New("metrics listener: is no TCP socket")
	}
	return t.File()
}

// Addr is where it listens.
func (l *Listener) Addr() net.Addr { return l.listener.Addr() }

// closeWait is how long answers at work are waited for.
const closeWait = 5 * time.Second

// Close takes no further call, gives those at work a few seconds and waits until this
// process has let go of the port.
func (l *Listener) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeWait)
	defer cancel()
	_ = l.listener.Close() // Serve has closed it where it ended by itself
	served := <-l.ended
	if errors.Is(served, net.ErrClosed) {
		served = nil
	}
	l.callers.Wait()
	err := l.server.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = l.server.Close()
	}
	return errors.Join(err, served)
}

func (s *Set) mux() http.Handler {
	mux := http.NewServeMux()
	scrape := s.Handler()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		said := &recorded{header: http.Header{}, code: http.StatusOK}
		if f := s.live(func() { scrape.ServeHTTP(said, r) }); f != nil {
			said = &f.metrics
		}
		said.answer(w) // whoever reads slowly is not what Freeze waits for
	})
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		var h api.Health
		if f := s.live(func() { h = s.source.Health(r.Context()) }); f != nil {
			h = f.state
		}
		lines, status := []string{"ok"}, http.StatusOK
		if !h.Ready {
			lines, status = []string{"not ready"}, http.StatusServiceUnavailable
		}
		for _, c := range h.Causes {
			lines = append(lines, c.Code+": "+c.Message)
		}
		answer(w, status, lines...)
	})
	return mux
}

func answer(w http.ResponseWriter, status int, lines ...string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	for _, l := range lines {
		_, _ = fmt.Fprintln(w, l) // the caller has gone: there is nobody to tell
	}
}
