package topo

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/netns"
	"mknet/spec/endpoint"
)

// tunFlags of every queue: linux/if_tun.h. Multi-queue is a property of the
// device and cannot be changed later (drivers/net/tun.c, tun_set_iff).
const tunFlags = unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_MULTI_QUEUE | unix.IFF_VNET_HDR

// MaxQueues is the most that OpenQueues opens (MAX_TAP_QUEUES, drivers/net/tun.c).
const MaxQueues = 256

// ensureTun makes the TUN. A device that is not persistent ends with its
// descriptor, so that it is marked first and made persistent last: a daemon that
// dies in between leaves nothing, and there is no TUN of ours without a mark.
func ensureTun(_ context.Context, o *object, s site) error {
	l, err := s.link(o.Link)
	if err != nil {
		return err
	}
	if l != nil {
		if !o.ours(l) {
			return fmt.Errorf("%w: %w", ErrExists, foreignLink(l))
		}
		return nil
	}
	if other, err := s.alternative(o.Link); err != nil {
		return err
	} else if other != nil {
		return fmt.Errorf("%w: as another name of %s: %w", ErrExists, other.Attrs().Name, ErrForeign)
	}
	var queue *os.File
	err = s.do(func() error {
		queue, err = openQueue(o.Link, tunFlags|unix.IFF_TUN_EXCL)
		return err
	})
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%w: %w: %w", ErrExists, ErrForeign, err)
	}
	if err != nil {
		return err
	}
	o.changed = true
	// No queue stays open: what nobody reads would swallow packets.
	return errors.Join(o.finishTun(s, queue), queue.Close())
}

func (o *object) finishTun(s site, queue *os.File) error {
	l, err := s.link(o.Link)
	if err != nil {
		return err
	}
	if l == nil {
		return errors.New("vanished while it was made")
	}
	if err := rewriteMark(s, l, mark{generation: o.ep.Generation}); err != nil {
		return err
	}
	if err := s.route.LinkSetMTU(l, o.MTUBytes); err != nil {
		return fmt.Errorf("set mtu %d: %w", o.MTUBytes, err)
	}
	return control(queue, func(fd int) error {
		// Without an owner anybody may attach a queue (tun_not_capable); with one,
		// only root or CAP_NET_ADMIN in the namespace's user namespace.
		if err := unix.IoctlSetInt(fd, unix.TUNSETOWNER, 0); err != nil {
			return fmt.Errorf("set the owner: %w", err)
		}
		if err := unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 1); err != nil {
			return fmt.Errorf("make it persistent: %w", err)
		}
		return nil
	})
}

func checkTun(_ context.Context, o *object, s site) ([]string, error) {
	problems, err := checkDevice(o, s, "tuntap")
	if err != nil || problems != nil {
		return problems, err
	}
	l, err := s.link(o.Link)
	if err != nil || l == nil {
		return nil, err
	}
	if t, ok := l.(*netlink.Tuntap); ok {
		if t.Mode != netlink.TUNTAP_MODE_TUN || t.Flags&netlink.TUNTAP_MULTI_QUEUE == 0 {
			problems = append(problems, "is not a multi-queue TUN")
		}
		if t.NonPersist {
			problems = append(problems, "is not persistent")
		}
	}
	return problems, nil
}

// openQueue attaches one queue in the calling thread's namespace. The order is
// what drivers/net/tun.c needs: opening fixes the namespace, TUNSETIFF makes the
// file pollable, and only then may it meet the runtime's poller.
func openQueue(name string, flags uint16) (*os.File, error) {
	const device = "/dev/net/tun"
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		hint := ""
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
			hint = " (modprobe tun)"
		}
		return nil, fmt.Errorf("open %s: %w%s", device, err, hint)
	}
	err = func() error {
		req, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		req.SetUint16(flags)
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
			return fmt.Errorf("attach a queue: %w", err)
		}
		return unix.SetNonblock(fd, true)
	}()
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), device), nil
}

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

// OpenQueues attaches n queues (1 to MaxQueues) to the endpoint's TUN, index 0
// first, and returns all of them or none. The files are non-blocking and have
// one reference each: the caller passes them on and closes them, with Close, not
// through Fd, which would make them blocking for the receiver too. vnetHdr says that every packet
// has a virtio-net header in front.
func (h *Host) OpenQueues(ctx context.Context, ep endpoint.Endpoint, ns *netns.Namespace, n int) (queues []*os.File, vnetHdr bool, err error) {
	if n < 1 || n > MaxQueues {
		return nil, false, fmt.Errorf("tun %s: %d queues: must be 1 to %d", ep.IfName, n, MaxQueues)
	}
	o := &object{Step: Step{Kind: KindTun, Where: endpoint.InNamespace, Link: ep.IfName}, host: h, ns: ns, ep: ep}
	err = o.run(ctx, func(_ context.Context, o *object, s site) error {
		if _, err := o.required(s); err != nil {
			return err
		}
		err := s.do(func() error {
			for range n {
				q, err := openQueue(o.Link, tunFlags)
				if err != nil {
					return err
				}
				queues = append(queues, q)
			}
			return nil
		})
		if err != nil {
			return err
		}
		// Had the device been deleted meanwhile, attaching would have made another.
		if _, err := o.required(s); err != nil {
			return err
		}
		return persistent(queues[0])
	})
	if err != nil {
		for _, q := range queues {
			err = errors.Join(err, q.Close())
		}
		return nil, false, err
	}
	return queues, true, nil
}

// HasTun reports whether the endpoint's TUN is there and ours.
func (h *Host) HasTun(ctx context.Context, ep endpoint.Endpoint, ns *netns.Namespace) (found bool, err error) {
	o := &object{Step: Step{Kind: KindTun, Where: endpoint.InNamespace, Link: ep.IfName}, host: h, ns: ns, ep: ep}
	err = o.run(ctx, func(_ context.Context, o *object, s site) error {
		l, err := o.device(s)
		found = l != nil
		return err
	})
	return found, err
}

func persistent(queue *os.File) error {
	req, err := unix.NewIfreq("")
	if err != nil {
		return err
	}
	if err := control(queue, func(fd int) error { return unix.IoctlIfreq(fd, unix.TUNGETIFF, req) }); err != nil {
		return fmt.Errorf("ask for its flags: %w", err)
	}
	if req.Uint16()&unix.IFF_PERSIST == 0 {
		return errors.New("was replaced while its queues were attached")
	}
	return nil
}

// RecreateTun fences: it deletes the endpoint's TUN, which ends every descriptor
// of it wherever it is, and makes it again with all that hangs on it. It is also
// right when the TUN is missing. On error the endpoint is degraded, never open to
// the old holder: the old device is gone once anything has been made. changed is
// called with every object that was removed or made; it may be nil.
func (h *Host) RecreateTun(ctx context.Context, ep endpoint.Endpoint, ns *netns.Namespace, changed func(o Object, removed bool)) error {
	tell := func(o Object, removed bool) {
		if changed != nil && o.Changed() {
			changed(o, removed)
		}
	}
	tun := &object{Step: Step{Kind: KindTun, Where: endpoint.InNamespace, Link: ep.IfName}, host: h, ns: ns, ep: ep}
	if err := tun.Remove(ctx); err != nil {
		return err
	}
	tell(tun, true)
	for _, o := range append(h.Devices(ep, ns), h.Live(ep, ns)...) {
		if o.Where() != endpoint.InNamespace {
			continue // the TUN has nothing in the host
		}
		if err := o.Ensure(ctx); err != nil {
			return err
		}
		tell(o, false)
	}
	return nil
}
