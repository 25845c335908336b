package suite

import (
	"slices"
	"strings"
	"sync"
	"time"

	"mknet/tests/netlab"
)

// versionBudget bounds the CPU time of VERSION; a Go program that does nothing
// takes a few milliseconds, and ten times that on a machine whose memory is short.
const versionBudget = time.Second

// CNI SPEC section 2: VERSION.
var versionChecks = []Check{
	{33, "VersionEchoesInput", "VERSION: cniVersion is the input's, beside supportedVersions", "", func(p *Probe) {
		c := &Call{p: p, Conf: Conf{"cniVersion": p.Version}, Env: map[string]string{"CNI_COMMAND": "VERSION"}}
		r := c.Do()
		p.succeeds("VERSION", r)
		var got struct {
			CNIVersion        string   `json:"cniVersion"`
			SupportedVersions []string `json:"supportedVersions"`
		}
		if err := oneDocument(r.Stdout, &got); err != nil {
			p.Fatalf("%s: %v", r, err)
		}
		if got.CNIVersion != p.Version {
			p.Errorf("cniVersion is %q, the input's is %q", got.CNIVersion, p.Version)
		}
		if !slices.Contains(got.SupportedVersions, p.Version) {
			p.Errorf("supportedVersions %v lacks %s", got.SupportedVersions, p.Version)
		}
	}},
	{34, "VersionIsCheap", "VERSION works with no other variable, cheaply, without side effects", "", func(p *Probe) {
		if start, err := p.driver.StopDaemon(); !skip(err) {
			p.require(err)
			p.later(start)
		}
		before := newTree("/var/lib", "/run", "/etc/cni")
		for _, stdin := range []string{`{"cniVersion":"` + p.Version + `"}`, `{"cniVersion":"` + p.Version + `","name":"x","type":"y","unknownKey":1}`} {
			c := &Call{p: p, Stdin: []byte(stdin), Env: map[string]string{"CNI_COMMAND": "VERSION"}}
			r := c.Do()
			p.succeeds("VERSION with stdin "+stdin, r)
			if r.CPU > versionBudget {
				p.Errorf("VERSION took %s of CPU time", r.CPU)
			}
		}
		c := &Call{p: p, Conf: Conf{"cniVersion": p.Version}, Env: map[string]string{
			"CNI_COMMAND":     "VERSION",
			"CNI_CONTAINERID": "dummy", "CNI_NETNS": "dummy", "CNI_IFNAME": "dummy", "CNI_PATH": "dummy",
		}}
		p.succeeds("VERSION with libcni's dummy values", c.Do())
		for _, path := range before.added() {
			p.Errorf("VERSION made %s", path)
		}
		p.clean("VERSION")
	}},
}

