package suite

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"mknet/tests/netlab"
)

// CNI SPEC section 5: result types.
var resultChecks = []Check{
	{52, "ResultVersion", "the result's cniVersion is the input's", "", func(p *Probe) {
		_, res := p.fresh()
		if res.CNIVersion != p.Version {
			p.Errorf("cniVersion is %q", res.CNIVersion)
		}
	}},
	{53, "InterfacesComplete", "interfaces: all that were created, the host's side included, with name, mac, mtu and sandbox", "", func(p *Probe) {
		a := p.attachment()
		path := strings.Replace(a.Netns, "/netns/", "/./netns/", 1) // verbatim is not the same as cleaned
		b := a
		b.Netns = path
		res := p.mustAdd(&b)
		in, ok := res.inSandbox(b.IfName)
		if !ok {
			p.Fatalf("the result has no interface %s in a sandbox: %v", b.IfName, res.Interfaces)
		}
		if in.Sandbox != path {
			p.Errorf("sandbox is %q, CNI_NETNS was %q", in.Sandbox, path)
		}
		if len(res.onHost()) == 0 {
			p.Errorf("the result lists nothing on the host: %v", res.Interfaces)
		}
		listed := map[string]bool{"lo": true}
		for _, i := range res.Interfaces {
			if i.Sandbox != "" {
				listed[i.Name] = true
			}
			p.sameAsKernel(i, a.Netns)
		}
		for _, name := range strings.Fields(p.links(a.Netns)) {
			if !listed[name] && !leftOut(p.driver, name) {
				p.Errorf("the result does not list %s, which ADD made in the namespace", name)
			}
		}
		for _, i := range list(res.Raw["interfaces"]) {
			if _, ok := i["mtu"]; ok && p.Version < "1.1.0" {
				p.Errorf("an interface of version %s has no mtu: %v", p.Version, i)
			}
		}
	}},
	{54, "IPsComplete", "ips: CIDR, gateway, and the index of an interface", "", func(p *Probe) {
		a, res := p.fresh()
		if len(res.IPs) == 0 {
			p.Fatalf("the result has no address")
		}
		for _, ip := range res.IPs {
			prefix, err := netip.ParsePrefix(ip.Address)
			if err != nil {
				p.Errorf("address %q is no CIDR", ip.Address)
				continue
			}
			if gw, err := netip.ParseAddr(ip.Gateway); err != nil || !prefix.Masked().Contains(gw) {
				p.Errorf("gateway %q of %s", ip.Gateway, ip.Address)
			}
			if i := ip.Interface; i == nil || *i < 0 || *i >= len(res.Interfaces) {
				p.Errorf("the address %s has no valid interface index: %v", ip.Address, i)
			} else if in := res.Interfaces[*i]; in.Name != a.IfName || in.Sandbox == "" {
				p.Errorf("the address %s belongs to %v, want %s in the sandbox", ip.Address, in, a.IfName)
			}
			switch {
			case p.Version < "1.0.0" && ip.Version != "4":
				p.Errorf("the address has version %q, want \"4\" until 0.4.0", ip.Version)
			case p.Version >= "1.0.0" && ip.Version != "":
				p.Errorf("the address has a version, which 1.0.0 removed")
			}
		}
	}},
	{55, "RoutesValid", "routes: dst, gw and the attributes of 1.1.0, each valid", "", func(p *Probe) {
		_, res := p.fresh()
		if len(res.Routes) == 0 {
			p.Errorf("the result has no route, and a default route was made")
		}
		for _, r := range res.Routes {
			p.validRoute(r)
		}
	}},
	{56, "DNSFromConfig", "dns: what the configuration says", "", func(p *Probe) {
		a := p.attachment()
		dns := map[string]any{"nameservers": []any{"203.0.113.53"}, "domain": "example.org", "search": []any{"a.example.org"}, "options": []any{"ndots:2"}}
		a.Conf = a.Conf.with(Conf{"dns": dns})
		res := p.mustAdd(&a)
		if got := res.Raw["dns"]; !equal(got, dns) {
			p.Errorf("dns is %v, the configuration says %v", got, dns)
		}
		if p.Version < "1.0.0" {
			b := p.attachment()
			if _, ok := p.mustAdd(&b).Raw["dns"].(map[string]any); !ok {
				p.Errorf("version %s always has a dns object", p.Version)
			}
		}
	}},
	{57, "PrevResultUnchanged", "what a plugin does not change of prevResult comes out equivalent", "", func(p *Probe) {
		a := p.attachment()
		links := p.links(a.Netns)
		prev := p.foreignResult(a.Netns)
		p.added = append(p.added, a)
		r := p.call("ADD", a).with(Conf{"prevResult": prev}).Do()
		if !r.OK() { // a plugin that must come first has no output to compare; item 8 wants its words
			if e := p.refused("ADD with a prevResult", r); e.Code == 0 {
				p.Errorf("the refusal has no code: %+v", e)
			}
			p.unchanged("a refused prevResult", a.Netns, links)
			p.succeeds("DEL after the refusal", p.call("DEL", a).Do())
			p.clean("a refused prevResult")
			return
		}
		res := p.result(r)
		for _, key := range []string{"interfaces", "ips"} {
			for _, want := range list(prev[key]) {
				if !slices.ContainsFunc(list(res.Raw[key]), func(got map[string]any) bool { return covers(got, want) }) {
					p.Errorf("%s of prevResult lacks in the result: %v", key, want)
				}
			}
		}
		if !equal(res.Raw["dns"], prev["dns"]) {
			p.Errorf("dns was %v, is %v", prev["dns"], res.Raw["dns"])
		}
	}},
	{58, "ErrorObjectComplete", "error object: cniVersion, code, msg, details", "", func(p *Probe) {
		for verb, spoil := range map[string]func(c *Call){
			"ADD without a namespace":         func(c *Call) { c.Env["CNI_NETNS"] = "" },
			"ADD in a missing namespace":      func(c *Call) { c.Env["CNI_NETNS"] = "/run/netns/no-such" },
			"ADD with an unusable CNI_IFNAME": func(c *Call) { c.Env["CNI_IFNAME"] = "a/b" },
		} {
			c := p.call("ADD", p.attachment())
			spoil(c)
			r := c.Do()
			e := p.refused(verb, r)
			if e.Msg == "" {
				continue
			}
			if e.CNIVersion != p.Version {
				p.Errorf("%s: cniVersion is %q", verb, e.CNIVersion)
			}
			if e.Code == 0 {
				p.Errorf("%s: no code: %s", verb, clip(r.Stdout))
			}
			var raw map[string]any
			_ = oneDocument(r.Stdout, &raw)
			for key := range raw {
				if !slices.Contains([]string{"cniVersion", "code", "msg", "details"}, key) {
					p.Errorf("%s: unknown key %q in the error object", verb, key)
				}
			}
		}
	}},
	{59, "ErrorCodes", "codes: 1 version, 2 field, 3 container, 4 environment, 5 I/O, 6 decoding, 7 configuration, 11 later, 100 and above the plugin's own", "", errorCodes},
}

