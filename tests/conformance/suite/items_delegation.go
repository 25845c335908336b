package suite

import (
	"bufio"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// ipamType is the name of the IPAM double, see tests/conformance/double.
const ipamType = "double-ipam"

// CNI SPEC section 4: delegation.
var delegationChecks = []Check{
	{46, "DelegateFoundInPath", "the delegate is looked for in CNI_PATH, in all its folders", "", func(p *Probe) {
		a, _ := p.delegating()
		p.dirs = append([]string{"/no-such-folder"}, p.dirs...)
		p.succeeds("ADD with the delegate in the last folder", p.add(&a))
		p.succeeds("DEL", p.call("DEL", a).Do())
		c := p.call("ADD", a)
		c.Env["CNI_PATH"] = "/no-such-folder"
		p.fails("ADD with the delegate in no folder", c.Do())
	}},
	{47, "DelegateGetsEverything", "the delegate gets the same environment and the complete configuration", "", func(p *Probe) {
		a, ipam := p.delegating()
		a.Conf = a.Conf.with(Conf{"args": map[string]any{"cni": map[string]any{"x": "y"}}})
		c := p.call("ADD", a)
		c.Env["CNI_ARGS"] = "IgnoreUnknown=1;K8S_POD_NAME=p"
		p.added = append(p.added, a)
		p.succeeds("ADD", c.Do())
		for _, got := range p.delegated(ipam, "ADD") {
			for k, want := range c.Env {
				if got.Env[k] != want {
					p.Errorf("%s is %q for the delegate, %q for the plugin", k, got.Env[k], want)
				}
			}
			var conf Conf
			if err := json.Unmarshal([]byte(got.Stdin), &conf); err != nil {
				p.Fatalf("the delegate's stdin: %v", err)
			}
			for k := range c.Conf {
				if _, ok := conf[k]; !ok {
					p.Errorf("the delegate's configuration lacks %q", k)
				}
			}
		}
	}},
	{48, "DelegateStderrForwarded", "what the delegate writes to standard error is passed on", "", func(p *Probe) {
		a, ipam := p.delegating()
		ipam.control("say", "a word of the delegate")
		r := p.add(&a)
		p.succeeds("ADD", r)
		if !strings.Contains(string(r.Stderr), "a word of the delegate") {
			p.Errorf("stderr is %s", clip(r.Stderr))
		}
	}},
	{49, "OtherVerbsRunDelegates", "DEL, CHECK, GC and STATUS also run the delegate", "", func(p *Probe) {
		a, ipam := p.delegating()
		p.mustAdd(&a)
		if p.Version >= "0.4.0" {
			p.succeeds("CHECK", p.call("CHECK", a).Do())
			p.delegated(ipam, "CHECK")
		}
		if p.Version >= "1.1.0" {
			p.succeeds("STATUS", p.network("STATUS", a.Conf).Do())
			p.delegated(ipam, "STATUS")
			p.succeeds("GC", p.gc(a.Conf, []Attachment{a}).Do())
			p.delegated(ipam, "GC")
		}
		p.removeNamespace(a.Netns)
		p.succeeds("DEL with the namespace gone", p.call("DEL", a).Do())
		p.delegated(ipam, "DEL")
	}},
	{50, "FailedDelegateAddIsUndone", "a failed delegate ADD is followed by its DEL; a duplicate ADD must not free the live lease", "", func(p *Probe) {
		a, ipam := p.delegating()
		ipam.fail("ADD")
		p.fails("ADD while the delegate's fails", p.add(&a))
		p.delegated(ipam, "DEL")
		ipam.control("fail", "")
		b := p.attachment()
		b.Conf = a.Conf
		p.mustAdd(&b)
		before := len(p.calls(ipam, "DEL"))
		p.fails("the same ADD twice", p.call("ADD", b).Do())
		if now := len(p.calls(ipam, "DEL")); now != before {
			p.Errorf("the duplicate ADD made %d delegate DELs: the live lease is free", now-before)
		}
	}},
	{51, "IPAMResultIsFilled", "an IPAM result has no interfaces; the plugin above fills them", "", func(p *Probe) {
		a, _ := p.delegating()
		res := p.mustAdd(&a)
		if _, ok := res.inSandbox(a.IfName); !ok {
			p.Errorf("the result has no interface %s: %v", a.IfName, res.Interfaces)
		}
		for _, ip := range res.IPs {
			if ip.Interface == nil || *ip.Interface < 0 || *ip.Interface >= len(res.Interfaces) {
				p.Errorf("the address %s belongs to no interface", ip.Address)
			}
		}
	}},
}

// ipam is the double's control folder: it logs its calls there and reads there
// what to do.
type ipam struct {
	dir string
	p   *Probe
}

// delegating is an attachment whose plugin delegates to the IPAM double.
func (p *Probe) delegating() (Attachment, ipam) {
	conf, err := p.driver.Delegating(ipamType)
	p.require(err)
	i := ipam{dir: p.dir(), p: p}
	section, _ := conf["ipam"].(map[string]any)
	full := map[string]any{"controlDir": i.dir}
	for k, v := range section {
		full[k] = v
	}
	a := p.attachment()
	a.Conf = conf.with(Conf{"ipam": full})
	return a, i
}

// control sets one of the double's switches; empty clears it.
func (i ipam) control(name, value string) {
	if err := os.WriteFile(filepath.Join(i.dir, name), []byte(value), 0o644); err != nil {
		i.p.Fatalf("control the IPAM double: %v", err)
	}
}

// fail makes the double fail that verb from now on.
func (i ipam) fail(verb string) { i.control("fail", verb) }

// delegateCall is one execution of the double.
type delegateCall struct {
	Env   map[string]string `json:"env"`
	Stdin string            `json:"stdin"`
}

// calls returns the double's executions of one verb so far.
func (p *Probe) calls(i ipam, verb string) []delegateCall {
	f, err := os.Open(filepath.Join(i.dir, "calls"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		p.Fatalf("the IPAM double's log: %v", err)
	}
	defer f.Close()
	var out []delegateCall
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var c delegateCall
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			p.Fatalf("the IPAM double's log: %v", err)
		}
		if c.Env["CNI_COMMAND"] == verb {
			out = append(out, c)
		}
	}
	return out
}

// delegated records a failure unless the double was called with that verb.
func (p *Probe) delegated(i ipam, verb string) []delegateCall {
	calls := p.calls(i, verb)
	if len(calls) == 0 {
		p.Errorf("the delegate was not called with %s", verb)
	}
	return calls
}
