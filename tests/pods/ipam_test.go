package pods

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// delegated is a network of ordinary pods whose addresses a reference IPAM plugin
// gives.
type delegated struct {
	t      *testing.T
	n      *node.Node
	path   string // CNI_PATH
	leases string // host-local's folder of this network
	conf   map[string]any
	prev   map[string]json.RawMessage // results, by container
}

func newDelegated(t *testing.T, plugin string, ipam map[string]any) *delegated {
	t.Helper()
	bin := node.Reference(t, "ipam/"+plugin)
	d := &delegated{t: t, n: node.New(t), path: filepath.Dir(bin), prev: map[string]json.RawMessage{}}
	d.leases = filepath.Join(d.n.Dir, "ipam", node.Network)
	ipam["type"] = plugin
	if plugin == "host-local" {
		ipam["dataDir"] = filepath.Dir(d.leases)
	}
	d.conf = map[string]any{"mode": "veth", "ipam": ipam}
	return d
}

// call executes a verb on the network, with prevResult where there is one.
func (d *delegated) call(verb, id, netns string, more ...map[string]any) ([]byte, error) {
	d.t.Helper()
	conf := map[string]any{}
	for _, c := range append([]map[string]any{d.conf}, more...) {
		for k, v := range c {
			conf[k] = v
		}
	}
	if prev := d.prev[id]; prev != nil && verb != "ADD" {
		conf["prevResult"] = prev
	}
	return d.n.CNI(d.t, node.Call{Verb: verb, ContainerID: id, Netns: netns, IfName: "eth0", Config: conf, Env: []string{"CNI_PATH=/nonexistent:" + d.path}})
}

// add is an ADD that must succeed; it returns the record.
func (d *delegated) add(id string, ns *netlab.Namespace) endpoint.Endpoint {
	d.t.Helper()
	out, err := d.call("ADD", id, ns.Path())
	if err != nil {
		d.t.Fatalf("ADD %s: %v", id, err)
	}
	d.prev[id] = out
	for _, ep := range d.n.List(d.t) {
		if ep.ContainerID == id {
			return ep
		}
	}
	d.t.Fatalf("no record of %s", id)
	return endpoint.Endpoint{}
}

// addresses are the addresses that host-local has given out.
func (d *delegated) addresses() []string {
	d.t.Helper()
	entries, err := os.ReadDir(d.leases)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.t.Fatal(err)
	}
	var list []string
	for _, e := range entries {
		if name := e.Name(); name[0] >= '0' && name[0] <= '9' { // beside them: the lock, the last address
			list = append(list, name)
		}
	}
	return list
}

func (d *delegated) wantAddresses(when string, want ...string) {
	d.t.Helper()
	if got := d.addresses(); !slices.Equal(got, want) {
		d.t.Errorf("%s: host-local has given out %v, want %v", when, got, want)
	}
}

// host-local behind the veth mode: every verb, and whatever fails no address stays
// given out (D22).
func TestHostLocalGivesPodsAddresses(t *testing.T) {
	d := newDelegated(t, "host-local", map[string]any{"subnet": "10.45.0.0/29", "routes": []any{map[string]any{"dst": "0.0.0.0/0"}}})
	if _, err := d.call("STATUS", "", ""); err != nil {
		t.Errorf("STATUS: %v", err)
	}
	one, two := netlab.New(t), netlab.New(t)
	a, b := d.add("c1", one), d.add("c2", two)
	if a.IPAM != "host-local" || a.Pool != "" || a.Address.String() != "10.45.0.2" || a.Subnet.String() != "10.45.0.0/29" || a.Gateway.String() != "10.45.0.1" {
		t.Errorf("record %+v", a)
	}
	d.wantAddresses("after two ADDs", "10.45.0.2", "10.45.0.3")
	if rules := node.Rules(t, "10.45.0.0/29"); len(rules) == 0 {
		t.Error("no rule translates the subnet")
	}
	netlab.MustPing(t, one, b.Address.String())
	netlab.MustPing(t, two, a.Address.String())
	netlab.MustPing(t, one, netlab.InternetAddr)
	for id, ns := range map[string]*netlab.Namespace{"c1": one, "c2": two} {
		if _, err := d.call("CHECK", id, ns.Path()); err != nil {
			t.Errorf("CHECK: %v", err)
		}
	}
	d.n.CheckInventory(t)

	// The live address of an attachment that is added twice stays its own.
	_, err := d.call("ADD", "c1", one.Path())
	node.WantCode(t, err, 100, "already has the endpoint")
	// An interface that is there: mknetd refuses after host-local gave an address.
	_, err = d.call("ADD", "c3", one.Path())
	node.WantCode(t, err, 100, "interface already exists")
	d.wantAddresses("after ADDs that were refused", "10.45.0.2", "10.45.0.3")
	// Asked for by name, in use and free.
	_, err = d.call("ADD", "c3", netlab.New(t).Path(), map[string]any{"runtimeConfig": map[string]any{"ips": []string{"10.45.0.2/29"}}})
	node.WantCode(t, err, 109, "10.45.0.2")
	// The lease is lost behind our back.
	if err := os.Remove(filepath.Join(d.leases, "10.45.0.3")); err != nil {
		t.Fatal(err)
	}
	_, err = d.call("CHECK", "c2", two.Path())
	node.WantCode(t, err, 106, "ipam host-local: CHECK")

	// The subnet is full: three more addresses, and then none.
	for i := range 4 { // one of them is c2's, which host-local forgot: mknetd did not
		_, err = d.call("ADD", fmt.Sprintf("f%d", i), netlab.New(t).Path())
		if err != nil {
			break
		}
	}
	if err == nil {
		t.Error("more pods than addresses")
	}
	if got, want := len(d.addresses()), len(d.n.List(t))-1; got != want {
		t.Errorf("%d addresses are given out and %d records need one of host-local's", got, want)
	}

	// DEL with the daemon down releases at once and is queued.
	d.n.Kill(t)
	if _, err := d.call("DEL", "c1", one.Path()); err != nil {
		t.Errorf("DEL while the daemon is down: %v", err)
	}
	if slices.Contains(d.addresses(), "10.45.0.2") {
		t.Error("the address of a queued DEL is still given out")
	}
	_, err = d.call("ADD", "c9", netlab.New(t).Path())
	node.WantCode(t, err, 11, d.n.Socket)
	d.n.Start(t)
	podGone(t, a)
	two.Remove(t)
	if _, err := d.call("DEL", "c2", two.Path()); err != nil {
		t.Errorf("DEL without the namespace: %v", err)
	}
	podGone(t, b)
	if _, err := d.call("GC", "", "", map[string]any{"cni.dev/valid-attachments": []any{}}); err != nil {
		t.Errorf("GC: %v", err)
	}
	d.wantAddresses("after GC of all")
	if rules := node.Rules(t, "10.45.0.0/29"); len(rules) != 0 {
		t.Errorf("rules of a subnet without pods: %v", rules)
	}
	if left := d.n.List(t); len(left) != 0 {
		t.Errorf("%d records are left", len(left))
	}
	d.n.CheckInventory(t)
}