func errorCodes(p *Probe) {
	a := p.attachment()
	coded := func(about string, r Reply, want ...uint) ErrorObject {
		e := p.refused(about, r)
		if e.Msg != "" && !slices.Contains(want, e.Code) {
			p.Errorf("%s: code %d, want %v: %s", about, e.Code, want, e.Msg)
		}
		return e
	}
	coded("an unknown version", p.call("ADD", a).with(Conf{"cniVersion": "9.9.9"}).Do(), 1)
	for _, name := range []string{"CNI_NETNS", "CNI_CONTAINERID", "CNI_IFNAME"} {
		c := p.call("ADD", a)
		c.Env[name] = unset
		if e := coded("ADD without "+name, c.Do(), 4); e.Msg != "" && !strings.Contains(e.Msg+e.Details, name) {
			p.Errorf("ADD without %s: the error does not name it: %s", name, e.Msg)
		}
	}
	c := p.call("ADD", a)
	c.Env["CNI_CONTAINERID"] = "a/b"
	coded("a bad container ID", c.Do(), 4, 7)
	c = p.call("ADD", a)
	c.Stdin = []byte(`{"cniVersion": "` + p.Version + `", junk`)
	coded("junk on stdin", c.Do(), 6)
	coded("a bad network name", p.call("ADD", a).with(Conf{"name": "a/b"}).Do(), 7)

	if conf, rt, key, value, err := p.driver.Unsupported(); !skip(err) {
		p.require(err)
		b := a
		b.Conf = conf
		e := coded("an unsupported field", p.call("ADD", b).with(Conf{"runtimeConfig": rt}).Do(), 2)
		if e.Msg != "" && (!strings.Contains(e.Msg+e.Details, key) || !strings.Contains(e.Msg+e.Details, value)) {
			p.Errorf("an unsupported field: the error names not both %q and %q: %s %s", key, value, e.Msg, e.Details)
		}
	}
	dup, _ := p.fresh()
	if e := p.refused("the same ADD twice", p.call("ADD", dup).Do()); e.Code == 0 || e.Code > 11 && e.Code < 100 {
		p.Errorf("the same ADD twice: code %d is not of the list and not the plugin's own: %s", e.Code, e.Msg)
	}
	if p.Version >= "0.4.0" {
		ghost := dup
		ghost.ID = "ghost"
		if e := p.refused("CHECK of an unknown container", p.call("CHECK", ghost).Do()); e.Msg != "" && e.Code != 3 && e.Code < 100 {
			p.Errorf("CHECK of an unknown container: code %d, want 3 or the plugin's own: %s", e.Code, e.Msg)
		}
	}
	if start, err := p.driver.StopDaemon(); !skip(err) {
		p.require(err)
		p.later(start)
		coded("ADD while the daemon is down", p.call("ADD", a).Do(), 11)
	}
}

