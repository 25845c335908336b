package engine

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"mknet/mknetd/internal/alloc"
	"mknet/mknetd/internal/store"
	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// addresses are those of ordinary pods: the pools that mknetd gives from, and who
// has which address, whoever gave it.
type addresses struct {
	pools  []endpoint.Pool
	slots  []*alloc.Allocator // of each pool
	leases leases

	mu   sync.Mutex
	held map[netip.Addr]endpoint.Generation
	// subnets of delegated plugins that were found to overlap nothing of ours or of
	// the host; cleared when the host's routes change.
	admitted map[netip.Prefix]bool
}

// loadAddresses makes the pools from what the store has.
func loadAddresses(st *store.Store, cfg Config) (*addresses, error) {
	a := &addresses{pools: cfg.PodPools, held: map[netip.Addr]endpoint.Generation{}, admitted: map[netip.Prefix]bool{}}
	live := make([][]uint32, len(a.pools))
	freed := make([][]alloc.Freed, len(a.pools))
	all, err := st.List()
	if err != nil {
		return nil, err
	}
	for _, ep := range all {
		if ep.Mode != endpoint.Veth {
			continue
		}
		if other, twice := a.held[ep.Address]; twice {
			return nil, fmt.Errorf("endpoints %s and %s both have address %s", other, ep.Generation, ep.Address)
		}
		a.held[ep.Address] = ep.Generation
		if i, slot, ok := a.slotOf(ep.Address); ok {
			live[i] = append(live[i], slot)
		}
	}
	queue, err := st.FreedAddresses()
	if err != nil {
		return nil, err
	}
	for _, f := range queue {
		i, slot, ok := a.slotOf(f.Address)
		if _, used := a.held[f.Address]; ok && !used {
			freed[i] = append(freed[i], alloc.Freed{Slot: slot, BootID: f.BootID, At: f.At})
		}
	}
	for i, p := range a.pools {
		slots, err := alloc.New(p.Slots(), cfg.Quarantine, live[i], freed[i])
		if err != nil {
			return nil, fmt.Errorf("pool %s: %w", p.Name, err)
		}
		a.slots = append(a.slots, slots)
	}
	return a, nil
}

// slotOf finds an address in the pools; ok is false for one that none gives out.
func (a *addresses) slotOf(addr netip.Addr) (pool int, slot uint32, ok bool) {
	for i, p := range a.pools {
		if slot, err := p.SlotOf(addr); err == nil {
			return i, slot, true
		}
	}
	return 0, 0, false
}

// hold notes who has an address; a second holder is refused by name.
func (a *addresses) hold(addr netip.Addr, gen endpoint.Generation) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if other, taken := a.held[addr]; taken && other != gen {
		return api.Errorf(api.AlreadyExists, "address %s: endpoint %s has it", addr, other)
	}
	a.held[addr] = gen
	return nil
}

// anyIn reports whether a pod has an address of the subnet.
func (a *addresses) anyIn(subnet netip.Prefix) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for addr := range a.held {
		if subnet.Contains(addr) {
			return true
		}
	}
	return false
}

// release forgets the holder, and gives an address of a pool back: cancelled is
// for one whose record was never written.
func (a *addresses) release(addr netip.Addr, now alloc.Instant, cancelled bool) error {
	a.mu.Lock()
	delete(a.held, addr)
	a.mu.Unlock()
	i, slot, ok := a.slotOf(addr)
	switch {
	case !ok:
		return nil
	case cancelled:
		return a.slots[i].Cancel(slot, now)
	}
	return a.slots[i].Free(slot, now)
}

