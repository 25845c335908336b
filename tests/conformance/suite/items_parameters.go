package suite

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"mknet/tests/netlab"
)

// CNI SPEC section 2: parameters, output and errors.
var parameterChecks = []Check{
	{1, "InputsOnlyFromEnvAndStdin", "inputs only from the environment and standard input; exit 0 is success", "", func(p *Probe) {
		a := p.attachment()
		p.added = append(p.added, a)
		c := p.call("ADD", a) // Do gives it no argument, no HOME, and / as its folder
		if r := c.Do(); !r.OK() {
			p.Fatalf("want success with nothing but the environment and stdin, got %s", r)
		}
		if !p.hasLink(a.Netns, a.IfName) {
			p.Errorf("ADD exited 0 and %s is not there", a.IfName)
		}
		a.Netns = "/run/netns/no-such"
		if r := p.call("ADD", a).Do(); r.OK() {
			p.Errorf("an ADD that cannot work exited 0: %s", r)
		}
	}},
	{2, "ErrorObjectOnStdout", "an error object on standard output", "", func(p *Probe) {
		a := p.attachment()
		a.Netns = "/run/netns/no-such"
		p.fails("ADD in a namespace that does not exist", p.call("ADD", a).Do())
		c := p.call("ADD", a)
		c.Stdin = []byte(`{"cniVersion":`)
		p.fails("ADD with half a document on stdin", c.Do())
		c = p.call("BOGUS", a)
		p.fails("an unknown CNI_COMMAND", c.Do())
	}},
	{3, "ContainerIDPattern", "container ID: [A-Za-z0-9][A-Za-z0-9_.-]*, of bounded length", "", func(p *Probe) {
		a := p.attachment()
		links := p.links(a.Netns)
		for _, id := range []string{"", "-a", ".a", "_a", "a/b", "a b", "a;b", "../a", "ä", "a\n", strings.Repeat("x", 5000)} {
			bad := a
			bad.ID = id
			p.fails(fmt.Sprintf("ADD with container ID %.20q", id), p.add(&bad))
			p.unchanged(fmt.Sprintf("container ID %.20q", id), a.Netns, links)
		}
		for _, id := range []string{"A", "0.b_c-d", strings.Repeat("0123456789abcdef", 4)} {
			good := a
			good.ID = id
			p.succeeds("ADD with container ID "+id, p.add(&good))
			p.succeeds("DEL with container ID "+id, p.call("DEL", good).Do())
		}
	}},
	{4, "InterfaceNameUsable", "an unusable CNI_IFNAME is an error", "", func(p *Probe) {
		a := p.attachment()
		links := p.links(a.Netns)
		for _, name := range []string{"", ".", "..", "a/b", "a:b", "a b", "a\tb", "a%d", "sixteen-bytes-xx"} {
			bad := a
			bad.IfName = name
			p.fails(fmt.Sprintf("ADD with CNI_IFNAME %q", name), p.add(&bad))
			p.unchanged(fmt.Sprintf("CNI_IFNAME %q", name), a.Netns, links)
		}
		good := a
		good.IfName = "fifteen-bytes-x"
		p.succeeds("ADD with an interface name of 15 bytes", p.add(&good))
		if !p.hasLink(a.Netns, good.IfName) {
			p.Errorf("%s is not there after ADD", good.IfName)
		}
	}},
	{5, "NetworkNamePattern", "network name: the container ID's pattern", "", func(p *Probe) {
		a := p.attachment()
		links := p.links(a.Netns)
		for _, name := range []string{"", "-n", ".n", "a/b", "a b", "../../etc", "ü"} {
			c := p.call("ADD", a)
			c.Conf["name"] = name
			p.fails(fmt.Sprintf("ADD to network %q", name), c.Do())
			p.unchanged(fmt.Sprintf("network %q", name), a.Netns, links)
		}
		c := p.call("ADD", a)
		delete(c.Conf, "name")
		p.fails("ADD without a network name", c.Do())
	}},
}

