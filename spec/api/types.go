package api

import (
	"net/netip"
	"time"

	"mknet/spec/endpoint"
)

// Where mknetd listens and how much it reads.
const (
	DefaultSocket = "/run/mknetd.sock"
	MaxBodyBytes  = 1 << 20
	// AttachProtocol is the Upgrade token of the attach route.
	AttachProtocol = "mknet-attach/1"
	// TraceHeader carries the caller's W3C trace context.
	TraceHeader = "Traceparent"
)

// CreateRequest asks for an endpoint (CNI ADD): POST /v1/endpoints -> 201 Endpoint.
//
// The namespace comes as a descriptor passed with the request (SCM_RIGHTS on the
// first byte; preferred, see client.CreateEndpoint) or as a path that the daemon
// opens. With a descriptor, NetnsPath is only for display.
type CreateRequest struct {
	endpoint.Attachment
	Mode       endpoint.Mode       `json:"mode,omitempty"` // default multikernel
	NetnsPath  string              `json:"netnsPath,omitempty"`
	MTUBytes   int                 `json:"mtu,omitempty"` // 0: follow the egress
	Address    netip.Addr          `json:"address,omitzero"`
	DNS        endpoint.DNS        `json:"dns,omitzero"` // empty: the daemon's resolver
	HostAccess endpoint.Access     `json:"hostAccess,omitempty"`
	PodAccess  endpoint.Access     `json:"podAccess,omitempty"`
	Publishes  bool                `json:"publishes,omitempty"`
	Bandwidth  *endpoint.Bandwidth `json:"bandwidth,omitempty"`
	Pod        endpoint.Pod        `json:"pod,omitzero"`

	// The rest is for mode veth only.
	MAC    endpoint.MAC `json:"mac,omitzero"`     // of the pod's end; zero: random
	IPMasq bool         `json:"ipMasq,omitempty"` // translate what leaves the node
	Pool   string       `json:"pool,omitempty"`   // by name; empty: by the pod's namespace
	Lease  string       `json:"lease,omitempty"`  // the address of POST /v1/ipam/allocate
	IPAM   *IPAMResult  `json:"ipam,omitempty"`   // a delegated plugin has chosen the address
}

// IPAMResult is what a delegated IPAM plugin gave a pod.
type IPAMResult struct {
	Type    string         `json:"type"`             // "host-local", "dhcp", ...
	Address netip.Prefix   `json:"address"`          // with the length of its subnet
	Gateway netip.Addr     `json:"gateway,omitzero"` // zero: the first address of the subnet
	Routes  []netip.Prefix `json:"routes,omitempty"` // by the gateway; none: the default route
}

// Selector names one endpoint: by generation alone, by attachment (all three
// parts), or by namespace. A generation given together with an attachment must
// belong to it.
type Selector struct {
	Generation endpoint.Generation `json:"generation,omitzero"`
	endpoint.Attachment
	// NetnsPath is opened by the daemon where no descriptor was passed.
	NetnsPath string `json:"netnsPath,omitempty"`
	// Namespace narrows an attachment to the namespace that the caller means.
	Namespace *endpoint.Namespace `json:"namespace,omitempty"`
}

// CheckReply is the answer to POST /v1/endpoints/{generation}/check: 200 also
// when there are faults.
type CheckReply struct {
	Endpoint endpoint.Endpoint `json:"endpoint"`
	Faults   []endpoint.Fault  `json:"faults"`
}

// DeleteRequest asks to delete an endpoint whose generation the caller does not
// know: POST /v1/delete. With a known generation use
// DELETE /v1/endpoints/{generation}. Both answer 200 DeleteReply, also when there
// is nothing to delete.
type DeleteRequest struct {
	Selector
	// NotAfter, when set, protects every endpoint created after it. It is what a
	// deferred DEL carries that does not know its generation.
	NotAfter *time.Time `json:"notAfter,omitempty"`
	// NotAfterBoot is the same moment on a clock that nobody sets. It goes before
	// NotAfter for endpoints that were made in the same boot.
	NotAfterBoot *endpoint.Moment `json:"notAfterBoot,omitempty"`
}

