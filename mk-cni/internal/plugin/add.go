package plugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/mk-cni/internal/cache"
	"mknet/mk-cni/internal/config"
	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var (
	additionBegun  = crash.New("cni.add-begun") // "adding" is in the cache
	cachePublished = crash.New("cni.cache-published")
	rolledBack     = crash.New("cni.rolled-back") // at mknetd or in the queue, the cache does not say so yet
)

// add makes an endpoint. Whatever fails after mknetd made it takes it back.
func (c *call) add() error {
	if err := c.checkIdentity(); err != nil {
		return err
	}
	if c.conf.PrevResult != nil {
		return types.NewError(types.ErrInvalidNetworkConfig,
			"prevResult is given: mk-cni makes the interface and must be the first plugin of the chain; move it before the others", "")
	}
	ns, err := openNetns(c.netnsPath, c.netnsOverride)
	if err != nil {
		return err
	}
	defer ns.close()
	req, err := c.createRequest()
	if err != nil {
		return err
	}
	if c.ipam.plugin, err = c.findIPAM(); err != nil {
		return err
	}
	store, err := cache.Open(c.conf.CacheDir, true)
	if err != nil {
		return err
	}
	c.store = store // open until the result is delivered: the undo needs it
	if err := c.settle(); err != nil {
		return err
	}
	if err := c.refuseDuplicate(); err != nil {
		return err
	}
	pending, err := store.Begin(c.att, c.bootID)
	if err != nil {
		return err
	}
	additionBegun.Here()
	// From here on the address may be given out. Every way out but the good one gives
	// it back, a panic included.
	stands := false
	defer func() {
		if !stands {
			_ = c.giveBack(pending) // done already, but for a panic
		}
	}()
	if err := c.obtain(&req); err != nil {
		return errors.Join(err, c.giveBack(pending), pending.Abort())
	}
	ep, err := c.create(req, ns, pending)
	if err != nil {
		return errors.Join(err, c.giveBack(pending))
	}
	// From here on the endpoint stands. Every way out but the good one takes it
	// back, a panic included.
	decided := false
	defer func() {
		if !decided {
			_ = c.rollback(ep.Generation, pending) // the error that is printed is the panic's
		}
	}()
	err = c.accept(req, ns, ep, pending)
	decided = true
	if err != nil {
		return errors.Join(err, c.rollback(ep.Generation, pending))
	}
	stands = true
	c.undo = func() {
		if err := c.rollback(ep.Generation, pending); err != nil {
			c.log.Error("take the ADD back", "err", err)
		}
	}
	c.log.Info("endpoint made", "generation", ep.Generation, "netns", c.netnsPath, "link", ep.HostLink, "address", ep.Address)
	c.replay()
	return nil
}

// accept checks mknetd's answer, keeps its generation and makes the result of it.
func (c *call) accept(req api.CreateRequest, ns *netns, ep endpoint.Endpoint, pending *cache.Pending) (err error) {
	if err := c.checkReply(req, ns, ep); err != nil {
		return err
	}
	if err := ns.stillThere(); err != nil {
		return err
	}
	if err := pending.Commit(ep.Generation, ep.Namespace.Cookie); err != nil {
		return fmt.Errorf("keep the generation of %s: %w", c.att, err)
	}
	cachePublished.Here()
	if ep.Mode == endpoint.Veth {
		c.output, err = podResult(c.conf.CNIVersion, ep, c.netnsPath)
	} else {
		c.output, err = result(c.conf.CNIVersion, ep, c.netnsPath)
	}
	return err
}

// checkIdentity refuses identities that no endpoint can have: the library's checks
// are wider than ours.
func (c *call) checkIdentity() error {
	err := c.att.Validate()
	var bad *endpoint.IdentifierError
	if !errors.As(err, &bad) {
		return err
	}
	code := types.ErrInvalidEnvironmentVariables
	name := map[string]string{"containerID": "CNI_CONTAINERID", "ifName": "CNI_IFNAME"}[bad.Kind]
	if bad.Kind == "network" {
		code, name = types.ErrInvalidNetworkConfig, "name"
	}
	return types.NewError(code, fmt.Sprintf("%s %q: %s", name, bad.Value, bad.Reason), "")
}

