package api

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxSocketPath is what sun_path holds, without the closing NUL (unix(7)).
const maxSocketPath = 107

// SocketError says why the socket cannot be made where it is configured.
type SocketError struct {
	Path   string
	Reason string
	Err    error // nil where nothing failed but the rules
}

func (e *SocketError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("socket %s: %s: %v", e.Path, e.Reason, e.Err)
	}
	return fmt.Sprintf("socket %s: %s", e.Path, e.Reason)
}

func (e *SocketError) Unwrap() error { return e.Err }

// listenUnix makes the socket: mode 0600, or 0660 with group gid where it is not
// negative. Nobody who is not its owner can put anything in its place: every
// folder above belongs to root or to us and is closed to other writers, and no
// component is a symbolic link. A socket that is left from a dead daemon is
// removed once a connect has proven that nobody listens. Every error is a
// *SocketError.
func listenUnix(ctx context.Context, path string, gid int) (*net.UnixListener, error) {
	bad := func(err error, format string, args ...any) (*net.UnixListener, error) {
		return nil, &SocketError{Path: path, Reason: fmt.Sprintf(format, args...), Err: err}
	}
	switch {
	case !filepath.IsAbs(path) || filepath.Clean(path) != path:
		return bad(nil, "must be a clean absolute path")
	case len(path) > maxSocketPath:
		return bad(nil, "has %d bytes, Linux allows %d", len(path), maxSocketPath)
	}
	if err := ensureFolder(filepath.Dir(path), gid); err != nil {
		return bad(err, "its folder")
	}
	if err := removeStale(ctx, path); err != nil {
		return bad(err, "what is there now")
	}
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var inner error
		// bind(2) gives the file the mode of the socket's own inode, so that there
		// is no moment in which others could connect (net/unix/af_unix.c,
		// unix_bind_bsd).
		err := raw.Control(func(fd uintptr) { inner = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, inner)
	}}
	l, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return bad(err, "listen")
	}
	ul := l.(*net.UnixListener)
	ul.SetUnlinkOnClose(false) // only if it is still ours, see Server.Close
	if gid >= 0 {
		err = errors.Join(os.Lchown(path, -1, gid), os.Chmod(path, 0o660))
	} else {
		err = os.Chmod(path, 0o600) // whatever the umask was
	}
	if err != nil {
		return bad(errors.Join(err, ul.Close(), os.Remove(path)), "set its owner and mode")
	}
	return ul, nil
}

// inherit makes listeners of descriptors, which stay the caller's. The Unix socket
// must be the one that is configured.
func inherit(in *Sockets, path string) (*net.UnixListener, net.Listener, error) {
	l, err := net.FileListener(in.Unix)
	if err != nil {
		return nil, nil, &SocketError{Path: path, Reason: "take it over", Err: err}
	}
	ul, ok := l.(*net.UnixListener)
	if !ok || ul.Addr().String() != path {
		return nil, nil, errors.Join(&SocketError{Path: path, Reason: fmt.Sprintf("the socket to take over is %s", l.Addr())}, l.Close())
	}
	if in.TCP == nil {
		return ul, nil, nil
	}
	tcp, err := net.FileListener(in.TCP)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("tcp listener: take it over: %w", err), ul.Close())
	}
	return ul, tcp, nil
}

// ensureFolder checks every folder down to dir, and makes the last one where it is
// missing.
func ensureFolder(dir string, gid int) error {
	at := "/"
	for part := range strings.SplitSeq(strings.TrimPrefix(dir, "/"), "/") {
		if part == "" {
			continue
		}
		at = filepath.Join(at, part)
		fi, err := os.Lstat(at)
		if errors.Is(err, fs.ErrNotExist) && at == dir {
			if err := makeFolder(dir, gid); err != nil {
				return err
			}
			fi, err = os.Lstat(at)
		}
		if err != nil {
			return err
		}
		st, _ := fi.Sys().(*syscall.Stat_t)
		switch {
		case fi.Mode()&fs.ModeSymlink != 0:
			real, _ := filepath.EvalSymlinks(dir)
			return fmt.Errorf("%s is a symbolic link: refused, use %s", at, real)
		case !fi.IsDir():
			return fmt.Errorf("%s is not a folder", at)
		case st != nil && st.Uid != 0 && int(st.Uid) != os.Geteuid():
			return fmt.Errorf("%s belongs to uid %d, must be root's", at, st.Uid)
		case fi.Mode().Perm()&0o022 != 0 && (fi.Mode()&fs.ModeSticky == 0 || at == dir):
			return fmt.Errorf("%s has mode %#o: others may write to it", at, fi.Mode().Perm())
		}
	}
	return nil
}

// makeFolder makes a private folder, which the group may pass through where one
// is configured.
func makeFolder(dir string, gid int) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if gid < 0 {
		return nil
	}
	return errors.Join(os.Lchown(dir, -1, gid), os.Chmod(dir, 0o710))
}

// removeStale removes a socket that nobody listens on; anything else that is
// there is an error.
func removeStale(ctx context.Context, path string) error {
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case fi.Mode()&fs.ModeSymlink != 0:
		return errors.New("it is a symbolic link: refused")
	case fi.Mode()&fs.ModeSocket == 0:
		return fmt.Errorf("it is not a socket (mode %s): refused", fi.Mode())
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err == nil {
		cred, _ := peerOf(conn.(*net.UnixConn))
		_ = conn.Close()
		_, comm, _ := readStat(int(cred.Pid))
		return fmt.Errorf("process %d (%s) listens on it: only one mknetd may run", cred.Pid, comm)
	}
	// Only this answer proves that there is no listener: a full backlog is EAGAIN,
	// a hung one a time-out.
	if !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("cannot tell whether somebody listens on it: %w", err)
	}
	return os.Remove(path)
}
