package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"mknet/mknetd/internal/alloc"
	"mknet/mknetd/internal/conntrack"
	"mknet/mknetd/internal/datapath"
	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/policydir"
	"mknet/mknetd/internal/rulebook"
	"mknet/mknetd/internal/store"
	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var reconciled = crash.New("engine.reconciled")

// Time budgets. AddBudget is mk-cni's for a whole ADD; create and rollback must
// fit into it together.
const (
	createBudget   = 8 * time.Second // together below mk-cni's wait for an ADD, 13 s
	rollbackBudget = 4 * time.Second
	deleteBudget   = 15 * time.Second
	// ShimGrace is how long a DEL that met a live shim waits before the shim is
	// fenced (spec/life-cycle.md).
	ShimGrace = 30 * time.Second
	// retryEvery is how often deletions that did not finish are tried again.
	retryEvery = 15 * time.Second
)

// Config is what the engine is told; config.Config has where it comes from.
type Config struct {
	Version    string
	Pools      endpoint.Pools
	PodPools   []endpoint.Pool // of ordinary pods, checked with endpoint.CheckPools
	Egress     string          // pinned by name; empty: that of the default route, followed
	MTUBytes   int             // 0: the egress's
	Resolver   endpoint.DNS
	HostAccess endpoint.Access // default for requests that name none
	PodAccess  endpoint.Access
	Quarantine time.Duration
	ShimGrace  time.Duration // 0: ShimGrace
	// AuditEvery is how often kernel and records are compared without any cause:
	// much of what can drift (legacy iptables, sysctls) reports nothing. 0: never,
	// not even when there is a cause.
	AuditEvery time.Duration
	// OpenDatapath opens the eBPF data path of ordinary pods; nil: none.
	OpenDatapath func() (*datapath.Datapath, error)
	// PurgeDatapath removes one that is not open and reports whether there was any;
	// nil: none.
	PurgeDatapath func() (bool, error)
	// DatapathPinned says that an earlier process has left its data path.
	DatapathPinned bool
	// NodeProbes lets what the node itself sends pass the policy of endpoints.
	NodeProbes  bool
	Socket      string // where the daemon listens; deferred DELs name it
	StateDir    string
	DeferredDir string // deferred DELs, see spec/delqueue
	PolicyDir   string // watched for policy documents; empty: none
	// OpenFirewall opens a flavour of iptables other than the one in use, to remove
	// what was built with it.
	OpenFirewall func(ctx context.Context, flavour string) (*ipt.Firewall, error)
}

// Engine is mknetd's core. Make one with New, then Start it once.
type Engine struct {
	cfg      Config
	log      *slog.Logger
	host     *topo.Host
	firewall *ipt.Firewall
	store    *store.Store
	slots    *alloc.Allocator
	rules    *rulebook.Book
	policyMu sync.Mutex // over a change of the rules until the kernel has it
	// addresses are those of ordinary pods.
	addresses *addresses
	ebpf      ebpf
	traces    atomic.Int32 // that run
	bootID    string

	attachments keyedLocks[endpoint.Attachment]
	endpoints   keyedLocks[endpoint.Generation]
	namespaces  keyedLocks[uint64] // by cookie
	subnets     keyedLocks[netip.Prefix]

	mu       sync.Mutex
	egress   topo.Egress // Name is empty when there is none now
	overlaps []string    // foreign routes that overlap the children's pools
	// podOverlaps are those that overlap a pod pool, by its name.
	podOverlaps map[string][]string
	nonces      map[endpoint.Generation]string
	shims       map[endpoint.Generation]*shimWatch
	graces      map[endpoint.Generation]*time.Timer
	flushes     map[endpoint.Generation]bool // owed: see oweFlush
	closed      bool

	flavourLeft  error    // see flavourTrouble
	folderFaults []string // of the folder with policies, one line each

	figures figures
	tally   tally
	events  eventLog

	auditNow  chan struct{} // asks for an audit before its time
	egressNow chan struct{} // asks for a look at the egress
	waiting   atomic.Int64  // deferred DELs, as last counted

	work   sync.WaitGroup // everything that goes on beside the calls
	ctx    context.Context
	cancel context.CancelFunc
}

