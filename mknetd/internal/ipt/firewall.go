package ipt

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
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

// Firewall holds everything that mknet has in iptables. It is safe for
// concurrent use. Of the kernel's state it keeps one thing between calls: for which
// pods the shared parts have been made.
type Firewall struct {
	layout
	tools
	wait    time.Duration
	sharing sync.Mutex // held while the shared parts are repaired
	// OnShared is called with a table whose shared parts were made or repaired; it
	// is set before the first call.
	OnShared func(table string)

	groupsMu sync.Mutex
	groups   map[string]*group // by table

	podsMu     sync.Mutex
	servesPods bool           // the shared parts include those of ordinary pods
	masquerade []netip.Prefix // subnets of pods that are translated, sorted
	// served are those of the subnets whose rules have been made; the zero prefix
	// stands for the rules of all pods.
	served    map[netip.Prefix]bool
	forgotten uint64 // how many subnets were, see ForgetPods
}

// Open finds the programs, the flavour (see detect) and the table of the guard:
// security, or mangle where the kernel has no security table. It changes no rule.
func Open(ctx context.Context, cfg Config) (*Firewall, error) {
	f := &Firewall{wait: cfg.Wait}
	f.layout = layout{guard: tableSecurity, pool: cfg.ChildPool, metadata: cfg.Metadata, connLimit: cfg.ConnLimit}
	if !cfg.ChildPool.IsValid() || !cfg.ChildPool.Addr().Is4() {
		return nil, fmt.Errorf("child pool %q: must be an IPv4 prefix", cfg.ChildPool)
	}
	if f.metadata == nil {
		f.metadata = []netip.Addr{DefaultMetadata}
	}
	if f.wait <= 0 {
		f.wait = DefaultWait
	}
	var err error
	if f.tools, err = detect(ctx, cfg.Flavour); err != nil {
		return nil, err
	}
	if _, err := f.run(ctx, "", f.tools.iptables, "-w", f.waitSeconds(), "-t", tableSecurity, "-S", "FORWARD"); err != nil && !refusedToRead(err) {
		// A program that was killed, or lacked something, says nothing about the table:
		// with another guard the rules of this one would be left in it.
		var c *CommandError
		if !errors.As(err, &c) || c.Status < 0 || c.Status == resourceProblem {
			return nil, fmt.Errorf("look for table %s: %w", tableSecurity, err)
		}
		f.guard = tableMangle
	}
	return f, nil
}

// Flavour is NFT or Legacy.
func (f *Firewall) Flavour() string { return f.flavour }

// GuardTable is "security", or "mangle" where the kernel has no such table.
func (f *Firewall) GuardTable() string { return f.guard }

// Tables are the endpoint's objects, in the order in which ADD commits them:
// raw, guard, nat, filter. An ordinary pod has none: the shared rules match it by
// its link's device group.
func (f *Firewall) Tables(ep endpoint.Endpoint) []*Table {
	if ep.Mode == endpoint.Veth {
		return nil
	}
	var all []*Table
	for _, name := range f.tables() {
		all = append(all, &Table{fw: f, table: name, ep: ep})
	}
	return all
}
