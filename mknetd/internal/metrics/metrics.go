package metrics

import (
	"context"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// scrapeTime bounds the collection of one scrape; all of it is memory, a few maps and
// four small files.
const scrapeTime = 5 * time.Second

// maxReasons bounds the reasons of drops, which shims name; the rest is "other".
const maxReasons = 64

// Set is the metrics of one daemon.
type Set struct {
	source   Source
	registry *prometheus.Registry
	calls    *prometheus.CounterVec
	callTime *prometheus.HistogramVec

	asking sync.RWMutex // read while the source is asked
	frozen *frozen      // by Freeze; nil: ask the source
}

// New makes the metrics of a daemon; nothing is read before the first scrape.
func New(source Source) *Set {
	s := &Set{source: source, registry: prometheus.NewPedanticRegistry()}
	s.calls = prometheus.NewCounterVec(prometheus.CounterOpts{Name: calls.Name, Help: calls.Help}, calls.Labels)
	s.callTime = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: callTime.Name, Help: callTime.Help, Buckets: []float64{.005, .02, .1, .5, 2, 8, 20},
	}, callTime.Labels)
	s.registry.MustRegister(s.calls, s.callTime, collector{s},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return s
}

// Call counts one answered call of the API. The route is the pattern, never the
// path that was asked for; took is below 0 for one that has no end of its own.
func (s *Set) Call(route, code string, took time.Duration) {
	if code == "" {
		code = "OK"
	}
	s.calls.WithLabelValues(route, code).Inc()
	if took >= 0 {
		s.callTime.WithLabelValues(route).Observe(took.Seconds())
	}
}

// Handler answers a scrape. It is quick, and says so when it fails.
func (s *Set) Handler() http.Handler {
	return promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError, MaxRequestsInFlight: 4, DisableCompression: true})
}

// Registry is what Handler exports, for tests.
func (s *Set) Registry() *prometheus.Registry { return s.registry }

// collector turns the source's figures into metrics, afresh for each scrape.
type collector struct{ *Set }

func (c collector) Describe(to chan<- *prometheus.Desc) {
	for _, m := range Table() {
		if m.Name != calls.Name && m.Name != callTime.Name {
			to <- m.desc()
		}
	}
}

func (c collector) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTime)
	defer cancel()
	send := func(m Metric, value float64, labels ...string) {
		kind := prometheus.GaugeValue
		if m.Kind == Counter {
			kind = prometheus.CounterValue
		}
		to <- prometheus.MustNewConstMetric(m.desc(), kind, value, labels...)
	}
	c.health(ctx, send)
	st := c.source.Stats(ctx)
	countEndpoints(st, send)
	for _, p := range st.Pools {
		send(addresses, float64(p.Used), p.Name, "used")
		send(addresses, float64(p.Resting), p.Name, "resting")
		send(addresses, float64(p.Free), p.Name, "free")
	}
	for k, n := range st.Faults {
		send(faults, float64(n), k.Kind, k.By)
	}
	for k, n := range st.Repairs {
		result := "ok"
		if k.Failed {
			result = "failed"
		}
		send(repairs, float64(n), k.Kind, result)
	}
	to <- prometheus.MustNewConstSummary(audits.desc(), st.Audits, st.AuditTime.Seconds(), nil)
	send(auditFailures, float64(st.AuditFailures))
	if !st.LastAudit.IsZero() {
		send(auditTime, float64(st.LastAudit.UnixMilli())/1000)
	}
	send(deferred, float64(st.DeferredDels))
	send(deferredAge, st.DeferredOldest.Seconds())
	send(storeSize, float64(st.StoreBytes))
	if st.Flows.Limit > 0 {
		send(flows, float64(st.Flows.Entries))
		send(flowLimit, float64(st.Flows.Limit))
	}
	for reason, n := range st.Policy.Packets {
		send(policyPackets, float64(n), reason)
	}
	if st.Policy.Packets != nil {
		send(policyFlows, float64(st.Policy.Flows))
	}
	for outcome, n := range st.Path {
		send(pathPackets, float64(n.Packets), outcome)
		send(pathBytes, float64(n.Bytes), outcome)
	}
	pump(st.Pump, send)
	send(events, float64(st.Events.Total))
	send(eventsLost, float64(st.Events.Lost))
	send(followers, float64(st.Events.Followers))
}

type sender func(m Metric, value float64, labels ...string)

func (c collector) health(ctx context.Context, send sender) {
	h, conf := c.source.Health(ctx), c.source.Config(ctx)
	send(buildInfo, 1, h.Version, conf.Firewall)
	send(ready, asBool(h.Ready))
	type cause struct{ code, blocks string }
	count := map[cause]int{} // several pools may have the same trouble
	for _, why := range h.Causes {
		count[cause{why.Code, strconv.FormatBool(why.Blocks)}]++
	}
	for why, n := range count {
		send(causes, float64(n), why.code, why.blocks)
	}
	if conf.Egress != "" {
		address := ""
		if conf.EgressAddr.IsValid() {
			address = conf.EgressAddr.String()
		}
		send(egressInfo, 1, conf.Egress, address)
	}
}

func countEndpoints(st Stats, send sender) {
	bound := 0
	for _, mode := range []endpoint.Mode{endpoint.Multikernel, endpoint.Veth} {
		states := map[endpoint.State]int{endpoint.Allocating: 0, endpoint.Ready: 0, endpoint.Deleting: 0}
		bad := 0
		for k, n := range st.Endpoints {
			if k.Mode != mode {
				continue
			}
			states[k.State] += n
			if k.State == endpoint.Ready && k.Degraded {
				bad += n
			}
			if k.State == endpoint.Ready && k.Bound {
				bound += n
			}
		}
		for state, n := range states {
			send(endpoints, float64(n), string(mode), string(state))
		}
		send(degraded, float64(bad), string(mode))
	}
	send(boundEndpoints, float64(bound))
}

func pump(c api.Counters, send sender) {
	send(pumpPackets, float64(c.RxPackets), "from_child")
	send(pumpPackets, float64(c.TxPackets), "to_child")
	send(pumpBytes, float64(c.RxBytes), "from_child")
	send(pumpBytes, float64(c.TxBytes), "to_child")
	other := uint64(0)
	for i, d := range c.Drops {
		if i >= maxReasons {
			other += d.Packets
			continue
		}
		send(pumpDrops, float64(d.Packets), d.Reason)
	}
	if other > 0 {
		send(pumpDrops, float64(other), "OTHER")
	}
	send(pumpSessions, float64(c.Sessions))
	send(pumpRTT, time.Duration(c.RTTNanoseconds).Seconds())
}

func asBool(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