// New makes an engine on an open store. The caller closes the engine before it
// closes host and store.
func New(cfg Config, log *slog.Logger, host *topo.Host, firewall *ipt.Firewall, st *store.Store) (*Engine, error) {
	bootID, err := netns.BootID()
	if err != nil {
		return nil, err
	}
	if cfg.ShimGrace == 0 {
		cfg.ShimGrace = ShimGrace
	}
	e := &Engine{
		cfg: cfg, log: log, host: host, firewall: firewall, store: st, bootID: bootID,
		nonces: map[endpoint.Generation]string{},
		shims:  map[endpoint.Generation]*shimWatch{},
		graces: map[endpoint.Generation]*time.Timer{},

		flushes:   map[endpoint.Generation]bool{},
		auditNow:  make(chan struct{}, 1),
		egressNow: make(chan struct{}, 1),
		events:    newEventLog(),
	}
	firewall.OnShared = func(table string) {
		e.announce(slog.LevelInfo, "shared-rules", slog.String("table", table))
	}
	if e.slots, err = loadSlots(st, cfg); err != nil {
		return nil, err
	}
	if e.rules, err = openRulebook(st, cfg); err != nil {
		return nil, err
	}
	if e.addresses, err = loadAddresses(st, cfg); err != nil {
		return nil, err
	}
	if err := e.loadLeases(); err != nil {
		return nil, err
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	return e, nil
}

// loadSlots makes the allocator from what the store has.
func loadSlots(st *store.Store, cfg Config) (*alloc.Allocator, error) {
	live, queue, err := st.Slots()
	if err != nil {
		return nil, err
	}
	freed := make([]alloc.Freed, len(queue))
	for i, f := range queue {
		freed[i] = alloc.Freed(f)
	}
	return alloc.New(cfg.Pools.Slots(), cfg.Quarantine, live, freed)
}

// Start brings the kernel and the records into agreement and begins to watch
// both. It returns once new calls may be served; an error means that the daemon
// must not serve.
func (e *Engine) Start(ctx context.Context) error {
	e.announce(slog.LevelDebug, "started", slog.String("version", e.cfg.Version))
	if err := e.refreshEgress(); err != nil {
		return err
	}
	if len(e.overlaps) > 0 {
		return fmt.Errorf("child pool %s or transit pool %s overlaps %s: configure another pool or remove the route",
			e.cfg.Pools.Child, e.cfg.Pools.Transit, e.overlaps[0])
	}
	for _, found := range e.podOverlaps {
		return fmt.Errorf("%s: configure another pool or remove the route", found[0])
	}
	if err := e.knowPods(); err != nil {
		return err
	}
	rules, err := e.firewall.Read(ctx)
	if err != nil {
		return fmt.Errorf("read the rules: %w", err)
	}
	if _, err := e.firewall.EnsureSharedAsOf(ctx, rules); err != nil {
		return fmt.Errorf("shared firewall chains: %w", err)
	}
	if err := e.reconcile(ctx, rules); err != nil {
		return err
	}
	e.leaveFlavour(ctx)
	reconciled.Here()
	changed, err := e.host.WatchEgress(e.ctx, func(err error) { e.log.Warn("the watch is begun again", "err", err) })
	if err != nil {
		return fmt.Errorf("watch the egress: %w", err)
	}
	e.work.Go(func() { e.followEgress(changed) })
	e.work.Go(e.retryDeletions)
	e.work.Go(e.expireLeases)
	e.work.Go(e.collectFlows)
	if e.cfg.AuditEvery > 0 {
		e.work.Go(e.auditLoop)
	}
	if e.cfg.PolicyDir != "" {
		e.work.Go(func() { policydir.Watch(e.ctx, e.cfg.PolicyDir, policyDirEvery, e.readPolicyDir) })
	}
	if e.cfg.DeferredDir != "" {
		e.work.Go(e.replayDeferred)
		e.work.Go(e.watchDeferred)
	}
	return nil
}

// Close stops everything that goes on beside the calls and waits for it. The
// kernel objects and the records stay.
func (e *Engine) Close() {
	e.mu.Lock()
	e.closed = true
	for gen, t := range e.graces {
		if t.Stop() {
			e.work.Done()
		}
		delete(e.graces, gen)
	}
	e.mu.Unlock()
	e.cancel()
	e.work.Wait()
	e.closeDatapath()
}

// refreshEgress reads the egress and what overlaps our pools. Having no egress
// is no error: the daemon waits for one.
func (e *Engine) refreshEgress() error {
	egress, err := e.host.Egress(e.cfg.Egress)
	if err != nil && !errors.Is(err, topo.ErrNoEgress) {
		return fmt.Errorf("find the egress: %w", err)
	}
	all, err := e.host.Overlaps(e.ranges())
	if err != nil {
		return fmt.Errorf("look for overlapping routes: %w", err)
	}
	var overlaps []string
	pods := map[string][]string{}
	for _, line := range all {
		if name, ofPods := strings.CutPrefix(line, "pool "); ofPods {
			name, _, _ = strings.Cut(name, " ")
			pods[name] = append(pods[name], line)
		} else {
			overlaps = append(overlaps, line)
		}
	}
	e.addresses.mu.Lock()
	clear(e.addresses.admitted)
	e.addresses.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.egress, e.overlaps, e.podOverlaps = egress, overlaps, pods
	return nil
}

// currentEgress returns the egress that a new endpoint gets, and its MTU.
func (e *Engine) currentEgress(mode endpoint.Mode) (topo.Egress, int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.egress.Name == "" {
		what := "the host has no default route"
		if e.cfg.Egress != "" {
			what = "interface " + e.cfg.Egress + " is missing or has no address"
		}
		return topo.Egress{}, 0, api.Errorf(api.Unavailable, "no egress: %s (add one, or set `egress` in the configuration)", what)
	}
	if mode == endpoint.Multikernel && len(e.overlaps) > 0 {
		return topo.Egress{}, 0, api.Errorf(api.FailedPrecondition, "child pool %s or transit pool %s overlaps %s: remove it or configure another pool",
			e.cfg.Pools.Child, e.cfg.Pools.Transit, e.overlaps[0])
	}
	mtu := e.cfg.MTUBytes
	if mtu == 0 {
		mtu = e.egress.MTUBytes
	}
	if mtu < endpoint.MinMTU {
		mtu = endpoint.DefaultMTU
	}
	return e.egress, min(mtu, endpoint.MaxMTU), nil
}

// flush forgets the flows of one address.
func (e *Engine) flush(ctx context.Context, addr netip.Addr) error {
	if err := conntrack.Flush(ctx, addr); err != nil {
		return fmt.Errorf("forget the flows of %s: %w", addr, err)
	}
	return nil
}
