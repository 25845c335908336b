// Package carrier is the life of a shim: it joins the endpoint, keeps a session
// with the agent for as long as the binding stands, and leaves in order. It
// implements the life section of spec/pump-protocol.md.
package carrier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"time"

	"mknet/shim/internal/binding"
	data "mknet/shim/pump"
	"mknet/shim/session"
	"mknet/shim/transport"
	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
	"mknet/spec/pump"
)

var (
	sessionConfirmed = crash.New("shim.session-confirmed")
	sessionEnded     = crash.New("shim.session-ended")
	queuesClosed     = crash.New("shim.queues-closed")
	nextTokenUsed    = crash.New("shim.next-token-used") // the agent holds it, the file is not yet that of the current one
	tokenCommitted   = crash.New("shim.token-committed")
)

// Budgets of talking to mknetd.
const (
	joinBudget   = 15 * time.Second       // BIND and ATTACH, a restart of mknetd included
	undoBudget   = 5 * time.Second        // the UNBIND of a join that was given up
	leaveBudget  = 20 * time.Second       // above what an UNBIND takes that completes a DEL
	lookupBudget = 500 * time.Millisecond // while it asks it does not dial
	// checkAfter and checkEvery say when a shim without a session asks whether its
	// binding still stands. An agent that merely restarts is back before that.
	checkAfter = time.Second
	checkEvery = 5 * time.Second
)

// Config is what a shim is told.
type Config struct {
	Daemon    binding.Daemon
	Request   binding.Request
	KeepBound bool // the runtime made the BIND and makes the UNBIND
	Agent     transport.Address
	Dial      func(context.Context, transport.Address) (net.Conn, error)
	Tokens    *Tokens
	ChildLink string // "mkn0", ...
	Sealed    bool
	Keepalive time.Duration
	// ConnectTimeout ends a shim that has never reached its agent; 0: never.
	// ReconnectTimeout ends one that has lost it for so long; 0: never.
	ConnectTimeout, ReconnectTimeout time.Duration
	Figures                          Figures // nil: mknetd is told no counters
	Log                              *slog.Logger
}

// Carrier is one shim.
type Carrier struct {
	cfg      Config
	counters data.Counters

	reportNow chan struct{} // asks for a report before its time; capacity 1

	mu     sync.Mutex
	status Status
	before api.Counters // what earlier shims of the endpoint carried
}

// Status is what a shim shows of itself.
type Status struct {
	Generation endpoint.Generation `json:"generation"`
	Sandbox    endpoint.Sandbox    `json:"sandbox"`
	Agent      string              `json:"agent"`
	State      string              `json:"state"` // "joining", "connecting", "connected", "leaving"
	Since      time.Time           `json:"since"`
	Address    string              `json:"address,omitempty"`
	MTUBytes   int                 `json:"mtu,omitempty"`
	Lanes      int                 `json:"lanes,omitempty"`
	Offloads   string              `json:"offloads,omitempty"`
	Sealed     bool                `json:"sealed"`
	LastError  string              `json:"lastError,omitempty"`
	Counters   data.Snapshot       `json:"counters"`
	Goroutines int                 `json:"goroutines"` // of the process: they must not grow with the sessions
}

// New returns a Carrier that has done nothing yet.
func New(cfg Config) *Carrier {
	c := &Carrier{cfg: cfg, reportNow: make(chan struct{}, 1)}
	c.status = Status{Sandbox: cfg.Request.Sandbox, Agent: cfg.Agent.String(), State: "joining", Since: time.Now(), Sealed: cfg.Sealed}
	return c
}

// Status returns the figures of this moment, those of earlier shims included as
// soon as mknetd has told them.
func (c *Carrier) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.status
	s.Counters = withEarlier(c.counters.Snapshot(), c.before)
	s.Goroutines = runtime.NumGoroutine()
	return s
}

// Run carries packets until ctx ends, which is the orderly end and no error, or
// until something does not heal. joined is called once the endpoint is known.
func (c *Carrier) Run(ctx context.Context, joined func(endpoint.Endpoint)) error {
	b, err := c.join(ctx)
	if b == nil {
		return err
	}
	joined(b.Endpoint)
	stopReports := c.startReports(b.Endpoint.Generation)
	err = c.carry(ctx, &b)
	stopReports() // before UNBIND: mknetd listens to a bound shim only
	// The descriptors go first: UNBIND gives the TUN to others.
	err = errors.Join(err, ignoreClosed(b.Close()))
	queuesClosed.Here()
	if ctx.Err() == nil || c.cfg.KeepBound {
		return err
	}
	c.set("leaving", nil)
	leaveCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveBudget)
	defer cancel()
	return errors.Join(err, binding.Leave(leaveCtx, c.cfg.Daemon, b.Endpoint.Generation, c.cfg.Request.Sandbox))
}

