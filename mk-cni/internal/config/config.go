// Package config reads what a runtime gives mk-cni: the network configuration on
// standard input and CNI_ARGS. It only decides; it opens and asks nothing.
//
// ADD reads strictly: a key that nobody defines, a value that cannot be honoured
// and a capability that is not supported are refused by name. Every other verb
// reads leniently, because a configuration that was edited after the ADD must not
// keep a sandbox from being deleted: what is wrong becomes a warning, and the
// default stands. The keys are described in spec/cni.md.
package config

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// DefaultCacheDir holds the generation cache where the configuration names none.
const DefaultCacheDir = "/var/lib/cni/multikernel"

// Config is a network configuration. Keys that are absent have their defaults.
type Config struct {
	CNIVersion string
	Name       string
	Type       string

	Daemon       Daemon
	CacheDir     string
	Mode         endpoint.Mode
	MTUBytes     int // 0: follow the egress
	LogFile      string
	Debug        bool
	HostAccess   endpoint.Access
	PodAccess    endpoint.Access
	PublishPorts bool
	DNS          endpoint.DNS
	IPAM         json.RawMessage // nil: none; veth mode only, and then the IPAM plugin reads it
	IPAMType     string
	IPAMLink     string // host link that the IPAM plugin works on; empty: in the attachment
	IPMasq       *bool

	Runtime Runtime

	// PrevResult is the raw prevResult; nil where absent or null.
	PrevResult json.RawMessage
	// ValidAttachments is GC's list; nil where neither key is there.
	ValidAttachments *[]types.GCAttachment
}

// Daemon is how to reach mknetd.
type Daemon struct {
	Network string // "unix" or "tcp"
	Address string // socket path or host:port
	CAFile  string // tcp only: PEM files for mutual TLS
	Cert    string
	Key     string
}

// String is the endpoint as the configuration writes it: "unix:///run/mknetd.sock".
func (d Daemon) String() string { return d.Network + "://" + d.Address }

// Problem is one thing that is wrong with the input.
type Problem struct {
	Code   uint   // CNI error code
	Key    string // "mtu", "runtimeConfig.mac", "CNI_ARGS IP"
	Value  string // clipped
	Reason string
}

func (p Problem) String() string {
	return p.Key + " " + p.Value + ": " + p.Reason
}

// Error is everything that is wrong with the input; the first decides the code.
type Error struct{ Problems []Problem }

func (e *Error) Error() string { return e.Problems[0].String() }

// Details are the further problems, one line.
func (e *Error) Details() string {
	lines := make([]string, 0, len(e.Problems))
	for _, p := range e.Problems[1:] {
		lines = append(lines, p.String())
	}
	return strings.Join(lines, "; ")
}

// parser collects problems.
type parser struct {
	Config
	problems []Problem
}

func (p *parser) add(code uint, key string, raw any, format string, args ...any) {
	var value string
	switch raw := raw.(type) {
	case json.RawMessage:
		value = string(raw)
	case string:
		value = fmt.Sprintf("%q", raw)
	default:
		value = fmt.Sprint(raw)
	}
	if len(value) > 120 {
		value = value[:120] + "..."
	}
	p.problems = append(p.problems, Problem{Code: code, Key: key, Value: value, Reason: fmt.Sprintf(format, args...)})
}

// Parse reads a network configuration. It returns a Config that can be used even
// where problems are not nil; only ADD refuses on them. The error is for what is
// no JSON object at all.
func Parse(stdin []byte) (Config, []Problem, error) {
	p := &parser{Config: Config{
		Daemon:       Daemon{Network: "unix", Address: api.DefaultSocket},
		CacheDir:     DefaultCacheDir,
		Mode:         endpoint.Multikernel,
		HostAccess:   endpoint.Deny,
		PodAccess:    endpoint.Deny,
		PublishPorts: true,
	}}
	members, err := object(stdin)
	if err != nil {
		return p.Config, nil, err
	}
	seen := map[string]bool{}
	for _, m := range members {
		if seen[m.key] {
			p.add(types.ErrInvalidNetworkConfig, m.key, m.raw, "is given twice")
			continue
		}
		seen[m.key] = true
		p.member(m.key, m.raw)
	}
	p.finish(seen)
	return p.Config, p.problems, nil
}

