package config

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"mknet/mknetd/internal/metrics"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

// maxDuration bounds quarantine and grace: beyond it a unit was mistaken.
const maxDuration = 24 * time.Hour

// check turns the document into a Config and lists every fault.
func (f *file) check() (Config, []Fault) {
	var c Config
	var faults []Fault
	fault := func(key, format string, args ...any) {
		faults = append(faults, Fault{Key: key, Problem: fmt.Sprintf(format, args...)})
	}
	path := func(key, value string) string {
		if !filepath.IsAbs(value) || filepath.Clean(value) != value {
			fault(key, "%q must be a clean absolute path", value)
		}
		return value
	}
	c.Socket = path("socket", f.Socket)
	c.StateDir = path("stateDir", f.StateDir)
	c.DeferredDelDir = path("deferredDelDir", f.DeferredDelDir)
	c.PolicyDir = path("policyDir", f.PolicyDir)
	if c.DeferredDelDir == c.StateDir {
		fault("deferredDelDir", "must not be stateDir itself")
	}
	c.SocketGroup = f.SocketGroup
	if strings.ContainsAny(f.SocketGroup, " \t\n:/") {
		fault("socketGroup", "%q is not the name or number of a group", f.SocketGroup)
	}
	c.TCP = f.checkTCP(fault, path)

	child, childOK := prefix("childPool", f.ChildPool, fault)
	transit, transitOK := prefix("transitPool", f.TransitPool, fault)
	c.Pools = endpoint.Pools{Child: child, Transit: transit}
	if childOK && transitOK {
		if err := c.Pools.Validate(); err != nil {
			fault("childPool, transitPool", "%s", err)
		}
	}
	c.PodPools = f.checkPools(c.Pools, childOK && transitOK, fault)
	c.Egress = f.Egress
	if f.Egress != "" && !validLink(f.Egress) {
		fault("egress", "%q is not the name of an interface", f.Egress)
	}
	c.MTUBytes = f.MTU
	if err := endpoint.ValidateMTU(f.MTU); err != nil {
		fault("mtu", "%d must be 0 or from %d to %d", f.MTU, endpoint.MinMTU, endpoint.MaxMTU)
	}
	c.Resolver = f.Resolver
	if err := f.Resolver.Validate(); err != nil {
		fault("resolver", "%s", err)
	}
	c.Metadata = f.checkMetadata(c.Pools, fault)
	c.HostAccess = access("hostAccess", f.HostAccess, fault)
	c.PodAccess = access("podAccess", f.PodAccess, fault)
	c.NodeProbes = access("nodeProbes", f.NodeProbes, fault)
	if f.ConnectionLimit == nil {
		fault("connectionLimit", "must be a number")
	} else if c.ConnectionLimit = *f.ConnectionLimit; c.ConnectionLimit < 0 || c.ConnectionLimit > 1<<24 {
		fault("connectionLimit", "%d must be from 0 (no limit) to %d", c.ConnectionLimit, 1<<24)
	}
	c.Quarantine = duration("quarantine", f.Quarantine, fault)
	c.AuditInterval = duration("auditInterval", f.AuditInterval, fault)
	if c.ShimGrace = duration("shimGrace", f.ShimGrace, fault); c.ShimGrace == 0 && len(faults) == 0 {
		fault("shimGrace", "must not be 0: a runtime that is just ending its shim would be fenced")
	}
	if c.Firewall = Firewall(f.Firewall); c.Firewall != Auto && c.Firewall != NFT && c.Firewall != Legacy {
		fault("firewall", "%q must be %s, %s or %s", f.Firewall, Auto, NFT, Legacy)
	}
	if c.MetricsAddress = f.MetricsAddress; c.MetricsAddress != "" {
		if _, err := metrics.ParseAddress(c.MetricsAddress); err != nil {
			fault("metricsAddress", "%s", err)
		}
	}
	c.Log = f.Log.check(fault)
	return c, faults
}

type faultFunc func(key, format string, args ...any)

func (f *file) checkTCP(fault faultFunc, path func(key, value string) string) *TCP {
	if f.TCP == nil {
		return nil
	}
	t := &TCP{Address: f.TCP.Address}
	host, port, err := net.SplitHostPort(t.Address)
	if n, atoi := strconv.Atoi(port); err != nil || host == "" || atoi != nil || n < 0 || n > 65535 {
		fault("tcp.address", "%q must be host:port", t.Address)
	}
	for _, k := range []struct {
		key, value string
		to         *string
	}{
		{"tcp.certificate", f.TCP.Certificate, &t.Certificate},
		{"tcp.key", f.TCP.Key, &t.Key},
		{"tcp.clientCA", f.TCP.ClientCA, &t.ClientCA},
	} {
		if k.value == "" {
			fault(k.key, "is needed: the TCP listener serves mutual TLS only")
			continue
		}
		*k.to = path(k.key, k.value)
	}
	return t
}

