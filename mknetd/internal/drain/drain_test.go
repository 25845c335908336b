package drain

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// server is one that says "here".
type server struct {
	*http.Server
	*Callers
	listener net.Listener
	ended    chan error
}

func serve(t *testing.T) *server {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{listener: l, ended: make(chan error, 1), Server: &http.Server{
		ReadHeaderTimeout: time.Hour,
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "here") }),
	}}
	s.Callers = Watch(s.Server)
	go func() { s.ended <- s.Serve(l) }()
	t.Cleanup(func() { s.Close() })
	return s
}

// connect returns once the server has let the caller in.
func (s *server) connect(t *testing.T) net.Conn {
	t.Helper()
	c, err := new(net.Dialer).DialContext(t.Context(), "tcp", s.listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	for deadline := time.Now().Add(time.Minute); s.waiting() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the caller is not let in")
		}
	}
	return c
}

func (s *server) waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.unheard)
}

// served waits for the end of Serve, whose listener is closed.
func (s *server) served(t *testing.T) {
	t.Helper()
	if err := <-s.ended; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Serve ended with %v", err)
	}
}

// end is what both of mknetd's servers do.
func (s *server) end(t *testing.T) {
	t.Helper()
	s.listener.Close()
	s.served(t)
	s.Wait()
	if err := s.Shutdown(context.Background()); err != nil {
		t.Errorf("shut down: %v", err)
	}
}

const request = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"

func TestWhoWasLetInIsAnswered(t *testing.T) {
	s := serve(t)
	c := s.connect(t)
	ended := make(chan struct{})
	go func() { defer close(ended); s.end(t) }()
	untilClosed(s.listener)
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatalf("no answer: %v", err)
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || string(body) != "here" {
		t.Errorf("answer %q, %v", body, err)
	}
	<-ended
}

// untilClosed returns once nobody can connect any more.
func untilClosed(l net.Listener) {
	for {
		c, err := new(net.Dialer).Dial("tcp", l.Addr().String()) //nolint:noctx // ends with the listener
		if err != nil {
			return
		}
		c.Close()
	}
}

// One that connects and says nothing does not hold the end up, nor one that was heard
// or has gone.
func TestTheSilentAreNotWaitedFor(t *testing.T) {
	s := serve(t)
	heard := s.connect(t)
	if _, err := io.WriteString(heard, request); err != nil {
		t.Fatal(err)
	}
	if _, err := http.ReadResponse(bufio.NewReader(heard), nil); err != nil { //nolint:bodyclose // the connection is kept on purpose
		t.Fatal(err)
	}
	gone := s.connect(t)
	gone.Close()
	for deadline := time.Now().Add(time.Minute); s.waiting() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d are waited for", s.waiting())
		}
	}
	silent := s.connect(t)
	began := time.Now()
	s.listener.Close()
	s.served(t)
	s.Wait()
	if took := time.Since(began); took < Limit {
		t.Errorf("the silent one had %s, want %s", took, Limit)
	}
	// Shutdown has nobody to wait for.
	if err := silent.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := silent.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the silent one is not hung up on: %v", err)
	}
}
