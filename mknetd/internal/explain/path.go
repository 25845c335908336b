package explain

import (
	"fmt"
	"strings"

	"mknet/mknetd/internal/datapath"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

const lookAtPrograms = "mknetd inventory | grep bpf"

// attached says what a program that is not ours may do at one of an endpoint's
// hooks.
func (w *walker) attached(p Party, leaving bool) bool {
	if p.Endpoint == nil || w.standing(p, leaving) != datapath.Strange {
		return true
	}
	return w.unknown(endpoint.InHost, "bpf-program of "+p.Endpoint.HostLink, "is not ours, or another one runs before it: what it does with the packet is not known here", "bpftool net show dev "+p.Endpoint.HostLink)
}

// standing is what runs on the hook that the packet passes. Without a data path it
// is nothing.
func (w *walker) standing(p Party, leaving bool) datapath.Standing {
	switch {
	case p.Path == nil:
		return datapath.Absent
	case leaving:
		return p.Path.From
	}
	return p.Path.To
}

// policed asks what policy says of the packet; the answer to one that it has
// admitted passes. An endpoint whose other hook has not seen the packet has its answer
// judged as a packet of its own.
func (w *walker) policed(direction string, p Party) bool {
	points, port := w.s.Policy, w.s.Port
	if w.answer {
		if points, port = w.s.Answers, w.s.SourcePort; w.judged[p.Addr] {
			return true
		}
	}
	for _, point := range points {
		if p.Endpoint == nil || point.Direction != direction || point.Endpoint != p.Addr || len(point.Steps) == 0 {
			continue
		}
		object := "policy " + direction + " of " + p.Addr.String()
		switch {
		case p.Unjudged:
			return w.pass(endpoint.InHost, object, "is missing in the kernel: nothing is judged", lookAtPrograms)
		case !w.redirects && w.standing(p, direction == "egress") == datapath.Strange:
			return true // attached says so
		case !w.redirects && w.standing(p, direction == "egress") == datapath.Absent:
			return w.pass(endpoint.InHost, object, "no program is attached: nothing is judged", lookAtPrograms)
		case p.child() && (!p.known() || !p.Path.Known):
			return w.pass(endpoint.InHost, object, "the programs do not know the link: nothing is judged", lookAtPrograms)
		case w.from.Doubtful || w.to.Doubtful:
			return w.unknown(endpoint.InHost, object, "what the kernel has of it is not what was written", "mknetd inventory | grep policy")
		}
		last := point.Steps[len(point.Steps)-1]
		s := api.ExplainStep{
			Where: endpoint.InHost, Object: object, Outcome: api.Passes,
			Inspect: fmt.Sprintf("mknetd policy explain --from %s --to %s --proto %s --port %d", w.from.Addr, w.to.Addr, w.s.Protocol, port),
		}
		w.judged[p.Addr] = true
		for _, step := range point.Steps {
			s.Rules = append(s.Rules, api.Rule{Chain: strings.TrimSpace(step.Layer + " " + step.Policy), Number: int(step.Priority), Text: step.Rule, Matches: step.Why})
		}
		s.Why = strings.Join(strings.Fields(last.Layer+" "+last.Policy+" "+last.Rule), " ") + ": " + last.Why
		if !point.Allowed {
			s.Outcome = api.Dropped
		}
		return w.add(s)
	}
	return true
}

// redirected reports whether the data path carries the packet by itself: from pod to
// pod, by their entries, and only a flow that began so (bpf/flow.h).
func (w *walker) redirected() bool {
	if !w.from.pod() || !w.to.pod() || !w.from.known() || !w.to.known() || w.from.Path.From != datapath.Ours {
		return false
	}
	from, to := w.from.Path.Entry, w.to.Path.Entry
	if from.StackOnly || to.StackOnly || w.pieces || w.sizeBytes > to.MTUBytes || from.HostMAC != w.s.Host.Links[w.from.Endpoint.HostLink].MAC {
		return false
	}
	if w.path == datapath.Unremembered {
		return w.mayBegin()
	}
	return w.path == datapath.ByRedirect
}

// mayBegin reports whether the data path takes the packet for the first of a flow:
// it knows a SYN and an echo request, and of UDP every packet may be one.
func (w *walker) mayBegin() bool {
	switch w.s.Protocol {
	case "tcp":
		return w.trackedAs(w.s.Flow).begins
	case "icmp":
		return !w.trackedAs(w.s.Flow).reply
	}
	return true
}

// remembered is the path that the data path knows of the flow once the packet has
// passed.
func (w *walker) remembered() datapath.Path {
	switch {
	case w.redirects:
		return datapath.ByRedirect
	case !w.to.pod() || w.standing(w.to, false) != datapath.Ours || w.from.Path == nil || w.from.Path.Entry == nil:
		return w.path // no program saw it arrive, or its sender is none of this node's
	case w.path == datapath.ByRedirect && w.s.Protocol == "tcp" && !w.trackedAs(w.s.Flow).begins:
		return datapath.ByRedirect
	}
	return datapath.ByStack
}

// answersARP reports whether the program on what the sender sends answers for its
// gateway.
func (w *walker) answersARP() bool {
	return w.standing(w.from, true) == datapath.Ours && w.from.known() && w.from.Path.Known
}

// program is what the data path makes of a pod's frames.
func (w *walker) program(leaving bool) bool {
	party := w.to
	if leaving {
		party = w.from
	}
	ep := party.Endpoint
	inner := party.Space.Links[ep.IfName]
	object := "bpf-program of " + ep.HostLink
	switch standing := w.standing(party, leaving); {
	case standing == datapath.Strange && !w.redirects:
		return true // attached says so
	case standing == datapath.Absent && !w.redirects:
		return w.pass(endpoint.InHost, object, "is not attached, or there is no data path: the host's stack decides", lookAtPrograms)
	case !party.known():
		return w.broken(endpoint.InHost, "bpf-endpoint "+ep.Address.String(), "is missing, or of another link: the programs drop frames of a link that they do not know", lookAtPrograms)
	case leaving && inner.MAC != party.Path.Entry.PodMAC:
		return w.broken(endpoint.InNamespace, "mac "+ep.IfName, fmt.Sprintf("is %s, and the program lets only %s pass", inner.MAC, party.Path.Entry.PodMAC), in(ep, "ip link show "+ep.IfName))
	case w.redirects && inner.MAC != party.Path.Entry.PodMAC:
		return w.broken(endpoint.InNamespace, "mac "+ep.IfName, fmt.Sprintf("is %s, and what is redirected is sent to %s", inner.MAC, party.Path.Entry.PodMAC), in(ep, "ip link show "+ep.IfName))
	}
	return w.pass(endpoint.InHost, object, "source and destination are the endpoint's own", lookAtPrograms)
}
