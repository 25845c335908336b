package engine

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"mknet/mknetd/internal/metrics"
	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
)

// tally counts what the engine finds and mends.
type tally struct {
	mu       sync.Mutex
	faults   map[metrics.FaultKind]uint64
	repairs  map[metrics.RepairKind]uint64
	audits   uint64
	took     time.Duration // of all audits
	failures uint64
	success  time.Time // of the last audit without an error
}

// found counts the faults that somebody's look has found.
func (t *tally) found(by string, faults []endpoint.Fault) {
	if len(faults) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.faults == nil {
		t.faults = map[metrics.FaultKind]uint64{}
	}
	for _, f := range faults {
		t.faults[metrics.FaultKind{Kind: f.Kind, By: by}]++
	}
}

// repaired counts an attempt to make an object right.
func (t *tally) repaired(kind string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.repairs == nil {
		t.repairs = map[metrics.RepairKind]uint64{}
	}
	t.repairs[metrics.RepairKind{Kind: kind, Failed: err != nil}]++
}

func (t *tally) audited(began time.Time, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.audits++
	t.took += time.Since(began)
	if err != nil {
		t.failures++
	} else {
		t.success = time.Now()
	}
}

// Stats returns the figures that are exported as metrics. It waits for no lock
// that is held across kernel work.
func (e *Engine) Stats(context.Context) metrics.Stats {
	st := metrics.Stats{Endpoints: map[metrics.EndpointKind]int{}, Pump: e.figures.total(), Flows: hostFlows(), Policy: e.policyFigures(), Path: e.pathFigures(), Events: e.events.figures()}
	for k, n := range e.store.Counts().ByKind {
		st.Endpoints[metrics.EndpointKind(k)] = n
	}
	pool := func(name string, total, live, resting uint32) {
		st.Pools = append(st.Pools, metrics.Pool{Name: name, Used: live, Resting: resting, Free: total - live - resting})
	}
	c := e.slots.Counts(e.now())
	pool("", c.Total, c.Live, c.Quarantined)
	for i, p := range e.addresses.pools {
		c := e.addresses.slots[i].Counts(e.now())
		pool(p.Name, c.Total, c.Live, c.Quarantined)
	}
	if fi, err := os.Stat(e.store.Path()); err == nil {
		st.StoreBytes = fi.Size()
	}
	st.DeferredDels, st.DeferredOldest = e.queuedDels()
	t := &e.tally
	t.mu.Lock()
	defer t.mu.Unlock()
	st.Faults, st.Repairs = maps.Clone(t.faults), maps.Clone(t.repairs)
	st.Audits, st.AuditTime, st.AuditFailures, st.LastAudit = t.audits, t.took, t.failures, t.success
	return st
}

// queuedDels counts the deferred DELs for this daemon; one that cannot be read now is
// counted with no age, one that will never be replayed not at all.
func (e *Engine) queuedDels() (n int, oldest time.Duration) {
	if e.cfg.DeferredDir == "" {
		return 0, 0
	}
	q, err := delqueue.OpenExisting(e.cfg.DeferredDir)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			e.log.Error("open the queue of deferred DELs", "err", err)
		}
		return 0, 0
	}
	defer q.Close()
	items, err := q.List()
	if err != nil {
		e.log.Error("list the deferred DELs", "err", err)
	}
	for _, it := range items {
		if it.Unusable || it.Err == nil && !e.meantForUs(it.Entry) {
			continue
		}
		n++
		if it.Err == nil {
			oldest = max(oldest, time.Since(it.Entry.QueuedAt))
		}
	}
	return n, oldest
}

// hostFlows reads the size of the host's connection tracking table.
func hostFlows() metrics.Flows {
	read := func(name string) uint64 {
		text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_" + name)
		if err != nil {
			return 0 // connection tracking is not loaded
		}
		n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
		if err != nil {
			return 0
		}
		return n
	}
	return metrics.Flows{Entries: read("count"), Limit: read("max")}
}
