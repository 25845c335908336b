package engine

import (
	"context"
	"fmt"

	"mknet/mknetd/internal/ipt"
	"mknet/spec/endpoint"
)

// leaveFlavours removes what was built with another flavour of iptables than the
// one in use (an administrator has switched between nft and legacy): both would
// judge every packet. The verification that follows builds the rules again.
func (e *Engine) leaveFlavours(ctx context.Context) error {
	all, err := e.store.List()
	if err != nil {
		return err
	}
	old := map[string]*ipt.Firewall{}
	for _, ep := range all {
		if ep.Firewall == e.firewall.Flavour() {
			continue
		}
		fw := old[ep.Firewall]
		if fw == nil {
			if fw, err = e.cfg.OpenFirewall(ctx, ep.Firewall); err != nil {
				return fmt.Errorf("endpoint %s was built with iptables %q: %w", ep.Generation, ep.Firewall, err)
			}
			old[ep.Firewall] = fw
		}
		if err := fw.RemoveOwned(ctx, ep.Generation); err != nil {
			return fmt.Errorf("endpoint %s: remove its %s rules: %w", ep.Generation, ep.Firewall, err)
		}
		_, err := e.store.Update(ep.Generation, func(ep *endpoint.Endpoint) error { ep.Firewall = e.firewall.Flavour(); return nil })
		if err != nil {
			return storeError(err)
		}
		e.log.Warn("moved to another iptables flavour", "generation", ep.Generation.String(), "from", ep.Firewall, "to", e.firewall.Flavour())
	}
	for _, fw := range old {
		if err := fw.RemoveShared(ctx); err != nil {
			return fmt.Errorf("remove the shared %s chains: %w", fw.Flavour(), err)
		}
	}
	return nil
}
