package crash

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"mknet/spec/client"
	"mknet/spec/delqueue"
	"mknet/tests/node"
)

const (
	lanes       = 8
	churnShort  = 10 * time.Second // of each part, in make test
	warmUp      = 2 * time.Second
	killsEvery  = 150 * time.Millisecond // on average
	daemonShare = 3                      // mknetd is killed once where others are so often: its start takes seconds
)

// TestChurn does everything at once and kills at random: eight runtimes go through
// ADD, CHECK, BIND, traffic and DEL while mknetd, mk-cni, mk-shim and mk-agent get
// SIGKILL. Nothing that was acknowledged may be lost, and at the end nothing of
// ours may be left.
//
// MKNET_CHURN=10000 makes so many operations, MKNET_CHURN=1h runs so long, instead
// of some seconds; MKNET_CHURN_SEED repeats the choices of a run (not its timing).
func TestChurn(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("MKNET_CHURN_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("MKNET_CHURN_SEED: %v", err)
		}
	}
	// A quarter with mknetd among the victims, the rest with one that lives.
	killed, lives := limit{time: churnShort}, limit{time: churnShort}
	if s := os.Getenv("MKNET_CHURN"); s != "" {
		n, notNumber := strconv.ParseInt(s, 10, 64)
		d, notTime := time.ParseDuration(s)
		switch {
		case notNumber == nil && n >= 4:
			killed, lives = limit{operations: n / 4}, limit{operations: n - n/4}
		case notTime == nil && d > 0:
			killed, lives = limit{time: d / 4}, limit{time: d - d/4}
		default:
			t.Fatalf("MKNET_CHURN=%s: want a number of operations (10000) or a duration (1h)", s)
		}
	}
	t.Logf("MKNET_CHURN_SEED=%d", seed)
	n := node.New(t, "quarantine: 0s")
	c := newChurn(t, n, seed)

	// An idle mknetd that has worked a little is what the last one is held to.
	c.run(t, limit{time: warmUp}, nil)
	idle := c.measure(t)
	idle.goroutines = c.goroutines(t)
	n.Start(t)

	c.run(t, killed, []string{"mknetd", "mk-cni", "mk-shim", "mk-agent"})
	t.Logf("with mknetd killed too: %s", c)

	// From here on one mknetd lives through everything, and is measured.
	n.Stop(t)
	n.Start(t)
	c.run(t, limit{time: warmUp}, []string{"mk-cni", "mk-shim", "mk-agent"})
	before := c.measure(t)
	c.run(t, lives, []string{"mk-cni", "mk-shim", "mk-agent"})
	after := c.measure(t)
	after.goroutines = c.goroutines(t)
	before.goroutines = idle.goroutines
	n.Start(t)
	t.Logf("in all: %s", c)
	t.Logf("mknetd before: %s; after: %s", before, after)
	after.hold(t, before)
	for _, err := range c.errs {
		t.Error(err)
	}
	n.CheckInventory(t)
}

// limit ends a run: by time, or by the number of operations.
type limit struct {
	time       time.Duration
	operations int64
}

// churn is the node with its runtimes.
type churn struct {
	n      *node.Node
	random *rand.Rand // of the killer
	lanes  []*lane
	stop   atomic.Bool
	// daemonDies is set while mknetd is among the victims; between runs only.
	daemonDies bool

	mu         sync.Mutex
	operations map[string]int
	refused    map[string]int // by verb and CNI code
	kills      map[string]int
	running    map[string][]*process // by program
	errs       []error
}

// process is a running program that may be killed.
type process struct {
	*os.Process
	killed atomic.Bool
}

func newChurn(t *testing.T, n *node.Node, seed uint64) *churn {
	t.Helper()
	c := &churn{
		n: n, random: rand.New(rand.NewPCG(seed, 0)), operations: map[string]int{}, refused: map[string]int{}, kills: map[string]int{},
		running: map[string][]*process{},
	}
	n.Client(t) // made here, used by all
	for i := range lanes {
		c.lanes = append(c.lanes, newLane(t, c, i, rand.New(rand.NewPCG(seed, uint64(i)+1))))
	}
	return c
}

