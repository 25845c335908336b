// Package topo owns the links, addresses, routes, rules, sysctls and queueing
// disciplines of a multikernel endpoint: what spec/topology.md calls the table
// of objects. It never touches a firewall rule and keeps no record.
//
// What is to stand is decided by [PlanFor], which is pure; [Host.Devices] and
// [Host.Live] turn a plan into objects with Ensure, Check and Remove. The engine
// runs them: devices, firewall, live for ADD; the reverse for DEL.
//
// Ours is what carries the full generation. A link is claimed by its alias
// ([endpoint.Generation.Alias]); what only has one of our names is never
// changed, adopted or removed.
package topo

import (
	"context"
	"errors"
	"net/netip"

	"mknet/mknetd/internal/netns"
	"mknet/spec/endpoint"
)

var (
	// ErrForeign is returned by Ensure when an object of the wanted name stands
	// and is not ours. The object is left as it is; the error names it.
	ErrForeign = errors.New("belongs to somebody else")
	// ErrExists is returned by Ensure when the namespace already has an interface
	// of the name that the caller asked for. It is an ErrForeign too. ADD answers
	// with an error (CNI SPEC, ADD: "if the requested name already exists").
	ErrExists = errors.New("interface already exists")
	// ErrNoEgress is returned by Egress when the host has no default route or no
	// interface of the given name. Try again when WatchEgress reports a change.
	ErrNoEgress = errors.New("no egress")
)

// Object is one kernel object of one endpoint. Its methods may be called in any
// order and any number of times; objects of one endpoint must not be used
// concurrently, objects of different endpoints may.
type Object interface {
	Kind() string  // as endpoint.Fault.Kind
	Name() string  // as `ip` shows it
	Where() string // endpoint.InHost or endpoint.InNamespace

	// Repairable reports whether Ensure is safe while a pump holds the TUN:
	// true for all but the devices themselves.
	Repairable() bool

	// Ensure makes the object, or makes it right; it is idempotent. It refuses a
	// foreign object of the same name with ErrForeign or ErrExists.
	Ensure(ctx context.Context) error
	// Check reads and reports every difference. An object whose device is gone
	// reports nothing: the device does. The error means "could not look".
	Check(ctx context.Context) ([]endpoint.Fault, error)
	// Remove deletes the object. Absent is success, a foreign object of the same
	// name counts as absent.
	Remove(ctx context.Context) error
	// Changed reports whether the last Ensure or Remove found something to do.
	Changed() bool
}

// Egress is the interface by which the primary reaches the world.
type Egress struct {
	Name     string
	Index    int
	Addr     netip.Addr // the primary's own address there; invalid when it has none
	MTUBytes int
}

// Site is what a new attachment gets in a namespace.
type Site struct {
	PeerLink   string // the first free mkhostN
	RouteTable uint32 // table T, also the priority of `iif <TUN> lookup T`
	// MainDefault is true when the namespace has no default route in its main
	// table, so that the new attachment is to provide it.
	MainDefault bool
}

// Owned is something in the host that carries our mark.
type Owned struct {
	Kind       string // "veth" or "netns"
	Name       string
	Generation endpoint.Generation // zero for what is left of a namespace half made: no record has it
}

// Devices returns the objects that stand before the firewall is committed:
// devices, MTUs, sysctls, addresses, rules, queueing disciplines. ns == nil means that the
// namespace is gone: only objects of the host are returned. The caller keeps ns
// open for as long as it uses the objects.
func (h *Host) Devices(ep endpoint.Endpoint, ns *netns.Namespace) []Object {
	return h.objects(ep, ns, PlanFor(ep).Devices)
}

// Live returns the objects that stand after the firewall is committed: links
// up, then routes. See Devices for ns.
func (h *Host) Live(ep endpoint.Endpoint, ns *netns.Namespace) []Object {
	return h.objects(ep, ns, PlanFor(ep).Live)
}
