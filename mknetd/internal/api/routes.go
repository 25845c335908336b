package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"net/url"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Parameters of a route's path: the generation, and the ID of a lease, which has
// the same form.
const (
	genParam   = "{generation}"
	leaseParam = "{lease}"
)

// route is one line of the table that the server, its documents and their test
// share.
type route struct {
	method, path string
	lane         func(*Server) *lane // nil: never waits
	status       int                 // of success
	body         bodyRule
	ns           bool     // takes a namespace descriptor
	remote       bool     // also over TCP
	quiet        bool     // changes nothing that lasts, and comes often: logged like a GET
	query        []string // parameters that it knows
	do           func(*Server, context.Context, *call) (any, error)
	// raw answers by itself where it is set; do only decides whether it may.
	raw    func(*Server, http.ResponseWriter, *http.Request, *call)
	stream bool // has no end of its own
}

// name is how the route is counted and documented.
func (r *route) name() string { return r.method + " " + r.path }

type bodyRule int

const (
	noBody bodyRule = iota
	optionalBody
	wantsBody
)

func changeLane(s *Server) *lane { return s.changes }
func readLane(s *Server) *lane   { return s.reads }
func checkLane(s *Server) *lane  { return s.checks }
func surveyLane(s *Server) *lane { return s.surveys }

// routes is every route of the API. Those that a child's runtime on this host
// needs, and which move descriptors or bindings, are not served over TCP.
var routes = []route{
	{method: http.MethodGet, path: "/v1/daemon/config", status: http.StatusOK, remote: true, do: (*Server).daemonConfig},
	{method: http.MethodGet, path: "/v1/daemon/health", status: http.StatusOK, remote: true, do: (*Server).health},
	{method: http.MethodPost, path: "/v1/endpoints", lane: changeLane, status: http.StatusCreated, body: wantsBody, ns: true, remote: true, do: (*Server).create},
	{method: http.MethodGet, path: "/v1/endpoints", lane: readLane, status: http.StatusOK, remote: true, query: filterParams, do: (*Server).list},
	{method: http.MethodGet, path: "/v1/endpoints/" + genParam, lane: readLane, status: http.StatusOK, remote: true, do: (*Server).get},
	{method: http.MethodDelete, path: "/v1/endpoints/" + genParam, lane: changeLane, status: http.StatusOK, remote: true, do: (*Server).deleteGeneration},
	{method: http.MethodPost, path: "/v1/endpoints/" + genParam + "/check", lane: checkLane, status: http.StatusOK, body: optionalBody, remote: true, do: (*Server).check},
	{method: http.MethodPost, path: "/v1/endpoints/" + genParam + "/bind", lane: changeLane, status: http.StatusOK, body: wantsBody, do: (*Server).bindGeneration},
	{method: http.MethodPost, path: "/v1/endpoints/" + genParam + "/unbind", lane: changeLane, status: http.StatusNoContent, body: wantsBody, do: (*Server).unbind},
	{method: http.MethodPost, path: "/v1/endpoints/" + genParam + "/attach", lane: changeLane, status: http.StatusSwitchingProtocols, body: wantsBody, do: (*Server).attach},
	{method: http.MethodGet, path: "/v1/endpoints/" + genParam + "/counters", lane: readLane, status: http.StatusOK, remote: true, do: (*Server).counters},
	{method: http.MethodPost, path: "/v1/endpoints/" + genParam + "/counters", lane: readLane, status: http.StatusNoContent, body: wantsBody, quiet: true, do: (*Server).reportCounters},
	{method: http.MethodPost, path: "/v1/bind", lane: changeLane, status: http.StatusOK, body: wantsBody, ns: true, do: (*Server).bind},
	{method: http.MethodPost, path: "/v1/delete", lane: changeLane, status: http.StatusOK, body: wantsBody, ns: true, remote: true, do: (*Server).deleteSelected},
	{method: http.MethodPost, path: "/v1/provision", lane: changeLane, status: http.StatusCreated, body: wantsBody, do: (*Server).provision},
	{method: http.MethodPost, path: "/v1/release", lane: changeLane, status: http.StatusOK, body: wantsBody, do: (*Server).release},
	{method: http.MethodPost, path: "/v1/gc", lane: surveyLane, status: http.StatusOK, body: wantsBody, remote: true, do: (*Server).gc},
	{method: http.MethodPost, path: "/v1/ipam/allocate", lane: changeLane, status: http.StatusCreated, body: wantsBody, remote: true, do: (*Server).allocate},
	{method: http.MethodDelete, path: "/v1/ipam/leases/" + leaseParam, lane: changeLane, status: http.StatusNoContent, remote: true, do: (*Server).releaseLease},
	{method: http.MethodGet, path: "/v1/inventory", lane: surveyLane, status: http.StatusOK, remote: true, do: (*Server).inventory},
	{method: http.MethodGet, path: "/v1/explain", lane: surveyLane, status: http.StatusOK, query: explainParams, do: (*Server).explain},
	{method: http.MethodGet, path: "/v1/events", status: http.StatusOK, remote: true, query: eventParams, do: (*Server).events},
	{method: http.MethodGet, path: "/v1/events/stream", status: http.StatusOK, remote: true, query: eventParams, do: (*Server).mayFollow, raw: (*Server).follow, stream: true},
	{method: http.MethodPost, path: "/v1/trace", lane: surveyLane, status: http.StatusOK, body: wantsBody, do: (*Server).beginTrace, raw: (*Server).runTrace, stream: true},
	{method: http.MethodGet, path: "/metrics", status: http.StatusOK, remote: true, do: allowed, raw: (*Server).metrics},
	{method: http.MethodGet, path: "/v1/policy", lane: readLane, status: http.StatusOK, remote: true, query: policyParams, do: (*Server).policies},
	{method: http.MethodPost, path: "/v1/policy/apply", lane: surveyLane, status: http.StatusOK, body: wantsBody, do: (*Server).applyPolicy},
	{method: http.MethodPost, path: "/v1/policy/delete", lane: surveyLane, status: http.StatusOK, body: wantsBody, do: (*Server).deletePolicy},
	{method: http.MethodPost, path: "/v1/policy/explain", lane: surveyLane, status: http.StatusOK, body: wantsBody, remote: true, quiet: true, do: (*Server).explainPolicy},
}

