package topo

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/netns"
	"mknet/spec/endpoint"
)

// MaxAttachments bounds the attachments of one namespace: their rules come before
// the main table's.
const MaxAttachments = 1024

// Survey finds what a new attachment gets in a namespace: numbers that nothing
// there uses. The caller holds the namespace's lock from here until the objects
// stand. ErrExists when the namespace has an interface named ifName.
func (h *Host) Survey(ctx context.Context, ns *netns.Namespace, ifName string) (Site, error) {
	fail := func(err error) (Site, error) { return Site{}, fmt.Errorf("namespace %s: %w", ns, err) }
	s, err := h.at(endpoint.InNamespace, ns)
	if err != nil {
		return fail(err)
	}
	links, err := dump(ctx, s.route.LinkList)
	if err != nil {
		return fail(fmt.Errorf("list links: %w", err))
	}
	names := map[string]bool{}
	for _, l := range links {
		a := l.Attrs()
		names[a.Name] = true
		for _, other := range a.AltNames {
			names[other] = true
		}
	}
	if names[ifName] {
		return fail(fmt.Errorf("%s: %w", ifName, ErrExists))
	}
	used, free, err := s.tables(ctx)
	if err != nil {
		return fail(err)
	}
	for n := range MaxAttachments {
		peer, table := endpoint.PeerLink(n), uint32(RouteTableBase+n)
		if !names[peer] && !used[table] {
			return Site{PeerLink: peer, RouteTable: table, MainDefault: free}, nil
		}
	}
	return fail(fmt.Errorf("has %d attachments already", MaxAttachments))
}

// tables returns which tables and priorities are in use, and whether the main
// table lacks a default route.
func (s site) tables(ctx context.Context) (used map[uint32]bool, free bool, err error) {
	routes, err := s.table(ctx, unix.RT_TABLE_UNSPEC)
	if err != nil {
		return nil, false, err
	}
	rules, err := s.rules(ctx)
	if err != nil {
		return nil, false, err
	}
	used, free = map[uint32]bool{}, true
	for _, r := range routes {
		used[uint32(r.Table)] = true
		if r.Table == unix.RT_TABLE_MAIN && prefixOf(r.Dst) == anywhere {
			free = false
		}
	}
	for _, r := range rules {
		used[uint32(r.Table)], used[uint32(r.Priority)] = true, true
	}
	return used, free, nil
}

// MainDefaultFree reports whether the namespace has no default route in its main
// table: after the attachment that provided it has gone, a survivor takes over. The engine then
// sets MainDefault in the survivor's record and runs Ensure on MainDefault.
func (h *Host) MainDefaultFree(ctx context.Context, ns *netns.Namespace) (bool, error) {
	s, err := h.at(endpoint.InNamespace, ns)
	if err == nil {
		var free bool
		if _, free, err = s.tables(ctx); err == nil {
			return free, nil
		}
	}
	return false, fmt.Errorf("namespace %s: %w", ns, err)
}

// MainDefault is the namespace's ordinary default route by this attachment. It
// is among the Live objects of a record that has MainDefault set. ns must not be nil.
func (h *Host) MainDefault(ep endpoint.Endpoint, ns *netns.Namespace) Object {
	return &object{Step: mainDefault(ep), host: h, ns: ns, ep: ep}
}

// Owned lists everything in the host that carries our mark: host links by their
// alias, and namespaces that netns.Make made. It is for the inventory and for
// removing what no record knows; what stands inside a namespace is found through
// its record.
func (h *Host) Owned(ctx context.Context) ([]Owned, error) {
	links, err := dump(ctx, h.lists.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	var found []Owned
	for _, l := range links {
		if m, ours := parseMark(l.Attrs().Alias); ours {
			found = append(found, Owned{Kind: KindVeth, Name: l.Attrs().Name, Generation: m.generation})
		}
	}
	made, err := netns.Owned()
	if err != nil {
		return nil, err
	}
	for _, m := range made {
		found = append(found, Owned{Kind: KindNetns, Name: m.Name, Generation: m.Generation})
	}
	return found, nil
}

// KindNetns is the kind of a namespace in Owned.
const KindNetns = "netns"

// RemoveOwned deletes what Owned reported, if it still carries the same mark.
// Absent is success. Routes and the other end of a veth go with it.
func (h *Host) RemoveOwned(ctx context.Context, o Owned) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if o.Kind == KindNetns {
		return netns.Made{Name: o.Name, Generation: o.Generation}.Remove()
	}
	s := site{route: h.route, host: h}
	l, err := s.link(o.Name)
	if err != nil || l == nil {
		return err
	}
	if m, ours := parseMark(l.Attrs().Alias); !ours || m.generation != o.Generation {
		return nil
	}
	if err := h.route.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete %s %s: %w", o.Kind, o.Name, err)
	}
	return nil
}

// LinkGone reports whether the endpoint's host veth is gone for certain. The
// kernel removes it with the namespace that its peer is in. A pod's may have been
// followed by another of the same name.
func (h *Host) LinkGone(ep endpoint.Endpoint) bool {
	l, err := site{route: h.route, host: h}.link(ep.HostLink)
	if err != nil || l == nil {
		return err == nil
	}
	m, ours := parseMark(l.Attrs().Alias)
	return ours && m.generation != ep.Generation
}

// LinkTaken names what holds the name of the endpoint's host veth: ErrForeign,
// with the holder's alias, or nil. It is for before the endpoint's objects are made.
func (h *Host) LinkTaken(ep endpoint.Endpoint) error {
	l, err := site{route: h.route, host: h}.find(ep.HostLink)
	if err != nil || l == nil {
		return err
	}
	return foreignLink(l)
}
