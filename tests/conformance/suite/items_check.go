package suite

import (
	"errors"
	"strings"
	"time"
)

// CNI SPEC section 2: CHECK.
var checkChecks = []Check{
	{18, "CheckUsesPrevResult", "CHECK takes the expected interfaces and addresses from prevResult", "0.4.0", func(p *Probe) {
		a, res := p.fresh()
		p.succeeds("CHECK with the result of ADD", p.call("CHECK", a).Do())

		none := a
		none.Prev = nil
		p.fails("CHECK without prevResult", p.call("CHECK", none).Do())

		wrong := a
		wrong.Prev = copyOf(res.Raw)
		for _, ip := range list(wrong.Prev["ips"]) {
			ip["address"] = "203.0.113.99/24"
			delete(ip, "gateway")
		}
		p.fails("CHECK with an address in prevResult that nobody has", p.call("CHECK", wrong).Do())

		wrong.Prev = copyOf(res.Raw)
		for _, i := range list(wrong.Prev["interfaces"]) {
			if i["name"] == a.IfName {
				i["name"] = "other0"
			}
		}
		p.fails("CHECK with an interface in prevResult that is not there", p.call("CHECK", wrong).Do())
	}},
	{19, "CheckToleratesLaterPlugins", "CHECK tolerates what later plugins of the chain changed", "0.4.0", func(p *Probe) {
		a, res := p.fresh()
		a.Prev = copyOf(res.Raw)
		a.Prev["interfaces"] = append(a.Prev["interfaces"].([]any), map[string]any{"name": "ifb0later"},
			map[string]any{"name": "later0", "mac": "02:00:00:00:00:02", "sandbox": a.Netns})
		a.Prev["dns"] = map[string]any{"nameservers": []any{"203.0.113.53"}}
		p.in(a.Netns, "ip", "link", "add", "later0", "type", "veth", "peer", "name", "later1")
		p.in(a.Netns, "ip", "link", "set", "later0", "up")
		p.in(a.Netns, "ip", "route", "add", "203.0.113.0/24", "dev", "later0")
		p.in(a.Netns, "sysctl", "-qw", "net.core.somaxconn=500") // the example of the tuning plugin
		p.host("iptables", "-w", "-A", "OUTPUT", "-d", "203.0.113.9", "-m", "comment", "--comment", "later plugin", "-j", "ACCEPT")
		p.later(func() error {
			return rule{"iptables", "filter", `-A OUTPUT -d 203.0.113.9/32 -m comment --comment "later plugin" -j ACCEPT`}.remove()
		})
		p.succeeds("CHECK after later plugins", p.call("CHECK", a).Do())
	}},
	{20, "CheckFindsBadInterfaceAddressRoute", "CHECK fails on a missing or bad interface, address or route of its own", "0.4.0", func(p *Probe) {
		for _, fault := range []struct {
			name  string
			spoil func(a Attachment)
		}{
			{"interface deleted", func(a Attachment) { p.in(a.Netns, "ip", "link", "del", a.IfName) }},
			{"interface down", func(a Attachment) { p.in(a.Netns, "ip", "link", "set", a.IfName, "down") }},
			{"address removed", func(a Attachment) { p.in(a.Netns, "ip", "addr", "flush", "dev", a.IfName) }},
			{"default route removed", func(a Attachment) {
				if out := p.in(a.Netns, "ip", "route", "show", "default"); out == "" {
					p.Fatalf("ADD made no default route")
				}
				p.in(a.Netns, "ip", "route", "del", "default")
			}},
			{"namespace gone", func(a Attachment) { p.removeNamespace(a.Netns) }},
		} {
			a, _ := p.fresh()
			p.succeeds("CHECK before "+fault.name, p.call("CHECK", a).Do())
			fault.spoil(a)
			p.fails("CHECK with "+fault.name, p.call("CHECK", a).Do())
			p.succeeds("DEL with "+fault.name, p.call("DEL", a).Do())
		}
	}},
	{21, "CheckFindsMissingHiddenParts", "CHECK fails on missing rules, shaping, reservation or daemon", "0.4.0", func(p *Probe) {
		seen := 0
		before := p.before
		a, _ := p.fresh()
		rules, err := rulesSince(before)
		if err != nil {
			p.Fatalf("read the rules: %v", err)
		}
		if len(rules) > 0 {
			seen++
			for _, r := range pick(rules, 4) {
				restore, err := saveRules(r.flavour)
				p.require(err)
				p.require(r.remove())
				p.fails("CHECK without the rule "+r.line, p.call("CHECK", a).Do())
				p.require(restore())
			}
			p.succeeds("CHECK with all rules back", p.call("CHECK", a).Do())
		}
		p.succeeds("DEL", p.call("DEL", a).Do())

		try := func(err error, then func()) {
			if skip(err) {
				return
			}
			p.require(err)
			seen++
			then()
		}
		b, _ := p.fresh()
		try(p.driver.LoseReservation(p.Network, b.ID), func() {
			p.fails("CHECK without the reservation of its address", p.call("CHECK", b).Do())
		})
		p.succeeds("DEL", p.call("DEL", b).Do())

		conf, rt, lose, err := p.driver.Shaped()
		try(err, func() {
			c := p.attachment()
			c.Conf = conf.with(Conf{"runtimeConfig": rt})
			p.mustAdd(&c)
			p.succeeds("CHECK with shaping", p.call("CHECK", c).Do())
			p.require(lose())
			p.fails("CHECK without the shaping", p.call("CHECK", c).Do())
			p.succeeds("DEL", p.call("DEL", c).Do())
		})

		d, _ := p.fresh()
		start, err := p.driver.StopDaemon()
		try(err, func() {
			p.later(start)
			p.fails("CHECK without the daemon", p.call("CHECK", d).Do())
		})
		if seen == 0 {
			p.NotApplicable("has no rules, shaping, reservations or daemon")
		}
	}},
	{22, "CheckFailsIfUnreachable", "CHECK fails if the container is known to be unreachable", "0.4.0", func(p *Probe) {
		a, res := p.fresh()
		hosts := res.onHost()
		spoilt := 0
		for _, i := range hosts {
			if p.before["link: "+i.Name] {
				continue // shared with others, for example a bridge
			}
			spoilt++
			p.host("ip", "link", "set", i.Name, "down")
			p.fails("CHECK with the host's end "+i.Name+" down", p.call("CHECK", a).Do())
		}
		if spoilt == 0 {
			p.Errorf("the result lists no link of this attachment on the host: %v", hosts)
		}
	}},
	{23, "CheckRightAfterAdd", "CHECK works right after ADD", "0.4.0", func(p *Probe) {
		for range 4 {
			a := p.attachment()
			p.mustAdd(&a)
			p.succeeds("CHECK right after ADD", p.call("CHECK", a).Do())
		}
	}},
	{24, "CheckDelegates", "CHECK calls the delegate, and fails when the delegate does", "0.4.0", func(p *Probe) {
		a, ipam := p.delegating()
		p.mustAdd(&a)
		p.succeeds("CHECK", p.call("CHECK", a).Do())
		p.delegated(ipam, "CHECK")
		ipam.fail("CHECK")
		p.fails("CHECK while the delegate's fails", p.call("CHECK", a).Do())
	}},
	{25, "CheckIsSilent", "CHECK prints nothing when all is well", "0.4.0", func(p *Probe) {
		a, _ := p.fresh()
		r := p.call("CHECK", a).Do()
		p.succeeds("CHECK", r)
		if len(strings.TrimSpace(string(r.Stdout))) > 0 {
			p.Errorf("CHECK printed %s", clip(r.Stdout))
		}
	}},
}

