package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"mknet/mknetd/internal/alloc"
	"mknet/mknetd/internal/store"
	"mknet/spec/api"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var (
	leaseRecorded = crash.New("engine.lease-recorded")
	leaseRemoved  = crash.New("engine.lease-removed")
)

// Bounds of a lease's time.
const (
	DefaultLease = time.Minute
	maxLease     = 10 * time.Minute
	// maxLeases bounds how many may be open at once.
	maxLeases = 4096
	// leaseEvery is how often expired ones are looked for.
	leaseEvery = time.Second
)

// lease is an address that is set aside until an endpoint claims it.
type lease struct {
	ID      string        `json:"id"`
	Pool    string        `json:"pool"`
	Address netip.Addr    `json:"address"`
	Owner   string        `json:"owner,omitempty"` // "namespace/name"
	BootID  string        `json:"bootID"`
	Expires time.Duration `json:"expires"` // CLOCK_BOOTTIME

	pool    int
	claimed bool // an ADD is about to take it, or it is being ended
}

// leases are the open ones, by ID. Each is a document of the store, which is written
// without the lock: an fsync is long.
type leases struct {
	mu     sync.Mutex
	open   map[string]*lease
	making int // being written
}

// reserve takes a place for one more; made gives it back.
func (l *leases) reserve() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.open)+l.making >= maxLeases {
		return api.Retryablef(api.ResourceExhausted, "%d leases are open", maxLeases)
	}
	l.making++
	return nil
}

// made gives a reserved place back, to the lease where there is one.
func (l *leases) made(open *lease) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.making--
	if open != nil {
		l.open[open.ID] = open
	}
}

func (e *Engine) leaseDocuments() (*store.Documents, error) { return e.store.Documents("leases") }

