package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"mknet/mknetd/internal/metrics"
	"mknet/mknetd/internal/store"
	"mknet/spec/endpoint"
)

const (
	// auditSoonest is how long an audit that is asked for waits for company.
	auditSoonest = time.Second
	// auditShare bounds the audit's use of the daemon: after each endpoint it rests
	// this many times as long as it worked.
	auditShare = 10
)

// auditLoop compares kernel and records for as long as the engine lives and puts
// right what is safe.
func (e *Engine) auditLoop() {
	tick := time.NewTicker(e.cfg.AuditEvery)
	defer tick.Stop()
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-tick.C:
		case <-e.auditNow:
			// A storm of causes is one cause.
			select {
			case <-e.ctx.Done():
				return
			case <-time.After(auditSoonest):
			}
		}
		began := time.Now()
		err := e.auditOnce(e.ctx)
		if e.ctx.Err() != nil {
			return
		}
		e.tally.audited(began, err)
		if err != nil {
			e.log.Error("audit", "err", err)
		}
	}
}

// askForAudit has an audit begin soon, unless one is asked for already.
func (e *Engine) askForAudit() {
	select {
	case e.auditNow <- struct{}{}:
	default:
	}
}

// auditOnce is one pass over the shared chains and every READY endpoint.
func (e *Engine) auditOnce(ctx context.Context) error {
	e.retryDatapath()
	e.retryFlavour(ctx)
	e.askForEgress()
	all, err := e.store.List()
	if err != nil {
		return err
	}
	rules, err := e.firewall.Read(ctx)
	if err != nil {
		return fmt.Errorf("read the rules: %w", err)
	}
	if faults := rules.Shared(); len(faults) > 0 {
		e.tally.found(metrics.ByAudit, faults)
		err := e.firewall.EnsureShared(ctx)
		e.tally.repaired(faults[0].Kind, err)
		if err != nil {
			return err
		}
		e.log.Warn("repaired", "object", "shared firewall chains", "was", faults[0].String(), "faults", len(faults))
	}
	var errs []error
	if enforce := e.ebpf.policy.Load(); enforce != nil {
		if err := enforce.Retry(); err != nil {
			errs = append(errs, fmt.Errorf("policy: %w", err))
		}
	}
	faults := firewallView(rules.Endpoints(all))
	for _, ep := range all {
		if ep.State != endpoint.Ready {
			continue
		}
		began := time.Now()
		if err := e.auditEndpoint(ctx, ep.Generation, faults); err != nil {
			errs = append(errs, err)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(auditShare * time.Since(began)):
		}
	}
	return errors.Join(errs...)
}

// auditEndpoint verifies one endpoint as it is recorded now.
func (e *Engine) auditEndpoint(ctx context.Context, gen endpoint.Generation, rules firewallView) error {
	ctx, cancel := context.WithTimeout(ctx, createBudget)
	defer cancel()
	unlock, err := e.endpoints.lock(ctx, gen)
	if err != nil {
		return err
	}
	defer unlock()
	ep, err := e.store.Get(gen)
	if errors.Is(err, store.ErrNotFound) || err == nil && ep.State != endpoint.Ready {
		return nil
	}
	if err != nil {
		return err
	}
	ns, err := e.reopen(ctx, ep)
	if err != nil {
		return err
	}
	if ns == nil {
		return e.namespaceVanished(ctx, ep)
	}
	defer ns.Close()
	if err := e.verify(ctx, ep, ns, rules); err != nil || e.watches(gen) {
		return err
	}
	return e.resumeShim(ctx, ep)
}
