package topo

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
)

// message is the route as netlink takes it; link is nil for an unreachable one.
func (o *object) message(link netlink.Link) *netlink.Route {
	r := &netlink.Route{
		Dst:      ipNet(o.Prefix),
		Table:    o.table(),
		Priority: int(o.Priority),
		Protocol: Protocol,
		Type:     unix.RTN_UNICAST,
	}
	if o.Via.IsValid() {
		r.Gw = o.Via.AsSlice()
	}
	if o.Src.IsValid() {
		r.Src = o.Src.AsSlice()
	}
	if o.Blackhole {
		r.Type = unix.RTN_UNREACHABLE
	}
	if o.OnLink {
		r.Scope = netlink.SCOPE_LINK
	}
	r.MTU = o.MTUBytes
	if link != nil {
		r.LinkIndex = link.Attrs().Index
	}
	return r
}

func (o *object) table() int {
	if o.Table == 0 {
		return unix.RT_TABLE_MAIN
	}
	return int(o.Table)
}

// routeDevice returns the device of the route. gone is true when it has one and
// that is not there.
func (o *object) routeDevice(s site) (l netlink.Link, gone bool, err error) {
	if o.Blackhole {
		return nil, false, nil
	}
	l, err = o.device(s)
	return l, l == nil, err
}

func ensureRoute(ctx context.Context, o *object, s site) error {
	link, gone, err := o.routeDevice(s)
	if err != nil {
		return err
	}
	if gone {
		return fmt.Errorf("no link %s of ours", o.Link)
	}
	want := o.message(link)
	// Exclusive: replacing would take somebody else's route away.
	err = s.route.RouteAdd(want)
	o.changed = err == nil
	if !errors.Is(err, unix.EEXIST) {
		return o.explainRoute(err, link)
	}
	have, err := o.standing(ctx, s)
	if err != nil {
		return err
	}
	switch {
	case have == nil:
		return fmt.Errorf("another route to %s stands already: %w", o.Prefix, ErrForeign)
	case sameRoute(*have, *want):
		return nil
	case !o.ourRoute(*have, link):
		return fmt.Errorf("route %s is in its place: %w", s.describe(*have), ErrForeign)
	}
	o.changed = true
	return o.explainRoute(s.route.RouteReplace(want), link)
}

// explainRoute adds what an operator can do about an errno.
func (o *object) explainRoute(err error, link netlink.Link) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENETDOWN):
		return fmt.Errorf("add: %w (link %s is down)", err, link.Attrs().Name)
	case errors.Is(err, unix.EINVAL) && o.Src.IsValid():
		return fmt.Errorf("add with src %s: %w (is it still an address of this host?)", o.Src, err)
	}
	return fmt.Errorf("add: %w", err)
}

// standing returns the route that stands where ours is to be: the one that the
// kernel would use for the first address of a prefix in the host, where a look
// through the table would cost more with every endpoint, and in a namespace the
// one in the table. nil when there is none.
func (o *object) standing(ctx context.Context, s site) (*netlink.Route, error) {
	if s.ns == nil {
		if o.Prefix.IsSingleIP() {
			return s.lookup(o.Prefix.Addr())
		}
		return s.lookup(o.Prefix.Addr().Next().Next()) // the child itself
	}
	table := o.table()
	if o.ep.Mode == endpoint.Veth {
		table = unix.RT_TABLE_UNSPEC // all of them, see moved
	}
	routes, err := s.table(ctx, table)
	if err != nil {
		return nil, err
	}
	var moved *netlink.Route
	for _, r := range routes {
		if prefixOf(r.Dst) != o.Prefix || r.Priority != int(o.Priority) || r.Tos != 0 || r.Table == unix.RT_TABLE_LOCAL {
			continue
		}
		if r.Table == o.table() {
			return &r, nil
		}
		moved = &r
	}
	// A plugin later in the chain may have given the pod's routes a table of their
	// own (sbr). They stand there as well.
	return moved, nil
}

// lookup returns the entry of the routing tables that addr would use, nil for
// none (ip route get fibmatch).
func (s site) lookup(addr netip.Addr) (*netlink.Route, error) {
	routes, err := s.route.RouteGetWithOptions(addr.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EACCES), errors.Is(err, unix.EINVAL):
		return nil, nil // no route, or one that refuses
	case err != nil:
		return nil, fmt.Errorf("look up %s: %w", addr, err)
	case len(routes) == 0:
		return nil, nil
	}
	return &routes[0], nil
}

