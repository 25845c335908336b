package vsockswitch

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"sync"
)

// socket is where one guest's QEMU connects, again after every boot.
type socket struct {
	listener *net.UnixListener
	log      *slog.Logger
	mu       sync.Mutex
	conn     *net.UnixConn // the front end; nil between two
	closed   bool
	wg       sync.WaitGroup
}

// listenUnix makes a Unix socket, over the file of an earlier run.
func listenUnix(path string) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove old socket: %w", err)
	}
	return net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
}

// serveSocket serves front ends at path, one after the other, until close.
func serveSocket(path string, back backend, log *slog.Logger) (*socket, error) {
	l, err := listenUnix(path)
	if err != nil {
		return nil, err
	}
	s := &socket{listener: l, log: log}
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return
			}
			if !s.adopt(conn) {
				return
			}
			if err := serve(conn, back, log); err != nil {
				log.Error("front end refused", "err", err)
			}
			s.adopt(nil)
		}
	}()
	return s, nil
}

// adopt makes conn the one that close ends; false when close came first.
func (s *socket) adopt(conn *net.UnixConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn = conn
	if s.closed && conn != nil {
		conn.Close()
	}
	return !s.closed
}

// close ends the front end's session, drained, and waits for it.
func (s *socket) close() {
	s.mu.Lock()
	s.closed = true
	s.listener.Close()
	if s.conn != nil {
		s.conn.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}
