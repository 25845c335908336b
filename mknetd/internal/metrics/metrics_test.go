package metrics

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

var update = flag.Bool("update", false, "rewrite the table in spec/metrics.md")

func TestMain(m *testing.M) { netlab.Main(m) }

// source has every figure set.
type source struct {
	health api.Health
	stats  Stats
}

func (s *source) Health(context.Context) api.Health { return s.health }
func (s *source) Stats(context.Context) Stats       { return s.stats }
func (s *source) Config(context.Context) api.DaemonConfig {
	return api.DaemonConfig{Firewall: "nft", Egress: "ens4", EgressAddr: netip.MustParseAddr("192.0.2.1")}
}

func full() *source {
	return &source{
		health: api.Health{Ready: true, Version: "v1", Causes: []api.HealthCause{
			{Code: "pod-pool-overlap", Message: "pool a"}, {Code: "pod-pool-overlap", Message: "pool b"}, {Code: "degraded", Message: "1 endpoint"},
		}},
		stats: Stats{
			Endpoints: map[EndpointKind]int{
				{endpoint.Multikernel, endpoint.Ready, false, true}:      3,
				{endpoint.Multikernel, endpoint.Ready, true, false}:      2,
				{endpoint.Veth, endpoint.Deleting, false, false}:         1,
				{endpoint.Multikernel, endpoint.Allocating, true, false}: 1, // never a degraded one
			},
			Pools:   []Pool{{"", 5, 2, 9}, {"pods", 1, 0, 3}},
			Faults:  map[FaultKind]uint64{{"route", ByCheck}: 4},
			Repairs: map[RepairKind]uint64{{"route", false}: 2, {"iptables", true}: 1},
			Audits:  7, AuditTime: 3 * time.Second, AuditFailures: 1, LastAudit: time.Unix(1000, 0),
			DeferredDels: 2, DeferredOldest: time.Minute, StoreBytes: 4096, Flows: Flows{10, 100}, Policy: Policy{map[string]uint64{"acl drop": 4}, 8},
			Path: map[string]PathCount{"peer": {3, 300}, "drop-mac": {1, 60}},
			Pump: api.Counters{RxPackets: 1, RxBytes: 2, TxPackets: 3, TxBytes: 4, Sessions: 5, RTTNanoseconds: 2e6, Drops: []api.Drops{{Reason: "mtu", Packets: 6}}},
		},
	}
}

// gathered is what a Set exports, by name.
func gathered(t *testing.T, s *Set) map[string]*dto.MetricFamily {
	t.Helper()
	list, err := s.Registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]*dto.MetricFamily{}
	for _, f := range list {
		found[f.GetName()] = f
	}
	return found
}

// units are what a name may end in.
var units = []string{"_info", "_bool", "_seconds", "_bytes", "_total", "_endpoints", "_addresses", "_entries", "_causes", "_dels", "_followers"}

// The table, its document and what is exported are the same.
func TestExportedIsTheTable(t *testing.T) {
	s := New(full())
	s.Call("GET /v1/endpoints", "", time.Second)
	s.Call("other", "NOT_FOUND", -1)
	found := gathered(t, s)
	for _, m := range Table() {
		f := found[m.Name]
		delete(found, m.Name)
		if f == nil {
			t.Errorf("%s: is not exported", m.Name)
			continue
		}
		if kind := strings.ToLower(f.GetType().String()); kind != m.Kind || f.GetHelp() != m.Help {
			t.Errorf("%s: is a %s (%s), the table says %s", m.Name, kind, f.GetHelp(), m.Kind)
		}
		for _, one := range f.GetMetric() {
			var labels []string
			for _, l := range one.GetLabel() {
				labels = append(labels, l.GetName())
			}
			if want := slices.Sorted(slices.Values(m.Labels)); !slices.Equal(labels, want) {
				t.Errorf("%s: has labels %v, the table says %v", m.Name, labels, want)
			}
		}
		if m.Name != endpoints.Name && !slices.ContainsFunc(units, func(u string) bool { return strings.HasSuffix(m.Name, u) }) {
			t.Errorf("%s: does not end in a unit", m.Name)
		}
		if (len(m.Labels) > 0) != (m.Bound != "") && !strings.HasSuffix(m.Name, "_info") {
			t.Errorf("%s: labels %v, bound %q", m.Name, m.Labels, m.Bound)
		}
	}
	for name := range found {
		if !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
			t.Errorf("%s: is not in the table", name)
		}
	}
}

