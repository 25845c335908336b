// Package link owns the child's side of an attachment: the TUN, its address, its
// route, its MTU and the resolver configuration. It works in the network
// namespace of the calling thread and touches nothing but its own device and the
// file that it is told. It implements the agent's part of spec/pump-protocol.md.
//
// Nothing here needs /proc, /sys or a program: a kernel with TUN is enough.
package link

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/shim/tun"
	"mknet/spec/pump"
)

// Device is the TUN of one attachment with its queues open. It outlives
// sessions, and the process: it is persistent.
type Device struct {
	Name     string
	Queues   []*tun.Queue
	Lanes    int           // what the kernel can steer to
	VnetHdr  bool          // packets have a virtio-net header
	Offloads pump.Offloads // what the kernel can give to our readers

	handle *netlink.Handle
}

// Open makes the TUN where there is none, and opens its queues: two where the
// kernel can steer packets to them, else one. Where the kernel has no virtio-net
// header for TUNs it falls back to plain packets. The caller closes the Device.
func Open(name string, log *slog.Logger) (*Device, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("link %s: open netlink: %w", name, err)
	}
	d := &Device{Name: name, handle: handle}
	if err := d.open(log); err != nil {
		return nil, errors.Join(fmt.Errorf("link %s: %w", name, err), d.Close())
	}
	return d, nil
}

func (d *Device) open(log *slog.Logger) error {
	made, err := d.ensureTun()
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return err
	}
	if err == nil {
		d.Queues, err = tun.Attach(d.Name, pump.MaxLanes, true)
	}
	if errors.Is(err, unix.EINVAL) { // no virtio-net header, or a device made without
		log.Warn("no virtio-net header on this kernel or device, carrying plain packets", "link", d.Name, "err", err)
		q, plainErr := tun.OpenPlain(d.Name, true)
		if plainErr != nil {
			return errors.Join(err, plainErr)
		}
		d.Queues, d.Lanes = []*tun.Queue{q}, 1
		return nil
	}
	if err != nil {
		return err
	}
	d.VnetHdr, d.Lanes = true, len(d.Queues)
	if err := d.Queues[0].Steer(); err != nil {
		if !errors.Is(err, tun.ErrNoSteering) {
			return err
		}
		log.Info("one lane only", "link", d.Name, "err", err)
		extra := d.Queues[1:]
		d.Queues, d.Lanes = d.Queues[:1], 1
		if err := tun.CloseAll(extra); err != nil {
			return err
		}
	}
	if d.Offloads, err = d.Queues[0].ProbeOffloads(); err != nil {
		return err
	}
	log.Info("device opened", "link", d.Name, "made", made, "lanes", d.Lanes, "offloads", d.Offloads.String())
	return nil
}

// ensureTun makes the persistent TUN unless it is there.
func (d *Device) ensureTun() (made bool, err error) {
	l, err := d.handle.LinkByName(d.Name)
	switch {
	case errors.As(err, new(netlink.LinkNotFoundError)):
		return true, tun.Create(d.Name)
	case err != nil:
		return false, fmt.Errorf("look up: %w", err)
	case l.Type() != "tuntap" && l.Type() != "tun":
		return false, fmt.Errorf("a %s of that name is there and is not ours", l.Type())
	}
	return false, nil
}

// Close closes the queues. The TUN stays, with its addresses and routes.
func (d *Device) Close() error {
	err := tun.CloseAll(d.Queues)
	d.Queues = nil
	d.handle.Close()
	return err
}