// table returns the IPv4 routes of one table of a namespace.
func (s site) table(ctx context.Context, table int) ([]netlink.Route, error) {
	routes, err := dump(ctx, func() ([]netlink.Route, error) {
		return s.route.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	return routes, nil
}

func sameRoute(have, want netlink.Route) bool {
	return prefixOf(have.Dst) == prefixOf(want.Dst) && have.LinkIndex == want.LinkIndex && have.Type == want.Type &&
		have.Gw.Equal(want.Gw) && have.Src.Equal(want.Src) && len(have.MultiPath) == 0 &&
		(want.MTU == 0 || have.MTU == want.MTU)
}

// ourRoute reports whether a route is one that we may change: it has our
// protocol and leads to a device of ours, or to none at all.
func (o *object) ourRoute(have netlink.Route, link netlink.Link) bool {
	if prefixOf(have.Dst) != o.Prefix {
		return false
	}
	if link == nil {
		return have.Protocol == Protocol && have.Table == o.table()
	}
	return have.LinkIndex == link.Attrs().Index
}

func checkRoute(ctx context.Context, o *object, s site) ([]string, error) {
	link, gone, err := o.routeDevice(s)
	if err != nil || gone {
		return nil, err
	}
	have, err := o.standing(ctx, s)
	if err != nil {
		return nil, err
	}
	want := o.message(link)
	switch {
	case have == nil:
		return []string{"missing"}, nil
	case sameRoute(*have, *want):
		return nil, nil
	case o.ourRoute(*have, link):
		return []string{fmt.Sprintf("is %s, want %s", s.describe(*have), s.describe(*want))}, nil
	case s.ns == nil && prefixOf(have.Dst).Bits() <= o.Prefix.Bits() && prefixOf(have.Dst) != o.Prefix:
		return []string{"missing"}, nil // the lookup fell through to a wider route
	}
	return []string{"hidden by a foreign route: " + s.describe(*have)}, nil
}

func removeRoute(_ context.Context, o *object, s site) error {
	link, gone, err := o.routeDevice(s)
	if err != nil || gone {
		return err // a route goes with its device
	}
	want := o.message(link)
	want.Src = nil // whatever it is now
	err = s.route.RouteDel(want)
	o.changed = err == nil
	if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete: %w", err)
	}
	return nil
}

// routeTypes names what is not unicast (linux/rtnetlink.h).
var routeTypes = map[int]string{
	unix.RTN_LOCAL: "local", unix.RTN_BROADCAST: "broadcast", unix.RTN_ANYCAST: "anycast", unix.RTN_MULTICAST: "multicast",
	unix.RTN_BLACKHOLE: "blackhole", unix.RTN_UNREACHABLE: "unreachable", unix.RTN_PROHIBIT: "prohibit", unix.RTN_THROW: "throw",
	unix.RTN_NAT: "nat",
}

// describe names a route as `ip route` does.
func (s site) describe(r netlink.Route) string {
	var b strings.Builder
	if name := routeTypes[r.Type]; name != "" {
		b.WriteString(name + " ")
	}
	if p := prefixOf(r.Dst); !p.IsValid() || p == anywhere {
		b.WriteString("default")
	} else {
		b.WriteString(p.String())
	}
	if r.Gw != nil {
		b.WriteString(" via " + r.Gw.String())
	}
	if r.LinkIndex != 0 {
		name := fmt.Sprintf("#%d", r.LinkIndex)
		if l, err := s.route.LinkByIndex(r.LinkIndex); err == nil {
			name = l.Attrs().Name
		}
		b.WriteString(" dev " + name)
	}
	if r.Src != nil {
		b.WriteString(" src " + r.Src.String())
	}
	if r.MTU != 0 {
		fmt.Fprintf(&b, " mtu %d", r.MTU)
	}
	if r.Table != unix.RT_TABLE_MAIN && r.Table != 0 {
		fmt.Fprintf(&b, " table %d", r.Table)
	}
	return b.String()
}

func (o *object) rule() *netlink.Rule {
	r := netlink.NewRule()
	r.Family = netlink.FAMILY_V4
	r.IifName = o.Link
	r.Table = int(o.Table)
	r.Priority = int(o.Priority)
	r.Protocol = Protocol
	return r
}

func ensureRule(_ context.Context, o *object, s site) error {
	err := s.route.RuleAdd(o.rule())
	o.changed = err == nil
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add: %w", err)
	}
	return nil
}

// rules lists the namespace's rules: ours, and few others.
func (s site) rules(ctx context.Context) ([]netlink.Rule, error) {
	rules, err := dump(ctx, func() ([]netlink.Rule, error) { return s.route.RuleList(netlink.FAMILY_V4) })
	if err != nil {
		return nil, fmt.Errorf("list rules: %w", err)
	}
	return rules, nil
}

func checkRule(ctx context.Context, o *object, s site) ([]string, error) {
	rules, err := s.rules(ctx)
	if err != nil {
		return nil, err
	}
	var problems []string
	found := false
	for _, r := range rules {
		switch {
		case r.Priority == int(o.Priority) && r.IifName == o.Link && r.Table == int(o.Table):
			found = true
		case r.Priority > 0 && r.Priority < int(o.Priority) && (r.IifName == "" || r.IifName == o.Link) && r.Protocol != Protocol:
			problems = append(problems, fmt.Sprintf("a foreign rule with priority %d comes before it", r.Priority))
		}
	}
	if !found {
		problems = append([]string{"missing"}, problems...)
	}
	return problems, nil
}

func removeRule(_ context.Context, o *object, s site) error {
	err := s.route.RuleDel(o.rule())
	o.changed = err == nil
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete: %w", err)
	}
	return nil
}