// CNI SPEC section 2: STATUS.
var statusChecks = []Check{
	{26, "StatusZeroWhenReady", "STATUS is 0 when ready, else non-zero with an error", "1.1.0", func(p *Probe) {
		r := p.network("STATUS", p.driver.Conf()).Do()
		p.succeeds("STATUS", r)
		if len(strings.TrimSpace(string(r.Stdout))) > 0 {
			p.Errorf("STATUS printed %s", clip(r.Stdout))
		}
		c := p.network("STATUS", p.driver.Conf())
		c.Stdin = []byte("{")
		p.fails("STATUS with half a document", c.Do())
	}},
	{27, "StatusFailsWhenNotReady", "STATUS fails when the daemon is down or the addresses are used up", "1.1.0", func(p *Probe) {
		start, err := p.driver.StopDaemon()
		if !skip(err) {
			p.require(err)
			down := p.network("STATUS", p.driver.Conf()).Do()
			p.require(start())
			p.fails("STATUS with the daemon down", down)
			p.succeeds("STATUS with the daemon back", p.network("STATUS", p.driver.Conf()).Do())
		}
		conf := p.exhaust()
		p.fails("STATUS with all addresses used up", p.network("STATUS", conf).Do())
	}},
	{28, "StatusCodes", "STATUS: 50 is unavailable, 51 also limits existing containers", "1.1.0", func(p *Probe) {
		coded := func(about string, r Reply, want uint) {
			if e := p.refused(about, r); e.Msg != "" && e.Code != want {
				p.Errorf("%s: code %d, want %d: %s", about, e.Code, want, e.Msg)
			}
		}
		if undo, err := p.driver.Degrade(nil); !skip(err) {
			p.require(err)
			coded("STATUS with no way out and no containers", p.statusUntil(false), 50)
			p.require(undo())
			p.succeeds("STATUS with the way out back", p.statusUntil(true))
		}
		a, _ := p.fresh()
		if undo, err := p.driver.Degrade(&a); !skip(err) {
			p.require(err)
			coded("STATUS with no way out for an existing container", p.statusUntil(false), 51)
			p.require(undo())
			p.succeeds("STATUS with the way out back", p.statusUntil(true))
		}
		p.succeeds("DEL", p.call("DEL", a).Do())
		conf := p.exhaust()
		coded("STATUS with all addresses used up", p.network("STATUS", conf).Do(), 50)
	}},
	{29, "WorksWithoutStatus", "nothing relies on STATUS being called", "1.1.0", func(p *Probe) {
		p.require(p.driver.Reset()) // as if just started, so that no STATUS came before
		a, _ := p.fresh()
		p.alive("CHECK", a)
		p.succeeds("DEL", p.call("DEL", a).Do())
	}},
	{30, "OthersComeDespiteStatus", "other operations still come, and work as far as they can, while STATUS fails", "1.1.0", func(p *Probe) {
		conf, undo, err := p.driver.Small()
		p.require(err)
		p.finally(undo)
		a := p.attachment()
		a.Conf = conf
		p.mustAdd(&a)
		if r := p.network("STATUS", conf).Do(); r.OK() {
			p.Errorf("STATUS is 0 with all addresses used up")
		}
		p.succeeds("CHECK while STATUS fails", p.call("CHECK", a).Do())
		b := p.attachment()
		b.Conf = conf
		p.fails("ADD with all addresses used up", p.add(&b))
		p.succeeds("DEL of the failed ADD", p.call("DEL", b).Do())
		p.succeeds("GC that keeps what is there", p.gc(conf, []Attachment{a}).Do())
		p.succeeds("DEL while STATUS fails", p.call("DEL", a).Do())
		p.succeeds("ADD after an address is free again", p.add(&b))
	}},
	{31, "StatusDelegates", "STATUS calls the delegate, and fails when the delegate does", "1.1.0", func(p *Probe) {
		a, ipam := p.delegating()
		p.succeeds("STATUS", p.network("STATUS", a.Conf).Do())
		p.delegated(ipam, "STATUS")
		ipam.fail("STATUS")
		p.fails("STATUS while the delegate's fails", p.network("STATUS", a.Conf).Do())
	}},
	{32, "StatusWithoutContainer", "STATUS needs no container in the environment", "1.1.0", func(p *Probe) {
		c := p.network("STATUS", p.driver.Conf())
		p.succeeds("STATUS with the container's variables unset", c.Do())
		for _, name := range []string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"} {
			c.Env[name] = ""
		}
		p.succeeds("STATUS with the container's variables empty", c.Do())
	}},
}

