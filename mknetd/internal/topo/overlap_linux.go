package topo

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
)

// Range is a prefix that endpoints get addresses from.
type Range struct {
	Name   string // "child pool"
	Prefix netip.Prefix
}

// Overlaps names every foreign address, and every foreign route of any table,
// that overlaps a range, one line each, sorted. Routes that stand for "everything" (at most one bit
// of prefix: the default and the two halves that VPNs use) do not count. It reads all tables:
// ask at start and when WatchEgress reports; Conflict is for every ADD.
func (h *Host) Overlaps(ranges []Range) ([]string, error) {
	ctx := context.Background() // bounded by the socket's time-out and the dump attempts
	r, err := h.reached(ctx)
	if err != nil {
		return nil, err
	}
	return r.foreign(ctx, ranges)
}

// reached is every address and route of the host at one moment.
type reached struct {
	site
	addrs  []netlink.Addr
	routes []netlink.Route
}

func (h *Host) reached(ctx context.Context) (r reached, err error) {
	r.site = site{route: h.lists, host: h}
	r.addrs, err = dump(ctx, func() ([]netlink.Addr, error) { return h.lists.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return r, fmt.Errorf("list addresses: %w", err)
	}
	r.routes, err = r.table(ctx, unix.RT_TABLE_UNSPEC) // all of them
	return r, err
}

// foreign names what is not ours. Whose a link is it asks last: one that an ADD made
// meanwhile is ours as well, and what lay on one that is gone overlaps nothing.
func (r reached) foreign(ctx context.Context, ranges []Range) ([]string, error) {
	own, gone, err := r.host.links(ctx)
	if err != nil {
		return nil, err
	}
	var found []string
	note := func(p netip.Prefix, what string) {
		for _, r := range ranges {
			if p.IsValid() && p.Bits() > 1 && p.Overlaps(r.Prefix) {
				found = append(found, fmt.Sprintf("%s %s overlaps %s", r.Name, r.Prefix, what))
			}
		}
	}
	for _, a := range r.addrs {
		if !own[a.LinkIndex] && !gone(a.LinkIndex) {
			note(prefixOf(a.IPNet), fmt.Sprintf("address %s of %s", a.IPNet, r.linkName(a.LinkIndex)))
		}
	}
	for _, e := range r.routes {
		switch {
		case own[e.LinkIndex], e.LinkIndex != 0 && gone(e.LinkIndex): // a blackhole has none
		case e.Protocol == unix.RTPROT_KERNEL: // named with the address that it came with
		default:
			note(prefixOf(e.Dst), "route "+r.describe(e))
		}
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

// Conflict is the part of Overlaps that an ADD can afford: it returns an error
// that names the foreign route by which the endpoint's own addresses would be
// reached now. It is for before the endpoint's objects are made.
func (h *Host) Conflict(ep endpoint.Endpoint) error {
	s := site{route: h.route, host: h}
	for _, addr := range []netip.Addr{ep.Address, ep.TransitPeer} {
		if !addr.IsValid() { // a pod has no transit address
			continue
		}
		r, err := s.lookup(addr)
		if err != nil {
			return err
		}
		if r == nil || prefixOf(r.Dst).Bits() <= 1 {
			continue
		}
		if l, err := h.route.LinkByIndex(r.LinkIndex); err == nil {
			if m, ours := parseMark(l.Attrs().Alias); ours && m.generation == ep.Generation {
				continue
			}
		}
		return fmt.Errorf("address %s: already reached by route %s: %w", addr, s.describe(*r), ErrForeign)
	}
	return nil
}

func (s site) linkName(index int) string {
	if l, err := s.route.LinkByIndex(index); err == nil {
		return l.Attrs().Name
	}
	return fmt.Sprintf("#%d", index)
}
