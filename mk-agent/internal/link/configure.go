package link

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/spec/pump"
)

// Configure makes the device what cfg says and returns what it changed, one
// phrase each; nothing when everything was so already. Addresses and default
// routes of this device that cfg does not have are removed. Those of other
// devices are left alone: a default route of another device with our metric is
// an error that names it.
func (d *Device) Configure(cfg pump.LinkConfig) (changes []string, err error) {
	l, err := d.handle.LinkByName(d.Name)
	if err != nil {
		return nil, fmt.Errorf("link %s: look up: %w", d.Name, err)
	}
	// IPv6 goes off before the link comes up, else the kernel gives it an address.
	for _, ensure := range []func(netlink.Link, pump.LinkConfig) (string, error){
		d.ensureNoIPv6, d.ensureMTU, d.ensureAddress, d.ensureUp, d.ensureRoute,
	} {
		change, err := ensure(l, cfg)
		if err != nil {
			return changes, fmt.Errorf("link %s: %w", d.Name, err)
		}
		if change != "" {
			changes = append(changes, change)
		}
	}
	return changes, nil
}

// ensureNoIPv6 keeps the kernel from giving the device an IPv6 address. A kernel
// without IPv6, and a child without /proc, have nothing to turn off: the address
// generation mode works without /proc.
func (d *Device) ensureNoIPv6(l netlink.Link, _ pump.LinkConfig) (string, error) {
	if err := d.handle.LinkSetIP6AddrGenMode(l, noAddrGen); err != nil && !errors.Is(err, unix.EAFNOSUPPORT) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINVAL) {
		return "", fmt.Errorf("turn IPv6 address generation off: %w", err)
	}
	path := "/proc/sys/net/ipv6/conf/" + d.Name + "/disable_ipv6"
	old, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist), err == nil && strings.TrimSpace(string(old)) == "1":
		return "", nil
	case err != nil:
		return "", fmt.Errorf("turn IPv6 off: %w", err)
	}
	if err := os.WriteFile(path, []byte("1"), 0); err != nil && !errors.Is(err, unix.EROFS) {
		return "", fmt.Errorf("turn IPv6 off: %w", err)
	}
	return "ipv6 off", nil
}

// noAddrGen is IN6_ADDR_GEN_MODE_NONE, linux/if_link.h.
const noAddrGen = 1

func (d *Device) ensureMTU(l netlink.Link, cfg pump.LinkConfig) (string, error) {
	if l.Attrs().MTU == cfg.MTUBytes {
		return "", nil
	}
	if err := d.handle.LinkSetMTU(l, cfg.MTUBytes); err != nil {
		return "", fmt.Errorf("set mtu %d: %w", cfg.MTUBytes, err)
	}
	return fmt.Sprintf("mtu %d, was %d", cfg.MTUBytes, l.Attrs().MTU), nil
}

func (d *Device) ensureUp(l netlink.Link, _ pump.LinkConfig) (string, error) {
	if l.Attrs().Flags&net.FlagUp != 0 {
		return "", nil
	}
	if err := d.handle.LinkSetUp(l); err != nil {
		return "", fmt.Errorf("set up: %w", err)
	}
	return "up", nil
}

// ensureAddress removes every other IPv4 address first: added beside an old one
// of the same subnet, ours would be a secondary and go away with it.
func (d *Device) ensureAddress(l netlink.Link, cfg pump.LinkConfig) (string, error) {
	have, err := dump(func() ([]netlink.Addr, error) { return d.handle.AddrList(l, netlink.FAMILY_V4) })
	if err != nil {
		return "", fmt.Errorf("list addresses: %w", err)
	}
	want, found, removed := cfg.Address.String(), false, ""
	for _, a := range have {
		if a.IPNet.String() == want && a.Flags&unix.IFA_F_SECONDARY == 0 {
			found = true
			continue
		}
		if err := d.handle.AddrDel(l, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) { // went with its primary
			return "", fmt.Errorf("remove address %s: %w", a.IPNet, err)
		}
		removed = ", was " + a.IPNet.String()
	}
	if found {
		if removed != "" {
			return "address " + want + " alone", nil
		}
		return "", nil
	}
	addr := &netlink.Addr{IPNet: ipNet(cfg.Address), Scope: unix.RT_SCOPE_UNIVERSE}
	if err := d.handle.AddrAdd(l, addr); err != nil {
		return "", fmt.Errorf("add address %s: %w", want, err)
	}
	return "address " + want + removed, nil
}

// ensureRoute keeps one default route by this device.
func (d *Device) ensureRoute(l netlink.Link, cfg pump.LinkConfig) (string, error) {
	metric := routeMetric(cfg.Link)
	routes, err := dump(func() ([]netlink.Route, error) {
		return d.handle.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return "", fmt.Errorf("list routes: %w", err)
	}
	found, changed := false, ""
	for _, r := range routes {
		if !isDefault(r) || r.LinkIndex != l.Attrs().Index {
			continue
		}
		if gw, ok := netip.AddrFromSlice(r.Gw); ok && gw.Unmap() == cfg.Gateway && r.Priority == metric && !found {
			found = true
			continue
		}
		if err := d.handle.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
			return "", fmt.Errorf("remove default route by %s: %w", r.Gw, err)
		}
		changed = ", was by " + r.Gw.String()
	}
	if found {
		return "", nil
	}
	route := &netlink.Route{LinkIndex: l.Attrs().Index, Gw: cfg.Gateway.AsSlice(), Priority: metric, Table: unix.RT_TABLE_MAIN}
	if err := d.handle.RouteAdd(route); err != nil {
		return "", fmt.Errorf("add default route by %s: %w%s", cfg.Gateway, err, d.foreignDefault(routes, l, metric))
	}
	return "default by " + cfg.Gateway.String() + changed, nil
}

// foreignDefault names the route that is in the way of ours.
func (d *Device) foreignDefault(routes []netlink.Route, ours netlink.Link, metric int) string {
	for _, r := range routes {
		if !isDefault(r) || r.LinkIndex == ours.Attrs().Index || r.Priority != metric {
			continue
		}
		name := "interface " + strconv.Itoa(r.LinkIndex)
		if l, err := d.handle.LinkByIndex(r.LinkIndex); err == nil {
			name = l.Attrs().Name
		}
		return fmt.Sprintf(" (%s has the default route: remove that, or give it a metric)", name)
	}
	return ""
}

// routeMetric prefers the first attachment: 0 for mkn0, 101 for mkn1, ...
func routeMetric(name string) int {
	n, err := strconv.Atoi(strings.TrimPrefix(name, endpoint.ChildLink))
	if err != nil || n == 0 {
		return 0
	}
	return 100 + n
}

func isDefault(r netlink.Route) bool {
	if r.Dst == nil {
		return r.Type == unix.RTN_UNICAST || r.Type == 0
	}
	ones, _ := r.Dst.Mask.Size()
	return ones == 0 && r.Dst.IP.IsUnspecified() && r.Type == unix.RTN_UNICAST
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
