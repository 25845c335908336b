package api

import (
	"context"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

// PolicyEngine is the part of an Engine that keeps policy documents.
type PolicyEngine interface {
	ApplyPolicy(ctx context.Context, req api.PolicyApplyRequest, peer endpoint.Process) (api.PolicyChange, error)
	DeletePolicy(ctx context.Context, req api.PolicyDeleteRequest, peer endpoint.Process) (api.PolicyChange, error)
	// Policies gets a kind that exists, or none.
	Policies(ctx context.Context, kind policy.Kind, name string) (api.PolicyList, error)
	ExplainPolicy(ctx context.Context, req api.ExplainRequest) (api.PolicyExplanation, error)
}

// maxPolicyNames bounds one deletion.
const maxPolicyNames = policy.MaxDocuments

func (s *Server) applyPolicy(ctx context.Context, c *call) (any, error) {
	var req api.PolicyApplyRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	out, err := s.engine.ApplyPolicy(ctx, req, c.peer)
	return withResults(out), err
}

func (s *Server) deletePolicy(ctx context.Context, c *call) (any, error) {
	var req api.PolicyDeleteRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if n := len(req.Objects); n == 0 || n > maxPolicyNames {
		return nil, api.Errorf(api.InvalidArgument, "objects: has %d entries, want 1 to %d", n, maxPolicyNames)
	}
	for i, o := range req.Objects {
		kind, ok := policy.ParseKind(o.Kind)
		if !ok || o.Name == "" {
			return nil, api.Errorf(api.InvalidArgument, "objects[%d]: needs the kind of a policy document and its name", i)
		}
		req.Objects[i].Kind = string(kind)
	}
	out, err := s.engine.DeletePolicy(ctx, req, c.peer)
	return withResults(out), err
}

// withResults keeps an empty list from being null.
func withResults(c api.PolicyChange) api.PolicyChange {
	if c.Results == nil {
		c.Results = []api.PolicyResult{}
	}
	return c
}

// policyParams are the query parameters of the list.
var policyParams = []string{"kind", "name"}

func (s *Server) policies(ctx context.Context, c *call) (any, error) {
	var kind policy.Kind
	if k := c.query.Get("kind"); k != "" {
		var ok bool
		if kind, ok = policy.ParseKind(k); !ok {
			return nil, api.Errorf(api.InvalidArgument, "kind %q is not known", clip(k))
		}
	}
	out, err := s.engine.Policies(ctx, kind, c.query.Get("name"))
	if out.Documents == nil {
		out.Documents = []api.PolicyDocument{}
	}
	return out, err
}

func (s *Server) explainPolicy(ctx context.Context, c *call) (any, error) {
	var req api.ExplainRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	out, err := s.engine.ExplainPolicy(ctx, req)
	if out.Points == nil {
		out.Points = []api.PolicyPoint{}
	}
	return out, err
}
