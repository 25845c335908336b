package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"mknet/spec/endpoint"
	"mknet/spec/pump"
)

// Limits of an agent towards peers that have proven nothing.
const (
	DefaultMaxHandshakes = 16
	// maxLinks bounds the sessions that one agent holds, one a link.
	maxLinks = 16
	// lingerTimeout is how long a refused peer may take to read why.
	lingerTimeout = time.Second
)

// Credentials are what the agent knows when a peer comes. They are asked for
// again for every peer, so that a restored snapshot can be given others.
type Credentials struct {
	Identity  Identity
	Token     pump.Token
	SingleUse bool // ask the shim for the next token
}

// Handler is what the agent does with a confirmed session.
type Handler interface {
	// Configure applies cfg to the device. The peer is confirmed and no older
	// session of the same link runs. Its error is told to the shim.
	Configure(ctx context.Context, cfg pump.LinkConfig) (pump.Ack, error)
	// Run carries the session until ctx ends or the session does. The server
	// closes the lanes when Run has returned.
	Run(ctx context.Context, s *Session) error
}

// Server is the agent's end. Credentials, Handler and Log must be set.
type Server struct {
	Credentials func() (Credentials, error)
	// KeepToken stores the next token durably (as far as the child has anything
	// durable) before the session that brought it is configured.
	KeepToken func(pump.Token) error
	Handler   Handler
	Log       *slog.Logger

	Timeout       time.Duration // of one handshake; default DefaultTimeout
	MaxHandshakes int           // at once; default DefaultMaxHandshakes

	mu      sync.Mutex
	running map[string]*tenure                      // by link
	waiting map[endpoint.Generation]*latencyWaiting // sessions that wait for their second lane
	quiet   logLimit
}

// Serve accepts peers until ctx ends or the listener fails. It closes the
// listener and returns when every session has ended; nil after ctx has.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer func() {
		if stop() {
			_ = l.Close()
		}
	}()
	limit := s.MaxHandshakes
	if limit <= 0 {
		limit = DefaultMaxHandshakes
	}
	slots := make(chan struct{}, limit)
	for {
		conn, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if conn != nil {
				_ = conn.Close()
			}
			return nil
		case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ECONNABORTED), errors.Is(err, syscall.ENOBUFS):
			s.warn(fmt.Errorf("accept: %w", err), nil)
			sleep(ctx, 50*time.Millisecond)
			continue
		case err != nil:
			return fmt.Errorf("accept on %s: %w", l.Addr(), err)
		}
		select {
		case slots <- struct{}{}:
		default:
			s.warn(fmt.Errorf("%d handshakes are under way", limit), conn)
			_ = conn.Close()
			continue
		}
		wg.Go(func() {
			var once sync.Once
			free := func() { once.Do(func() { <-slots }) }
			defer free()
			s.serve(ctx, conn, free)
		})
	}
}

// serve runs one connection. free gives its handshake slot back early.
func (s *Server) serve(ctx context.Context, conn net.Conn, free func()) {
	l := &link{conn: conn, release: guard(ctx, conn, s.timeout())}
	waiting, err := s.shake(l)
	switch {
	case err != nil:
		if ctx.Err() == nil {
			s.warn(err, conn)
			s.turnAway(conn, err)
		}
		_ = l.close() // an error here says nothing that the one above does not
	case waiting != nil:
		s.deliver(ctx, l, waiting)
	default:
		free() // who has proven the token no longer counts as a stranger
		err := errors.Join(s.bulk(ctx, l), l.close())
		if ctx.Err() == nil {
			s.Log.Info("session ended", "endpoint", l.theirs.Endpoint.Short(), "err", err)
		}
	}
}

// shake reads the peer's hello, answers it, and confirms the peer. For the
// latency lane it returns the session that waits for it.
func (s *Server) shake(l *link) (*latencyWaiting, error) {
	theirs, theirRaw, err := readHello(l.conn)
	var mismatch *pump.MismatchError
	if err != nil && !errors.As(err, &mismatch) {
		return nil, err
	}
	creds, credsErr := s.Credentials()
	if credsErr != nil {
		return nil, fmt.Errorf("read our identity: %w", credsErr)
	}
	l.theirs = theirs
	l.ours = pump.Hello{
		MinVersion: pump.MinVersion, MaxVersion: pump.MaxVersion, Role: pump.RoleAgent, Lane: min(theirs.Lane, pump.MaxLanes-1),
		Endpoint: creds.Identity.Endpoint, Sandbox: creds.Identity.Sandbox,
	}
	if creds.SingleUse {
		l.ours.Flags |= pump.FlagSingleUse
	}
	raw, helloErr := l.ours.Append(nil)
	if helloErr != nil {
		return nil, helloErr
	}
	// Also a peer that does not match is answered, so that it can name the reason.
	if err := write(l.conn, raw); err != nil {
		return nil, err
	}
	if err != nil {
		return nil, err
	}
	if err := pump.Match(l.ours, theirs); err != nil {
		return nil, err
	}
	psk, waiting := creds.Token, (*latencyWaiting)(nil)
	if theirs.Lane == pump.LaneLatency {
		s.mu.Lock()
		waiting = s.waiting[theirs.Endpoint]
		s.mu.Unlock()
		if waiting == nil {
			return nil, ErrNoSession
		}
		psk = waiting.token
	}
	l.ch, err = respond(l.conn, psk, theirRaw, raw)
	return waiting, err
}

// turnAway tells the peer why and lets it read that before the connection goes:
// closing with unread bytes would reset it.
func (s *Server) turnAway(conn net.Conn, err error) {
	if _, ok := refusalFor(err); ok {
		_ = conn.SetDeadline(time.Now().Add(lingerTimeout))
		refuse(conn, err)
		_, _ = io.CopyN(io.Discard, conn, pump.MaxHelloBytes)
	}
}

func (s *Server) timeout() time.Duration {
	if s.Timeout > 0 {
		return s.Timeout
	}
	return DefaultTimeout
}

// warn logs about a peer that has proven nothing, at a rate that the peer cannot
// raise.
func (s *Server) warn(err error, conn net.Conn) {
	if suppressed, ok := s.quiet.allow(time.Now()); ok {
		args := []any{"err", err}
		if conn != nil && conn.RemoteAddr() != nil {
			args = append(args, "peer", conn.RemoteAddr().String())
		}
		if suppressed > 0 {
			args = append(args, "suppressed", suppressed)
		}
		s.Log.Warn("peer refused", args...)
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
