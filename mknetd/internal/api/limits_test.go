package api_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"mknet/mknetd/internal/api"
	specapi "mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// gate is an engine whose Create waits until it is let go.
type gate struct {
	fake
	entered chan struct{}
	open    chan struct{}
}

func newGate() *gate {
	g := &gate{entered: make(chan struct{}, 1000), open: make(chan struct{})}
	g.create = func(ctx context.Context, r specapi.CreateRequest, ns *os.File, _ endpoint.Process) (endpoint.Endpoint, error) {
		closeNS(ns)
		g.entered <- struct{}{}
		select {
		case <-g.open:
			return sample(r.Attachment), nil
		case <-ctx.Done():
			return endpoint.Endpoint{}, context.Cause(ctx)
		}
	}
	return g
}

func add(c *client.Client) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := c.CreateEndpoint(ctx, specapi.CreateRequest{Attachment: att, NetnsPath: "/n"}, nil)
	return err
}

// With every place taken and callers waiting, health and reads answer at once;
// a caller too many hears it at once, and one that waited too long after its time.
func TestReadsPassWaitingChanges(t *testing.T) {
	g := newGate()
	s := serve(t, &g.fake, func(c *api.Config) {
		c.Limits = api.Limits{Changes: 2, QueuedEach: 1, QueueWait: 30 * time.Second, Change: patience}
	})
	c := s.client(t)
	var wg sync.WaitGroup
	results := make(chan error, 3)
	for range 2 {
		wg.Go(func() { results <- add(c) })
	}
	<-g.entered
	<-g.entered
	wg.Go(func() { // waits, once the queue has room beside the calls below
		err := add(c)
		for specapi.CodeOf(err) == specapi.ResourceExhausted {
			time.Sleep(5 * time.Millisecond)
			err = add(c)
		}
		results <- err
	})
	// The queue is full once one more is refused; only then is the third in it.
	netlab.Eventually(t, patience, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		_, err := c.Delete(ctx, specapi.DeleteRequest{Selector: specapi.Selector{Attachment: att}}, nil)
		var e *specapi.Error
		if !errors.As(err, &e) || e.Code != specapi.ResourceExhausted || !e.Retryable || e.CNICode() != 11 {
			return errors.Join(errors.New("not refused for the queue"), err)
		}
		return nil
	})
	begun := time.Now()
	for range 50 {
		if _, err := c.Health(context.Background()); err != nil {
			t.Fatal(err)
		}
		if _, err := c.GetEndpoint(context.Background(), sampleGen); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(begun); took > 20*time.Second {
		t.Errorf("100 reads took %s", took)
	}
	close(g.open)
	wg.Wait()
	for range 3 {
		if err := <-results; err != nil {
			t.Errorf("a change that had a place or waited for one: %v", err)
		}
	}
}

func TestWaitingTooLong(t *testing.T) {
	g := newGate()
	s := serve(t, &g.fake, func(c *api.Config) {
		c.Limits = api.Limits{Changes: 1, QueueWait: 20 * time.Millisecond, Change: patience}
	})
	c := s.client(t)
	first := make(chan error, 1)
	go func() { first <- add(c) }()
	<-g.entered
	err := add(c)
	var e *specapi.Error
	if !errors.As(err, &e) || e.Code != specapi.Unavailable || !e.Retryable || !strings.Contains(e.Message, "waited") {
		t.Errorf("got %v", err)
	}
	close(g.open)
	if err := <-first; err != nil {
		t.Error(err)
	}
}

func TestDeadlineOfACall(t *testing.T) {
	g := newGate()
	s := serve(t, &g.fake, func(c *api.Config) { c.Limits = api.Limits{Change: 20 * time.Millisecond} })
	if err := add(s.client(t)); specapi.CodeOf(err) != specapi.Unavailable || !strings.Contains(err.Error(), "in time") {
		t.Errorf("got %v", err)
	}
}

