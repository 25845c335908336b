package engine

import (
	"context"
	"fmt"
	"strings"

	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/metrics"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Inventory lists every kernel object of ours beside its record.
func (e *Engine) Inventory(ctx context.Context) (api.Inventory, error) {
	inv := api.Inventory{Items: []api.InventoryItem{}}
	all, err := e.store.List()
	if err != nil {
		return inv, err
	}
	rules, err := e.firewall.Read(ctx)
	if err != nil {
		return inv, fmt.Errorf("read the rules: %w", err)
	}
	shared := rules.Shared()
	e.tally.found(metrics.ByInventory, shared)
	inv.Items = append(inv.Items, sharedItems(shared)...)
	faults := firewallView(rules.Endpoints(all))
	known := map[endpoint.Generation]bool{}
	for _, ep := range all {
		known[ep.Generation] = true
		items, err := e.inventoryOf(ctx, ep, faults)
		if err != nil {
			return inv, err
		}
		inv.Items = append(inv.Items, items...)
	}
	orphans, err := e.orphans(ctx, known, rules)
	if err != nil {
		return inv, err
	}
	programs, err := e.programOrphans(all)
	inv.Items = append(append(inv.Items, orphans...), programs...)
	return inv, err
}

// sharedItems is one line for the shared chains when they stand, else one a fault.
func sharedItems(faults []endpoint.Fault) []api.InventoryItem {
	if len(faults) == 0 {
		return []api.InventoryItem{{Kind: "iptables", Object: "shared chains", Where: endpoint.InHost, Status: api.Shared, Inspect: "iptables-save | grep MKNET"}}
	}
	var items []api.InventoryItem
	for _, f := range faults {
		items = append(items, faulty(f, endpoint.Generation{}))
	}
	return items
}

func faulty(f endpoint.Fault, gen endpoint.Generation) api.InventoryItem {
	status := api.Altered
	if strings.HasPrefix(f.Problem, "missing") {
		status = api.Missing
	}
	return api.InventoryItem{Kind: f.Kind, Object: f.Object, Where: f.Where, Generation: gen, Status: status, Problem: f.Problem, Inspect: f.Inspect}
}

// inventoryOf lists the objects of one record: those that stand, and one line
// for each fault. It waits for no call that works on the endpoint, so that it
// also shows what is half done.
func (e *Engine) inventoryOf(ctx context.Context, ep endpoint.Endpoint, rules firewallView) ([]api.InventoryItem, error) {
	ns, err := e.reopen(ctx, ep)
	if err != nil {
		return nil, err
	}
	var items []api.InventoryItem
	if ns == nil {
		items = append(items, faulty(namespaceGone(ep), ep.Generation))
	} else {
		defer ns.Close()
	}
	for _, o := range e.table(ep, ns) {
		faults, err := rules.check(ctx, ep, o)
		if err != nil {
			return items, err
		}
		e.tally.found(metrics.ByInventory, faults)
		for _, f := range faults {
			items = append(items, faulty(f, ep.Generation))
		}
		if len(faults) == 0 {
			items = append(items, api.InventoryItem{Kind: o.Kind(), Object: o.Name(), Where: o.Where(), Generation: ep.Generation, Status: api.Recorded})
		}
	}
	return items, nil
}

func (e *Engine) recorded(gen endpoint.Generation) bool {
	_, err := e.store.Get(gen)
	return err == nil
}

// orphans lists what carries our mark and belongs to no record.
func (e *Engine) orphans(ctx context.Context, known map[endpoint.Generation]bool, rules *ipt.Reading) ([]api.InventoryItem, error) {
	var items []api.InventoryItem
	add := func(kind, object string, gen endpoint.Generation) {
		if !known[gen] && !e.recorded(gen) { // an ADD may have begun meanwhile
			items = append(items, api.InventoryItem{
				Kind: kind, Object: object, Where: endpoint.InHost, Generation: gen,
				Status: api.Orphan, Problem: "no record has it; mknetd removes it when it starts",
			})
		}
	}
	for _, o := range rules.Owned() {
		if o.Generation.IsZero() {
			continue // an empty chain that has our form of name and not our mark
		}
		add("iptables", o.Table+" "+o.Object, o.Generation)
	}
	objects, err := e.host.Owned(ctx)
	if err != nil {
		return nil, err
	}
	for _, o := range objects {
		add(o.Kind, o.Name, o.Generation)
	}
	return items, nil
}
