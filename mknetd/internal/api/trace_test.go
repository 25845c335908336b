package api_test

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"mknet/mknetd/internal/api"
	specapi "mknet/spec/api"
	"mknet/spec/endpoint"
)

// fakeTrace sends its lines, and then waits where it has no end.
type fakeTrace struct {
	lines  []specapi.TraceLine
	closed *sync.WaitGroup
}

func (f *fakeTrace) Run(ctx context.Context, send func(specapi.TraceLine) error) error {
	for _, l := range f.lines {
		if err := send(l); err != nil || l.End != nil {
			return err
		}
	}
	<-ctx.Done()
	return nil
}

func (f *fakeTrace) Close() { f.closed.Done() }

var traced = func() []specapi.TraceLine {
	a, now := netip.MustParseAddr("192.0.2.1"), time.Now()
	return []specapi.TraceLine{
		{Begin: &specapi.TraceBegin{At: now, Node: "n", From: a, To: a, Protocol: "tcp", Port: 80, Until: now}},
		{Event: &specapi.TraceEvent{
			At: now, Node: "n", Packet: 1, Hook: "from_container", Point: "egress", Endpoint: a, Code: 301, Name: "acl drop", Source: a, Destination: a,
			SourcePort: 1, DestinationPort: 80, TCPFlags: "SYN", Bytes: 60, Outcome: "drop-acl", Policy: "NetworkACL/a", Rule: "spec.egress[0]",
		}},
		{Event: &specapi.TraceEvent{At: now, Node: "n", Packet: 2, Hook: "to_child", Code: 100, Name: "entered", Source: a, Destination: a, Reply: true}},
		{Note: &specapi.TraceNote{At: now, Node: "n", About: "iptables", Text: "t"}},
		{End: &specapi.TraceEnd{At: now, Verdict: specapi.Dropped, Because: "b", Events: 2, Lost: 1}},
	}
}()

func (f *fake) Trace(_ context.Context, req specapi.TraceRequest, _ endpoint.Process) (api.Trace, error) {
	if req.From == "nobody" {
		return nil, specapi.Errorf(specapi.ResourceExhausted, "16 traces run")
	}
	lines := traced
	if req.TimeoutSeconds == 600 {
		lines = traced[:2]
	}
	f.traces.Add(1)
	return &fakeTrace{lines, &f.traces}, nil
}

func TestTrace(t *testing.T) {
	engine := &fake{}
	s := serve(t, engine)
	c := s.client(t)
	var got []specapi.TraceLine
	err := c.Trace(context.Background(), specapi.TraceRequest{From: "a", To: "b"}, func(l specapi.TraceLine) error { got = append(got, l); return nil })
	if err != nil || len(got) != len(traced) || got[1].Event.Rule != "spec.egress[0]" || got[4].End.Because != "b" {
		t.Errorf("%d lines, %v", len(got), err)
	}
	engine.traces.Wait() // closed after its end
	err = c.Trace(context.Background(), specapi.TraceRequest{From: "nobody", To: "b"}, nil)
	if specapi.CodeOf(err) != specapi.ResourceExhausted {
		t.Errorf("one that is refused: %v", err)
	}
	// The caller goes away in the middle.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	err = c.Trace(ctx, specapi.TraceRequest{From: "a", To: "b", TimeoutSeconds: 600}, func(l specapi.TraceLine) error {
		if l.Event != nil {
			cancel()
		}
		return nil
	})
	if err == nil {
		t.Error("a trace without its end succeeds")
	}
	engine.traces.Wait()
	stop := errors.New("enough")
	if err := c.Trace(context.Background(), specapi.TraceRequest{From: "a", To: "b"}, func(specapi.TraceLine) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("the caller's own error: %v", err)
	}
	engine.traces.Wait()
	if status, _, body := s.do(t, "POST", "/v1/trace", `{"from":"a","to":"b","colour":"red"}`); status != 400 || !strings.Contains(string(body), "colour") {
		t.Errorf("an unknown field: %d %s", status, body)
	}
}
