package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/alloc"
	"mknet/mknetd/internal/api"
	"mknet/mknetd/internal/netns"
	"mknet/mknetd/internal/store"
	wire "mknet/spec/api"
	"mknet/spec/endpoint"
)

// find returns the endpoint that a selector means: by generation, by attachment,
// or by namespace, in this order. None is an error that is store.ErrNotFound.
func (e *Engine) find(sel wire.Selector, nsFile *os.File) (endpoint.Endpoint, error) {
	want, given, err := namespaceOf(sel, nsFile)
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	none := endpoint.Attachment{}
	if sel.Attachment != none {
		if err := sel.Attachment.Validate(); err != nil {
			return endpoint.Endpoint{}, wire.Errorf(wire.InvalidArgument, "%v", err)
		}
	}
	switch {
	case !sel.Generation.IsZero():
		ep, err := e.store.Get(sel.Generation)
		if err == nil && sel.Attachment != none && ep.Attachment != sel.Attachment {
			return ep, wire.Errorf(wire.StaleIdentity, "endpoint %s: belongs to attachment %s, not to %s", sel.Generation, ep.Attachment, sel.Attachment)
		}
		return ep, err
	case sel.Attachment != none:
		ep, err := e.store.ByAttachment(sel.Attachment)
		if err == nil && given && !ep.Namespace.Same(want) {
			return ep, wire.Errorf(wire.StaleIdentity, "attachment %s: endpoint %s is in another namespace (%s) than the one given", sel.Attachment, ep.Generation, ep.Namespace.Path)
		}
		return ep, err
	case given:
		return e.onlyOneIn(want)
	}
	return endpoint.Endpoint{}, wire.Errorf(wire.InvalidArgument, "name the endpoint: by generation, by network, containerID and ifName, or by namespace")
}

// onlyOneIn returns the endpoint of a namespace that has exactly one.
func (e *Engine) onlyOneIn(ns endpoint.Namespace) (endpoint.Endpoint, error) {
	found, err := e.store.ByNamespace(ns)
	switch {
	case err != nil:
		return endpoint.Endpoint{}, err
	case len(found) == 0:
		return endpoint.Endpoint{}, &store.NotFoundError{What: "namespace " + ns.Path}
	case len(found) > 1:
		return endpoint.Endpoint{}, wire.Errorf(wire.InvalidArgument, "namespace %s: has %d endpoints, name one by its generation or attachment", ns.Path, len(found))
	}
	return found[0], nil
}

// namespaceOf identifies the namespace of a selector; given is false when it
// names none, or one that does not exist any more (which a DEL may).
func namespaceOf(sel wire.Selector, nsFile *os.File) (id endpoint.Namespace, given bool, err error) {
	var ns *netns.Namespace
	switch {
	case nsFile != nil:
		ns, err = netns.FromFile(nsFile, sel.NetnsPath)
	case sel.Namespace != nil:
		return *sel.Namespace, true, nil
	case sel.NetnsPath != "":
		ns, err = netns.Open(sel.NetnsPath)
	default:
		return id, false, nil
	}
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, netns.ErrNotNamespace):
		return id, false, nil
	case errors.Is(err, netns.ErrHostNamespace):
		return id, false, wire.Errorf(wire.InvalidArgument, "%v", err)
	case err != nil:
		return id, false, err
	}
	defer ns.Close()
	return ns.ID(), true, nil
}

// Get returns one endpoint.
func (e *Engine) Get(_ context.Context, gen endpoint.Generation) (endpoint.Endpoint, error) {
	ep, err := e.store.Get(gen)
	return ep, notFound(err)
}

// List returns the endpoints that pass the filter, in the order of generations.
func (e *Engine) List(_ context.Context, filter api.Filter) ([]endpoint.Endpoint, error) {
	out := []endpoint.Endpoint{}
	err := e.store.Each(func(ep endpoint.Endpoint) error {
		if filter.Match(ep) {
			out = append(out, ep)
		}
		return nil
	})
	return out, err
}

// now is the moment on the clock that quarantines are measured on.
func (e *Engine) now() alloc.Instant {
	var ts unix.Timespec
	// CLOCK_BOOTTIME exists since Linux 2.6.39 and cannot fail on a valid pointer.
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return alloc.Instant{BootID: e.bootID, At: time.Duration(ts.Nano())}
}

// moment is now, as records and DELs note it.
func (e *Engine) moment() endpoint.Moment {
	now := e.now()
	return endpoint.Moment{BootID: now.BootID, SinceBoot: now.At}
}

// notFound turns the store's "no such record" into the API's.
func notFound(err error) error {
	if errors.Is(err, store.ErrNotFound) {
		return wire.Errorf(wire.NotFound, "%v (see `mknetd endpoints`)", err)
	}
	return err
}

// storeError gives the store's refusals their codes.
func storeError(err error) error {
	var exists *store.ExistsError
	var state *endpoint.StateError
	var write *store.WriteError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &exists):
		return wire.Errorf(wire.AlreadyExists, "%v", err)
	case errors.As(err, &state):
		return wire.Errorf(wire.FailedPrecondition, "%v", err)
	case errors.As(err, &write):
		return wire.Retryablef(wire.Unavailable, "%v", err)
	}
	return notFound(err)
}

// busy is the answer when a lock could not be had in time.
func busy(what string, err error) error {
	return wire.Retryablef(wire.Unavailable, "%s: another call is working on it: %v", what, err)
}

// lines splits a joined error into one line each, for api.Error.Details.
func lines(err error) []string {
	var many interface{ Unwrap() []error }
	if errors.As(err, &many) {
		var out []string
		for _, e := range many.Unwrap() {
			out = append(out, lines(e)...)
		}
		return out
	}
	return []string{fmt.Sprint(err)}
}
