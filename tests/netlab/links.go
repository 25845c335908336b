package netlab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// End is one end of a pair of links.
type End struct {
	NS       *Namespace // nil: the host
	Link     string
	Addr     string // "198.51.100.10/24", may be empty
	MTUBytes int    // 0: the kernel's default
}

// Veth makes a pair of links, each up and with its address. The pair goes when the
// test ends, if it is still there.
func Veth(t testing.TB, a, b End) {
	t.Helper()
	if err := a.NS.within(func() error { return makeVeth(a, b) }); err != nil {
		t.Fatalf("add veth %s with %s: %v", a.Link, b.Link, err)
	}
	t.Cleanup(func() {
		if err := a.NS.within(func() error { return removeLink(a.Link) }); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Errorf("remove link %s: %v", a.Link, err)
		}
	})
	for _, e := range []End{a, b} {
		if err := e.NS.within(e.raise); err != nil {
			t.Fatalf("set link %s up: %v", e.Link, err)
		}
	}
}

func makeVeth(a, b End) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = a.Link, a.MTUBytes
	pair := &netlink.Veth{LinkAttrs: attrs, PeerName: b.Link, PeerMTU: uint32(b.MTUBytes)}
	if b.NS != nil {
		f, err := os.Open(b.NS.Path())
		if err != nil {
			return err
		}
		defer f.Close()
		pair.PeerNamespace = netlink.NsFd(f.Fd())
	}
	return netlink.LinkAdd(pair)
}

func removeLink(name string) error {
	link, err := netlink.LinkByName(name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err != nil {
		return err
	}
	return netlink.LinkDel(link)
}

func (e End) raise() error {
	link, err := netlink.LinkByName(e.Link)
	if err != nil {
		return err
	}
	if e.Addr != "" {
		if err := addAddr(link, e.Addr); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(link)
}

func addAddr(link netlink.Link, prefix string) error {
	addr, err := netlink.ParseAddr(prefix)
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(link, addr); err != nil {
		return fmt.Errorf("add address %s: %w", prefix, err)
	}
	return nil
}

// AddAddr adds an address with its length to a link of the namespace (nil: the host).
func (n *Namespace) AddAddr(t testing.TB, link, prefix string) {
	t.Helper()
	err := n.within(func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		return addAddr(l, prefix)
	})
	if err != nil {
		t.Fatalf("link %s: %v", link, err)
	}
}

// Route is one to add: what is empty is left to the kernel.
type Route struct{ To, Via, Link, Src string }

// AddRoute adds a route of the namespace (nil: the host), or takes the place of the
// one to the same destination.
func (n *Namespace) AddRoute(t testing.TB, r Route) {
	t.Helper()
	if err := n.within(r.replace); err != nil {
		t.Fatalf("add route %+v: %v", r, err)
	}
}

func (r Route) replace() error {
	to, err := netip.ParsePrefix(r.To)
	if err != nil {
		return err
	}
	route := netlink.Route{
		Dst: &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), to.Addr().BitLen())},
		Gw:  net.ParseIP(r.Via), Src: net.ParseIP(r.Src), Protocol: unix.RTPROT_BOOT,
	}
	if r.Via == "" {
		route.Scope = unix.RT_SCOPE_LINK
	}
	if r.Link != "" {
		link, err := netlink.LinkByName(r.Link)
		if err != nil {
			return err
		}
		route.LinkIndex = link.Attrs().Index
	}
	return netlink.RouteReplace(&route)
}

// SetSysctl writes parameters, "net.ipv4.ip_forward=1" each, where the namespace
// (nil: the host) sees them.
func (n *Namespace) SetSysctl(t testing.TB, params ...string) {
	t.Helper()
	err := n.within(func() error {
		for _, p := range params {
			name, value, _ := strings.Cut(p, "=")
			if err := os.WriteFile("/proc/sys/"+strings.ReplaceAll(name, ".", "/"), []byte(value), 0o644); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatalf("sysctl: %v", err)
	}
}

// within runs f with its thread inside the namespace (nil: the host).
func (n *Namespace) within(f func() error) error {
	if n == nil {
		return f()
	}
	return enter(n.Path(), f)
}