// allowed is for routes that answer by themselves and need no more than to be
// called as the table says.
func allowed(*Server, context.Context, *call) (any, error) { return nil, nil }

// match finds the route of a request. allow is set where the path exists with
// other methods only.
func match(method, path string) (r *route, generation string, allow []string) {
	for i := range routes {
		c := &routes[i]
		gen, ok := matchPath(c.path, path)
		switch {
		case !ok:
		case c.method == method:
			return c, gen, nil
		default:
			allow = append(allow, c.method)
		}
	}
	return nil, "", allow
}

func matchPath(pattern, path string) (generation string, ok bool) {
	before, after, found := strings.Cut(pattern, genParam)
	if !found {
		before, after, found = strings.Cut(pattern, leaseParam)
	}
	if !found {
		return "", pattern == path
	}
	rest, ok := strings.CutPrefix(path, before)
	if !ok {
		return "", false
	}
	generation, ok = strings.CutSuffix(rest, after)
	return generation, ok && generation != "" && !strings.Contains(generation, "/")
}

// call is one request on its way through a route.
type call struct {
	route    *route
	gen      endpoint.Generation // of the path, where it has one; or a lease's ID
	query    url.Values
	body     []byte
	ns       *os.File // until a handler hands it on
	peer     endpoint.Process
	trace    Trace                                             // that has begun
	upgrade  bool                                              // asks for api.AttachProtocol
	about    []any                                             // log attributes that the handler adds
	takeOver func(w http.ResponseWriter, conn *passConn) error // ATTACH: replaces the reply
}

// takeNS hands the descriptor on; the caller owns it then.
func (c *call) takeNS() *os.File {
	f := c.ns
	c.ns = nil
	return f
}

// reply is what a call came to.
type reply struct {
	status   int
	value    any // nil: no content
	err      *api.Error
	takeOver func(w http.ResponseWriter, conn *passConn) error
}

