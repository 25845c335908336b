package store

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// openDir opens the store's folder, and makes it with mode 0700 where it is
// missing. One that is not ours or is a symbolic link is refused; one of ours
// that others may enter is closed to them.
func openDir(dir string) (*os.File, error) {
	if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir {
		return nil, fmt.Errorf("folder %q: must be a clean absolute path", dir)
	}
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
			return nil, err
		}
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
		if err := syncFolder(filepath.Dir(dir)); err != nil {
			return nil, err
		}
	}
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, explainLink(dir, err)
	}
	if err := makePrivate(f, dir, 0o700); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func syncFolder(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// openFile opens the store's file, which must be an ordinary one of ours.
func openFile(path string, writable bool) (*os.File, error) {
	flag := os.O_RDONLY
	if writable {
		flag = os.O_RDWR
	}
	// O_NONBLOCK: opening a FIFO that somebody put there must not wait.
	f, err := os.OpenFile(path, flag|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, explainLink(path, err)
	}
	fi, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if !fi.Mode().IsRegular() {
		return nil, errors.Join(fmt.Errorf("%s: is not an ordinary file", path), f.Close())
	}
	if writable {
		if err := makePrivate(f, path, 0o600); err != nil {
			return nil, errors.Join(err, f.Close())
		}
	}
	return f, nil
}

func explainLink(path string, err error) error {
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) {
		return fmt.Errorf("%s: is a symbolic link or not a folder: refused, name the real place: %w", path, err)
	}
	return err
}

// makePrivate takes every permission beyond mode from an open file of ours, and
// refuses another owner's.
func makePrivate(f *os.File, path string, mode fs.FileMode) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("%s: belongs to uid %d, not to mknetd's %d", path, st.Uid, os.Geteuid())
	}
	if fi.Mode().Perm()&^mode == 0 {
		return nil
	}
	return f.Chmod(fi.Mode().Perm() & mode)
}

// lockFile takes an advisory lock (flock) that ends with the process, and waits
// for another holder up to timeout. f may be a folder.
func lockFile(f *os.File, path string, exclusive bool, timeout time.Duration) error {
	how := unix.LOCK_SH
	if exclusive {
		how = unix.LOCK_EX
	}
	for deadline := time.Now().Add(timeout); ; time.Sleep(10 * time.Millisecond) {
		err := flock(f, how|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock %s: %w", path, err)
		}
		if time.Now().After(deadline) {
			pid, comm := holder(f)
			return &LockedError{Path: path, Holder: pid, Comm: comm}
		}
	}
}

func flock(f *os.File, how int) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := conn.Control(func(fd uintptr) { inner = unix.Flock(int(fd), how) }); err != nil {
		return err
	}
	return inner
}

// holder finds who has a flock on the file, from /proc/locks (proc(5)):
// "1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF". 0 when it is not shown, as
// for a process of another PID namespace.
func holder(f *os.File) (pid int, comm string) {
	var st unix.Stat_t
	conn, err := f.SyscallConn()
	if err != nil {
		return 0, ""
	}
	if err := conn.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) }); err != nil {
		return 0, ""
	}
	want := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	locks, err := os.Open("/proc/locks")
	if err != nil {
		return 0, ""
	}
	defer locks.Close()
	for lines := bufio.NewScanner(locks); lines.Scan(); {
		w := strings.Fields(lines.Text())
		// A waiter's line has "->" after the number.
		if len(w) < 6 || w[1] != "FLOCK" || w[5] != want {
			continue
		}
		if pid, err = strconv.Atoi(w[4]); err != nil || pid <= 0 {
			return 0, ""
		}
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		return pid, strings.TrimSpace(string(name))
	}
	return 0, ""
}
