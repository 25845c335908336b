// Package tun opens Linux TUN devices: persistent ones that outlive their users,
// queues of existing ones, and queues that arrive as a passed descriptor. It sets
// offloads and the steering of packets to queues.
//
// It never changes the network namespace: /dev/net/tun binds to the namespace of
// the thread that opens it, so a caller that needs another one runs Create,
// Attach or OpenPlain on a thread that is there already. It carries no packets;
// that is shim/pump. The ioctls are those of drivers/net/tun.c.
package tun

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/pump"
)

// device is the control node, Documentation/networking/tuntap.rst.
const device = "/dev/net/tun"

// MaxQueues bounds what Attach opens: one queue for each lane of the pump.
const MaxQueues = pump.MaxLanes

// ErrNotTun is returned for a descriptor that is no queue of a TUN without packet
// information headers.
var ErrNotTun = errors.New("not a TUN queue without packet information")

// Queue is one queue of a TUN. Its methods may be used by several goroutines.
type Queue struct {
	file *os.File
	raw  syscall.RawConn
	name string
	vnet bool
}

// Create makes a persistent, multi-queue TUN with virtio-net headers in the
// calling thread's network namespace and leaves no queue open: a queue that
// nobody reads swallows packets. An existing TUN of that name is an error
// (EBUSY), so that somebody else's is never adopted. The device is removed like
// any other link.
func Create(name string) error {
	q, err := open(name, unix.IFF_VNET_HDR|unix.IFF_TUN_EXCL)
	if err != nil {
		return err
	}
	err = q.control("TUNSETPERSIST", func(fd int) error { return unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 1) })
	return errors.Join(err, q.Close())
}

// Attach opens n queues of a multi-queue TUN in the calling thread's network
// namespace, index 0 first; a TUN that does not exist is made and lasts until the
// last queue is closed. Indices move when a queue is closed, so a user that loses
// one closes all and attaches again. Without vnet the packets carry no virtio-net
// header.
func Attach(name string, n int, vnet bool) ([]*Queue, error) {
	if n < 1 || n > MaxQueues {
		return nil, fmt.Errorf("tun %s: attach %d queues: must be 1 to %d", name, n, MaxQueues)
	}
	var flags uint16
	if vnet {
		flags = unix.IFF_VNET_HDR
	}
	queues := make([]*Queue, 0, n)
	for range n {
		q, err := open(name, flags)
		if err != nil {
			return nil, errors.Join(err, CloseAll(queues))
		}
		queues = append(queues, q)
	}
	return queues, nil
}

// CloseAll closes every queue and returns what went wrong.
func CloseAll(queues []*Queue) error {
	var err error
	for _, q := range queues {
		err = errors.Join(err, q.Close())
	}
	return err
}

// open keeps the only order that works: opening fixes the namespace, TUNSETIFF
// makes the descriptor pollable, and only then may the runtime's poller see it
// (registered earlier, a reader never wakes: measured).
func open(name string, flags uint16) (*Queue, error) {
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("tun %s: open %s: %w%s", name, device, err, hint(err))
	}
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_MULTI_QUEUE | flags)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err != nil {
		_ = unix.Close(fd) // nothing was written
		return nil, fmt.Errorf("tun %s: attach: %w%s", name, err, hint(err))
	}
	return fromFD(fd)
}

// hint adds the next step to an errno that an operator meets.
func hint(err error) string {
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return " (modprobe tun)"
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return " (needs CAP_NET_ADMIN)"
	case errors.Is(err, unix.EINVAL):
		return " (an existing device must be a multi-queue TUN)"
	case errors.Is(err, unix.EBUSY):
		return " (the name belongs to another kind of link, or the device is in use)"
	}
	return ""
}

