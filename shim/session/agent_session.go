package session

import (
	"context"
	"errors"
	"fmt"
	"time"

	"mknet/spec/endpoint"
	"mknet/spec/pump"
)

// tenure is the right of one session to a link.
type tenure struct {
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when the session touches the link no more
}

// latencyWaiting is a confirmed session that waits for its latency lane.
type latencyWaiting struct {
	token pump.Token
	lane  chan *link // of capacity 1; who sets taken may send once
	taken bool       // guarded by Server.mu
}

// deliver hands a proven latency lane to its session.
func (s *Server) deliver(ctx context.Context, l *link, w *latencyWaiting) {
	err := l.ch.write(l.conn, pump.MsgAck, l.ch.hash)
	if err == nil {
		s.mu.Lock()
		late := w.taken
		w.taken = true
		s.mu.Unlock()
		if !late {
			w.lane <- l
			return
		}
		err = ErrNoSession
	}
	s.warn(fmt.Errorf("latency lane: %w", withContext(ctx, err)), l.conn)
	_ = l.close()
}

// bulk is the life of a session, on the goroutine of its first connection. The
// caller closes that one.
func (s *Server) bulk(ctx context.Context, l *link) error {
	body, err := l.ch.read(l.conn, pump.MsgConfig)
	if err != nil {
		return withContext(ctx, err)
	}
	cfg, err := pump.DecodeLinkConfig(body)
	if err != nil {
		return err
	}
	ctx, t, err := s.claim(ctx, cfg.Link)
	if err != nil {
		return errors.Join(err, s.answer(l, pump.Ack{Refused: pump.Printable(err.Error())}))
	}
	defer s.leave(cfg.Link, t)

	ack, err := s.configure(ctx, cfg)
	if err != nil {
		return errors.Join(withContext(ctx, err), s.answer(l, pump.Ack{Refused: pump.Printable(err.Error())}))
	}
	rotated := cfg.NextToken != nil
	cfg.NextToken = nil
	sess := &Session{role: pump.RoleAgent, Endpoint: l.theirs.Endpoint, Version: pump.Agreed(l.ours, l.theirs), Config: cfg, Ack: ack, Rotated: rotated}
	latency, err := s.assemble(ctx, sess, l)
	if err != nil {
		return withContext(ctx, err)
	}
	if latency != nil {
		defer func() { _ = latency.close() }()
		if err := sess.add(ctx, latency, pump.LaneLatency); err != nil {
			return err
		}
	}
	s.Log.Info("session began", "endpoint", sess.Endpoint.Short(), "link", cfg.Link, "address", cfg.Address.String(),
		"mtu", cfg.MTUBytes, "lanes", len(sess.Lanes), "sealed", cfg.Sealed)
	return withContext(ctx, s.Handler.Run(ctx, sess))
}

// configure keeps the next token and applies the configuration.
func (s *Server) configure(ctx context.Context, cfg pump.LinkConfig) (pump.Ack, error) {
	if cfg.NextToken != nil {
		if s.KeepToken == nil {
			return pump.Ack{}, errors.New("there is no place to keep the next token")
		}
		if err := s.KeepToken(*cfg.NextToken); err != nil {
			return pump.Ack{}, fmt.Errorf("keep the next token: %w", err)
		}
		cfg.NextToken = nil
	}
	ack, err := s.Handler.Configure(ctx, cfg)
	if err != nil {
		return pump.Ack{}, fmt.Errorf("configure %s: %w", cfg.Link, err)
	}
	if ack.Lanes > cfg.Lanes {
		return pump.Ack{}, fmt.Errorf("configure %s: %d lanes, the shim offers %d", cfg.Link, ack.Lanes, cfg.Lanes)
	}
	return ack, nil
}

func (s *Server) answer(l *link, ack pump.Ack) error {
	body, err := pump.EncodeAck(ack)
	if err != nil {
		return err
	}
	return l.ch.write(l.conn, pump.MsgAck, body)
}

// assemble answers the shim and, for two lanes, waits for the second. The bulk
// lane is part of the session afterwards, the returned one not yet.
func (s *Server) assemble(ctx context.Context, sess *Session, l *link) (*link, error) {
	if sess.Ack.Lanes < pump.MaxLanes {
		if err := s.answer(l, sess.Ack); err != nil {
			return nil, err
		}
		return nil, sess.add(ctx, l, pump.LaneBulk)
	}
	token, err := l.ch.laneToken()
	if err != nil {
		return nil, err
	}
	w := &latencyWaiting{token: token, lane: make(chan *link, 1)}
	s.mu.Lock()
	if s.waiting == nil {
		s.waiting = make(map[endpoint.Generation]*latencyWaiting)
	}
	s.waiting[sess.Endpoint] = w
	s.mu.Unlock()
	// Expected before the shim is told: its second connection may overtake us.
	if err := s.answer(l, sess.Ack); err != nil {
		return nil, errors.Join(err, s.forget(sess.Endpoint, w))
	}
	timer := time.NewTimer(s.timeout())
	defer timer.Stop()
	select {
	case lane := <-w.lane:
		if err := errors.Join(s.forget(sess.Endpoint, w), sess.add(ctx, l, pump.LaneBulk)); err != nil {
			return nil, errors.Join(err, lane.close())
		}
		return lane, nil
	case <-timer.C:
		err = fmt.Errorf("latency lane: %w", ErrTimeout)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return nil, errors.Join(err, s.forget(sess.Endpoint, w))
}

// forget ends the wait; a lane that came too late is closed.
func (s *Server) forget(g endpoint.Generation, w *latencyWaiting) error {
	s.mu.Lock()
	w.taken = true
	if s.waiting[g] == w {
		delete(s.waiting, g)
	}
	s.mu.Unlock()
	select {
	case lane := <-w.lane:
		return lane.close()
	default:
		return nil
	}
}

// claim makes the caller the holder of a link. An older holder is ended first
// and has ended when claim returns. The returned context ends when a newer one
// comes.
func (s *Server) claim(ctx context.Context, name string) (context.Context, *tenure, error) {
	s.mu.Lock()
	if s.running == nil {
		s.running = make(map[string]*tenure)
	}
	older := s.running[name]
	if older == nil && len(s.running) >= maxLinks {
		s.mu.Unlock()
		return nil, nil, fmt.Errorf("link %s: %d links have sessions, no more are allowed", name, maxLinks)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	t := &tenure{cancel: cancel, done: make(chan struct{})}
	s.running[name] = t
	s.mu.Unlock()
	if older != nil {
		older.cancel(ErrDisplaced)
		<-older.done // it must not touch the link after we do
	}
	return ctx, t, nil
}

func (s *Server) leave(name string, t *tenure) {
	s.mu.Lock()
	if s.running[name] == t {
		delete(s.running, name)
	}
	s.mu.Unlock()
	t.cancel(nil)
	close(t.done)
}