func (c *call) createRequest() (api.CreateRequest, error) {
	address, problems := config.Address(c.conf, c.args)
	if len(problems) > 0 {
		return api.CreateRequest{}, &config.Error{Problems: problems}
	}
	req := api.CreateRequest{
		Attachment: c.att,
		Mode:       c.conf.Mode,
		NetnsPath:  c.netnsPath,
		MTUBytes:   c.conf.MTUBytes,
		Address:    address,
		DNS:        c.conf.EffectiveDNS(),
		HostAccess: c.conf.HostAccess,
		PodAccess:  c.conf.PodAccess,
		Publishes:  c.conf.PublishPorts,
		Bandwidth:  c.conf.Runtime.Bandwidth,
		Pod:        c.args.Pod,
	}
	if c.conf.Mode == endpoint.Veth {
		req.IPMasq = c.conf.Masquerades()
		mac := c.args.MAC
		if c.conf.Runtime.MAC != nil { // the capability is the newer way, and libcni fills in both
			mac = c.conf.Runtime.MAC
		}
		copy(req.MAC[:], mac)
	}
	return req, nil
}

// create asks mknetd. Where no answer comes, the endpoint may exist: the cache
// entry then goes on saying that an ADD began, and a deferred DEL is queued that
// deletes what exists by now.
func (c *call) create(req api.CreateRequest, ns *netns, pending *cache.Pending) (endpoint.Endpoint, error) {
	ctx, cancel := context.WithTimeout(c.ctx, createBudget)
	defer cancel()
	ep, err := c.daemon.CreateEndpoint(ctx, req, c.passed(ns))
	var strange *client.ReplyError
	switch {
	case err == nil:
		return ep, nil
	case errors.As(err, &strange):
		err = types.NewError(CodeBadReply, err.Error()+"; are mk-cni and mknetd of the same release?", "")
		return ep, errors.Join(err, c.rollback(ep.Generation, pending))
	case !unreachable(err), notSent(err):
		return ep, errors.Join(fmt.Errorf("add %s: %w", c.att, err), pending.Abort())
	}
	err = fmt.Errorf("add %s: no answer: %w", c.att, err)
	return ep, errors.Join(err, c.enqueue(endpoint.Generation{}, 0))
}

// rollback deletes exactly the endpoint that this ADD made, and gives its delegated
// address back. The attachment goes with the generation, so that an answer that
// named somebody else's endpoint deletes nothing. It runs also when the caller has
// gone; a DEL that cannot reach mknetd, or comes when mknetd can do none, is queued:
// nobody makes it again, for to the caller there is no endpoint.
func (c *call) rollback(g endpoint.Generation, pending *cache.Pending) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), rollbackBudget)
	defer cancel()
	req := api.DeleteRequest{Selector: api.Selector{Generation: g, Attachment: c.att}}
	if g.IsZero() { // an answer without a generation: what exists now is what this ADD made
		now, boot := time.Now(), c.moment()
		req.NotAfter, req.NotAfterBoot = &now, &boot
	}
	_, err := c.daemon.Delete(ctx, req, nil)
	if unreachable(err) || refusedForNow(err) {
		c.log.Warn("rollback is queued", "generation", g, "err", err)
		err = c.enqueue(g, 0)
	}
	released := c.giveBack(pending)
	if err != nil {
		return errors.Join(fmt.Errorf("roll back endpoint %s of %s: %w", g, c.att, err), released)
	}
	rolledBack.Here()
	c.log.Info("endpoint rolled back", "generation", g)
	// After a Commit the entry is no longer pending; the endpoint it names is gone.
	return errors.Join(released, pending.Abort(), pending.Forget(g))
}

// mismatch collects what an answer of mknetd should have been.
type mismatch []string

func (m *mismatch) want(ok bool, format string, args ...any) {
	if !ok {
		*m = append(*m, fmt.Sprintf(format, args...))
	}
}

