package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/mk-cni/internal/cache"
	"mknet/mk-cni/internal/delegate"
	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
)

// delegated is the address that this call's ADD got from an IPAM plugin.
type delegated struct {
	plugin *delegate.Plugin // nil: mknetd's pools give the address
	asked  bool             // its ADD was begun: a failed ADD of ours gives back what it may have given
}

// findIPAM looks for the plugin that the configuration delegates to; nil where it
// delegates nothing.
func (c *call) findIPAM() (*delegate.Plugin, error) {
	if !c.conf.Delegates() {
		return nil, nil
	}
	p, err := delegate.Find(c.conf.IPAMType, c.path, c.environ, c.stdin)
	if err != nil || c.conf.IPAMLink == "" {
		return p, err
	}
	// By our own process, for a daemon of the plugin's may have another root.
	return p.On(fmt.Sprintf("/proc/%d/ns/net", os.Getpid()), c.conf.IPAMLink), nil
}

// refuseDuplicate looks for a live endpoint of the attachment before the plugin is
// asked: the DEL that follows a failed ADD would free that endpoint's address.
func (c *call) refuseDuplicate() error {
	if c.ipam.plugin == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(c.ctx, settleBudget)
	defer cancel()
	list, err := c.daemon.Endpoints(ctx, client.Filter{Network: c.att.Network, ContainerID: c.att.ContainerID, IfName: c.att.IfName})
	if err != nil {
		return fmt.Errorf("look for an endpoint of %s: %w", c.att, err)
	}
	for _, ep := range list {
		if ep.Attachment == c.att && ep.State != endpoint.Deleting {
			return api.Errorf(api.AlreadyExists, "attachment %s already has the endpoint %s (DEL comes first)", c.att, ep.Generation)
		}
	}
	return nil
}

// obtain has the IPAM plugin give an address and puts it into the request.
func (c *call) obtain(req *api.CreateRequest) error {
	if c.ipam.plugin == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(c.ctx, ipamAddBudget)
	defer cancel()
	c.ipam.asked = true
	g, err := c.ipam.plugin.Add(ctx)
	if err != nil {
		return err
	}
	req.IPAM = &api.IPAMResult{Type: c.ipam.plugin.Type, Address: g.Address, Gateway: g.Gateway, Routes: g.Routes}
	if req.DNS.IsZero() { // the configuration's and the runtime's go before
		req.DNS = g.DNS
	}
	c.log.Info("address delegated", "ipam", c.ipam.plugin.Type, "address", g.Address)
	return nil
}

// giveBack runs the DEL of the IPAM plugin after an ADD that failed, once. It runs
// also when the caller has gone. Where another ADD of the same attachment has begun
// meanwhile the address is that one's by now, and its own.
func (c *call) giveBack(pending *cache.Pending) error {
	if !c.ipam.asked {
		return nil
	}
	c.ipam.asked = false
	if pending.Superseded() {
		c.log.Warn("another ADD of the attachment has begun: its address stays")
		return nil
	}
	return c.release(context.WithoutCancel(c.ctx), c.ipam.plugin)
}

// release runs the DEL of an IPAM plugin; nil has nothing to release.
func (c *call) release(ctx context.Context, p *delegate.Plugin) error {
	if p == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, ipamBudget)
	defer cancel()
	if err := p.Do(ctx, "DEL"); err != nil {
		return fmt.Errorf("release the address: %w", err)
	}
	c.log.Info("address released", "ipam", p.Type)
	return nil
}

// askIPAM runs CHECK, STATUS or GC of the IPAM plugin, if there is one. The list of
// GC names attachments as the runtime does, and not as a plugin on a link knows them.
func (c *call) askIPAM(verb string) error {
	p, err := c.findIPAM()
	if p == nil || err != nil || verb == "GC" && c.conf.IPAMLink != "" {
		return err
	}
	ctx, cancel := context.WithTimeout(c.ctx, ipamBudget)
	defer cancel()
	return p.Do(ctx, verb)
}

// ipamStatus is the STATUS of the IPAM plugin, with one of STATUS's codes.
func (c *call) ipamStatus() error {
	err := c.askIPAM("STATUS")
	if err == nil {
		return nil
	}
	code := types.ErrPluginNotAvailable
	var said *delegate.Error
	if errors.As(err, &said) && said.Code == types.ErrLimitedConnectivity {
		code = types.ErrLimitedConnectivity
	}
	return types.NewError(code, err.Error(), "")
}

// sameIPAM holds mknetd's record to what the IPAM plugin gave.
func sameIPAM(m *mismatch, r *api.IPAMResult, ep endpoint.Endpoint) {
	if r == nil {
		m.want(ep.IPAM == "", "address is one of ipam %s, none was named", ep.IPAM)
		return
	}
	m.want(ep.IPAM == r.Type && ep.Address == r.Address.Addr() && ep.Subnet == r.Address.Masked(), "address %s of %s is not the one that ipam %s gave", ep.Address, ep.IPAM, r.Type)
	m.want(!r.Gateway.IsValid() || ep.Gateway == r.Gateway, "gateway is %s, ipam %s gave %s", ep.Gateway, r.Type, r.Gateway)
	m.want(slices.Equal(ep.Routes, r.Routes), "routes are %v, ipam %s gave %v", ep.Routes, r.Type, r.Routes)
}