// skip reports whether the plugin has no such notion.
func skip(err error) bool {
	reason := meaningless("")
	return errors.As(err, &reason)
}

// notice is how long a daemon may take to see that the host has changed.
const notice = 15 * time.Second

// statusUntil asks STATUS until it is ready or not, as wanted, for a bounded time,
// and returns the last answer.
func (p *Probe) statusUntil(ready bool) Reply {
	for deadline := time.Now().Add(notice); ; time.Sleep(100 * time.Millisecond) {
		r := p.network("STATUS", p.driver.Conf()).Do()
		if r.OK() == ready || time.Now().After(deadline) {
			return r
		}
	}
}

// exhaust uses up a small pool and returns its configuration.
func (p *Probe) exhaust() Conf {
	conf, undo, err := p.driver.Small()
	p.require(err)
	p.finally(undo)
	p.succeeds("STATUS with a free address", p.network("STATUS", conf).Do())
	a := p.attachment()
	a.Conf = conf
	p.mustAdd(&a)
	return conf
}

// gc prepares a GC that keeps the given attachments, with both keys as libcni
// sends them.
func (p *Probe) gc(conf Conf, keep []Attachment) *Call {
	valid := []any{}
	for _, a := range keep {
		valid = append(valid, map[string]any{"containerID": a.ID, "ifname": a.IfName})
	}
	return p.network("GC", conf.with(Conf{"cni.dev/valid-attachments": valid, "cni.dev/attachments": valid}))
}

// list views a JSON array of objects.
func list(v any) []map[string]any {
	var out []map[string]any
	items, _ := v.([]any)
	for _, i := range items {
		if m, ok := i.(map[string]any); ok {
			out = append(out, m)
		}
	}
	return out
}

// pick takes at most n elements, spread over the whole.
func pick[T any](all []T, n int) []T {
	if len(all) <= n {
		return all
	}
	var out []T
	for i := range n {
		out = append(out, all[i*(len(all)-1)/(n-1)])
	}
	return out
}
