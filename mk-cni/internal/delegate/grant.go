package delegate

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"mknet/spec/endpoint"
)

// Grant is what an IPAM plugin gave: exactly one IPv4 address.
type Grant struct {
	Address netip.Prefix   // with the length of its subnet
	Gateway netip.Addr     // zero: none was named
	Routes  []netip.Prefix // by the gateway
	DNS     endpoint.DNS
}

// route is a route of CNI's result. What an endpoint cannot honour is refused: a
// pod that silently lacks it would be reported as whole.
type route struct {
	Dst      string `json:"dst"`
	GW       string `json:"gw"`
	MTU      int    `json:"mtu"`
	AdvMSS   int    `json:"advmss"`
	Priority int    `json:"priority"`
	Table    *int   `json:"table"`
	Scope    *int   `json:"scope"`
}

// mainTable is the routing table that routes are in unless they say otherwise
// (linux/rtnetlink.h: RT_TABLE_MAIN).
const mainTable = 254

// parse reads the result of an IPAM plugin, of CNI 0.3.0 or later. An interface in
// it is not looked at (CNI SPEC section 4: there is none). It does not use the
// library's conversion, which a null in a list makes panic.
func parse(doc []byte) (Grant, error) {
	var in struct {
		IPs []*struct {
			Address string `json:"address"`
			Gateway string `json:"gateway"`
		} `json:"ips"`
		Routes []*route     `json:"routes"`
		DNS    endpoint.DNS `json:"dns"`
	}
	if err := json.Unmarshal(doc, &in); err != nil {
		return Grant{}, fmt.Errorf("its result is no JSON of CNI's form: %w", err)
	}
	switch {
	case len(in.IPs) == 0 || in.IPs[0] == nil:
		return Grant{}, errors.New("its result has no address")
	case len(in.IPs) > 1:
		return Grant{}, fmt.Errorf("gave %d addresses, an endpoint has one, of IPv4: configure one range", len(in.IPs))
	}
	g := Grant{DNS: in.DNS}
	var err error
	if g.Address, err = netip.ParsePrefix(in.IPs[0].Address); err != nil {
		return Grant{}, fmt.Errorf("gave address %.64q, which has no prefix length", in.IPs[0].Address)
	}
	if !g.Address.Addr().Is4() {
		return Grant{}, fmt.Errorf("gave address %s, endpoints have IPv4 addresses only", g.Address)
	}
	if gw := in.IPs[0].Gateway; gw != "" {
		if g.Gateway, err = netip.ParseAddr(gw); err != nil {
			return Grant{}, fmt.Errorf("gave gateway %.64q, which is no address", gw)
		}
	}
	for _, r := range in.Routes {
		dst, err := r.plain(g.Gateway)
		if err != nil {
			return Grant{}, err
		}
		g.Routes = append(g.Routes, dst)
	}
	if err := g.DNS.Validate(); err != nil {
		return Grant{}, fmt.Errorf("its dns: %w", err)
	}
	return g, nil
}

// plain returns the destination of a route that an endpoint can have: by the
// gateway, in the main table, with nothing else said.
func (r *route) plain(gateway netip.Addr) (netip.Prefix, error) {
	if r == nil {
		return netip.Prefix{}, errors.New("its result has a route that is null")
	}
	dst, err := netip.ParsePrefix(r.Dst)
	if err != nil || !dst.Addr().Is4() {
		return netip.Prefix{}, fmt.Errorf("gave a route to %.64q, endpoints have IPv4 routes only", r.Dst)
	}
	bad := func(key string, value any) (netip.Prefix, error) {
		return netip.Prefix{}, fmt.Errorf("gave the route to %s with %s %v, which mk-cni cannot honour", dst, key, value)
	}
	switch {
	case r.GW != "" && r.GW != gateway.String():
		return bad("gw", r.GW)
	case r.MTU != 0:
		return bad("mtu", r.MTU)
	case r.AdvMSS != 0:
		return bad("advmss", r.AdvMSS)
	case r.Priority != 0:
		return bad("priority", r.Priority)
	case r.Table != nil && *r.Table != 0 && *r.Table != mainTable:
		return bad("table", *r.Table)
	case r.Scope != nil && *r.Scope != 0:
		return bad("scope", *r.Scope)
	}
	return dst.Masked(), nil
}
