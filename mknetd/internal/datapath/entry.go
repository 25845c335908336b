package datapath

import (
	"context"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"mknet/spec/endpoint"
)

// entry is what the maps hold for an endpoint: its counters, whose its link is,
// and, last, the endpoint itself.
type entry struct {
	d  *Datapath
	ep endpoint.Endpoint
}

func (e *entry) Kind() string     { return KindEntry }
func (e *entry) Name() string     { return e.ep.Address.String() }
func (e *entry) Where() string    { return endpoint.InHost }
func (e *entry) Repairable() bool { return true }

// wrap gives an error its object.
func (e *entry) wrap(err error) error {
	if err != nil {
		return fmt.Errorf("endpoint map entry %s: %w", e.Name(), err)
	}
	return nil
}

// want is what the maps shall hold.
func (e *entry) want() (key address, v endpointValue, at attachmentValue, err error) {
	if key, err = addressOf(e.ep.Address); err != nil {
		return
	}
	l, err := e.d.linkOf(e.ep.Generation, e.ep.HostLink)
	if err != nil {
		return
	}
	if l == nil {
		err = fmt.Errorf("no link %s", e.ep.HostLink)
		return
	}
	at.Address = key
	copy(at.Name[:len(at.Name)-1], e.ep.HostLink)
	v, err = e.d.valueOf(e.ep, l.Attrs().Index)
	return
}

func (e *entry) Ensure(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return e.wrap(err)
	}
	key, v, at, err := e.want()
	if err != nil {
		return e.wrap(err)
	}
	var have endpointValue
	switch found, err := lookup(e.d.objects.Endpoints, key, &have); {
	case err != nil:
		return e.wrap(err)
	case found && have.ID != v.ID:
		if err := e.d.forget(key, have); err != nil { // an earlier owner's
			return e.wrap(err)
		}
	}
	zero := make([]countersValue, ebpf.MustPossibleCPU())
	if err := e.d.objects.Counts.Update(key, zero, ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return e.wrap(fmt.Errorf("map counts: %w", err))
	}
	if err := e.d.objects.Attachments.Put(v.IfIndex, at); err != nil {
		return e.wrap(fmt.Errorf("map attachments: %w", err))
	}
	if err := e.d.objects.Endpoints.Put(key, v); err != nil {
		return e.wrap(fmt.Errorf("map endpoints: %w", err))
	}
	return nil
}

func (e *entry) Check(ctx context.Context) ([]endpoint.Fault, error) {
	if err := ctx.Err(); err != nil {
		return nil, e.wrap(err)
	}
	problem, err := e.check()
	if err != nil || problem == "" {
		return nil, e.wrap(err)
	}
	return []endpoint.Fault{{
		Kind: e.Kind(), Object: e.Name(), Where: e.Where(), Problem: problem,
		Inspect: e.d.Inspect("endpoints"),
	}}, nil
}

func (e *entry) check() (string, error) {
	l, err := e.d.linkOf(e.ep.Generation, e.ep.HostLink)
	if err != nil {
		return "", err
	}
	if l == nil {
		return "no link " + e.ep.HostLink, nil
	}
	key, v, at, err := e.want()
	if err != nil {
		return "", err
	}
	var have endpointValue
	var haveAt attachmentValue
	found, err := lookup(e.d.objects.Endpoints, key, &have)
	if err != nil {
		return "", err
	}
	foundAt, err := lookup(e.d.objects.Attachments, v.IfIndex, &haveAt)
	if err != nil {
		return "", err
	}
	switch {
	case !found:
		return "missing", nil
	case have != v:
		return fmt.Sprintf("is %+v, want %+v", have, v), nil
	case !foundAt:
		return fmt.Sprintf("link %s (%d) is not in map attachments", e.ep.HostLink, v.IfIndex), nil
	case haveAt != at:
		return fmt.Sprintf("link %d is %s's in map attachments", v.IfIndex, haveAt.Address), nil
	}
	return "", nil
}

// Remove forgets the endpoint unless the address has a new owner already.
func (e *entry) Remove(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return e.wrap(err)
	}
	key, err := addressOf(e.ep.Address)
	if err != nil {
		return e.wrap(err)
	}
	var have endpointValue
	found, err := lookup(e.d.objects.Endpoints, key, &have)
	switch {
	case err != nil:
		return e.wrap(err)
	case found && have.ID != Identity(e.ep.Generation):
		return nil
	case !found: // its maker died before it came to that, or its remover after
		have.IfIndex, err = e.d.indexOf(e.ep.HostLink, key)
		if err != nil {
			return e.wrap(err)
		}
	}
	return e.wrap(e.d.forget(key, have))
}

// indexOf returns the index under which the link is in map attachments, 0 where it
// is not. The link itself may be gone.
func (d *Datapath) indexOf(name string, key address) (uint32, error) {
	var index uint32
	var at attachmentValue
	it := d.objects.Attachments.Iterate()
	for it.Next(&index, &at) {
		if at.link() == name && at.Address == key {
			return index, nil
		}
	}
	if err := it.Err(); err != nil {
		return 0, fmt.Errorf("map attachments: %w", err)
	}
	return 0, nil
}

// forget removes what the maps hold for the address, whose entry is v, the
// endpoint itself last: until then another attempt finds the rest.
func (d *Datapath) forget(key address, v endpointValue) error {
	var at attachmentValue
	found, err := lookup(d.objects.Attachments, v.IfIndex, &at)
	if err == nil && found && at.Address == key {
		err = remove(d.objects.Attachments, v.IfIndex)
	}
	if err != nil {
		return fmt.Errorf("map attachments: %w", err)
	}
	if err := d.dropCounts(key); err != nil {
		return fmt.Errorf("map counts: %w", err)
	}
	if err := remove(d.objects.Endpoints, key); err != nil {
		return fmt.Errorf("map endpoints: %w", err)
	}
	return nil
}

// lookup reads one value and reports whether it is there.
func lookup(m *ebpf.Map, key, value any) (bool, error) {
	err := m.Lookup(key, value)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	return err == nil, err
}

// remove deletes one key; absent is success.
func remove(m *ebpf.Map, key any) error {
	if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}
