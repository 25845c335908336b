package carrier

import (
	"context"
	"sort"
	"time"

	data "mknet/shim/pump"
	"mknet/spec/api"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
)

var countersReported = crash.New("shim.counters-reported")

// Times of telling mknetd the figures. Nothing waits for it but the orderly end,
// and that no longer than lastReportBudget.
const (
	reportEvery      = 5 * time.Second
	reportAgain      = time.Second // after a report that did not get through
	reportBudget     = 2 * time.Second
	lastReportBudget = 500 * time.Millisecond
)

// Figures is what is needed of mknetd to keep an endpoint's counters. A
// *client.Client is one.
type Figures interface {
	Counters(ctx context.Context, gen endpoint.Generation) (api.CountersReply, error)
	ReportCounters(ctx context.Context, gen endpoint.Generation, req api.CountersReport) error
}

// reporter tells mknetd what a shim has carried, on a goroutine of its own.
type reporter struct {
	c     *Carrier
	gen   endpoint.Generation
	begun bool // what earlier shims carried is known
}

// startReports reports until the returned function is called, which tells the
// last figures and waits.
func (c *Carrier) startReports(gen endpoint.Generation) (stop func()) {
	if c.cfg.Figures == nil {
		return func() {}
	}
	r := &reporter{c: c, gen: gen}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.run(ctx)
	}()
	return func() {
		cancel()
		<-done
		last, cancel := context.WithTimeout(context.Background(), lastReportBudget)
		defer cancel()
		_ = r.report(last) // mknetd may be gone as well; nobody waits for it
	}
}

// reportSoon asks for a report: a session began or ended.
func (c *Carrier) reportSoon() {
	select {
	case c.reportNow <- struct{}{}:
	default: // asked for already
	}
}

func (r *reporter) run(ctx context.Context) {
	for {
		wait := reportEvery
		if err := r.report(ctx); err != nil {
			r.c.cfg.Log.Debug("counters not reported", "generation", r.gen.String(), "err", err)
			wait = reportAgain
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		case <-r.c.reportNow:
			t.Stop()
		}
	}
}

// report tells the totals of this moment. What earlier shims carried is read
// first, so that they go on from there.
func (r *reporter) report(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reportBudget)
	defer cancel()
	if !r.begun {
		rep, err := r.c.cfg.Figures.Counters(ctx, r.gen)
		if err != nil && api.CodeOf(err) != api.NotFound {
			return err
		}
		r.c.mu.Lock()
		r.c.before = rep.Counters
		r.c.mu.Unlock()
		r.begun = true
	}
	err := r.c.cfg.Figures.ReportCounters(ctx, r.gen, api.CountersReport{Sandbox: r.c.cfg.Request.Sandbox, Counters: totals(r.c.Status().Counters)})
	countersReported.Here()
	return err
}

// totals is a snapshot as the API has it.
func totals(s data.Snapshot) api.Counters {
	c := api.Counters{
		RxPackets: s.RxPackets, RxBytes: s.RxBytes, TxPackets: s.TxPackets, TxBytes: s.TxBytes, Sessions: s.Sessions, Batches: s.Batches,
		CreditWaits: s.CreditWaits, TransportRetries: s.TransportRetries, RTTNanoseconds: int64(s.RTT),
	}
	for reason, n := range s.Drops {
		c.Drops = append(c.Drops, api.Drops{Reason: reason, Packets: n})
	}
	sort.Slice(c.Drops, func(i, j int) bool { return c.Drops[i].Reason < c.Drops[j].Reason })
	return c
}

// withEarlier adds what earlier shims of the endpoint carried.
func withEarlier(s data.Snapshot, before api.Counters) data.Snapshot {
	c := totals(s).Plus(before)
	sum := data.Snapshot{
		RxPackets: c.RxPackets, RxBytes: c.RxBytes, TxPackets: c.TxPackets, TxBytes: c.TxBytes, Sessions: c.Sessions, Batches: c.Batches,
		Reconnects: max(c.Sessions, 1) - 1, CreditWaits: c.CreditWaits, TransportRetries: c.TransportRetries, RTT: time.Duration(c.RTTNanoseconds),
	}
	for _, d := range c.Drops {
		if sum.Drops == nil {
			sum.Drops = map[string]uint64{}
		}
		sum.Drops[d.Reason] = d.Packets
	}
	return sum
}
