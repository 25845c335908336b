// Package binding gets the TUN of a bound endpoint from mknetd and gives it
// back: BIND, ATTACH, UNBIND. It checks everything that mknetd hands out against
// what was asked for. It implements the shim's part of spec/life-cycle.md.
package binding

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"time"

	"mknet/shim/tun"
	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/crash"
	"mknet/spec/endpoint"
	"mknet/spec/pump"
)

var (
	bound              = crash.New("shim.bound")
	descriptorsArrived = crash.New("shim.descriptors-arrived")
	descriptorsTaken   = crash.New("shim.descriptors-taken")
	unbound            = crash.New("shim.unbound")
)

// bindGrace is how long a BIND is waited for once the shim was told to end. It is
// one commit of mknetd's store, and at times a TUN that is made again.
const bindGrace = 5 * time.Second

// Daemon is what is needed of mknetd.
type Daemon interface {
	Bind(ctx context.Context, req api.BindRequest) (api.BindReply, error)
	Attach(ctx context.Context, gen endpoint.Generation, req api.AttachRequest) (api.AttachReply, []*os.File, error)
	Unbind(ctx context.Context, gen endpoint.Generation, req api.UnbindRequest) error
	GetEndpoint(ctx context.Context, gen endpoint.Generation) (endpoint.Endpoint, error)
}

// ErrGone says that the endpoint is deleted, or bound to somebody else. This shim has
// nothing to do any more.
var ErrGone = errors.New("the binding is gone")

// MismatchError says that mknetd handed out something else than was asked for.
type MismatchError struct{ Problem string }

func (e *MismatchError) Error() string { return "mknetd answers with something else: " + e.Problem }

// Request says which endpoint is to be bound to which sandbox.
type Request struct {
	Select  api.Selector
	Sandbox endpoint.Sandbox
	// Nonce is that of a BIND which the runtime has made by itself; Select has
	// then a generation. Empty: BIND here.
	Nonce  string
	Queues int
}

// Binding is an endpoint with its TUN's queues open.
type Binding struct {
	Endpoint endpoint.Endpoint
	Queues   []*tun.Queue
	VnetHdr  bool
	Lanes    int           // what the kernel can steer to
	Offloads pump.Offloads // what the kernel can give to our readers
}

// Joiner joins one endpoint, in as many calls of Join as it takes, and knows what
// they may have left behind at mknetd.
type Joiner struct {
	daemon  Daemon
	request Request
	gen     endpoint.Generation // zero until known
	owed    bool                // there may be a BIND of ours to which no ATTACH was answered
}

// NewJoiner returns a Joiner that has asked for nothing yet.
func NewJoiner(d Daemon, r Request) *Joiner {
	return &Joiner{daemon: d, request: r, gen: r.Select.Generation}
}

// Join binds and attaches. The caller closes the Binding, and calls Undo when it
// gives up after an error.
func (j *Joiner) Join(ctx context.Context) (*Binding, error) {
	r, nonce := j.request, j.request.Nonce
	if nonce == "" {
		var err error
		if nonce, err = j.bind(ctx); err != nil {
			return nil, fmt.Errorf("bind: %w", err)
		}
		bound.Here()
	}
	rep, files, err := j.daemon.Attach(ctx, j.gen, api.AttachRequest{Sandbox: r.Sandbox, Nonce: nonce, Queues: r.Queues})
	if err != nil {
		return nil, fmt.Errorf("attach endpoint %s: %w", j.gen, errors.Join(err, closeFiles(files)))
	}
	j.owed = false // mknetd knows this process, whose end frees the endpoint
	descriptorsArrived.Here()
	b, err := accept(rep, files, r)
	if err == nil && rep.Endpoint.Generation != j.gen {
		err = errors.Join(&MismatchError{fmt.Sprintf("endpoint %s instead of %s", rep.Endpoint.Generation, j.gen)}, b.Close())
	}
	if err != nil {
		return nil, fmt.Errorf("attach endpoint %s: %w", j.gen, err)
	}
	descriptorsTaken.Here()
	return b, nil
}

