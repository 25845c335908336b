package pump

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// Agents and shims that are killed and started again under traffic cost nothing
// that lasts: one TCP connection outlives all of them with its bytes intact, and
// the programs that stay keep no descriptor, goroutine or memory.
func TestRestartsUnderTraffic(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	book := watchCounters(t, n, ep)
	echo := startEcho(t, n.Internet, child.Namespace, ep)
	for _, ns := range []*netlab.Namespace{n.Internet, child.Namespace} {
		stubborn(ns)
	}
	stream := startStream(t, n.Internet, child.Namespace)
	rounds := max(restarts(t)/2, 4)
	const dwell = 25 // datagrams that each round carries before the next kill
	const warm = 3   // rounds after which a program has all that it ever needs

	var times []time.Duration
	repeat := func(what string, kill, start func(), stays ...*resident) {
		for round := range rounds {
			kill()
			mark := echo.mark()
			begin := time.Now()
			start()
			echo.after(t, mark)
			took := time.Since(begin)
			if took > 2*time.Second {
				t.Logf("%s: round %d, begun at %s, took %s", what, round, begin.Format(time.TimeOnly), took.Round(time.Millisecond))
			}
			times = append(times, took)
			echo.after(t, echo.mark()+dwell)
			if round == warm {
				for _, r := range stays {
					r.first = r.now(t)
				}
			}
		}
		for _, r := range stays {
			r.check(t, what)
		}
	}
	daemon := &resident{name: "mknetd", pid: n.DaemonPID()}
	repeat(fmt.Sprintf("%d agents", rounds), child.KillAgent, func() { child.StartAgent(t) },
		&resident{name: "mk-shim", pid: child.ShimPID(), goroutines: func(t *testing.T) int { return shimStats(t, n, ep).Goroutines }}, daemon)
	repeat(fmt.Sprintf("%d shims", rounds), child.KillShim, func() { child.StartShim(t) },
		&resident{name: "mk-agent", pid: child.AgentPID(), goroutines: func(t *testing.T) int { return agentGoroutines(t, child) }}, daemon)
	report(t, "packets again after a start", times)
	stream.finish(t)
	echo.finish()
	book.stop(t)
	noBadChecksums(t, n.Internet, child.Namespace)
}

// stubborn lets a TCP connection of the namespace outlive a link that is down more
// often than not: a repetition falls into a pause again and again, which doubles its
// timeout up to two minutes and, 15 times in a row, ends the connection. Kernels before
// 6.15 do not have the second switch; a run of thousands of rounds needs it.
func stubborn(ns *netlab.Namespace) {
	for _, setting := range []string{"net.ipv4.tcp_retries2=255", "net.ipv4.tcp_rto_max_ms=1000"} {
		_, _ = ns.Try("sysctl", "-qw", setting)
	}
}

// report logs how long something took.
func report(t *testing.T, what string, times []time.Duration) {
	t.Helper()
	sorted := append([]time.Duration(nil), times...)
	for i := range sorted { // a handful to a few thousand: insertion is fine
		for j := i; j > 0 && sorted[j] < sorted[j-1]; j-- {
			sorted[j], sorted[j-1] = sorted[j-1], sorted[j]
		}
	}
	at := func(q float64) time.Duration { return sorted[int(q*float64(len(sorted)-1))].Round(time.Millisecond) }
	t.Logf("%s: %d times, median %s, p95 %s, most %s", what, len(sorted), at(0.5), at(0.95), at(1))
	if most := at(0.95); most > returnLimit {
		t.Errorf("%s: %s for the slowest twentieth", what, most)
	}
}

// usage is what a process holds.
type usage struct{ descriptors, goroutines, kib int }

// resident is a process that stays while others are killed.
type resident struct {
	name       string
	pid        int
	goroutines func(*testing.T) int // nil: not looked at
	first      usage
}

func (r *resident) now(t *testing.T) usage {
	t.Helper()
	var u usage
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", r.pid))
	if err != nil {
		t.Fatalf("%s: %v", r.name, err)
	}
	u.descriptors = len(fds)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.pid))
	if err != nil {
		t.Fatalf("%s: %v", r.name, err)
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			u.kib, _ = strconv.Atoi(strings.Fields(rest)[0])
		}
	}
	if r.goroutines != nil {
		u.goroutines = r.goroutines(t)
	}
	return u
}

// agentGoroutines asks mk-agent for its figures and reads them in its log.
func agentGoroutines(t *testing.T, c *node.Child) (goroutines int) {
	t.Helper()
	figures := regexp.MustCompile(`msg=figures link=mkn0 goroutines=(\d+) `)
	read := func() [][]byte {
		text, err := os.ReadFile(c.AgentLog())
		if err != nil {
			t.Fatal(err)
		}
		var all [][]byte
		for _, m := range figures.FindAllSubmatch(text, -1) {
			all = append(all, m[1])
		}
		return all
	}
	before := len(read())
	c.SignalAgent(unix.SIGUSR1)
	netlab.Eventually(t, node.Patience, func() error {
		all := read()
		if len(all) == before {
			return errors.New("mk-agent does not log its figures")
		}
		var err error
		goroutines, err = strconv.Atoi(string(all[len(all)-1]))
		return err
	})
	return goroutines
}