func TestFigures(t *testing.T) {
	s := New(full())
	s.Call("GET /v1/endpoints", "", 10*time.Millisecond)
	recorded := gathered(t, s)
	for _, c := range []struct {
		metric string
		labels string // values in the order of label names
		want   float64
	}{
		{"mknet_ready_bool", "", 1},
		{"mknet_build_info", "nft,v1", 1},
		{"mknet_health_causes", "false,pod-pool-overlap", 2},
		{"mknet_endpoints", "multikernel,READY", 5},
		{"mknet_endpoints", "veth,READY", 0},
		{"mknet_endpoints", "veth,DELETING", 1},
		{"mknet_degraded_endpoints", "multikernel", 2},
		{"mknet_bound_endpoints", "", 3},
		{"mknet_pool_addresses", ",free", 9},
		{"mknet_pool_addresses", "pods,used", 1},
		{"mknet_faults_found_total", "check,route", 4},
		{"mknet_repairs_total", "iptables,failed", 1},
		{"mknet_audit_last_success_timestamp_seconds", "", 1000},
		{"mknet_datapath_packets_total", "peer", 3},
		{"mknet_datapath_bytes_total", "drop-mac", 60},
		{"mknet_pump_packets_total", "to_child", 3},
		{"mknet_pump_dropped_packets_total", "mtu", 6},
		{"mknet_pump_round_trip_max_seconds", "", .002},
		{"mknet_api_calls_total", "OK,GET /v1/endpoints", 1},
	} {
		got, found := 0.0, false
		for _, one := range recorded[c.metric].GetMetric() {
			var values []string
			for _, l := range one.GetLabel() {
				values = append(values, l.GetValue())
			}
			if strings.Join(values, ",") == c.labels {
				got, found = one.GetGauge().GetValue()+one.GetCounter().GetValue(), true
			}
		}
		if !found || got != c.want {
			t.Errorf("%s{%s}: got %v (found: %v), want %v", c.metric, c.labels, got, found, c.want)
		}
	}
}

// A shim names its reasons: however many it thinks of, the series are bounded.
func TestReasonsAreBounded(t *testing.T) {
	src := full()
	src.stats.Pump.Drops = nil
	for i := range 500 {
		src.stats.Pump.Drops = append(src.stats.Pump.Drops, api.Drops{Reason: fmt.Sprintf("r%03d", i), Packets: 1})
	}
	series := gathered(t, New(src))[pumpDrops.Name].GetMetric()
	if len(series) != maxReasons+1 {
		t.Errorf("%d series, want %d", len(series), maxReasons+1)
	}
}

const (
	tableBegin = "<!-- table of metrics: go test ./mknetd/internal/metrics -run Documented -update -->\n"
	tableEnd   = "<!-- end of the table of metrics -->\n"
)

func TestTableIsDocumented(t *testing.T) {
	const file = "../../../spec/metrics.md"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, found := strings.Cut(string(text), tableBegin)
	have, tail, ended := strings.Cut(rest, tableEnd)
	if !found || !ended {
		t.Fatalf("%s has no place for the table", file)
	}
	want := "\n| metric | type | labels | series | meaning |\n|---|---|---|---|---|\n"
	for _, m := range Table() {
		series := m.Bound
		if series == "" {
			series = "1"
		}
		want += fmt.Sprintf("| `%s` | %s | %s | %s | %s |\n", m.Name, m.Kind, strings.Join(m.Labels, ", "), series, m.Help)
	}
	want += "\n"
	switch {
	case have == want:
	case *update:
		if err := os.WriteFile(file, []byte(head+tableBegin+want+tableEnd+tail), 0o644); err != nil {
			t.Fatal(err)
		}
	default:
		t.Fatalf("the table in %s is stale (run with -update); want\n%s", file, want)
	}
}

