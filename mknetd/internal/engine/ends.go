package engine

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// end is who is meant at one end of a flow.
type end struct {
	addr netip.Addr
	port uint16             // 0: the text has none
	ep   *endpoint.Endpoint // nil: the address of somebody else
}

// ends finds whom both ends of a flow mean (spec/operations.md, "Who is meant").
func (e *Engine) ends(from, to string) (a, b end, err error) {
	all, err := e.store.List()
	if err != nil {
		return a, b, err
	}
	if a, err = endOf("from", from, all); err != nil {
		return a, b, err
	}
	b, err = endOf("to", to, all)
	return a, b, err
}

// readyEnds is ends for whom a flow has no source port, and an endpoint must be in
// force. port is the one that was given beside the text of to; it becomes to's.
func (e *Engine) readyEnds(from, to string, port *uint16) (a, b end, err error) {
	if a, b, err = e.ends(from, to); err != nil {
		return a, b, err
	}
	if a.port != 0 {
		return a, b, api.Errorf(api.InvalidArgument, "from %q: a source port is not looked at here (`mknetd explain` asks about one flow)", from)
	}
	for _, en := range []end{a, b} {
		if en.ep != nil && en.ep.State != endpoint.Ready {
			return a, b, api.Errorf(api.FailedPrecondition, "endpoint %s with %s: is %s, not READY (see `mknetd endpoints %s`)", en.ep.Generation, en.addr, en.ep.State, en.ep.Generation.Short())
		}
	}
	*port, err = onePort("to", to, b.port, *port)
	return a, b, err
}

// onePort is the port of an end: that of its text, or the one given beside it.
func onePort[N int | uint16](which, text string, own uint16, given N) (N, error) {
	if own != 0 && given != 0 && N(own) != given {
		return 0, api.Errorf(api.InvalidArgument, "%s %q: has another port than the %d given beside it", which, text, given)
	}
	if own != 0 {
		return N(own), nil
	}
	return given, nil
}

// endOf finds whom one text means among these endpoints: by address or name, either
// with a port behind a colon. Its refusals are InvalidArgument for what can mean
// nobody, or several, and NotFound for a name that nobody has.
func endOf(which, text string, all []endpoint.Endpoint) (end, error) {
	name, port, err := splitPort(which, text)
	if err != nil {
		return end{}, err
	}
	addr, err := netip.ParseAddr(name)
	isAddr := err == nil
	if isAddr && (!addr.Is4() || addr.IsUnspecified()) {
		return end{}, api.Errorf(api.InvalidArgument, "%s %q: must be an IPv4 address of somebody", which, text)
	}
	called := func(ep endpoint.Endpoint) bool { return ep.Address == addr }
	if !isAddr {
		called = func(ep endpoint.Endpoint) bool { return isCalled(ep, name) }
	}
	found := among(all, called)
	if len(found) == 0 && !isAddr && len(name) >= shortestGeneration {
		found = among(all, func(ep endpoint.Endpoint) bool { return strings.HasPrefix(ep.Generation.String(), name) })
	}
	switch {
	case len(found) > 1:
		return end{}, api.Errorf(api.InvalidArgument, "%s %q: means %d endpoints, among them %s with %s and %s with %s: give the address or network/container/interface",
			which, text, len(found), found[0].Attachment, found[0].Address, found[1].Attachment, found[1].Address)
	case len(found) == 1:
		return end{addr: found[0].Address, port: port, ep: &found[0]}, nil
	case isAddr:
		return end{addr: addr, port: port}, nil
	}
	return end{}, api.Errorf(api.NotFound, "%s %q: is no IPv4 address, and no endpoint is called so (see `mknetd endpoints`)", which, text)
}

// shortestGeneration is how many of a generation's digits name an endpoint.
const shortestGeneration = 4

// isCalled reports whether a name is all of one of an endpoint's: attachment,
// container ID, or what policy calls it.
func isCalled(ep endpoint.Endpoint, name string) bool {
	p := policyEndpoint(ep)
	byPolicy := p.Name
	if p.Namespace != "" {
		byPolicy = p.Namespace + "/" + p.Name
	}
	return name == ep.ContainerID || name == byPolicy || name == ep.Attachment.String()
}

// among are the endpoints that are called so: those in force, and others only where
// there is none, for a pod's name outlives it.
func among(all []endpoint.Endpoint, called func(endpoint.Endpoint) bool) []endpoint.Endpoint {
	var found []endpoint.Endpoint
	for _, ep := range all {
		if called(ep) {
			found = append(found, ep)
		}
	}
	ready := func(ep endpoint.Endpoint) bool { return ep.State == endpoint.Ready }
	if slices.ContainsFunc(found, ready) {
		found = slices.DeleteFunc(found, func(ep endpoint.Endpoint) bool { return !ready(ep) })
	}
	return found
}

// splitPort takes the port off a text. No name has a colon (CNI SPEC: container ID,
// network and interface names), and IPv6 is refused later.
func splitPort(which, text string) (name string, port uint16, err error) {
	if _, err := netip.ParseAddr(text); err == nil {
		return text, 0, nil
	}
	name, digits, has := text, "", false
	if i := strings.LastIndexByte(text, ':'); i >= 0 {
		name, digits, has = strings.Trim(text[:i], "[]"), text[i+1:], true
	}
	if name == "" {
		return "", 0, api.Errorf(api.InvalidArgument, "%s %q: names nobody: give an IPv4 address, or an endpoint (see `mknetd endpoints`)", which, text)
	}
	if !has {
		return name, 0, nil
	}
	n, err := strconv.ParseUint(digits, 10, 16)
	if err != nil || n == 0 {
		return "", 0, api.Errorf(api.InvalidArgument, "%s %q: port %q must be 1 to 65535", which, text, digits)
	}
	return name, uint16(n), nil
}