// maxHints bounds how many unknown keys are compared with all known ones.
const maxHints = 16

// member handles one top-level key. A null is an absent key.
func (p *parser) member(key string, raw json.RawMessage) {
	set, known := keys[key]
	switch {
	case known && string(raw) == "null":
	case known:
		if err := set(p, raw); err != nil {
			p.add(types.ErrInvalidNetworkConfig, key, raw, "%v", err)
		}
	case injected(key):
	default:
		near := ""
		if len(p.problems) < maxHints {
			near = nearest(key)
		}
		if near != "" {
			near = fmt.Sprintf(", did you mean %q", near)
		}
		p.add(types.ErrUnsupportedField, key, raw, "mk-cni has no such key%s", near)
	}
}

// keys are the keys that mean something to mk-cni.
var keys map[string]func(*parser, json.RawMessage) error

// init, because the table's functions reach the table through nearest.
func init() {
	keys = map[string]func(*parser, json.RawMessage) error{
		"cniVersion":      func(p *parser, raw json.RawMessage) error { return str(raw, &p.CNIVersion) },
		"name":            func(p *parser, raw json.RawMessage) error { return str(raw, &p.Name) },
		"type":            func(p *parser, raw json.RawMessage) error { return str(raw, &p.Type) },
		"socket":          (*parser).setSocket,
		"daemon-endpoint": (*parser).setEndpoint,
		"tls-ca-file":     func(p *parser, raw json.RawMessage) error { return absolute(raw, &p.Daemon.CAFile) },
		"tls-cert-file":   func(p *parser, raw json.RawMessage) error { return absolute(raw, &p.Daemon.Cert) },
		"tls-key-file":    func(p *parser, raw json.RawMessage) error { return absolute(raw, &p.Daemon.Key) },
		"cacheDir":        func(p *parser, raw json.RawMessage) error { return absolute(raw, &p.CacheDir) },
		"mode":            (*parser).setMode,
		"mtu":             (*parser).setMTU,
		"log-file":        func(p *parser, raw json.RawMessage) error { return absolute(raw, &p.LogFile) },
		"enable-debug":    func(p *parser, raw json.RawMessage) error { return boolean(raw, &p.Debug) },
		"hostAccess":      func(p *parser, raw json.RawMessage) error { return access(raw, &p.HostAccess) },
		"podAccess":       func(p *parser, raw json.RawMessage) error { return access(raw, &p.PodAccess) },
		"publishPorts":    func(p *parser, raw json.RawMessage) error { return boolean(raw, &p.PublishPorts) },
		"ipMasq": func(p *parser, raw json.RawMessage) error {
			p.IPMasq = new(bool)
			return boolean(raw, p.IPMasq)
		},
		"ipam":                      (*parser).setIPAM,
		"ipamLink":                  (*parser).setIPAMLink,
		"dns":                       (*parser).setDNS,
		"runtimeConfig":             (*parser).setRuntime,
		"prevResult":                func(p *parser, raw json.RawMessage) error { p.PrevResult = raw; return nil },
		"cni.dev/valid-attachments": (*parser).setAttachments,
		"cni.dev/attachments":       (*parser).setAttachments,
		"args":                      ignored,
		"capabilities":              ignored,
		"disableCheck":              ignored,
		"disableGC":                 ignored,
		"cniVersions":               ignored,
		"loadOnlyInlinedPlugins":    ignored,
		"deviceID":                  ignored, // injected by Multus
		"pciBusID":                  ignored, // injected by Multus
	}
}

func ignored(*parser, json.RawMessage) error { return nil }

// injected are keys that runtimes add to every plugin's configuration.
func injected(key string) bool {
	return strings.HasPrefix(key, "_") || strings.HasPrefix(key, "cni.dev/")
}

