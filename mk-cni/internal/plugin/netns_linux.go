package plugin

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
)

// netns is the opened CNI_NETNS. Whatever its path means later does not matter.
type netns struct {
	file     *os.File
	dev, ino uint64
}

// openNetns opens CNI_NETNS, once. It is first opened as a path alone, so that a
// device or a FIFO is only looked at, and must be a network namespace other than
// our own, unless allowOwn. The caller closes the file.
func openNetns(path string, allowOwn bool) (*netns, error) {
	bad := func(format string, args ...any) error {
		return types.NewError(types.ErrInvalidEnvironmentVariables, fmt.Sprintf("CNI_NETNS %.300q: ", path)+fmt.Sprintf(format, args...), "")
	}
	look, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, bad("open: %v", err)
	}
	defer func() { _ = unix.Close(look) }()
	var fs unix.Statfs_t
	if err := unix.Fstatfs(look, &fs); err != nil {
		return nil, bad("statfs: %v", err)
	}
	if fs.Type != unix.NSFS_MAGIC {
		return nil, bad("is no network namespace")
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", look), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, bad("open: %v", err)
	}
	var theirs, ours unix.Stat_t
	kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE)
	if err == nil {
		err = errors.Join(unix.Fstat(fd, &theirs), unix.Stat("/proc/thread-self/ns/net", &ours))
	}
	switch {
	case err != nil:
		err = bad("identify: %v", err)
	case kind != unix.CLONE_NEWNET:
		err = bad("is a namespace of another kind")
	case !allowOwn && theirs.Dev == ours.Dev && theirs.Ino == ours.Ino:
		err = bad("is the namespace that mk-cni itself runs in; the host's own is never an endpoint's")
	default:
		return &netns{os.NewFile(uintptr(fd), path), theirs.Dev, theirs.Ino}, nil
	}
	_ = unix.Close(fd)
	return nil, err
}

// stillThere refuses a namespace that is no longer what its path names: whoever
// removed it meanwhile will hardly say DEL for what an ADD made in it.
func (n *netns) stillThere() error {
	var now unix.Stat_t
	err := unix.Stat(n.file.Name(), &now)
	if err == nil && (now.Dev != n.dev || now.Ino != n.ino) {
		err = errors.New("another one is there now")
	}
	if err == nil {
		return nil
	}
	return types.NewError(types.ErrInvalidEnvironmentVariables, fmt.Sprintf("CNI_NETNS %.300q: was removed while the ADD was at work: %v", n.file.Name(), err), "")
}

// close releases the namespace; nil is allowed.
func (n *netns) close() {
	if n != nil {
		_ = n.file.Close()
	}
}

// passed is the descriptor that goes with a request: nil where there is no
// namespace, and over TCP, where mknetd opens the path.
func (c *call) passed(n *netns) *os.File {
	if n == nil || c.conf.Daemon.Network != "unix" {
		return nil
	}
	return n.file
}

// bootID names this boot of the host.
func bootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(data)), err
}

// sinceBoot is now on CLOCK_BOOTTIME.
func sinceBoot() time.Duration {
	var ts unix.Timespec
	// The clock exists since Linux 2.6.39 and cannot fail on a valid pointer.
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return time.Duration(ts.Nano())
}

// moment is now, on the clock that nobody sets.
func (c *call) moment() endpoint.Moment {
	return endpoint.Moment{BootID: c.bootID, SinceBoot: sinceBoot()}
}

func isErrno(err error) bool {
	var e syscall.Errno
	return errors.As(err, &e)
}