// CNI SPEC section 2: GC.
var gcChecks = []Check{
	{35, "GCRemovesUnlisted", "GC removes everything of this network that is not listed, and nothing else", "1.1.0", func(p *Probe) {
		kept, _ := p.fresh()
		elsewhere := p.attachment()
		network := p.Network
		p.Network = network + "-other"
		p.mustAdd(&elsewhere)
		p.Network = network
		p.later(func() error { // its network is not the one that cleanUp uses
			p.call("DEL", elsewhere).with(Conf{"name": network + "-other"}).Do()
			return nil
		})
		with := netlab.Take()
		for _, gone := range []bool{false, true} {
			stale := p.attachment()
			links := p.links(stale.Netns)
			p.mustAdd(&stale)
			if gone {
				p.removeNamespace(stale.Netns)
			}
			p.succeeds("GC", p.gc(p.driver.Conf(), []Attachment{kept}).Do())
			for _, line := range p.newSince(with, settle) {
				p.Errorf("GC left behind (namespace gone: %t): %s", gone, line)
			}
			if !gone {
				p.unchanged("GC", stale.Netns, links)
			}
		}
		p.alive("the listed attachment after GC", kept)
		p.succeeds("CHECK of the other network's attachment after GC", p.call("CHECK", elsewhere).with(Conf{"name": network + "-other"}).Do())
	}},
	{36, "GCAfterNamespaceIsGone", "GC works on what has no namespace any more", "1.1.0", func(p *Probe) {
		a, res := p.fresh()
		p.removeNamespace(a.Netns)
		p.succeeds("GC", p.gc(p.driver.Conf(), nil).Do())
		p.clean("GC of an attachment whose namespace is gone")
		p.released("GC", a, res)
	}},
	{37, "GCGoesOnAndReports", "GC goes on past an error and reports all of them", "1.1.0", func(p *Probe) {
		before := netlab.Take()
		stuck, _ := p.fresh()
		unjam, err := p.driver.Jam(stuck)
		if skip(err) { // then the delegate's error is the one to report
			a, ipam := p.delegating()
			p.mustAdd(&a)
			ipam.fail("GC")
			p.fails("GC while the delegate's fails", p.gc(a.Conf, nil).Do())
			return
		}
		p.require(err)
		p.removeNamespace(stuck.Netns)
		with := netlab.Take()
		other, _ := p.fresh()
		p.removeNamespace(other.Netns)
		e := p.refused("GC that cannot remove one attachment", p.gc(p.driver.Conf(), nil).Do())
		for _, line := range p.newSince(with, settle) {
			p.Errorf("GC stopped at the error and left behind: %s", line)
		}
		if e.Msg != "" && e.Code == 0 {
			p.Errorf("the error has no code: %+v", e)
		}
		p.require(unjam())
		p.succeeds("GC again, now that it can", p.gc(p.driver.Conf(), nil).Do())
		for _, line := range p.newSince(before, settle) {
			p.Errorf("the second GC left behind: %s", line)
		}
	}},
	{38, "GCForwards", "GC is forwarded to delegates, with its list", "1.1.0", func(p *Probe) {
		a, ipam := p.delegating()
		p.mustAdd(&a)
		p.succeeds("GC", p.gc(a.Conf, []Attachment{a}).Do())
		calls := p.delegated(ipam, "GC")
		for _, c := range calls {
			if !strings.Contains(c.Stdin, "cni.dev/valid-attachments") || !strings.Contains(c.Stdin, a.ID) {
				p.Errorf("the delegate's configuration lacks the list: %s", c.Stdin)
			}
		}
	}},
	{39, "GCIsSilent", "GC prints nothing when all is well", "1.1.0", func(p *Probe) {
		a, _ := p.fresh()
		for _, keep := range [][]Attachment{{a}, nil} {
			r := p.gc(p.driver.Conf(), keep).Do()
			p.succeeds("GC", r)
			if len(strings.TrimSpace(string(r.Stdout))) > 0 {
				p.Errorf("GC printed %s", clip(r.Stdout))
			}
		}
	}},
	{40, "GCKeys", "GC takes either key; without a key only what is provably dead goes, [] reclaims all", "1.1.0", func(p *Probe) {
		const newKey, oldKey = "cni.dev/valid-attachments", "cni.dev/attachments"
		for _, keys := range [][]string{{newKey}, {oldKey}, {newKey, oldKey}, {}} {
			about := "GC with the keys " + strings.Join(keys, ", ")
			live, _ := p.fresh()
			with := netlab.Take()
			dead, _ := p.fresh()
			p.removeNamespace(dead.Netns)
			c := p.gc(p.driver.Conf(), []Attachment{live})
			for _, k := range []string{newKey, oldKey} {
				if !slices.Contains(keys, k) {
					delete(c.Conf, k)
				}
			}
			p.succeeds(about, c.Do())
			p.alive(about+": the live attachment", live)
			for _, line := range p.newSince(with, settle) {
				p.Errorf("%s left behind: %s", about, line)
			}
			p.succeeds("DEL", p.call("DEL", live).Do())
		}
		for _, key := range []string{newKey, oldKey} {
			a := p.attachment()
			links := p.links(a.Netns)
			p.mustAdd(&a)
			c := p.network("GC", p.driver.Conf().with(Conf{key: []any{}}))
			p.succeeds("GC with an empty list in "+key, c.Do())
			p.unchanged("GC with an empty list in "+key, a.Netns, links)
			p.clean("GC with an empty list in " + key)
		}
	}},
}

