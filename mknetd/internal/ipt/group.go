package ipt

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// maxJoined bounds what one commit does for how many endpoints: the others wait for
// its end, and one that fails is done again in halves.
const maxJoined = 64

// group joins the changes to one table that are asked for while another is under way
// into one commit. A commit costs as much as the whole table has rules, whatever it
// changes: endpoints that come or go at once would pay that each.
type group struct {
	// commit commits lines, all or nothing.
	commit func(ctx context.Context, lines []string) error

	mu      sync.Mutex
	running bool
	waiting []*change
}

// change is what one caller wants committed.
type change struct {
	ctx   context.Context
	lines []string
	done  chan error // capacity 1
}

// do commits the lines and returns what became of them. Where ctx ends first they may
// be committed or not; what is asked for later comes after them in any case.
func (g *group) do(ctx context.Context, lines []string) error {
	c := &change{ctx: ctx, lines: lines, done: make(chan error, 1)}
	g.mu.Lock()
	g.waiting = append(g.waiting, c)
	if !g.running {
		g.running = true
		go g.work()
	}
	g.mu.Unlock()
	select {
	case err := <-c.done:
		return err
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if i := slices.Index(g.waiting, c); i >= 0 {
		g.waiting = slices.Delete(g.waiting, i, i+1)
		return fmt.Errorf("wait for an earlier change: %w", context.Cause(ctx))
	}
	select {
	case err := <-c.done:
		return err
	default:
		return fmt.Errorf("change the table: %w", context.Cause(ctx))
	}
}

// work serves who waits until nobody does.
func (g *group) work() {
	for {
		g.mu.Lock()
		n := min(len(g.waiting), maxJoined)
		next := slices.Clone(g.waiting[:n])
		g.waiting = slices.Delete(g.waiting, 0, n)
		g.running = n > 0
		g.mu.Unlock()
		if n == 0 {
			return
		}
		g.serve(next)
	}
}

// serve commits changes together and, where iptables refuses that, in halves: a change
// fails by itself only.
func (g *group) serve(changes []*change) {
	if len(changes) == 1 {
		c := changes[0]
		c.done <- g.commit(c.ctx, c.lines)
		return
	}
	ctx, release := whileAny(changes)
	var lines []string
	for _, c := range changes {
		lines = append(lines, c.lines...)
	}
	err := g.commit(ctx, lines)
	release()
	if err != nil && decided(err) {
		g.serve(changes[:len(changes)/2])
		g.serve(changes[len(changes)/2:])
		return
	}
	for _, c := range changes {
		c.done <- err
	}
}

// whileAny returns a context that ends when all of the changes' have ended.
func whileAny(changes []*change) (ctx context.Context, release func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	var left atomic.Int64
	left.Store(int64(len(changes)))
	var stops []func() bool
	for _, c := range changes {
		stops = append(stops, context.AfterFunc(c.ctx, func() {
			if left.Add(-1) == 0 {
				cancel(context.Cause(c.ctx))
			}
		}))
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
		cancel(nil)
	}
}
