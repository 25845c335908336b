package api

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// filterParams are the query parameters of the list, see Filter.
var filterParams = []string{"network", "containerID", "ifName", "state", "sandboxID"}

// decode reads the body into v and says which argument is wrong.
func (c *call) decode(v any) error {
	if err := api.Decode(c.body, v); err != nil {
		return api.Errorf(api.InvalidArgument, "%s %s: body %s", c.route.method, c.route.path, err)
	}
	return nil
}

// note adds the endpoint to the line that is logged for the call.
func (c *call) note(a endpoint.Attachment, gen endpoint.Generation) {
	if a != (endpoint.Attachment{}) {
		c.about = append(c.about, "endpoint", a.String())
	}
	if !gen.IsZero() {
		c.about = append(c.about, "generation", gen.String())
	}
}

func (s *Server) daemonConfig(ctx context.Context, _ *call) (any, error) {
	conf := s.engine.Config(ctx)
	if conf.Pools == nil {
		conf.Pools = []api.Pool{}
	}
	return conf, nil
}

func (s *Server) health(ctx context.Context, _ *call) (any, error) {
	h := s.engine.Health(ctx)
	if h.Causes == nil {
		h.Causes = []api.HealthCause{}
	}
	if h.Endpoints == nil {
		h.Endpoints = map[string]int{}
	}
	return h, nil
}

func (s *Server) create(ctx context.Context, c *call) (any, error) {
	var req api.CreateRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if err := validateCreate(&req); err != nil {
		return nil, err
	}
	if c.ns == nil && req.NetnsPath == "" {
		return nil, api.Errorf(api.InvalidArgument, "a namespace is needed: pass its descriptor or netnsPath")
	}
	ep, err := s.engine.Create(ctx, req, c.takeNS(), c.peer)
	c.note(req.Attachment, ep.Generation)
	return ep, err
}

func (s *Server) list(ctx context.Context, c *call) (any, error) {
	f := Filter{
		Network: c.query.Get("network"), ContainerID: c.query.Get("containerID"), IfName: c.query.Get("ifName"),
		State: endpoint.State(c.query.Get("state")), SandboxID: c.query.Get("sandboxID"),
	}
	if f.State != "" && !f.State.Valid() {
		return nil, api.Errorf(api.InvalidArgument, "state %q is not known", clip(string(f.State)))
	}
	eps, err := s.engine.List(ctx, f)
	if eps == nil {
		eps = []endpoint.Endpoint{}
	}
	return api.EndpointList{Endpoints: eps}, err
}

func (s *Server) get(ctx context.Context, c *call) (any, error) {
	return s.engine.Get(ctx, c.gen)
}

func (s *Server) check(ctx context.Context, c *call) (any, error) {
	var sel api.Selector
	if len(c.body) > 0 {
		if err := c.decode(&sel); err != nil {
			return nil, err
		}
		if err := validateSelector(&sel, true); err != nil {
			return nil, err
		}
		if !sel.Generation.IsZero() && sel.Generation != c.gen {
			return nil, api.Errorf(api.InvalidArgument, "generation %s in the body is not that of the path", sel.Generation)
		}
		sel.Generation = c.gen
	}
	c.note(sel.Attachment, c.gen)
	rep, err := s.engine.Check(ctx, c.gen, sel)
	if rep.Faults == nil {
		rep.Faults = []endpoint.Fault{}
	}
	return rep, err
}

func (s *Server) deleteGeneration(ctx context.Context, c *call) (any, error) {
	c.note(endpoint.Attachment{}, c.gen)
	return s.engine.Delete(ctx, api.DeleteRequest{Selector: api.Selector{Generation: c.gen}}, nil, c.peer)
}

func (s *Server) deleteSelected(ctx context.Context, c *call) (any, error) {
	var req api.DeleteRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if err := validateSelector(&req.Selector, false); err != nil {
		return nil, err
	}
	if req.Generation.IsZero() && req.Attachment == (endpoint.Attachment{}) {
		return nil, api.Errorf(api.InvalidArgument, "a generation or an attachment is needed: a namespace alone does not name what to delete")
	}
	c.note(req.Attachment, req.Generation)
	return s.engine.Delete(ctx, req, c.takeNS(), c.peer)
}

func (s *Server) bindGeneration(ctx context.Context, c *call) (any, error) {
	var req api.BindRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if !req.Selector.Generation.IsZero() && req.Selector.Generation != c.gen {
		return nil, api.Errorf(api.InvalidArgument, "generation %s in the body is not that of the path", req.Selector.Generation)
	}
	req.Selector.Generation = c.gen
	return s.doBind(ctx, c, req)
}

func (s *Server) bind(ctx context.Context, c *call) (any, error) {
	var req api.BindRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	return s.doBind(ctx, c, req)
}

func (s *Server) doBind(ctx context.Context, c *call, req api.BindRequest) (any, error) {
	if err := validateSelector(&req.Selector, c.ns != nil); err != nil {
		return nil, err
	}
	if err := req.Sandbox.Validate(); err != nil {
		return nil, err
	}
	c.note(req.Attachment, req.Selector.Generation)
	return s.engine.Bind(ctx, req, c.takeNS(), c.peer)
}

func (s *Server) unbind(ctx context.Context, c *call) (any, error) {
	var req api.UnbindRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if err := req.Sandbox.Validate(); err != nil {
		return nil, err
	}
	c.note(endpoint.Attachment{}, c.gen)
	return nil, s.engine.Unbind(ctx, c.gen, req, c.peer)
}