// finish checks what concerns several keys.
func (p *parser) finish(seen map[string]bool) {
	d := &p.Daemon
	tls := d.CAFile != "" || d.Cert != "" || d.Key != ""
	switch {
	case seen["socket"] && seen["daemon-endpoint"]:
		p.add(types.ErrInvalidNetworkConfig, "daemon-endpoint", d.String(), "is given beside \"socket\"; give one of them")
	case d.Network == "tcp" && (d.CAFile == "" || d.Cert == "" || d.Key == ""):
		p.add(types.ErrInvalidNetworkConfig, "daemon-endpoint", d.String(), "needs mutual TLS: give tls-ca-file, tls-cert-file and tls-key-file")
	case d.Network == "unix" && tls:
		p.add(types.ErrInvalidNetworkConfig, "daemon-endpoint", d.String(), "is a Unix socket: tls-ca-file, tls-cert-file and tls-key-file belong to tcp://")
	}
	if p.Runtime.IPRanges != nil && !p.Delegates() {
		p.add(types.ErrUnsupportedField, "runtimeConfig.ipRanges", p.Runtime.IPRanges, "is for an IPAM plugin and none is configured; remove it from \"capabilities\"")
	}
	if p.Mode == endpoint.Veth {
		p.finishVeth(seen)
		return
	}
	if p.IPAMLink != "" {
		p.add(types.ErrUnsupportedField, "ipamLink", p.IPAMLink, "is for an IPAM plugin of \"mode\": \"veth\"; remove it")
	}
	if p.IPAMType != "" {
		p.add(types.ErrUnsupportedField, "ipam.type", p.IPAMType, "addresses of multikernel endpoints come from mknetd's pool; remove \"ipam\"")
	}
	if p.IPMasq != nil && !*p.IPMasq {
		p.add(types.ErrUnsupportedField, "ipMasq", false, "multikernel endpoints are always masqueraded; remove the key or use \"mode\": \"veth\"")
	}
	p.checkMultikernelRuntime()
}

// finishVeth fills in what an ordinary pod has where the configuration says
// nothing, and refuses what it cannot have.
func (p *parser) finishVeth(seen map[string]bool) {
	if !seen["hostAccess"] {
		p.HostAccess = endpoint.Allow // no boundary is crossed: same kernel, policy decides
	}
	if seen["ipam"] && p.IPAM != nil && p.IPAMType == "" {
		p.add(types.ErrInvalidNetworkConfig, "ipam", p.IPAM, "has no type; leave \"ipam\" out for an address of mknetd's pools")
	}
	if p.IPAMLink != "" && p.IPAMType == "" {
		p.add(types.ErrInvalidNetworkConfig, "ipamLink", p.IPAMLink, "is given without \"ipam\", whose plugin works on it")
	}
	if strings.ContainsRune(p.IPAMType, '/') {
		p.add(types.ErrInvalidNetworkConfig, "ipam.type", p.IPAMType, "must be the name of a plugin, not a path")
	}
	for _, ip := range p.Runtime.IPs {
		if !ip.Is4() {
			p.add(types.ErrUnsupportedField, "runtimeConfig.ips", ip, "endpoints have IPv4 addresses only")
		}
	}
	if p.Runtime.MAC != nil && p.Runtime.MAC[0]&1 != 0 {
		p.add(types.ErrInvalidNetworkConfig, "runtimeConfig.mac", p.Runtime.MAC.String(), "is a group address, an interface has its own")
	}
	p.checkPortMappings()
}

// Delegates reports whether the configuration wants its address from a delegated
// IPAM plugin.
func (c Config) Delegates() bool { return c.Mode == endpoint.Veth && c.IPAMType != "" }

// Masquerades reports whether what leaves the node is translated; it is unless
// the configuration says no.
func (c Config) Masquerades() bool { return c.IPMasq == nil || *c.IPMasq }

// Address is the one address that the runtime asks for; the zero Addr where none
// is.
func Address(c Config, a Args) (netip.Addr, []Problem) {
	p := &parser{}
	want := a.IP
	for _, ip := range c.Runtime.IPs {
		if want.IsValid() && want != ip {
			p.add(types.ErrUnsupportedField, "runtimeConfig.ips", ip, "an endpoint has one address and %s is asked for too", want)
			continue
		}
		want = ip
	}
	return want, p.problems
}