// handle answers one request.
func (s *Server) handle(w http.ResponseWriter, r *http.Request) {
	s.calls.add(1)
	defer s.calls.add(-1)
	begun := time.Now()
	conn, peer := callerOf(r)
	c := &call{peer: peer}
	rep := s.run(w, r, conn, c)
	if c.ns != nil {
		_ = c.ns.Close() // not handed on
	}
	defer func() { s.count(c, rep, begun) }()
	if rep.err == nil && c.route.raw != nil {
		c.route.raw(s, w, r, c)
		s.logCall(r, c, rep, time.Since(begun))
		return
	}
	if rep.err == nil && rep.takeOver != nil {
		if err := rep.takeOver(w, conn); err != nil {
			s.log.Warn("descriptors were not delivered", "generation", c.gen.String(), "peerPid", peer.PID, "err", err)
		}
		s.logCall(r, c, rep, time.Since(begun))
		return
	}
	s.write(w, rep)
	c.answered(w)
	s.logCall(r, c, rep, time.Since(begun))
}

// count tells who counts calls of one that has been answered.
func (s *Server) count(c *call, rep reply, begun time.Time) {
	if s.cfg.Observe == nil {
		return
	}
	name, code := "other", ""
	if c.route != nil {
		name = c.route.name()
	}
	if rep.err != nil {
		code = string(rep.err.Code)
	}
	took := time.Since(begun)
	if c.route != nil && c.route.stream {
		took = -1
	}
	s.cfg.Observe(name, code, took)
}

// run does everything but answering.
func (s *Server) run(w http.ResponseWriter, r *http.Request, conn *passConn, c *call) (rep reply) {
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("call panicked", "method", r.Method, "route", r.URL.Path, "err", fmt.Sprint(p), "stack", string(debug.Stack()))
			rep = reply{status: http.StatusInternalServerError, err: api.Errorf(api.Internal, "a defect in mknetd ended the call: %v", p)}
		}
	}()
	if err := s.prepare(w, r, conn, c); err != nil {
		return *err
	}
	ctx := r.Context()
	deadline := s.limits.Read
	if c.route.lane != nil {
		l := c.route.lane(s)
		leave, err := l.enter(ctx)
		if err != nil {
			return failed(err)
		}
		defer leave()
		deadline = l.deadline
	}
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	value, err := c.route.do(s, ctx, c)
	if err != nil {
		return failed(err)
	}
	return reply{status: c.route.status, value: value, takeOver: c.takeOver}
}

func failed(err error) reply {
	e := toError(err)
	return reply{status: e.Code.HTTPStatus(), err: e}
}

// prepare finds the route and reads the request up to its last byte. A nil return
// means that the call may go on.
func (s *Server) prepare(w http.ResponseWriter, r *http.Request, conn *passConn, c *call) *reply {
	refuse := func(err error) *reply { rep := failed(err); return &rep }
	// The body is read even where the request is refused for another reason: a
	// descriptor may come with any part of it, and must not stay for the next one.
	body, bodyErr := s.readBody(w, r)
	if err := c.takePassed(w, conn); err != nil {
		return refuse(err)
	}
	route, gen, allow := match(r.Method, r.URL.Path)
	switch {
	case route == nil && len(allow) > 0:
		w.Header().Set("Allow", strings.Join(allow, ", "))
		return &reply{status: http.StatusMethodNotAllowed, err: api.Errorf(api.Unsupported, "%s %s: the path takes only %s", clip(r.Method), clip(r.URL.Path), strings.Join(allow, ", "))}
	case route == nil:
		return &reply{status: http.StatusNotFound, err: api.Errorf(api.NotFound, "%s %s: no such route", clip(r.Method), clip(r.URL.Path))}
	case conn == nil && !route.remote:
		return refuse(api.Errorf(api.Unsupported, "%s %s: is served on the Unix socket only", route.method, route.path))
	case bodyErr != nil:
		return refuse(bodyErr)
	case len(body) > 0 && route.body == noBody:
		return refuse(api.Errorf(api.InvalidArgument, "%s %s: takes no body", route.method, route.path))
	case len(body) == 0 && route.body == wantsBody:
		return refuse(api.Errorf(api.InvalidArgument, "%s %s: body is empty, want a JSON object", route.method, route.path))
	case c.ns != nil && !route.ns:
		return refuse(api.Errorf(api.InvalidArgument, "%s %s: takes no descriptor", route.method, route.path))
	}
	if ct := r.Header.Get("Content-Type"); ct != "" && len(body) > 0 {
		if media, _, err := mime.ParseMediaType(ct); err != nil || media != "application/json" {
			return refuse(api.Errorf(api.InvalidArgument, "content type %q: want application/json", clip(ct)))
		}
	}
	query, err := readQuery(r.URL.RawQuery, route.query)
	if err != nil {
		return refuse(err)
	}
	if gen != "" {
		if c.gen, err = endpoint.ParseGeneration(gen); err != nil {
			return refuse(err)
		}
	}
	c.route, c.query, c.body = route, query, body
	c.upgrade = r.Header.Get("Upgrade") == api.AttachProtocol && strings.EqualFold(r.Header.Get("Connection"), "upgrade")
	return nil
}

