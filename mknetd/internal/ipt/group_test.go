package ipt

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"mknet/spec/endpoint"
)

// slowTable stands for iptables-restore: it notes its commits, takes a second for each,
// and refuses one that has the line "bad".
type slowTable struct {
	mu      sync.Mutex
	commits []string // lines, joined by blanks
	ended   []error  // causes of contexts that ended a commit
}

func (f *slowTable) commit(ctx context.Context, lines []string) error {
	f.mu.Lock()
	f.commits = append(f.commits, strings.Join(lines, " "))
	f.mu.Unlock()
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
		f.mu.Lock()
		defer f.mu.Unlock()
		f.ended = append(f.ended, context.Cause(ctx))
		return context.Cause(ctx)
	}
	if slices.Contains(lines, "bad") {
		return &CommandError{Status: 2, Stderr: "bad"}
	}
	return nil
}

// inOrder has callers change the table one after the other within a millisecond and
// returns their errors.
func inOrder(g *group, contexts []context.Context, lines ...string) []error {
	errs := make([]error, len(lines))
	var wg sync.WaitGroup
	for i, line := range lines {
		ctx := context.Background()
		if contexts != nil {
			ctx = contexts[i]
		}
		wg.Go(func() { errs[i] = g.do(ctx, []string{line}) })
		synctest.Wait() // in this order
	}
	wg.Wait()
	return errs
}

func TestChangesAreJoined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f slowTable
		g := &group{commit: f.commit}
		if err := errors.Join(inOrder(g, nil, "a", "b", "c", "d")...); err != nil {
			t.Error(err)
		}
		if err := g.do(t.Context(), []string{"e"}); err != nil {
			t.Error(err)
		}
		if want := []string{"a", "b c d", "e"}; !slices.Equal(f.commits, want) {
			t.Errorf("commits %q, want %q", f.commits, want)
		}
	})
}

func TestChangesJoinedAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f slowTable
		lines := make([]string, 2*maxJoined+2)
		for i := range lines {
			lines[i] = strconv.Itoa(i)
		}
		if err := errors.Join(inOrder(&group{commit: f.commit}, nil, lines...)...); err != nil {
			t.Error(err)
		}
		var sizes []int
		for _, c := range f.commits {
			sizes = append(sizes, len(strings.Fields(c)))
		}
		if want := []int{1, maxJoined, maxJoined, 1}; !slices.Equal(sizes, want) {
			t.Errorf("sizes %v, want %v", sizes, want)
		}
	})
}

func TestAChangeFailsByItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f slowTable
		errs := inOrder(&group{commit: f.commit}, nil, "a", "b", "bad", "c", "d")
		for i, err := range errs {
			if refused := errors.As(err, new(*CommandError)); refused != (i == 2) {
				t.Errorf("change %d: %v", i, err)
			}
		}
		if want := []string{"a", "b bad c d", "b bad", "b", "bad", "c d"}; !slices.Equal(f.commits, want) {
			t.Errorf("commits %q, want %q", f.commits, want)
		}
	})
}

// A caller whose time is over leaves at once: one that still waits changes nothing,
// one whose commit is under way ends it only where nobody else is in it.
func TestCallersLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		within := func(d time.Duration) context.Context {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			t.Cleanup(cancel)
			return ctx
		}
		var f slowTable
		g := &group{commit: f.commit}
		errs := inOrder(g, []context.Context{
			t.Context(), within(500 * time.Millisecond), within(1500 * time.Millisecond), t.Context(),
		}, "first", "leaves", "gives up", "stays")
		for i, left := range []bool{false, true, true, false} {
			if errors.Is(errs[i], context.DeadlineExceeded) != left {
				t.Errorf("caller %d: %v", i, errs[i])
			}
		}
		if want := []string{"first", "gives up stays"}; !slices.Equal(f.commits, want) || f.ended != nil {
			t.Errorf("commits %q, want %q; ended by %v", f.commits, want, f.ended)
		}

		errs = inOrder(g, []context.Context{t.Context(), within(1500 * time.Millisecond), within(1600 * time.Millisecond)}, "first", "one", "two")
		if errs[0] != nil || errs[1] == nil || errs[2] == nil {
			t.Errorf("callers: %v", errs)
		}
		synctest.Wait()
		if len(f.ended) != 1 || !errors.Is(f.ended[0], context.DeadlineExceeded) {
			t.Errorf("a commit that nobody waits for went on: %v", f.ended)
		}
	})
}

// Endpoints that come and go at once are whole or gone, at fewer commits.
func TestEndpointsAtOnce(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		const n = 24
		l := newLab(t, flavour)
		var mu sync.Mutex // each table has a worker of its own
		commits := map[string]int{}
		for _, table := range l.fw.tables() {
			g := l.fw.group(table)
			commit := g.commit
			g.commit = func(ctx context.Context, lines []string) error {
				mu.Lock()
				commits[table]++
				mu.Unlock()
				return commit(ctx, lines)
			}
		}
		var eps []endpoint.Endpoint
		for i := range n {
			eps = append(eps, testEndpoint(endpoint.NewGeneration(), uint32(i)))
		}
		each := func(f func(endpoint.Endpoint)) {
			clear(commits)
			var wg sync.WaitGroup
			for _, ep := range eps {
				wg.Go(func() { f(ep) })
			}
			wg.Wait()
			for table, c := range commits {
				if c > n/2 {
					t.Errorf("table %s: %d commits for %d endpoints", table, c, n)
				}
			}
		}
		each(func(ep endpoint.Endpoint) {
			for _, table := range l.fw.Tables(ep) {
				if err := table.Ensure(ctx(t)); err != nil {
					t.Error(err)
				}
			}
		})
		for _, ep := range eps {
			if found := l.faults(ep); len(found) > 0 {
				t.Errorf("endpoint %s: %q", ep.Generation.Short(), found)
			}
		}
		each(func(ep endpoint.Endpoint) {
			for _, table := range l.fw.Tables(ep) {
				if err := table.Remove(ctx(t)); err != nil {
					t.Error(err)
				}
			}
		})
	})
}
