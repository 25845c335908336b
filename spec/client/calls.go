package client

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Filter selects endpoints of a list; an empty field matches every one.
type Filter struct {
	Network     string
	ContainerID string
	IfName      string
	State       endpoint.State
	SandboxID   string
}

func (f Filter) query() url.Values {
	q := url.Values{}
	for name, v := range map[string]string{
		"network": f.Network, "containerID": f.ContainerID, "ifName": f.IfName, "state": string(f.State), "sandboxID": f.SandboxID,
	} {
		if v != "" {
			q.Set(name, v)
		}
	}
	return q
}

func endpointPath(gen endpoint.Generation, action string) string {
	p := "/v1/endpoints/" + gen.String()
	if action != "" {
		p += "/" + action
	}
	return p
}

// Health asks whether mknetd would accept an ADD now.
func (c *Client) Health(ctx context.Context) (api.Health, error) {
	var out api.Health
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/daemon/health", want: http.StatusOK}, &out)
	return out, err
}

// Config returns the configuration that is in force.
func (c *Client) Config(ctx context.Context) (api.DaemonConfig, error) {
	var out api.DaemonConfig
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/daemon/config", want: http.StatusOK}, &out)
	return out, err
}

// Metrics returns the daemon's metrics in the text format of Prometheus.
func (c *Client) Metrics(ctx context.Context) ([]byte, error) {
	r := request{method: http.MethodGet, path: "/metrics", want: http.StatusOK}
	ctx, cancel := bounded(ctx)
	defer cancel()
	req, err := c.encode(ctx, r)
	if err != nil {
		return nil, err
	}
	resp, err := c.transport.RoundTrip(req)
	if err != nil {
		return nil, transportError(ctx, c.addr, r.name(), err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxMetricsBytes+1))
	switch {
	case err != nil:
		return nil, transportError(ctx, c.addr, r.name(), err)
	case len(body) > maxMetricsBytes:
		return nil, c.bad(r, "has more than %d bytes", maxMetricsBytes)
	case resp.StatusCode != r.want:
		return nil, c.decode(r, resp, body, nil)
	}
	return body, nil
}

// CreateEndpoint makes an endpoint (CNI ADD). ns is the namespace's descriptor;
// nil where req.NetnsPath names it. It stays the caller's. An answer that is not
// for this attachment is a *ReplyError, and then the endpoint may exist.
func (c *Client) CreateEndpoint(ctx context.Context, req api.CreateRequest, ns *os.File) (endpoint.Endpoint, error) {
	var out endpoint.Endpoint
	r := request{method: http.MethodPost, path: "/v1/endpoints", body: req, want: http.StatusCreated}
	if err := c.callWith(ctx, r, ns, &out); err != nil {
		return endpoint.Endpoint{}, err
	}
	return out, c.checkEndpoint(r, out, req.Attachment)
}

// Endpoints lists the endpoints that pass the filter.
func (c *Client) Endpoints(ctx context.Context, f Filter) ([]endpoint.Endpoint, error) {
	var out api.EndpointList
	r := request{method: http.MethodGet, path: "/v1/endpoints", query: f.query(), want: http.StatusOK, limit: maxSurveyBytes}
	if err := c.call(ctx, r, &out); err != nil {
		return nil, err
	}
	for _, ep := range out.Endpoints {
		if err := c.checkEndpoint(r, ep, ep.Attachment); err != nil {
			return nil, err
		}
	}
	return out.Endpoints, nil
}

// GetEndpoint returns one endpoint.
func (c *Client) GetEndpoint(ctx context.Context, gen endpoint.Generation) (endpoint.Endpoint, error) {
	var out endpoint.Endpoint
	r := request{method: http.MethodGet, path: endpointPath(gen, ""), want: http.StatusOK}
	if err := c.call(ctx, r, &out); err != nil {
		return endpoint.Endpoint{}, err
	}
	return out, c.checkGeneration(r, out, gen)
}

// CheckEndpoint compares an endpoint with the kernel (CNI CHECK). sel may be
// zero; what it says must fit the endpoint.
func (c *Client) CheckEndpoint(ctx context.Context, gen endpoint.Generation, sel api.Selector) (api.CheckReply, error) {
	var out api.CheckReply
	r := request{method: http.MethodPost, path: endpointPath(gen, "check"), body: sel, want: http.StatusOK}
	if sel == (api.Selector{}) {
		r.body = nil
	}
	if err := c.call(ctx, r, &out); err != nil {
		return api.CheckReply{}, err
	}
	return out, c.checkGeneration(r, out.Endpoint, gen)
}

// DeleteEndpoint deletes exactly one generation (CNI DEL). An endpoint that is
// not there is success: the reply is zero.
func (c *Client) DeleteEndpoint(ctx context.Context, gen endpoint.Generation) (api.DeleteReply, error) {
	var out api.DeleteReply
	r := request{method: http.MethodDelete, path: endpointPath(gen, ""), want: http.StatusOK}
	err := c.call(ctx, r, &out)
	if err == nil && !out.Deleted.IsZero() && out.Deleted != gen {
		err = c.bad(r, "endpoint %s was deleted instead", out.Deleted)
	}
	return out, err
}

// Delete deletes the endpoint that req selects. ns is the namespace's descriptor
// or nil; it stays the caller's.
func (c *Client) Delete(ctx context.Context, req api.DeleteRequest, ns *os.File) (api.DeleteReply, error) {
	var out api.DeleteReply
	r := request{method: http.MethodPost, path: "/v1/delete", body: req, want: http.StatusOK}
	err := c.callWith(ctx, r, ns, &out)
	if err == nil && !req.Generation.IsZero() && !out.Deleted.IsZero() && out.Deleted != req.Generation {
		err = c.bad(r, "endpoint %s was deleted instead", out.Deleted)
	}
	return out, err
}

