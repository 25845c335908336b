package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"mknet/spec/api"
	"mknet/spec/fdpass"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// In the process that becomes the supervised mknetd: where its listener goes, and
// what it executes.
const (
	superviseEnv        = "MKNET_E2E_SUPERVISE"
	superviseProgramEnv = "MKNET_E2E_SUPERVISE_PROGRAM"
)

// supervisor sees every rtnetlink message of a mknetd before the kernel does, and may
// answer in its place (seccomp_unotify(2)). Programs that mknetd runs are let through.
type supervisor struct {
	pid      int
	listener *os.File
	done     chan struct{}

	mu sync.Mutex
	// onRequest returns the error that a request is answered with, 0 to let it pass.
	onRequest func(request) unix.Errno
	// onDump is called between a dump's request and the first reading of its answer.
	onDump  func(request)
	pending map[uint64]request // dumps that nobody has read of, by descriptor
}

// request is the head of a netlink message (struct nlmsghdr of netlink(7)).
type request struct{ kind, flags uint16 }

func (r request) dump() bool { return r.flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP }

// single tells a question about one object. Types come in fours: new, delete, get, set.
func (r request) single() bool { return r.kind%4 == unix.RTM_GETLINK%4 && !r.dump() }

func (r request) String() string { return fmt.Sprintf("type %d flags %#x", r.kind, r.flags) }

// Layouts of <linux/seccomp.h>.
type (
	notification struct {
		id         uint64
		pid, flags uint32
		nr         int32
		arch       uint32
		ip         uint64
		args       [6]uint64
	}
	response struct {
		id    uint64
		val   int64
		error int32
		flags uint32
	}
)

// supervise starts mknetd under a supervisor that lets everything pass.
func supervise(t *testing.T, n *node.Node) *supervisor {
	t.Helper()
	s, err := superviseWith(t, n, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// superviseWith starts mknetd under a supervisor that is told first what to do. The error
// is that of a mknetd that did not start.
func superviseWith(t *testing.T, n *node.Node, tell func(*supervisor)) (*supervisor, error) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := n.Dir + "/supervise.sock"
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := &supervisor{done: make(chan struct{}), pending: map[uint64]request{}}
	ready := make(chan error, 1)
	go func() {
		ready <- s.receive(l)
		s.serve()
	}()
	if tell != nil {
		tell(s)
	}
	real := n.Daemon
	defer func() { n.Daemon = real }()
	n.Daemon = self
	started := n.TryStart(t, superviseEnv+"="+path, superviseProgramEnv+"="+real)
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // before the node's own, which starts a mknetd without a supervisor
		if t.Failed() {
			n.Kill(t)
		} else {
			n.Stop(t)
		}
		select {
		case <-s.done:
		case <-time.After(node.Patience):
			t.Error("the supervisor outlives mknetd")
		}
	})
	return s, started
}

// becomeSupervised puts the calling thread under a filter whose listener it sends to
// the test, and becomes the program. It returns only on an error.
func becomeSupervised() error {
	runtime.LockOSThread()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: os.Getenv(superviseEnv), Net: "unix"})
	if err != nil {
		return err
	}
	const number = 0 // offset in struct seccomp_data
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: number},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_SENDTO, Jt: 1},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_RECVFROM, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_USER_NOTIF},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return fmt.Errorf("seccomp: %w", errno)
	}
	if _, err := fdpass.Send(conn, []byte{0}, os.NewFile(fd, "seccomp listener")); err != nil {
		return err
	}
	var env []string
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, superviseEnv) {
			env = append(env, v)
		}
	}
	path := os.Getenv(superviseProgramEnv)
	return fmt.Errorf("execute %s: %w", path, syscall.Exec(path, append([]string{path}, os.Args[1:]...), env))
}

// receive takes over the listener of the process that is to be supervised.
func (s *supervisor) receive(l *net.UnixListener) error {
	if err := l.SetDeadline(time.Now().Add(node.Patience)); err != nil {
		return err
	}
	conn, err := l.AcceptUnix()
	if err != nil {
		return err
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return err
	}
	if credErr != nil {
		return credErr
	}
	oob := make([]byte, fdpass.Room(1))
	_, n, _, _, err := conn.ReadMsgUnix(make([]byte, 1), oob)
	if err != nil {
		return err
	}
	files, err := fdpass.Received(oob[:n], "seccomp listener")
	if err != nil {
		return err
	}
	if len(files) != 1 {
		return fmt.Errorf("%d descriptors came, want the listener", len(files))
	}
	s.pid, s.listener = int(cred.Pid), files[0]
	return nil
}

