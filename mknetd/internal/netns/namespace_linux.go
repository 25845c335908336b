package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
)

// Namespace is an open network namespace. It keeps the namespace alive until
// Close. All methods may be called concurrently, Close only once nobody else
// uses it.
type Namespace struct {
	file *os.File
	id   endpoint.Namespace

	mu     sync.Mutex
	handle *netlink.Handle // made by the first Netlink
}

// Open opens the network namespace at path, as a runtime gives it in CNI_NETNS.
// Nothing but a network namespace is ever opened: a FIFO does not block and a
// device is not touched. A path that does not exist is fs.ErrNotExist; else see
// ErrNotNamespace and ErrHostNamespace.
func Open(path string) (*Namespace, error) {
	if path == "" || len(path) > MaxPathBytes || strings.ContainsRune(path, 0) {
		return nil, fmt.Errorf("namespace path of %d bytes: %w", len(path), ErrNotNamespace)
	}
	f, err := open(path)
	if err != nil {
		return nil, err
	}
	return FromFile(f, path)
}

// open opens an nsfs file in two steps: O_PATH has no side effect on whatever is
// there, and what is then opened through the descriptor is what was checked.
func open(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		// ENOTDIR: a file where a folder was expected, nothing can be behind it.
		if errors.Is(err, unix.ENOTDIR) {
			err = fs.ErrNotExist
		}
		return nil, fmt.Errorf("namespace %s: open: %w", path, err)
	}
	defer unix.Close(fd)
	if err := isNsfs(fd); err != nil {
		return nil, fmt.Errorf("namespace %s: %w", path, err)
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("namespace %s: open: %w", path, errors.Unwrap(err))
	}
	return f, nil
}

func isNsfs(fd int) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return fmt.Errorf("statfs: %w", err)
	}
	if st.Type != unix.NSFS_MAGIC {
		return ErrNotNamespace
	}
	return nil
}

// FromFile identifies the network namespace behind f, which may come from
// another process; path is only for display. It takes ownership of f, also on
// error. For the errors see ErrNotNamespace and ErrHostNamespace.
func FromFile(f *os.File, path string) (*Namespace, error) {
	n, err := identify(f, path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("namespace %s: %w", display(path, f), err), f.Close())
	}
	return n, nil
}

func display(path string, f *os.File) string {
	if path != "" {
		return path
	}
	return f.Name()
}

func identify(f *os.File, path string) (*Namespace, error) {
	n := &Namespace{file: f, id: endpoint.Namespace{Path: path}}
	var st unix.Stat_t
	err := control(f, func(fd int) error {
		if err := isNsfs(fd); err != nil {
			return err
		}
		kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE) // ioctl_nsfs(2)
		if err != nil {
			return fmt.Errorf("kind of namespace: %w", err)
		}
		if kind != unix.CLONE_NEWNET {
			return ErrNotNamespace
		}
		return unix.Fstat(fd, &st)
	})
	if err != nil {
		return nil, err
	}
	n.id.Device, n.id.Inode = st.Dev, st.Ino
	// Both are open here, so that equal numbers do mean the same namespace.
	own, err := ownNamespace()
	if err != nil {
		return nil, err
	}
	if own.Dev == st.Dev && own.Ino == st.Ino {
		return nil, ErrHostNamespace
	}
	if n.id.BootID, err = BootID(); err != nil {
		return nil, err
	}
	err = n.Do(func() error {
		n.id.Cookie, err = cookie()
		return err
	})
	if err != nil {
		return nil, err
	}
	return n, nil
}

// ownNamespace is the namespace that the calling thread, and so the daemon, runs in.
func ownNamespace() (unix.Stat_t, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
		return st, fmt.Errorf("stat /proc/thread-self/ns/net: %w", err)
	}
	return st, nil
}

// cookie returns SO_NETNS_COOKIE of the calling thread's namespace, a number
// that the kernel does not use twice while it is up (net/core/net_namespace.c).
func cookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open a socket: %w", err)
	}
	defer unix.Close(fd)
	c, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("getsockopt SO_NETNS_COOKIE (Linux 5.14 or later): %w", err)
	}
	return c, nil
}

// BootID identifies the boot of the running kernel.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("boot ID: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// ID describes the namespace for a record. Owned is set for one that Make or
// FindOwned returned.
func (n *Namespace) ID() endpoint.Namespace { return n.id }

// Do runs f with its thread inside the namespace and returns f's error. It is
// for what netlink cannot do: sysctls, programs, opening a TUN.
//
// f runs on a goroutine and a thread of its own. It must not start a goroutine
// (that one would run in the host's namespace), must not resolve names, and
// should not block.
func (n *Namespace) Do(f func() error) error {
	done := make(chan error, 1)
	go func() {
		err := errors.New("the function ended its goroutine")
		defer func() { done <- err }()
		err = n.do(f)
	}()
	return <-done
}

// Pinned runs f on a thread that nothing else uses, or ends, meanwhile: for what the
// kernel ties to a thread, as it does a child's death signal (prctl(2),
// PR_SET_PDEATHSIG) to the one that forked.
func Pinned(f func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	f()
}

// do leaves the goroutine locked where the thread could not come back: the
// runtime then ends the thread with the goroutine, and nothing else ever runs on it.
func (n *Namespace) do(f func() error) (err error) {
	runtime.LockOSThread()
	host, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open the host's namespace: %w", err)
	}
	defer host.Close()
	if err := setns(n.file); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter namespace %s: %w", n, err)
	}
	defer func() {
		if back := setns(host); back != nil {
			err = errors.Join(err, fmt.Errorf("return to the host's namespace: %w", back))
			return
		}
		runtime.UnlockOSThread()
	}()
	return f()
}

func setns(f *os.File) error {
	return control(f, func(fd int) error { return unix.Setns(fd, unix.CLONE_NEWNET) })
}

// Control runs f with the descriptor of the namespace, which is valid until f
// returns: for IFLA_NET_NS_FD and for passing it on.
func (n *Namespace) Control(f func(fd int) error) error { return control(n.file, f) }

func control(file *os.File, f func(fd int) error) error {
	conn, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := conn.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}

// Netlink returns a route netlink handle inside the namespace. It belongs to the
// namespace: it is made once and closed by Close.
func (n *Namespace) Netlink() (*netlink.Handle, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.handle != nil {
		return n.handle, nil
	}
	// A socket belongs to the namespace that it was opened in. netlink's own
	// NewHandleAt does the same, but unlocks its thread also when it did not get
	// back, so it is not used.
	err := n.Do(func() (err error) {
		n.handle, err = NewHandle()
		return err
	})
	if err != nil {
		return nil, err
	}
	return n.handle, nil
}

// String names the namespace for an operator.
func (n *Namespace) String() string {
	if n.id.Path != "" {
		return n.id.Path
	}
	return fmt.Sprintf("net:[%d]", n.id.Inode)
}

// Close lets go of the namespace. A second Close is harmless.
func (n *Namespace) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.handle != nil {
		n.handle.Close()
		n.handle = nil
	}
	if err := n.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}
