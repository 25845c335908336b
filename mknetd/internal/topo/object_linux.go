package topo

import (
	"context"
	"fmt"

	"github.com/vishvananda/netlink"

	"mknet/mknetd/internal/netns"
	"mknet/spec/endpoint"
)

// operations of one kind of object. check returns one line a difference.
type operations struct {
	ensure func(context.Context, *object, site) error
	check  func(context.Context, *object, site) ([]string, error)
	remove func(context.Context, *object, site) error
}

// kinds is the table that ADD, CHECK, DEL, reconciliation and the inventory share.
var kinds = map[string]operations{
	KindVeth:    {ensureVeth, checkVeth, removeLink},
	KindPeer:    {ensurePeer, checkPeer, removeLink},
	KindTun:     {ensureTun, checkTun, removeLink},
	KindMTU:     {ensureMTU, checkMTU, removeNothing},
	KindSysctl:  {ensureSysctl, checkSysctl, removeNothing},
	KindForward: {ensureForward, checkForward, removeForward},
	KindAddress: {ensureAddress, checkAddress, removeAddress},
	KindRule:    {ensureRule, checkRule, removeRule},
	KindRoute:   {ensureRoute, checkRoute, removeRoute},
	KindQdisc:   {ensureQdisc, checkQdisc, removeQdisc},
	KindUp:      {ensureUp, checkUp, removeUp},

	KindPod:      {ensurePod, checkPod, removeLink},
	KindMAC:      {ensureMAC, checkMAC, removeNothing},
	KindGroup:    {ensureGroup, checkGroup, removeNothing},
	KindRPFilter: {ensureRPFilter, checkRPFilter, removeNothing},
	KindNeigh:    {ensureNeigh, checkNeigh, removeNeigh},
}

// object is a step at its site.
type object struct {
	Step
	host *Host
	ns   *netns.Namespace // the endpoint's namespace, nil when it is gone
	ep   endpoint.Endpoint

	changed bool // see Object.Changed
}

func (h *Host) objects(ep endpoint.Endpoint, ns *netns.Namespace, steps []Step) []Object {
	var list []Object
	for _, s := range steps {
		if s.Where == endpoint.InHost || ns != nil {
			list = append(list, &object{Step: s, host: h, ns: ns, ep: ep})
		}
	}
	return list
}

func (o *object) Kind() string  { return o.Step.Kind }
func (o *object) Where() string { return o.Step.Where }

func (o *object) Changed() bool { return o.changed }

func (o *object) Ensure(ctx context.Context) error {
	o.changed = false
	return o.run(ctx, kinds[o.Step.Kind].ensure)
}

func (o *object) Remove(ctx context.Context) error {
	o.changed = false
	return o.run(ctx, kinds[o.Step.Kind].remove)
}

func (o *object) Check(ctx context.Context) ([]endpoint.Fault, error) {
	var faults []endpoint.Fault
	err := o.run(ctx, func(ctx context.Context, o *object, s site) error {
		problems, err := kinds[o.Step.Kind].check(ctx, o, s)
		for _, p := range problems {
			faults = append(faults, endpoint.Fault{
				Kind: o.Step.Kind, Object: o.Name(), Where: o.Step.Where, Problem: p, Inspect: s.inspect(o.Look()),
			})
		}
		return err
	})
	return faults, err
}

// run gives every error the name of its object.
func (o *object) run(ctx context.Context, f func(context.Context, *object, site) error) error {
	err := ctx.Err()
	if err == nil {
		var s site
		if s, err = o.host.at(o.Step.Where, o.ns); err == nil {
			err = f(ctx, o, s)
		}
	}
	if err != nil {
		return fmt.Errorf("%s %s (%s): %w", o.Step.Kind, o.Name(), o.Step.Where, err)
	}
	return nil
}

// device returns the device that the object is or hangs on, nil when there is
// none of that name or it is not ours.
func (o *object) device(s site) (netlink.Link, error) {
	l, err := s.link(o.Link)
	if err != nil || l == nil || !o.ours(l) {
		return nil, err
	}
	return l, nil
}

// required is device for Ensure, which cannot do without.
func (o *object) required(s site) (netlink.Link, error) {
	l, err := o.device(s)
	if err == nil && l == nil {
		err = fmt.Errorf("no link %s of ours", o.Link)
	}
	return l, err
}

// ours reports whether a link belongs to the endpoint: by its alias, or, where
// its maker died before it set one, by kind, name and hardware address.
func (o *object) ours(l netlink.Link) bool {
	a := l.Attrs()
	if m, ok := parseMark(a.Alias); ok {
		return m.generation == o.ep.Generation
	}
	if a.Alias != "" || l.Type() != "veth" {
		return false
	}
	switch mac := a.HardwareAddr; a.Name {
	case o.ep.HostLink:
		return [6]byte(padded(mac)) == o.ep.Generation.HostMAC()
	case o.ep.Generation.TempLink(): // 48 bits of the generation
		return true
	case o.ep.PeerLink:
		return [6]byte(padded(mac)) == o.ep.Generation.PeerMAC()
	}
	return false
}

func padded(mac []byte) []byte {
	b := make([]byte, 6)
	copy(b, mac)
	return b
}

func removeNothing(context.Context, *object, site) error { return nil }
