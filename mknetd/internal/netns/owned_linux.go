package netns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
)

// Dir is where named namespaces are mounted, as iproute2 has it.
const Dir = "/run/netns"

// ownedPrefix is what endpoint.Generation.OwnedNamespace begins with.
const ownedPrefix = "mk-"

// placeholderMode is that of the empty file that a namespace is mounted on.
const placeholderMode = 0o400

// preparing serialises prepareDir: two mounts of the folder on itself would
// hide each other's files.
var preparing sync.Mutex

// OwnedPath is where the namespace that mknetd made for g is mounted.
func OwnedPath(g endpoint.Generation) string { return filepath.Join(Dir, g.OwnedNamespace()) }

// Make makes the namespace of a runtime-owned endpoint, with lo up, and mounts
// it at OwnedPath. Its lo carries the generation's alias before the mount makes
// it visible, so that Remove knows it also when the daemon dies in between.
// ErrForeign when something of that name stands; nothing is left on error.
func Make(g endpoint.Generation) (*Namespace, error) {
	path := OwnedPath(g)
	if err := prepareDir(); err != nil {
		return nil, fmt.Errorf("namespace %s: %w", path, err)
	}
	// Created exclusively: the mount never covers somebody else's file.
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, placeholderMode)
	if errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("namespace %s: %w", path, ErrForeign)
	}
	if err != nil {
		return nil, fmt.Errorf("namespace %s: %w", path, errors.Unwrap(err))
	}
	defer f.Close()
	// The lock tells Owned that somebody is at work here.
	if err := control(f, func(fd int) error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) }); err != nil {
		return nil, errors.Join(fmt.Errorf("namespace %s: lock: %w", path, err), drop(path))
	}
	if err := makeAt(path, g); err != nil {
		return nil, errors.Join(fmt.Errorf("namespace %s: %w", path, err), drop(path))
	}
	n, err := Open(path)
	if err != nil {
		return nil, errors.Join(err, drop(path))
	}
	n.id.Owned = true
	return n, nil
}

func makeAt(path string, g endpoint.Generation) error {
	done := make(chan error, 1)
	go func() {
		done <- func() (err error) {
			runtime.LockOSThread() // left locked where the thread cannot come back, see Namespace.do
			host, err := os.Open("/proc/thread-self/ns/net")
			if err != nil {
				runtime.UnlockOSThread()
				return fmt.Errorf("open the host's namespace: %w", err)
			}
			defer host.Close()
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				runtime.UnlockOSThread()
				return fmt.Errorf("unshare: %w", err)
			}
			defer func() {
				if back := setns(host); back != nil {
					err = errors.Join(err, fmt.Errorf("return to the host's namespace: %w", back))
					return
				}
				runtime.UnlockOSThread()
			}()
			if err := markLoopback(g); err != nil {
				return err
			}
			if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
				return fmt.Errorf("mount: %w", err)
			}
			return nil
		}()
	}()
	return <-done
}

