// Package stats shows the live figures of a running mk-shim on a private Unix
// socket: one JSON object for each connection, then its end. The socket is
// <dir>/<endpoint generation>.sock, mode 0600 in a folder of mode 0700.
package stats

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"mknet/shim/transport"
	"mknet/spec/endpoint"
)

// DefaultDir is where the sockets are.
const DefaultDir = "/run/mk-shim"

const (
	suffix        = ".sock"
	writeTimeout  = time.Second
	maxReplyBytes = 64 << 10
	acceptWait    = 100 * time.Millisecond // after a caller that could not be accepted
)

// path names the socket of an endpoint's shim.
func path(dir string, gen endpoint.Generation) string {
	return filepath.Join(dir, gen.String()+suffix)
}

func address(socket string) (transport.Address, error) {
	return transport.Parse((&url.URL{Scheme: "unix", Path: socket}).String())
}

// Serve answers on the endpoint's socket with what status returns, until the
// returned function is called, which removes the socket, and the folder when it
// was the last one, and waits. Sockets that killed shims left are removed.
func Serve(ctx context.Context, dir string, gen endpoint.Generation, status func() any) (stop func(), err error) {
	a, err := address(path(dir, gen))
	if err != nil {
		return nil, fmt.Errorf("stats: %w", err)
	}
	var l net.Listener
	for range 3 { // a shim that ends may remove the folder in between
		if err = os.MkdirAll(dir, 0o700); err != nil {
			break
		}
		if l, err = transport.Listen(ctx, a, transport.Options{}); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("stats: %w", err)
	}
	sweep(ctx, dir, gen)
	var wg sync.WaitGroup
	stopped := make(chan struct{})
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			switch {
			case err == nil:
				answer(conn, status())
			case errors.Is(err, net.ErrClosed):
				return
			default: // no descriptor to spare, say: that passes
				select {
				case <-stopped:
				case <-time.After(acceptWait):
				}
			}
		}
	})
	return func() {
		close(stopped)
		_ = l.Close() // removes the file
		wg.Wait()
		_ = os.Remove(dir) // fails while others use it
	}, nil
}

// sweep removes the sockets on which nobody listens. What cannot be removed is
// no reason not to run.
func sweep(ctx context.Context, dir string, ours endpoint.Generation) {
	all, err := List(dir)
	if err != nil {
		return
	}
	for _, gen := range all {
		a, err := address(path(dir, gen))
		if gen == ours || err != nil {
			continue
		}
		conn, err := transport.Dial(ctx, a)
		if err == nil {
			_ = conn.Close()
		} else if errors.Is(err, syscall.ECONNREFUSED) {
			_ = os.Remove(path(dir, gen))
		}
	}
}

// answer writes one status; a reader that is gone or slow only loses its answer.
func answer(conn net.Conn, v any) {
	_ = conn.SetDeadline(time.Now().Add(writeTimeout))
	_ = json.NewEncoder(conn).Encode(v)
	_ = conn.Close()
}

// Read returns the JSON of one endpoint's shim. One that does not run is
// fs.ErrNotExist.
func Read(ctx context.Context, dir string, gen endpoint.Generation) (json.RawMessage, error) {
	a, err := address(path(dir, gen))
	if err != nil {
		return nil, fmt.Errorf("stats: %w", err)
	}
	conn, err := transport.Dial(ctx, a)
	if errors.Is(err, &transport.DialError{Kind: transport.Refused}) {
		return nil, fmt.Errorf("endpoint %s: no mk-shim runs: %w", gen, fs.ErrNotExist)
	}
	if err != nil {
		return nil, fmt.Errorf("stats: %w", err)
	}
	defer func() { _ = conn.Close() }()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return nil, fmt.Errorf("stats: %w", err)
		}
	}
	b, err := io.ReadAll(io.LimitReader(conn, maxReplyBytes))
	if err != nil {
		return nil, fmt.Errorf("endpoint %s: read stats: %w", gen, err)
	}
	if !json.Valid(b) {
		return nil, fmt.Errorf("endpoint %s: stats are no JSON", gen)
	}
	return b, nil
}

// List returns the endpoints that have a socket in dir, in order; some of the
// shims may be gone.
func List(dir string) ([]endpoint.Generation, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("stats: %w", err)
	}
	var out []endpoint.Generation
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), suffix)
		if gen, err := endpoint.ParseGeneration(name); ok && err == nil {
			out = append(out, gen)
		}
	}
	return out, nil
}
