package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	server "mknet/mknetd/internal/api"
	"mknet/mknetd/internal/datapath"
	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/nftrace"
	"mknet/mknetd/internal/probe"
	"mknet/mknetd/internal/tracing"
	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

// Bounds of a trace's time.
const (
	defaultTraceTime = 10 * time.Second
	maxTraceTime     = 600 * time.Second
	// traceSettle is how long a probe's trace goes on once the probe is answered or
	// given up: events of its last packet are on their way.
	traceSettle = 300 * time.Millisecond
)

// trace is one that has begun.
type trace struct {
	e         *Engine
	over      sync.Once
	dp        *datapath.Trace // nil: no program could tell
	filter    *nftrace.Trace  // nil: iptables is not followed, because of unfiltered
	deaf      bool            // filter will tell nothing more
	texts     *ruleTexts
	begin     api.TraceBegin
	teller    *tracing.Teller
	probe     *probe.Packet    // nil: none is sent
	probeFrom *netns.Namespace // where it is sent
	children  []watched

	unfiltered string
}

// watched is a child at one end of the flow, and what was counted when the trace
// began.
type watched struct {
	ep      endpoint.Endpoint
	sends   bool // it is From
	counted bool // its rules are, for iptables tells of no single packet
	rules   []ipt.Count
	drops   []api.Drops
}

// Trace begins to tell what becomes of the packets of a flow.
func (e *Engine) Trace(ctx context.Context, req api.TraceRequest, by endpoint.Process) (server.Trace, error) {
	a, b, err := e.readyEnds(req.From, req.To, &req.Port)
	if err != nil {
		return nil, err
	}
	from, sender, to, receiver := a.addr, a.ep, b.addr, b.ep
	proto, ttl, err := traceTerms(req)
	if err != nil {
		return nil, err
	}
	dp, err := e.tracedDatapath(req, sender, receiver)
	if err != nil {
		return nil, err
	}
	node, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	t := &trace{e: e, texts: newRuleTexts(e.firewall.Handles)}
	if e.traces.Add(1) > datapath.MaxTraces {
		t.Close()
		return nil, tooManyTraces()
	}
	if req.Probe {
		if t.probeFrom, err = e.probeFrom(ctx, sender); err != nil {
			t.Close()
			return nil, err
		}
		t.probe = &probe.Packet{From: from, To: to, Protocol: proto, Port: req.Port}
	}
	clock, err := datapath.Clock()
	if err == nil && dp != nil {
		t.dp, err = dp.Trace(datapath.TraceFilter{From: from, To: to, Protocol: proto, Port: req.Port}, ttl)
	}
	if err == nil {
		t.filter, t.unfiltered = e.traceFilter(nftrace.Filter{From: from, To: to, Protocol: uint8(proto), Port: req.Port})
		if t.filter == nil && dp == nil {
			err = api.Errorf(api.FailedPrecondition, "%s, and iptables cannot be followed: %s (`mknetd explain` works without)", noChildPrograms, t.unfiltered)
		}
	}
	if err == nil {
		t.children, err = e.watchChildren(ctx, t.filter == nil, sender, receiver)
	}
	if err != nil {
		t.Close()
		if errors.Is(err, datapath.ErrTraces) {
			err = tooManyTraces()
		}
		return nil, err
	}
	now := time.Now()
	t.begin = api.TraceBegin{At: now, Node: node, From: from, To: to, Protocol: proto.String(), Port: req.Port, Until: now.Add(ttl)}
	t.teller = tracing.New(tracing.Config{
		Node: node, To: to, ToOurs: receiver != nil && (receiver.Mode == endpoint.Veth || e.ebpf.children.Load()),
		Wall: now, Clock: clock, Numbers: e.rules.Numbers(), Rules: e.policyRules,
	})
	e.log.Info("trace", "from", from.String(), "to", to.String(), "proto", proto.String(), "port", req.Port, "probe", req.Probe, "peerPid", by.PID, "peerComm", by.Comm)
	return t, nil
}

