package api

import (
	"context"
	"net/http"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Tracer is the part of an engine that tells what becomes of packets.
type Tracer interface {
	// Trace begins a trace. The result is run and then closed, or only closed.
	Trace(ctx context.Context, req api.TraceRequest, peer endpoint.Process) (Trace, error)
}

// Trace is one that has begun.
type Trace interface {
	// Run sends the lines of the trace up to its end, which also ctx brings about. The
	// error is that of send.
	Run(ctx context.Context, send func(api.TraceLine) error) error
	Close()
}

func (s *Server) beginTrace(ctx context.Context, c *call) (any, error) {
	var req api.TraceRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	var err error
	c.trace, err = s.engine.Trace(ctx, req, c.peer)
	return nil, err
}

func (s *Server) runTrace(w http.ResponseWriter, r *http.Request, c *call) {
	defer c.trace.Close()
	err := s.lines(w, r, func(ctx context.Context, send func(any) error) error {
		return c.trace.Run(ctx, func(l api.TraceLine) error { return send(l) })
	})
	if err != nil && r.Context().Err() == nil {
		s.log.Warn("who traces did not read it", "peerPid", c.peer.PID, "peerComm", c.peer.Comm, "err", err)
	}
}
