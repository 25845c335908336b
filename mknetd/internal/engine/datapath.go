package engine

import (
	"sync"

	"mknet/mknetd/internal/datapath"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// ebpf is the data path of ordinary pods. It is opened for the first of them, so
// that a node with children only loads no program; without it pods are forwarded
// by the kernel's own routing.
type ebpf struct {
	once sync.Once
	dp   *datapath.Datapath
	err  error // why there is none
}

// datapath returns the data path, nil where the kernel has none.
func (e *Engine) datapath() *datapath.Datapath {
	e.ebpf.once.Do(func() {
		if e.cfg.OpenDatapath == nil {
			return
		}
		if e.ebpf.dp, e.ebpf.err = e.cfg.OpenDatapath(); e.ebpf.err != nil {
			e.log.Warn("no eBPF data path: pods are forwarded by the host stack", "err", e.ebpf.err)
		}
	})
	return e.ebpf.dp
}

// programs are the objects of the data path of one endpoint.
func (e *Engine) programs(ep endpoint.Endpoint) []object {
	if ep.Mode != endpoint.Veth {
		return nil
	}
	dp := e.datapath()
	if dp == nil {
		return nil
	}
	var list []object
	for _, o := range dp.Objects(ep) {
		list = append(list, o)
	}
	return list
}

// servesPods reports whether the node has, or is to have, ordinary pods.
func (e *Engine) servesPods(records []endpoint.Endpoint) bool {
	for _, ep := range records {
		if ep.Mode == endpoint.Veth {
			return true
		}
	}
	return len(e.cfg.PodPools) > 0
}

// knownLinks are the host links that records have.
func knownLinks(records []endpoint.Endpoint) func(string) bool {
	known := map[string]bool{}
	for _, ep := range records {
		known[ep.HostLink] = true
	}
	return func(link string) bool { return known[link] }
}

// programOrphans lists what of the data path belongs to no record.
func (e *Engine) programOrphans(records []endpoint.Endpoint) ([]api.InventoryItem, error) {
	if !e.servesPods(records) || e.datapath() == nil {
		return nil, nil
	}
	faults, err := e.datapath().Orphans(knownLinks(records))
	var items []api.InventoryItem
	for _, f := range faults {
		items = append(items, api.InventoryItem{Kind: f.Kind, Object: f.Object, Where: f.Where, Status: api.Orphan, Problem: f.Problem, Inspect: f.Inspect})
	}
	return items, err
}