// run has all lanes work until the limit, while victims are killed, and returns
// when every lane has taken away what it made.
func (c *churn) run(t *testing.T, l limit, victims []string) {
	t.Helper()
	c.stop.Store(false)
	c.daemonDies = slices.Contains(victims, "mknetd")
	begun, until := c.total(), time.Now().Add(l.time)
	var work sync.WaitGroup
	for _, lane := range c.lanes {
		work.Go(func() {
			for !c.stop.Load() && c.healthy() {
				lane.cycle(t)
			}
		})
	}
	for c.healthy() {
		if l.operations > 0 && c.total() >= begun+l.operations || l.operations == 0 && time.Now().After(until) {
			break
		}
		time.Sleep(time.Duration(c.random.Int64N(int64(2 * killsEvery)))) // the pace of the kills, nothing waits for it
		c.killOne(t, victims)
	}
	c.stop.Store(true)
	work.Wait()
	c.settle(t)
}

// killOne kills one process of a program that is chosen at random.
func (c *churn) killOne(t *testing.T, victims []string) {
	t.Helper()
	if len(victims) == 0 {
		return
	}
	program := victims[c.random.IntN(len(victims))]
	if program == "mknetd" {
		if c.random.IntN(daemonShare) != 0 {
			return
		}
		c.n.Kill(t)
		c.note(c.kills, program)
		c.n.Start(t)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if all := c.running[program]; len(all) > 0 {
		p := all[c.random.IntN(len(all))]
		p.killed.Store(true)
		if p.Kill() == nil {
			c.kills[program]++
		}
	}
}

// settle waits until deferred DELs are done and checks that nothing is left. How long
// that takes is the machine's matter, that they become fewer is mknetd's.
func (c *churn) settle(t *testing.T) {
	t.Helper()
	if !c.healthy() {
		return
	}
	for last, since := -1, time.Now(); ; time.Sleep(100 * time.Millisecond) {
		left, err := c.left(t)
		if err == nil && left == 0 {
			break
		}
		if err == nil && (last < 0 || left < last) {
			last, since = left, time.Now()
		}
		if time.Since(since) > node.Patience {
			t.Fatalf("%d deferred DELs and endpoints are left, as many as %s ago (last error: %v)", left, node.Patience, err)
		}
	}
	c.n.CheckInventory(t)
}

// left counts the deferred DELs and the endpoints.
func (c *churn) left(t *testing.T) (int, error) {
	t.Helper()
	q, err := delqueue.OpenExisting(c.n.DeferredDir)
	var items []delqueue.Item
	switch {
	case err == nil:
		items, err = q.List()
		q.Close()
	case errors.Is(err, fs.ErrNotExist):
		err = nil
	}
	ctx, cancel := context.WithTimeout(t.Context(), node.Patience)
	defer cancel()
	list, listErr := c.n.Client(t).Endpoints(ctx, client.Filter{})
	return len(items) + len(list), errors.Join(err, listErr)
}

// register makes a process one that may be killed, until the returned function is
// called.
func (c *churn) register(program string, p *os.Process) (me *process, unregister func()) {
	me = &process{Process: p}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running[program] = append(c.running[program], me)
	return me, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		for i, p := range c.running[program] {
			if p == me {
				c.running[program] = append(c.running[program][:i], c.running[program][i+1:]...)
				return
			}
		}
	}
}

func (c *churn) note(counts map[string]int, what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	counts[what]++
}

// fail keeps an error and ends the churn.
func (c *churn) fail(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.errs = append(c.errs, fmt.Errorf(format, args...))
}

func (c *churn) healthy() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.errs) == 0
}

func (c *churn) total() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, k := range c.operations {
		n += k
	}
	return int64(n)
}

func (c *churn) String() string {
	total := c.total()
	c.mu.Lock()
	defer c.mu.Unlock()
	return fmt.Sprintf("%d operations %v, killed %v, told to try again %v", total, c.operations, c.kills, c.refused)
}