// join binds and attaches, and waits for a daemon that is being restarted. Where it
// gives up, a BIND of its own does not stay. Both results are nil when ctx ended.
func (c *Carrier) join(ctx context.Context) (*binding.Binding, error) {
	limited, cancel := context.WithTimeout(ctx, joinBudget)
	defer cancel()
	joiner := binding.NewJoiner(c.cfg.Daemon, c.cfg.Request)
	var wait backoff
	for {
		b, err := joiner.Join(limited)
		if err == nil {
			c.note(b)
			return b, nil
		}
		if retryable(err) {
			c.cfg.Log.Debug("mknetd is not ready", "err", err)
			if wait.wait(limited) {
				continue
			}
		}
		undone := c.undo(ctx, joiner)
		if ctx.Err() != nil {
			return nil, undone
		}
		return nil, errors.Join(err, undone)
	}
}

// undo takes back what a join has left, ctx ended or not.
func (c *Carrier) undo(ctx context.Context, joiner *binding.Joiner) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoBudget)
	defer cancel()
	var wait backoff
	for {
		err := joiner.Undo(ctx)
		if err == nil || !retryable(err) || !wait.wait(ctx) {
			return err
		}
	}
}

// retryable reports whether err may go away while mknetd restarts.
func retryable(err error) bool {
	var refusal *api.Error
	return errors.As(err, &refusal) && refusal.Retryable || errors.Is(err, client.ErrUnreachable)
}

func (c *Carrier) note(b *binding.Binding) {
	c.mu.Lock()
	c.status.Generation, c.status.Address, c.status.MTUBytes = b.Endpoint.Generation, b.Address().String(), b.Endpoint.MTUBytes
	c.mu.Unlock()
	c.cfg.Log.Info("attached", "endpoint", b.Endpoint.Generation.Short(), "link", b.Endpoint.IfName, "address", b.Address().String(),
		"mtu", b.Endpoint.MTUBytes, "queues", len(b.Queues), "offloads", b.Offloads.String())
}

// set notes a change of state.
func (c *Carrier) set(state string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.status.State != state {
		c.status.State, c.status.Since = state, time.Now()
	}
	if err != nil {
		c.status.LastError = err.Error()
	}
	if state != "connected" {
		c.status.Lanes, c.status.Offloads = 0, ""
	}
}

// carry runs one session after the other. b is replaced when the TUN has to be
// attached again.
func (c *Carrier) carry(ctx context.Context, b **binding.Binding) error {
	var wait backoff
	lost, ever, checked := time.Now(), false, time.Time{}
	for {
		c.set("connecting", nil)
		connected, err := c.session(ctx, *b)
		if ctx.Err() != nil {
			return nil
		}
		if connected > 0 {
			lost, ever = time.Now(), true
			if connected > time.Second {
				wait.reset() // a session that ends at once is no reason to hurry
			}
		}
		c.set("connecting", err)
		c.report(err, connected > 0, wait.next == 0)
		if fatal(err) {
			return err
		}
		limit := c.cfg.ConnectTimeout
		if ever {
			limit = c.cfg.ReconnectTimeout
		}
		if limit > 0 && time.Since(lost) > limit {
			return fmt.Errorf("agent not reached for %s: %w", limit, err)
		}
		if errors.As(err, new(*data.QueueError)) {
			if err := c.attachAgain(ctx, b); err != nil {
				return err
			}
		} else if time.Since(lost) > checkAfter && time.Since(checked) > checkEvery {
			checked = time.Now()
			if err := c.stands(ctx, (*b).Endpoint); err != nil {
				return err
			}
		}
		if !wait.wait(ctx) {
			return nil
		}
	}
}

// report logs why there is no session: the first time and after a session at
// info, else at debug, since attempts come several a second.
func (c *Carrier) report(err error, ended, first bool) {
	level := slog.LevelDebug
	if ended || first {
		level = slog.LevelInfo
	}
	gen := c.Status().Generation.Short()
	if ended {
		c.cfg.Log.Log(context.Background(), level, "session ended", "endpoint", gen, "err", err)
		return
	}
	c.cfg.Log.Log(context.Background(), level, "agent not reached", "endpoint", gen, "err", err)
}