// late is a listener that lets its first caller in only once it was told to close.
type late struct {
	net.Listener
	closed   chan struct{}
	accepted chan struct{}
	once     sync.Once // of the first caller
	ends     sync.Once
}

func (l *late) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.once.Do(func() {
		close(l.accepted)
		<-l.closed
	})
	return c, nil
}

func (l *late) Close() error {
	defer l.ends.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// slow takes its time over a question, and notes that it has answered.
type slow struct {
	source
	answered atomic.Bool
}

func (s *slow) Health(context.Context) api.Health {
	time.Sleep(100 * time.Millisecond)
	s.answered.Store(true)
	return api.Health{Ready: true}
}

// The process may end after Close: who was accepted just before it is answered.
func TestCloseWaitsForTheLastCaller(t *testing.T) {
	tcp, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, src := &late{Listener: tcp, closed: make(chan struct{}), accepted: make(chan struct{})}, &slow{}
	m := New(src).serve(l, slog.New(slog.DiscardHandler))
	c, err := new(net.Dialer).DialContext(t.Context(), "tcp", tcp.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	<-l.accepted
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if !src.answered.Load() {
		t.Error("Close did not wait for a caller who was let in")
	}
	if answer, err := io.ReadAll(c); err != nil || !strings.Contains(string(answer), " 200 ") {
		t.Errorf("answer %q, %v; want 200", answer, err)
	}
}

func TestListener(t *testing.T) {
	src := full()
	log := slog.New(slog.DiscardHandler)
	for _, address := range []string{"0.0.0.0:0", "192.0.2.1:9464", "[::]:0", "localhost:0", ":0", "127.0.0.1"} {
		if l, err := New(src).Listen(context.Background(), address, log); err == nil {
			l.Close()
			t.Errorf("%s: was accepted", address)
		}
	}
	first := New(src)
	l, err := first.Listen(context.Background(), "127.0.0.1:0", log)
	if err != nil {
		t.Fatal(err)
	}
	get := func(path string) (int, string) {
		t.Helper()
		resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(httptest.NewRequest(http.MethodGet, "http://"+l.Addr().String()+path, nil))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(body)
	}
	if status, body := get("/metrics"); status != 200 || !strings.Contains(body, "mknet_bound_endpoints 3\n") {
		t.Errorf("/metrics: %d\n%s", status, body)
	}
	if status, body := get("/readyz"); status != 200 || !strings.Contains(body, "degraded: 1 endpoint\n") {
		t.Errorf("/readyz: %d %s", status, body)
	}
	src.health = api.Health{Causes: []api.HealthCause{{Code: "egress-missing", Message: "no route", Blocks: true}}}
	if status, body := get("/readyz"); status != 503 || body != "not ready\negress-missing: no route\n" {
		t.Errorf("/readyz: %d %s", status, body)
	}
	if status, body := get("/healthz"); status != 200 || body != "ok\n" {
		t.Errorf("/healthz: %d %s", status, body)
	}
	if status, _ := get("/v1/endpoints"); status != 404 {
		t.Errorf("a route of the API: %d", status)
	}
	// Another process goes on with the socket while this one repeats its last answers.
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	src.health = api.Health{Ready: true}
	first.Freeze(context.Background())
	src.health, src.stats = api.Health{}, Stats{}
	if status, body := get("/metrics"); status != 200 || !strings.Contains(body, "mknet_bound_endpoints 3\n") || !strings.Contains(body, "mknet_ready_bool 1\n") {
		t.Errorf("/metrics, frozen: %d\n%s", status, body)
	}
	if status, body := get("/readyz"); status != 200 || body != "ok\n" {
		t.Errorf("/readyz, frozen: %d %s", status, body)
	}
	next, err := New(full()).Inherit(f, log)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if status, body := get("/metrics"); status != 200 || !strings.Contains(body, "mknet_bound_endpoints 3\n") {
		t.Errorf("/metrics of the next: %d\n%s", status, body)
	}
	if err := errors.Join(next.Close(), f.Close()); err != nil {
		t.Error(err)
	}
	again, err := New(src).Listen(context.Background(), l.Addr().String(), log)
	if err != nil {
		t.Fatalf("the port is not free after Close: %v", err)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
}
