package pump

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	wire "mknet/spec/pump"
	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// limit is generous: the machine may be busy.
const limit = 30 * time.Second

// fakeTun is a queue made of a datagram socket: one read and one write a packet,
// non-blocking and known to the poller, like the real one.
type fakeTun struct {
	*os.File
	raw      syscall.RawConn
	vnet     bool
	offloads wire.Offloads
}

func (f *fakeTun) Name() string                      { return "fake" }
func (f *fakeTun) VnetHeader() bool                  { return f.vnet }
func (f *fakeTun) SyscallConn() syscall.RawConn      { return f.raw }
func (f *fakeTun) SetOffloads(o wire.Offloads) error { f.offloads = o; return nil }

// socketpair returns two ends that are known to the poller.
func socketpair(t testing.TB, kind int) [2]*os.File {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	var files [2]*os.File
	for i, fd := range fds {
		files[i] = os.NewFile(uintptr(fd), "socketpair")
		t.Cleanup(func() { files[i].Close() }) // some tests close it before
	}
	return files
}

// newTun returns a queue and the kernel's end of it.
func newTun(t testing.TB, vnet bool) (*fakeTun, *os.File) {
	t.Helper()
	p := socketpair(t, unix.SOCK_SEQPACKET)
	raw, err := p[0].SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := p[1].SetDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	return &fakeTun{File: p[0], raw: raw, vnet: vnet}, p[1]
}

// stream returns the two ends of a connection.
func stream(t testing.TB) (a, b net.Conn) {
	t.Helper()
	p := socketpair(t, unix.SOCK_STREAM)
	var conns [2]net.Conn
	for i, f := range p {
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		t.Cleanup(func() { c.Close() }) // Run closes it as well
		conns[i] = c
	}
	return conns[0], conns[1]
}

func newAEAD(t testing.TB, key byte) cipher.AEAD {
	t.Helper()
	b, err := aes.NewCipher([]byte{15: key})
	if err != nil {
		t.Fatal(err)
	}
	a, err := cipher.NewGCM(b)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func config() Config {
	return Config{MTUBytes: 1400, LocalOffloads: wire.AllOffloads, PeerOffloads: wire.AllOffloads, Counters: new(Counters)}
}

// running is a Run in the background.
type running struct {
	stop context.CancelCauseFunc
	err  chan error
}

func start(t testing.TB, cfg Config, queues []device, lanes []Lane) *running {
	t.Helper()
	ctx, cancel := context.WithCancelCause(context.Background())
	r := &running{cancel, make(chan error, 1)}
	var wg sync.WaitGroup
	wg.Go(func() { r.err <- run(ctx, cfg, queues, lanes) })
	t.Cleanup(func() { cancel(nil); wg.Wait() })
	return r
}

// wait returns why the session ended.
func (r *running) wait(t testing.TB) error {
	t.Helper()
	select {
	case err := <-r.err:
		return err
	case <-time.After(limit):
		t.Fatalf("the session did not end within %s", limit)
		return nil
	}
}

// packet is a UDP packet of n bytes that carries a number.
func packet(n int, src byte, number uint32) []byte {
	p := make([]byte, n)
	p[0], p[8], p[9] = 0x45, 64, 17
	binary.BigEndian.PutUint16(p[2:], uint16(n))
	copy(p[12:], []byte{172, 30, 0, src, 172, 30, 0, 1})
	binary.BigEndian.PutUint32(p[n-4:], number)
	return p
}

func put(t testing.TB, f *os.File, vnet bool, p []byte) {
	t.Helper()
	if vnet {
		p = append(wire.VnetHeader{}.Append(nil), p...)
	}
	if _, err := f.Write(p); err != nil {
		t.Fatalf("hand a packet to the queue: %v", err)
	}
}

func get(t testing.TB, f *os.File, vnet bool) []byte {
	t.Helper()
	b := make([]byte, wire.MaxFrameBytes)
	n, err := f.Read(b)
	if err != nil {
		t.Fatalf("wait for a packet from the queue: %v", err)
	}
	if !vnet {
		return b[:n]
	}
	if h := wire.ParseVnet(b); h != (wire.VnetHeader{}) {
		t.Fatalf("packet with virtio-net header %+v, want none of it set", h)
	}
	return b[wire.VnetHeaderBytes:n]
}

// peer is the other end of a lane, played by the test.
type peer struct {
	net.Conn
	buf []byte
}

// next returns the next frame, leaving out those of the given types.
func (p *peer) next(t testing.TB, skip ...wire.Type) wire.Frame {
	t.Helper()
	if err := p.SetReadDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
read:
	for {
		f, err := wire.Next(p.buf, false)
		if err != nil {
			t.Fatalf("frame from the pump: %v", err)
		}
		if f.Bytes == 0 {
			b := make([]byte, 1<<16)
			n, err := p.Read(b)
			if err != nil {
				t.Fatalf("wait for a frame from the pump: %v", err)
			}
			p.buf = append(p.buf, b[:n]...)
			continue
		}
		p.buf = p.buf[f.Bytes:]
		for _, s := range skip {
			if f.Type == s {
				continue read
			}
		}
		return f
	}
}

func (p *peer) send(t testing.TB, b []byte) {
	t.Helper()
	if _, err := p.Write(b); err != nil {
		t.Fatalf("send to the pump: %v", err)
	}
}

// expectClose reads to the Close frame and checks its reason.
func (p *peer) expectClose(t testing.TB, want wire.Reason) {
	t.Helper()
	f := p.next(t, wire.Ping, wire.Pong, wire.Credits, wire.Data, wire.DataVnet)
	if r, text := wire.CloseText(f.Body); r != want {
		t.Errorf("the pump says %s (%s), want %s", r, text, want)
	}
}

// ring is a transport of messages with a ring of slots and no flow control: a
// write that finds it full fails at once. It is one direction.
type ring struct {
	mu       sync.Mutex
	slots    int
	messages [][]byte
	full     int // writes refused
	longest  int
	most     int
	closed   bool
	arrived  chan struct{}
}

func (r *ring) write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		return 0, syscall.EPIPE
	case len(r.messages) == r.slots:
		r.full++
		return 0, &net.OpError{Op: "write", Err: os.NewSyscallError("sendto", syscall.ENOBUFS)}
	}
	r.longest = max(r.longest, len(b))
	r.messages = append(r.messages, append([]byte(nil), b...))
	r.most = max(r.most, len(r.messages))
	signal(r.arrived)
	return len(b), nil
}