// take gives out an address of a pool: the wanted one, or the next.
func (a *addresses) take(i int, want netip.Addr, now alloc.Instant) (netip.Addr, error) {
	p := a.pools[i]
	if !want.IsValid() {
		grant, err := a.slots[i].Allocate(now)
		var full *alloc.ExhaustedError
		if errors.As(err, &full) {
			return want, api.Retryablef(api.ResourceExhausted, "pool %s is exhausted: all %d addresses of %s are in use (delete pods or configure a larger pool)", p.Name, full.Counts.Total, p.Prefix)
		}
		if err != nil {
			return want, err
		}
		return p.At(grant.Slot), nil
	}
	slot, err := p.SlotOf(want)
	if err != nil {
		return want, api.Errorf(api.InvalidArgument, "requested %v", err)
	}
	_, err = a.slots[i].Claim(slot, now)
	var taken *alloc.SlotError
	if errors.As(err, &taken) {
		return want, api.Errorf(api.AlreadyExists, "requested address %s: is in use", want)
	}
	return want, err
}

// validatePodRequest checks what only an ordinary pod may ask for.
func validatePodRequest(req *api.CreateRequest) error {
	if req.Mode != endpoint.Veth {
		if !req.MAC.IsZero() || req.IPMasq || req.Pool != "" || req.Lease != "" || req.IPAM != nil {
			return api.Errorf(api.InvalidArgument, "mac, ipMasq, pool, lease and ipam are for mode %q", endpoint.Veth)
		}
		return nil
	}
	if req.MAC[0]&1 != 0 {
		return api.Errorf(api.InvalidArgument, "mac %s: is a group address, an interface has its own", req.MAC)
	}
	given := 0
	for _, is := range []bool{req.Pool != "", req.Lease != "", req.IPAM != nil} {
		if is {
			given++
		}
	}
	if given > 1 {
		return api.Errorf(api.InvalidArgument, "pool, lease and ipam say where the address comes from: give one of them")
	}
	if req.IPAM != nil {
		return validateIPAM(req.IPAM)
	}
	return nil
}

// maxRoutes bounds what a delegated plugin may ask for.
const maxRoutes = 64

func validateIPAM(r *api.IPAMResult) error {
	if err := endpoint.ValidateIdentifier("ipam type", r.Type); err != nil {
		return api.Errorf(api.InvalidArgument, "%v", err)
	}
	bad := func(format string, args ...any) error {
		return api.Errorf(api.InvalidArgument, "ipam %s: "+format, append([]any{r.Type}, args...)...)
	}
	switch {
	case !r.Address.IsValid() || !r.Address.Addr().Is4():
		return bad("address %q: must be IPv4 with a prefix length", r.Address)
	case !r.Address.Addr().IsGlobalUnicast():
		return bad("address %s: is not one that a host may have", r.Address)
	case r.Address.Bits() < 8:
		return bad("address %s: is in a subnet larger than a /8", r.Address)
	case len(r.Routes) > maxRoutes:
		return bad("has %d routes, at most %d are allowed", len(r.Routes), maxRoutes)
	}
	if !r.Gateway.IsValid() {
		if r.Address.Bits() > endpoint.MaxPoolBits {
			return bad("gives no gateway, and address %s does not tell it", r.Address)
		}
		r.Gateway = endpoint.FirstAddress(r.Address)
	}
	if err := endpoint.ValidateGateway(r.Address, r.Gateway); err != nil {
		return bad("%v", err)
	}
	if r.Gateway == r.Address.Addr() {
		return bad("address %s is also the gateway", r.Gateway)
	}
	for _, route := range r.Routes {
		if !route.IsValid() || !route.Addr().Is4() {
			return bad("route %q: must be IPv4", route)
		}
	}
	return nil
}

// podDesign decides what of a pod does not depend on its address.
func (e *Engine) podDesign(ep endpoint.Endpoint, req api.CreateRequest, site topo.Site) (endpoint.Endpoint, error) {
	ep.HostLink, ep.PeerLink = endpoint.PodHostLink(ep.ContainerID, ep.IfName), ep.IfName
	ep.RouteTable = 0
	ep.MAC, ep.IPMasq = req.MAC, req.IPMasq
	if r := req.IPAM; r != nil {
		// A plugin that gives routes, and no default among them, wants none.
		ep.MainDefault = site.MainDefault && (len(r.Routes) == 0 || slices.ContainsFunc(r.Routes, func(p netip.Prefix) bool { return p.Bits() == 0 }))
		ep.Routes = r.Routes
	}
	err := e.host.LinkTaken(ep)
	if errors.Is(err, topo.ErrForeign) {
		return ep, api.Errorf(api.AlreadyExists, "host link %s of container %s and interface %s: %v", ep.HostLink, ep.ContainerID, ep.IfName, err)
	}
	return ep, err
}

