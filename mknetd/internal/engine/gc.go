package engine

import (
	"context"
	"slices"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// GC removes the endpoints of one network that are not listed as valid (CNI GC).
// Without a list only those go whose namespace is gone. One that a live shim has
// is never touched. It goes on past errors and reports them all.
func (e *Engine) GC(ctx context.Context, req api.GCRequest, peer endpoint.Process) (api.GCReply, error) {
	if err := endpoint.ValidateIdentifier("network", req.Network); err != nil {
		return api.GCReply{}, api.Errorf(api.InvalidArgument, "%v", err)
	}
	reply := api.GCReply{Deleted: []endpoint.Generation{}, Errors: []string{}}
	began, boot := time.Now(), e.moment() // an ADD that is under way now is not in anybody's list yet
	var stale []endpoint.Endpoint
	err := e.store.Each(func(ep endpoint.Endpoint) error {
		if ep.Network == req.Network && !listed(req.Valid, ep) {
			stale = append(stale, ep)
		}
		return nil
	})
	if err != nil {
		return reply, err
	}
	for _, ep := range stale {
		if err := context.Cause(ctx); err != nil {
			reply.Errors = append(reply.Errors, "not all endpoints were looked at: "+err.Error())
			break
		}
		if e.liveShim(ep) != nil {
			continue
		}
		if req.Valid == nil && ep.State == endpoint.Ready && !e.provenDead(ctx, ep) {
			continue
		}
		if ep.State == endpoint.Allocating && !e.abandoned(ep) {
			continue
		}
		done, err := e.Delete(ctx, api.DeleteRequest{Selector: api.Selector{Generation: ep.Generation}, NotAfter: &began, NotAfterBoot: &boot}, nil, peer)
		switch {
		case err != nil:
			reply.Errors = append(reply.Errors, err.Error())
		case !done.Deleted.IsZero():
			reply.Deleted = append(reply.Deleted, done.Deleted)
		}
	}
	return reply, nil
}

// abandoned reports whether an endpoint that was ALLOCATING when GC began is nobody's:
// its ADD is over and was not answered with success meanwhile.
func (e *Engine) abandoned(ep endpoint.Endpoint) bool {
	unlock, free := e.attachments.tryLock(ep.Attachment)
	if !free {
		return false
	}
	defer unlock()
	now, err := e.store.Get(ep.Generation)
	return err == nil && now.State != endpoint.Ready
}

// listed reports whether a list keeps the endpoint; no list keeps none by name.
func listed(valid *[]api.GCAttachment, ep endpoint.Endpoint) bool {
	return valid != nil && slices.Contains(*valid, api.GCAttachment{ContainerID: ep.ContainerID, IfName: ep.IfName})
}

// provenDead reports whether an endpoint's namespace is gone for certain: nothing
// on the host leads to it, and its veth, which the kernel removes with it, is gone
// too. A namespace that only a descriptor keeps alive still has its veth.
func (e *Engine) provenDead(ctx context.Context, ep endpoint.Endpoint) bool {
	ns, err := e.reopen(ctx, ep)
	if err != nil {
		return false
	}
	if ns != nil {
		ns.Close()
		return false
	}
	return ep.Namespace.BootID != e.bootID || e.host.LinkGone(ep)
}