// DeleteReply says what was deleted; zero when there was nothing.
type DeleteReply struct {
	Deleted endpoint.Generation `json:"deleted,omitzero"`
}

// BindRequest joins a READY endpoint to a sandbox generation:
// POST /v1/endpoints/{generation}/bind, or POST /v1/bind with a selector.
type BindRequest struct {
	Selector
	endpoint.Sandbox
}

// BindReply carries the one-time nonce that ATTACH must show.
type BindReply struct {
	Endpoint endpoint.Endpoint `json:"endpoint"`
	Nonce    string            `json:"nonce"` // 32 hex digits, valid once
}

// UnbindRequest ends a binding: POST /v1/endpoints/{generation}/unbind. A
// sandbox other than the bound one is refused with STALE_GENERATION.
type UnbindRequest struct {
	endpoint.Sandbox
}

// AttachRequest is the body of POST /v1/endpoints/{generation}/attach, which
// asks for an upgrade to AttachProtocol. After the 101 the daemon sends one
// message: an AttachReply as JSON with the queues' descriptors (SCM_RIGHTS), and
// closes.
type AttachRequest struct {
	endpoint.Sandbox
	Nonce  string `json:"nonce"`
	Queues int    `json:"queues"` // 1 to MaxQueues
}

// MaxQueues bounds the TUN queues of one ATTACH.
const MaxQueues = 4

// AttachReply describes the TUN whose queues come with it.
type AttachReply struct {
	Endpoint endpoint.Endpoint `json:"endpoint"`
	Queues   int               `json:"queues"`  // descriptors in the message
	VnetHdr  bool              `json:"vnetHdr"` // each packet is preceded by a 10-byte virtio-net header
}

// ProvisionRequest does ADD and BIND in a namespace that mknetd makes itself:
// POST /v1/provision -> 201 BindReply.
type ProvisionRequest struct {
	CreateRequest
	endpoint.Sandbox
}

// ReleaseRequest does UNBIND and DEL: POST /v1/release -> 200 DeleteReply.
type ReleaseRequest struct {
	Generation endpoint.Generation `json:"generation"`
	endpoint.Sandbox
}

// GCRequest removes every endpoint of a network whose attachment is not listed
// (CNI GC): POST /v1/gc -> 200 GCReply. Without a list (nil) only what is
// provably dead goes. An endpoint bound to a live shim is never touched.
type GCRequest struct {
	Network string          `json:"network"`
	Valid   *[]GCAttachment `json:"validAttachments,omitempty"`
}

// GCAttachment is one attachment that is still in use.
type GCAttachment struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
}

// GCReply lists what was removed, and what could not be.
type GCReply struct {
	Deleted []endpoint.Generation `json:"deleted"`
	Errors  []string              `json:"errors"`
}

// EndpointList is the answer to GET /v1/endpoints.
type EndpointList struct {
	Endpoints []endpoint.Endpoint `json:"endpoints"`
}

// InventoryItem is one kernel object of ours, or one that a record asks for.
type InventoryItem struct {
	Kind       string              `json:"kind"` // as in endpoint.Fault
	Object     string              `json:"object"`
	Where      string              `json:"where"`
	Generation endpoint.Generation `json:"generation,omitzero"`
	Status     InventoryStatus     `json:"status"`
	Problem    string              `json:"problem,omitempty"`
	Inspect    string              `json:"inspect,omitempty"`
}

// InventoryStatus compares a kernel object with its record.
type InventoryStatus string

// The outcomes; all but Recorded and Shared make `mknetd inventory` exit 1.
const (
	Recorded InventoryStatus = "recorded" // stands, and a record asks for it
	Shared   InventoryStatus = "shared"   // belongs to the daemon, not to one endpoint
	Orphan   InventoryStatus = "orphan"   // carries our mark, and no record asks for it
	Missing  InventoryStatus = "missing"  // a record asks for it, and it is not there
	Altered  InventoryStatus = "altered"  // stands, but not as the record asks
)

