package carrier

import (
	"context"
	"errors"
	"sync"
	"testing"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// book keeps counters as mknetd does.
type book struct {
	mu      sync.Mutex
	have    *api.Counters // nil: nobody has reported
	err     error         // what every call answers instead
	reports int
}

func (b *book) Counters(_ context.Context, gen endpoint.Generation) (api.CountersReply, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.err != nil:
		return api.CountersReply{}, b.err
	case b.have == nil:
		return api.CountersReply{}, api.Errorf(api.NotFound, "none yet")
	}
	return api.CountersReply{Generation: gen, Counters: *b.have}, nil
}

func (b *book) ReportCounters(ctx context.Context, _ endpoint.Generation, req api.CountersReport) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err != nil {
		return b.err
	}
	if b.have != nil {
		if below := req.Counters.Below(*b.have); below != "" {
			return api.Errorf(api.FailedPrecondition, "%s", below)
		}
	}
	b.have, b.reports = &req.Counters, b.reports+1
	return ctx.Err()
}

func (b *book) read() (api.Counters, int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.have == nil {
		return api.Counters{}, 0
	}
	return *b.have, b.reports
}

func (b *book) answer(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = err
}

// Figures reach mknetd at the end of a session and at that of the shim, and the
// next shim goes on from them; a daemon that is away holds nothing up.
func TestFiguresGoOnFromTheLastShim(t *testing.T) {
	netlab.Clean(t)
	d, c := newDaemon(t), newChild(t)
	c.serve()
	figures := &book{}
	var last api.Counters
	for round := range 3 {
		s := start(t, d, c, func(cfg *Config) { cfg.Figures = figures })
		c.ping(t)
		if round == 1 { // an agent that goes ends a session
			c.halt()
			netlab.Eventually(t, patience, func() error {
				if now, _ := figures.read(); now.RxPackets <= last.RxPackets {
					return errors.New("no report after the session")
				}
				return nil
			})
			c.serve()
			c.ping(t)
		}
		s.stop(t)
		now, reports := figures.read()
		if below := now.Below(last); below != "" || now.RxPackets == last.RxPackets || now.Sessions <= last.Sessions || reports == 0 {
			t.Errorf("round %d: %+v after %+v", round, now, last)
		}
		if got := s.Status().Counters; got.RxPackets != now.RxPackets {
			t.Errorf("round %d: the shim shows %d packets, mknetd has %d", round, got.RxPackets, now.RxPackets)
		}
		last = now
	}
	figures.answer(unreachable)
	s := start(t, d, c, func(cfg *Config) { cfg.Figures = figures })
	c.ping(t)
	s.stop(t)
}
