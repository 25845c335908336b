package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"net/netip"
	"strings"
	"testing"
	"time"

	"mknet/mknetd/internal/api"
	specapi "mknet/spec/api"
	"mknet/spec/endpoint"
)

// told is a trace with these lines.
type told []specapi.TraceLine

func (l told) Run(_ context.Context, send func(specapi.TraceLine) error) error {
	for _, line := range l {
		if err := send(line); err != nil {
			return err
		}
	}
	return nil
}

func (told) Close() {}

func (d *daemon) Trace(_ context.Context, req specapi.TraceRequest, _ endpoint.Process) (api.Trace, error) {
	if req.To == "nobody" {
		return nil, specapi.Errorf(specapi.ResourceExhausted, "16 traces run")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.traced = req
	a, b, at := netip.MustParseAddr("10.88.0.2"), netip.MustParseAddr("10.88.0.3"), time.Date(2026, 1, 2, 3, 4, 5, 6000, time.Local)
	event := func(packet int, code uint16, name string) *specapi.TraceEvent {
		return &specapi.TraceEvent{At: at, Node: "n1", Packet: packet, Hook: "from_container", Code: code, Name: name, Source: a, Destination: b, SourcePort: 40000, DestinationPort: 80, TCPFlags: "SYN", Bytes: 74}
	}
	first, last := event(1, 301, "acl drop"), event(1, 503, "dropped")
	first.Point, first.Endpoint, first.Policy, first.Rule = "egress", a, "NetworkACL/wall", "spec.egress[0]"
	last.Outcome = "drop-acl"
	other := event(2, 100, "entered")
	other.Reply, other.SourcePort, other.TCPFlags = true, 0, ""
	passed, refused := event(3, 400, "iptables pass"), event(3, 401, "iptables drop")
	passed.Hook, passed.Table, passed.Chain, passed.Rule, passed.Verdict = "iptables", "raw", "PREROUTING", "policy", "accept"
	refused.Hook, refused.Table, refused.Chain, refused.Number, refused.Rule, refused.Handle, refused.Verdict = "iptables", "filter", "MK-1", 7, "-j DROP", 31, "drop"
	return told{
		{Begin: &specapi.TraceBegin{At: at, Node: "n1", From: a, To: b, Protocol: "tcp", Port: req.Port, Until: at.Add(10 * time.Second)}},
		{Event: event(1, 100, "entered")},
		{Event: first},
		{Event: last},
		{Event: other},
		{Event: passed},
		{Event: refused},
		{Note: &specapi.TraceNote{At: at, Node: "n1", About: "probe", Text: "no answer"}},
		{End: &specapi.TraceEnd{At: at, Verdict: d.verdict, Because: "so it is", Events: 4, Lost: 7}},
	}, nil
}

func TestTrace(t *testing.T) {
	d := &daemon{verdict: specapi.Dropped}
	flags := started(t, d)
	ask := func(args ...string) (int, string, string) {
		return run(t, Program{}, append(append([]string{"trace"}, args...), flags...)...)
	}
	status, out, _ := ask("--from", "default/web", "--to", "10.88.0.3", "--port", "80", "--proto", "tcp", "--probe", "--timeout", "3s")
	want := `10.88.0.2 -> 10.88.0.3 tcp port 80, on n1 until 03:04:15

03:04:05.000006 n1 from_container  packet 1  10.88.0.2:40000 -> 10.88.0.3:80 SYN, 74 bytes
  |- 100 entered
  |- 301 acl drop (egress of 10.88.0.2) NetworkACL/wall spec.egress[0]
  ` + "`" + `- 503 dropped [drop-acl]

03:04:05.000006 n1 from_container  packet 2, an answer  10.88.0.2 -> 10.88.0.3:80, 74 bytes
  |- 100 entered

03:04:05.000006 n1 iptables  packet 3  10.88.0.2:40000 -> 10.88.0.3:80 SYN, 74 bytes
  |- 400 iptables pass raw PREROUTING policy [accept]
  ` + "`" + `- 401 iptables drop filter MK-1 7: -j DROP [drop]

03:04:05.000006 n1 probe: no answer

DROPPED: so it is
4 events, 7 more were lost: there was no room for them
`
	if status != ExitDiffers || out != want {
		t.Errorf("status %d, got\n%s\nwant\n%s", status, out, want)
	}
	if want := (specapi.TraceRequest{From: "default/web", To: "10.88.0.3", Protocol: "tcp", Port: 80, Probe: true, TimeoutSeconds: 3}); d.traced != want {
		t.Errorf("asked for %+v, want %+v", d.traced, want)
	}
	d.set(func() { d.verdict = specapi.Passes })
	status, out, _ = ask("--from", "a", "--to", "b", "-o", "json")
	lines := 0
	for s := bufio.NewScanner(strings.NewReader(out)); s.Scan(); lines++ {
		var l specapi.TraceLine
		if err := json.Unmarshal(s.Bytes(), &l); err != nil {
			t.Errorf("%s: %v", s.Text(), err)
		}
	}
	if status != ExitOK || lines != 9 {
		t.Errorf("as JSON: status %d, %d lines", status, lines)
	}
	for _, c := range []struct {
		args   []string
		status int
		words  string
	}{
		{[]string{"--from", "a"}, ExitUsage, `required flag(s) "to"`},
		{[]string{"--from", "a", "--to", "b", "--port", "70000"}, ExitUsage, "--port"},
		{[]string{"--from", "a", "--to", "b", "--timeout", "10ms"}, ExitUsage, "must be whole seconds"},
		{[]string{"--from", "a", "--to", "b", "-o", "yaml"}, ExitUsage, "must be tree or json"},
		{[]string{"--from", "a", "--to", "nobody"}, ExitRefused, "16 traces run"},
	} {
		if status, _, errs := ask(c.args...); status != c.status || !strings.Contains(errs, c.words) {
			t.Errorf("%v: status %d, %s", c.args, status, errs)
		}
	}
}