// A caller that hangs up ends its call's context, so that the place is free again.
func TestCallerHangsUp(t *testing.T) {
	g := newGate()
	ended := make(chan error, 1)
	inner := g.create
	g.create = func(ctx context.Context, r specapi.CreateRequest, ns *os.File, p endpoint.Process) (endpoint.Endpoint, error) {
		ep, err := inner(ctx, r, ns, p)
		ended <- err
		return ep, err
	}
	s := serve(t, &g.fake, func(c *api.Config) { c.Limits = api.Limits{Change: patience} })
	c := s.client(t)
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		<-g.entered
		cancel()
	}()
	if _, err := c.CreateEndpoint(ctx, specapi.CreateRequest{Attachment: att, NetnsPath: "/n"}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("caller: %v", err)
	}
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("call: %v", err)
		}
	case <-time.After(patience):
		t.Error("the call still runs")
	}
}

// Slow callers hold connections and nothing else, and not for long.
func TestSlowCallers(t *testing.T) {
	s := serve(t, &fake{}, func(c *api.Config) {
		c.Limits = api.Limits{Changes: 1, Header: 200 * time.Millisecond, Body: 200 * time.Millisecond}
	})
	for name, text := range map[string]string{
		"nothing":       "",
		"half a head":   "POST /v1/endpoints HT",
		"head only":     "POST /v1/endpoints HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n",
		"half a body":   "POST /v1/endpoints HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
		"half a chunk":  "POST /v1/endpoints HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
		"endless heads": "GET / HTTP/1.1\r\n" + strings.Repeat("A: b\r\n", 10000),
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("unix", s.socket)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(patience))
			_, _ = io.WriteString(conn, text) // the server may hang up meanwhile
			if err := add(s.client(t)); err != nil {
				t.Errorf("another caller meanwhile: %v", err)
			}
			if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the connection is still open")
			}
		})
	}
}

