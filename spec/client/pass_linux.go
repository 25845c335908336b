package client

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/spec/fdpass"
)

// callWith is call with a descriptor that goes with the request's first byte, on
// a connection of its own. ns may be nil.
func (c *Client) callWith(ctx context.Context, r request, ns *os.File, out any) error {
	if ns == nil {
		return c.call(ctx, r, out)
	}
	if c.socket == "" {
		return api.Errorf(api.Unsupported, "%s: a descriptor cannot be passed over TCP, name the namespace by its path", r.name())
	}
	r.transport = &http.Transport{
		DisableKeepAlives: true, DisableCompression: true,
		MaxResponseHeaderBytes: c.transport.MaxResponseHeaderBytes,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			conn, err := c.dialUnix(ctx)
			if err != nil {
				return nil, err
			}
			return &passingConn{UnixConn: conn, file: ns}, nil
		},
	}
	defer r.transport.CloseIdleConnections()
	return c.call(ctx, r, out)
}

// passingConn sends a descriptor with the first write. One goroutine writes.
type passingConn struct {
	*net.UnixConn
	file *os.File // nil once it is sent
}

func (p *passingConn) Write(b []byte) (int, error) {
	if p.file == nil || len(b) == 0 {
		return p.UnixConn.Write(b)
	}
	n, err := fdpass.Send(p.UnixConn, b, p.file)
	if err != nil {
		return n, err
	}
	p.file = nil
	if n < len(b) {
		m, err := p.UnixConn.Write(b[n:])
		return n + m, err
	}
	return n, nil
}

// ReadFrom hides the one of UnixConn, which would bypass Write.
func (p *passingConn) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{p}, r)
}

// Attach fetches the queues of a bound endpoint's TUN: req.Queues open
// descriptors, close-on-exec and as blocking or not as mknetd opened them, which
// the caller owns. The nonce of Bind is used up, whatever comes of the call.
func (c *Client) Attach(ctx context.Context, gen endpoint.Generation, req api.AttachRequest) (api.AttachReply, []*os.File, error) {
	r := request{method: http.MethodPost, path: endpointPath(gen, "attach"), body: req, want: http.StatusSwitchingProtocols}
	if c.socket == "" {
		return api.AttachReply{}, nil, api.Errorf(api.Unsupported, "%s: descriptors cannot be passed over TCP", r.name())
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	conn, err := c.dialUnix(ctx)
	if err != nil {
		return api.AttachReply{}, nil, transportError(ctx, c.addr, r.name(), err)
	}
	in := &receiver{UnixConn: conn}
	defer in.Close()
	// Ends the reads below when ctx does.
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	reply, err := c.attach(ctx, r, in)
	if err == nil {
		err = c.checkAttach(r, reply, gen, req, in)
	}
	if err != nil {
		return api.AttachReply{}, nil, err // the receiver closes what has come
	}
	return reply, in.takeAll(), nil
}

// attach sends the request and reads up to the end of the connection.
func (c *Client) attach(ctx context.Context, r request, in *receiver) (api.AttachReply, error) {
	var reply api.AttachReply
	fail := func(err error) (api.AttachReply, error) {
		if ctx.Err() != nil {
			err = errors.Join(context.Cause(ctx), err)
		}
		return reply, transportError(ctx, c.addr, r.name(), err)
	}
	req, err := c.encode(ctx, r)
	if err != nil {
		return reply, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", api.AttachProtocol)
	if err := req.Write(in.UnixConn); err != nil {
		return fail(err)
	}
	requestSent.At("attach")
	buffered := bufio.NewReader(io.LimitReader(in, maxReplyBytes))
	resp, err := http.ReadResponse(buffered, req)
	if err != nil {
		return fail(err)
	}
	defer resp.Body.Close()
	rest := io.Reader(resp.Body)
	if resp.StatusCode == r.want {
		rest = buffered // what follows the 101 is no HTTP body
	}
	body, err := io.ReadAll(rest)
	if err != nil {
		return fail(err)
	}
	if resp.StatusCode != r.want {
		return reply, c.decode(r, resp, body, &reply)
	}
	if got := resp.Header.Get("Upgrade"); got != api.AttachProtocol {
		return reply, c.bad(r, "upgrade to %q, want %q", got, api.AttachProtocol)
	}
	replyReceived.At("attach")
	if len(body) == 0 { // the daemon died between the two
		return fail(io.ErrUnexpectedEOF)
	}
	if err := api.DecodeReply(body, &reply); err != nil {
		return reply, c.bad(r, "%s", err)
	}
	return reply, nil
}

func (c *Client) checkAttach(r request, reply api.AttachReply, gen endpoint.Generation, req api.AttachRequest, in *receiver) error {
	if err := c.checkGeneration(r, reply.Endpoint, gen); err != nil {
		return err
	}
	if n := len(in.files); in.cut || n != reply.Queues || n != req.Queues {
		return c.bad(r, "came with %d descriptors, says %d, want %d", n, reply.Queues, req.Queues)
	}
	return nil
}

// receiver collects the descriptors that come with what is read.
type receiver struct {
	*net.UnixConn
	files []*os.File
	cut   bool // there were more than fit
}

func (c *receiver) Read(p []byte) (int, error) {
	// Room for one more than is allowed, so that too many are noticed and closed.
	oob := make([]byte, fdpass.Room(api.MaxQueues+1))
	n, oobn, flags, _, err := c.ReadMsgUnix(p, oob) // sets MSG_CMSG_CLOEXEC
	n = max(n, 0)                                   // -1 with an error, which io.Reader does not allow
	if errors.Is(err, io.EOF) {
		err = io.EOF // net wraps it here, which readers do not expect
	}
	if flags&unix.MSG_CTRUNC != 0 {
		c.cut = true
	}
	files, parseErr := fdpass.Received(oob[:max(oobn, 0)], "tun")
	c.files = append(c.files, files...)
	if parseErr != nil {
		err = errors.Join(err, parseErr)
	}
	return n, err
}

// takeAll hands the descriptors over.
func (c *receiver) takeAll() []*os.File {
	files := c.files
	c.files = nil
	return files
}

// Close also closes the descriptors that nobody took.
func (c *receiver) Close() error {
	errs := []error{c.UnixConn.Close()}
	for _, f := range c.takeAll() {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
