// Package explain walks the way of a packet through a snapshot of a node: which
// device, route and rule decides at each station, and what is broken on the way.
// [Decide] is pure; the engine gathers the snapshot.
package explain

import (
	"net/netip"

	"mknet/mknetd/internal/datapath"
	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Snapshot is everything that decides.
type Snapshot struct {
	Protocol string // "icmp", "tcp", "udp"
	Port     int
	// SourcePort names one flow, which may exist; 0: the packet is the first of a new
	// one. ICMP has its identifier here.
	SourcePort int
	// SizeBytes is the packet's, IP header included; it may not be cut. 0: small.
	SizeBytes int
	From, To  Party
	Host      topo.Space // the links that the way can touch
	Ways      Ways
	Tables    []ipt.Saved
	Others    []ipt.BaseChain // of nftables
	// Policy is what the documents say of the packet, and what is remembered of its
	// flow; empty where none is enforced.
	Policy []api.PolicyPoint
	// Answers is the same of the answer, were it of no flow that is admitted.
	Answers []api.PolicyPoint
	Full    bool  // the host's connection tracking table has no room
	Flow    *Flow // as the host's connection tracking has it; nil: it does not know it
	// Alike is how many flows from the one to the other the host knows, where none was
	// asked for.
	Alike int
	// Path is on which way the data path remembers the flow, of two pods.
	Path datapath.Path
}

// Flow is an entry of the host's connection tracking.
type Flow struct {
	Reply    bool // the packet goes against the direction in which the flow began
	Answered bool // packets have gone both ways
	// The addresses as the first packet had them, and as the answers have them.
	OrigSource, OrigDestination netip.AddrPort
	ReplSource, ReplDestination netip.AddrPort
}

// Party is one end of the flow.
type Party struct {
	Addr     netip.Addr
	Local    bool               // an address of the host itself
	Endpoint *endpoint.Endpoint // nil: none of ours
	Space    *topo.Space        // its namespace; nil where that is gone
	Shim     string             // why nobody carries packets to and from the child; empty: a shim is attached
	// Path is the endpoint as the data path has it; nil: there is none, or it does not
	// concern the endpoint.
	Path *datapath.View
	// Unjudged says that policy knows nothing of the endpoint, Doubtful that what the
	// kernel has of it is not what was written.
	Unjudged, Doubtful bool
	// Rules and Chains are those of its namespace, whose connection tracking has the
	// flow as Flow.
	Rules  []ipt.Saved
	Chains []ipt.BaseChain
	Flow   *Flow
	Faults []endpoint.Fault
	Flows  int // connection tracking entries that the endpoint has
}

func (p Party) child() bool { return p.Endpoint != nil && p.Endpoint.Mode != endpoint.Veth }
func (p Party) pod() bool   { return p.Endpoint != nil && p.Endpoint.Mode == endpoint.Veth }

// known reports whether the programs find the endpoint by what they look for.
func (p Party) known() bool {
	return p.Path != nil && p.Path.Entry != nil && p.Path.Entry.OwnLink
}

// Ways are the kernel's answers, in the order of the walk. One that nobody needed
// is not Asked.
type Ways struct {
	Leave, Host, Arrive             topo.Way // of the packet: in From's namespace, in the host, in To's namespace
	BackLeave, BackHost, BackArrive topo.Way // of the answer
	// ReversePath says by which device the host answers From, and To.
	ReversePath, BackReversePath topo.Way
}
