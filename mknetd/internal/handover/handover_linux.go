// Package handover is the conversation in which a running mknetd hands its
// listening sockets and then its store to a newer one. It knows neither: it
// carries descriptors and the order of steps of spec/life-cycle.md, "Takeover".
//
// The two talk over a socket of their own in the folder of the store, one message
// a packet (SOCK_SEQPACKET, unix(7)), so that whoever has the store is the one
// that is asked. Only root, or the daemon's own user, is answered.
//
//	successor                     predecessor
//	hello            ->
//	                 <-           descriptors (with the sockets), or refused
//	ready            ->
//	                              takes no further call, ends those at work, closes the store
//	                 <-           released
//	opens the store, serves
//	serving, failed  ->
//	                              ends, or opens the store again and serves on;
//	                              before that it kills a successor that stays silent
//
// The end of the conversation before its last word means that the other side is
// dead or has given up: a successor then tries to open the store, whose lock
// decides; a predecessor serves on.
package handover

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/fdpass"
)

// FileName is the socket's name in the folder of the store.
const FileName = "takeover.sock"

// protocolVersion changes when an older mknetd could not take part any more.
const protocolVersion = 1

const (
	// answerWait is how long either side waits for an answer that needs no work.
	answerWait = 10 * time.Second
	// lastLook is how long a successor's last word is waited for before it is killed.
	lastLook = time.Second
	// killWait is how long a killed process may take to end: it may be in a long
	// system call, of netlink for example.
	killWait   = 20 * time.Second
	maxMessage = 4 << 10
	maxFiles   = 4
)

// ErrNobody is returned by Ask when no mknetd listens.
var ErrNobody = errors.New("no mknetd to take over from")

// RefusedError is what the running mknetd answered.
type RefusedError struct{ Why string }

func (e *RefusedError) Error() string { return "the running mknetd refuses: " + e.Why }

// Hello is what a successor says of itself. Where it would listen somewhere else,
// the sockets are of no use to it.
type Hello struct {
	Program string `json:"program"` // its version
	PID     int    `json:"pid"`
	Socket  string `json:"socket"`
	TCP     string `json:"tcp,omitempty"`
	Metrics string `json:"metrics,omitempty"` // where it would serve metrics
}

// message is every packet.
type message struct {
	Version int      `json:"version"`
	Step    step     `json:"step"`
	Hello   *Hello   `json:"hello,omitempty"`
	Names   []string `json:"names,omitempty"` // of the descriptors, in order
	Why     string   `json:"why,omitempty"`
}

type step string

const (
	hello       step = "hello"
	descriptors step = "descriptors"
	refused     step = "refused"
	ready       step = "ready"
	released    step = "released"
	serving     step = "serving"
	failed      step = "failed"
)

// talk is one end of a conversation.
type talk struct{ conn *net.UnixConn }

func (t talk) send(m message, files ...*os.File) error {
	m.Version = protocolVersion
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if err := t.conn.SetWriteDeadline(time.Now().Add(answerWait)); err != nil {
		return err
	}
	if _, err := fdpass.Send(t.conn, text, files...); err != nil {
		return fmt.Errorf("takeover: send %s: %w", m.Step, err)
	}
	return nil
}

// receive waits for one message; the files that come with it are the caller's.
func (t talk) receive(wait time.Duration) (m message, files []*os.File, err error) {
	if err := t.conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return m, nil, err
	}
	text, oob := make([]byte, maxMessage), make([]byte, fdpass.Room(maxFiles))
	n, oobn, flags, _, err := t.conn.ReadMsgUnix(text, oob)
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = io.EOF
		}
		return m, nil, err
	}
	files, err = fdpass.Received(oob[:oobn], "taken over")
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errors.New("is too long")
	}
	if err == nil {
		err = json.Unmarshal(text[:n], &m)
	}
	if err == nil && m.Version != protocolVersion {
		err = fmt.Errorf("has version %d, want %d", m.Version, protocolVersion)
	}
	if err != nil {
		closeAll(files)
		return m, nil, fmt.Errorf("takeover: message: %w", err)
	}
	return m, files, nil
}

// hungUp reports whether an error of send or receive means that the other side has
// ended the conversation: by its end or by Close, with or without something of ours
// that it had not read, accepted or not (net/unix/af_unix.c, unix_release_sock).
func hungUp(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE)
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// Listener waits for a successor.
type Listener struct {
	unix *net.UnixListener
	path string
}

// Listen makes the socket in dir. The caller holds the lock of the store there, so
// that a socket which is there is left from a dead daemon.
func Listen(dir string) (*Listener, error) {
	path := filepath.Join(dir, FileName)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("takeover socket: %w", err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("takeover socket: %w", err)
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("takeover socket: %w", err), l.Close())
	}
	return &Listener{unix: l, path: path}, nil
}