// beginPod finds the pod's address and records the endpoint as ALLOCATING.
func (e *Engine) beginPod(ctx context.Context, ep endpoint.Endpoint, req api.CreateRequest) (endpoint.Endpoint, error) {
	ep, undo, err := e.podAddress(ctx, ep, req)
	if err != nil {
		return ep, err
	}
	fail := func(err error) (endpoint.Endpoint, error) { return ep, errors.Join(err, undo()) }
	if err := e.addresses.hold(ep.Address, ep.Generation); err != nil {
		return fail(err)
	}
	forget := func(err error) (endpoint.Endpoint, error) {
		e.addresses.mu.Lock()
		delete(e.addresses.held, ep.Address)
		e.addresses.mu.Unlock()
		e.leaveSubnet(context.WithoutCancel(ctx), ep)
		return fail(err)
	}
	if err := e.host.Conflict(ep); err != nil {
		return forget(conflictError(err))
	}
	if err := e.serveSubnet(ctx, ep); err != nil {
		return forget(fmt.Errorf("shared firewall chains of pods: %w", err))
	}
	ep.CreatedSinceBoot = e.now().At
	recorded, err := e.store.Begin(ep)
	if err != nil {
		return forget(storeError(err))
	}
	if req.Lease != "" {
		e.settleLease(req.Lease)
	}
	return recorded, nil
}

// podAddress fills in the address, from a pool, a lease or a delegated plugin.
// undo gives back what was taken.
func (e *Engine) podAddress(ctx context.Context, ep endpoint.Endpoint, req api.CreateRequest) (_ endpoint.Endpoint, undo func() error, err error) {
	nothing := func() error { return nil }
	if r := req.IPAM; r != nil {
		ep.IPAM, ep.Subnet, ep.Address, ep.Gateway = r.Type, r.Address.Masked(), r.Address.Addr(), r.Gateway
		if req.Address.IsValid() && req.Address != ep.Address {
			return ep, nil, api.Errorf(api.FailedPrecondition, "requested address %s: ipam %s gave %s", req.Address, r.Type, ep.Address)
		}
		return ep, nothing, e.admit(ctx, ep)
	}
	if req.Lease != "" {
		l, err := e.addresses.leases.claim(req.Lease, ep.Pod)
		if err != nil {
			return ep, nil, err
		}
		p := e.addresses.pools[l.pool]
		ep.Pool, ep.Subnet, ep.Address, ep.Gateway = p.Name, p.Prefix, l.Address, p.Gateway
		return ep, func() error { e.addresses.leases.unclaim(req.Lease); return nil }, nil
	}
	i, err := endpoint.PoolFor(e.addresses.pools, req.Pool, ep.Pod.Namespace)
	if err != nil {
		return ep, nil, api.Errorf(api.FailedPrecondition, "%v", err)
	}
	p := e.addresses.pools[i]
	if err := e.poolUsable(p); err != nil {
		return ep, nil, err
	}
	addr, err := e.addresses.take(i, req.Address, e.now())
	if err != nil {
		return ep, nil, err
	}
	ep.Pool, ep.Subnet, ep.Address, ep.Gateway = p.Name, p.Prefix, addr, p.Gateway
	return ep, func() error { return e.addresses.release(addr, e.now(), true) }, nil
}

// poolUsable refuses a pool that a foreign route or address overlaps now.
func (e *Engine) poolUsable(p endpoint.Pool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if found := e.podOverlaps[p.Name]; len(found) > 0 {
		return api.Errorf(api.FailedPrecondition, "%s: remove it or configure another pool", found[0])
	}
	return nil
}