// stands asks mknetd whether the binding still stands.
func (c *Carrier) stands(ctx context.Context, attached endpoint.Endpoint) error {
	ctx, cancel := context.WithTimeout(ctx, lookupBudget)
	defer cancel()
	return binding.Stands(ctx, c.cfg.Daemon, attached)
}

// attachAgain gets the queues anew after one has failed: the others have other
// indices then. Only who may BIND can do that.
func (c *Carrier) attachAgain(ctx context.Context, b **binding.Binding) error {
	gen := (*b).Endpoint.Generation
	_ = (*b).Close() // a queue of a link that is gone may say so
	if err := c.stands(ctx, (*b).Endpoint); err != nil {
		return err
	}
	if c.cfg.Request.Nonce != "" {
		return fmt.Errorf("%w: a queue of the TUN failed and the BIND is the runtime's", binding.ErrGone)
	}
	fresh, err := c.join(ctx)
	if fresh == nil {
		return err
	}
	if fresh.Endpoint.Generation != gen {
		return errors.Join(fmt.Errorf("%w: the attachment is now endpoint %s", binding.ErrGone, fresh.Endpoint.Generation), fresh.Close())
	}
	*b = fresh
	return nil
}

// session opens one session and carries it. It returns for how long it carried,
// 0 when it did not begin, and why it ended.
func (c *Carrier) session(ctx context.Context, b *binding.Binding) (time.Duration, error) {
	s, err := c.open(ctx, b)
	if err != nil {
		return 0, err
	}
	c.mu.Lock()
	c.status.State, c.status.Since, c.status.Lanes, c.status.LastError = "connected", time.Now(), s.Ack.Lanes, ""
	c.status.Offloads = s.Config.Offloads.And(s.Ack.Offloads).String()
	c.mu.Unlock()
	c.cfg.Log.Info("connected", "endpoint", b.Endpoint.Generation.Short(), "lanes", s.Ack.Lanes, "sealed", s.Config.Sealed)
	c.reportSoon()
	sessionConfirmed.Here()
	begin := time.Now()
	err = s.Carry(ctx, b.Queues, transport.MessageBytes(c.cfg.Agent.Multikernel()), &c.counters)
	sessionEnded.Here()
	c.reportSoon()
	return max(time.Since(begin), 1), err
}

// open makes a session with whichever token the agent holds.
func (c *Carrier) open(ctx context.Context, b *binding.Binding) (*session.Session, error) {
	ep := b.Endpoint
	lanes := transport.Lanes(b.Lanes, c.cfg.Agent.Multikernel())
	offer := pump.LinkConfig{
		Link: c.cfg.ChildLink, Address: b.Address(), Gateway: ep.Gateway, MTUBytes: ep.MTUBytes, DNS: ep.DNS,
		VnetHdr: b.VnetHdr, Offloads: b.Offloads, Lanes: lanes, Windows: transport.Windows(lanes, c.cfg.Agent.Multikernel()),
		Keepalive: pump.Milliseconds(c.cfg.Keepalive), Sealed: c.cfg.Sealed,
	}
	var err error
	for _, token := range c.cfg.Tokens.candidates() {
		peer := &session.Client{
			Dial: c.dial, Identity: session.Identity{Sandbox: c.cfg.Request.Sandbox, Endpoint: ep.Generation},
			Token: token, NextToken: c.cfg.Tokens.makeNext,
		}
		var s *session.Session
		if s, err = peer.Open(ctx, offer); err == nil {
			if s.Rotated || c.cfg.Tokens.isNext(token) {
				nextTokenUsed.Here()
				if err := c.cfg.Tokens.commit(); err != nil {
					return nil, errors.Join(err, s.Close())
				}
				tokenCommitted.Here()
			}
			return s, nil
		}
		if !errors.Is(err, session.ErrAuthentication) {
			break
		}
	}
	return nil, err
}

func (c *Carrier) dial(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	return c.cfg.Dial(ctx, c.cfg.Agent)
}

// fatal reports whether a later attempt cannot end otherwise.
func fatal(err error) bool {
	var closed *data.PeerClosedError
	switch {
	case errors.Is(err, session.ErrAuthentication), errors.As(err, new(*pump.MismatchError)), errors.Is(err, session.ErrNextToken),
		errors.Is(err, pump.ErrMalformedConfig),
		errors.Is(err, &transport.DialError{Kind: transport.Unsupported}), errors.Is(err, &transport.DialError{Kind: transport.Denied}):
		return true
	case errors.As(err, &closed):
		return closed.Reason == pump.Displaced || closed.Reason == pump.Unbound
	}
	return false
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
