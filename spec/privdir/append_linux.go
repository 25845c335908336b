package privdir

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// OldSuffix is appended to the name of a file that AppendFile rotated.
const OldSuffix = ".old"

// AppendFile opens the log file at path (absolute, clean) for appending and makes
// it 0600 and ours where it does not exist. Its folder need not be private (a group may
// write to /var/log), but no component may be a symbolic link. A file that has reached maxBytes is first
// renamed to path + OldSuffix, where it replaces the one before, so that at most
// about twice maxBytes are ever used. The caller closes the file.
func AppendFile(path string, maxBytes int64) (*os.File, error) {
	parent, name, err := openParent(path, true, false)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(parent) }()
	// After a rotation, by us or by another process, the file is new and small;
	// only writers that fill it in no time make this turn again.
	for range 100 {
		fd, full, err := openAppend(parent, name, path, maxBytes)
		if err != nil {
			return nil, err
		}
		if !full {
			return os.NewFile(uintptr(fd), path), nil
		}
		err = rotate(parent, fd, name)
		_ = unix.Close(fd)
		if err != nil {
			return nil, fmt.Errorf("rotate %s: %w", path, err)
		}
	}
	return nil, fmt.Errorf("open %s: is full again after each rotation", path)
}

func openAppend(parent int, name, path string, maxBytes int64) (fd int, full bool, err error) {
	fd, err = unix.Openat(parent, name, unix.O_WRONLY|unix.O_APPEND|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o600)
	if errors.Is(err, unix.ELOOP) {
		return -1, false, &UnsafeError{Path: path, Reason: "is a symbolic link"}
	}
	if err != nil {
		return -1, false, fmt.Errorf("open %s: %w", path, err)
	}
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	if err == nil && st.Nlink > 0 { // without a name: rotated away twice just now, still harmless
		err = checkFile(path, &st)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, false, err
	}
	return fd, st.Size >= maxBytes, nil
}

// rotate renames the full file unless another process has done so: the lock
// decides who, the inode tells whether it is still to do.
func rotate(parent, fd int, name string) error {
	if err := unix.Flock(fd, unix.LOCK_EX); err != nil {
		return err
	}
	var held, named unix.Stat_t
	if err := unix.Fstat(fd, &held); err != nil {
		return err
	}
	err := unix.Fstatat(parent, name, &named, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) || err == nil && held.Ino != named.Ino {
		return nil
	}
	if err != nil {
		return err
	}
	return unix.Renameat(parent, name, parent, name+OldSuffix)
}
