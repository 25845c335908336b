package endpoint

import (
	"net/netip"
	"time"
)

// Mode selects the topology of an endpoint.
type Mode string

// The modes that mk-cni's "mode" key knows.
const (
	Multikernel Mode = "multikernel" // veth + TUN, carried into a child kernel by mk-shim
	Veth        Mode = "veth"        // an ordinary pod of the same kernel
)

// Access is what a workload may reach besides the network behind the egress.
type Access string

// Values of hostAccess and podAccess; empty means Deny.
const (
	Deny  Access = "deny"
	Allow Access = "allow"
)

// DNS is the resolver configuration of an endpoint, as CNI has it.
type DNS struct {
	Nameservers []string `json:"nameservers,omitempty"`
	Domain      string   `json:"domain,omitempty"`
	Search      []string `json:"search,omitempty"`
	Options     []string `json:"options,omitempty"`
}

// IsZero reports whether nothing is configured.
func (d DNS) IsZero() bool {
	return len(d.Nameservers) == 0 && d.Domain == "" && len(d.Search) == 0 && len(d.Options) == 0
}

// Pod names the Kubernetes pod of an endpoint, for operators and for policy.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}

// Bandwidth is CNI's bandwidth capability: bits per second and bits. "Ingress"
// is towards the workload. Zero means not limited.
type Bandwidth struct {
	IngressRate  uint64 `json:"ingressRate,omitempty"`
	IngressBurst uint64 `json:"ingressBurst,omitempty"`
	EgressRate   uint64 `json:"egressRate,omitempty"`
	EgressBurst  uint64 `json:"egressBurst,omitempty"`
}

// Process names a process exactly: a PID alone is reused.
type Process struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"startTime,string"` // field 22 of /proc/PID/stat, clock ticks since boot
	UID       uint32 `json:"uid"`
	Comm      string `json:"comm,omitempty"`
}

// Binding joins a READY endpoint to one exact sandbox generation.
type Binding struct {
	Sandbox
	BoundAt time.Time `json:"boundAt"`
	By      Process   `json:"by"`             // who called BIND
	Shim    *Process  `json:"shim,omitempty"` // who called ATTACH last
}

// Endpoint is the durable record of one endpoint and, unchanged, the resource
// that the API shows. It holds no secret.
type Endpoint struct {
	Generation Generation `json:"generation"`
	Attachment
	Mode  Mode  `json:"mode"`
	State State `json:"state"`

	// Degraded names what is wrong with a READY endpoint, one line a fault.
	Degraded []string `json:"degraded,omitempty"`
	// DeleteRequested is when a DEL was refused because a shim was alive.
	DeleteRequested *time.Time `json:"deleteRequested,omitempty"`
	Binding         *Binding   `json:"binding,omitempty"`
	// TunUsed is set once a descriptor of the TUN has left the daemon: the next
	// sandbox gets a new TUN, because a descriptor cannot be revoked.
	TunUsed bool `json:"tunUsed,omitempty"`

	Namespace Namespace `json:"namespace"`
	Slot      uint32    `json:"slot"`

	Subnet      netip.Prefix `json:"subnet"`      // the child's /30; a pod's pool
	Gateway     netip.Addr   `json:"gateway"`     // on the TUN in the namespace; a pod's: on the host veth
	Address     netip.Addr   `json:"address"`     // the workload's own address
	TransitHost netip.Addr   `json:"transitHost"` // on the host veth, /30; not of a pod
	TransitPeer netip.Addr   `json:"transitPeer"` // on the veth peer, /30; not of a pod

	// Of an ordinary pod only.
	Pool   string         `json:"pool,omitempty"`   // mknetd's pool; empty where IPAM is set
	IPAM   string         `json:"ipam,omitempty"`   // the delegated plugin that gave the address
	MAC    MAC            `json:"mac,omitzero"`     // of the pod's end, where one was asked for; see PodMAC
	Routes []netip.Prefix `json:"routes,omitempty"` // by the gateway, besides the default one; IPAM's
	IPMasq bool           `json:"ipMasq,omitempty"` // translated where it leaves the node

	HostLink   string `json:"hostLink"`   // host veth, primary root namespace
	PeerLink   string `json:"peerLink"`   // veth peer in the namespace; a pod's: IfName
	Chain      string `json:"chain"`      // iptables chain
	RouteTable uint32 `json:"routeTable"` // table T of `iif <TUN> lookup T`, in the namespace
	// MainDefault is set when the namespace's own default route goes by PeerLink.
	MainDefault bool `json:"mainDefault,omitempty"`

	MTUBytes   int        `json:"mtu"`
	Egress     string     `json:"egress"`               // interface that the endpoint may leave by
	EgressAddr netip.Addr `json:"egressAddr,omitempty"` // the primary's own address there
	Firewall   string     `json:"firewall"`             // iptables flavour: "nft" or "legacy"

	DNS        DNS        `json:"dns,omitzero"`
	HostAccess Access     `json:"hostAccess"`
	PodAccess  Access     `json:"podAccess"`
	Publishes  bool       `json:"publishes,omitempty"` // the network publishes ports: DNAT from outside is let in
	Bandwidth  *Bandwidth `json:"bandwidth,omitempty"`
	Pod        Pod        `json:"pod,omitzero"`

	CreatedAt time.Time `json:"createdAt"`
	// CreatedSinceBoot is the same on CLOCK_BOOTTIME, of the boot that Namespace
	// names; 0: not known.
	CreatedSinceBoot time.Duration `json:"createdSinceBoot,omitempty"`

	UpdatedAt time.Time `json:"updatedAt"`
}

// Sites of kernel objects, see Fault.Where and Object.Where.
const (
	InHost      = "host"      // the primary's root namespace
	InNamespace = "namespace" // the endpoint's CNI namespace
)

// Fault is one difference between a kernel object and what the record asks for.
type Fault struct {
	Kind    string `json:"kind"`              // "veth", "tun", "address", "route", "rule", "sysctl", "iptables", ...
	Object  string `json:"object"`            // its name, as `ip` or `iptables` show it
	Where   string `json:"where"`             // InHost or InNamespace
	Problem string `json:"problem"`           // "missing", "mtu is 1500, want 1400", ...
	Inspect string `json:"inspect,omitempty"` // a command that shows it
}

func (f Fault) String() string {
	return f.Kind + " " + f.Object + " (" + f.Where + "): " + f.Problem
}
