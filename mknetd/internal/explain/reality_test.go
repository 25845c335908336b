package explain_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"mknet/spec/api"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// everything walks all breakages, some minutes; without it a few.
const everything = "MKNET_EXPLAIN_ALL"

// giveUp is how long a packet is waited for that is not expected: long enough for
// a busy machine, for a late answer would look like a wrong explanation.
const giveUp = 3 * time.Second

// flow is one question: who sends, to whom, and how to send a real packet.
type flow struct {
	name     string
	from, to string
	port     int
	send     func() bool // whether the answer came
}

func pings(ns *netlab.Namespace, to string) func() bool {
	args := []string{"-c1", "-W" + fmt.Sprint(int(giveUp.Seconds())), to}
	return func() bool {
		var err error
		if ns == nil {
			_, err = netlab.Try("ping", args...)
		} else {
			_, err = ns.Try("ping", args...)
		}
		return err == nil
	}
}

func connects(t *testing.T, ns *netlab.Namespace, to string) func() bool {
	return func() bool {
		var err error
		ns.Do(t, func() {
			var c net.Conn
			if c, err = net.DialTimeout("tcp", to, giveUp); err == nil {
				c.Close()
			}
		})
		return err == nil
	}
}

// flows are the questions about one endpoint; witness is a pod that nobody hurts.
func flows(t *testing.T, v victim, witness victim) []flow {
	addr, where := v.Address.String(), v.ns
	if v.child != nil {
		where = v.child.Namespace
	}
	host := netlab.HostAddr
	list := []flow{
		{"to the world", addr, netlab.InternetAddr, 0, pings(where, netlab.InternetAddr)},
		{"to the world by TCP", addr, netlab.InternetAddr, 80, connects(t, where, netlab.InternetAddr+":80")},
		{"to the host", addr, host, 0, pings(where, host)},
		{"from the host", host, addr, 0, pings(nil, addr)},
		{"from a pod", witness.Address.String(), addr, 0, pings(witness.ns, addr)},
		{"to a pod", addr, witness.Address.String(), 0, pings(where, witness.Address.String())},
	}
	if v.child != nil {
		list = append(list, flow{"to its gateway", addr, v.Gateway.String(), 0, pings(where, v.Gateway.String())})
	}
	return list
}

// What explain says is what happens to a real packet: for every object broken by
// hand, for children and pods, for seven flows each.
func TestExplainIsReality(t *testing.T) {
	b := newBed(t)
	listen(t, b.Node)
	witness := victim{ns: netlab.New(t)}
	witness.Endpoint = b.AddPod(t, "witness", witness.ns, map[string]any{"podAccess": "allow"})
	var victims []victim
	for i := range 2 {
		v := victim{ns: netlab.New(t)}
		v.Endpoint = b.AddCall(t, node.Call{ContainerID: fmt.Sprintf("child%d", i), Netns: v.ns.Path(), IfName: "eth0", Config: map[string]any{"podAccess": []string{"deny", "allow"}[i]}})
		v.child = b.Boot(t, v.Endpoint, "g1")
		victims = append(victims, v)
	}
	for i := range 2 {
		v := victim{ns: netlab.New(t)}
		v.Endpoint = b.AddPod(t, fmt.Sprintf("pod%d", i), v.ns, map[string]any{"hostAccess": []string{"deny", "allow"}[i]})
		victims = append(victims, v)
	}
	count := map[api.Outcome]int{}
	round := func(name string) {
		t.Helper()
		b.compare(t, name, victims, witness, count)
	}
	round("nothing is broken")
	children, pods := breakages(t, victims[0].Endpoint), breakages(t, victims[2].Endpoint)
	children, pods = mendable(children), mendable(pods)
	// What is live comes first: routes and links break more than an MTU.
	slices.Reverse(children)
	slices.Reverse(pods)
	step := 8
	if os.Getenv(everything) != "" {
		step = 1
	}
	for i := 0; i < max(len(children), len(pods)); i += 2 * step {
		var names []string
		hurt := func(v victim, from []breakage, at int) {
			if at < len(from) {
				from[at].do(t, v)
				names = append(names, fmt.Sprintf("%s: %s", v.ContainerID, from[at].name))
			}
		}
		hurt(victims[0], children, i)
		hurt(victims[1], children, i+step)
		hurt(victims[2], pods, i)
		hurt(victims[3], pods, i+step)
		round(strings.Join(names, ", "))
		b.mend(t)
	}
	for i, doc := range policies {
		b.policy(t, doc)
		round(fmt.Sprintf("policy %d", i))
	}
	netlab.Run(t, b.Daemon, "policy", "delete", "--config", b.Config, "attachment/odd", "networkacl/odd", "securitygroup/odd")
	for _, s := range shared(t) {
		s.do()
		round(s.name)
		s.undo()
		b.mend(t)
	}
	for _, v := range victims[:2] {
		v.child.KillShim()
	}
	round("the shims are dead")
	t.Logf("situations, by what became of the packet: %v", count)
	if count[api.Passes] < 40 || count[api.Dropped] < 15 || count[api.Broken] < 5 {
		t.Errorf("too few situations of a kind were compared: %v", count)
	}
}

