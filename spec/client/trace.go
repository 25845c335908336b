package client

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"mknet/spec/api"
)

// Trace calls f with every line of a trace, the last of which has End. It returns
// nil after that one, f's error, or ErrUnreachable when the daemon ended before.
func (c *Client) Trace(ctx context.Context, req api.TraceRequest, f func(api.TraceLine) error) error {
	r := request{method: http.MethodPost, path: "/v1/trace", body: req, want: http.StatusOK}
	out, err := c.encode(ctx, r)
	if err != nil {
		return err
	}
	resp, err := c.transport.RoundTrip(out)
	if err != nil {
		return transportError(ctx, c.addr, r.name(), err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != r.want {
		body, err := io.ReadAll(io.LimitReader(resp.Body, maxReplyBytes))
		if err != nil {
			return transportError(ctx, c.addr, r.name(), err)
		}
		return c.decode(r, resp, body, nil)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxEventBytes)
	for lines.Scan() {
		var line api.TraceLine
		if err := api.DecodeReply(lines.Bytes(), &line); err != nil {
			return c.bad(r, "%s", err)
		}
		if err := f(line); err != nil || line.End != nil {
			return err
		}
	}
	err = lines.Err()
	if errors.Is(err, bufio.ErrTooLong) {
		return c.bad(r, "has a line of more than %d bytes", maxEventBytes)
	}
	if err == nil {
		err = errors.New("the stream has ended before its verdict")
	}
	return fmt.Errorf("%s: %w: %w", r.name(), ErrUnreachable, err)
}
