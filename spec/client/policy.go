package client

import (
	"context"
	"net/http"
	"net/url"

	"mknet/spec/api"
)

// ApplyPolicy puts policy documents in force, all or none.
func (c *Client) ApplyPolicy(ctx context.Context, req api.PolicyApplyRequest) (api.PolicyChange, error) {
	var out api.PolicyChange
	err := c.call(ctx, request{method: http.MethodPost, path: "/v1/policy/apply", body: req, want: http.StatusOK, limit: maxSurveyBytes}, &out)
	return out, err
}

// DeletePolicy takes policy documents out of force; absent is success.
func (c *Client) DeletePolicy(ctx context.Context, req api.PolicyDeleteRequest) (api.PolicyChange, error) {
	var out api.PolicyChange
	err := c.call(ctx, request{method: http.MethodPost, path: "/v1/policy/delete", body: req, want: http.StatusOK}, &out)
	return out, err
}

// Policies lists the documents in force, of one kind and name where these are not
// empty.
func (c *Client) Policies(ctx context.Context, kind, name string) ([]api.PolicyDocument, error) {
	q := url.Values{}
	if kind != "" {
		q.Set("kind", kind)
	}
	if name != "" {
		q.Set("name", name)
	}
	var out api.PolicyList
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/policy", query: q, want: http.StatusOK, limit: maxSurveyBytes}, &out)
	return out.Documents, err
}

// ExplainPolicy asks for the verdict on the first packet of a flow.
func (c *Client) ExplainPolicy(ctx context.Context, req api.ExplainRequest) (api.PolicyExplanation, error) {
	var out api.PolicyExplanation
	err := c.call(ctx, request{method: http.MethodPost, path: "/v1/policy/explain", body: req, want: http.StatusOK}, &out)
	return out, err
}
