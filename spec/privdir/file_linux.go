package privdir

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/crash"
)

var (
	fileWritten  = crash.New("privdir.written") // and synced, under its temporary name
	fileNamed    = crash.New("privdir.named")
	fileRemoved  = crash.New("privdir.removed")
	fileRenamed  = crash.New("privdir.renamed")
	folderSynced = crash.New("privdir.folder-synced")
)

// tempPrefix begins the names of files that are being written. Names that begin
// with a dot are never listed.
const tempPrefix = ".tmp-"

// Durability says whether a write must survive a crash of the machine.
type Durability bool

// Files that mean nothing after a reboot need no sync: a killed process loses no
// page cache.
const (
	Synced   Durability = true
	Unsynced Durability = false
)

// ErrTooLarge is returned by Read for a file above the limit; its content is not
// looked at.
var ErrTooLarge = errors.New("file is larger than this kind of file can be")

// Read returns the content of the file name, at most maxBytes. A missing file is
// fs.ErrNotExist, one that others could have touched an *UnsafeError.
func (d *Dir) Read(name string, maxBytes int64) ([]byte, error) {
	fd, err := d.open(name)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	defer func() { _ = f.Close() }()
	var buf bytes.Buffer
	if _, err := io.Copy(&buf, io.LimitReader(f, maxBytes+1)); err != nil {
		return nil, fmt.Errorf("read %s/%s: %w", d.path, name, err)
	}
	if int64(buf.Len()) > maxBytes {
		return nil, fmt.Errorf("read %s/%s: %w (more than %d bytes)", d.path, name, ErrTooLarge, maxBytes)
	}
	return buf.Bytes(), nil
}

// open opens a file of the folder and checks what was opened; the caller closes
// the descriptor. O_NONBLOCK keeps a FIFO from blocking us; on a regular file it
// does nothing.
func (d *Dir) open(name string) (fd int, err error) {
	if err := checkName(name); err != nil {
		return -1, err
	}
	at := d.path + "/" + name
	fd, err = unix.Openat(d.fd, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ELOOP) {
		return -1, &UnsafeError{Path: at, Reason: "is a symbolic link"}
	}
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", at, err)
	}
	if err := d.checkOpened(fd, name, at); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (d *Dir) checkOpened(fd int, name, at string) error {
	var opened, named unix.Stat_t
	if err := unix.Fstat(fd, &opened); err != nil {
		return fmt.Errorf("stat %s: %w", at, err)
	}
	if opened.Nlink > 0 { // with no name left it was replaced, see below
		if err := checkFile(at, &opened); err != nil {
			return err
		}
	}
	if err := unix.Fstatat(d.fd, name, &named, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("stat %s again: %w", at, err)
	}
	if opened.Dev != named.Dev || opened.Ino != named.Ino {
		return &ChangedError{Path: at}
	}
	return nil
}

// ChangedError is returned where a name meant another file after it was opened
// than when it was: somebody published a new one meanwhile. Try again.
type ChangedError struct{ Path string }

func (e *ChangedError) Error() string { return e.Path + ": was replaced while it was opened" }

func checkFile(at string, st *unix.Stat_t) error {
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return &UnsafeError{Path: at, Reason: "is not a regular file"}
	case st.Uid != uint32(os.Geteuid()):
		return &UnsafeError{Path: at, Reason: fmt.Sprintf("belongs to user %d, not to us (%d)", st.Uid, os.Geteuid())}
	case st.Mode&0o077 != 0:
		return &UnsafeError{Path: at, Reason: fmt.Sprintf("is open to others (mode %04o)", st.Mode&0o7777)}
	case st.Nlink > 1:
		return &UnsafeError{Path: at, Reason: fmt.Sprintf("has %d names, so it can be changed through another one", st.Nlink)}
	}
	return nil
}