// policies are put into force one after the other, each in place of the one before.
var policies = []string{
	`
{apiVersion: mknet/v1, kind: NetworkACL, metadata: {name: odd}, spec: {egress: [{priority: 10, action: deny, protocol: tcp, ports: [{port: 80}]}, {priority: 20, action: allow}]}}
---
{apiVersion: mknet/v1, kind: SecurityGroup, metadata: {name: odd}, spec: {ingress: [{from: [{cidr: 198.51.100.0/24}], protocol: icmp}]}}
---
{apiVersion: mknet/v1, kind: Attachment, metadata: {name: odd}, spec: {networkACLRef: {name: odd}, pools: [children, pods], securityGroupRefs: [{name: odd}], endpoints: [{name: pod1}, {name: child1}]}}
`, `
{apiVersion: mknet/v1, kind: NetworkACL, metadata: {name: odd}, spec: {ingress: [{priority: 10, action: deny, cidr: 10.90.0.0/24}, {priority: 20, action: allow}]}}
---
{apiVersion: mknet/v1, kind: SecurityGroup, metadata: {name: odd}, spec: {egressDefault: deny, ingress: [{}], egress: [{protocol: tcp, ports: [{port: 80}]}]}}
---
{apiVersion: mknet/v1, kind: Attachment, metadata: {name: odd}, spec: {networkACLRef: {name: odd}, pools: [pods], securityGroupRefs: [{name: odd}], endpoints: [{name: pod0}, {name: child0}]}}
`,
}

func (b *bed) policy(t *testing.T, doc string) {
	t.Helper()
	path := b.Dir + "/policy.yaml"
	if err := os.WriteFile(path, []byte(doc), 0o600); err != nil {
		t.Fatal(err)
	}
	netlab.Run(t, b.Daemon, "policy", "apply", "--config", b.Config, "-f", path)
}

// mendable leaves out what mknetd does not make again under a running pump.
func mendable(all []breakage) (out []breakage) {
	for _, br := range all {
		if br.kind != "veth" && br.kind != "peer" && br.kind != "tun" && br.kind != "pod" {
			out = append(out, br)
		}
	}
	return out
}

// situation is a breakage of what all endpoints share.
type situation struct {
	name     string
	do, undo func()
}

func shared(t *testing.T) []situation {
	run := func(args ...string) func() { return func() { netlab.Run(t, args[0], args[1:]...) } }
	up := netlab.UplinkName
	all := []situation{
		{"a foreign REJECT first in FORWARD", run("iptables", "-I", "FORWARD", "1", "-j", "REJECT"), run("iptables", "-D", "FORWARD", "-j", "REJECT")},
		{"a foreign ACCEPT first in FORWARD", run("iptables", "-I", "FORWARD", "1", "-j", "ACCEPT"), run("iptables", "-D", "FORWARD", "-j", "ACCEPT")},
		{"a foreign table drops what is forwarded", func() {
			netlab.Run(t, "nft", "add table inet other; add chain inet other f { type filter hook forward priority 9; policy drop; }")
		}, run("nft", "delete", "table", "inet", "other")},
		{"the egress does not forward", run("sysctl", "-qw", "net.ipv4.conf."+up+".forwarding=0"), run("sysctl", "-qw", "net.ipv4.conf."+up+".forwarding=1")},
		{"a port is closed by a rule", run("iptables", "-I", "FORWARD", "1", "-p", "tcp", "--dport", "80", "-j", "DROP"), run("iptables", "-D", "FORWARD", "-p", "tcp", "--dport", "80", "-j", "DROP")},
	}
	if os.Getenv(everything) == "" {
		return all[2:3]
	}
	return all
}

// mend has a starting mknetd put everything right.
func (b *bed) mend(t *testing.T) {
	t.Helper()
	b.Stop(t)
	b.Start(t)
	b.CheckInventory(t)
}

// compare asks explain, and then the kernel, about every flow.
func (b *bed) compare(t *testing.T, name string, victims []victim, witness victim, count map[api.Outcome]int) {
	t.Helper()
	// What ARP has learnt before must not carry a packet now.
	netlab.Run(t, "ip", "neigh", "flush", "all")
	var all []flow
	for _, v := range append(append([]victim{}, victims...), witness) {
		v.ns.Run(t, "ip", "neigh", "flush", "all")
	}
	for _, v := range victims {
		all = append(all, flows(t, v, witness)...)
	}
	said := make([]api.Explanation, len(all))
	for i, f := range all {
		ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
		x, err := b.Client(t).Explain(ctx, api.WayRequest{From: f.from, To: f.to, Port: f.port})
		cancel()
		if err != nil {
			t.Fatalf("%s: explain %s -> %s: %v", name, f.from, f.to, err)
		}
		said[i] = x
	}
	came := make([]bool, len(all))
	var sending sync.WaitGroup
	for i, f := range all {
		sending.Go(func() { came[i] = f.send() })
	}
	sending.Wait()
	for i, f := range all {
		count[said[i].Verdict]++
		if (said[i].Verdict == api.Passes) != came[i] || said[i].Verdict == api.Unknown {
			t.Errorf("%s: %s, %s -> %s: explain says %s (%s), the answer came: %v", name, f.name, f.from, f.to, said[i].Verdict, said[i].Because, came[i])
		}
	}
}

// listen has the internet accept connections on port 80.
func listen(t *testing.T, n *node.Node) {
	t.Helper()
	var l net.Listener
	var err error
	n.Internet.Do(t, func() { l, err = net.Listen("tcp", netlab.InternetAddr+":80") })
	if err != nil {
		t.Fatal(err)
	}
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	})
	t.Cleanup(func() { l.Close(); accepting.Wait() })
}