// checkReply holds mknetd's answer to the request, field by field: what is cached
// and reported from here on must be this attachment's endpoint and nothing else.
func (c *call) checkReply(req api.CreateRequest, ns *netns, ep endpoint.Endpoint) error {
	var m mismatch
	m.want(!ep.Generation.IsZero(), "no generation")
	m.want(ep.Attachment == req.Attachment, "attachment is %s", ep.Attachment)
	m.want(ep.Mode == req.Mode, "mode is %q, asked for %q", ep.Mode, req.Mode)
	m.want(ep.State == endpoint.Ready, "state is %q, must be %q", ep.State, endpoint.Ready)
	m.want(ep.Binding == nil && ep.DeleteRequested == nil, "a fresh endpoint is bound or being deleted")
	if req.Mode == endpoint.Veth {
		checkPod(&m, req, ep)
	} else {
		checkAddresses(&m, ep)
	}
	m.want(!req.Address.IsValid() || ep.Address == req.Address, "address is %s, asked for %s", ep.Address, req.Address)
	m.want(ep.MTUBytes != 0 && endpoint.ValidateMTU(ep.MTUBytes) == nil, "mtu %d is out of range", ep.MTUBytes)
	m.want(req.MTUBytes == 0 || ep.MTUBytes == req.MTUBytes, "mtu is %d, asked for %d", ep.MTUBytes, req.MTUBytes)
	m.want(ep.Namespace.Cookie != 0 && ep.Namespace.BootID == c.bootID, "namespace is of boot %q, this is %q", ep.Namespace.BootID, c.bootID)
	m.want(ep.Namespace.Device == ns.dev && ep.Namespace.Inode == ns.ino, "namespace is %d:%d, CNI_NETNS is %d:%d",
		ep.Namespace.Device, ep.Namespace.Inode, ns.dev, ns.ino)
	if !ep.Generation.IsZero() {
		link := ep.Generation.HostLink()
		if req.Mode == endpoint.Veth {
			link = endpoint.PodHostLink(req.ContainerID, req.IfName)
		}
		m.want(ep.HostLink == link, "host link is %q, must be %q", ep.HostLink, link)
		m.want(ep.Chain == ep.Generation.Chain(), "chain is %q, must be %q", ep.Chain, ep.Generation.Chain())
	}
	m.want(ep.HostAccess == req.HostAccess, "hostAccess is %q, asked for %q", ep.HostAccess, req.HostAccess)
	m.want(ep.PodAccess == req.PodAccess, "podAccess is %q, asked for %q", ep.PodAccess, req.PodAccess)
	m.want(ep.Publishes == req.Publishes, "publishes is %v, asked for %v", ep.Publishes, req.Publishes)
	m.want(ep.Pod == req.Pod, "pod is %+v, asked for %+v", ep.Pod, req.Pod)
	m.want(req.DNS.IsZero() || sameDNS(ep.DNS, req.DNS), "dns is %+v, asked for %+v", ep.DNS, req.DNS)
	m.want(req.Bandwidth == nil || ep.Bandwidth != nil && *ep.Bandwidth == *req.Bandwidth, "bandwidth is not the one asked for")
	if len(m) == 0 {
		return nil
	}
	return types.NewError(CodeBadReply, fmt.Sprintf("mknetd's answer to the ADD of %s does not fit the request: %s; are mk-cni and mknetd of the same release?", c.att, m[0]), fmt.Sprint(m[1:]))
}

// checkAddresses: the subnet is a private /30, its first usable address is the
// gateway's and its second the child's.
func checkAddresses(m *mismatch, ep endpoint.Endpoint) {
	s := ep.Subnet
	ok := s.IsValid() && s.Addr().Is4() && s.Bits() == endpoint.SlotBits && s == s.Masked() && s.Addr().IsPrivate()
	m.want(ok, "subnet %s is no private /%d", s, endpoint.SlotBits)
	if !ok {
		return
	}
	gateway := s.Addr().Next()
	m.want(ep.Gateway == gateway, "gateway is %s, must be %s", ep.Gateway, gateway)
	m.want(ep.Address == gateway.Next(), "address is %s, must be %s", ep.Address, gateway.Next())
}

// checkPod: the address is one of its subnet and not the gateway's, and what was
// asked for is there.
func checkPod(m *mismatch, req api.CreateRequest, ep endpoint.Endpoint) {
	s := ep.Subnet
	m.want(s.IsValid() && s.Addr().Is4() && s == s.Masked() && s.Contains(ep.Address), "address %s is not one of subnet %s", ep.Address, s)
	m.want(ep.Gateway.Is4() && ep.Gateway != ep.Address, "gateway %s does not go with address %s", ep.Gateway, ep.Address)
	m.want(ep.MAC == req.MAC, "mac is %s, asked for %s", ep.MAC, req.MAC)
	m.want(ep.IPMasq == req.IPMasq, "ipMasq is %v, asked for %v", ep.IPMasq, req.IPMasq)
	sameIPAM(m, req.IPAM, ep)
}

func sameDNS(a, b endpoint.DNS) bool { return fmt.Sprintf("%q", a) == fmt.Sprintf("%q", b) }

// ipNet is an address with its prefix length in the library's form.
func ipNet(a netip.Addr, bits int) net.IPNet {
	return net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, a.BitLen())}
}