// Inherit makes a Listener of one that was handed over; f stays the caller's.
func Inherit(dir string, f *os.File) (*Listener, error) {
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("takeover socket: %w", err)
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(errors.New("takeover socket: is no Unix socket"), l.Close())
	}
	return &Listener{unix: u, path: filepath.Join(dir, FileName)}, nil
}

// File returns a descriptor to hand over; the caller closes it.
func (l *Listener) File() (*os.File, error) { return l.unix.File() }

// Close stops listening; the socket's file stays.
func (l *Listener) Close() error { return l.unix.Close() }

// Remove takes the socket's file away. The caller still holds the store's lock.
func (l *Listener) Remove() error {
	if err := os.Remove(l.path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Accept waits for a successor that may ask and has said hello. It returns
// net.ErrClosed once the listener is closed, and any other error for one caller
// only: Accept may be called again.
func (l *Listener) Accept(ctx context.Context) (*Request, error) {
	conn, err := l.unix.AcceptUnix()
	if err != nil {
		return nil, err
	}
	r := &Request{talk: talk{conn}}
	r.forget = context.AfterFunc(ctx, func() { _ = conn.Close() })
	if err := r.greet(); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// Request is the predecessor's end.
type Request struct {
	Hello
	talk   talk
	forget func() bool
}

func (r *Request) greet() error {
	peer, err := peerOf(r.talk.conn)
	if err != nil {
		return err
	}
	if uid := int(peer.Uid); uid != 0 && uid != os.Geteuid() {
		err := fmt.Errorf("uid %d may not take over, only root may", uid)
		return errors.Join(err, r.talk.send(message{Step: refused, Why: err.Error()}))
	}
	m, files, err := r.talk.receive(answerWait)
	if err != nil {
		return err
	}
	closeAll(files)
	if m.Step != hello || m.Hello == nil {
		return fmt.Errorf("takeover: got %q, want hello", m.Step)
	}
	r.Hello = *m.Hello
	return nil
}

// peerOf is the process that connected.
func peerOf(c *net.UnixConn) (*unix.Ucred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var inner error
	err = raw.Control(func(fd uintptr) { cred, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, inner); err != nil {
		return nil, fmt.Errorf("takeover: SO_PEERCRED: %w", err)
	}
	return cred, nil
}

// Refuse tells the successor why and ends the conversation.
func (r *Request) Refuse(why string) error {
	return errors.Join(r.talk.send(message{Step: refused, Why: why}), r.Close())
}

// Grant passes the sockets and waits until the successor has made use of them; then
// it waits for Released. From the moment that they are passed the end of Accept's
// context means nothing any more. The files stay the caller's.
func (r *Request) Grant(names []string, files []*os.File) error {
	if !r.forget() {
		return errors.New("takeover: this mknetd is ending")
	}
	if err := r.talk.send(message{Step: descriptors, Names: names}, files...); err != nil {
		return err
	}
	m, extra, err := r.talk.receive(answerWait)
	closeAll(extra)
	if err != nil {
		return fmt.Errorf("takeover: wait for the successor to be ready: %w", err)
	}
	if m.Step != ready {
		return fmt.Errorf("takeover: the successor says %s %s", m.Step, m.Why)
	}
	return nil
}

// Released says that the store is free, and returns nil when the successor serves.
// With any error it does not, and the store is free again: it said so, it ended, or
// it was killed, because it took longer than wait. Where it could not be killed the
// error says that too, and the store may be in use.
func (r *Request) Released(wait time.Duration) error {
	if err := r.talk.send(message{Step: released}); err != nil {
		return err
	}
	done, err := r.lastWord(wait)
	if !done {
		err = r.end(err)
	}
	return err
}

// lastWord is how the conversation ends: nil means that the successor serves. Where
// it is not done the successor is alive and may hold the store.
func (r *Request) lastWord(wait time.Duration) (done bool, err error) {
	m, extra, err := r.talk.receive(wait)
	closeAll(extra)
	switch {
	case hungUp(err):
		return true, errors.New("takeover: the successor ended")
	case err != nil:
		return false, fmt.Errorf("takeover: wait for the successor to serve: %w", err)
	case m.Step == serving:
		return true, nil
	case m.Step == failed:
		return true, fmt.Errorf("takeover: the successor says %s: %s", m.Step, m.Why)
	}
	return false, fmt.Errorf("takeover: got %s, want %s or %s", m.Step, serving, failed)
}

// end kills the successor and waits until it has let go of the store. A successor that
// hangs, or is stopped, could not be told to. why is the reason, and what is returned
// unless the last word comes after all: this process may have been stopped itself.
func (r *Request) end(why error) error {
	peer, err := peerOf(r.talk.conn)
	if err != nil {
		return errors.Join(why, err)
	}
	pidfd, err := unix.PidfdOpen(int(peer.Pid), 0)
	if errors.Is(err, unix.ESRCH) {
		return why // it has just ended
	}
	if err != nil { // EINVAL: PID 0, it is of a PID namespace that is not ours
		return errors.Join(why, fmt.Errorf("takeover: open the successor, process %d: %w", peer.Pid, err))
	}
	defer unix.Close(pidfd)
	// Only the process that connected has the other end. So while that is open the
	// number cannot be another's.
	if done, err := r.lastWord(lastLook); done {
		return err
	}
	if err := unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return errors.Join(why, fmt.Errorf("takeover: kill the successor, process %d: %w", peer.Pid, err))
	}
	// It is readable once every thread has ended, and with them its descriptors
	// (pidfd_open(2); kernel/exit.c, do_exit).
	for deadline := time.Now().Add(killWait); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(time.Until(deadline).Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR) && time.Now().Before(deadline):
			continue
		case err != nil, n == 0:
			return errors.Join(why, fmt.Errorf("takeover: the successor, process %d, was killed and has not ended within %s: %w", peer.Pid, killWait, cmp.Or(err, error(unix.ETIMEDOUT))))
		}
		return fmt.Errorf("%w (killed process %d)", why, peer.Pid)
	}
}

// Close ends the conversation; the successor gives up unless it had the last word.
func (r *Request) Close() error {
	r.forget()
	return r.talk.conn.Close()
}

// Grant is the successor's end.
type Grant struct {
	Files map[string]*os.File // by name; Grant's until Close
	talk  talk
}

// Ask asks the daemon whose store lies in dir for its sockets. Without one, also one
// that ends before it answers, it is ErrNobody.
func Ask(ctx context.Context, dir string, who Hello) (*Grant, error) {
	path := filepath.Join(dir, FileName)
	conn, err := new(net.Dialer).DialContext(ctx, "unixpacket", path)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, ErrNobody
	}
	if err != nil {
		return nil, fmt.Errorf("takeover: %w", err)
	}
	g := &Grant{talk: talk{conn.(*net.UnixConn)}, Files: map[string]*os.File{}}
	if err := g.ask(who); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

func (g *Grant) ask(who Hello) error {
	err := g.talk.send(message{Step: hello, Hello: &who})
	if hungUp(err) {
		return ErrNobody
	}
	if err != nil {
		return err
	}
	// The daemon may be about to end, or busy with another successor.
	m, files, err := g.talk.receive(2 * answerWait)
	if hungUp(err) {
		return ErrNobody
	}
	if err != nil {
		return fmt.Errorf("takeover: wait for the sockets: %w", err)
	}
	if m.Step == descriptors && len(files) == len(m.Names) {
		for i, name := range m.Names {
			g.Files[name] = files[i]
		}
		return nil
	}
	closeAll(files)
	if m.Step == refused {
		return &RefusedError{Why: m.Why}
	}
	return fmt.Errorf("takeover: got %s with %d descriptors", m.Step, len(files))
}

// AwaitRelease says that the sockets are in use and waits for the store. It
// returns nil also when the other side is dead, because that frees the store too.
func (g *Grant) AwaitRelease(ctx context.Context, wait time.Duration) error {
	defer context.AfterFunc(ctx, func() { _ = g.talk.conn.Close() })()
	if err := g.talk.send(message{Step: ready}); err != nil && !hungUp(err) {
		return err
	}
	m, files, err := g.talk.receive(wait)
	closeAll(files)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case hungUp(err):
		return nil
	case err != nil:
		return fmt.Errorf("takeover: wait for the store: %w", err)
	case m.Step != released:
		return fmt.Errorf("takeover: got %s, want released", m.Step)
	}
	return nil
}

// Serving lets the predecessor end.
func (g *Grant) Serving() error { return g.talk.send(message{Step: serving}) }

// Failed has the predecessor serve on; the caller must have let go of the store.
func (g *Grant) Failed(why error) error {
	return g.talk.send(message{Step: failed, Why: why.Error()[:min(len(why.Error()), maxMessage/2)]})
}

// Close ends the conversation and closes the files. It may be called twice.
func (g *Grant) Close() error {
	for _, f := range g.Files {
		_ = f.Close()
	}
	if err := g.talk.conn.Close(); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}