// takePassed takes the descriptor that came with the request.
func (c *call) takePassed(w http.ResponseWriter, conn *passConn) error {
	if conn == nil {
		return nil
	}
	n := conn.count()
	f, excess, lost := conn.take()
	if f == nil && !excess && !lost {
		return nil
	}
	c.ns = f
	// The next request could not tell its descriptor from a late one of this.
	w.Header().Set("Connection", "close")
	switch {
	case lost:
		return outOfDescriptors(errors.New("the one that was passed could not be received"))
	case excess:
		return api.Errorf(api.InvalidArgument, "several descriptors were passed: a request takes one at most")
	case n > 1:
		return api.Errorf(api.InvalidArgument, "a descriptor was passed with request %d of a connection: it must come with the first", n)
	}
	return nil
}

// readBody reads the body within Limits.Body. The deadline is lifted afterwards:
// the server goes on reading to notice a caller that hangs up, and a deadline
// would look like one.
func (s *Server) readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	rc := http.NewResponseController(w)
	if err := rc.SetReadDeadline(time.Now().Add(s.limits.Body)); err != nil {
		return nil, fmt.Errorf("set a deadline: %w", err)
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, api.MaxBodyBytes))
	if err != nil {
		w.Header().Set("Connection", "close")
		return nil, api.Errorf(api.InvalidArgument, "read the body: %s (at most %d bytes, within %s)", err, api.MaxBodyBytes, s.limits.Body)
	}
	if err := rc.SetReadDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("lift a deadline: %w", err)
	}
	return body, nil
}

// readQuery refuses unknown and repeated parameters.
func readQuery(raw string, known []string) (url.Values, error) {
	q, err := url.ParseQuery(raw)
	if err != nil {
		return nil, api.Errorf(api.InvalidArgument, "query: %s", err)
	}
	for name, values := range q {
		ok := false
		for _, k := range known {
			ok = ok || k == name
		}
		switch {
		case !ok:
			return nil, api.Errorf(api.InvalidArgument, "query parameter %q is not known", clip(name))
		case len(values) != 1:
			return nil, api.Errorf(api.InvalidArgument, "query parameter %q occurs %d times", clip(name), len(values))
		}
	}
	return q, nil
}

func (s *Server) logCall(r *http.Request, c *call, rep reply, took time.Duration) {
	level := slog.LevelInfo
	if r.Method == http.MethodGet || c.route != nil && c.route.quiet {
		level = slog.LevelDebug
	}
	attrs := []any{"method", r.Method, "route", clip(r.URL.Path), "status", rep.status, "took", took.Round(time.Microsecond).String(), "peerPid", c.peer.PID, "peerComm", c.peer.Comm}
	if trace := traceOf(r); trace != "" {
		attrs = append(attrs, "trace", trace)
	}
	attrs = append(attrs, c.about...)
	if rep.err != nil {
		attrs = append(attrs, "code", string(rep.err.Code), "err", rep.err.Message)
		if rep.err.Code == api.Internal {
			level = slog.LevelError
		}
	}
	s.log.Log(r.Context(), level, "call", attrs...)
}

// traceOf returns the caller's trace context where it has the form of W3C Trace
// Context section 3.2 (55 characters, hexadecimal digits and '-').
func traceOf(r *http.Request) string {
	t := r.Header.Get(api.TraceHeader)
	if len(t) != 55 || strings.Trim(t, "0123456789abcdef-") != "" {
		return ""
	}
	return t
}

// clip bounds what an error or a log repeats of a request.
func clip(s string) string {
	if len(s) > 128 {
		return s[:128] + "..."
	}
	return s
}
