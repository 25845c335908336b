package operate

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// denied forbids what comes in, to all endpoints.
const denied = `
{apiVersion: mknet/v1, kind: NetworkACL, metadata: {name: shut}, spec: {ingress: [{priority: 10, action: deny, protocol: icmp}, {priority: 20, action: allow}]}}
---
{apiVersion: mknet/v1, kind: Attachment, metadata: {name: shut}, spec: {networkACLRef: {name: shut}, pools: [children, pods]}}
`

// What somebody deletes from the policy maps lets packets pass that no rule allows:
// the audit puts it back, tells of it once and counts it.
func TestPolicyEntryIsMended(t *testing.T) {
	n := node.New(t, "metricsAddress: 127.0.0.1:9464", "auditInterval: 300ms", "pools: [{name: pods, prefix: 10.90.0.0/24}]")
	if err := os.WriteFile(n.Dir+"/policy.yaml", []byte(denied), 0o600); err != nil {
		t.Fatal(err)
	}
	netlab.Run(t, n.Daemon, "policy", "apply", "--config", n.Config, "-f", n.Dir+"/policy.yaml")
	w := follow(t, n)
	one, two := netlab.New(t), netlab.New(t)
	pods := []endpoint.Endpoint{n.AddPod(t, "p1", one), n.AddPod(t, "p2", two)}
	if _, err := one.Try("ping", "-c1", "-W1", pods[1].Address.String()); err == nil {
		t.Fatal("the policy is not in force")
	}
	pinned, err := filepath.Glob("/sys/fs/bpf/mknet-*/maps/policy_points")
	if err != nil || len(pinned) != 1 {
		t.Fatalf("%v, %v", pinned, err)
	}
	points, err := ebpf.LoadPinnedMap(pinned[0], nil)
	if err != nil {
		t.Fatal(err)
	}
	defer points.Close()
	for _, p := range pods {
		if err := points.Delete(p.Address.As4()); err != nil {
			t.Fatal(err)
		}
		w.until(t, "policy of "+p.Address.String()+" is repaired", func(ev api.Event) bool {
			return ev.What == api.ObjectRepaired && ev.Object.Kind == "policy" && ev.Object.Name == p.Address.String() && strings.HasPrefix(ev.Details["was"], "missing")
		})
	}
	if _, err := one.Try("ping", "-c1", "-W1", pods[1].Address.String()); err == nil {
		t.Error("the policy is not in force again")
	}
	for _, p := range pods {
		if err := n.Check(t, p); err != nil {
			t.Errorf("CHECK: %v", err)
		}
		told := 0
		for _, ev := range w.events() {
			if ev.What == api.ObjectRepaired && ev.Generation == p.Generation {
				told++
			}
		}
		if told != 1 {
			t.Errorf("%s: %d repairs were told, want 1", p.Address, told)
		}
	}
	netlab.Eventually(t, node.Patience, func() error {
		status, text := get(t, "http://127.0.0.1:9464/metrics")
		if want := `mknet_repairs_total{kind="policy",result="ok"} 2`; status != http.StatusOK || !strings.Contains(text, want) {
			return fmt.Errorf("%d, lacks %s", status, want)
		}
		return nil
	})
}

// With nodeProbes both explanations let pass what the node itself sends, as the
// programs do, and nothing else.
func TestExplanationsKnowProbes(t *testing.T) {
	n := node.New(t, "nodeProbes: allow", "auditInterval: 0s", "pools: [{name: pods, prefix: 10.90.0.0/24}]")
	if err := os.WriteFile(n.Dir+"/policy.yaml", []byte(denied), 0o600); err != nil {
		t.Fatal(err)
	}
	netlab.Run(t, n.Daemon, "policy", "apply", "--config", n.Config, "-f", n.Dir+"/policy.yaml")
	one := netlab.New(t)
	a, b := n.AddPod(t, "p1", one), n.AddPod(t, "p2", netlab.New(t))
	to := b.Address.String()
	for _, c := range []struct {
		name, from string
		ping       func(args ...string) error
		reaches    bool
	}{
		{"the node", netlab.HostAddr, func(args ...string) error { _, err := netlab.Try("ping", args...); return err }, true},
		{"a pod", a.Address.String(), func(args ...string) error { _, err := one.Try("ping", args...); return err }, false},
	} {
		wait := map[bool]string{true: "20", false: "1"}[c.reaches]
		if err := c.ping("-c1", "-W"+wait, to); (err == nil) != c.reaches {
			t.Errorf("%s: ping: %v", c.name, err)
		}
		says, err := n.Client(t).ExplainPolicy(within(t), api.ExplainRequest{From: c.from, To: to, Protocol: "icmp"})
		if err != nil || says.Allowed != c.reaches {
			t.Errorf("%s: policy explain: %+v, %v", c.name, says, err)
		}
		if point := says.Points[len(says.Points)-1]; c.reaches && point.Steps[len(point.Steps)-1].Reason != 307 {
			t.Errorf("%s: policy explain: %+v", c.name, point)
		}
		way, err := n.Client(t).Explain(within(t), api.WayRequest{From: c.from, To: to})
		if err != nil || (way.Verdict == api.Passes) != c.reaches {
			t.Errorf("%s: explain: %s: %s, %v", c.name, way.Verdict, way.Because, err)
		}
	}
}
