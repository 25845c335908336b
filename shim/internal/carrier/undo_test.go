package carrier

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"mknet/shim/internal/binding"
	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
)

// register is mknetd's record of one binding, without a TUN. What it is told is
// recorded also where its answer is lost.
type register struct {
	gen     endpoint.Generation
	bound   endpoint.Sandbox
	unbinds int
	stop    func() // tells the shim to end

	bind   func(context.Context) error // before it is recorded: a refusal
	reply  func(context.Context) error // after it is recorded: the answer that gets lost
	attach func(context.Context) error
	unbind func() error
}

func (r *register) Bind(ctx context.Context, req api.BindRequest) (api.BindReply, error) {
	if r.bind != nil {
		if err := r.bind(ctx); err != nil {
			return api.BindReply{}, err
		}
	}
	r.bound = req.Sandbox
	if r.reply != nil {
		if err := r.reply(ctx); err != nil {
			return api.BindReply{}, err
		}
	}
	ep := record(r.gen)
	ep.Binding = &endpoint.Binding{Sandbox: r.bound}
	return api.BindReply{Endpoint: ep, Nonce: strings.Repeat("0", 32)}, nil
}

func (r *register) Attach(ctx context.Context, _ endpoint.Generation, _ api.AttachRequest) (api.AttachReply, []*os.File, error) {
	return api.AttachReply{}, nil, r.attach(ctx)
}

func (r *register) Unbind(_ context.Context, gen endpoint.Generation, req api.UnbindRequest) error {
	r.unbinds++
	if r.unbind != nil {
		if err := r.unbind(); err != nil {
			return err
		}
	}
	if gen != r.gen || req.Sandbox != r.bound {
		return api.Errorf(api.StaleGeneration, "not bound to %s", req.Sandbox)
	}
	r.bound = endpoint.Sandbox{}
	return nil
}

func (r *register) GetEndpoint(context.Context, endpoint.Generation) (endpoint.Endpoint, error) {
	return endpoint.Endpoint{}, unreachable
}

// A shim that ends before it has attached leaves no BIND of its own behind: nothing
// else would end it.
func TestNoBindStays(t *testing.T) {
	lost := func(reason client.Reason) error {
		return &client.UnreachableError{Addr: "test", Reason: reason, Err: errors.New("lost")}
	}
	hang := func(ctx context.Context) error { <-ctx.Done(); return lost(client.TimedOut) }
	byName := func(r *binding.Request) {
		r.Select = api.Selector{Attachment: record(endpoint.Generation{}).Attachment}
	}
	refusal := api.Errorf(api.FailedPrecondition, "no")
	for _, tt := range []struct {
		name    string
		edit    func(*register)
		request func(*binding.Request)
		is      error // of the shim; nil: it ended in order
		unbinds int
		stays   bool
		within  time.Duration
	}{
		{
			name: "told to end during BIND", unbinds: 1, within: bindTook + time.Second,
			edit: func(r *register) {
				r.reply = func(ctx context.Context) error {
					r.stop()
					time.Sleep(bindTook)
					return ctx.Err()
				}
				r.attach = func(ctx context.Context) error { return ctx.Err() }
			},
		},
		{
			name: "told to end, and the reply to BIND does not come", unbinds: 1, within: 11 * time.Second,
			edit: func(r *register) {
				r.reply = func(ctx context.Context) error { r.stop(); return hang(ctx) }
			},
		},
		{
			name: "told to end between BIND and ATTACH", unbinds: 1, within: time.Second,
			edit: func(r *register) {
				r.attach = func(ctx context.Context) error { r.stop(); <-ctx.Done(); return ctx.Err() }
			},
		},
		{
			name: "replies to BIND are lost", unbinds: 1, is: client.ErrUnreachable, within: 16 * time.Second,
			edit: func(r *register) { r.reply = func(context.Context) error { return lost(client.Broken) } },
		},
		{
			name: "replies to BIND are lost, by name", unbinds: 1, is: client.ErrUnreachable, within: 17 * time.Second, request: byName,
			edit: func(r *register) {
				begin := time.Now()
				r.reply = func(context.Context) error {
					if time.Since(begin) < joinBudget+time.Second {
						return lost(client.Broken)
					}
					return nil
				}
			},
		},
		{
			name: "ATTACH takes too long", unbinds: 1, is: client.ErrUnreachable, within: 16 * time.Second,
			edit: func(r *register) { r.attach = hang },
		},
		{
			name: "ATTACH is refused", unbinds: 1, is: refusal, within: time.Second, request: byName,
			edit: func(r *register) { r.attach = func(context.Context) error { return refusal } },
		},
		{
			name: "mknetd is away for a moment", unbinds: 3, is: refusal, within: 2 * time.Second,
			edit: func(r *register) {
				r.attach = func(context.Context) error { return refusal }
				r.unbind = func() error {
					if r.unbinds < 3 {
						return unreachable
					}
					return nil
				}
			},
		},
		{
			name: "BIND is refused", unbinds: 0, is: refusal, within: time.Second,
			edit: func(r *register) { r.bind = func(context.Context) error { return refusal } },
		},
		{
			name: "BIND is refused the second time", unbinds: 1, is: refusal, within: time.Second,
			edit: func(r *register) {
				r.bind = func(context.Context) error {
					if r.bound != (endpoint.Sandbox{}) {
						return refusal
					}
					return nil
				}
				r.attach = func(context.Context) error { return unreachable }
			},
		},
		{
			name: "the runtime's BIND", unbinds: 0, is: refusal, stays: true, within: time.Second,
			request: func(r *binding.Request) { r.Nonce = strings.Repeat("1", 32) },
			edit: func(r *register) {
				r.bound = testSandbox
				r.attach = func(context.Context) error { return refusal }
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				r := &register{gen: endpoint.NewGeneration(), stop: cancel}
				tt.edit(r)
				request := binding.Request{Select: api.Selector{Generation: r.gen}, Sandbox: testSandbox, Queues: 1}
				if tt.request != nil {
					tt.request(&request)
				}
				begin := time.Now()
				err := New(Config{Daemon: r, Request: request, Log: slog.New(slog.DiscardHandler)}).Run(ctx, func(endpoint.Endpoint) { t.Error("joined") })
				if !errors.Is(err, tt.is) {
					t.Errorf("the shim ended with %v, want %v", err, tt.is)
				}
				if stays := r.bound != (endpoint.Sandbox{}); stays != tt.stays || r.unbinds != tt.unbinds {
					t.Errorf("bound: %t, after %d UNBINDs; want %t, %d", stays, r.unbinds, tt.stays, tt.unbinds)
				}
				if took := time.Since(begin); took > tt.within {
					t.Errorf("took %s, want at most %s", took, tt.within)
				}
			})
		})
	}
}

// bindTook is a slow BIND that still ends within the grace it is given.
const bindTook = 2 * time.Second
