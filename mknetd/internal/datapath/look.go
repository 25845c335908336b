package datapath

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/enforcer"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

// Standing is what stands on a hook.
type Standing int

// What can stand there.
const (
	Absent  Standing = iota // no program at all
	Strange                 // a program that is not ours runs there, alone or before ours
	Ours                    // ours, of whichever version
)

// View is an endpoint as the data path has it, for an explanation.
type View struct {
	From, To Standing // on what the endpoint sends, on what it is sent
	Known    bool     // its host link is known as its own
	Entry    *Entry   // nil: there is none
}

// Entry is what map endpoints holds of an endpoint.
type Entry struct {
	OwnLink         bool // it names the endpoint's host link
	PodMAC, HostMAC endpoint.MAC
	MTUBytes        int
	StackOnly       bool // nothing is redirected
}

// Look reads how the data path has an endpoint.
func (d *Datapath) Look(ep endpoint.Endpoint) (View, error) {
	var v View
	fail := func(err error) (View, error) {
		return v, fmt.Errorf("look at %s in the data path: %w", ep.Address, err)
	}
	key, err := addressOf(ep.Address)
	if err != nil {
		return fail(err)
	}
	l, err := d.linkByName(ep.HostLink)
	if err != nil {
		return fail(err)
	}
	index := 0
	if l != nil {
		index = l.Attrs().Index
		for _, h := range hooks {
			a := &attachment{d: d, link: ep.HostLink, hook: h, program: programAt(ep.Mode, h)}
			on := &v.From
			if h == egress {
				on = &v.To
			}
			if *on, err = a.standing(l); err != nil {
				return fail(err)
			}
		}
		var at attachmentValue
		if v.Known, err = lookup(d.objects.Attachments, uint32(index), &at); err != nil {
			return fail(err)
		}
		v.Known = v.Known && at.Address == key
	}
	var e endpointValue
	found, err := lookup(d.objects.Endpoints, key, &e)
	if err != nil {
		return fail(err)
	}
	if found {
		v.Entry = &Entry{OwnLink: l != nil && e.IfIndex == uint32(index), PodMAC: e.PodMAC, HostMAC: e.HostMAC, MTUBytes: int(e.MTU), StackOnly: e.Flags&flagStackOnly != 0}
	}
	return v, nil
}

// standing says what runs on the hook of l.
func (a *attachment) standing(l netlink.Link) (Standing, error) {
	if a.d.cfg.Attach == TCX {
		on, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: a.hook.tcx()})
		if err != nil {
			return Absent, fmt.Errorf("ask for the programs on %s: %w", a.Name(), err)
		}
		if len(on.Programs) == 0 {
			return Absent, nil
		}
		return a.whose(on.Programs[0].ID)
	}
	list, err := a.filters(l)
	if err != nil || len(list) == 0 {
		return Absent, err
	}
	mine, before := own(list)
	if mine == nil || before != nil {
		return Strange, nil
	}
	return a.whose(ebpf.ProgramID(mine.Id))
}

func (a *attachment) whose(id ebpf.ProgramID) (Standing, error) {
	st, err := a.d.classify(id, a.program)
	if err != nil || st == foreign {
		return Strange, err
	}
	return Ours, nil
}

// Path is the way on which a flow between two pods began.
type Path uint8

// The paths.
const (
	Unremembered Path = 0
	ByRedirect   Path = Path(byRedirect)
	ByStack      Path = Path(byStack)
)

// How long a silent flow is remembered, FLOW_TCP and FLOW_OTHER of bpf/flow.h, in
// units of 2^30 ns.
const flowTCP, flowOther = 80000, 700