func tooManyTraces() error {
	return api.Retryablef(api.ResourceExhausted, "%d traces run, which is all there can be: end one, or wait", datapath.MaxTraces)
}

// traceTerms reads what a request has besides its ends.
func traceTerms(req api.TraceRequest) (policy.Protocol, time.Duration, error) {
	proto := policy.ICMP
	if req.Port != 0 {
		proto = policy.TCP
	}
	if req.Protocol != "" {
		var ok bool
		if proto, ok = policy.ParseProtocol(req.Protocol); !ok || proto == policy.AnyProtocol {
			return 0, 0, api.Errorf(api.InvalidArgument, "protocol %q: must be icmp, tcp, udp, sctp, gre, esp, ah or a number from 0 to 255", req.Protocol)
		}
	}
	ttl := time.Duration(req.TimeoutSeconds) * time.Second
	if ttl == 0 {
		ttl = defaultTraceTime
	}
	switch probed := proto == policy.ICMP || proto == policy.TCP || proto == policy.UDP; {
	case ttl < 0 || ttl > maxTraceTime:
		return 0, 0, api.Errorf(api.InvalidArgument, "timeout %d s: must be 1 to %d", req.TimeoutSeconds, int(maxTraceTime.Seconds()))
	case req.Port != 0 && !proto.HasPorts():
		return 0, 0, api.Errorf(api.InvalidArgument, "port %d: %s has no ports", req.Port, proto)
	case req.Probe && !probed:
		return 0, 0, api.Errorf(api.InvalidArgument, "probe with %s: can be icmp, tcp or udp", proto)
	case req.Probe && proto.HasPorts() && req.Port == 0:
		return 0, 0, api.Errorf(api.InvalidArgument, "probe with %s: needs a port", proto)
	}
	return proto, ttl, nil
}

const noChildPrograms = "the links of child kernels have no programs here: they get them with the node's first ordinary pod or policy"

// tracedDatapath refuses what nobody could tell of. It is nil where only iptables can.
func (e *Engine) tracedDatapath(req api.TraceRequest, ends ...*endpoint.Endpoint) (*datapath.Datapath, error) {
	pods, children := 0, 0
	for _, ep := range ends {
		switch {
		case ep == nil:
		case ep.Mode == endpoint.Veth:
			pods++
		default:
			children++
		}
	}
	switch {
	case pods+children == 0:
		return nil, api.Errorf(api.InvalidArgument, "neither %s nor %s is an endpoint of this node (see `mknetd endpoints`)", req.From, req.To)
	case pods == 0 && !e.ebpf.children.Load():
		return nil, nil
	}
	dp := e.datapath()
	if dp == nil {
		return nil, api.Errorf(api.FailedPrecondition, "there is no eBPF data path that could tell (see `causes` of GET /v1/daemon/health)")
	}
	return dp, nil
}

// probeFrom opens the namespace that a probe is sent from.
func (e *Engine) probeFrom(ctx context.Context, from *endpoint.Endpoint) (*netns.Namespace, error) {
	if from == nil || from.Mode != endpoint.Veth {
		return nil, api.Errorf(api.Unsupported, "a probe is sent by an ordinary pod of this node: send from elsewhere by hand while the trace runs")
	}
	ns, err := e.reopen(ctx, *from)
	if err == nil && ns == nil {
		err = api.Errorf(api.FailedPrecondition, "endpoint %s: its namespace %s is gone", from.Generation, from.Namespace.Path)
	}
	return ns, err
}

// policyRules are the rules of a policy in force, none where it is gone.
func (e *Engine) policyRules(k policy.Key, d policy.Direction) policy.Rules {
	set := e.rules.Set()
	switch k.Kind {
	case policy.KindNetworkACL:
		if acl := set.NetworkACL(k.Name); acl != nil {
			return acl.Rules(d)
		}
	case policy.KindSecurityGroup:
		if group := set.SecurityGroup(k.Name); group != nil {
			return group.Rules(d)
		}
	}
	return policy.Rules{}
}