func (s *Server) counters(ctx context.Context, c *call) (any, error) {
	return s.engine.Counters(ctx, c.gen)
}

func (s *Server) reportCounters(ctx context.Context, c *call) (any, error) {
	var req api.CountersReport
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if err := req.Sandbox.Validate(); err != nil {
		return nil, err
	}
	if err := req.Counters.Validate(); err != nil {
		return nil, err
	}
	c.note(endpoint.Attachment{}, c.gen)
	return nil, s.engine.ReportCounters(ctx, c.gen, req, c.peer)
}

func (s *Server) provision(ctx context.Context, c *call) (any, error) {
	var req api.ProvisionRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if err := validateCreate(&req.CreateRequest); err != nil {
		return nil, err
	}
	if err := req.Sandbox.Validate(); err != nil {
		return nil, err
	}
	if req.NetnsPath != "" {
		return nil, api.Errorf(api.InvalidArgument, "netnsPath: mknetd makes the namespace itself, leave it out")
	}
	if req.Mode == endpoint.Veth {
		return nil, api.Errorf(api.InvalidArgument, "mode %q: only a multikernel endpoint can be provisioned", req.Mode)
	}
	rep, err := s.engine.Provision(ctx, req, c.peer)
	c.note(req.Attachment, rep.Endpoint.Generation)
	return rep, err
}

func (s *Server) release(ctx context.Context, c *call) (any, error) {
	var req api.ReleaseRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if err := req.Sandbox.Validate(); err != nil {
		return nil, err
	}
	if req.Generation.IsZero() {
		return nil, api.Errorf(api.InvalidArgument, "generation: must not be empty")
	}
	c.note(endpoint.Attachment{}, req.Generation)
	return s.engine.Release(ctx, req, c.peer)
}

func (s *Server) gc(ctx context.Context, c *call) (any, error) {
	var req api.GCRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if err := validateGC(&req); err != nil {
		return nil, err
	}
	rep, err := s.engine.GC(ctx, req, c.peer)
	if rep.Deleted == nil {
		rep.Deleted = []endpoint.Generation{}
	}
	if rep.Errors == nil {
		rep.Errors = []string{}
	}
	return rep, err
}

func (s *Server) allocate(ctx context.Context, c *call) (any, error) {
	var req api.LeaseRequest
	if err := c.decode(&req); err != nil {
		return nil, err
	}
	if err := validatePod(req.Pod); err != nil {
		return nil, err
	}
	return s.engine.Allocate(ctx, req, c.peer)
}

func (s *Server) releaseLease(ctx context.Context, c *call) (any, error) {
	return nil, s.engine.ReleaseLease(ctx, c.gen.String(), c.peer)
}

func (s *Server) inventory(ctx context.Context, _ *call) (any, error) {
	inv, err := s.engine.Inventory(ctx)
	if inv.Items == nil {
		inv.Items = []api.InventoryItem{}
	}
	return inv, err
}

// explainParams are the query parameters of an explanation.
var explainParams = []string{"from", "to", "port", "proto", "sourcePort", "size"}

func (s *Server) explain(ctx context.Context, c *call) (any, error) {
	req := api.WayRequest{From: c.query.Get("from"), To: c.query.Get("to"), Protocol: c.query.Get("proto")}
	if req.From == "" || req.To == "" {
		return nil, api.Errorf(api.InvalidArgument, "from and to are needed: addresses or endpoints")
	}
	for name, to := range map[string]*int{"port": &req.Port, "sourcePort": &req.SourcePort, "size": &req.SizeBytes} {
		text := c.query.Get(name)
		if text == "" {
			continue
		}
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n == 0 {
			return nil, api.Errorf(api.InvalidArgument, "%s %q: must be 1 to 65535", name, clip(text))
		}
		*to = int(n)
	}
	x, err := s.engine.Explain(ctx, req)
	if x.Way == nil {
		x.Way = []api.ExplainStep{}
	}
	if x.Back == nil {
		x.Back = []api.ExplainStep{}
	}
	if x.Faults == nil {
		x.Faults = []endpoint.Fault{}
	}
	if x.NotJudged == nil {
		x.NotJudged = []api.ExplainStep{}
	}
	return x, err
}

// metrics answers in the text format of Prometheus.
func (s *Server) metrics(w http.ResponseWriter, r *http.Request, _ *call) {
	if s.cfg.Metrics == nil {
		s.write(w, failed(api.Errorf(api.Unsupported, "GET /metrics: this mknetd exports none")))
		return
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(s.limits.Reply))
	w.Header().Set("Cache-Control", "no-store")
	s.cfg.Metrics.ServeHTTP(w, r)
}

// write sends a reply as one buffered piece, so that the caller gets either a
// whole one or none.
func (s *Server) write(w http.ResponseWriter, rep reply) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(s.limits.Reply))
	value := rep.value
	if rep.err != nil {
		value = rep.err
	}
	if value == nil {
		w.WriteHeader(rep.status)
		return
	}
	body, err := json.Marshal(value)
	if err != nil {
		s.log.Error("a reply cannot be written as JSON", "err", err)
		rep.status = http.StatusInternalServerError
		// A code and a text can always be written.
		body, _ = json.Marshal(api.Errorf(api.Internal, "a defect in mknetd: the reply cannot be written as JSON: %s", oneLine(err.Error())))
	}
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(rep.status)
	_, _ = w.Write(body) // the caller has gone: there is nobody to tell
}
