package topo

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Egress returns the interface that endpoints leave by: the named one, or, for
// an empty name, that of the IPv4 default route with the lowest metric in the
// main table whose interface is up. ErrNoEgress when there is none.
//
// Finding the default route reads the main table, which has an entry for every
// endpoint: ask at start and when WatchEgress reports, not for every ADD.
func (h *Host) Egress(name string) (Egress, error) {
	ctx := context.Background() // bounded by the socket's time-out and the dump attempts
	s := site{route: h.route, host: h}
	var link netlink.Link
	var src netip.Addr
	if name != "" {
		l, err := s.link(name)
		if err != nil {
			return Egress{}, fmt.Errorf("egress: %w", err)
		}
		if l == nil {
			return Egress{}, fmt.Errorf("egress: no interface %s: %w", name, ErrNoEgress)
		}
		link = l
	} else {
		l, via, err := h.defaultRoute(ctx)
		if err != nil {
			return Egress{}, fmt.Errorf("egress: %w", err)
		}
		if l == nil {
			return Egress{}, fmt.Errorf("egress: no IPv4 default route in the main table (name an interface in the configuration, or add a route): %w", ErrNoEgress)
		}
		link, src = l, via
	}
	a := link.Attrs()
	if _, ours := parseMark(a.Alias); ours {
		return Egress{}, fmt.Errorf("egress: %s is an endpoint's own link: %w", a.Name, ErrNoEgress)
	}
	if !src.IsValid() {
		addrs, err := s.addresses(ctx, link)
		if err != nil {
			return Egress{}, fmt.Errorf("egress %s: list addresses: %w", a.Name, err)
		}
		if len(addrs) > 0 {
			src = addrs[0].Addr() // the primary address comes first
		}
	}
	return Egress{Name: a.Name, Index: a.Index, Addr: src, MTUBytes: a.MTU}, nil
}

// defaultRoute returns the device of the best default route, and its preferred
// source where the route names one.
func (h *Host) defaultRoute(ctx context.Context) (netlink.Link, netip.Addr, error) {
	s := site{route: h.lists, host: h}
	routes, err := s.table(ctx, unix.RT_TABLE_MAIN)
	if err != nil {
		return nil, netip.Addr{}, err
	}
	routes = slices.DeleteFunc(routes, func(r netlink.Route) bool {
		return prefixOf(r.Dst) != anywhere || r.Type != unix.RTN_UNICAST
	})
	slices.SortStableFunc(routes, func(a, b netlink.Route) int { return a.Priority - b.Priority })
	for _, r := range routes {
		index := r.LinkIndex
		if index == 0 && len(r.MultiPath) > 0 {
			index = r.MultiPath[0].LinkIndex
		}
		l, err := h.route.LinkByIndex(index)
		var absent netlink.LinkNotFoundError
		if errors.As(err, &absent) {
			continue
		}
		if err != nil {
			return nil, netip.Addr{}, fmt.Errorf("find link #%d: %w", index, err)
		}
		if l.Attrs().RawFlags&unix.IFF_UP != 0 {
			return l, addrOf(r.Src), nil
		}
	}
	return nil, netip.Addr{}, nil
}

// DefaultRoutes counts the IPv4 default routes of the main table by their
// interfaces: two by one interface are one way.
func (h *Host) DefaultRoutes() (int, error) {
	s := site{route: h.lists, host: h}
	routes, err := s.table(context.Background(), unix.RT_TABLE_MAIN) // bounded by the socket's time-out
	if err != nil {
		return 0, err
	}
	by := map[int]bool{}
	for _, r := range routes {
		if prefixOf(r.Dst) == anywhere && r.Type == unix.RTN_UNICAST {
			by[r.LinkIndex] = true
		}
	}
	return len(by), nil
}