func markLoopback(g endpoint.Generation) error {
	h, err := NewHandle()
	if err != nil {
		return err
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := h.LinkSetAlias(lo, g.Alias()); err != nil {
		return fmt.Errorf("set the alias of lo: %w", err)
	}
	if err := h.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// prepareDir makes Dir a shared mount point, as `ip netns add` does, so that a
// namespace removed here also leaves the mount namespaces that copied it.
func prepareDir() error {
	preparing.Lock()
	defer preparing.Unlock()
	if err := os.MkdirAll(Dir, 0o755); err != nil {
		return fmt.Errorf("make the folder: %w", errors.Unwrap(err))
	}
	err := unix.Mount("", Dir, "", unix.MS_SHARED|unix.MS_REC, "")
	if !errors.Is(err, unix.EINVAL) { // EINVAL: not a mount point yet
		return err
	}
	if err := unix.Mount(Dir, Dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount the folder on itself: %w", err)
	}
	return unix.Mount("", Dir, "", unix.MS_SHARED|unix.MS_REC, "")
}

// FindOwned opens the namespace that Make made for g. It is ErrGone when there
// is none; when something else has its name, it is ErrForeign as well.
func FindOwned(g endpoint.Generation) (*Namespace, error) {
	path := OwnedPath(g)
	n, err := Open(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("namespace %s: %w", path, ErrGone)
	case errors.Is(err, ErrNotNamespace), errors.Is(err, ErrHostNamespace):
		return nil, fmt.Errorf("namespace %s: %w: the file %w", path, ErrGone, ErrForeign)
	case err != nil:
		return nil, err
	}
	mark, err := n.mark()
	if err == nil && mark != g {
		err = fmt.Errorf("namespace %s: %w: what is there %w", path, ErrGone, ErrForeign)
	}
	if err != nil {
		return nil, errors.Join(err, n.Close())
	}
	n.id.Owned = true
	return n, nil
}

// mark returns the generation that Make left on lo, zero where there is none.
func (n *Namespace) mark() (endpoint.Generation, error) {
	h, err := n.Netlink()
	if err != nil {
		return endpoint.Generation{}, err
	}
	lo, err := h.LinkByName("lo")
	var absent netlink.LinkNotFoundError
	if errors.As(err, &absent) {
		return endpoint.Generation{}, nil
	}
	if err != nil {
		return endpoint.Generation{}, fmt.Errorf("namespace %s: find lo: %w", n, err)
	}
	digits, ours := strings.CutPrefix(lo.Attrs().Alias, endpoint.AliasPrefix)
	if g, err := endpoint.ParseGeneration(digits); ours && err == nil {
		return g, nil
	}
	return endpoint.Generation{}, nil
}

// Remove unmounts and deletes the namespace that Make made for g. Absent is
// success; something else of that name counts as absent and stays. The empty file
// that a dying Make leaves is removed. The namespace itself ends with its last user.
func Remove(g endpoint.Generation) error {
	path := OwnedPath(g)
	n, err := FindOwned(g)
	switch {
	case errors.Is(err, ErrGone):
		return removePlaceholder(path)
	case err != nil:
		return err
	}
	if err := n.Close(); err != nil {
		return err
	}
	return drop(path)
}

// removePlaceholder removes the empty file of a Make that died; anything else
// stays.
func removePlaceholder(path string) error {
	if !placeholder(path) {
		return nil
	}
	return drop(path)
}

// placeholder reports whether path is the empty file that Make mounts a namespace
// on, with nothing mounted and no Make at work.
func placeholder(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close() // and unlock
	var st, dir unix.Stat_t
	err = control(f, func(fd int) error {
		return errors.Join(unix.Fstat(fd, &st), unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB))
	})
	return err == nil && unix.Stat(filepath.Dir(path), &dir) == nil &&
		st.Dev == dir.Dev && // else something is mounted there
		st.Mode == unix.S_IFREG|placeholderMode && st.Size == 0 && st.Uid == 0
}

func drop(path string) error {
	// EINVAL: not mounted, ENOENT: not there.
	if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil &&
		!errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, errors.Unwrap(err))
	}
	return nil
}

// Made is what Make left under Dir.
type Made struct {
	Name       string
	Generation endpoint.Generation // zero: the empty file of a Make that died
}

// Remove deletes what Owned has found, if it still is that.
func (m Made) Remove() error {
	if m.Generation.IsZero() {
		return removePlaceholder(filepath.Join(Dir, m.Name))
	}
	return Remove(m.Generation)
}

// Owned lists what stands under Dir and is ours: namespaces with our mark, and
// what a Make that died has left.
func Owned() ([]Made, error) {
	entries, err := os.ReadDir(Dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", Dir, errors.Unwrap(err))
	}
	var found []Made
	for _, e := range entries {
		if !ownedName(e.Name()) {
			continue
		}
		path := filepath.Join(Dir, e.Name())
		n, err := Open(path)
		switch {
		case errors.Is(err, ErrNotNamespace):
			if placeholder(path) {
				found = append(found, Made{Name: e.Name()})
			}
			continue
		case errors.Is(err, os.ErrNotExist), errors.Is(err, ErrHostNamespace):
			continue
		case err != nil:
			return nil, err
		}
		g, err := n.mark()
		if err := errors.Join(err, n.Close()); err != nil {
			return nil, err
		}
		if !g.IsZero() && g.OwnedNamespace() == e.Name() {
			found = append(found, Made{e.Name(), g})
		}
	}
	return found, nil
}

// ownedName reports whether a name has the form of Generation.OwnedNamespace.
func ownedName(name string) bool {
	digits, ok := strings.CutPrefix(name, ownedPrefix)
	return ok && len(digits) == 12 && strings.Trim(digits, "0123456789abcdef") == ""
}
