package operate

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// documented are the names in the table of spec/metrics.md.
func documented(t *testing.T) map[string]bool {
	t.Helper()
	text, err := os.ReadFile("../../spec/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(mknet_[a-z_]+)` \\|").FindAllStringSubmatch(string(text), -1) {
		names[m[1]] = true
	}
	return names
}

// sometimes are metrics that have no series while nothing is wrong, or without any
// policy.
var sometimes = map[string]bool{
	"mknet_health_causes": true, "mknet_faults_found_total": true, "mknet_repairs_total": true, "mknet_pump_dropped_packets_total": true,
	"mknet_policy_packets_total": true,
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// A running mknetd exports what the document says, on its socket and on loopback,
// and the figures are those of the node. A daemon that takes over gets the port.
func TestMetricsOfARunningDaemon(t *testing.T) {
	const base = "http://127.0.0.1:9464"
	n := node.New(t, "metricsAddress: 127.0.0.1:9464", "auditInterval: 300ms", "pools: [{name: pods, prefix: 10.90.0.0/24}]")
	ep := n.Add(t, "c1", netlab.New(t), "eth0")
	p1, p2 := netlab.New(t), netlab.New(t)
	n.AddPod(t, "p1", p1)
	other := n.AddPod(t, "p2", p2)
	p1.Run(t, "ping", "-c3", "-i0.2", "-W10", other.Address.String())
	netlab.Run(t, "ip", "route", "del", ep.Subnet.String())
	var text string
	netlab.Eventually(t, node.Patience, func() error {
		_, text = get(t, base+"/metrics")
		for _, want := range []string{
			`mknet_endpoints{mode="multikernel",state="READY"} 1`, `mknet_endpoints{mode="veth",state="READY"} 2`, `mknet_pool_addresses{pool="pods",use="used"} 2`, `mknet_datapath_packets_total{outcome="drop-mac"} 0`,
			`mknet_faults_found_total{by="audit",kind="route"} 1`, `mknet_repairs_total{kind="route",result="ok"} 1`, "mknet_ready_bool 1",
			`mknet_api_calls_total{code="OK",route="POST /v1/endpoints"} 3`, "mknet_audit_last_success_timestamp_seconds",
		} {
			if !strings.Contains(text, want) {
				return fmt.Errorf("lacks %s:\n%s", want, text)
			}
		}
		return nil
	})
	redirected := regexp.MustCompile(`(?m)^mknet_datapath_packets_total\{outcome="(?:peer|redirect)"\} ([1-9]\d*)$`).FindStringSubmatch(text)
	if redirected == nil || len(redirected[1]) > 1 {
		t.Errorf("three echo requests and their answers between pods were redirected, the metrics have %q:\n%s", redirected, text)
	}
	names := documented(t)
	if len(names) < 25 {
		t.Fatalf("only %d metrics are documented", len(names))
	}
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (mknet_[a-z_]+) `).FindAllStringSubmatch(text, -1) {
		if !names[m[1]] {
			t.Errorf("%s: is exported and not documented", m[1])
		}
		delete(names, m[1])
	}
	for name := range names {
		if !sometimes[name] {
			t.Errorf("%s: is documented and not exported", name)
		}
	}
	bySocket, err := n.Client(t).Metrics(within(t))
	if err != nil || !strings.Contains(string(bySocket), "mknet_repairs_total") {
		t.Errorf("on the socket: %v\n%s", err, bySocket)
	}
	if status, body := get(t, base+"/readyz"); status != http.StatusOK || body != "ok\n" {
		t.Errorf("/readyz: %d %s", status, body)
	}
	if out := netlab.Run(t, n.Daemon, "top", "--config", n.Config, "--pages", "1", "--sort", "name"); !strings.Contains(out, "mknet/c1/eth0") || !strings.Contains(out, "mknet/p1/eth0") {
		t.Errorf("top:\n%s", out)
	}
	netlab.Run(t, "ip", "route", "del", "default")
	netlab.Eventually(t, node.Patience, func() error {
		if status, body := get(t, base+"/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(body, "egress-missing") {
			return fmt.Errorf("/readyz without an egress: %d %s", status, body)
		}
		return nil
	})
	netlab.Run(t, "ip", "route", "add", "default", "via", netlab.InternetAddr, "dev", netlab.UplinkName)
	n.Stop(t)
	n.Start(t)
	netlab.Eventually(t, node.Patience, func() error {
		if status, body := get(t, base+"/healthz"); status != http.StatusOK {
			return fmt.Errorf("after a restart: %d %s", status, body)
		}
		return nil
	})
}
