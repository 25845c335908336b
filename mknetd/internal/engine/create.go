package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"

	"mknet/mknetd/internal/alloc"
	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/store"
	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var (
	allocatingRecorded = crash.New("engine.allocating-recorded")
	readyRecorded      = crash.New("engine.ready-recorded")
)

// Create makes an endpoint (CNI ADD): it claims a slot and records ALLOCATING,
// makes every object of the table, and records READY. Whatever fails on the way
// is undone before it returns, also when the caller is gone.
func (e *Engine) Create(ctx context.Context, req api.CreateRequest, nsFile *os.File, peer endpoint.Process) (endpoint.Endpoint, error) {
	ns, err := openNamespace(nsFile, req.NetnsPath)
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	defer ns.Close()
	return e.createIn(ctx, req, ns, endpoint.NewGeneration(), peer)
}

// createIn is Create in an open namespace.
func (e *Engine) createIn(ctx context.Context, req api.CreateRequest, ns *netns.Namespace, gen endpoint.Generation, peer endpoint.Process) (endpoint.Endpoint, error) {
	if err := validateCreate(&req, e.cfg); err != nil {
		return endpoint.Endpoint{}, err
	}
	if err := e.tooManyDeferred(); err != nil {
		return endpoint.Endpoint{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, createBudget)
	defer cancel()

	unlock, err := e.attachments.lock(ctx, req.Attachment)
	if err != nil {
		return endpoint.Endpoint{}, busy("attachment "+req.Attachment.String(), err)
	}
	defer unlock()
	if err := e.makeWay(ctx, req.Attachment); err != nil {
		return endpoint.Endpoint{}, err
	}

	// One attachment at a time in a namespace: they share numbers and ip_forward.
	unlockNS, err := e.namespaces.lock(ctx, ns.ID().Cookie)
	if err != nil {
		return endpoint.Endpoint{}, busy("namespace "+ns.String(), err)
	}
	defer unlockNS()

	ep, err := e.design(ctx, req, ns, gen)
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	if ep, err = e.begin(ctx, ep, req); err != nil {
		return endpoint.Endpoint{}, err
	}
	allocatingRecorded.Here()
	e.audit("allocating", ep, peer)
	if err := e.build(ctx, ep, ns); err != nil {
		return endpoint.Endpoint{}, e.undo(ctx, ep, ns, err)
	}
	ready, err := e.store.MarkReady(ep.Generation, nil)
	if err != nil {
		return endpoint.Endpoint{}, e.undo(ctx, ep, ns, err)
	}
	readyRecorded.Here()
	if err := context.Cause(ctx); err != nil {
		// Nobody is there to take the answer: an endpoint that its caller does not
		// know of must not stay.
		return endpoint.Endpoint{}, e.undo(ctx, ep, ns, busy("endpoint "+ep.Attachment.String()+": its caller is gone", err))
	}
	if now := e.readEgress(); now.Name != "" && !leavesBy(ready, now) {
		e.askForEgress() // it has changed since the ADD read it
	}
	e.audit("created", ready, peer, slog.String("netns", ready.Namespace.Path), slog.String("address", ready.Address.String()))
	return ready, nil
}

// openNamespace identifies the namespace a caller means: the descriptor it
// passed, else the path it named.
func openNamespace(f *os.File, path string) (*netns.Namespace, error) {
	var ns *netns.Namespace
	var err error
	switch {
	case f != nil:
		ns, err = netns.FromFile(f, path)
	case path == "":
		return nil, api.Errorf(api.InvalidArgument, "no network namespace: pass a descriptor or netnsPath")
	default:
		ns, err = netns.Open(path)
	}
	switch {
	case err == nil:
		return ns, nil
	case errors.Is(err, netns.ErrHostNamespace):
		return nil, api.Errorf(api.InvalidArgument, "%v: an endpoint needs a namespace of its own", err)
	case errors.Is(err, netns.ErrNotNamespace), errors.Is(err, fs.ErrNotExist):
		return nil, api.Errorf(api.InvalidArgument, "%v", err)
	}
	return nil, err
}

// validateCreate checks a request and fills in the daemon's defaults.
func validateCreate(req *api.CreateRequest, cfg Config) error {
	if req.Mode == "" {
		req.Mode = endpoint.Multikernel
	}
	if req.Mode != endpoint.Multikernel && req.Mode != endpoint.Veth {
		return api.Errorf(api.InvalidArgument, "mode %q: must be %q or %q", req.Mode, endpoint.Multikernel, endpoint.Veth)
	}
	if req.Mode == endpoint.Veth && req.HostAccess == "" {
		// The daemon's default is meant for children; an ordinary pod is no boundary.
		req.HostAccess = endpoint.Allow
	}
	if err := validatePodRequest(req); err != nil {
		return err
	}
	for _, err := range []error{
		req.Attachment.Validate(), endpoint.ValidateMTU(req.MTUBytes),
		defaultAccess("hostAccess", &req.HostAccess, cfg.HostAccess), defaultAccess("podAccess", &req.PodAccess, cfg.PodAccess),
		validateDNS(req.DNS),
	} {
		if err != nil {
			return api.Errorf(api.InvalidArgument, "%v", err)
		}
	}
	if req.DNS.IsZero() {
		req.DNS = cfg.Resolver
	}
	return nil
}

func defaultAccess(key string, a *endpoint.Access, def endpoint.Access) error {
	switch *a {
	case "":
		*a = endpoint.Deny
		if def != "" {
			*a = def
		}
	case endpoint.Deny, endpoint.Allow:
	default:
		return fmt.Errorf("%s %q: must be %q or %q", key, *a, endpoint.Deny, endpoint.Allow)
	}
	return nil
}

// Bounds of a resolver configuration; glibc reads 3 nameservers and ignores more.
const (
	maxNameservers = 8
	maxSearch      = 32
	maxDNSBytes    = 256 // a domain name has at most 253, RFC 1035
)

func validateDNS(d endpoint.DNS) error {
	if len(d.Nameservers) > maxNameservers || len(d.Search) > maxSearch || len(d.Options) > maxSearch {
		return fmt.Errorf("dns: at most %d nameservers, %d search domains and %d options", maxNameservers, maxSearch, maxSearch)
	}
	for _, s := range d.Nameservers {
		if net.ParseIP(s) == nil {
			return fmt.Errorf("dns nameserver %.64q: is not an IP address", s)
		}
	}
	for _, s := range append(append([]string{d.Domain}, d.Search...), d.Options...) {
		if len(s) > maxDNSBytes {
			return fmt.Errorf("dns entry of %d bytes: at most %d", len(s), maxDNSBytes)
		}
		for i := range len(s) {
			// It becomes a line of resolv.conf: nothing may end it or begin another.
			if s[i] <= ' ' || s[i] > '~' {
				return fmt.Errorf("dns entry %.64q: must be printable and without white space", s)
			}
		}
	}
	return nil
}

// makeWay refuses an attachment that is in use, and finishes the deletion of an
// earlier endpoint of it.
func (e *Engine) makeWay(ctx context.Context, a endpoint.Attachment) error {
	old, err := e.store.ByAttachment(a)
	switch {
	case errors.Is(err, store.ErrNotFound):
		return nil
	case err != nil:
		return err
	case old.State == endpoint.Ready:
		return api.Errorf(api.AlreadyExists, "attachment %s already has the endpoint %s (DEL comes first)", a, old.Generation)
	}
	if err := e.finishDelete(ctx, old.Generation); err != nil {
		return &api.Error{
			Code: api.FailedPrecondition, Retryable: true,
			Message: fmt.Sprintf("attachment %s: its earlier endpoint %s is still being deleted", a, old.Generation), Details: lines(err),
		}
	}
	return nil
}

// design decides everything about a new endpoint but its slot.
func (e *Engine) design(ctx context.Context, req api.CreateRequest, ns *netns.Namespace, gen endpoint.Generation) (endpoint.Endpoint, error) {
	egress, mtu, err := e.currentEgress(req.Mode)
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	if req.MTUBytes != 0 {
		mtu = req.MTUBytes
	}
	site, err := e.host.Survey(ctx, ns, req.IfName)
	if errors.Is(err, topo.ErrExists) {
		return endpoint.Endpoint{}, api.Errorf(api.AlreadyExists, "%v", err)
	}
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	ep := endpoint.Endpoint{
		Generation: gen, Attachment: req.Attachment, Mode: req.Mode, State: endpoint.Allocating,
		Namespace: ns.ID(), HostLink: gen.HostLink(), Chain: gen.Chain(),
		PeerLink: site.PeerLink, RouteTable: site.RouteTable, MainDefault: site.MainDefault,
		MTUBytes: mtu, Egress: egress.Name, EgressAddr: egress.Addr, Firewall: e.firewall.Flavour(),
		DNS: req.DNS, HostAccess: req.HostAccess, PodAccess: req.PodAccess,
		Publishes: req.Publishes, Bandwidth: req.Bandwidth, Pod: req.Pod,
	}
	if req.Mode == endpoint.Veth {
		return e.podDesign(ep, req, site)
	}
	return ep, nil
}

// begin claims a slot and records the endpoint as ALLOCATING.
func (e *Engine) begin(ctx context.Context, ep endpoint.Endpoint, req api.CreateRequest) (endpoint.Endpoint, error) {
	if ep.Mode == endpoint.Veth {
		return e.beginPod(ctx, ep, req)
	}
	grant, err := e.claim(req)
	if err != nil {
		return ep, err
	}
	addr := e.cfg.Pools.At(grant.Slot)
	ep.Slot, ep.Subnet, ep.Gateway, ep.Address = grant.Slot, addr.Subnet, addr.Gateway, addr.Child
	ep.TransitHost, ep.TransitPeer = addr.TransitHost, addr.TransitPeer
	if err := e.host.Conflict(ep); err != nil {
		return ep, errors.Join(conflictError(err), e.slots.Cancel(grant.Slot, e.now()))
	}
	ep.CreatedSinceBoot = e.now().At
	recorded, err := e.store.Begin(ep)
	if err != nil {
		return ep, errors.Join(storeError(err), e.slots.Cancel(grant.Slot, e.now()))
	}
	return recorded, nil
}

// conflictError says what helps against a foreign route to an endpoint's address.
func conflictError(err error) error {
	if !errors.Is(err, topo.ErrForeign) { // the kernel could not tell
		return err
	}
	return api.Errorf(api.FailedPrecondition, "%v (remove the route, or configure another pool)", err)
}

func (e *Engine) claim(req api.CreateRequest) (alloc.Grant, error) {
	if !req.Address.IsValid() {
		grant, err := e.slots.Allocate(e.now())
		var full *alloc.ExhaustedError
		if errors.As(err, &full) {
			return grant, api.Retryablef(api.ResourceExhausted, "%v", err)
		}
		return grant, err
	}
	slot, err := e.cfg.Pools.SlotOf(req.Address)
	if err != nil {
		return alloc.Grant{}, api.Errorf(api.InvalidArgument, "requested %v", err)
	}
	grant, err := e.slots.Claim(slot, e.now())
	var taken *alloc.SlotError
	if errors.As(err, &taken) {
		return grant, api.Errorf(api.AlreadyExists, "requested address %s: %v", req.Address, err)
	}
	return grant, err
}

// build makes every object of the table.
func (e *Engine) build(ctx context.Context, ep endpoint.Endpoint, ns *netns.Namespace) error {
	err := ensureAll(ctx, e.table(ep, ns), e.changes(ep))
	switch {
	case err == nil:
		return nil
	case errors.Is(err, topo.ErrExists):
		return api.Errorf(api.AlreadyExists, "endpoint %s: %v", ep.Attachment, err)
	case errors.Is(err, ipt.ErrBusy):
		return api.Retryablef(api.Unavailable, "endpoint %s: %v", ep.Attachment, err)
	case errors.Is(err, context.DeadlineExceeded):
		return api.Retryablef(api.Unavailable, "endpoint %s: the kernel did not answer in time: %v", ep.Attachment, err)
	}
	return fmt.Errorf("endpoint %s: %w", ep.Attachment, err)
}

// undo rolls a failed ADD back, whatever became of its caller, and returns the
// cause with what could not be undone. What is left over stays recorded as
// DELETING and is tried again.
func (e *Engine) undo(ctx context.Context, ep endpoint.Endpoint, ns *netns.Namespace, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackBudget)
	defer cancel()
	if _, err := e.store.BeginDelete(ep.Generation, nil); err != nil {
		return withUndo(cause, storeError(err))
	}
	deletingRecorded.Here()
	e.deleting(ep, endpoint.Process{}, "its ADD failed")
	return withUndo(cause, e.dismantle(ctx, ep, ns))
}

// withUndo adds what could not be undone to the cause without hiding its code.
func withUndo(cause, undo error) error {
	if undo == nil {
		return cause
	}
	return errors.Join(cause, fmt.Errorf("undo (will be tried again): %w", undo))
}
