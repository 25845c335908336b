package engine

import (
	"context"
	"errors"

	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/store"
	"mknet/spec/api"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var namespaceMade = crash.New("engine.namespace-made")

// Provision does ADD and BIND for a runtime that has no namespace of its own:
// mknetd makes one. When BIND is refused, nothing is left.
func (e *Engine) Provision(ctx context.Context, req api.ProvisionRequest, peer endpoint.Process) (api.BindReply, error) {
	if err := req.Sandbox.Validate(); err != nil {
		return api.BindReply{}, api.Errorf(api.InvalidArgument, "%v", err)
	}
	if err := validateCreate(&req.CreateRequest, e.cfg); err != nil {
		return api.BindReply{}, err
	}
	if req.Mode == endpoint.Veth {
		return api.BindReply{}, api.Errorf(api.Unsupported, "PROVISION is for child kernels: an ordinary pod (mode %s) has nothing to bind, use ADD", req.Mode)
	}
	gen := endpoint.NewGeneration()
	ns, err := netns.Make(gen)
	if err != nil {
		return api.BindReply{}, err
	}
	defer ns.Close()
	namespaceMade.Here()
	ep, err := e.createIn(ctx, req.CreateRequest, ns, gen, peer)
	if err != nil {
		// A record that is left over owns the namespace and removes it later.
		if _, kept := e.store.Get(gen); errors.Is(kept, store.ErrNotFound) {
			err = withUndo(err, netns.Remove(gen))
		}
		return api.BindReply{}, err
	}
	reply, err := e.bindNew(ctx, ep, req.Sandbox, peer)
	if err != nil {
		_, undo := e.Delete(ctx, api.DeleteRequest{Selector: api.Selector{Generation: gen}}, nil, peer)
		return api.BindReply{}, withUndo(err, undo)
	}
	return reply, nil
}

func (e *Engine) bindNew(ctx context.Context, ep endpoint.Endpoint, sandbox endpoint.Sandbox, peer endpoint.Process) (api.BindReply, error) {
	unlock, err := e.endpoints.lock(ctx, ep.Generation)
	if err != nil {
		return api.BindReply{}, busy("endpoint "+ep.Generation.Short(), err)
	}
	defer unlock()
	return e.bindLocked(ctx, ep.Generation, sandbox, peer)
}

// Release does UNBIND and DEL. Nothing there is success, another sandbox is
// refused.
func (e *Engine) Release(ctx context.Context, req api.ReleaseRequest, peer endpoint.Process) (api.DeleteReply, error) {
	err := e.Unbind(ctx, req.Generation, api.UnbindRequest{Sandbox: req.Sandbox}, peer)
	if err != nil && api.CodeOf(err) != api.NotFound {
		return api.DeleteReply{}, err
	}
	return e.Delete(ctx, api.DeleteRequest{Selector: api.Selector{Generation: req.Generation}}, nil, peer)
}