// sameAsKernel compares one interface of a result with the kernel's.
func (p *Probe) sameAsKernel(i Interface, netns string) {
	where, path := "the host", "/proc/self/ns/net"
	if i.Sandbox != "" {
		where, path = "the namespace", netns
	}
	out, err := netlab.TryIn(path, "ip", "-j", "link", "show", "dev", i.Name)
	if err != nil {
		p.Errorf("the result lists %s, which %s does not have", i.Name, where)
		return
	}
	var links []struct {
		Address string `json:"address"`
		MTU     int    `json:"mtu"`
		Type    string `json:"link_type"`
	}
	if err := json.Unmarshal([]byte(out), &links); err != nil || len(links) != 1 {
		p.Fatalf("ip -j link show %s: %v: %s", i.Name, err, out)
	}
	switch k := links[0]; {
	case k.Type == "ether" && !sameMAC(i.Mac, k.Address):
		p.Errorf("mac of %s on %s is %q, the kernel says %q", i.Name, where, i.Mac, k.Address)
	case k.Type != "ether" && i.Mac != "" && !sameMAC(i.Mac, "00:00:00:00:00:00"): // podman insists on something that parses
		p.Errorf("mac of %s is %q, and it has none (%s)", i.Name, i.Mac, k.Type)
	case p.Version >= "1.1.0" && i.MTU != k.MTU:
		p.Errorf("mtu of %s on %s is %d, the kernel says %d", i.Name, where, i.MTU, k.MTU)
	}
}

func sameMAC(a, b string) bool {
	x, err1 := net.ParseMAC(a)
	y, err2 := net.ParseMAC(b)
	return err1 == nil && err2 == nil && slices.Equal(x, y)
}

// validRoute checks one route of a result, CNI SPEC section 5.
func (p *Probe) validRoute(r map[string]any) {
	dst, err := netip.ParsePrefix(fmt.Sprint(r["dst"]))
	if err != nil {
		p.Errorf("dst of %v is no CIDR", r)
	}
	if gw, ok := r["gw"]; ok {
		if addr, err := netip.ParseAddr(fmt.Sprint(gw)); err != nil || dst.IsValid() && addr.Is4() != dst.Addr().Is4() {
			p.Errorf("gw of %v is no address of dst's family", r)
		}
	}
	for key, value := range r {
		switch key {
		case "dst", "gw":
		case "mtu", "advmss", "priority", "table", "scope":
			n, err := strconv.Atoi(fmt.Sprint(value))
			if p.Version < "1.1.0" {
				p.Errorf("a route of version %s has no %s: %v", p.Version, key, r)
			} else if err != nil || n < 0 {
				p.Errorf("%s of %v", key, r)
			} else if key == "scope" && n != 0 && n != 253 && n != 254 {
				p.Errorf("scope %d is none of 0 (global), 253 (link), 254 (host)", n)
			}
		default:
			p.Errorf("unknown key %q in the route %v", key, r)
		}
	}
}

// equal compares two JSON values.
func equal(a, b any) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && string(x) == string(y)
}

// covers reports whether got has every key of want, with an equal value. An
// interface index may have moved.
func covers(got, want map[string]any) bool {
	for k, v := range want {
		if k != "interface" && !equal(got[k], v) {
			return false
		}
	}
	return true
}