// CNI SPEC section 2: ADD.
var addChecks = []Check{
	{6, "AddCreatesInterface", "ADD creates CNI_IFNAME in CNI_NETNS", "", func(p *Probe) {
		for _, name := range []string{"eth0", "net1"} {
			a := p.attachment()
			a.IfName = name
			p.mustAdd(&a)
			if !p.hasLink(a.Netns, name) {
				p.Errorf("%s is not there after ADD", name)
			} else if out := p.in(a.Netns, "ip", "-o", "link", "show", "dev", name); !strings.Contains(out, ",UP") && !strings.Contains(out, "<UP") {
				p.Errorf("%s is not up after ADD: %s", name, out)
			}
		}
	}},
	{7, "AddPrintsResult", "ADD prints a result", "", func(p *Probe) {
		_, res := p.fresh()
		if len(res.Interfaces) == 0 || len(res.IPs) == 0 {
			p.Errorf("the result has %d interfaces and %d addresses", len(res.Interfaces), len(res.IPs))
		}
	}},
	{8, "AddHandlesPrevResult", "ADD passes prevResult on or modifies it; it is never dropped silently", "", func(p *Probe) {
		a := p.attachment()
		links := p.links(a.Netns)
		p.added = append(p.added, a)
		c := p.call("ADD", a)
		c.Conf["prevResult"] = p.foreignResult(a.Netns)
		r := c.Do()
		if !r.OK() {
			if e := p.refused("ADD with a prevResult", r); !strings.Contains(e.Msg+e.Details, "prevResult") {
				p.Errorf("the refusal does not name prevResult: %+v", e)
			}
			p.unchanged("a refused prevResult", a.Netns, links)
			return
		}
		res := p.result(r)
		if _, ok := res.inSandbox("before0"); !ok {
			p.Errorf("the interface of prevResult is not in the result: %s", clip(r.Stdout))
		}
	}},
	{9, "AddFailsIfInterfaceExists", "ADD of an interface that exists is an error, and harms nothing", "", func(p *Probe) {
		foreign := p.attachment()
		p.in(foreign.Netns, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "foreign0")
		before := p.in(foreign.Netns, "ip", "-o", "link", "show", "dev", "eth0")
		p.fails("ADD where a foreign eth0 exists", p.call("ADD", foreign).Do())
		if now, err := netlab.TryIn(foreign.Netns, "ip", "-o", "link", "show", "dev", "eth0"); now != before {
			p.Errorf("the foreign eth0 was changed: before %q, now %q, %v", before, now, err)
		}
		a, _ := p.fresh()
		p.fails("the same ADD twice", p.call("ADD", a).Do())
		p.alive("the first ADD after the second was refused", a)
	}},
	{10, "AddNeedsItsParameters", "ADD needs CNI_CONTAINERID, CNI_NETNS and CNI_IFNAME", "", func(p *Probe) {
		a := p.attachment()
		links := p.links(a.Netns)
		for _, name := range []string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"} {
			for _, value := range []string{"", unset} {
				c := p.call("ADD", a)
				c.Env[name] = value
				if e := p.refused("ADD without "+name, c.Do()); e.Msg != "" && !strings.Contains(e.Msg+e.Details, name) {
					p.Errorf("ADD without %s: the error does not name it: %+v", name, e)
				}
				p.unchanged("ADD without "+name, a.Netns, links)
			}
		}
	}},
}

// foreignResult is what an earlier plugin of the chain might have answered.
func (p *Probe) foreignResult(netns string) map[string]any {
	ip := map[string]any{"address": "203.0.113.7/24", "interface": 0}
	if p.Version < "1.0.0" {
		ip["version"] = "4"
	}
	return map[string]any{
		"cniVersion": p.Version,
		"interfaces": []any{map[string]any{"name": "before0", "mac": "02:00:00:00:00:01", "sandbox": netns}},
		"ips":        []any{ip},
		"dns":        map[string]any{"nameservers": []any{"203.0.113.53"}},
	}
}