// CNI SPEC section 3: execution.
var executionChecks = []Check{
	{41, "ConcurrentContainers", "calls for different containers may run at the same time", "", func(p *Probe) {
		const n = 6
		all := make([]Attachment, n)
		for i := range all {
			all[i] = p.attachment()
		}
		replies := p.together(all, "ADD")
		seen := map[string]string{}
		for i, r := range replies {
			p.added = append(p.added, all[i])
			res := p.result(r)
			all[i].Prev = res.Raw
			for _, ip := range res.IPs {
				if other, ok := seen[ip.Address]; ok {
					p.Errorf("%s and %s both have %s", other, all[i].ID, ip.Address)
				}
				seen[ip.Address] = all[i].ID
			}
		}
		for _, a := range all {
			p.alive("after concurrent ADDs", a)
		}
		for _, r := range p.together(all, "DEL") {
			p.succeeds("concurrent DEL", r)
		}
		p.clean("concurrent DELs")
	}},
	{42, "DelAfterFailedAdd", "DEL follows a failed ADD, and may come more often than ADD", "", func(p *Probe) {
		a := p.attachment()
		p.in(a.Netns, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "foreign0")
		links := p.links(a.Netns)
		p.fails("ADD where eth0 exists", p.call("ADD", a).Do())
		p.in(a.Netns, "ip", "link", "set", "eth0", "name", "mine0") // a runtime keeps nothing; a person might
		links = strings.Replace(links, "eth0", "mine0", 1)
		p.succeeds("DEL after the failed ADD", p.call("DEL", a).Do())
		p.succeeds("an extra DEL", p.call("DEL", a).Do())
		p.unchanged("DEL after the failed ADD", a.Netns, links)
		p.clean("DEL after the failed ADD")
		p.in(a.Netns, "ip", "link", "del", "mine0")
		p.succeeds("ADD after all that", p.add(&a))
	}},
	{43, "DelTakesChainsResult", "DEL's prevResult is the chain's final result", "", func(p *Probe) {
		a, res := p.fresh()
		a.Prev = copyOf(res.Raw)
		a.Prev["interfaces"] = append([]any{map[string]any{"name": "first0", "sandbox": a.Netns}}, a.Prev["interfaces"].([]any)...)
		ip := map[string]any{"address": "203.0.113.8/24", "interface": 0}
		if p.Version < "1.0.0" {
			ip["version"] = "4"
		}
		a.Prev["ips"] = append([]any{ip}, a.Prev["ips"].([]any)...)
		delete(a.Prev, "dns")
		p.succeeds("DEL with a later plugin's result", p.call("DEL", a).Do())
		p.clean("DEL with a later plugin's result")

		b, _ := p.fresh()
		b.Prev = map[string]any{"cniVersion": p.Version}
		p.succeeds("DEL with an empty result", p.call("DEL", b).Do())
		p.clean("DEL with an empty result")
	}},
	{44, "RuntimeConfigIsOptional", "runtimeConfig holds declared capabilities only: absent and empty are fine", "", func(p *Probe) {
		for _, rt := range []any{map[string]any{}, nil} {
			a := p.attachment()
			a.Conf = a.Conf.with(Conf{"runtimeConfig": rt})
			p.mustAdd(&a)
			p.alive("with an empty runtimeConfig", a)
			p.succeeds("DEL with an empty runtimeConfig", p.call("DEL", a).Do())
		}
	}},
	{45, "ToleratesReservedKeys", "args, cni.dev/... and capabilities are tolerated", "", func(p *Probe) {
		a := p.attachment()
		a.Conf = a.Conf.with(Conf{
			"args":         map[string]any{"cni": map[string]any{"labels": []any{map[string]any{"key": "app", "value": "x"}}}},
			"cni.dev/note": "anything", "capabilities": map[string]any{"portMappings": false}, "disableCheck": false,
		})
		p.mustAdd(&a)
		p.alive("with reserved keys", a)
		p.succeeds("DEL with reserved keys", p.call("DEL", a).Do())
		if p.Version == "1.1.0" {
			p.succeeds("STATUS with reserved keys", p.network("STATUS", a.Conf).Do())
			p.succeeds("GC with reserved keys", p.gc(a.Conf, nil).Do())
		}
	}},
}

// together runs one verb for all attachments at the same time.
func (p *Probe) together(all []Attachment, verb string) []Reply {
	replies := make([]Reply, len(all))
	var wg sync.WaitGroup
	for i, a := range all {
		c := p.call(verb, a)
		wg.Go(func() { replies[i] = c.Do() })
	}
	wg.Wait()
	return replies
}
