package handover

import (
	"errors"
	"net"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const patience = time.Minute

// listen makes a takeover socket as that of a daemon.
func listen(t *testing.T) (*net.UnixListener, string) {
	t.Helper()
	dir := t.TempDir()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(dir, FileName), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l, dir
}

// readable waits until a caller is queued, or something is said.
func readable(t *testing.T, s syscall.Conn) {
	t.Helper()
	raw, err := s.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var n int
	controlErr := raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err = unix.Poll(p, int(patience.Milliseconds()))
		for errors.Is(err, unix.EINTR) {
			n, err = unix.Poll(p, int(patience.Milliseconds()))
		}
	})
	if err := errors.Join(controlErr, err); err != nil || n != 1 {
		t.Fatalf("nobody and nothing came: %v", err)
	}
}

// Whoever asks a daemon that dies without having answered has nobody to take over
// from, however far the daemon had come.
func TestAskADaemonThatDies(t *testing.T) {
	for _, tt := range []struct {
		name string
		die  func(*testing.T, *net.UnixListener)
	}{
		{"before it accepts", func(t *testing.T, l *net.UnixListener) {
			readable(t, l)
		}},
		{"with the hello unread", func(t *testing.T, l *net.UnixListener) {
			c, err := l.AcceptUnix()
			if err != nil {
				t.Fatal(err)
			}
			readable(t, c)
			c.Close()
		}},
		{"with the hello read", func(t *testing.T, l *net.UnixListener) {
			c, err := l.AcceptUnix()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Read(make([]byte, maxMessage)); err != nil {
				t.Fatal(err)
			}
			c.Close()
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l, dir := listen(t)
			answer := make(chan error, 1)
			go func() {
				g, err := Ask(t.Context(), dir, Hello{Program: "new"})
				if err == nil {
					err = errors.Join(errors.New("it was granted"), g.Close())
				}
				answer <- err
			}()
			tt.die(t, l)
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			select {
			case err := <-answer:
				if !errors.Is(err, ErrNobody) {
					t.Errorf("got %v, want %v", err, ErrNobody)
				}
			case <-time.After(patience):
				t.Fatal("no answer")
			}
		})
	}
}
