package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"mknet/spec/api"
	"mknet/spec/crash"
)

var (
	requestSent   = crash.New("client.request-sent")
	replyReceived = crash.New("client.reply-received")
)

// Limits of what is read.
const (
	// maxReplyBytes bounds an answer about one endpoint, an error included.
	maxReplyBytes = 1 << 20
	// maxSurveyBytes bounds a list or an inventory: 2^18 endpoints of 2 KiB would
	// be half of it.
	maxSurveyBytes = 1 << 30
	// maxMetricsBytes bounds a scrape; a daemon of 65 pools has about 50 KiB.
	maxMetricsBytes = 16 << 20
	// DefaultTimeout ends a call whose context has no deadline.
	DefaultTimeout = 60 * time.Second
)

// Client calls one mknetd. It is safe for concurrent use.
type Client struct {
	addr      string // as New got it
	socket    string // path, for Unix
	base      string // URL without path
	transport *http.Transport
	trace     string
}

// Option changes what New makes.
type Option func(*options)

type options struct {
	tls   *tls.Config
	trace string
}

// WithTLS sets the certificate to show and the CAs to trust; a tcp:// address
// needs it. The configuration is copied.
func WithTLS(c *tls.Config) Option { return func(o *options) { o.tls = c } }

// WithTrace sends a W3C trace context with every call.
func WithTrace(traceparent string) Option { return func(o *options) { o.trace = traceparent } }

// New makes a client for "unix:///path", "/path" or "tcp://host:port". Nothing is
// opened before the first call.
func New(addr string, opts ...Option) (*Client, error) {
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	c := &Client{addr: addr, trace: o.trace}
	c.transport = &http.Transport{
		Proxy:                  nil, // never through an environment's proxy
		DisableCompression:     true,
		MaxIdleConns:           4,
		IdleConnTimeout:        30 * time.Second,
		MaxResponseHeaderBytes: 16 << 10,
	}
	scheme, rest, ok := strings.Cut(addr, "://")
	switch {
	case !ok:
		rest = addr
		fallthrough
	case scheme == "unix":
		if !filepath.IsAbs(rest) {
			return nil, fmt.Errorf("mknetd address %q: the socket must be an absolute path", addr)
		}
		c.socket, c.base = rest, "http://mknetd"
		c.transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dialUnix(ctx) }
	case scheme == "tcp":
		host, _, err := net.SplitHostPort(rest)
		if err != nil {
			return nil, fmt.Errorf("mknetd address %q: %w", addr, err)
		}
		if o.tls == nil || o.tls.RootCAs == nil || len(o.tls.Certificates) == 0 && o.tls.GetClientCertificate == nil {
			return nil, fmt.Errorf("mknetd address %q: TCP needs mutual TLS: a client certificate and the CA of mknetd's", addr)
		}
		c.base = "https://" + rest
		c.transport.TLSClientConfig = o.tls.Clone()
		c.transport.TLSClientConfig.MinVersion = tls.VersionTLS13
		if c.transport.TLSClientConfig.ServerName == "" {
			c.transport.TLSClientConfig.ServerName = host
		}
	default:
		return nil, fmt.Errorf("mknetd address %q: must be unix:///path or tcp://host:port", addr)
	}
	return c, nil
}

// Addr is the address as New got it.
func (c *Client) Addr() string { return c.addr }

// Close ends idle connections. The client may be used again.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

func (c *Client) dialUnix(ctx context.Context) (*net.UnixConn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", c.socket)
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// isTLS reports whether the handshake failed: the other side is there and does not
// trust us, or we do not trust it.
func isTLS(err error) bool {
	var (
		op        *net.OpError
		record    tls.RecordHeaderError
		unknown   x509.UnknownAuthorityError
		host      x509.HostnameError
		invalid   x509.CertificateInvalidError
		verifying *tls.CertificateVerificationError
	)
	// crypto/tls reports an alert as an OpError of this name (tls.Conn.readRecord).
	return errors.As(err, &op) && op.Op == "remote error" || errors.As(err, &record) || errors.As(err, &unknown) ||
		errors.As(err, &host) || errors.As(err, &invalid) || errors.As(err, &verifying)
}

// request is one call.
type request struct {
	method, path string
	query        url.Values
	body         any // nil: none
	want         int // status of success
	limit        int64
	transport    *http.Transport // nil: the shared one
}

func (r request) name() string { return r.method + " " + r.path }

// encode makes the HTTP request.
func (c *Client) encode(ctx context.Context, r request) (*http.Request, error) {
	u := c.base + r.path
	if len(r.query) > 0 {
		u += "?" + r.query.Encode()
	}
	var body io.Reader
	if r.body != nil {
		doc, err := json.Marshal(r.body)
		if err != nil {
			return nil, fmt.Errorf("%s: write the request: %w", r.name(), err)
		}
		if len(doc) > api.MaxBodyBytes {
			return nil, api.Errorf(api.InvalidArgument, "%s: the request has %d bytes, at most %d are allowed", r.name(), len(doc), api.MaxBodyBytes)
		}
		body = bytes.NewReader(doc)
	}
	req, err := http.NewRequestWithContext(ctx, r.method, u, body)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", r.name(), err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.trace != "" {
		req.Header.Set(api.TraceHeader, c.trace)
	}
	return req, nil
}

// call runs one request and reads the answer into out, nil where there is none.
func (c *Client) call(ctx context.Context, r request, out any) error {
	ctx, cancel := bounded(ctx)
	defer cancel()
	if crash.Enabled {
		ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteRequest: func(httptrace.WroteRequestInfo) { requestSent.At(r.method) }})
	}
	req, err := c.encode(ctx, r)
	if err != nil {
		return err
	}
	transport := r.transport
	if transport == nil {
		transport = c.transport
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return transportError(ctx, c.addr, r.name(), err)
	}
	defer resp.Body.Close()
	limit := r.limit
	if limit == 0 || resp.StatusCode != r.want {
		limit = maxReplyBytes
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return transportError(ctx, c.addr, r.name(), err)
	}
	replyReceived.At(r.method)
	if int64(len(body)) > limit {
		return c.bad(r, "has more than %d bytes", limit)
	}
	return c.decode(r, resp, body, out)
}

// bounded gives a context without a deadline one.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, DefaultTimeout)
}

func (c *Client) bad(r request, format string, args ...any) error {
	return &ReplyError{Addr: c.addr, Call: r.name(), Why: fmt.Sprintf(format, args...)}
}

// decode checks status and type of an answer and reads it.
func (c *Client) decode(r request, resp *http.Response, body []byte, out any) error {
	if resp.StatusCode == r.want && out == nil {
		if len(body) > 0 {
			return c.bad(r, "has a body of %d bytes, want none", len(body))
		}
		return nil
	}
	if media, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err != nil || media != "application/json" {
		return c.bad(r, "status %d with content type %q, want application/json", resp.StatusCode, resp.Header.Get("Content-Type"))
	}
	if resp.StatusCode == r.want {
		if err := api.DecodeReply(body, out); err != nil {
			return c.bad(r, "%s", err)
		}
		return nil
	}
	var e api.Error
	if err := api.DecodeReply(body, &e); err != nil {
		return c.bad(r, "status %d: %s", resp.StatusCode, err)
	}
	if resp.StatusCode < 400 || e.Code == "" || e.Message == "" {
		return c.bad(r, "status %d without an error code", resp.StatusCode)
	}
	return &e
}
