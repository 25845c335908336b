// Package explain walks the way of a packet through a snapshot of a node: which
// device, route and rule decides at each station, and what is broken on the way.
// [Decide] is pure; the engine gathers the snapshot.
package explain

import (
	"net/netip"

	"mknet/mknetd/internal/ipt"
	"mknet/mknetd/internal/topo"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Snapshot is everything that decides.
type Snapshot struct {
	Protocol string // "icmp", "tcp", "udp"
	Port     int
	From, To Party
	Host     topo.Space // the links that the way can touch
	Ways     Ways
	Tables   []ipt.Saved
	Others   []ipt.BaseChain // of nftables
	// Policy is what the documents say of the packet, empty where none is enforced.
	Policy []api.PolicyPoint
	Full   bool // the host's connection tracking table has no room
}

// Party is one end of the flow.
type Party struct {
	Addr     netip.Addr
	Local    bool               // an address of the host itself
	Endpoint *endpoint.Endpoint // nil: none of ours
	Space    *topo.Space        // its namespace; nil where that is gone
	Shim     string             // why nobody carries packets to and from the child; empty: a shim is attached
	// Of a pod: its entry in the data path's map and its programs are as they should be.
	Entry, Programs bool
	Faults          []endpoint.Fault
	Flows           int // connection tracking entries that the endpoint has
}

func (p Party) child() bool { return p.Endpoint != nil && p.Endpoint.Mode != endpoint.Veth }
func (p Party) pod() bool   { return p.Endpoint != nil && p.Endpoint.Mode == endpoint.Veth }

// Ways are the kernel's answers, in the order of the walk. One that nobody needed
// is not Asked.
type Ways struct {
	Leave, Host, Arrive             topo.Way // of the packet: in From's namespace, in the host, in To's namespace
	BackLeave, BackHost, BackArrive topo.Way // of the answer
	// ReversePath says by which device the host answers From, and To.
	ReversePath, BackReversePath topo.Way
}
