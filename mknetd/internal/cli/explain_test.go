package cli

import (
	"context"
	"net/netip"
	"strings"
	"testing"

	specapi "mknet/spec/api"
	"mknet/spec/endpoint"
)

func (d *daemon) Explain(_ context.Context, req specapi.WayRequest) (specapi.Explanation, error) {
	if req.To == "nobody" {
		return specapi.Explanation{}, specapi.Errorf(specapi.InvalidArgument, "to %q: is neither", req.To)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked = req
	x := specapi.Explanation{
		From: netip.MustParseAddr("172.30.0.2"), To: netip.MustParseAddr("198.51.100.1"), Protocol: "tcp", Port: 443, SourcePort: 40312, SizeBytes: req.SizeBytes, Verdict: d.verdict, Because: "so it is",
		Way: []specapi.ExplainStep{
			{Where: "child", Object: "route default", Outcome: specapi.Passes, Why: "as configured"},
			{
				Where: endpoint.InHost, Object: "iptables filter FORWARD", Outcome: specapi.Dropped, Why: "MK-1 2: -j DROP", Inspect: "iptables -S MK-1",
				Rules: []specapi.Rule{{Chain: "MK-1", Number: 1, Text: "-o x -j ACCEPT", Matches: "no"}, {Chain: "MK-1", Number: 2, Text: "-j DROP", Matches: "yes"}},
			},
		},
		NotJudged: []specapi.ExplainStep{{Where: endpoint.InHost, Object: "nftables inet fw f", Outcome: specapi.Unknown, Why: "it may decide", Inspect: "nft list chain inet fw f"}},
		Faults:    []endpoint.Fault{{Kind: "mtu", Object: "eth0", Where: endpoint.InNamespace, Problem: "mtu is 9", Inspect: "ip link show eth0"}},
	}
	return x, nil
}

func TestExplain(t *testing.T) {
	d := &daemon{verdict: specapi.Dropped}
	flags := started(t, d)
	ask := func(args ...string) (int, string, string) {
		return run(t, Program{}, append(append([]string{"explain"}, args...), flags...)...)
	}
	status, out, _ := ask("--from", "c1", "--to", "198.51.100.1:443")
	for _, want := range []string{
		"172.30.0.2 -> 198.51.100.1 tcp port 443 from port 40312\n", "ok     child      route default: as configured", "DROP   host       iptables filter FORWARD",
		"MK-1 2: -j DROP  (yes)", "$ iptables -S MK-1", "mtu eth0 (namespace): mtu is 9", "otherwise\n  nftables inet fw f (host): it may decide\n      $ nft list chain inet fw f\n", "DROPPED: so it is",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("lacks %q:\n%s", want, out)
		}
	}
	if status != ExitDiffers || strings.Contains(out, "-o x -j ACCEPT") || strings.Contains(out, "and its answer") {
		t.Errorf("status %d\n%s", status, out)
	}
	if _, out, _ := ask("--from", "c1", "--to", "198.51.100.1", "--rules"); !strings.Contains(out, "MK-1 1: -o x -j ACCEPT  (no)") {
		t.Errorf("--rules:\n%s", out)
	}
	if _, out, _ := ask("--from", "c1:40312", "--to", "198.51.100.1:443", "--size", "1400"); !strings.Contains(out, "from port 40312, 1400 bytes\n") {
		t.Errorf("one flow, long:\n%s", out)
	}
	if want := (specapi.WayRequest{From: "c1:40312", To: "198.51.100.1:443", SizeBytes: 1400}); d.asked != want { // mknetd takes the ports off
		t.Errorf("asked for %+v, want %+v", d.asked, want)
	}
	d.set(func() { d.verdict = specapi.Passes })
	if status, out, _ := ask("--from", "c1", "--to", "198.51.100.1", "-o", "json"); status != ExitOK || !strings.Contains(out, `"verdict": "passes"`) {
		t.Errorf("status %d\n%s", status, out)
	}
	for _, c := range []struct {
		args   []string
		status int
		words  string
	}{
		{[]string{"--from", "c1"}, ExitUsage, `required flag(s) "to"`},
		{[]string{"--from", "c1", "--to", "198.51.100.1", "--size", "70000"}, ExitRefused, "size"},
		{[]string{"--from", "c1", "--to", "nobody"}, ExitRefused, "is neither"},
	} {
		if status, _, errs := ask(c.args...); status != c.status || !strings.Contains(errs, c.words) {
			t.Errorf("%v: status %d, %s", c.args, status, errs)
		}
	}
}
