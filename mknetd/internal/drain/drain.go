// Package drain lets an http.Server end without leaving a caller unanswered whom it
// has let in. net/http closes a connection whose request, the first one too, it reads
// after Shutdown has begun (server.go: conn.serve).
package drain

import (
	"context"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"
)

// Limit is how long callers are waited for that have connected and say nothing.
const Limit = time.Second

// Callers are those of one server that were let in and have not been heard yet.
type Callers struct {
	mu      sync.Mutex
	unheard map[net.Conn]bool
	change  chan struct{} // closed, and made anew, whenever one leaves
}

type connKey struct{}

// Watch begins to watch a server. It is for before Serve, and after the server's own
// Handler, ConnState and ConnContext were set.
func Watch(srv *http.Server) *Callers {
	c := &Callers{unheard: map[net.Conn]bool{}, change: make(chan struct{})}
	state, connContext, handler := srv.ConnState, srv.ConnContext, srv.Handler
	srv.ConnState = func(conn net.Conn, s http.ConnState) {
		switch s {
		case http.StateNew: // before Serve accepts the next one, or returns
			c.mu.Lock()
			c.unheard[conn] = true
			c.mu.Unlock()
		case http.StateClosed, http.StateHijacked:
			c.leave(conn)
		}
		if state != nil {
			state(conn, s)
		}
	}
	srv.ConnContext = func(ctx context.Context, conn net.Conn) context.Context {
		ctx = context.WithValue(ctx, connKey{}, conn)
		if connContext != nil {
			ctx = connContext(ctx, conn)
		}
		return ctx
	}
	srv.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if conn, ok := r.Context().Value(connKey{}).(net.Conn); ok {
			c.leave(conn)
		}
		handler.ServeHTTP(w, r)
	})
	return c
}

func (c *Callers) leave(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unheard[conn] {
		delete(c.unheard, conn)
		close(c.change)
		c.change = make(chan struct{})
	}
}

// Wait returns once everybody has been heard or is gone. After Limit it hangs up on
// those who have said nothing: Shutdown would wait some seconds more for them, and
// not answer them either. It is for between the end of Serve, whose listener is
// closed, and Shutdown.
func (c *Callers) Wait() {
	limit := time.NewTimer(Limit)
	defer limit.Stop()
	for {
		c.mu.Lock()
		left, change := len(c.unheard), c.change
		c.mu.Unlock()
		if left == 0 {
			return
		}
		select {
		case <-change:
		case <-limit.C:
			c.hangUp()
			return
		}
	}
}

func (c *Callers) hangUp() {
	c.mu.Lock()
	silent := slices.Collect(maps.Keys(c.unheard))
	c.mu.Unlock()
	for _, conn := range silent { // without the lock: one that is closed leaves
		_ = conn.Close()
	}
}
