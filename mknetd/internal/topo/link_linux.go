package topo

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ensureVeth makes the pair with its other end directly in the namespace, so
// that it is never seen in the host and needs no move.
func ensureVeth(_ context.Context, o *object, s site) error {
	l, err := s.link(o.Link)
	if err != nil {
		return err
	}
	if l == nil {
		if o.ns == nil {
			return errNoNamespace
		}
		if err := o.makeVeth(s); err != nil {
			return err
		}
		o.changed = true
		if l, err = s.link(o.Link); err != nil {
			return err
		}
		if l == nil {
			return errors.New("vanished while it was made")
		}
	}
	if !o.ours(l) {
		return foreignLink(l)
	}
	return o.setMark(s, l)
}

var errNoNamespace = errors.New("its namespace is gone")

func (o *object) makeVeth(s site) error {
	attrs := netlink.NewLinkAttrs() // TxQLen -1: the driver's default, not 0
	attrs.Name, attrs.MTU = o.Link, o.MTUBytes
	host, peer := o.ep.Generation.HostMAC(), o.ep.PodMAC()
	attrs.Group = o.ep.LinkGroup()
	// An address that was given is not replaced by udev's MACAddressPolicy.
	attrs.HardwareAddr = net.HardwareAddr(host[:])
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerMTU = o.Peer, uint32(o.MTUBytes)
	veth.PeerHardwareAddr = net.HardwareAddr(peer[:])
	return o.ns.Control(func(fd int) error {
		veth.PeerNamespace = netlink.NsFd(fd)
		err := s.route.LinkAdd(veth)
		if errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("make it with peer %s: one of the names is taken: %w", o.Peer, ErrForeign)
		}
		if err != nil {
			return fmt.Errorf("make it with peer %s: %w", o.Peer, err)
		}
		return nil
	})
}

// setMark keeps a note that the alias already carries.
func (o *object) setMark(s site, l netlink.Link) error {
	if have, ok := parseMark(l.Attrs().Alias); ok && have.generation == o.ep.Generation {
		return nil
	}
	o.changed = true
	return rewriteMark(s, l, mark{generation: o.ep.Generation})
}

func rewriteMark(s site, l netlink.Link, m mark) error {
	if err := s.route.LinkSetAlias(l, m.String()); err != nil {
		return fmt.Errorf("set the alias of %s: %w", l.Attrs().Name, err)
	}
	return nil
}

func foreignLink(l netlink.Link) error {
	return fmt.Errorf("a %s named %s with alias %q stands already: %w (rename or delete it)",
		l.Type(), l.Attrs().Name, l.Attrs().Alias, ErrForeign)
}

func checkVeth(_ context.Context, o *object, s site) ([]string, error) {
	return checkDevice(o, s, "veth")
}

func checkPeer(_ context.Context, o *object, s site) ([]string, error) {
	return checkDevice(o, s, "veth")
}

// checkDevice compares what a device is; its other properties are objects of their own.
func checkDevice(o *object, s site, kind string) ([]string, error) {
	l, err := s.link(o.Link)
	switch {
	case err != nil:
		return nil, err
	case l == nil:
		return []string{"missing"}, nil
	case l.Type() != kind:
		return []string{fmt.Sprintf("is a %s, want a %s", l.Type(), kind)}, nil
	}
	if m, ok := parseMark(l.Attrs().Alias); !ok || m.generation != o.ep.Generation {
		return []string{fmt.Sprintf("alias is %q, want %q", l.Attrs().Alias, o.ep.Generation.Alias())}, nil
	}
	return nil, nil
}

// ensurePeer marks the other end, which ensureVeth has made.
func ensurePeer(_ context.Context, o *object, s site) error {
	l, err := s.link(o.Link)
	switch {
	case err != nil:
		return err
	case l == nil:
		return fmt.Errorf("is not in the namespace although %s stands (was it renamed or moved?)", o.Peer)
	case !o.ours(l):
		return foreignLink(l)
	}
	return o.setMark(s, l)
}

// removeLink deletes a device of ours; a veth takes its other end along.
func removeLink(_ context.Context, o *object, s site) error {
	l, err := o.device(s)
	if err != nil || l == nil {
		return err
	}
	err = s.route.LinkDel(l)
	o.changed = err == nil
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete: %w", err)
	}
	return nil
}

func ensureMTU(_ context.Context, o *object, s site) error {
	l, err := o.required(s)
	if err != nil || l.Attrs().MTU == o.MTUBytes {
		return err
	}
	o.changed = true
	if err := s.route.LinkSetMTU(l, o.MTUBytes); err != nil {
		return fmt.Errorf("set to %d: %w", o.MTUBytes, err)
	}
	return nil
}

func checkMTU(_ context.Context, o *object, s site) ([]string, error) {
	l, err := o.device(s)
	if err != nil || l == nil || l.Attrs().MTU == o.MTUBytes {
		return nil, err
	}
	return []string{fmt.Sprintf("mtu is %d, want %d", l.Attrs().MTU, o.MTUBytes)}, nil
}

func ensureUp(_ context.Context, o *object, s site) error {
	l, err := o.required(s)
	if err != nil || l.Attrs().Flags&net.FlagUp != 0 {
		return err
	}
	o.changed = true
	if err := s.route.LinkSetUp(l); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	return nil
}

// checkUp asks for the administrative state alone: a TUN without a shim has no
// carrier and is healthy.
func checkUp(_ context.Context, o *object, s site) ([]string, error) {
	l, err := o.device(s)
	if err != nil || l == nil || l.Attrs().Flags&net.FlagUp != 0 {
		return nil, err
	}
	return []string{"is down, want up"}, nil
}

func removeUp(_ context.Context, o *object, s site) error {
	l, err := o.device(s)
	if err != nil || l == nil || l.Attrs().Flags&net.FlagUp == 0 {
		return err
	}
	o.changed = true
	if err := s.route.LinkSetDown(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("set down: %w", err)
	}
	return nil
}
