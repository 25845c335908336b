package engine

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var (
	objectMade    = crash.New("engine.object-made")
	objectRemoved = crash.New("engine.object-removed")
)

// object is one kernel object of one endpoint. topo.Object, *ipt.Table and
// flows satisfy it; see topo.Object for the contract of each method.
type object interface {
	Kind() string
	Name() string
	Where() string
	Ensure(ctx context.Context) error
	Check(ctx context.Context) ([]endpoint.Fault, error)
	Remove(ctx context.Context) error
}

// told is called with what became of an object: api.ObjectMade and its like.
type told func(what string, o object)

// changes is told for an endpoint.
func (e *Engine) changes(ep endpoint.Endpoint) told {
	return func(what string, o object) { e.changed(what, ep, o) }
}

// changed reports whether the last Ensure or Remove of an object found something
// to do. Flows are nobody's object.
func changed(o object) bool {
	switch o := o.(type) {
	case flows:
		return false
	case interface{ Changed() bool }:
		return o.Changed()
	}
	return true
}

// stands reports whether there is something to remove, where only a look can tell.
func stands(ctx context.Context, o object) bool {
	if _, tells := o.(interface{ Changed() bool }); tells {
		return true
	}
	faults, err := o.Check(ctx)
	return err != nil || len(faults) == 0 || !strings.HasPrefix(faults[0].Problem, "missing")
}

// table is the one list of an endpoint's kernel objects, in the order in which
// they are made. Whatever is removed is removed in the reverse order.
//
// The firewall stands before the links come up, so that no packet is ever
// forwarded unjudged; the flows of an earlier owner of the address are forgotten
// between the two, when none can be added and none can be translated wrongly.
//
// ns is nil when the namespace is gone; its objects went with it.
func (e *Engine) table(ep endpoint.Endpoint, ns *netns.Namespace) []object {
	var t []object
	for _, o := range e.host.Devices(ep, ns) {
		t = append(t, o)
	}
	t = append(t, e.programs(ep)...)
	for _, o := range e.firewall.Tables(ep) {
		t = append(t, o)
	}
	t = append(t, flows{e, ep})
	for _, o := range e.host.Live(ep, ns) {
		t = append(t, o)
	}
	return t
}

// flows stands for the conntrack entries of the child's address. They are not
// made; "ensuring" them means that none of an earlier owner is left.
type flows struct {
	e  *Engine
	ep endpoint.Endpoint
}

func (f flows) Kind() string                                    { return "conntrack" }
func (f flows) Name() string                                    { return f.ep.Address.String() }
func (f flows) Where() string                                   { return endpoint.InHost }
func (f flows) Ensure(ctx context.Context) error                { return f.e.flush(ctx, f.ep.Address) }
func (f flows) Check(context.Context) ([]endpoint.Fault, error) { return nil, nil }
func (f flows) Remove(ctx context.Context) error                { return f.e.flush(ctx, f.ep.Address) }

// ensureAll makes every object in order and stops at the first error.
func ensureAll(ctx context.Context, t []object, tell told) error {
	for i, o := range t {
		if err := context.Cause(ctx); err != nil {
			return fmt.Errorf("before %s %s: %w", o.Kind(), o.Name(), err)
		}
		if err := o.Ensure(ctx); err != nil {
			return fmt.Errorf("make %s %s: %w", o.Kind(), o.Name(), err)
		}
		if changed(o) {
			tell(api.ObjectMade, o)
		}
		objectMade.At(place(i, o))
	}
	return nil
}

// place names an object's place in the table for the crash tests: the same for
// every endpoint of one shape.
func place(i int, o object) string { return fmt.Sprintf("%02d-%s-%s", i, o.Kind(), o.Where()) }

// removeAll removes every object, last made first, and goes on past errors.
func removeAll(ctx context.Context, t []object, tell told) error {
	var errs []error
	for i := len(t) - 1; i >= 0; i-- {
		stood := stands(ctx, t[i])
		if err := t[i].Remove(ctx); err != nil {
			errs = append(errs, fmt.Errorf("remove %s %s: %w", t[i].Kind(), t[i].Name(), err))
		} else if stood && changed(t[i]) {
			tell(api.ObjectRemoved, t[i])
		}
		objectRemoved.At(place(i, t[i]))
	}
	return errors.Join(errs...)
}

// checkAll reports every fault of every object.
func checkAll(ctx context.Context, t []object) ([]endpoint.Fault, error) {
	var faults []endpoint.Fault
	for _, o := range t {
		found, err := o.Check(ctx)
		if err != nil {
			return faults, fmt.Errorf("check %s %s: %w", o.Kind(), o.Name(), err)
		}
		faults = append(faults, found...)
	}
	return faults, nil
}

// repairable reports whether an object may be made again while a pump holds the
// endpoint's TUN. Only topo has such that may not.
func repairable(o object) bool {
	if t, ok := o.(topo.Object); ok {
		return t.Repairable()
	}
	return true
}
