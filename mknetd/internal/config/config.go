// Package config reads mknetd's configuration: a YAML file, flags that override
// single keys, and defaults for the rest. It checks every value and reports all
// faults at once, each with its place and the nearest known key. It opens nothing
// but the file itself.
package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"time"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// Defaults that other packages do not own.
const (
	DefaultFile            = "/etc/mknetd/config.yaml"
	DefaultStateDir        = "/var/lib/mknet"
	DefaultDeferredDelDir  = "/var/lib/mknet/deferred-del" // see spec/delqueue
	DefaultPolicyDir       = "/etc/mknetd/policy.d"
	DefaultConnectionLimit = 16384 // conntrack entries of one child
	DefaultQuarantine      = 30 * time.Second
	DefaultShimGrace       = 30 * time.Second
	DefaultAuditInterval   = 30 * time.Second

	// maxFileBytes bounds the file; a full one has about 2 KiB.
	maxFileBytes = 1 << 20
)

// Config is a checked configuration.
type Config struct {
	Socket      string
	SocketGroup string // name or number; empty: root only
	TCP         *TCP   // nil: no TCP listener

	StateDir       string
	DeferredDelDir string
	PolicyDir      string // watched for policy documents

	Pools    endpoint.Pools
	PodPools []endpoint.Pool // of ordinary pods; none: only delegated IPAM serves them
	Egress   string          // interface name; empty: that of the default route, followed
	MTUBytes int             // 0: the egress's
	Resolver endpoint.DNS
	// Metadata are addresses that children reach for DNS only, and only where they
	// are in Resolver.
	Metadata   []netip.Addr
	HostAccess endpoint.Access
	PodAccess  endpoint.Access
	NodeProbes endpoint.Access // whether what the host itself sends passes policy

	ConnectionLimit int           // conntrack entries of one child; 0: no limit
	Quarantine      time.Duration // rest of a freed address; 0: none
	ShimGrace       time.Duration // how long a DEL waits for a live shim
	AuditInterval   time.Duration // how often kernel and records are compared without a cause; 0: never
	Firewall        Firewall
	MetricsAddress  string // loopback address and port; empty: no listener

	Log Log
}

// TCP is the optional listener with mutual TLS.
type TCP struct {
	Address     string // host:port
	Certificate string // PEM files, absolute paths
	Key         string
	ClientCA    string
}

// Firewall is the iptables flavour.
type Firewall string

// The flavours; Auto takes the one whose rules the host already has.
const (
	Auto   Firewall = "auto"
	NFT    Firewall = "nft"
	Legacy Firewall = "legacy"
)

// Log says what is logged to standard error and how.
type Log struct {
	Level  slog.Level
	Format string // "text" or "json"
}

// Error holds everything that is wrong with a configuration.
type Error struct {
	File   string // empty where only flags are at fault
	Faults []Fault
}

// Fault is one wrong value.
type Fault struct {
	Key     string // "log.level"; empty for the file as a whole
	Problem string
}

func (f Fault) String() string {
	if f.Key == "" {
		return f.Problem
	}
	return f.Key + ": " + f.Problem
}

func (e *Error) Error() string {
	lines := make([]string, len(e.Faults))
	for i, f := range e.Faults {
		lines[i] = f.String()
	}
	where := "configuration"
	if e.File != "" {
		where += " " + e.File
	}
	return where + ": " + strings.Join(lines, "; ")
}

// Override sets one key in place of the file's value, as a flag does.
type Override struct {
	Key   string // of Keys
	Value string
}

// Load reads the file at path. Where it is missing, the defaults stand, unless
// explicit says that somebody named it. An *Error lists every fault.
func Load(path string, explicit bool, overrides ...Override) (Config, error) {
	data, err := read(path)
	if errors.Is(err, fs.ErrNotExist) && !explicit {
		data, path, err = nil, "", nil
	}
	if err != nil {
		return Config{}, fmt.Errorf("configuration: %w", err)
	}
	return parse(path, data, overrides)
}

// read reads a file that is not larger than it may be. Whoever can write the file
// configures a root daemon, so that only its owner may.
func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case !fi.Mode().IsRegular():
		return nil, fmt.Errorf("%s: is not an ordinary file", path)
	case fi.Mode().Perm()&0o022 != 0:
		return nil, fmt.Errorf("%s: has mode %#o: others may write to it (chmod go-w)", path, fi.Mode().Perm())
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err == nil && len(data) > maxFileBytes {
		err = fmt.Errorf("%s: has more than %d bytes", path, maxFileBytes)
	}
	return data, err
}

// parse checks the text of a file together with what overrides it.
func parse(path string, data []byte, overrides []Override) (Config, error) {
	raw := defaults()
	faults := raw.fill(data)
	faults = append(faults, raw.override(overrides)...)
	cfg, more := raw.check()
	if faults = append(faults, more...); len(faults) > 0 {
		return Config{}, &Error{File: path, Faults: faults}
	}
	return cfg, nil
}

func defaults() file {
	limit := DefaultConnectionLimit
	return file{
		Socket:            api.DefaultSocket,
		StateDir:          DefaultStateDir,
		DeferredDelDir:    DefaultDeferredDelDir,
		PolicyDir:         DefaultPolicyDir,
		ChildPool:         endpoint.DefaultPools.Child.String(),
		TransitPool:       endpoint.DefaultPools.Transit.String(),
		MetadataAddresses: []string{"169.254.169.254"},
		HostAccess:        string(endpoint.Deny),
		PodAccess:         string(endpoint.Deny),
		NodeProbes:        string(endpoint.Deny),
		ConnectionLimit:   &limit,
		Quarantine:        DefaultQuarantine.String(),
		ShimGrace:         DefaultShimGrace.String(),
		AuditInterval:     DefaultAuditInterval.String(),
		Firewall:          string(Auto),
		Log:               logFile{Level: "info", Format: "text"},
	}
}
