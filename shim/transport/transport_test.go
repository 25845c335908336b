package transport

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"
)

func parse(t *testing.T, s string) Address {
	t.Helper()
	a, err := Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestUnix(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	a := parse(t, "unix://"+path)
	if _, err := Dial(t.Context(), a); !errors.Is(err, &DialError{Kind: Refused}) || !strings.Contains(err.Error(), "is mk-agent running") {
		t.Errorf("no socket: got %v, want refused", err)
	}
	l, err := Listen(t.Context(), a, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("socket has mode %v, %v; want 0600", info.Mode(), err)
	}
	if _, err := Listen(t.Context(), a, Options{}); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("second listener: got %v, want EADDRINUSE", err)
	}
	conn, err := Dial(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	// The look at the socket before the second Listen is in the queue as well.
	for {
		peer, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if n, _ := peer.Write([]byte("x")); n == 1 {
			checkBuffers(t, peer)
			_ = peer.Close()
			break
		}
		_ = peer.Close()
	}
	checkBuffers(t, conn)
	if b, err := io.ReadAll(conn); err != nil || string(b) != "x" {
		t.Errorf("read %q, %v", b, err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

func checkBuffers(t *testing.T, conn net.Conn) {
	t.Helper()
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = raw.Control(func(fd uintptr) {
		// The kernel doubles what it is asked for, socket(7).
		if n, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF); err != nil || n != 2*bufferBytes {
			t.Errorf("send buffer of %d bytes, %v; want %d", n, err, 2*bufferBytes)
		}
	})
}

func TestListenReplacesOnlyAStaleSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	if err := stale.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Dial(t.Context(), parse(t, "unix://"+path)); !errors.Is(err, &DialError{Kind: Refused}) {
		t.Errorf("stale socket: got %v, want refused", err)
	}
	l, err := Listen(t.Context(), parse(t, "unix://"+path), Options{})
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, []byte("keep"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(t.Context(), parse(t, "unix://"+file), Options{}); err == nil {
		t.Error("a regular file was replaced by a socket")
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "keep" {
		t.Errorf("the file is %q, %v", b, err)
	}
}

// vmm is a fake VMM: it reads the request line and does what answer says.
func vmm(t *testing.T, answer func(conn net.Conn, request string)) Address {
	t.Helper()
	path := filepath.Join(t.TempDir(), "v")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { _ = l.Close(); <-done })
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			var line []byte
			for b := make([]byte, 1); ; {
				if _, err := conn.Read(b); err != nil {
					break
				}
				line = append(line, b[0])
				if b[0] == '\n' {
					break
				}
			}
			answer(conn, string(line))
		}
	}()
	return parse(t, "hvsock://"+path+":1021")
}

func TestHybrid(t *testing.T) {
	a := vmm(t, func(conn net.Conn, request string) {
		_, _ = fmt.Fprintf(conn, "OK 1073741824\nguest got %q", request) // the guest's first bytes in the same write
		_ = conn.Close()
	})
	conn, err := Dial(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if b, err := io.ReadAll(conn); err != nil || string(b) != `guest got "CONNECT 1021\n"` {
		t.Errorf("read %q, %v", b, err)
	}
}

func TestHybridErrors(t *testing.T) {
	say := func(s string) func(net.Conn, string) {
		return func(conn net.Conn, _ string) { _, _ = io.WriteString(conn, s); _ = conn.Close() }
	}
	for _, tt := range []struct {
		name   string
		answer func(net.Conn, string)
		want   Kind
	}{
		{"guest refuses", say(""), Refused},
		{"cut line", say("OK 10"), Refused},
		{"no number", say("OK \n"), Other},
		{"negative", say("OK -1\n"), Other},
		{"something else", say("HTTP/1.1 400\n"), Other},
		{"endless line", say(strings.Repeat("A", 1<<16)), Other},
		{"silence", nil, TimedOut},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := silentVMM(t)
			if tt.answer != nil {
				a = vmm(t, tt.answer)
			}
			limit := time.Minute
			if tt.want == TimedOut {
				limit = 100 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			if _, err := Dial(ctx, a); !errors.Is(err, &DialError{Kind: tt.want}) {
				t.Errorf("got %v, want kind %q", err, tt.want)
			}
		})
	}
	gone := parse(t, "hvsock://"+filepath.Join(t.TempDir(), "none")+":1")
	if _, err := Dial(t.Context(), gone); !errors.Is(err, &DialError{Kind: NoDevice}) {
		t.Errorf("no VMM: got %v, want no device", err)
	}
}

// silentVMM accepts by its backlog and never answers.
func silentVMM(t *testing.T) Address {
	t.Helper()
	path := filepath.Join(t.TempDir(), "v")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return parse(t, "hvsock://"+path+":1021")
}

func TestDialIsCanceled(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	reason := errors.New("stopping")
	time.AfterFunc(50*time.Millisecond, func() { cancel(reason) })
	if _, err := Dial(ctx, silentVMM(t)); !errors.Is(err, reason) {
		t.Errorf("got %v, want %v", err, reason)
	}
}

func TestDialErrorKinds(t *testing.T) {
	v, h := parse(t, "vsock://5:1021"), parse(t, "hvsock:///x:1")
	mk := parse(t, "vsock://5:1021?transport=multikernel")
	for _, tt := range []struct {
		a    Address
		err  error
		want Kind
		says string
	}{
		{v, unix.EAFNOSUPPORT, NoDevice, "modprobe vsock"},
		{v, unix.ENODEV, NoDevice, "no child has CID 5"},
		{v, os.NewSyscallError("connect", unix.ENETUNREACH), NoDevice, ""},
		{v, os.NewSyscallError("connect", unix.ECONNRESET), Refused, "is mk-agent running"},
		{v, unix.ECONNREFUSED, Refused, ""},
		{h, unix.ECONNREFUSED, NoDevice, "VMM"},
		{v, os.NewSyscallError("connect", unix.ETIMEDOUT), TimedOut, ""},
		{v, context.DeadlineExceeded, TimedOut, ""},
		{v, unix.EACCES, Denied, "needs root"},
		{v, unix.EIO, Other, ""},
		{mk, fmt.Errorf("%w: %w", errUnsupported, unix.ENOPROTOOPT), Unsupported, "no multikernel vsock transport"},
	} {
		err := dialError(context.Background(), tt.a, tt.err)
		if !errors.Is(err, &DialError{Kind: tt.want}) || !errors.Is(err, tt.err) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%v: got %v, want kind %q and %q", tt.err, err, tt.want, tt.says)
		}
		var ne net.Error
		if !errors.As(err, &ne) || ne.Timeout() != (tt.want == TimedOut) {
			t.Errorf("%v: is no net.Error with the right Timeout", err)
		}
	}
}