// Publish makes data the content of the file name, whole or not at all. Synced
// returns only once content and name are on disk.
func (d *Dir) Publish(name string, data []byte, durable Durability) error {
	if err := checkName(name); err != nil {
		return err
	}
	temp := tempPrefix + rand.Text()
	dir := d.fd
	fail := func(step string, err error) error {
		_ = unix.Unlinkat(dir, temp, 0)
		return fmt.Errorf("%s %s/%s: %w", step, d.path, name, err)
	}
	fd, err := unix.Openat(dir, temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("create a file in %s for %s: %w", d.path, name, err)
	}
	f := os.NewFile(uintptr(fd), temp)
	_, err = f.Write(data)
	if err == nil && durable {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return fail("write", err)
	}
	fileWritten.Here()
	if err := unix.Renameat(dir, temp, dir, name); err != nil {
		return fail("publish", err)
	}
	fileNamed.Here()
	if durable {
		return d.Sync()
	}
	return nil
}

// Remove deletes the file name whatever it is (but no folder); absent is success.
func (d *Dir) Remove(name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	if err := unix.Unlinkat(d.fd, name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove %s/%s: %w", d.path, name, err)
	}
	fileRemoved.Here()
	return nil
}

// Rename gives a file another name of the same folder and replaces nothing: where
// the new name exists, the error is fs.ErrExist.
func (d *Dir) Rename(from, to string) error {
	if err := errors.Join(checkName(from), checkName(to)); err != nil {
		return err
	}
	dir := d.fd
	if err := unix.Renameat2(dir, from, dir, to, unix.RENAME_NOREPLACE); err != nil {
		return fmt.Errorf("rename %s/%s to %s: %w", d.path, from, to, err)
	}
	fileRenamed.Here()
	return nil
}

// Sync makes the folder's names durable.
func (d *Dir) Sync() error {
	if err := unix.Fsync(d.fd); err != nil {
		return fmt.Errorf("sync folder %s: %w", d.path, err)
	}
	folderSynced.Here()
	return nil
}

// Names lists the folder in order, without the files that are being written.
func (d *Dir) Names() ([]string, error) {
	all, err := d.readNames()
	if err != nil {
		return nil, err
	}
	names := slices.DeleteFunc(all, func(n string) bool { return n[0] == '.' })
	slices.Sort(names)
	return names, nil
}

// Sweep removes files that a killed writer left half written before the time
// given, and returns how many.
func (d *Dir) Sweep(before time.Time) (int, error) {
	all, err := d.readNames()
	if err != nil {
		return 0, err
	}
	n := 0
	for _, name := range all {
		var st unix.Stat_t
		if !strings.HasPrefix(name, tempPrefix) || unix.Fstatat(d.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
			continue
		}
		if time.Unix(st.Mtim.Unix()).Before(before) && unix.Unlinkat(d.fd, name, 0) == nil {
			n++
		}
	}
	return n, nil
}

// readNames reads through a descriptor of its own: two readers of one descriptor
// would share its position.
func (d *Dir) readNames() ([]string, error) {
	fd, err := unix.Openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open folder %s: %w", d.path, err)
	}
	f := os.NewFile(uintptr(fd), d.path)
	defer func() { _ = f.Close() }()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("list folder %s: %w", d.path, err)
	}
	return names, nil
}

// Lock is an exclusive hold on one file of a folder. It ends with the process, so
// that a killed holder holds nothing.
type Lock struct{ fd int }

// TryLock takes the file name for this process. ok is false when another holder
// has it or the name went away meanwhile.
func (d *Dir) TryLock(name string) (l *Lock, ok bool, err error) {
	fd, err := d.open(name)
	var changed *ChangedError
	switch {
	case errors.Is(err, os.ErrNotExist), errors.As(err, &changed):
		return nil, false, nil
	case err != nil:
		return nil, false, err
	}
	l = &Lock{fd: fd}
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		l.Unlock()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, false, nil
		}
		return nil, false, fmt.Errorf("lock %s/%s: %w", d.path, name, err)
	}
	if !d.Means(name, l) { // the last holder renamed or removed it before it let go
		l.Unlock()
		return nil, false, nil
	}
	return l, true, nil
}

// Means reports whether the name still means the locked file.
func (d *Dir) Means(name string, l *Lock) bool {
	var held, named unix.Stat_t
	return unix.Fstat(l.fd, &held) == nil &&
		unix.Fstatat(d.fd, name, &named, unix.AT_SYMLINK_NOFOLLOW) == nil &&
		held.Dev == named.Dev && held.Ino == named.Ino
}

// Unlock lets go of the file; call it once.
func (l *Lock) Unlock() { _ = unix.Close(l.fd) }
