package binding

import (
	"context"
	"errors"
	"os"
	"testing"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// record answers every question for an endpoint in the same way.
type record struct {
	Daemon
	ep  endpoint.Endpoint
	err error
}

func (r record) GetEndpoint(context.Context, endpoint.Generation) (endpoint.Endpoint, error) {
	return r.ep, r.err
}

// What ATTACH answered with is compared with what mknetd says now, and with nothing
// that this process knows of itself.
func TestStands(t *testing.T) {
	sandbox := endpoint.Sandbox{ID: "s", Generation: "1"}
	elsewhere := endpoint.Process{PID: os.Getpid() + 4000, StartTime: 77} // as mknetd sees a process of a PID namespace
	attached := endpoint.Endpoint{Generation: endpoint.NewGeneration(), State: endpoint.Ready, Binding: &endpoint.Binding{Sandbox: sandbox, Shim: &elsewhere}}
	with := func(edit func(*endpoint.Endpoint, *endpoint.Binding)) endpoint.Endpoint {
		ep, b, shim := attached, *attached.Binding, elsewhere
		ep.Binding, b.Shim = &b, &shim
		edit(&ep, &b)
		return ep
	}
	for _, tt := range []struct {
		name   string
		now    record
		stands bool
	}{
		{"as it was", record{ep: attached}, true},
		{"another process", record{ep: with(func(_ *endpoint.Endpoint, b *endpoint.Binding) { b.Shim.PID = os.Getpid() })}, false},
		{"the PID again", record{ep: with(func(_ *endpoint.Endpoint, b *endpoint.Binding) { b.Shim.StartTime++ })}, false},
		{"another sandbox", record{ep: with(func(_ *endpoint.Endpoint, b *endpoint.Binding) { b.Sandbox.Generation = "2" })}, false},
		{"not bound", record{ep: with(func(ep *endpoint.Endpoint, _ *endpoint.Binding) { ep.Binding = nil })}, false},
		{"being deleted", record{ep: with(func(ep *endpoint.Endpoint, _ *endpoint.Binding) { ep.State = endpoint.Deleting })}, false},
		{"deleted", record{err: api.Errorf(api.NotFound, "no")}, false},
		{"mknetd is away", record{err: errors.New("away")}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := Stands(t.Context(), tt.now, attached)
			if tt.stands && err != nil || !tt.stands && !errors.Is(err, ErrGone) {
				t.Errorf("got %v; it stands: %t", err, tt.stands)
			}
		})
	}
}