// ringConn is one end of two rings.
type ringConn struct {
	in, out *ring
	pace    time.Duration // before each read
	expired chan struct{} // closed by a read deadline that has passed
	once    sync.Once
}

func newRingConns(slots int) (a, b *ringConn) {
	x := &ring{slots: slots, arrived: make(chan struct{}, 1)}
	y := &ring{slots: slots, arrived: make(chan struct{}, 1)}
	return &ringConn{in: x, out: y, expired: make(chan struct{})}, &ringConn{in: y, out: x, expired: make(chan struct{})}
}

func (c *ringConn) Read(b []byte) (int, error) {
	for {
		if c.pace > 0 {
			time.Sleep(c.pace) // a slow kernel, not a wait for something
		}
		c.in.mu.Lock()
		if len(c.in.messages) > 0 {
			n := copy(b, c.in.messages[0])
			if n == len(c.in.messages[0]) {
				c.in.messages = c.in.messages[1:]
			} else {
				c.in.messages[0] = c.in.messages[0][n:]
			}
			c.in.mu.Unlock()
			return n, nil
		}
		closed := c.in.closed
		c.in.mu.Unlock()
		if closed {
			return 0, errors.New("end of stream")
		}
		select {
		case <-c.in.arrived:
		case <-c.expired:
			return 0, os.ErrDeadlineExceeded
		}
	}
}

func (c *ringConn) Write(b []byte) (int, error) { return c.out.write(b) }
func (c *ringConn) Close() error {
	for _, r := range []*ring{c.in, c.out} {
		r.mu.Lock()
		r.closed = true
		r.mu.Unlock()
		signal(r.arrived)
	}
	c.once.Do(func() { close(c.expired) })
	return nil
}
func (c *ringConn) LocalAddr() net.Addr               { return nil }
func (c *ringConn) RemoteAddr() net.Addr              { return nil }
func (c *ringConn) SetWriteDeadline(time.Time) error  { return nil } // a write never waits
func (c *ringConn) SetReadDeadline(d time.Time) error { return c.SetDeadline(d) }
func (c *ringConn) SetDeadline(d time.Time) error {
	if !d.IsZero() {
		time.AfterFunc(time.Until(d), func() { c.once.Do(func() { close(c.expired) }) })
	}
	return nil
}

// newChunky is a cipher that the pump does not know: AES-GCM with a short tag.
func newChunky() (cipher.AEAD, error) {
	b, err := aes.NewCipher(make([]byte, 16))
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithTagSize(b, 12)
}

// discard is a connection that nobody uses.
type discard struct{ net.Conn }

func must(fd int, err error) int {
	if err != nil {
		panic(err)
	}
	return fd
}

func mustRaw(c syscall.RawConn, err error) syscall.RawConn {
	if err != nil {
		panic(err)
	}
	return c
}
