package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/store"
	"mknet/spec/endpoint"
)

// leaveFlavour removes what was built with the flavour of iptables that is not in use
// (an administrator has switched between nft and legacy): both would judge every
// packet. It goes by what stands there and not by the records alone, which an earlier
// try may have changed. The rules of the flavour in use must stand already, so that
// no endpoint is ever without. What is left is in Health, and tried again by every
// audit: what the node has must be served all the same.
func (e *Engine) leaveFlavour(ctx context.Context) {
	err := e.leaveFlavourNow(ctx)
	if err != nil {
		e.log.Error("leave the other iptables flavour", "err", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.flavourLeft = err
}

// retryFlavour is leaveFlavour where the last one failed.
func (e *Engine) retryFlavour(ctx context.Context) {
	if e.flavourTrouble() != nil {
		e.leaveFlavour(ctx)
	}
}

// flavourTrouble is why the other flavour may still hold rules of ours; nil: it does not.
func (e *Engine) flavourTrouble() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.flavourLeft
}

func (e *Engine) leaveFlavourNow(ctx context.Context) error {
	all, err := e.store.List()
	if err != nil {
		return err
	}
	old, err := e.otherFlavour(ctx, all)
	if err != nil {
		return err
	}
	if old != nil {
		found, err := old.RemoveAll(ctx, generations(all))
		if err != nil {
			return err
		}
		if found {
			e.log.Warn("removed what stood in another iptables flavour", "from", old.Flavour(), "to", e.firewall.Flavour())
		}
	}
	for _, ep := range all {
		if !e.builtElsewhere(ep) {
			continue
		}
		_, err := e.store.Update(ep.Generation, func(ep *endpoint.Endpoint) error { ep.Firewall = e.firewall.Flavour(); return nil })
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return storeError(err)
		}
		e.log.Warn("moved to another iptables flavour", "generation", ep.Generation.String(), "from", ep.Firewall, "to", e.firewall.Flavour())
	}
	return nil
}

// otherFlavour opens the flavour that is not in use where it holds anything of ours;
// nil: it does not. Where a record says that it should, it must answer.
func (e *Engine) otherFlavour(ctx context.Context, records []endpoint.Endpoint) (*ipt.Firewall, error) {
	name, err := e.firewall.Elsewhere(ctx, slices.ContainsFunc(records, e.builtElsewhere))
	if err != nil || name == "" {
		return nil, err
	}
	fw, err := e.cfg.OpenFirewall(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("rules of mknet stand in iptables %s, to remove them: %w", name, err)
	}
	return fw, nil
}

func (e *Engine) builtElsewhere(ep endpoint.Endpoint) bool {
	return ep.Firewall != e.firewall.Flavour()
}

func generations(all []endpoint.Endpoint) []endpoint.Generation {
	out := make([]endpoint.Generation, len(all))
	for i, ep := range all {
		out[i] = ep.Generation
	}
	return out
}