// Bind joins an endpoint, named by generation, attachment or namespace, to a
// sandbox generation.
func (c *Client) Bind(ctx context.Context, req api.BindRequest) (api.BindReply, error) {
	return c.BindIn(ctx, req, nil)
}

// BindIn is Bind for the endpoint in the namespace that ns describes. ns stays
// the caller's; nil is Bind.
func (c *Client) BindIn(ctx context.Context, req api.BindRequest, ns *os.File) (api.BindReply, error) {
	var out api.BindReply
	r := request{method: http.MethodPost, path: "/v1/bind", body: req, want: http.StatusOK}
	if err := c.callWith(ctx, r, ns, &out); err != nil {
		return api.BindReply{}, err
	}
	if gen := req.Selector.Generation; !gen.IsZero() {
		if err := c.checkGeneration(r, out.Endpoint, gen); err != nil {
			return api.BindReply{}, err
		}
	}
	return out, c.checkBinding(r, out, req.Sandbox)
}

// Unbind ends a binding.
func (c *Client) Unbind(ctx context.Context, gen endpoint.Generation, req api.UnbindRequest) error {
	r := request{method: http.MethodPost, path: endpointPath(gen, "unbind"), body: req, want: http.StatusNoContent}
	return c.call(ctx, r, nil)
}

// Provision makes an endpoint in a namespace of mknetd's own and binds it.
func (c *Client) Provision(ctx context.Context, req api.ProvisionRequest) (api.BindReply, error) {
	var out api.BindReply
	r := request{method: http.MethodPost, path: "/v1/provision", body: req, want: http.StatusCreated}
	if err := c.call(ctx, r, &out); err != nil {
		return api.BindReply{}, err
	}
	return out, errors.Join(c.checkEndpoint(r, out.Endpoint, req.Attachment), c.checkBinding(r, out, req.Sandbox))
}

// Release unbinds and deletes an endpoint.
func (c *Client) Release(ctx context.Context, req api.ReleaseRequest) (api.DeleteReply, error) {
	var out api.DeleteReply
	r := request{method: http.MethodPost, path: "/v1/release", body: req, want: http.StatusOK}
	err := c.call(ctx, r, &out)
	if err == nil && !out.Deleted.IsZero() && out.Deleted != req.Generation {
		err = c.bad(r, "endpoint %s was deleted instead", out.Deleted)
	}
	return out, err
}

// GC removes what is no longer in use (CNI GC).
func (c *Client) GC(ctx context.Context, req api.GCRequest) (api.GCReply, error) {
	var out api.GCReply
	r := request{method: http.MethodPost, path: "/v1/gc", body: req, want: http.StatusOK, limit: maxSurveyBytes}
	err := c.call(ctx, r, &out)
	return out, err
}

// Allocate sets an address of a pod pool aside until an endpoint claims it.
func (c *Client) Allocate(ctx context.Context, req api.LeaseRequest) (api.Lease, error) {
	var out api.Lease
	r := request{method: http.MethodPost, path: "/v1/ipam/allocate", body: req, want: http.StatusCreated}
	if err := c.call(ctx, r, &out); err != nil {
		return api.Lease{}, err
	}
	if out.ID == "" || !out.Address.IsValid() {
		return api.Lease{}, c.bad(r, "lease without ID or address")
	}
	return out, nil
}

// ReleaseLease gives the address of a lease back; no such lease is success.
func (c *Client) ReleaseLease(ctx context.Context, id string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: "/v1/ipam/leases/" + url.PathEscape(id), want: http.StatusNoContent}, nil)
}

// Inventory lists every kernel object beside its record.
func (c *Client) Inventory(ctx context.Context) (api.Inventory, error) {
	var out api.Inventory
	r := request{method: http.MethodGet, path: "/v1/inventory", want: http.StatusOK, limit: maxSurveyBytes}
	err := c.call(ctx, r, &out)
	return out, err
}

// checkEndpoint refuses an answer that is about something else or makes no sense.
func (c *Client) checkEndpoint(r request, ep endpoint.Endpoint, want endpoint.Attachment) error {
	switch {
	case ep.Generation.IsZero():
		return c.bad(r, "the endpoint has no generation")
	case !ep.State.Valid():
		return c.bad(r, "state %q is not known", ep.State)
	case ep.Attachment != want:
		return c.bad(r, "is about attachment %s, not %s", ep.Attachment, want)
	}
	return nil
}

func (c *Client) checkGeneration(r request, ep endpoint.Endpoint, want endpoint.Generation) error {
	if ep.Generation != want {
		return c.bad(r, "is about endpoint %s, not %s", ep.Generation, want)
	}
	return c.checkEndpoint(r, ep, ep.Attachment)
}

func (c *Client) checkBinding(r request, rep api.BindReply, want endpoint.Sandbox) error {
	switch b := rep.Endpoint.Binding; {
	case rep.Endpoint.Generation.IsZero():
		return c.bad(r, "the endpoint has no generation")
	case b == nil:
		return c.bad(r, "the endpoint is not bound")
	case b.Sandbox != want:
		return c.bad(r, "the endpoint is bound to %s, not %s", b.Sandbox, want)
	case len(rep.Nonce) != 32:
		return c.bad(r, "the nonce has %d digits, want 32", len(rep.Nonce))
	}
	return nil
}