// CNI SPEC section 2: DEL.
var delChecks = []Check{
	{11, "DelUndoesAdd", "DEL undoes ADD", "", func(p *Probe) {
		a := p.attachment()
		links, routes := p.links(a.Netns), p.in(a.Netns, "ip", "route", "show", "table", "all")
		p.mustAdd(&a)
		p.succeeds("DEL", p.call("DEL", a).Do())
		p.unchanged("DEL", a.Netns, links)
		if now := p.in(a.Netns, "ip", "route", "show", "table", "all"); now != routes {
			p.Errorf("routes of the namespace: before %q, after %q", routes, now)
		}
		p.clean("DEL")
	}},
	{12, "DelWithoutPrevResult", "DEL succeeds without prevResult", "", func(p *Probe) {
		a, _ := p.fresh()
		a.Prev = nil
		p.succeeds("DEL without prevResult", p.call("DEL", a).Do())
		p.clean("DEL without prevResult")
	}},
	{13, "DelWhenThingsAreGone", "DEL finishes without error when state, namespace or interface is gone", "", func(p *Probe) {
		never := p.attachment()
		p.succeeds("DEL of what was never added", p.call("DEL", never).Do())
		never.Netns = "/run/netns/no-such"
		p.succeeds("DEL in a namespace that does not exist", p.call("DEL", never).Do())
		plain := filepath.Join(p.dir(), "plain")
		if err := os.WriteFile(plain, nil, 0o644); err != nil {
			p.Fatalf("%v", err)
		}
		never.Netns = plain
		p.succeeds("DEL where CNI_NETNS is a plain file", p.call("DEL", never).Do())

		noLink, _ := p.fresh()
		p.in(noLink.Netns, "ip", "link", "del", noLink.IfName)
		p.succeeds("DEL after the interface was deleted by hand", p.call("DEL", noLink).Do())

		noNetns, _ := p.fresh()
		p.removeNamespace(noNetns.Netns)
		p.succeeds("DEL after the namespace was deleted", p.call("DEL", noNetns).Do())
		p.clean("DEL of things that are gone")
	}},
	{14, "DelReleasesWithoutNamespace", "DEL releases addresses and the host's state when the namespace is gone", "", func(p *Probe) {
		for _, prev := range []bool{true, false} {
			for _, path := range []bool{true, false} {
				a, res := p.fresh()
				p.removeNamespace(a.Netns)
				if !prev {
					a.Prev = nil
				}
				if !path {
					a.Netns = ""
				}
				about := fmt.Sprintf("DEL with the namespace gone, prevResult %t, CNI_NETNS %t", prev, path)
				p.succeeds(about, p.call("DEL", a).Do())
				p.clean(about)
				p.released(about, a, res)
			}
		}
	}},
	{15, "FailedReleaseIsNoError", "a release that cannot be delivered is no error of DEL (the specification's example is DHCP)", "", func(p *Probe) {
		a, _ := p.fresh()
		start, err := p.driver.StopDaemon()
		if skip(err) {
			p.NotApplicable("releases nothing over a network or to a daemon; the item binds IPAM plugins like dhcp")
		}
		p.require(err)
		p.later(start)
		p.succeeds("DEL while nobody takes the release", p.call("DEL", a).Do())
	}},
	{16, "DelRepeats", "DEL accepts repeats", "", func(p *Probe) {
		a, _ := p.fresh()
		p.succeeds("first DEL", p.call("DEL", a).Do())
		p.succeeds("second DEL", p.call("DEL", a).Do())
		a.Prev = nil
		p.succeeds("third DEL, without prevResult", p.call("DEL", a).Do())
		p.clean("three DELs")
	}},
	{17, "DelNamespaceIsOptional", "DEL does not need CNI_NETNS", "", func(p *Probe) {
		for _, value := range []string{"", unset} {
			a, _ := p.fresh()
			c := p.call("DEL", a)
			c.Env["CNI_NETNS"] = value
			p.succeeds("DEL without CNI_NETNS", c.Do())
			p.removeNamespace(a.Netns) // the runtime's next step
			p.clean("DEL without CNI_NETNS, then the namespace's end")
		}
	}},
}

// released checks that no state folder under /var/lib/cni still holds the
// address or the ID of the attachment.
func (p *Probe) released(about string, a Attachment, res Result) {
	for _, ip := range res.IPs {
		addr, _, _ := strings.Cut(ip.Address, "/")
		for _, path := range []string{filepath.Join("/var/lib/cni/networks", p.Network, addr)} {
			if _, err := os.Stat(path); err == nil {
				p.Errorf("%s: the address is still reserved: %s", about, path)
			}
		}
	}
	_ = filepath.WalkDir("/var/lib/cni", func(path string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			if raw, err := os.ReadFile(path); err == nil && strings.Contains(string(raw), a.ID) {
				p.Errorf("%s: %s still names the container", about, path)
			}
		}
		return nil
	})
}
