package topo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"

	"mknet/mknetd/internal/netns"
	"mknet/spec/endpoint"
)

// Host is the primary's root network namespace. It may be used concurrently.
type Host struct {
	route *netlink.Handle // one socket, one request at a time
	lists *netlink.Handle // for long dumps, which the others shall not wait for
	addrs *strictSocket   // reads the addresses of one device
}

// Open opens the namespace that the daemon runs in.
func Open() (*Host, error) {
	route, err := netns.NewHandle()
	if err != nil {
		return nil, fmt.Errorf("host: %w", err)
	}
	lists, err := netns.NewHandle()
	if err != nil {
		route.Close()
		return nil, fmt.Errorf("host: %w", err)
	}
	addrs, err := newStrictSocket()
	if err != nil {
		route.Close()
		lists.Close()
		return nil, fmt.Errorf("host: %w", err)
	}
	return &Host{route: route, lists: lists, addrs: addrs}, nil
}

// Close closes the sockets. Channels of WatchEgress end with their context, not here.
func (h *Host) Close() error {
	h.route.Close()
	h.lists.Close()
	h.addrs.close()
	return nil
}

// site is a network namespace as the objects see it: the host's, or an
// endpoint's.
type site struct {
	ns    *netns.Namespace // nil for the host
	route *netlink.Handle
	host  *Host
}

// at returns the site of a step.
func (h *Host) at(where string, ns *netns.Namespace) (site, error) {
	if where == endpoint.InHost {
		return site{route: h.route, host: h}, nil
	}
	route, err := ns.Netlink()
	if err != nil {
		return site{}, err
	}
	return site{ns: ns, route: route, host: h}, nil
}

// link finds a device by its exact name; nil when there is none.
func (s site) link(name string) (netlink.Link, error) {
	l, err := s.find(name)
	if l == nil || l.Attrs().Name != name {
		return nil, err
	}
	return l, nil
}

// alternative finds a device that has the name as an alternative one; nil when
// there is none. Such a name is taken, and the device is not the one that is
// meant, although the kernel finds it by that name.
func (s site) alternative(name string) (netlink.Link, error) {
	l, err := s.find(name)
	if l == nil || l.Attrs().Name == name {
		return nil, err
	}
	return l, nil
}

func (s site) find(name string) (netlink.Link, error) {
	l, err := s.route.LinkByName(name)
	var absent netlink.LinkNotFoundError
	switch {
	case errors.As(err, &absent):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("find link %s: %w", name, err)
	}
	return l, nil
}

// readSysctl returns the value of a file below /proc/sys. /proc/sys/net follows
// the thread, so that a thread inside the namespace reads the namespace's.
func (s site) readSysctl(path string) (value string, err error) {
	err = s.do(func() error {
		b, err := os.ReadFile(filepath.Join("/proc/sys", path))
		value = strings.TrimSpace(string(b))
		return err
	})
	return value, err
}

func (s site) writeSysctl(path, value string) error {
	return s.do(func() error {
		// Not os.WriteFile: it would try to create a missing file, which on proc
		// is EACCES and hides that the file is missing.
		f, err := os.OpenFile(filepath.Join("/proc/sys", path), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString(value)
		return errors.Join(err, f.Close())
	})
}

func (s site) do(f func() error) error {
	if s.ns == nil {
		return f()
	}
	return s.ns.Do(f)
}

// inspect completes a command for the operator, so that it runs at the site.
func (s site) inspect(command string) string {
	if s.ns == nil {
		return command
	}
	path := s.ns.ID().Path
	if name, ok := strings.CutPrefix(path, netns.Dir+"/"); ok && strings.HasPrefix(command, "ip ") {
		return "ip -n " + name + strings.TrimPrefix(command, "ip")
	}
	if path == "" { // came as a descriptor
		return fmt.Sprintf("%s (in namespace %s)", command, s.ns)
	}
	return "nsenter --net=" + path + " " + command
}

// dump repeats an interrupted dump until ctx ends.
func dump[T any](ctx context.Context, f func() (T, error)) (T, error) {
	return netns.Dump(func() (v T, err error) {
		if err := ctx.Err(); err != nil {
			return v, err
		}
		return f()
	})
}
