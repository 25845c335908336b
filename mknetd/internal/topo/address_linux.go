package topo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/netns"
)

// strictSocket asks what netlink.Handle cannot: its dump of addresses always
// reads those of all devices, so that a CHECK would cost more with every endpoint.
type strictSocket struct {
	sockets map[int]*nl.SocketHandle
}

// newStrictSocket opens the socket in the calling thread's namespace. With
// NETLINK_GET_STRICT_CHK the kernel filters by the device that a request names
// (net/ipv4/devinet.c, inet_valid_dump_ifaddr_req).
func newStrictSocket() (*strictSocket, error) {
	s, err := nl.GetNetlinkSocketAt(vnetns.None(), vnetns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	timeout := unix.NsecToTimeval(int64(netns.NetlinkTimeout / time.Nanosecond))
	err = errors.Join(
		s.SetSendTimeout(&timeout),
		s.SetReceiveTimeout(&timeout),
		unix.SetsockoptInt(s.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1),
	)
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("prepare a netlink socket: %w", err)
	}
	return &strictSocket{sockets: map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: s}}}, nil
}

func (s *strictSocket) close() { s.sockets[unix.NETLINK_ROUTE].Close() }

// of returns the IPv4 addresses of one device.
func (s *strictSocket) of(index int) ([]netip.Prefix, error) {
	req := &nl.NetlinkRequest{
		NlMsghdr: unix.NlMsghdr{Len: unix.SizeofNlMsghdr, Type: unix.RTM_GETADDR, Flags: unix.NLM_F_REQUEST | unix.NLM_F_DUMP},
		Sockets:  s.sockets,
	}
	msg := nl.NewIfAddrmsg(unix.AF_INET)
	msg.Index = uint32(index)
	req.AddData(msg)
	answers, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWADDR)
	if err != nil {
		return nil, err
	}
	var list []netip.Prefix
	for _, m := range answers {
		a := nl.DeserializeIfAddrmsg(m)
		attrs, err := nl.ParseRouteAttr(m[a.Len():])
		if err != nil {
			return nil, fmt.Errorf("read an address: %w", err)
		}
		for _, attr := range attrs {
			if addr, ok := netip.AddrFromSlice(attr.Value); ok && attr.Attr.Type == unix.IFA_LOCAL {
				list = append(list, netip.PrefixFrom(addr, int(a.Prefixlen)))
			}
		}
	}
	return list, nil
}

// addresses returns the IPv4 addresses of one device of the site.
func (s site) addresses(ctx context.Context, l netlink.Link) ([]netip.Prefix, error) {
	if s.ns == nil {
		return dump(ctx, func() ([]netip.Prefix, error) { return s.host.addrs.of(l.Attrs().Index) })
	}
	// A namespace has as many addresses as it has attachments.
	addrs, err := dump(ctx, func() ([]netlink.Addr, error) { return s.route.AddrList(l, netlink.FAMILY_V4) })
	var list []netip.Prefix
	for _, a := range addrs {
		list = append(list, prefixOf(a.IPNet))
	}
	return list, err
}

func ensureAddress(_ context.Context, o *object, s site) error {
	l, err := o.required(s)
	if err != nil {
		return err
	}
	addr := &netlink.Addr{IPNet: ipNet(o.Prefix)}
	if o.NoPrefixRoute {
		addr.Flags = unix.IFA_F_NOPREFIXROUTE
	}
	err = s.route.AddrAdd(l, addr)
	o.changed = err == nil
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add: %w", err)
	}
	return nil
}

func checkAddress(ctx context.Context, o *object, s site) ([]string, error) {
	l, err := o.device(s)
	if err != nil || l == nil {
		return nil, err
	}
	have, err := s.addresses(ctx, l)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var others []string
	found := false
	for _, p := range have {
		if p == o.Prefix {
			found = true
		} else {
			others = append(others, p.String())
		}
	}
	var problems []string
	if !found {
		problems = append(problems, "missing")
	}
	// The veth is ours alone; the TUN bears the name that the runtime chose, and
	// later plugins of its chain may have something to add.
	if len(others) > 0 && o.Link != o.ep.IfName {
		problems = append(problems, "the device also has "+strings.Join(others, ", "))
	}
	return problems, nil
}

func removeAddress(_ context.Context, o *object, s site) error {
	l, err := o.device(s)
	if err != nil || l == nil {
		return err
	}
	err = s.route.AddrDel(l, &netlink.Addr{IPNet: ipNet(o.Prefix)})
	o.changed = err == nil
	if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete: %w", err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// prefixOf keeps the host bits; nil is the zero prefix.
func prefixOf(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	addr, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(addr.Unmap(), bits)
}

func addrOf(ip net.IP) netip.Addr {
	addr, _ := netip.AddrFromSlice(ip)
	return addr.Unmap()
}