// check fails the test when the process holds more than it did. A moment is given
// for what ends just now; a heap may grow until its collection, but not with
// every round.
func (r *resident) check(t *testing.T, what string) {
	t.Helper()
	const slackKiB = 32 << 10
	netlab.Eventually(t, node.Patience, func() error {
		u := r.now(t)
		if u.descriptors > r.first.descriptors+1 || u.goroutines > r.first.goroutines || u.kib > r.first.kib+slackKiB {
			return fmt.Errorf("%s after %s: %+v, had %+v", r.name, what, u, r.first)
		}
		t.Logf("%s after %s: %+v, had %+v", r.name, what, u, r.first)
		return nil
	})
}

// echo is a child's datagrams to the internet and back, every few milliseconds.
type echo struct {
	far, near *net.UDPConn
	sent      atomic.Uint64
	seen      atomic.Uint64 // the highest number that came back
	stop      chan struct{}
	work      sync.WaitGroup
}

func startEcho(t *testing.T, internet, child *netlab.Namespace, ep endpoint.Endpoint) *echo {
	t.Helper()
	e := &echo{far: udpSocket(t, internet, netlab.InternetAddr+":0"), near: udpSocket(t, child, ep.Address.String()+":0"), stop: make(chan struct{})}
	to := e.far.LocalAddr().(*net.UDPAddr).AddrPort()
	e.work.Go(func() { // the internet
		buf := make([]byte, 2048)
		for {
			n, from, err := e.far.ReadFromUDPAddrPort(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = e.far.WriteToUDPAddrPort(buf[:n], from) // loss is what the link is allowed
			}
		}
	})
	e.work.Go(func() {
		buf := make([]byte, 2048)
		for {
			n, err := e.near.Read(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil && n >= 8 {
				e.seen.Store(max(e.seen.Load(), binary.BigEndian.Uint64(buf)))
			}
		}
	})
	e.work.Go(func() {
		datagram := make([]byte, 1200)
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-e.stop:
				return
			case <-tick.C:
				binary.BigEndian.PutUint64(datagram, e.sent.Add(1))
				_, _ = e.near.WriteToUDPAddrPort(datagram, to) // without a carrier: ENOBUFS
			}
		}
	})
	t.Cleanup(e.finish)
	return e
}

// mark is a number that no datagram sent so far has reached.
func (e *echo) mark() uint64 { return e.sent.Load() + 1 }

// after waits until a datagram sent after the mark came back.
func (e *echo) after(t *testing.T, mark uint64) {
	t.Helper()
	for deadline := time.Now().Add(node.Patience); e.seen.Load() <= mark; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the link carries no packets")
		}
	}
}

// finish may be called more than once.
func (e *echo) finish() {
	select {
	case <-e.stop:
	default:
		close(e.stop)
	}
	_, _ = e.far.Close(), e.near.Close()
	e.work.Wait()
}

// stream is one TCP connection of a child that sends some MiB a second for as long
// as the test runs.
type stream struct {
	conn       net.Conn
	stop, done chan struct{}
	sent, got  hash.Hash
	bytes      int64
	sendErr    error
	received   chan error
}

func startStream(t *testing.T, internet, child *netlab.Namespace) *stream {
	t.Helper()
	s := &stream{stop: make(chan struct{}), done: make(chan struct{}), sent: sha256.New(), got: sha256.New(), received: make(chan error, 1)}
	var l net.Listener
	var err error
	internet.Do(t, func() { l, err = net.Listen("tcp4", netlab.InternetAddr+":0") })
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		conn, err := l.Accept()
		_ = l.Close() // one connection is all
		if err == nil {
			_, err = io.Copy(s.got, conn)
			err = errors.Join(err, conn.Close())
		}
		s.received <- err
	}()
	child.Do(t, func() { s.conn, err = net.DialTimeout("tcp4", l.Addr().String(), node.Patience) })
	if err != nil {
		_ = l.Close()
		t.Fatal(err)
	}
	go func() {
		defer close(s.done)
		source := rand.NewChaCha8([32]byte{1})
		buf := make([]byte, 64<<10)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for s.sendErr == nil {
			select {
			case <-s.stop:
				return
			case <-tick.C:
			}
			_, _ = source.Read(buf) // never fails
			s.sent.Write(buf)
			s.bytes += int64(len(buf))
			_, s.sendErr = s.conn.Write(buf)
		}
	}()
	t.Cleanup(func() {
		_ = s.conn.Close() // a second time where the test did
		select {
		case <-s.stop:
		default:
			close(s.stop)
		}
		<-s.done
	})
	return s
}

// finish ends the connection and compares what was sent with what came.
func (s *stream) finish(t *testing.T) {
	t.Helper()
	close(s.stop)
	if err := s.conn.SetDeadline(time.Now().Add(node.Patience)); err != nil {
		t.Fatal(err)
	}
	<-s.done
	if err := errors.Join(s.sendErr, s.conn.(*net.TCPConn).CloseWrite()); err != nil {
		t.Fatalf("the connection did not outlive the restarts: %v", err)
	}
	select {
	case err := <-s.received:
		if err != nil || !bytes.Equal(s.sent.Sum(nil), s.got.Sum(nil)) {
			t.Errorf("%d bytes of one connection arrived as others: %v", s.bytes, err)
		}
	case <-time.After(2 * node.Patience):
		t.Error("the end of the connection did not arrive")
	}
	t.Logf("one connection carried %d KiB", s.bytes>>10)
}