// bind makes the BIND and returns its nonce. One that has been sent is waited for a
// little longer than ctx: whether it was made must be known.
func (j *Joiner) bind(ctx context.Context) (nonce string, err error) {
	if err := ctx.Err(); err != nil {
		return "", err
	}
	ctx, cancel := outliving(ctx, bindGrace)
	defer cancel()
	rep, err := j.daemon.Bind(ctx, api.BindRequest{Selector: j.request.Select, Sandbox: j.request.Sandbox})
	if err != nil {
		j.owed = j.owed || mayStand(err)
		return "", err
	}
	j.owed = true
	if err := check(rep.Endpoint, j.request); err != nil {
		return "", err
	}
	j.gen = rep.Endpoint.Generation
	return rep.Nonce, nil
}

// outliving returns a context that ends so long after ctx does, or when it is
// canceled.
func outliving(ctx context.Context, grace time.Duration) (context.Context, context.CancelFunc) {
	out, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		t := time.NewTimer(grace)
		defer t.Stop()
		select {
		case <-t.C:
			cancel()
		case <-out.Done():
		}
	})
	return out, func() { stop(); cancel() }
}

// mayStand reports whether a BIND that failed with err may have been made all the
// same: it was sent, and was not refused.
func mayStand(err error) bool {
	var refusal *api.Error
	var away *client.UnreachableError
	switch {
	case errors.As(err, &refusal):
		return refusal.Code == api.Unavailable || refusal.Code == api.Internal
	case errors.As(err, &away):
		return away.Reason == client.TimedOut || away.Reason == client.Broken
	}
	return !errors.Is(err, fs.ErrPermission)
}

// Undo takes a BIND back that was made here and that no answered ATTACH followed:
// nothing else ends one. It may be called again where it failed.
func (j *Joiner) Undo(ctx context.Context) error {
	if !j.owed || j.request.Nonce != "" {
		return nil
	}
	if j.gen.IsZero() {
		// The reply that named the endpoint was lost: the same BIND again names it
		// and changes nothing.
		if _, err := j.bind(ctx); err != nil {
			return fmt.Errorf("take the BIND back: %w", err)
		}
	}
	if err := Leave(ctx, j.daemon, j.gen, j.request.Sandbox); err != nil {
		return fmt.Errorf("take the BIND back: %w", err)
	}
	j.owed = false
	return nil
}

// check compares an endpoint with the request.
func check(ep endpoint.Endpoint, r Request) error {
	bad := func(format string, args ...any) error { return &MismatchError{fmt.Sprintf(format, args...)} }
	want := r.Select
	switch {
	case !want.Generation.IsZero() && ep.Generation != want.Generation:
		return bad("endpoint %s instead of %s", ep.Generation, want.Generation)
	case want.Network != "" && ep.Attachment != want.Attachment:
		return bad("attachment %s instead of %s", ep.Attachment, want.Attachment)
	case ep.Generation.IsZero():
		return bad("an endpoint without a generation")
	case ep.Mode != endpoint.Multikernel:
		return bad("an endpoint of mode %q", ep.Mode)
	case ep.State != endpoint.Ready:
		return bad("an endpoint in state %s", ep.State)
	case ep.Binding == nil || ep.Binding.Sandbox != r.Sandbox:
		return bad("an endpoint that is not bound to %s", r.Sandbox)
	case !ep.Address.Is4() || !ep.Subnet.IsValid() || !ep.Subnet.Contains(ep.Address) || !ep.Subnet.Contains(ep.Gateway) || ep.Address == ep.Gateway:
		return bad("address %s and gateway %s in %s", ep.Address, ep.Gateway, ep.Subnet)
	case ep.MTUBytes < endpoint.MinMTU || ep.MTUBytes > endpoint.MaxMTU:
		return bad("an mtu of %d", ep.MTUBytes)
	}
	return nil
}

