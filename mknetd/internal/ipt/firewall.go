package ipt

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"mknet/spec/endpoint"
)

// Flavours of iptables. They keep separate rules in one kernel, and both apply.
const (
	NFT    = "nft"    // iptables-nft: rules live in nf_tables
	Legacy = "legacy" // iptables-legacy: rules live in ip_tables, every change rewrites a whole table
)

// Defaults of Config, for whoever reads a configuration file.
const (
	DefaultConnLimit = 16384
	DefaultWait      = 5 * time.Second
)

// DefaultMetadata is the cloud metadata address (link-local, RFC 3927) of the large providers.
var DefaultMetadata = netip.AddrFrom4([4]byte{169, 254, 169, 254})

// ErrBusy is returned, wrapped, where another program held the xtables lock (or
// kept changing the tables) for as long as Config.Wait. Nothing was changed in
// the table concerned: the call may be repeated.
var ErrBusy = errors.New("another program holds the iptables lock, try again")

// Config is what a Firewall is built for.
type Config struct {
	Flavour     string       // NFT or Legacy; "" lets Open decide
	ChildPool   netip.Prefix // POSTROUTING dispatches on it
	TransitPool netip.Prefix
	Metadata    []netip.Addr  // nil means DefaultMetadata; empty and not nil means none
	ConnLimit   int           // connections begun by one child; 0 means no limit
	Wait        time.Duration // how long to wait for the xtables lock; 0 means DefaultWait; rounded up to seconds
}

// Owned is one object in iptables that is ours.
type Owned struct {
	Generation endpoint.Generation // zero where only the name tells: an empty chain
	Digits     string              // the 12 hexadecimal digits that chain names carry
	Table      string              // "raw", "mangle", "nat", "filter", "security"
	Object     string              // "MK-0123456789ab", or a rule: "-A MKNET-FWD-01 -i ..."
}

var errSoon = errors.New("not built yet")

// Firewall holds everything that mknet has in iptables. It is safe for
// concurrent use and keeps no state of the kernel between calls.
type Firewall struct{}

// Open finds the binaries, the flavour and the table of the guard. It changes
// nothing.
func Open(ctx context.Context, cfg Config) (*Firewall, error) { return nil, errSoon }

// Flavour is NFT or Legacy.
func (f *Firewall) Flavour() string { return "" }

// EnsureShared builds what all endpoints share and repairs what is missing.
func (f *Firewall) EnsureShared(ctx context.Context) error { return errSoon }

// CheckShared reports what is missing from, or foreign in, the shared parts.
func (f *Firewall) CheckShared(ctx context.Context) ([]endpoint.Fault, error) { return nil, errSoon }

// RemoveShared removes the shared parts; it is refused while an endpoint has rules.
func (f *Firewall) RemoveShared(ctx context.Context) error { return errSoon }

// Tables are the endpoint's objects, in the order in which ADD commits them:
// raw, guard, nat, filter.
func (f *Firewall) Tables(ep endpoint.Endpoint) []*Table { return nil }

// CheckAll is Check of every table of every endpoint, with one read of each
// table. Endpoints without a fault have no entry.
func (f *Firewall) CheckAll(ctx context.Context, eps []endpoint.Endpoint) (map[endpoint.Generation][]endpoint.Fault, error) {
	return nil, errSoon
}

// Owned lists everything of ours that belongs to an endpoint.
func (f *Firewall) Owned(ctx context.Context) ([]Owned, error) { return nil, errSoon }

// RemoveOwned removes everything of one generation and nothing else; absent is
// success.
func (f *Firewall) RemoveOwned(ctx context.Context, g endpoint.Generation) error { return errSoon }

// Table is the part of one endpoint in one iptables table.
type Table struct{}

// Kind is "iptables".
func (t *Table) Kind() string { return "iptables" }

// Name is the table and the endpoint's chain: "filter MK-0123456789ab".
func (t *Table) Name() string { return "" }

// Where is endpoint.InHost.
func (t *Table) Where() string { return endpoint.InHost }

// Ensure makes the table's part of the endpoint what the record asks for.
func (t *Table) Ensure(ctx context.Context) error { return errSoon }

// Check reports every difference; it changes nothing.
func (t *Table) Check(ctx context.Context) ([]endpoint.Fault, error) { return nil, errSoon }

// Remove deletes what is there; absent is success.
func (t *Table) Remove(ctx context.Context) error { return errSoon }