func (t *trace) Close() { t.over.Do(t.close) }

func (t *trace) close() {
	t.e.traces.Add(-1)
	var errs []error
	if ns := t.probeFrom; ns != nil {
		ns.Close()
	}
	if t.filter != nil {
		errs = append(errs, t.filter.Close())
	}
	if t.dp != nil {
		errs = append(errs, t.dp.Close())
	}
	if err := errors.Join(errs...); err != nil {
		t.e.log.Error("end a trace", "err", err)
	}
}

// events is where what programs do comes from, nil where nothing does.
func (t *trace) events() <-chan datapath.TraceEvent {
	if t.dp == nil {
		return nil
	}
	return t.dp.Events()
}

// Run sends the trace, up to its verdict.
func (t *trace) Run(ctx context.Context, send func(api.TraceLine) error) error {
	ctx, cancel := context.WithDeadline(ctx, t.begin.Until)
	defer cancel()
	defer context.AfterFunc(t.e.ctx, cancel)()
	if err := send(api.TraceLine{Begin: &t.begin}); err != nil {
		return err
	}
	for _, n := range t.startNotes() {
		if err := send(t.note(n.about, n.text)); err != nil {
			return err
		}
	}
	answers, wait := t.sendProbe(ctx)
	defer wait()
	var settled <-chan time.Time
	for {
		select {
		case ev := <-t.events():
			if err := t.tell(ev, send); err != nil {
				return err
			}
		case s, more := <-t.steps():
			if err := t.step(ctx, s, more, send); err != nil {
				return err
			}
		case said := <-answers:
			if err := send(t.note("probe", said)); err != nil {
				return err
			}
			answers, settled = nil, time.After(traceSettle)
		case <-settled:
			return t.end(ctx, send)
		case <-ctx.Done():
			return t.end(ctx, send)
		}
	}
}

func (t *trace) tell(ev datapath.TraceEvent, send func(api.TraceLine) error) error {
	out, news := t.teller.Event(ev)
	if !news {
		return nil
	}
	return send(api.TraceLine{Event: &out})
}

func (t *trace) note(about, text string) api.TraceLine {
	return api.TraceLine{Note: &api.TraceNote{At: time.Now(), Node: t.begin.Node, About: about, Text: text}}
}

// sendProbe sends the packet, where one is asked for, and says what came of it. wait
// waits until nothing is left of it.
func (t *trace) sendProbe(ctx context.Context) (answers <-chan string, wait func()) {
	if t.probe == nil {
		return nil, func() {}
	}
	said, done := make(chan string, 1), make(chan struct{})
	go func() {
		defer close(done)
		p, err := probe.Send(t.probeFrom, *t.probe)
		if err != nil {
			said <- err.Error()
			return
		}
		text, err := p.Answer(ctx)
		if err != nil {
			text = err.Error()
		}
		said <- fmt.Sprintf("%s from %s to %s: %s", t.probe.Protocol, t.probe.From, t.probe.To, text)
	}()
	return said, func() { <-done }
}

// end sends what is still there, what others have stopped, and the verdict.
func (t *trace) end(ctx context.Context, send func(api.TraceLine) error) error {
	for waiting := true; waiting; {
		select {
		case ev := <-t.events():
			if err := t.tell(ev, send); err != nil {
				return err
			}
		case s, more := <-t.steps():
			if err := t.step(ctx, s, more, send); err != nil {
				return err
			}
		default:
			waiting = false
		}
	}
	left, lost := t.filtered()
	notes, stops := t.e.stopped(t.children)
	notes = append(left, notes...)
	for _, n := range notes {
		if err := send(t.note(n.about, n.text)); err != nil {
			return err
		}
	}
	if t.dp != nil {
		n, err := t.dp.Lost()
		if err != nil {
			t.e.log.Error("read how many events of a trace are lost", "err", err)
		}
		lost += n
	}
	end := t.teller.End(time.Now(), lost, stops)
	return send(api.TraceLine{End: &end})
}