// maxPools bounds the pools of ordinary pods.
const maxPools = 64

func (f *file) checkPools(children endpoint.Pools, childrenOK bool, fault faultFunc) []endpoint.Pool {
	if len(f.Pools) > maxPools {
		fault("pools", "has %d pools, at most %d are allowed", len(f.Pools), maxPools)
		return nil
	}
	var pools []endpoint.Pool
	sound := childrenOK
	for i, p := range f.Pools {
		key := fmt.Sprintf("pools[%d].", i)
		pool := endpoint.Pool{Name: p.Name, Namespaces: p.Namespaces}
		if p.Name == policy.ChildPool {
			fault(key+"name", "%q is how policies name childPool", p.Name)
		}
		var ok bool
		if pool.Prefix, ok = prefix(key+"prefix", p.Prefix, fault); !ok {
			sound = false
			continue
		}
		switch gateway, err := netip.ParseAddr(p.Gateway); {
		case p.Gateway == "" && pool.Prefix.Addr().Is4():
			pool.Gateway = endpoint.FirstAddress(pool.Prefix)
		case err != nil:
			fault(key+"gateway", "%q must be the IPv4 address of a host", p.Gateway)
			sound = false
		default:
			pool.Gateway = gateway
		}
		pools = append(pools, pool)
	}
	if !sound {
		return nil
	}
	if err := endpoint.CheckPools(pools, children); err != nil {
		fault("pools", "%s", err)
	}
	return pools
}

func (f *file) checkMetadata(pools endpoint.Pools, fault faultFunc) []netip.Addr {
	addrs := []netip.Addr{}
	if len(f.MetadataAddresses) > 16 {
		fault("metadataAddresses", "has %d addresses, at most 16 are allowed", len(f.MetadataAddresses))
	}
	for i, s := range f.MetadataAddresses {
		key := fmt.Sprintf("metadataAddresses[%d]", i)
		a, err := netip.ParseAddr(s)
		switch {
		case err != nil || !a.Is4() || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback():
			fault(key, "%q must be the IPv4 address of a host", s)
		case pools.Child.IsValid() && pools.Child.Contains(a) || pools.Transit.IsValid() && pools.Transit.Contains(a):
			fault(key, "%s lies in an address pool", a)
		case slices.Contains(addrs, a):
			fault(key, "%s occurs twice", a)
		default:
			addrs = append(addrs, a)
		}
	}
	return addrs
}

func prefix(key, value string, fault faultFunc) (netip.Prefix, bool) {
	p, err := netip.ParsePrefix(value)
	if err != nil {
		fault(key, "%q must be an IPv4 prefix like 172.30.0.0/16", value)
		return netip.Prefix{}, false
	}
	return p, true
}

// validLink is what Linux accepts as the name of an interface (dev_valid_name).
func validLink(s string) bool {
	return len(s) <= endpoint.MaxIfNameBytes && s != "." && s != ".." &&
		!strings.ContainsFunc(s, func(r rune) bool { return r == '/' || r == ':' || r <= ' ' || r > '~' })
}

func access(key, value string, fault faultFunc) endpoint.Access {
	a := endpoint.Access(value)
	if a != endpoint.Deny && a != endpoint.Allow {
		fault(key, "%q must be %s or %s", value, endpoint.Deny, endpoint.Allow)
	}
	return a
}

func duration(key, value string, fault faultFunc) time.Duration {
	d, err := time.ParseDuration(value)
	if err != nil || d < 0 || d > maxDuration {
		fault(key, "%q must be a time like 30s, 2m or 0, at most %s", value, maxDuration)
		return 0
	}
	return d
}

func (l logFile) check(fault faultFunc) Log {
	levels := map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}
	level, ok := levels[l.Level]
	if !ok {
		fault("log.level", "%q must be debug, info, warn or error", l.Level)
	}
	if l.Format != "text" && l.Format != "json" {
		fault("log.format", "%q must be text or json", l.Format)
	}
	return Log{Level: level, Format: l.Format}
}
