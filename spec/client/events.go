package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"

	"mknet/spec/api"
)

func afterQuery(after api.EventsAfter) url.Values {
	q := url.Values{}
	if after.Instance != "" {
		q.Set("instance", after.Instance)
		q.Set("after", strconv.FormatUint(after.Seq, 10))
	}
	return q
}

// Explain asks for the way of a packet and of its answer.
func (c *Client) Explain(ctx context.Context, req api.WayRequest) (api.Explanation, error) {
	q := url.Values{"from": {req.From}, "to": {req.To}}
	if req.Port != 0 {
		q.Set("port", strconv.Itoa(req.Port))
	}
	if req.SourcePort != 0 {
		q.Set("sourcePort", strconv.Itoa(req.SourcePort))
	}
	if req.SizeBytes != 0 {
		q.Set("size", strconv.Itoa(req.SizeBytes))
	}
	if req.Protocol != "" {
		q.Set("proto", req.Protocol)
	}
	var out api.Explanation
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/explain", query: q, want: http.StatusOK, limit: maxSurveyBytes}, &out)
	return out, err
}

// Events returns the events that the daemon remembers after a point.
func (c *Client) Events(ctx context.Context, after api.EventsAfter) (api.EventList, error) {
	var out api.EventList
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/events", query: afterQuery(after), want: http.StatusOK, limit: maxSurveyBytes}, &out)
	return out, err
}

// Follow calls f with what Events returns, and then with every event as it
// happens. It returns nil once ctx has ended, f's error, or ErrUnreachable when the
// daemon ended: call again with the last event that f got. Without a deadline in ctx
// it has no end of its own.
func (c *Client) Follow(ctx context.Context, after api.EventsAfter, f func(api.Event) error) error {
	r := request{method: http.MethodGet, path: "/v1/events/stream", query: afterQuery(after), want: http.StatusOK}
	lost, err := c.stream(ctx, r, func(line []byte) (end bool, err error) {
		var ev api.Event
		if err := api.DecodeReply(line, &ev); err != nil {
			return false, c.bad(r, "%s", err)
		}
		return false, f(ev)
	})
	if lost && ctx.Err() != nil {
		return nil
	}
	return err
}
