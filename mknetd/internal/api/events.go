package api

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"mknet/spec/api"
)

// eventParams are the query parameters that say where to go on.
var eventParams = []string{"instance", "after"}

func (c *call) eventsAfter() (api.EventsAfter, error) {
	after := api.EventsAfter{Instance: c.query.Get("instance")}
	if text := c.query.Get("after"); text != "" {
		var err error
		if after.Seq, err = strconv.ParseUint(text, 10, 64); err != nil {
			return after, api.Errorf(api.InvalidArgument, "after %q: must be the number of an event", clip(text))
		}
		if after.Instance == "" {
			return after, api.Errorf(api.InvalidArgument, "after %d: needs the instance that numbered the event", after.Seq)
		}
	}
	return after, nil
}

func (s *Server) events(ctx context.Context, c *call) (any, error) {
	after, err := c.eventsAfter()
	if err != nil {
		return nil, err
	}
	list := s.engine.Events(ctx, after)
	if list.Events == nil {
		list.Events = []api.Event{}
	}
	return list, nil
}

// mayFollow takes a place among the followers, which follow gives back.
func (s *Server) mayFollow(_ context.Context, c *call) (any, error) {
	if _, err := c.eventsAfter(); err != nil {
		return nil, err
	}
	if s.followers.add(1) > s.limits.Followers {
		s.followers.add(-1)
		return nil, api.Retryablef(api.ResourceExhausted, "%d callers follow the events: end one", s.limits.Followers)
	}
	return nil, nil
}

// follow writes one event a line until the caller hangs up, does not read for
// Limits.Reply, or the server is told to end.
func (s *Server) follow(w http.ResponseWriter, r *http.Request, c *call) {
	defer s.followers.add(-1)
	after, err := c.eventsAfter()
	if err != nil { // mayFollow has looked
		s.write(w, failed(err))
		return
	}
	err = s.lines(w, r, func(ctx context.Context, send func(any) error) error {
		return s.engine.Follow(ctx, after, func(ev api.Event) error { return send(ev) })
	})
	if err != nil && r.Context().Err() == nil {
		s.log.Warn("a follower of the events did not read them", "peerPid", c.peer.PID, "peerComm", c.peer.Comm, "err", err)
	}
}

// lines answers with what f sends, one JSON value a line, each of which is written
// at once and must be read within Limits.Reply. The context of f ends when the
// caller hangs up or the server is told to end.
func (s *Server) lines(w http.ResponseWriter, r *http.Request, f func(ctx context.Context, send func(any) error) error) error {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	go func() { // ends with ctx
		select {
		case <-s.ending:
			cancel()
		case <-ctx.Done():
		}
	}()
	rc := http.NewResponseController(w)
	flush := func() error {
		if err := rc.SetWriteDeadline(time.Now().Add(s.limits.Reply)); err != nil {
			return err
		}
		return rc.Flush()
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	if flush() != nil {
		return nil // it has hung up
	}
	enc := json.NewEncoder(w)
	err := f(ctx, func(v any) error {
		if err := rc.SetWriteDeadline(time.Now().Add(s.limits.Reply)); err != nil {
			return err
		}
		if err := enc.Encode(v); err != nil {
			return err
		}
		return rc.Flush()
	})
	// The next bytes on the connection must not have the deadline of the last.
	_ = rc.SetWriteDeadline(time.Now().Add(s.limits.Reply))
	return err
}