// loadLeases reads the leases of an earlier run. One whose address an endpoint has was
// claimed when the daemon ended; one of another boot has expired. Of two with one
// address the first was claimed, and only its document stayed.
func (e *Engine) loadLeases() error {
	docs, err := e.leaseDocuments()
	if err != nil {
		return err
	}
	a := e.addresses
	a.leases.open = map[string]*lease{}
	latest := map[netip.Addr]*lease{}
	var stale []string
	err = docs.Each(func(name string, content []byte) error {
		var l lease
		if err := json.Unmarshal(content, &l); err != nil {
			return fmt.Errorf("lease %s: %w", name, err)
		}
		i, _, ok := a.slotOf(l.Address)
		_, used := a.held[l.Address]
		if !ok || used || l.BootID != e.bootID {
			stale = append(stale, name)
			return nil
		}
		l.pool = i
		switch other := latest[l.Address]; {
		case other == nil:
			latest[l.Address] = &l
		case other.Expires < l.Expires:
			latest[l.Address] = &l
			stale = append(stale, other.ID)
		default:
			stale = append(stale, l.ID)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, l := range latest {
		if _, err := a.take(l.pool, l.Address, e.now()); err != nil {
			return fmt.Errorf("lease %s: %w", l.ID, err)
		}
		a.leases.open[l.ID] = l
	}
	for _, name := range stale {
		err = errors.Join(err, docs.Delete(name))
	}
	return err
}

// Allocate sets an address of a pod pool aside (POST /v1/ipam/allocate).
func (e *Engine) Allocate(_ context.Context, req api.LeaseRequest, peer endpoint.Process) (api.Lease, error) {
	ttl := DefaultLease
	if req.TTLSeconds != 0 {
		ttl = time.Duration(req.TTLSeconds) * time.Second
	}
	if ttl <= 0 || ttl > maxLease {
		return api.Lease{}, api.Errorf(api.InvalidArgument, "ttlSeconds %d: must be 1 to %d", req.TTLSeconds, int(maxLease/time.Second))
	}
	a := e.addresses
	i, err := endpoint.PoolFor(a.pools, req.Pool, req.Pod.Namespace)
	if err != nil {
		return api.Lease{}, api.Errorf(api.FailedPrecondition, "%v", err)
	}
	if err := e.poolUsable(a.pools[i]); err != nil {
		return api.Lease{}, err
	}
	docs, err := e.leaseDocuments()
	if err != nil {
		return api.Lease{}, err
	}
	if err := a.leases.reserve(); err != nil {
		return api.Lease{}, err
	}
	var made *lease
	defer func() { a.leases.made(made) }()
	addr, err := a.take(i, req.Address, e.now())
	if err != nil {
		return api.Lease{}, err
	}
	l := &lease{ID: newNonce(), Pool: a.pools[i].Name, Address: addr, Owner: owner(req.Pod), BootID: e.bootID, Expires: e.now().At + ttl, pool: i}
	doc, err := json.Marshal(l)
	if err == nil {
		err = docs.Put(l.ID, doc)
	}
	if err != nil {
		return api.Lease{}, errors.Join(storeError(err), a.slots[i].Cancel(mustSlot(a.pools[i], addr), e.now()))
	}
	leaseRecorded.Here()
	made = l
	e.log.Info("lease", "event", "leased", "lease", l.ID, "address", addr.String(), "owner", l.Owner, "peerPid", peer.PID)
	p := a.pools[i]
	return api.Lease{ID: l.ID, Pool: p.Name, Address: addr, Subnet: p.Prefix, Gateway: p.Gateway, Owner: l.Owner, ExpiresAt: time.Now().Add(ttl).UTC()}, nil
}

func mustSlot(p endpoint.Pool, addr netip.Addr) uint32 {
	slot, _ := p.SlotOf(addr) // it came from there
	return slot
}

// owner is "namespace/name", empty for no pod.
func owner(p endpoint.Pod) string {
	if p.Namespace == "" && p.Name == "" {
		return ""
	}
	return p.Namespace + "/" + p.Name
}

// ReleaseLease ends a lease before its time; absent is success.
func (e *Engine) ReleaseLease(_ context.Context, id string, _ endpoint.Process) error {
	open, err := e.addresses.leases.ending(id)
	if err != nil || open == nil {
		return err
	}
	return e.endLease(open, e.now())
}

// ending is the open lease, which nobody can claim from now on; nil where there is
// none.
func (l *leases) ending(id string) (*lease, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	open := l.open[id]
	switch {
	case open == nil:
		return nil, nil
	case open.claimed:
		return nil, api.Retryablef(api.FailedPrecondition, "lease %s: an ADD is claiming it, or it is being ended", id)
	}
	open.claimed = true
	return open, nil
}

// endLease gives the address of a lease back that is ending. The document goes
// first: a daemon that dies in between has an address that nobody has.
func (e *Engine) endLease(l *lease, now alloc.Instant) error {
	docs, err := e.leaseDocuments()
	if err == nil {
		err = docs.Delete(l.ID)
	}
	if err != nil {
		e.addresses.leases.unclaim(l.ID)
		return storeError(err)
	}
	leaseRemoved.Here()
	e.addresses.leases.forget(l.ID)
	return e.addresses.slots[l.pool].Free(mustSlot(e.addresses.pools[l.pool], l.Address), now)
}

func (l *leases) forget(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, id)
}

// claim takes a lease for an ADD of its owner.
func (l *leases) claim(id string, pod endpoint.Pod) (lease, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	open := l.open[id]
	switch {
	case open == nil:
		return lease{}, api.Errorf(api.NotFound, "lease %.64q: is not open (it expired, was released, or was claimed)", id)
	case open.claimed:
		return lease{}, api.Errorf(api.AlreadyExists, "lease %s: another ADD is claiming it, or it is being ended", id)
	case open.Owner != "" && open.Owner != owner(pod):
		return lease{}, api.Errorf(api.StaleIdentity, "lease %s: belongs to %s, not to %q", id, open.Owner, owner(pod))
	}
	open.claimed = true
	return *open, nil
}

// unclaim is for an ADD that failed before its record was written.
func (l *leases) unclaim(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if open := l.open[id]; open != nil {
		open.claimed = false
	}
}

// settleLease forgets a lease whose address the record of an endpoint has now.
func (e *Engine) settleLease(id string) {
	e.addresses.leases.forget(id)
	docs, err := e.leaseDocuments()
	if err == nil {
		err = docs.Delete(id)
	}
	if err != nil { // the next start finds that its address has an endpoint
		e.log.Warn("forget a lease", "lease", id, "err", err)
	}
}

// expireLeases ends leases whose time is over, for as long as the engine lives.
func (e *Engine) expireLeases() {
	tick := time.NewTicker(leaseEvery)
	defer tick.Stop()
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-tick.C:
			e.expireOnce()
		}
	}
}

func (e *Engine) expireOnce() {
	now := e.now()
	for _, open := range e.addresses.leases.expired(now.At) {
		if err := e.endLease(open, now); err != nil {
			e.log.Warn("end an expired lease", "lease", open.ID, "err", err)
			continue
		}
		e.log.Info("lease", "event", "expired", "lease", open.ID, "address", open.Address.String(), "owner", open.Owner)
	}
}

// expired are the leases whose time is over; nobody can claim them from now on.
func (l *leases) expired(now time.Duration) (list []*lease) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, open := range l.open {
		if !open.claimed && now >= open.Expires {
			open.claimed = true
			list = append(list, open)
		}
	}
	return list
}
