package client

import (
	"context"
	"net/http"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Counters returns what the shims of an endpoint have carried; NOT_FOUND until
// one has reported to this daemon.
func (c *Client) Counters(ctx context.Context, gen endpoint.Generation) (api.CountersReply, error) {
	var out api.CountersReply
	r := request{method: http.MethodGet, path: endpointPath(gen, "counters"), want: http.StatusOK}
	err := c.call(ctx, r, &out)
	if err == nil && out.Generation != gen {
		err = c.bad(r, "is about endpoint %s, not %s", out.Generation, gen)
	}
	return out, err
}

// ReportCounters tells what this process, the bound shim, has carried, together
// with the shims before it.
func (c *Client) ReportCounters(ctx context.Context, gen endpoint.Generation, req api.CountersReport) error {
	r := request{method: http.MethodPost, path: endpointPath(gen, "counters"), body: req, want: http.StatusNoContent}
	return c.call(ctx, r, nil)
}