// admit refuses a delegated subnet that overlaps a pool of ours or something
// foreign. Each subnet is looked at once: it reads all routes of the host.
func (e *Engine) admit(_ context.Context, ep endpoint.Endpoint) error {
	e.addresses.mu.Lock()
	known := e.addresses.admitted[ep.Subnet]
	e.addresses.mu.Unlock()
	if known {
		return nil
	}
	for _, r := range e.ranges() {
		if r.Prefix.Overlaps(ep.Subnet) || r.Prefix.Contains(ep.Gateway) {
			return api.Errorf(api.FailedPrecondition, "subnet %s with gateway %s of ipam %s: overlaps %s %s of mknetd (give the plugin another subnet)",
				ep.Subnet, ep.Gateway, ep.IPAM, r.Name, r.Prefix)
		}
	}
	found, err := e.host.Overlaps([]topo.Range{{Name: "subnet of ipam " + ep.IPAM, Prefix: ep.Subnet}})
	if err != nil {
		return fmt.Errorf("look for overlapping routes: %w", err)
	}
	if len(found) > 0 {
		return api.Errorf(api.FailedPrecondition, "%s: remove it or give the plugin another subnet", found[0])
	}
	e.addresses.mu.Lock()
	defer e.addresses.mu.Unlock()
	e.addresses.admitted[ep.Subnet] = true
	return nil
}

// ranges are all that mknetd gives addresses from.
func (e *Engine) ranges() []topo.Range {
	all := []topo.Range{{Name: "child pool", Prefix: e.cfg.Pools.Child}, {Name: "transit pool", Prefix: e.cfg.Pools.Transit}}
	for _, p := range e.cfg.PodPools {
		all = append(all, topo.Range{Name: "pool " + p.Name, Prefix: p.Prefix})
	}
	return all
}

// notAPod refuses what only a child kernel's endpoint can do.
func notAPod(ep endpoint.Endpoint, verb string) error {
	return api.Errorf(api.Unsupported, "endpoint %s: is an ordinary pod (mode %s), it has no TUN to %s", ep.Generation, ep.Mode, verb)
}

// knowPods tells the firewall the subnets of the pods that there are, and opens the
// data path where there are or will be pods, policies, or programs of before.
func (e *Engine) knowPods() error {
	all, err := e.store.List()
	if err != nil {
		return err
	}
	pods := e.servesPods(all)
	if pods || e.cfg.DatapathPinned || len(e.rules.Entries()) > 0 {
		e.ebpf.children.Store(true)
		e.datapath()
	}
	if !pods {
		return nil
	}
	e.firewall.KnowPods()
	for _, p := range e.cfg.PodPools {
		e.firewall.KnowPods(p.Prefix)
	}
	for _, ep := range all {
		if ep.Mode == endpoint.Veth && ep.IPMasq {
			e.firewall.KnowPods(ep.Subnet)
		}
	}
	return nil
}

// serveSubnet makes sure that the shared firewall rules cover the pod, whose address
// is held already: leaveSubnet then finds it.
func (e *Engine) serveSubnet(ctx context.Context, ep endpoint.Endpoint) error {
	var subnet netip.Prefix
	if ep.IPMasq {
		subnet = ep.Subnet
	}
	unlock, err := e.subnets.lock(ctx, subnet)
	if err != nil {
		return busy("subnet "+subnet.String(), err)
	}
	defer unlock()
	return e.firewall.ServePods(ctx, subnet)
}

// leaveSubnet removes the rules of a delegated subnet with its last pod: the subnet
// may be somebody else's next. Those of mknetd's own pools stay. A failure is only
// logged, the next start does not make them again.
func (e *Engine) leaveSubnet(ctx context.Context, ep endpoint.Endpoint) {
	if ep.IPAM == "" {
		return
	}
	unlock, err := e.subnets.lock(ctx, ep.Subnet)
	if err == nil {
		defer unlock()
		if e.addresses.anyIn(ep.Subnet) {
			return
		}
		err = e.firewall.ForgetPods(ctx, ep.Subnet)
	}
	if err != nil {
		e.log.Warn("remove the rules of a subnet without pods", "subnet", ep.Subnet.String(), "err", err)
	}
}
