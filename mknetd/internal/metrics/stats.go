package metrics

import (
	"context"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Source has the figures. Its methods wait for no lock that is held across kernel
// work.
type Source interface {
	Health(ctx context.Context) api.Health
	Config(ctx context.Context) api.DaemonConfig
	Stats(ctx context.Context) Stats
}

// Stats are the engine's figures at one moment. Totals begin with the daemon.
type Stats struct {
	Endpoints map[EndpointKind]int
	Pools     []Pool
	Faults    map[FaultKind]uint64
	Repairs   map[RepairKind]uint64

	Audits        uint64
	AuditTime     time.Duration // of all of them together
	AuditFailures uint64
	LastAudit     time.Time // zero: none has succeeded yet

	DeferredDels   int
	DeferredOldest time.Duration // 0: there is none
	StoreBytes     int64
	Flows          Flows
	Policy         Policy
	Path           map[string]PathCount // by outcome; nil without a data path
	Pump           api.Counters         // of every endpoint that was, RTT: the longest
	Events         Events
}

// EndpointKind is what endpoints are counted by.
type EndpointKind struct {
	Mode            endpoint.Mode
	State           endpoint.State
	Degraded, Bound bool
}

// Pool counts the addresses of one pool; the name of the children's is empty.
type Pool struct {
	Name                string
	Used, Resting, Free uint32
}

// Who looked for faults.
const (
	ByCheck     = "check"
	ByAudit     = "audit"
	ByInventory = "inventory"
)

// FaultKind is what faults are counted by.
type FaultKind struct{ Kind, By string }

// RepairKind is what repairs are counted by.
type RepairKind struct {
	Kind   string
	Failed bool
}

// Flows are the host's connection tracking entries; Limit is 0 where the kernel
// does not say.
type Flows struct{ Entries, Limit uint64 }

// PathCount counts frames of endpoints that the data path's programs have seen.
type PathCount struct{ Packets, Bytes uint64 }

// Policy is what the data path has counted of it; Packets is nil without one.
type Policy struct {
	Packets map[string]uint64 // by reason
	Flows   int               // entries, as last collected
}

// Events are those of GET /v1/events.
type Events struct {
	Total, Lost uint64
	Followers   int
}
