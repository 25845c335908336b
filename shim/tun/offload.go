package tun

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"mknet/spec/pump"
)

// SetOffloads says what the kernel may hand to readers of the device, all its
// queues at once. Zero means complete packets only. A queue without virtio-net
// headers takes nothing but zero.
func (q *Queue) SetOffloads(o pump.Offloads) error {
	if !q.vnet {
		if o != 0 {
			return fmt.Errorf("tun %s: offloads %s: the queue has no virtio-net header", q.name, o)
		}
		return nil
	}
	return q.control("set offloads "+o.String(), func(fd int) error {
		return unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, int(o))
	})
}

// ProbeOffloads finds the most that this kernel gives and leaves the device with
// none of it, as it is before the peer has said what it can take.
func (q *Queue) ProbeOffloads() (pump.Offloads, error) {
	if !q.vnet {
		return 0, nil
	}
	for _, o := range pump.OffloadLadder {
		switch err := q.SetOffloads(o); {
		case err == nil:
			return o, q.SetOffloads(0)
		case !errors.Is(err, unix.EINVAL): // what a kernel says that does not know a bit
			return 0, err
		}
	}
	return 0, nil
}