// Inventory is the answer to GET /v1/inventory.
type Inventory struct {
	Items []InventoryItem `json:"items"`
}

// Clean reports whether every item is recorded or shared.
func (inv Inventory) Clean() bool {
	for _, it := range inv.Items {
		if it.Status != Recorded && it.Status != Shared {
			return false
		}
	}
	return true
}

// DaemonConfig is the answer to GET /v1/daemon/config: what is in force.
type DaemonConfig struct {
	Version        string       `json:"version"`
	ChildPool      netip.Prefix `json:"childPool"`
	TransitPool    netip.Prefix `json:"transitPool"`
	Egress         string       `json:"egress"` // empty when there is none now
	EgressAddr     netip.Addr   `json:"egressAddr,omitzero"`
	MTUBytes       int          `json:"mtu"`
	Firewall       string       `json:"firewall"` // "nft" or "legacy"
	Resolver       endpoint.DNS `json:"resolver,omitzero"`
	Pools          []Pool       `json:"pools"` // of ordinary pods
	StateDir       string       `json:"stateDir"`
	DeferredDelDir string       `json:"deferredDelDir"`
}

// Health is the answer to GET /v1/daemon/health: always 200; Ready says whether
// an ADD would be accepted now.
type Health struct {
	Ready     bool           `json:"ready"`
	Version   string         `json:"version"`
	Causes    []HealthCause  `json:"causes"`
	Endpoints map[string]int `json:"endpoints"` // number by state, and "degraded"
	FreeSlots uint32         `json:"freeSlots"`
	// LimitsExisting is set when existing endpoints may be limited too (CNI
	// STATUS 51 instead of 50).
	LimitsExisting bool `json:"limitsExisting"`
}

// CausePodPools is the code of a HealthCause: no pool has an address for an
// ordinary pod, which does not concern children.
const CausePodPools = "pod-pools-unusable"

// HealthCause is one reason why the daemon is not ready or only partly works.
type HealthCause struct {
	Code    string `json:"code"` // "pool-exhausted", "egress-missing", "store-unwritable", "deferred-dels", "degraded", ...
	Message string `json:"message"`
	Blocks  bool   `json:"blocks"` // new ADDs fail
	// Mode is that of the endpoints that it concerns; empty: of all.
	Mode endpoint.Mode `json:"mode,omitempty"`
}

// LeaseRequest asks for an address of a pod pool before its endpoint is made:
// POST /v1/ipam/allocate -> 201 Lease. The address is given back unless an
// endpoint claims it in time (CreateRequest.Lease).
type LeaseRequest struct {
	Pod        endpoint.Pod `json:"pod,omitzero"`   // the owner; an endpoint of another one cannot claim it
	Pool       string       `json:"pool,omitempty"` // by name; empty: by the pod's namespace
	Address    netip.Addr   `json:"address,omitzero"`
	TTLSeconds int          `json:"ttlSeconds,omitempty"` // 0: 60; at most 600
}

// Lease is an address that is set aside. DELETE /v1/ipam/leases/{id} gives it back.
type Lease struct {
	ID        string       `json:"id"`
	Pool      string       `json:"pool"`
	Address   netip.Addr   `json:"address"`
	Subnet    netip.Prefix `json:"subnet"`
	Gateway   netip.Addr   `json:"gateway"`
	Owner     string       `json:"owner,omitempty"` // "namespace/name"
	ExpiresAt time.Time    `json:"expiresAt"`
}

// Pool is one range that ordinary pods get their addresses from.
type Pool struct {
	Name       string       `json:"name"`
	Prefix     netip.Prefix `json:"prefix"`
	Gateway    netip.Addr   `json:"gateway"`
	Namespaces []string     `json:"namespaces,omitempty"` // empty: for all that no other lists
	Free       uint32       `json:"free"`
}
