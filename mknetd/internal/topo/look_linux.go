package topo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/netns"
	"mknet/spec/endpoint"
)

// Space is a namespace as it stands, for an explanation.
type Space struct {
	Links map[string]Device
}

// Device is one link of a Space.
type Device struct {
	Name       string
	Kind       string // "veth", "tuntap", ...
	Up         bool   // by its owner's will
	Carrier    bool   // a TUN: somebody holds a queue
	MTUBytes   int
	Group      uint32
	MAC        endpoint.MAC
	Addresses  []netip.Prefix
	Neighbours map[netip.Addr]endpoint.MAC // permanent ones
}

// Has reports whether a device of the space has the address.
func (s Space) Has(a netip.Addr) bool {
	for _, d := range s.Links {
		for _, p := range d.Addresses {
			if p.Addr() == a {
				return true
			}
		}
	}
	return false
}

// Look reads the named devices of a namespace, all of them where none is named;
// ns nil is the host. A device that is not there is left out.
func (h *Host) Look(ctx context.Context, ns *netns.Namespace, names ...string) (Space, error) {
	s, err := h.site(ns)
	if err != nil {
		return Space{}, err
	}
	var links []netlink.Link
	if len(names) == 0 {
		if links, err = dump(ctx, s.route.LinkList); err != nil {
			return Space{}, fmt.Errorf("list links: %w", err)
		}
	}
	for _, name := range names {
		l, err := s.link(name)
		if err != nil {
			return Space{}, err
		}
		if l != nil {
			links = append(links, l)
		}
	}
	out := Space{Links: map[string]Device{}}
	for _, l := range links {
		a := l.Attrs()
		d := Device{
			Name: a.Name, Kind: l.Type(), Up: a.Flags&net.FlagUp != 0, Carrier: a.RawFlags&unix.IFF_LOWER_UP != 0,
			MTUBytes: a.MTU, Group: a.Group, MAC: endpoint.MAC(padded(a.HardwareAddr)), Neighbours: map[netip.Addr]endpoint.MAC{},
		}
		if d.Addresses, err = s.addresses(ctx, l); err != nil {
			return Space{}, fmt.Errorf("addresses of %s: %w", a.Name, err)
		}
		neighbours, err := dump(ctx, func() ([]netlink.Neigh, error) { return s.route.NeighList(a.Index, netlink.FAMILY_V4) })
		if err != nil {
			return Space{}, fmt.Errorf("neighbours of %s: %w", a.Name, err)
		}
		for _, n := range neighbours {
			if n.State&netlink.NUD_PERMANENT != 0 {
				d.Neighbours[addrOf(n.IP)] = endpoint.MAC(padded(n.HardwareAddr))
			}
		}
		out.Links[a.Name] = d
	}
	return out, nil
}

func (h *Host) site(ns *netns.Namespace) (site, error) {
	if ns == nil {
		return site{route: h.route, host: h}, nil
	}
	return h.at(endpoint.InNamespace, ns)
}

// Way is the kernel's own answer to where a packet would go.
type Way struct {
	Asked bool
	Err   string // why nowhere
	Local bool   // to the namespace itself
	Dev   string
	Via   netip.Addr // the router; invalid where the destination is on the link
	Route string     // the entry that decides, as `ip route` prints it
	// MTUBytes is what the route lets pass, where it says so: by its metric, or, for a
	// packet that begins here, by what was learned from ICMP errors. 0: the device's.
	MTUBytes int
}

// refusals are what the kernel answers for a packet that it would not route.
var refusals = map[unix.Errno]string{
	unix.ENETUNREACH:  "no route",
	unix.EHOSTUNREACH: "no route, an unreachable one, or the interface that it comes in by does not forward",
	unix.EACCES:       "a route prohibits it",
	unix.EXDEV:        "the reverse path filter: answers would leave by another interface",
	unix.EINVAL:       "a source or destination that no packet may have here, or a blackhole route",
	unix.ENODEV:       "the interface is gone",
}

// Way asks the kernel which way a packet would take. With an interface the packet
// comes in by it: forwarding and the reverse path filter are asked too. ns nil is
// the host.
func (h *Host) Way(_ context.Context, ns *netns.Namespace, to, from netip.Addr, in string) (Way, error) {
	s, err := h.site(ns)
	if err != nil {
		return Way{}, err
	}
	opts := netlink.RouteGetOptions{Iif: in}
	if from.IsValid() {
		opts.SrcAddr = from.AsSlice()
	}
	w := Way{Asked: true}
	routes, err := s.route.RouteGetWithOptions(to.AsSlice(), &opts)
	var absent netlink.LinkNotFoundError
	var errno unix.Errno
	switch {
	case errors.As(err, &absent):
		w.Err = "interface " + in + " is missing"
		return w, nil
	case errors.As(err, &errno) && refusals[errno] != "":
		w.Err = refusals[errno]
		return w, nil
	case err != nil:
		return w, fmt.Errorf("ask for the way to %s: %w", to, err)
	case len(routes) == 0:
		w.Err = "no route"
		return w, nil
	}
	r := routes[0]
	w.Local = r.Type == unix.RTN_LOCAL
	w.Dev, w.Via = s.linkName(r.LinkIndex), addrOf(r.Gw)
	w.Route, w.MTUBytes = s.describe(r), r.MTU
	opts.FIBMatch = true
	if matched, err := s.route.RouteGetWithOptions(to.AsSlice(), &opts); err == nil && len(matched) > 0 {
		w.Route = s.describe(matched[0])
		if in != "" {
			// What was learned counts for what is sent, not for what is forwarded
			// (include/net/ip.h: ip_dst_mtu_maybe_forward).
			w.MTUBytes = matched[0].MTU
		}
	}
	return w, nil
}