// A subnet's translation goes with its last pod, also where that one has none.
func TestSubnetRulesGoWithTheLastPod(t *testing.T) {
	d := newDelegated(t, "host-local", map[string]any{"subnet": "10.45.0.0/29"})
	one, two := netlab.New(t), netlab.New(t)
	d.add("c1", one)
	d.conf["ipMasq"] = false
	d.add("c2", two)
	for _, step := range []struct {
		id    string
		ns    *netlab.Namespace
		rules bool // are left after its DEL
	}{{"c1", one, true}, {"c2", two, false}} {
		if _, err := d.call("DEL", step.id, step.ns.Path()); err != nil {
			t.Fatal(err)
		}
		if rules := node.Rules(t, "10.45.0.0/29"); len(rules) > 0 != step.rules {
			t.Errorf("after the DEL of %s: %v", step.id, rules)
		}
	}
	d.n.CheckInventory(t)
}

// static: one address, routes and dns of the configuration; a second pod with the
// same address is refused and leaves nothing.
func TestStaticAddress(t *testing.T) {
	d := newDelegated(t, "static", map[string]any{
		"addresses": []any{map[string]any{"address": "10.46.0.5/24", "gateway": "10.46.0.1"}},
		"routes":    []any{map[string]any{"dst": "10.47.0.0/16"}, map[string]any{"dst": "0.0.0.0/0"}},
		"dns":       map[string]any{"nameservers": []string{"10.46.0.53"}},
	})
	one := netlab.New(t)
	ep := d.add("c1", one)
	if got := fmt.Sprint(ep.IPAM, " ", ep.Address, " ", ep.Gateway, " ", ep.PodRoutes(), " ", ep.DNS.Nameservers); got != "static 10.46.0.5 10.46.0.1 [0.0.0.0/0 10.47.0.0/16] [10.46.0.53]" {
		t.Errorf("record %s", got)
	}
	if out := one.Run(t, "ip", "route", "get", "10.47.1.2"); !strings.Contains(out, "via 10.46.0.1 dev eth0") {
		t.Errorf("route to 10.47.0.0/16: %s", out)
	}
	netlab.MustPing(t, one, netlab.InternetAddr)
	if _, err := d.call("CHECK", "c1", one.Path()); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	_, err := d.call("ADD", "c2", netlab.New(t).Path())
	node.WantCode(t, err, 100, "address 10.46.0.5")
	if left := d.n.List(t); len(left) != 1 {
		t.Errorf("%d records, want that of c1 alone", len(left))
	}
	if _, err := d.call("DEL", "c1", one.Path()); err != nil {
		t.Error(err)
	}
	podGone(t, ep)
	// An address of the host's own network is refused by name.
	d.conf["ipam"] = map[string]any{"type": "static", "addresses": []any{map[string]any{"address": netlab.HostAddr + "/24"}}}
	_, err = d.call("ADD", "c3", netlab.New(t).Path())
	node.WantCode(t, err, 103, "198.51.100.0/24")
}
