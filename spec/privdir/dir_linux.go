package privdir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// UnsafeError is returned where a folder or a file could have been written,
// swapped or read by somebody else. The operator has to look before anything is
// trusted; nothing was changed.
type UnsafeError struct {
	Path   string // the component that is at fault
	Reason string
}

func (e *UnsafeError) Error() string { return e.Path + ": " + e.Reason }

// Dir is an open private folder. It is safe for concurrent use.
type Dir struct {
	fd   int
	path string
}

// Open opens the private folder at path, which must be absolute and clean. With
// create, missing parents are made 0755 and the folder itself 0700; without it, a
// missing folder is an error that is fs.ErrNotExist. The caller closes the Dir.
func Open(path string, create bool) (*Dir, error) {
	parent, name, err := openParent(path, create, true)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(parent) }()
	if create {
		if err := unix.Mkdirat(parent, name, 0o700); err == nil {
			if err := syncParent(parent); err != nil {
				return nil, fmt.Errorf("make folder %s durable: %w", path, err)
			}
		} else if !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("make folder %s: %w", path, err)
		}
	}
	fd, err := unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, openError(path, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("stat folder %s: %w", path, err)
	}
	if err := checkPrivate(path, &st); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &Dir{fd: fd, path: path}, nil
}

// Close releases the folder's descriptor. No other method may run during or
// after it.
func (d *Dir) Close() error { return unix.Close(d.fd) }

// Path is the folder's path as it was opened, for messages only.
func (d *Dir) Path() string { return d.path }

// CheckWritable reports whether files could be made in the folder now, as far as
// that can be told without making one: a read-only file system is an error.
func (d *Dir) CheckWritable() error {
	if err := unix.Faccessat(d.fd, ".", unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return fmt.Errorf("write to folder %s: %w", d.path, err)
	}
	return nil
}

// openParent walks to the parent of path and returns an O_PATH descriptor of it,
// which the caller closes, and the last component. With private, nobody else may
// be able to change what the walk meets.
func openParent(path string, create, private bool) (fd int, name string, err error) {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" {
		return -1, "", &UnsafeError{Path: path, Reason: "must be an absolute path without \".\", \"..\" and double slashes"}
	}
	fd, err = unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, "", fmt.Errorf("open /: %w", err)
	}
	parts := strings.Split(path[1:], "/")
	at := ""
	for _, part := range parts[:len(parts)-1] {
		at += "/" + part
		next, err := step(fd, part, at, create, private)
		_ = unix.Close(fd)
		if err != nil {
			return -1, "", err
		}
		fd = next
	}
	return fd, parts[len(parts)-1], nil
}

// step opens one parent folder below fd and checks who may change it.
func step(fd int, name, at string, create, private bool) (int, error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	next, err := unix.Openat(fd, name, flags, 0)
	if errors.Is(err, unix.ENOENT) && create {
		if err := unix.Mkdirat(fd, name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
			return -1, fmt.Errorf("make folder %s: %w", at, err)
		}
		next, err = unix.Openat(fd, name, flags, 0)
	}
	if err != nil {
		return -1, openError(at, err)
	}
	if !private {
		return next, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(next, &st); err != nil {
		_ = unix.Close(next)
		return -1, fmt.Errorf("stat folder %s: %w", at, err)
	}
	var reason string
	switch {
	case st.Uid != 0 && st.Uid != uint32(os.Geteuid()):
		reason = fmt.Sprintf("belongs to user %d, who could swap what is below", st.Uid)
	case st.Mode&0o022 != 0 && st.Mode&unix.S_ISVTX == 0:
		reason = fmt.Sprintf("is writable by others (mode %04o), who could swap what is below", st.Mode&0o7777)
	default:
		return next, nil
	}
	_ = unix.Close(next)
	return -1, &UnsafeError{Path: at, Reason: reason}
}

// openError names the component. With O_DIRECTORY|O_NOFOLLOW a symbolic link
// gives ENOTDIR, as a file does (path_resolution(7), open(2)).
func openError(at string, err error) error {
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return &UnsafeError{Path: at, Reason: "is a symbolic link or no folder; symbolic links are not followed, give the real path"}
	}
	return fmt.Errorf("open folder %s: %w", at, err)
}

func checkPrivate(path string, st *unix.Stat_t) error {
	switch {
	case st.Uid != uint32(os.Geteuid()):
		return &UnsafeError{Path: path, Reason: fmt.Sprintf("belongs to user %d, not to us (%d)", st.Uid, os.Geteuid())}
	case st.Mode&0o077 != 0:
		return &UnsafeError{Path: path, Reason: fmt.Sprintf("is open to others (mode %04o), it must be private: chmod 0700 %s", st.Mode&0o7777, path)}
	}
	return nil
}

// syncParent makes a new name in a folder durable; fsync needs a descriptor that
// is not O_PATH.
func syncParent(parent int) error {
	fd, err := unix.Openat(parent, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	return unix.Fsync(fd)
}

// checkName refuses what is not one plain file name of ours.
func checkName(name string) error {
	if name == "" || name[0] == '.' || len(name) > 128 || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("file name %q: %w", name, fs.ErrInvalid)
	}
	return nil
}