// Path returns how the data path remembers a flow between two pods; it is the same
// for both directions. ICMP has its identifier in both ports.
func (d *Datapath) Path(a, b netip.AddrPort, protocol policy.Protocol) (Path, error) {
	if !a.Addr().Is4() || !b.Addr().Is4() {
		return Unremembered, nil
	}
	first, second := a.Addr().As4(), b.Addr().As4()
	// The programs compare addresses as they lie in memory.
	if binary.NativeEndian.Uint32(first[:]) > binary.NativeEndian.Uint32(second[:]) {
		a, b, first, second = b, a, second, first
	}
	k := flowKey{Address: [2]address{first, second}, Protocol: uint8(protocol)}
	binary.BigEndian.PutUint16(k.Port[0][:], a.Port())
	binary.BigEndian.PutUint16(k.Port[1][:], b.Port())
	var f flowValue
	found, err := lookup(d.objects.Flows, k, &f)
	if err != nil {
		return Unremembered, fmt.Errorf("look up a flow between %s and %s: %w", a, b, err)
	}
	now, err := monotonic()
	if err != nil || !found {
		return Unremembered, err
	}
	kept := uint32(flowOther)
	if protocol == unix.IPPROTO_TCP {
		kept = flowTCP
	}
	if uint32(now>>30)-f.Seen > kept {
		return Unremembered, nil
	}
	return Path(f.Path), nil
}

// ctProbe is CT_PROBE of bpf/policy_maps.h.
const ctProbe uint8 = 1 << 3

// Admission is how policy remembers a flow at one enforcement point.
type Admission struct {
	Reply   bool // the packet goes against the direction that was admitted
	Current bool // nothing that concerns it has changed since: it passes without a look at rules
	Probe   bool // admitted as a probe from the node
}

// Admission returns what is remembered of the flow of a packet from a to b, which
// enters or leaves the endpoint at that end; nil for a flow that was not admitted,
// or has ended.
func (p *PolicyMaps) Admission(d policy.Direction, a, b netip.AddrPort, protocol policy.Protocol) (*Admission, error) {
	if !a.Addr().Is4() || !b.Addr().Is4() {
		return nil, nil
	}
	k := ctKey{Source: a.Addr().As4(), Destination: b.Addr().As4(), Protocol: uint8(protocol), Hook: uint8(d)}
	binary.BigEndian.PutUint16(k.SourcePort[:], a.Port())
	binary.BigEndian.PutUint16(k.DestinationPort[:], b.Port())
	fail := func(err error) (*Admission, error) {
		return nil, fmt.Errorf("look up the admission of %s to %s: %w", a, b, err)
	}
	var v ctValue
	found, err := lookup(p.d.objects.PolicyConntrack, k, &v)
	if err != nil {
		return fail(err)
	}
	now, err := monotonic()
	if err != nil {
		return fail(err)
	}
	if !found || int64(now-v.Seen) > int64(flowTTL(k, v)) {
		return nil, nil
	}
	out := &Admission{Reply: v.Flags&ctReply != 0, Probe: v.Flags&ctProbe != 0}
	self, peer := a.Addr(), b.Addr()
	if d == policy.Ingress {
		self, peer = peer, self
	}
	attach, member, err := p.epochs(self, peer)
	if err != nil {
		return fail(err)
	}
	admitted := d
	if out.Reply {
		admitted = policy.Egress + policy.Ingress - d
	}
	i := 0
	if admitted == policy.Ingress {
		i = 1
	}
	out.Current = v.AttachEpoch == attach[i] && v.PeerEpoch == member
	return out, nil
}

// epochs are those that an admission at self of a flow with peer needs now.
func (p *PolicyMaps) epochs(self, peer netip.Addr) (attach [2]uint32, member uint32, err error) {
	b, err := p.ReadPoint(self)
	if err == nil && b != nil {
		var point enforcer.Point
		if _, point, err = enforcer.DecodePoint(b); err == nil {
			attach = point.Epoch
		}
	}
	if err != nil {
		return attach, 0, err
	}
	if b, err = p.ReadIdentity(peer); err != nil || b == nil {
		return attach, 0, err
	}
	_, id, err := enforcer.DecodeIdentity(b)
	return attach, id.Epoch, err
}