func TestTooManyConnections(t *testing.T) {
	s := serve(t, &fake{}, func(c *api.Config) { c.Limits = api.Limits{Conns: 3} })
	var held []net.Conn
	for range 3 {
		conn, err := net.Dial("unix", s.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		held = append(held, conn)
		// An answer proves that the connection has been counted.
		if _, err := io.WriteString(conn, "GET /v1/daemon/health HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		if _, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil {
			t.Fatal(err)
		}
	}
	_, err := s.client(t).Health(context.Background())
	var e *specapi.Error
	if !errors.As(err, &e) || e.Code != specapi.ResourceExhausted || !e.Retryable {
		t.Errorf("the fourth: %v", err)
	}
	_ = held[0].Close()
	netlab.Eventually(t, patience, func() error { _, err := s.client(t).Health(context.Background()); return err })
}

// Told to end, the server answers what is at work and takes nothing new.
func TestDrain(t *testing.T) {
	g := newGate()
	s := serve(t, &g.fake, func(c *api.Config) { c.Limits = api.Limits{Change: patience, Drain: patience} })
	c := s.client(t)
	result := make(chan error, 1)
	go func() { result <- add(c) }()
	<-g.entered
	s.stop()
	netlab.Eventually(t, patience, func() error {
		if _, err := os.Lstat(s.socket); !errors.Is(err, os.ErrNotExist) {
			return errors.New("the socket is still there")
		}
		return nil
	})
	if _, err := s.client(t).Health(context.Background()); !errors.Is(err, client.ErrUnreachable) {
		t.Errorf("a new caller: %v", err)
	}
	close(g.open)
	if err := <-result; err != nil {
		t.Errorf("the call at work: %v", err)
	}
}

// A call that outlasts the drain is broken off, and Serve waits for its end.
func TestDrainBreaksOff(t *testing.T) {
	g := newGate()
	s := serve(t, &g.fake, func(c *api.Config) { c.Limits = api.Limits{Change: patience, Drain: 50 * time.Millisecond} })
	result := make(chan error, 1)
	go func() { result <- add(s.client(t)) }()
	<-g.entered
	s.stop()
	if err := <-result; err == nil {
		t.Error("the call succeeded")
	}
	if err := <-s.ended; err != nil {
		t.Errorf("serve: %v", err)
	}
	s.ended <- nil
}

// A kernel that hangs every CHECK keeps nobody from reading the records.
func TestReadsPassHangingChecks(t *testing.T) {
	entered, open := make(chan struct{}, 8), make(chan struct{})
	f := &fake{check: func(ctx context.Context, gen endpoint.Generation, _ specapi.Selector) (specapi.CheckReply, error) {
		entered <- struct{}{}
		select {
		case <-open:
		case <-ctx.Done():
		}
		ep := sample(att)
		ep.Generation = gen
		return specapi.CheckReply{Endpoint: ep}, nil
	}}
	s := serve(t, f, func(c *api.Config) { c.Limits = api.Limits{Reads: 2, QueueWait: 30 * time.Second, Read: patience} })
	c := s.client(t)
	var wg sync.WaitGroup
	for range 4 { // two at work, two waiting
		wg.Go(func() {
			if _, err := c.CheckEndpoint(context.Background(), sampleGen, specapi.Selector{}); err != nil {
				t.Error(err)
			}
		})
	}
	<-entered
	<-entered
	for range 20 {
		if _, err := c.GetEndpoint(context.Background(), sampleGen); err != nil {
			t.Error(err)
		}
	}
	close(open)
	wg.Wait()
}

// 1,000 calls at once: those at work and those that wait are bounded, the rest hear
// at once that they may come again, and what they made the server hold is gone with
// them.
func TestAThousandCallsAtOnce(t *testing.T) {
	const calls, places, queue = 1000, 8, 32
	g := newGate()
	s := serve(t, &g.fake, func(c *api.Config) {
		c.Limits = api.Limits{Changes: places, QueuedEach: queue, QueueWait: patience, Change: patience}
	})
	c := s.client(t)
	if _, err := c.Health(context.Background()); err != nil {
		t.Fatal(err)
	}
	c.Close()
	before := runtime.NumGoroutine()
	var wg sync.WaitGroup
	results := make(chan error, calls)
	for range calls {
		wg.Go(func() { results <- add(c) })
	}
	refused := 0
	for refused < calls-places-queue {
		var e *specapi.Error
		select {
		case err := <-results:
			if !errors.As(err, &e) || e.Code != specapi.ResourceExhausted || !e.Retryable {
				t.Fatalf("call %d beyond the bound: %v", refused, err)
			}
			refused++
		case <-time.After(patience):
			t.Fatalf("%d calls were refused, want %d", refused, calls-places-queue)
		}
	}
	if got := len(g.entered); got != places {
		t.Errorf("%d calls are at work, want %d", got, places)
	}
	if _, err := c.Health(context.Background()); err != nil {
		t.Errorf("health meanwhile: %v", err)
	}
	close(g.open)
	wg.Wait()
	for range places + queue {
		if err := <-results; err != nil {
			t.Errorf("a call that had a place or waited for one: %v", err)
		}
	}
	c.Close()
	netlab.Eventually(t, patience, func() error {
		if after := runtime.NumGoroutine(); after > before+5 {
			return fmt.Errorf("%d goroutines, %d before", after, before)
		}
		return nil
	})
}

// A caller that asks for much and reads none of it is hung up on after
// Limits.Reply; others are answered meanwhile.
func TestSlowReader(t *testing.T) {
	many := make([]endpoint.Endpoint, 2000)
	for i := range many {
		many[i] = sample(att)
	}
	served := make(chan struct{}, 1)
	f := &fake{list: func(context.Context, api.Filter) ([]endpoint.Endpoint, error) {
		served <- struct{}{}
		return many, nil
	}}
	s := serve(t, f, func(c *api.Config) { c.Limits = api.Limits{Reads: 1, Reply: 300 * time.Millisecond} })
	conn, err := net.Dial("unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET /v1/endpoints HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	<-served
	if _, err := s.client(t).GetEndpoint(context.Background(), sampleGen); err != nil {
		t.Errorf("another reader meanwhile: %v", err)
	}
	netlab.Eventually(t, patience, func() error { // hung up on: a write finds nobody
		_, err := io.WriteString(conn, "x")
		if err == nil {
			return errors.New("the connection is still open")
		}
		return nil
	})
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	if n, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) || n > 1<<20 {
		t.Errorf("%d bytes came, %v", n, err)
	}
}
