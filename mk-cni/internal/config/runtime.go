package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/spec/endpoint"
)

// Runtime is runtimeConfig: what the runtime fills in for the capabilities that
// the configuration declares. Keys are matched without regard to case, because
// containerd writes Go field names.
type Runtime struct {
	MAC          net.HardwareAddr // nil: none asked for
	IPs          []netip.Addr
	DNS          endpoint.DNS
	PortMappings json.RawMessage // nil: none
	IPRanges     json.RawMessage // nil: none; the IPAM plugin reads it
	Bandwidth    *endpoint.Bandwidth
}

func (p *parser) setRuntime(raw json.RawMessage) error {
	members, err := object(raw)
	if err != nil {
		return errors.New("must be an object")
	}
	seen := map[string]bool{}
	for _, m := range members {
		if empty(m.raw) {
			continue
		}
		name := strings.ToLower(m.key)
		if seen[name] {
			p.add(types.ErrInvalidNetworkConfig, "runtimeConfig."+clip(m.key), m.raw, "is given twice")
			continue
		}
		seen[name] = true
		var err error
		switch name {
		case "mac":
			err = p.setMAC(m.raw)
		case "ips":
			err = p.setIPs(m.raw)
		case "dns":
			err = p.setRuntimeDNS(m.raw)
		case "portmappings":
			p.Runtime.PortMappings = m.raw
		case "ipranges":
			p.Runtime.IPRanges = m.raw
		case "bandwidth":
			err = p.setBandwidth(m.raw)
		default:
			p.add(types.ErrUnsupportedField, "runtimeConfig."+clip(m.key), m.raw, "mk-cni does not have this capability; remove it from its \"capabilities\"")
		}
		if err != nil {
			p.add(types.ErrInvalidNetworkConfig, "runtimeConfig."+m.key, m.raw, "%v", err)
		}
	}
	return nil
}

// empty reports whether a value asks for nothing.
func empty(raw json.RawMessage) bool {
	switch strings.Join(strings.Fields(string(raw)), "") {
	case "null", `""`, "[]", "{}":
		return true
	}
	return false
}

func (p *parser) setMAC(raw json.RawMessage) error {
	var s string
	if err := str(raw, &s); err != nil {
		return err
	}
	mac, err := parseMAC(s)
	p.Runtime.MAC = mac
	return err
}

// parseMAC reads a MAC address. All zero means none: it is what our results show
// for a device that has none, and Podman gives it back to us on a reload.
func parseMAC(s string) (net.HardwareAddr, error) {
	mac, err := net.ParseMAC(s)
	if err != nil || len(mac) != 6 {
		return nil, errors.New("must be a MAC address of 6 bytes")
	}
	for _, b := range mac {
		if b != 0 {
			return mac, nil
		}
	}
	return nil, nil
}

func (p *parser) setIPs(raw json.RawMessage) error {
	var list []string
	if err := json.Unmarshal(raw, &list); err != nil {
		return errors.New("must be a list of addresses")
	}
	for _, s := range list {
		ip, err := parseIP(s)
		if err != nil {
			return err
		}
		p.Runtime.IPs = append(p.Runtime.IPs, ip)
	}
	return nil
}

// parseIP reads an address with or without a prefix length; the length is not
// ours to choose (an endpoint's is its pool's), so only the address is kept.
func parseIP(s string) (netip.Addr, error) {
	if prefix, err := netip.ParsePrefix(s); err == nil {
		return prefix.Addr(), nil
	}
	ip, err := netip.ParseAddr(s)
	if err != nil || ip.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%q is no IP address", clip(s))
	}
	return ip, nil
}

func (p *parser) setRuntimeDNS(raw json.RawMessage) error {
	// CNI's conventions say servers and searches; encoding/json takes any case.
	var d struct {
		Servers     []string `json:"servers"`
		Nameservers []string `json:"nameservers"`
		Searches    []string `json:"searches"`
		Search      []string `json:"search"`
		Options     []string `json:"options"`
		Domain      string   `json:"domain"`
	}
	if err := json.Unmarshal(raw, &d); err != nil {
		return errors.New("must be an object with servers, searches and options")
	}
	dns := endpoint.DNS{
		Nameservers: append(d.Servers, d.Nameservers...), Domain: d.Domain,
		Search: append(d.Searches, d.Search...), Options: d.Options,
	}
	if err := dns.Validate(); err != nil {
		return err
	}
	p.Runtime.DNS = dns
	return nil
}

func (p *parser) setBandwidth(raw json.RawMessage) error {
	var b endpoint.Bandwidth
	if err := json.Unmarshal(raw, &b); err != nil {
		return errors.New("must be an object of rates (bit/s) and bursts (bit), whole numbers that are not negative")
	}
	if b != (endpoint.Bandwidth{}) {
		p.Runtime.Bandwidth = &b
	}
	return nil
}

// checkMultikernelRuntime refuses what an endpoint made of a TUN cannot have.
func (p *parser) checkMultikernelRuntime() {
	if p.Runtime.MAC != nil {
		p.add(types.ErrUnsupportedField, "runtimeConfig.mac", p.Runtime.MAC.String(), noMAC)
	}
	for _, ip := range p.Runtime.IPs {
		if !ip.Is4() {
			p.add(types.ErrUnsupportedField, "runtimeConfig.ips", ip, "multikernel endpoints have IPv4 addresses only")
		}
	}
	p.checkPortMappings()
}

func (p *parser) checkPortMappings() {
	if p.Runtime.PortMappings != nil {
		p.add(types.ErrUnsupportedField, "runtimeConfig.portMappings", p.Runtime.PortMappings,
			"mk-cni publishes no ports itself: chain the portmap plugin behind it and declare the capability there")
	}
}

const noMAC = "a multikernel endpoint is a TUN, which has no MAC address"

// EffectiveDNS is what the network or the runtime asks for: the runtime's, else
// the configuration's; zero means the daemon's resolver.
func (c Config) EffectiveDNS() endpoint.DNS {
	if !c.Runtime.DNS.IsZero() {
		return c.Runtime.DNS
	}
	return c.DNS
}