// options is a socket of a kernel that answers option numbers with given errors.
type options struct {
	errs map[int]error
	set  []int
}

func (o *options) SetsockoptInt(level, opt, value int) error {
	o.set = append(o.set, level, opt, value)
	return o.errs[opt]
}

func (o *options) SetsockoptBytes(level, opt int, b []byte) error {
	o.set = append(o.set, level, opt, len(b))
	return o.errs[opt]
}

func TestVsockOptions(t *testing.T) {
	o := &options{}
	if err := setVsockOptions(o, true); err != nil {
		t.Fatal(err)
	}
	want := []int{40, 9, 1, 40, 2, 8, 40, 0, 8} // transport first, the maximum before the size
	if fmt.Sprint(o.set) != fmt.Sprint(want) {
		t.Errorf("options %v, want %v", o.set, want)
	}
	for _, tt := range []struct {
		multikernel bool
		opt         int
		errno       error
		want        error
	}{
		{true, 9, unix.ENOPROTOOPT, errUnsupported},
		{true, 9, unix.EINVAL, errUnsupported},
		{true, 9, unix.EPERM, unix.EPERM},
		{false, 9, unix.ENOPROTOOPT, nil},
		{true, 2, unix.ENOPROTOOPT, nil},
		{false, 0, unix.ENOMEM, unix.ENOMEM},
	} {
		err := setVsockOptions(&options{errs: map[int]error{tt.opt: tt.errno}}, tt.multikernel)
		if tt.want == nil && err != nil || !errors.Is(err, tt.want) {
			t.Errorf("multikernel %t, option %d answers %v: got %v, want %v", tt.multikernel, tt.opt, tt.errno, err, tt.want)
		}
	}
}

// The kernel under test has AF_VSOCK sockets or has none; both answers are real.
func TestVsockMultikernelOnThisKernel(t *testing.T) {
	_, err := Dial(t.Context(), parse(t, "vsock://4294967294:1021?transport=multikernel"))
	if !errors.Is(err, &DialError{Kind: Unsupported}) && !errors.Is(err, &DialError{Kind: NoDevice}) {
		t.Errorf("got %v, want unsupported or no device", err)
	}
}

// fromCID is a connection whose peer claims a CID.
type fromCID struct {
	net.Conn
	cid uint32
}

func (c fromCID) RemoteAddr() net.Addr { return &vsock.Addr{ContextID: c.cid, Port: 77} }

type queueListener struct{ conns chan net.Conn }

func (l queueListener) Accept() (net.Conn, error) {
	c, ok := <-l.conns
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}
func (queueListener) Close() error   { return nil }
func (queueListener) Addr() net.Addr { return &vsock.Addr{} }

func TestGateChecksTheCID(t *testing.T) {
	q := queueListener{make(chan net.Conn, 4)}
	var closed []net.Conn
	for _, cid := range []uint32{1, 3, 2} {
		ours, theirs := net.Pipe()
		closed = append(closed, theirs)
		q.conns <- fromCID{ours, cid}
	}
	close(q.conns)
	var rejected bytes.Buffer
	g := &gate{Listener: q, allowed: []uint32{CIDHost}, rejected: func(a net.Addr, why string) { fmt.Fprintf(&rejected, "%s: %s\n", a, why) }}
	conn, err := g.Accept()
	if err != nil || conn.(fromCID).cid != 2 {
		t.Fatalf("got %v, %v; want the peer of CID 2", conn, err)
	}
	for _, c := range closed[:2] {
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("a rejected peer reads %v, want EOF", err)
		}
	}
	if got := rejected.String(); !strings.Contains(got, "CID 1 is not allowed") || strings.Contains(got, "CID 3") {
		t.Errorf("rejected: %q", got)
	}
}

func FuzzHybridAnswer(f *testing.F) {
	for _, s := range []string{"OK 1\n", "OK 4294967295\nrest", "OK", "\n", "OK 1 \n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		err := readHybridAnswer(iotest.OneByteReader(r))
		if read := len(b) - r.Len(); read > maxHybridLine {
			t.Fatalf("read %d bytes of %q", read, b)
		}
		if err == nil {
			line, rest, _ := bytes.Cut(b, []byte("\n"))
			if !bytes.HasPrefix(line, []byte("OK ")) || r.Len() != len(rest) {
				t.Fatalf("%q is accepted, %d bytes are left", b, r.Len())
			}
		}
	})
}
