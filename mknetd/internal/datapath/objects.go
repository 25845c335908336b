package datapath

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"

	"mknet/spec/endpoint"
)

// Kinds of objects.
const (
	KindAttachment = "bpf-program"
	KindEntry      = "bpf-endpoint"
)

// Object is one object of an endpoint's data path. All of them are on the host.
type Object interface {
	Kind() string  // KindAttachment or KindEntry
	Name() string  // link and hook, or address
	Where() string // endpoint.InHost
	// Ensure makes the object what it shall be; the link must be there.
	Ensure(ctx context.Context) error
	// Check reports what differs and changes nothing. A link that is not there is
	// a difference.
	Check(ctx context.Context) ([]endpoint.Fault, error)
	// Remove takes the object away; absent is success, also when the link is gone.
	Remove(ctx context.Context) error
	// Repairable reports that Ensure may run at any time: always.
	Repairable() bool
}

// hook is one of the two places of a link where programs run.
type hook string

const (
	ingress hook = "ingress" // of the host end: what the workload sends
	egress  hook = "egress"  // of the host end: what the host stack sends it
)

var hooks = []hook{egress, ingress}

// programAt is the program of a hook, by its name in bpf/datapath.c.
func programAt(mode endpoint.Mode, h hook) string {
	switch {
	case mode == endpoint.Veth && h == ingress:
		return "from_container"
	case mode == endpoint.Veth:
		return "to_container"
	case h == ingress:
		return "from_child"
	}
	return "to_child"
}

// Objects lists what the endpoint needs, in the order of making: the program
// towards the workload, the one from it, the endpoint map's entry. They go onto
// ep.HostLink, which topo makes before and brings up after them. For a
// multikernel endpoint the programs judge and never redirect.
func (d *Datapath) Objects(ep endpoint.Endpoint) []Object {
	var list []Object
	for _, h := range hooks {
		list = append(list, &attachment{d: d, gen: ep.Generation, link: ep.HostLink, hook: h, program: programAt(ep.Mode, h)})
	}
	return append(list, &entry{d: d, ep: ep})
}

// attachment is a program on a hook of a link.
type attachment struct {
	d       *Datapath
	gen     endpoint.Generation // whose link it is; zero for one that was found, not asked for
	link    string
	hook    hook
	program string
}

func (a *attachment) Kind() string     { return KindAttachment }
func (a *attachment) Name() string     { return a.link + "-" + string(a.hook) }
func (a *attachment) Where() string    { return endpoint.InHost }
func (a *attachment) Repairable() bool { return true }

func (a *attachment) Ensure(ctx context.Context) error {
	return a.run(ctx, func(l netlink.Link) error {
		if l == nil {
			return fmt.Errorf("no link %s", a.link)
		}
		if a.d.cfg.Attach == TCX {
			return a.ensureTCX(l)
		}
		return a.ensureFilter(l)
	})
}

func (a *attachment) Check(ctx context.Context) ([]endpoint.Fault, error) {
	var faults []endpoint.Fault
	err := a.run(ctx, func(l netlink.Link) error {
		var problem string
		var err error
		switch {
		case l == nil:
			problem = "no link " + a.link
		case a.d.cfg.Attach == TCX:
			problem, err = a.checkTCX(l)
		default:
			problem, err = a.checkFilter(l)
		}
		if problem != "" {
			faults = append(faults, endpoint.Fault{
				Kind: a.Kind(), Object: a.Name(), Where: a.Where(), Problem: problem, Inspect: a.inspect(),
			})
		}
		return err
	})
	return faults, err
}

func (a *attachment) inspect() string {
	if a.d.cfg.Attach == TCX {
		return "bpftool net show dev " + a.link
	}
	return "tc filter show dev " + a.link + " " + string(a.hook)
}

// Remove spares the program of a successor, whose link has the same name.
func (a *attachment) Remove(ctx context.Context) error {
	return a.run(ctx, func(l netlink.Link) error {
		if a.d.cfg.Attach == TCX {
			return a.removePin()
		}
		if l == nil {
			return nil // the filter went with it
		}
		return a.removeFilter(l)
	})
}

// run gives f the endpoint's link, nil where there is none, and every error its object.
func (a *attachment) run(ctx context.Context, f func(netlink.Link) error) error {
	err := ctx.Err()
	if err == nil {
		var l netlink.Link
		if l, err = a.d.linkOf(a.gen, a.link); err == nil {
			err = f(l)
		}
	}
	if err != nil {
		return fmt.Errorf("program %s on %s: %w", a.program, a.Name(), err)
	}
	return nil
}

// linkOf returns the endpoint's link, nil where there is none: that of a pod whose
// namespace vanished may have been followed by another of the same name.
func (d *Datapath) linkOf(gen endpoint.Generation, name string) (netlink.Link, error) {
	l, err := d.linkByName(name)
	if err != nil || l == nil || !owns(gen, l) {
		return nil, err
	}
	return l, nil
}

// owns reports whether a link is the generation's: by its alias, or, where it bears
// no mark of ours (yet), by the hardware address that it is made with.
func owns(gen endpoint.Generation, l netlink.Link) bool {
	a := l.Attrs()
	if strings.HasPrefix(a.Alias, endpoint.AliasPrefix) {
		return strings.HasPrefix(a.Alias, gen.Alias())
	}
	mac := gen.HostMAC()
	return bytes.Equal(a.HardwareAddr, mac[:])
}

// linkByName returns the link of this node, nil where there is none.
func (d *Datapath) linkByName(name string) (netlink.Link, error) {
	l, err := d.links.LinkByName(name)
	var gone netlink.LinkNotFoundError
	if errors.As(err, &gone) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find link %s: %w", name, err)
	}
	return l, nil
}
