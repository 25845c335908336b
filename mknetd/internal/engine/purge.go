package engine

import (
	"context"
	"errors"
	"fmt"

	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var (
	endpointPurged = crash.New("engine.endpoint-purged")
	sharedRemoved  = crash.New("engine.shared-chains-removed")
)

// Purge removes everything of ours from the node: every endpoint, bound or not,
// every object that no record knows, and the shared chains, those in the flavour of
// iptables that is not in use as well. It calls say with
// each thing that it removed. The engine must not have been started. Errors are
// collected; what could not be removed stays recorded.
func (e *Engine) Purge(ctx context.Context, say func(what string)) error {
	e.ebpf.purging = true
	all, err := e.store.List()
	if err != nil {
		return err
	}
	var errs []error
	other, otherErr := e.otherFlavour(ctx, all)
	if otherErr != nil {
		errs = append(errs, otherErr)
	}
	for _, ep := range all {
		if otherErr != nil && e.builtElsewhere(ep) {
			continue // only its record leads to those rules
		}
		if err := e.purgeOne(ctx, ep); err != nil {
			errs = append(errs, fmt.Errorf("endpoint %s: %w", ep.Generation, err))
			continue
		}
		endpointPurged.Here()
		say(fmt.Sprintf("endpoint %s (%s, %s)", ep.Generation, ep.Attachment, ep.Address))
	}
	left, err := e.store.List()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	rules, err := e.firewall.Read(ctx)
	if err == nil {
		err = e.removeOrphans(ctx, left, rules, say)
	}
	if err != nil {
		errs = append(errs, err)
	}
	if len(left) > 0 {
		return errors.Join(errs...) // their rules hang on the shared chains
	}
	if other != nil {
		// After the links, which must not outlive their rules.
		found, err := other.RemoveAll(ctx, generations(all))
		if err != nil {
			errs = append(errs, err)
		} else if found {
			say("everything in iptables " + other.Flavour())
		}
	}
	if err := e.firewall.RemoveShared(ctx); err != nil {
		return errors.Join(append(errs, err)...)
	}
	sharedRemoved.Here()
	say("the shared iptables chains")
	found, err := e.purgeDatapath()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	if found {
		say("the eBPF data path")
	}
	return errors.Join(errs...)
}

// purgeDatapath removes the data path, which is opened only where an endpoint of a
// record had to be taken out of it.
func (e *Engine) purgeDatapath() (found bool, err error) {
	if dp := e.ebpf.opened.Load(); dp != nil {
		return true, dp.Purge()
	}
	if e.cfg.PurgeDatapath == nil {
		return false, nil
	}
	return e.cfg.PurgeDatapath()
}

func (e *Engine) purgeOne(ctx context.Context, ep endpoint.Endpoint) error {
	ctx, cancel := context.WithTimeout(ctx, deleteBudget)
	defer cancel()
	unlock, err := e.endpoints.lock(ctx, ep.Generation)
	if err != nil {
		return err
	}
	defer unlock()
	e.killShimLocked(ctx, ep)
	if ep.State != endpoint.Deleting {
		if _, err := e.store.BeginDelete(ep.Generation, clearBinding); err != nil {
			return storeError(err)
		}
		deletingRecorded.Here()
		e.deleting(ep, endpoint.Process{}, "purge")
	}
	return e.finishLocked(ctx, ep)
}
