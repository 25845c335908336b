package suite

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"mknet/tests/netlab"
)

// settle is how long kernel objects are given to go after the call that removes
// them returned; the kernel destroys a namespace's links in the background. A
// Driver may ask for longer.
const settle = 5 * time.Second

// Probe is one item's run in one version: it makes namespaces, calls the plugin
// and compares the host, and it cleans up at the end.
type Probe struct {
	Version string
	Network string // unique to this run, so that checks do not see each other

	driver        Driver
	check         Check
	before        netlab.Snapshot
	dirs          []string // CNI_PATH
	scratch       string
	namespaces    []string
	added         []Attachment
	undo          []func() error  // before the attachments are deleted
	last          []func() error  // after they are
	leaked        map[string]bool // reported once, not waited for again
	failures      []string
	notApplicable string
}

// Attachment is what a runtime knows of one ADD.
type Attachment struct {
	ID, IfName, Netns string
	Conf              Conf
	Prev              map[string]any // the last result, for CHECK and DEL
}

func newProbe(d Driver, c Check, version string) *Probe {
	p := &Probe{
		Version: version,
		Network: fmt.Sprintf("conf%02d-%s", c.Item, version),
		driver:  d,
		check:   c,
		before:  netlab.Take(),
		dirs:    pluginDirs(d),
		leaked:  map[string]bool{},
	}
	return p
}

// cleanUp takes back everything the check did. What then still differs from the
// host before is not this item's failure (items 11, 13, 14 and 35 look for it),
// but must not reach the next one.
func (p *Probe) cleanUp() {
	for i := len(p.undo) - 1; i >= 0; i-- {
		if err := p.undo[i](); err != nil {
			p.Errorf("undo: %v", err)
		}
	}
	done := make(chan struct{})
	go func() { // calls may end the goroutine
		defer close(done)
		failed := len(p.failures)
		for _, a := range p.added {
			p.call("DEL", a).Do()
		}
		p.failures = p.failures[:failed]
	}()
	<-done
	for _, ns := range p.namespaces {
		p.removeNamespace(ns)
	}
	for _, f := range p.last {
		if err := f(); err != nil {
			p.Errorf("undo: %v", err)
		}
	}
	if p.scratch != "" {
		_ = os.RemoveAll(p.scratch)
	}
	if len(p.leftovers(settle)) > 0 || len(p.leaked) > 0 {
		if err := scrub(p.before); err != nil {
			p.Errorf("scrub the host: %v", err)
		}
		if err := p.driver.Reset(); err != nil {
			p.Errorf("reset %s: %v", p.driver.Name(), err)
		}
	}
}

// later registers an undo that runs before the attachments are deleted.
func (p *Probe) later(f func() error) { p.undo = append(p.undo, f) }

// finally registers an undo that runs after the attachments are deleted.
func (p *Probe) finally(f func() error) { p.last = append(p.last, f) }

// netns makes a network namespace and returns its path.
func (p *Probe) netns() string {
	name := fmt.Sprintf("%s-%d", p.Network, len(p.namespaces)+1)
	if err := netlab.MakeNamespace(name); err != nil {
		p.Fatalf("%v", err)
	}
	path := "/run/netns/" + name
	p.namespaces = append(p.namespaces, path)
	return path
}

// removeNamespace deletes a namespace made by netns; absent is fine.
func (p *Probe) removeNamespace(path string) {
	if err := netlab.RemoveNamespace(strings.TrimPrefix(path, "/run/netns/")); err != nil {
		p.Errorf("%v", err)
	}
}

// attachment is a fresh attachment in a namespace of its own, not yet added.
func (p *Probe) attachment() Attachment {
	ns := p.netns()
	return Attachment{ID: strings.ReplaceAll(ns[len("/run/netns/"):], ".", "_"), IfName: "eth0", Netns: ns, Conf: p.driver.Conf()}
}

// call prepares one execution for the attachment.
func (p *Probe) call(verb string, a Attachment) *Call {
	conf := Conf{}.with(a.Conf).with(Conf{"cniVersion": p.Version, "name": p.Network})
	if a.Prev != nil && (verb == "CHECK" || verb == "DEL") {
		conf["prevResult"] = a.Prev
	}
	return &Call{p: p, Conf: conf, Env: map[string]string{
		"CNI_COMMAND": verb, "CNI_CONTAINERID": a.ID, "CNI_NETNS": a.Netns, "CNI_IFNAME": a.IfName,
		"CNI_PATH": strings.Join(p.dirs, ":"), "CNI_ARGS": "",
	}}
}

// network prepares a call that concerns no container: STATUS and GC.
func (p *Probe) network(verb string, conf Conf) *Call {
	return &Call{p: p, Conf: Conf{}.with(conf).with(Conf{"cniVersion": p.Version, "name": p.Network}), Env: map[string]string{
		"CNI_COMMAND": verb, "CNI_PATH": strings.Join(p.dirs, ":"),
	}}
}

