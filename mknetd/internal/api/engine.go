package api

import (
	"context"
	"os"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Engine does what the routes ask for. Every method is safe for concurrent use.
//
// Errors: an *api.Error in the chain is sent as it is; the typed errors of
// spec/endpoint and the context's are mapped by this package; any other error
// is INTERNAL and is sent with its text.
//
// Contexts: each carries the route's deadline (see Limits) and ends when the
// caller hangs up. An engine that must finish or undo what it began detaches
// from it (context.WithoutCancel) under a time-out of its own.
//
// A namespace descriptor (ns) is nil when none was passed. Ownership moves to
// the engine with the call, also when it returns an error. It is unchecked: any
// kind of file may have been passed.
//
// peer is the calling process. Over TCP and from another PID namespace its PID
// is 0, and Comm says who it is ("tls:<common name>").
type Engine interface {
	Create(ctx context.Context, req api.CreateRequest, ns *os.File, peer endpoint.Process) (endpoint.Endpoint, error)
	Get(ctx context.Context, gen endpoint.Generation) (endpoint.Endpoint, error)
	List(ctx context.Context, filter Filter) ([]endpoint.Endpoint, error)
	// Check gets a selector with the same generation, or the zero selector when
	// the body was empty.
	Check(ctx context.Context, gen endpoint.Generation, sel api.Selector) (api.CheckReply, error)
	// Delete returns the zero reply when there was nothing to delete.
	Delete(ctx context.Context, req api.DeleteRequest, ns *os.File, peer endpoint.Process) (api.DeleteReply, error)
	Bind(ctx context.Context, req api.BindRequest, ns *os.File, peer endpoint.Process) (api.BindReply, error)
	Unbind(ctx context.Context, gen endpoint.Generation, req api.UnbindRequest, peer endpoint.Process) error
	// Attach returns one open descriptor a queue. They belong to this package,
	// which closes its copies once they are sent or could not be.
	Attach(ctx context.Context, gen endpoint.Generation, req api.AttachRequest, peer endpoint.Process) (api.AttachReply, []*os.File, error)
	Counters(ctx context.Context, gen endpoint.Generation) (api.CountersReply, error)
	// ReportCounters must not wait for a lock that is held across kernel work.
	ReportCounters(ctx context.Context, gen endpoint.Generation, req api.CountersReport, peer endpoint.Process) error
	Provision(ctx context.Context, req api.ProvisionRequest, peer endpoint.Process) (api.BindReply, error)
	Release(ctx context.Context, req api.ReleaseRequest, peer endpoint.Process) (api.DeleteReply, error)
	GC(ctx context.Context, req api.GCRequest, peer endpoint.Process) (api.GCReply, error)
	// Allocate sets an address of a pod pool aside; ReleaseLease gives it back, and
	// succeeds when there is no such lease.
	Allocate(ctx context.Context, req api.LeaseRequest, peer endpoint.Process) (api.Lease, error)
	ReleaseLease(ctx context.Context, id string, peer endpoint.Process) error
	Inventory(ctx context.Context) (api.Inventory, error)
	Explain(ctx context.Context, req api.WayRequest) (api.Explanation, error)
	// Events and Follow must not wait for a lock that is held across kernel work.
	// Follow sends what is remembered and then what happens, one call of send at a
	// time, until ctx ends or send fails; nil where ctx was the reason, or the engine ends.
	Events(ctx context.Context, after api.EventsAfter) api.EventList
	Follow(ctx context.Context, after api.EventsAfter, send func(api.Event) error) error
	// Health and Config must not wait for a lock that is held across kernel work.
	Health(ctx context.Context) api.Health
	Config(ctx context.Context) api.DaemonConfig

	PolicyEngine
	Tracer
}

// Filter selects endpoints; an empty field matches every one.
type Filter struct {
	Network     string
	ContainerID string
	IfName      string
	State       endpoint.State
	SandboxID   string
}

// Match reports whether an endpoint passes the filter.
func (f Filter) Match(ep endpoint.Endpoint) bool {
	return (f.Network == "" || f.Network == ep.Network) &&
		(f.ContainerID == "" || f.ContainerID == ep.ContainerID) &&
		(f.IfName == "" || f.IfName == ep.IfName) &&
		(f.State == "" || f.State == ep.State) &&
		(f.SandboxID == "" || ep.Binding != nil && f.SandboxID == ep.Binding.ID)
}