// accept takes ownership of files, also on error.
func accept(rep api.AttachReply, files []*os.File, r Request) (*Binding, error) {
	b := &Binding{Endpoint: rep.Endpoint, VnetHdr: rep.VnetHdr}
	for i, f := range files {
		q, err := tun.FromFile(f)
		if err != nil {
			return nil, errors.Join(err, closeFiles(files[i+1:]), b.Close())
		}
		b.Queues = append(b.Queues, q)
	}
	if err := b.verify(rep, r); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	if err := b.prepare(); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

func (b *Binding) verify(rep api.AttachReply, r Request) error {
	if err := check(rep.Endpoint, r); err != nil {
		return err
	}
	if n := len(b.Queues); n == 0 || n > r.Queues || n != rep.Queues {
		return &MismatchError{fmt.Sprintf("%d descriptors, %d announced, %d asked for", n, rep.Queues, r.Queues)}
	}
	for _, q := range b.Queues {
		if q.Name() != rep.Endpoint.IfName || q.VnetHeader() != rep.VnetHdr {
			return &MismatchError{fmt.Sprintf("a queue of %s (virtio-net header %t) instead of %s (%t)", q.Name(), q.VnetHeader(), rep.Endpoint.IfName, rep.VnetHdr)}
		}
	}
	return nil
}

// prepare finds out how many lanes and which offloads this kernel has.
func (b *Binding) prepare() error {
	b.Lanes = min(len(b.Queues), pump.MaxLanes)
	if b.Lanes > 1 {
		switch err := b.Queues[0].Steer(); {
		case errors.Is(err, tun.ErrNoSteering):
			extra := b.Queues[1:]
			b.Queues, b.Lanes = b.Queues[:1], 1
			if err := tun.CloseAll(extra); err != nil {
				return err
			}
		case err != nil:
			return err
		}
	}
	var err error
	b.Offloads, err = b.Queues[0].ProbeOffloads()
	return err
}

// Address is the child's own address with the prefix length of its subnet.
func (b *Binding) Address() netip.Prefix {
	return netip.PrefixFrom(b.Endpoint.Address, b.Endpoint.Subnet.Bits())
}

// Close closes the queues. It may be called more than once.
func (b *Binding) Close() error {
	err := tun.CloseAll(b.Queues)
	b.Queues = nil
	return err
}

// Leave gives the endpoint back. The queues must be closed already. An endpoint
// that is gone or bound to somebody else is what was wanted.
func Leave(ctx context.Context, d Daemon, gen endpoint.Generation, sandbox endpoint.Sandbox) error {
	err := d.Unbind(ctx, gen, api.UnbindRequest{Sandbox: sandbox})
	switch api.CodeOf(err) {
	case "", api.NotFound, api.StaleGeneration:
		unbound.Here()
		return nil
	}
	return fmt.Errorf("unbind endpoint %s: %w", gen, err)
}

// Stands returns ErrGone when mknetd says that the binding no longer stands that
// ATTACH answered with. A daemon that cannot be asked says nothing: the binding
// outlives its restarts.
func Stands(ctx context.Context, d Daemon, attached endpoint.Endpoint) error {
	gen, was := attached.Generation, attached.Binding
	ep, err := d.GetEndpoint(ctx, gen)
	switch {
	case api.CodeOf(err) == api.NotFound:
		return fmt.Errorf("%w: endpoint %s is deleted", ErrGone, gen)
	case err != nil:
		return nil
	case ep.Binding == nil || ep.Binding.Sandbox != was.Sandbox:
		return fmt.Errorf("%w: endpoint %s is not bound to sandbox %s any more", ErrGone, gen, was.Sandbox)
	case ep.State != endpoint.Ready:
		return fmt.Errorf("%w: endpoint %s is %s", ErrGone, gen, ep.State)
	case another(was.Shim, ep.Binding.Shim):
		return fmt.Errorf("%w: process %d has attached to endpoint %s", ErrGone, ep.Binding.Shim.PID, gen)
	}
	return nil
}

// another reports whether a process other than this one has attached. Both are as
// mknetd sees them: in a PID namespace our own PID is another one.
func another(we, now *endpoint.Process) bool {
	return we != nil && now != nil && (now.PID != we.PID || now.StartTime != we.StartTime)
}

func closeFiles(files []*os.File) error {
	var errs []error
	for _, f := range files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
