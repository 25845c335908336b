// Package metrics exports what mknetd knows as Prometheus metrics, and serves
// health and readiness beside them. It owns names, labels and their bounds
// (spec/metrics.md); the figures are the engine's and the API server's. Nothing in
// it is touched by a packet, and a scrape waits for no lock that is held across
// kernel work.
package metrics

import (
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// Kinds of metrics, as the text format names them.
const (
	Gauge     = "gauge"
	Counter   = "counter"
	Histogram = "histogram"
	Summary   = "summary"
)

// Metric describes one exported metric.
type Metric struct {
	Name   string
	Kind   string
	Labels []string
	Help   string
	Bound  string // how many series there can be, for who sizes a Prometheus; empty: one
}

// The metrics of mknetd. A test compares this table with spec/metrics.md and with
// what a daemon exports.
var (
	buildInfo      = Metric{"mknet_build_info", Gauge, []string{"version", "firewall"}, "1; the program's version and the iptables flavour in use.", ""}
	ready          = Metric{"mknet_ready_bool", Gauge, nil, "1 where an ADD of a child would be accepted now.", ""}
	causes         = Metric{"mknet_health_causes", Gauge, []string{"code", "blocks"}, "Reasons why mknetd is not ready or only partly works, as GET /v1/daemon/health has them.", "code: about 10"}
	egressInfo     = Metric{"mknet_egress_info", Gauge, []string{"link", "address"}, "1; the interface that endpoints leave by, absent while there is none.", ""}
	endpoints      = Metric{"mknet_endpoints", Gauge, []string{"mode", "state"}, "Endpoints by mode and state.", "6"}
	degraded       = Metric{"mknet_degraded_endpoints", Gauge, []string{"mode"}, "READY endpoints with a fault that the audit could not put right.", "2"}
	boundEndpoints = Metric{"mknet_bound_endpoints", Gauge, nil, "READY endpoints that are bound to a sandbox.", ""}
	addresses      = Metric{"mknet_pool_addresses", Gauge, []string{"pool", "use"}, "Addresses of a pool: used, resting (freed less than the quarantine ago) and free, resting not among the free.", "pool: at most 65 (the children's is \"\"), use: 3"}
	faults         = Metric{"mknet_faults_found_total", Counter, []string{"kind", "by"}, "Differences between a kernel object and its record, by kind of object and by who looked: check, audit or inventory. One that stays is counted at every look.", "kind: about 25, by: 3"}
	repairs        = Metric{"mknet_repairs_total", Counter, []string{"kind", "result"}, "Objects that the audit made again (ok), or could not (failed).", "kind: about 25, result: 2"}
	audits         = Metric{"mknet_audit_duration_seconds", Summary, nil, "Audits of all endpoints, and how long they took.", ""}
	auditFailures  = Metric{"mknet_audit_failures_total", Counter, nil, "Audits that ended with an error.", ""}
	auditTime      = Metric{"mknet_audit_last_success_timestamp_seconds", Gauge, nil, "When the last audit without an error ended; absent before the first.", ""}
	deferred       = Metric{"mknet_deferred_dels", Gauge, nil, "DELs that mk-cni has queued and that are not done yet.", ""}
	deferredAge    = Metric{"mknet_deferred_del_oldest_age_seconds", Gauge, nil, "Age of the oldest of them; 0 where there is none.", ""}
	storeSize      = Metric{"mknet_store_size_bytes", Gauge, nil, "Size of the file of records.", ""}
	flows          = Metric{"mknet_conntrack_entries", Gauge, nil, "Entries in the host's connection tracking table, of everybody.", ""}
	flowLimit      = Metric{"mknet_conntrack_limit_entries", Gauge, nil, "Room in that table; a full one drops new flows.", ""}
	policyPackets  = Metric{"mknet_policy_packets_total", Counter, []string{"reason"}, "What policy said of packets of endpoints with something attached, since the data path was made; one may meet more than one reason.", "reason: about 15"}
	policyFlows    = Metric{"mknet_policy_flow_entries", Gauge, nil, "Entries of admitted flows, as last collected (every 30 s); 262,144 fit, and a full table is the reason \"conntrack full\".", ""}
	pathPackets    = Metric{"mknet_datapath_packets_total", Counter, []string{"outcome"}, "Frames that the programs of pods, and of children under policy, have seen, by what became of them: peer and redirect (to a pod of this node past the host's stack), stack (to the host's stack), delivered (from there), arp, other, drop-... by reason. A frame that is cut later counts once.", "outcome: 15"}
	pathBytes      = Metric{"mknet_datapath_bytes_total", Counter, []string{"outcome"}, "Bytes of these frames, Ethernet headers included.", "outcome: 15"}
	pumpPackets    = Metric{"mknet_pump_packets_total", Counter, []string{"direction"}, "Packets that shims have reported to this mknetd, from children and to them.", "2"}
	pumpBytes      = Metric{"mknet_pump_bytes_total", Counter, []string{"direction"}, "Bytes of these packets.", "2"}
	pumpDrops      = Metric{"mknet_pump_dropped_packets_total", Counter, []string{"reason"}, "Packets from children that shims did not deliver.", "reason: at most 65"}
	pumpSessions   = Metric{"mknet_pump_sessions_total", Counter, nil, "Sessions between shims and agents, begun.", ""}
	pumpRTT        = Metric{"mknet_pump_round_trip_max_seconds", Gauge, nil, "The longest of the last round trips to children.", ""}
	events         = Metric{"mknet_events_total", Counter, nil, "Events since this mknetd began.", ""}
	eventsLost     = Metric{"mknet_events_lost_total", Counter, nil, "Events that slow followers missed.", ""}
	followers      = Metric{"mknet_event_followers", Gauge, nil, "Callers that follow the events now.", ""}
	calls          = Metric{"mknet_api_calls_total", Counter, []string{"route", "code"}, "Answered calls, by route and by the error's code (OK for none).", "route: about 25, code: 11"}
	callTime       = Metric{"mknet_api_call_duration_seconds", Histogram, []string{"route"}, "How long the answer took, waiting included; streams are left out.", "route: about 25, buckets: 8"}
)

// Table returns every metric of mknetd, sorted by name. Those of the Go runtime and
// of the process (go_..., process_...) come in addition.
func Table() []Metric {
	all := []Metric{
		buildInfo, ready, causes, egressInfo, endpoints, degraded, boundEndpoints, addresses, faults, repairs, audits, auditFailures,
		auditTime, deferred, deferredAge, storeSize, flows, flowLimit, policyPackets, policyFlows, pathPackets, pathBytes, pumpPackets, pumpBytes, pumpDrops, pumpSessions, pumpRTT,
		events, eventsLost, followers, calls, callTime,
	}
	slices.SortFunc(all, func(a, b Metric) int { return strings.Compare(a.Name, b.Name) })
	return all
}

func (m Metric) desc() *prometheus.Desc { return prometheus.NewDesc(m.Name, m.Help, m.Labels, nil) }