// add does ADD and remembers to undo it.
func (p *Probe) add(a *Attachment) Reply {
	p.added = append(p.added, *a)
	return p.call("ADD", *a).Do()
}

// mustAdd does ADD, or ends the check; the attachment then carries the result.
func (p *Probe) mustAdd(a *Attachment) Result {
	res := p.result(p.add(a))
	a.Prev = res.Raw
	p.added[len(p.added)-1] = *a
	return res
}

// fresh makes an attachment and adds it.
func (p *Probe) fresh() (Attachment, Result) {
	a := p.attachment()
	res := p.mustAdd(&a)
	return a, res
}

// checkOK reports whether CHECK of the attachment succeeds. Versions without
// CHECK ask for the interface instead.
func (p *Probe) alive(about string, a Attachment) {
	if p.Version == "0.3.1" {
		if !p.hasLink(a.Netns, a.IfName) {
			p.Errorf("%s: %s is gone from its namespace", about, a.IfName)
		}
		return
	}
	p.succeeds(about, p.call("CHECK", a).Do())
}

// host runs a command on the private host, or ends the check.
func (p *Probe) host(name string, args ...string) string {
	out, err := netlab.Try(name, args...)
	if err != nil {
		p.Fatalf("host: %v", err)
	}
	return out
}

// in runs a command in a namespace, or ends the check.
func (p *Probe) in(path, name string, args ...string) string {
	out, err := netlab.TryIn(path, name, args...)
	if err != nil {
		p.Fatalf("%v", err)
	}
	return out
}

// hasLink reports whether the namespace has a link of that name.
func (p *Probe) hasLink(path, name string) bool {
	names, err := netlab.LinksIn(path)
	return err == nil && slices.Contains(names, name)
}

// leftovers lists what the host holds now and did not before the check, other
// than the check's own namespaces, after giving the kernel up to limit.
func (p *Probe) leftovers(limit time.Duration) []string {
	return p.newSince(p.before, limit)
}

// newSince lists what the host holds beyond a snapshot.
func (p *Probe) newSince(s netlab.Snapshot, limit time.Duration) []string {
	if d, ok := p.driver.(settling); ok {
		limit = max(limit, d.Settle())
	}
	deadline := time.Now().Add(limit)
	for {
		var left []string
		for _, line := range s.Left() {
			if !p.own(line) && !p.leaked[line] && !known(s, line) {
				left = append(left, line)
			}
		}
		if len(left) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			for _, line := range left {
				p.leaked[line] = true
			}
			return left
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// known reports whether the snapshot has the line but for the carrier of a bridge,
// which comes and goes with its ports.
func known(s netlab.Snapshot, line string) bool {
	const mark = " linkdown"
	bare, down := strings.CutSuffix(line, mark)
	return s[bare] || !down && s[line+mark]
}

// own reports whether a line of a snapshot is of the check's own making: its
// namespaces and this process's descriptors.
func (p *Probe) own(line string) bool {
	if strings.HasPrefix(line, "descriptor: ") {
		return true
	}
	for _, ns := range p.namespaces {
		if name := strings.TrimPrefix(ns, "/run/netns/"); strings.HasPrefix(line, "netns: "+name) || line == "file: "+ns {
			return true
		}
	}
	return false
}

// clean records a failure for each thing that is left over.
func (p *Probe) clean(about string) {
	for _, line := range p.leftovers(settle) {
		p.Errorf("%s: left behind: %s", about, line)
	}
}

// unchanged records a failure where the namespace is not what it was.
func (p *Probe) unchanged(about, path, links string) {
	if now := p.links(path); now != links {
		p.Errorf("%s: the namespace changed: before %q, after %q", about, links, now)
	}
}

// links lists the names of the links in a namespace, sorted by index.
func (p *Probe) links(path string) string {
	names, err := netlab.LinksIn(path)
	if err != nil {
		p.Fatalf("%v", err)
	}
	return strings.Join(names, " ")
}

// dir is a folder of the check's own.
func (p *Probe) dir() string {
	if p.scratch == "" {
		dir, err := os.MkdirTemp("", "conformance-")
		if err != nil {
			p.Fatalf("make a scratch folder: %v", err)
		}
		p.scratch = dir
	}
	return p.scratch
}

// copyOf is a deep copy of a result, to be changed.
func copyOf(m map[string]any) map[string]any {
	raw, err := json.Marshal(m)
	if err != nil {
		panic(err) // it came from JSON
	}
	var out map[string]any
	if err := json.Unmarshal(raw, &out); err != nil {
		panic(err)
	}
	return out
}
