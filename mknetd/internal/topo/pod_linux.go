package topo

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ensurePod gives the pod's end of the veth, which ensureVeth has made in the
// namespace under a name of its own, its mark and then the name that was asked for.
func ensurePod(_ context.Context, o *object, s site) error {
	l, err := s.link(o.Link)
	if err != nil {
		return err
	}
	if l == nil {
		if l, err = s.alternative(o.Link); err != nil {
			return err
		}
	}
	if l != nil {
		if !o.ours(l) || l.Attrs().Name != o.Link {
			return fmt.Errorf("%w: %w", ErrExists, foreignLink(l))
		}
		return o.setMark(s, l)
	}
	if l, err = s.link(o.Peer); err != nil {
		return err
	}
	if l == nil || !o.ours(l) {
		return fmt.Errorf("is in the namespace neither as %s nor as %s although %s stands (was it renamed or moved?)", o.Link, o.Peer, o.ep.HostLink)
	}
	if err := o.setMark(s, l); err != nil {
		return err
	}
	o.changed = true
	err = s.route.LinkSetName(l, o.Link)
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("rename %s: %w", o.Peer, ErrExists)
	}
	if err != nil {
		return fmt.Errorf("rename %s: %w", o.Peer, err)
	}
	return nil
}

func checkPod(_ context.Context, o *object, s site) ([]string, error) {
	return checkDevice(o, s, "veth")
}

func ensureMAC(_ context.Context, o *object, s site) error {
	l, err := o.required(s)
	if err != nil || [6]byte(padded(l.Attrs().HardwareAddr)) == o.MAC {
		return err
	}
	o.changed = true
	if err := s.route.LinkSetHardwareAddr(l, net.HardwareAddr(o.MAC[:])); err != nil {
		return fmt.Errorf("set to %s: %w", o.MAC, err)
	}
	return nil
}

func checkMAC(_ context.Context, o *object, s site) ([]string, error) {
	l, err := o.device(s)
	if err != nil || l == nil || [6]byte(padded(l.Attrs().HardwareAddr)) == o.MAC {
		return nil, err
	}
	return []string{fmt.Sprintf("is %s, want %s", l.Attrs().HardwareAddr, o.MAC)}, nil
}

func ensureGroup(_ context.Context, o *object, s site) error {
	l, err := o.required(s)
	if err != nil || l.Attrs().Group == o.Group {
		return err
	}
	o.changed = true
	if err := s.route.LinkSetGroup(l, int(o.Group)); err != nil {
		return fmt.Errorf("set to %#x: %w", o.Group, err)
	}
	return nil
}

func checkGroup(_ context.Context, o *object, s site) ([]string, error) {
	l, err := o.device(s)
	if err != nil || l == nil || l.Attrs().Group == o.Group {
		return nil, err
	}
	return []string{fmt.Sprintf("is %#x, want %#x", l.Attrs().Group, o.Group)}, nil
}

// rpFilters reads the device's own value and that of conf.all. The kernel takes
// the larger one (Documentation/networking/ip-sysctl.rst): 0 is off, 1 strict, 2
// loose.
func (o *object) rpFilters(s site) (own, all string, err error) {
	if own, err = s.readSysctl(o.Path); err == nil {
		all, err = s.readSysctl("net/ipv4/conf/all/rp_filter")
	}
	return own, all, err
}

// ensureRPFilter switches the reverse path filter off. Where conf.all is strict,
// which is not ours to change, the device's own value can only make it loose.
func ensureRPFilter(_ context.Context, o *object, s site) error {
	if _, err := o.required(s); err != nil {
		return err
	}
	own, all, err := o.rpFilters(s)
	if err != nil {
		return err
	}
	want := "0"
	if all == "1" {
		want = "2"
	}
	if own == want {
		return nil
	}
	o.changed = true
	return s.writeSysctl(o.Path, want)
}

func checkRPFilter(_ context.Context, o *object, s site) ([]string, error) {
	if l, err := o.device(s); err != nil || l == nil {
		return nil, err
	}
	own, all, err := o.rpFilters(s)
	if err != nil {
		return nil, err
	}
	if max(own, all) == "1" {
		return []string{fmt.Sprintf("is %s and conf/all has %s, which is strict", own, all)}, nil
	}
	return nil, nil
}

func (o *object) neigh(l netlink.Link) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: l.Attrs().Index, Family: netlink.FAMILY_V4, State: netlink.NUD_PERMANENT,
		IP: o.Via.AsSlice(), HardwareAddr: net.HardwareAddr(o.MAC[:]),
	}
}

func ensureNeigh(_ context.Context, o *object, s site) error {
	l, err := o.required(s)
	if err != nil {
		return err
	}
	o.changed = true
	if err := s.route.NeighSet(o.neigh(l)); err != nil {
		return fmt.Errorf("set: %w", err)
	}
	return nil
}

// checkNeigh lists the neighbours of one device, of which a pod's have one.
func checkNeigh(ctx context.Context, o *object, s site) ([]string, error) {
	l, err := o.device(s)
	if err != nil || l == nil || l.Attrs().Flags&net.FlagUp == 0 { // a device that is down has none
		return nil, err
	}
	list, err := dump(ctx, func() ([]netlink.Neigh, error) { return s.route.NeighList(l.Attrs().Index, netlink.FAMILY_V4) })
	if err != nil {
		return nil, fmt.Errorf("list neighbours: %w", err)
	}
	for _, n := range list {
		if addrOf(n.IP) != o.Via {
			continue
		}
		if n.State&netlink.NUD_PERMANENT == 0 || [6]byte(padded(n.HardwareAddr)) != o.MAC {
			return []string{fmt.Sprintf("is %s in state %#x, want %s, permanent", n.HardwareAddr, n.State, o.MAC)}, nil
		}
		return nil, nil
	}
	return []string{"missing"}, nil
}

func removeNeigh(_ context.Context, o *object, s site) error {
	l, err := o.device(s)
	if err != nil || l == nil {
		return err
	}
	err = s.route.NeighDel(o.neigh(l))
	o.changed = err == nil
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete: %w", err)
	}
	return nil
}
