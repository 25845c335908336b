package engine

import (
	"context"
	"errors"
	"fmt"

	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Health says whether an ADD would be accepted now, and if not, why. It waits
// for no lock that is held across kernel work.
func (e *Engine) Health(context.Context) api.Health {
	counts, slots := e.store.Counts(), e.slots.Counts(e.now())
	h := api.Health{Version: e.cfg.Version, Causes: []api.HealthCause{}, Endpoints: map[string]int{"degraded": counts.Degraded}, FreeSlots: slots.Free()}
	for _, s := range []endpoint.State{endpoint.Allocating, endpoint.Ready, endpoint.Deleting} {
		h.Endpoints[string(s)] = counts.ByState[s]
	}
	cause := func(code string, mode endpoint.Mode, blocks, limits bool, message string) {
		h.Causes = append(h.Causes, api.HealthCause{Code: code, Message: message, Blocks: blocks, Mode: mode})
		h.LimitsExisting = h.LimitsExisting || limits
	}
	const all, children, pods = endpoint.Mode(""), endpoint.Multikernel, endpoint.Veth
	if code, mode, why := e.egressTrouble(); code != "" {
		cause(code, mode, true, counts.ByState[endpoint.Ready] > 0, why)
	}
	if slots.Free() == 0 {
		cause("pool-exhausted", children, true, false, fmt.Sprintf("all %d addresses of %s are in use", slots.Total, e.cfg.Pools.Child))
	}
	usable := 0
	for i, p := range e.addresses.pools {
		err := e.poolUsable(p)
		c := e.addresses.slots[i].Counts(e.now())
		switch {
		case err != nil:
			cause("pod-pool-overlap", pods, false, true, message(err))
		case c.Free() == 0:
			cause("pod-pool-exhausted", pods, false, false, fmt.Sprintf("all %d addresses of pool %s (%s) are in use", c.Total, p.Name, p.Prefix))
		default:
			usable++
		}
	}
	if len(e.addresses.pools) > 0 && usable == 0 {
		cause(api.CausePodPools, pods, false, false, "no pool has an address for an ordinary pod")
	}
	if err := e.datapathTrouble(); err != nil {
		cause("pod-path-degraded", pods, false, false, "pods are forwarded by the host stack, there is no eBPF data path (tried again by every audit): "+err.Error())
	}
	if err := e.store.Broken(); err != nil {
		cause("store-unwritable", all, true, false, err.Error())
	}
	if err := e.tooManyDeferred(); err != nil {
		cause("deferred-dels", all, true, false, message(err))
	}
	if err := e.flavourTrouble(); err != nil {
		cause("firewall-left", all, false, true, "iptables other than "+e.firewall.Flavour()+" may hold rules of mknet, which judge every packet too (tried again by every audit): "+err.Error())
	}
	if counts.Degraded > 0 {
		cause("degraded", all, false, true, fmt.Sprintf("%d endpoints are degraded (see `mknetd endpoints`)", counts.Degraded))
	}
	for _, why := range e.policyTrouble() {
		cause("policy-not-applied", all, false, true, why)
	}
	h.Ready = true
	for _, c := range h.Causes {
		h.Ready = h.Ready && !c.Blocks
	}
	return h
}

// egressTrouble looks at the egress as it is now: what the watcher has seen may be
// a moment old, and who asks wants to know whether an ADD would work. It returns
// a cause's code, mode and message, or nothing.
func (e *Engine) egressTrouble() (code string, mode endpoint.Mode, why string) {
	_, err := e.host.Egress(e.cfg.Egress)
	switch {
	case errors.Is(err, topo.ErrNoEgress):
		return "egress-missing", "", err.Error()
	case err != nil:
		return "egress-unknown", "", err.Error()
	}
	if _, _, err := e.currentEgress(endpoint.Multikernel); api.CodeOf(err) == api.FailedPrecondition {
		return "pool-overlap", endpoint.Multikernel, message(err)
	}
	return "", "", ""
}

// message is an API error's own words, without its code.
func message(err error) string {
	if e, ok := err.(*api.Error); ok { //nolint:errorlint // currentEgress returns it bare
		return e.Message
	}
	return err.Error()
}

// Config returns what is in force.
func (e *Engine) Config(context.Context) api.DaemonConfig {
	c := api.DaemonConfig{
		Version: e.cfg.Version, ChildPool: e.cfg.Pools.Child, TransitPool: e.cfg.Pools.Transit,
		MTUBytes: e.cfg.MTUBytes, Firewall: e.firewall.Flavour(), Resolver: e.cfg.Resolver,
		StateDir: e.cfg.StateDir, DeferredDelDir: e.cfg.DeferredDir,
	}
	c.Pools = []api.Pool{}
	for i, p := range e.addresses.pools {
		c.Pools = append(c.Pools, api.Pool{Name: p.Name, Prefix: p.Prefix, Gateway: p.Gateway, Namespaces: p.Namespaces, Free: e.addresses.slots[i].Counts(e.now()).Free()})
	}
	egress := e.readEgress()
	c.Egress, c.EgressAddr = egress.Name, egress.Addr
	if _, mtu, err := e.currentEgress(endpoint.Veth); err == nil {
		c.MTUBytes = mtu
	}
	return c
}