// FromFile makes a Queue of a descriptor that another process attached and
// passed. It takes ownership of f, also on error.
func FromFile(f *os.File) (*Queue, error) {
	// A duplicate, because a file that was opened before it was non-blocking is
	// never pollable, and Fd would make it blocking for the process that passed it.
	raw, err := f.SyscallConn()
	dup := -1
	if err == nil {
		var inner error
		err = raw.Control(func(fd uintptr) { dup, inner = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
		err = errors.Join(err, inner)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		if dup >= 0 {
			_ = unix.Close(dup)
		}
		return nil, fmt.Errorf("tun descriptor: %w", err)
	}
	return fromFD(dup)
}

// fromFD takes ownership of an attached descriptor, also on error.
func fromFD(fd int) (*Queue, error) {
	name, flags, err := identify(fd)
	if err == nil {
		err = prepare(fd, flags)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("tun descriptor: %w", err)
	}
	return wrap(os.NewFile(uintptr(fd), device), name, flags&unix.IFF_VNET_HDR != 0)
}

// prepare sets what a reader relies on: the poller needs O_NONBLOCK, and a
// previous user may have changed the size of the header.
func prepare(fd int, flags uint16) error {
	if flags&unix.IFF_VNET_HDR != 0 {
		if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, pump.VnetHeaderBytes); err != nil {
			return fmt.Errorf("TUNSETVNETHDRSZ %d: %w", pump.VnetHeaderBytes, err)
		}
	}
	return unix.SetNonblock(fd, true)
}

// identify asks the kernel what a descriptor is.
func identify(fd int) (name string, flags uint16, err error) {
	req, err := unix.NewIfreq("")
	if err != nil {
		return "", 0, err
	}
	if err := unix.IoctlIfreq(fd, unix.TUNGETIFF, req); err != nil {
		return "", 0, fmt.Errorf("%w: TUNGETIFF: %w", ErrNotTun, err)
	}
	flags = req.Uint16()
	if flags&unix.IFF_TUN == 0 || flags&unix.IFF_NO_PI == 0 {
		return "", 0, fmt.Errorf("%w: %s has flags %#x", ErrNotTun, req.Name(), flags)
	}
	return req.Name(), flags, nil
}

// wrap takes ownership of f, also on error.
func wrap(f *os.File, name string, vnet bool) (*Queue, error) {
	raw, err := f.SyscallConn()
	if err == nil {
		// Fails for a file that the poller does not know: its reader could not be woken.
		err = f.SetReadDeadline(time.Time{})
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("tun %s: %w", name, err), f.Close())
	}
	return &Queue{file: f, raw: raw, name: name, vnet: vnet}, nil
}

// Name is the device's name when the queue was opened.
func (q *Queue) Name() string { return q.name }

// VnetHeader reports whether every packet has a virtio-net header in front.
func (q *Queue) VnetHeader() bool { return q.vnet }

// SyscallConn gives access to the non-blocking descriptor. Never use Fd of a
// file made from it: that flips a flag that all holders share.
func (q *Queue) SyscallConn() syscall.RawConn { return q.raw }

// SetDeadline wakes readers and writers that wait on the queue, as
// [os.File.SetDeadline] does; the zero time lets them wait again.
func (q *Queue) SetDeadline(t time.Time) error { return q.file.SetDeadline(t) }

// Read reads one packet, with its virtio-net header where the queue has one.
func (q *Queue) Read(p []byte) (int, error) { return q.file.Read(p) }

// Write writes one packet, with its virtio-net header where the queue has one.
func (q *Queue) Write(p []byte) (int, error) { return q.file.Write(p) }

// Close detaches the queue; the last close removes a TUN that is not persistent.
func (q *Queue) Close() error { return q.file.Close() }

// control runs f with the descriptor and adds queue and action to its error.
func (q *Queue) control(action string, f func(fd int) error) error {
	var inner error
	if err := q.raw.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return fmt.Errorf("tun %s: %s: %w", q.name, action, err)
	}
	if inner != nil {
		return fmt.Errorf("tun %s: %s: %w", q.name, action, inner)
	}
	return nil
}