// serve answers until no process is left under the filter.
func (s *supervisor) serve() {
	defer close(s.done)
	if s.listener == nil {
		return
	}
	defer s.listener.Close()
	fd := s.listener.Fd()
	for {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		if poll[0].Revents&unix.POLLIN == 0 {
			if poll[0].Revents != 0 { // POLLHUP
				return
			}
			continue
		}
		var in notification
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&in))); errno != 0 {
			continue // the caller was killed, or interrupted, meanwhile
		}
		out := response{id: in.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
		if errno := s.answer(in); errno != 0 {
			out = response{id: in.id, error: -int32(errno)}
		}
		_, _, _ = unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&out)))
	}
}

func (s *supervisor) answer(in notification) unix.Errno {
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", s.pid, in.pid)); err != nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	fd := in.args[0]
	if in.nr == unix.SYS_RECVFROM {
		if r, ok := s.pending[fd]; ok && s.onDump != nil {
			s.onDump(r)
		}
		delete(s.pending, fd)
		return 0
	}
	r, err := s.read(in.args[1])
	if err != nil {
		return 0
	}
	delete(s.pending, fd)
	if r.dump() {
		s.pending[fd] = r
	}
	if s.onRequest == nil {
		return 0
	}
	return s.onRequest(r)
}

// read returns the head of the message at an address of the supervised process.
func (s *supervisor) read(address uint64) (request, error) {
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", s.pid))
	if err != nil {
		return request{}, err
	}
	defer memory.Close()
	var head [unix.SizeofNlMsghdr]byte
	if _, err := memory.ReadAt(head[:], int64(address)); err != nil {
		return request{}, err
	}
	return request{kind: binary.NativeEndian.Uint16(head[4:]), flags: binary.NativeEndian.Uint16(head[6:])}, nil
}

// failNth makes the i-th request from now fail that changes or lists something; stop
// ends that and tells which one it was, nil when there were not so many. Questions about
// single links, the larger half, are left out: one function asks them.
func (s *supervisor) failNth(i int, errno unix.Errno) (stop func() *request) {
	var failed *request
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onRequest = func(r request) unix.Errno {
		if r.single() {
			return 0
		}
		if i--; i != 0 {
			return 0
		}
		failed = &r
		return errno
	}
	return func() *request {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.onRequest = nil
		return failed
	}
}

// walk lets the first request of an operation fail, then in another run of it the
// second, until a run has not so many. The operation may end the fault early, before it
// looks at what is left. Each must be refused as UNAVAILABLE, retryable, or work all the
// same. It returns how many were refused.
func (s *supervisor) walk(t *testing.T, name string, errno unix.Errno, run func(stop func() *request) error) (refused int) {
	t.Helper()
	spared := 0
	for i := 1; ; i++ {
		stop := s.failNth(i, errno)
		err := run(stop)
		failed := stop()
		var e *api.Error
		switch {
		case err == nil && failed == nil:
			if refused == 0 {
				t.Errorf("%s: no request was refused", name)
			}
			return refused
		case err == nil && spared < 4: // most likely a request of something else that mknetd does
			spared++
			i--
			continue
		case err == nil:
			t.Logf("%s: can do without request %d (%s)", name, i, failed)
		case failed == nil:
			t.Fatalf("%s without a fault: %v", name, err)
		case !errors.As(err, &e) || e.Code != api.Unavailable || !e.Retryable:
			t.Errorf("%s: request %d (%s) failed: got %v, want UNAVAILABLE", name, i, failed, err)
			refused++
		default:
			refused++
		}
		spared = 0
	}
}

// interruptDumps makes a link in the namespace, or removes it, in the middle of mknetd's
// next lists of links, at most this many times; stop ends that and returns how many lists
// there were.
func (s *supervisor) interruptDumps(t *testing.T, ns *netlab.Namespace, most int) (stop func() int) {
	made, dumps := false, 0
	change := func() {
		if made {
			ns.Run(t, "ip", "link", "del", "flip0")
		} else {
			ns.Run(t, "ip", "link", "add", "flip0", "type", "veth", "peer", "name", "flip1")
		}
		made = !made
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onDump = func(r request) {
		if r.kind != unix.RTM_GETLINK {
			return
		}
		if dumps++; dumps <= most {
			change()
		}
	}
	return func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.onDump = nil
		if made {
			change()
		}
		return dumps
	}
}
