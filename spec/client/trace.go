package client

import (
	"context"
	"net/http"

	"mknet/spec/api"
)

// Trace calls f with every line of a trace, the last of which has End. It returns
// nil after that one, f's error, or ErrUnreachable when the daemon ended before.
func (c *Client) Trace(ctx context.Context, req api.TraceRequest, f func(api.TraceLine) error) error {
	r := request{method: http.MethodPost, path: "/v1/trace", body: req, want: http.StatusOK}
	_, err := c.stream(ctx, r, func(b []byte) (end bool, err error) {
		var line api.TraceLine
		if err := api.DecodeReply(b, &line); err != nil {
			return false, c.bad(r, "%s", err)
		}
		return line.End != nil, f(line)
	})
	return err
}
