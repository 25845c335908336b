package client

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
)

// maxLineBytes bounds one line of a stream.
const maxLineBytes = 1 << 20

// stream calls f with every line of a reply that goes on, until f says that this was
// the last one, or returns an error. lost is set where the connection failed, or ended
// before that; the error is then ErrUnreachable or ctx's.
func (c *Client) stream(ctx context.Context, r request, f func(line []byte) (end bool, err error)) (lost bool, err error) {
	req, err := c.encode(ctx, r)
	if err != nil {
		return false, err
	}
	resp, err := c.transport.RoundTrip(req)
	if err != nil {
		return true, transportError(ctx, c.addr, r.name(), err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != r.want {
		body, err := io.ReadAll(io.LimitReader(resp.Body, maxReplyBytes))
		if err != nil {
			return true, transportError(ctx, c.addr, r.name(), err)
		}
		return false, c.decode(r, resp, body, nil)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxLineBytes)
	for lines.Scan() {
		if end, err := f(lines.Bytes()); err != nil || end {
			return false, err
		}
	}
	err = lines.Err()
	if errors.Is(err, bufio.ErrTooLong) {
		return false, c.bad(r, "has a line of more than %d bytes", maxLineBytes)
	}
	if err == nil {
		err = errors.New("the stream has ended")
	}
	return true, fmt.Errorf("%s: %w: %w", r.name(), ErrUnreachable, err)
}
