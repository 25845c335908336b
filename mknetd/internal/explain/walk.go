package explain

import (
	"fmt"
	"net/netip"
	"slices"

	"mknet/mknetd/internal/datapath"
	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Decide walks the way of a packet, and that of its answer.
func Decide(s Snapshot) (x api.Explanation) {
	x = api.Explanation{
		From: s.From.Addr, To: s.To.Addr, Protocol: s.Protocol, Port: s.Port, SourcePort: s.SourcePort, SizeBytes: s.SizeBytes,
		Way: []api.ExplainStep{}, Back: []api.ExplainStep{}, Faults: slices.Concat([]endpoint.Fault{}, s.From.Faults, s.To.Faults), Verdict: api.Passes,
		Because: "every station lets it pass, and the answer too",
	}
	defer func() { x.NotJudged = notJudged(x.Way, x.Back) }()
	judged := map[netip.Addr]bool{}
	there := walker{s: &s, judged: judged, from: s.From, to: s.To, path: s.Path, sizeBytes: s.SizeBytes, leave: s.Ways.Leave, host: s.Ways.Host, arrive: s.Ways.Arrive, reverse: s.Ways.ReversePath}
	if s.Flow != nil {
		there.translated = s.Flow.OrigSource.Addr() != s.Flow.ReplDestination.Addr()
	}
	there.walk()
	x.Way = append(x.Way, there.steps...)
	if there.stopped != "" {
		x.Verdict, x.Because = there.stopped, there.because
		return x
	}
	back := walker{
		s: &s, answer: true, judged: judged, from: s.To, to: s.From, translated: there.translated, path: there.remembered(),
		leave: s.Ways.BackLeave, host: s.Ways.BackHost, arrive: s.Ways.BackArrive, reverse: s.Ways.BackReversePath,
	}
	if s.Protocol == "icmp" {
		back.sizeBytes = s.SizeBytes // an echo comes back as long as it was, and may be cut
	}
	back.walk()
	x.Back = append(x.Back, back.steps...)
	switch {
	case back.stopped != "":
		x.Verdict, x.Because = back.stopped, "the packet arrives, its answer does not come back: "+back.because
	case there.doubt != "":
		x.Verdict, x.Because = api.Unknown, there.doubt
	case back.doubt != "":
		x.Verdict, x.Because = api.Unknown, "of the answer: "+back.doubt
	}
	return x
}

// notJudged are the stations that may decide otherwise than the verdict says, each once.
func notJudged(ways ...[]api.ExplainStep) []api.ExplainStep {
	found := []api.ExplainStep{}
	for _, s := range slices.Concat(ways...) {
		same := func(o api.ExplainStep) bool { return o.Where == s.Where && o.Object == s.Object && o.Why == s.Why }
		if s.Outcome == api.Unknown && !slices.ContainsFunc(found, same) {
			found = append(found, s)
		}
	}
	return found
}

// walker goes one way, station by station, until something stops the packet.
type walker struct {
	s        *Snapshot
	from, to Party
	answer   bool

	leave, host, arrive, reverse topo.Way
	// translated is set once the packet leaves under the host's address.
	translated bool
	path       datapath.Path // as the data path remembers the flow
	sizeBytes  int           // of the packet, or of the longest piece of it; 0: small
	pieces     bool          // it was cut

	judged    map[netip.Addr]bool // endpoints at which policy has judged the packet, so that it knows the answer
	redirects bool                // the data path has carried it past the host's stack
	steps     []api.ExplainStep
	stopped   api.Outcome
	because   string
	doubt     string
}

func (w *walker) add(s api.ExplainStep) bool {
	w.steps = append(w.steps, s)
	switch {
	case s.Outcome == api.Dropped || s.Outcome == api.Broken:
		w.stopped, w.because = s.Outcome, fmt.Sprintf("%s (%s): %s", s.Object, s.Where, s.Why)
	case s.Outcome == api.Unknown && w.doubt == "":
		w.doubt = fmt.Sprintf("%s (%s): %s", s.Object, s.Where, s.Why)
	}
	return w.stopped == ""
}

func (w *walker) pass(where, object, why, look string) bool {
	return w.add(api.ExplainStep{Where: where, Object: object, Outcome: api.Passes, Why: why, Inspect: look})
}

func (w *walker) broken(where, object, why, look string) bool {
	return w.add(api.ExplainStep{Where: where, Object: object, Outcome: api.Broken, Why: why, Inspect: look})
}

func (w *walker) unknown(where, object, why, look string) bool {
	return w.add(api.ExplainStep{Where: where, Object: object, Outcome: api.Unknown, Why: why, Inspect: look})
}

// Stations besides endpoint.InHost and endpoint.InNamespace.
const (
	inChild = "child"
	inWorld = "world"
)

func (w *walker) walk() {
	if w.answer && w.s.Ways.Leave.Local {
		w.answersInside()
		return
	}
	if !w.departs() {
		return
	}
	if w.leave.Local || !w.attached(w.from, true) || !w.policed("egress", w.from) { // local: to the namespace itself
		return
	}
	if w.redirects = w.redirected(); w.redirects {
		w.pass(endpoint.InHost, "bpf-program of "+w.from.Endpoint.HostLink, "both ends are pods of this node: redirected into "+w.to.Endpoint.HostLink+" past the host's stack and its rules", "mknetd inventory | grep bpf")
	} else if !w.crossesHost() {
		return
	}
	w.arrives()
}

// tracking is what connection tracking makes of the packet: the host's, or that of
// an endpoint's namespace.
type tracking struct {
	begins bool // it is the first of a flow
	reply  bool // it goes against the direction in which the flow began
	state  string
}

func (w *walker) trackedAs(f *Flow) tracking {
	t := tracking{begins: !w.answer && f == nil, reply: w.answer != (f != nil && f.Reply), state: "ESTABLISHED"}
	if t.begins || !w.answer && !f.Reply && !f.Answered {
		t.state = "NEW"
	}
	return t
}

// in runs a command in an endpoint's namespace.
func in(ep *endpoint.Endpoint, command string) string {
	if ep.Namespace.Path == "" {
		return command + " (in the namespace of " + ep.Generation.Short() + ")"
	}
	return "nsenter --net=" + ep.Namespace.Path + " " + command
}

// device finds a link that must be there and up; nil where the packet stops.
func (w *walker) device(where string, space *topo.Space, ep *endpoint.Endpoint, name string) *topo.Device {
	look := "ip -d link show " + name
	if where == endpoint.InNamespace {
		look = in(ep, look)
	}
	d, there := space.Links[name]
	switch {
	case !there:
		w.broken(where, "link "+name, "is missing", look)
		return nil
	case !d.Up:
		w.broken(where, "link "+name, "is down", look)
		return nil
	}
	return &d
}

// Because a VLAN tag may come in addition, a device takes 4 bytes more than its MTU
// (net/core/dev.c: __is_skb_forwardable).
const vlanBytes = 4

// fits asks whether the packet may leave by a device: by the MTU of the route, which
// counts also where it is larger, else by the device's. Who forwards it answers with an ICMP error, who sends it never
// begins; an answer is cut instead.
func (w *walker) fits(where string, ep *endpoint.Endpoint, d topo.Device, way topo.Way) bool {
	mtu, by := d.MTUBytes, "link "+d.Name
	if way.MTUBytes != 0 {
		mtu, by = way.MTUBytes, "route "+way.Route
	}
	if w.sizeBytes <= mtu {
		return true
	}
	if w.answer {
		w.sizeBytes, w.pieces = mtu, true
		return true
	}
	look := "ip -d link show " + d.Name
	if where == endpoint.InNamespace {
		look = in(ep, look)
	}
	return w.add(api.ExplainStep{
		Where: where, Object: "mtu of " + by, Outcome: api.Dropped, Inspect: look,
		Why: fmt.Sprintf("is %d: the packet has %d bytes and may not be cut; its sender is told by ICMP (type 3, code 4), or knows", mtu, w.sizeBytes),
	})
}

// taken asks whether the other end of a veth takes the packet. One that it does not
// is lost without a word.
func (w *walker) taken(where string, ep *endpoint.Endpoint, d topo.Device) bool {
	if w.sizeBytes <= d.MTUBytes+vlanBytes {
		return true
	}
	look := "ip -d link show " + d.Name
	if where == endpoint.InNamespace {
		look = in(ep, look)
	}
	return w.broken(where, "mtu of link "+d.Name, fmt.Sprintf("is %d, less than at the other end of the veth: a packet of %d bytes is lost there and nobody is told", d.MTUBytes, w.sizeBytes), look)
}
