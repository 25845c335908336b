package explain_test

import (
	"context"
	"fmt"
	"io"
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

// part names one of the parts that run apart from each other: objects, policy, foreign.
const part = "MKNET_EXPLAIN_PART"

func wanted(name string) bool {
	p := os.Getenv(part)
	return p == "" || p == name
}

const (
	// giveUp is how long a packet is waited for that is not expected: long enough for
	// a busy machine, for a late answer would look like a wrong explanation.
	giveUp = 8 * time.Second
	// beginning is how long a connection may take to be begun before something is
	// broken; one that takes longer is not asked about.
	beginning = 3 * time.Second
)

// flow is one question: what is asked, and how to send a real packet.
type flow struct {
	name string
	ask  api.WayRequest
	send func() bool // whether the answer came
}

func pings(ns *netlab.Namespace, to string, more ...string) func() bool {
	args := append([]string{"-c1", "-W" + fmt.Sprint(int(giveUp.Seconds()))}, append(more, to)...)
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

// headers are those of an echo request: 20 bytes of IPv4 and 8 of ICMP.
const headers = 28

// long is an echo request that is as long as everything here lets pass, uncut.
func long(ns *netlab.Namespace, to string) func() bool {
	return pings(ns, to, "-M", "do", "-s", fmt.Sprint(node.MTUBytes-headers))
}

// Nobody sends what was not asked for: a keepalive from the other end would be a flow
// of its own where policy does not know the connection.
const quiet = -1 * time.Second

func dial(t *testing.T, ns *netlab.Namespace, to string, wait time.Duration) (c net.Conn, err error) {
	d := net.Dialer{Timeout: wait, KeepAlive: quiet}
	ns.Do(t, func() { c, err = d.Dial("tcp", to) })
	return c, err
}

func connects(t *testing.T, ns *netlab.Namespace, to string) func() bool {
	return func() bool {
		c, err := dial(t, ns, to, giveUp)
		if err == nil {
			c.Close()
		}
		return err == nil
	}
}

// inside is where an endpoint's processes are: the pod, or the child.
func (v victim) inside() *netlab.Namespace {
	if v.child != nil {
		return v.child.Namespace
	}
	return v.ns
}

// flows are the questions about one endpoint; witness is a pod that nobody hurts.
func flows(t *testing.T, v victim, witness victim) []flow {
	addr, where := v.Address.String(), v.inside()
	host, other := netlab.HostAddr, witness.Address.String()
	list := []flow{
		{"to the world", api.WayRequest{From: addr, To: netlab.InternetAddr}, pings(where, netlab.InternetAddr)},
		{"to the world, long", api.WayRequest{From: addr, To: netlab.InternetAddr, SizeBytes: node.MTUBytes}, long(where, netlab.InternetAddr)},
		{"to the world by TCP", api.WayRequest{From: addr, To: netlab.InternetAddr, Port: 80}, connects(t, where, netlab.InternetAddr+":80")},
		{"to the host", api.WayRequest{From: addr, To: host}, pings(where, host)},
		{"from the host", api.WayRequest{From: host, To: addr}, pings(nil, addr)},
		{"from the host, long", api.WayRequest{From: host, To: addr, SizeBytes: node.MTUBytes}, long(nil, addr)},
		{"from a pod", api.WayRequest{From: other, To: addr}, pings(witness.ns, addr)},
		{"from a pod, long", api.WayRequest{From: other, To: addr, SizeBytes: node.MTUBytes}, long(witness.ns, addr)},
		{"to a pod", api.WayRequest{From: addr, To: other}, pings(where, other)},
		{"to a pod, long", api.WayRequest{From: addr, To: other, SizeBytes: node.MTUBytes}, long(where, other)},
	}
	if v.child != nil {
		list = append(list, flow{"to its gateway", api.WayRequest{From: addr, To: v.Gateway.String()}, pings(where, v.Gateway.String())})
	}
	return list
}

// begun are connections that stand before anything is hurt, as far as they could be
// made; done ends them. With ends those from a pod are asked about from the other end
// too; it is the pod that sends first, though, which policy and a namespace's own
// connection tracking may mind.
func begun(t *testing.T, victims []victim, witness victim, ends bool) (list []flow, done func()) {
	var mu sync.Mutex
	var open []net.Conn
	var dialling sync.WaitGroup
	begin := func(name string, from victim, to string, asked bool) {
		conn, err := dial(t, from.inside(), to+":80", beginning)
		if err != nil {
			return
		}
		port := conn.LocalAddr().(*net.TCPAddr).Port
		addr := from.Address.String()
		send := func() bool { return echoes(conn) }
		mu.Lock()
		defer mu.Unlock()
		open = append(open, conn)
		list = append(list, flow{name, api.WayRequest{From: addr, SourcePort: port, To: to, Port: 80}, send})
		if asked {
			list = append(list, flow{name + ", from the other end", api.WayRequest{From: to, SourcePort: 80, To: addr, Port: port}, send})
		}
	}
	for _, v := range victims {
		dialling.Go(func() { begin("a connection to the world", v, netlab.InternetAddr, false) })
		dialling.Go(func() { begin("a connection from a pod", witness, v.Address.String(), ends) })
		dialling.Go(func() { begin("a connection to a pod", v, witness.Address.String(), false) })
	}
	dialling.Wait()
	return list, func() {
		for _, c := range open {
			c.Close()
		}
	}
}

// echoes reports whether a byte comes back on a connection. Several may ask the same
// connection at once: each has its byte.
func echoes(c net.Conn) bool {
	if err := c.SetDeadline(time.Now().Add(giveUp)); err != nil {
		return false
	}
	if _, err := c.Write([]byte{1}); err != nil {
		return false
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err == nil
}

// What explain says is what happens to a real packet: for every object broken by
// hand, for children and pods, for new flows and existing ones, short packets and
// long ones.
func TestExplainIsReality(t *testing.T) {
	b := newBed(t)
	netlab.Run(t, "nft", bystander)
	listen(t, b.Internet, netlab.InternetAddr)
	witness := victim{ns: netlab.New(t)}
	witness.Endpoint = b.AddPod(t, "witness", witness.ns, map[string]any{"podAccess": "allow"})
	listen(t, witness.ns, witness.Address.String())
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
	for _, v := range victims {
		listen(t, v.inside(), v.Address.String())
	}
	count := map[api.Outcome]int{}
	round := func(name string, hurt func()) {
		t.Helper()
		b.round(t, name, hurt, victims, witness, count)
	}
	round("nothing is broken", func() {})
	children, pods := mendable(breakages(t, victims[0].Endpoint)), slices.Concat(mendable(breakages(t, victims[2].Endpoint)), judged(programsBroken()), judged(entriesBroken()))
	// What is live comes first: routes and links break more than an MTU.
	slices.Reverse(children)
	slices.Reverse(pods)
	step := 8
	if os.Getenv(everything) != "" {
		step = 1
	}
	for i := 0; wanted("objects") && i < max(len(children), len(pods)); i += 2 * step {
		var names []string
		var all []func()
		add := func(v victim, from []breakage, at int) {
			if at < len(from) {
				all = append(all, func() { from[at].do(t, v) })
				names = append(names, fmt.Sprintf("%s: %s", v.ContainerID, from[at].name))
			}
		}
		add(victims[0], children, i)
		add(victims[1], children, i+step)
		add(victims[2], pods, i)
		add(victims[3], pods, i+step)
		round(strings.Join(names, ", "), func() {
			for _, hurt := range all {
				hurt()
			}
		})
		b.mend(t)
	}
	if wanted("policy") {
		b.policyRounds(t, round, victims)
	}
	foreign := shared(t)
	situations := slices.Concat(foreign, inNamespaces(t, victims))
	if wanted("foreign") {
		b.datagramRounds(t, []victim{victims[1], victims[3]}, witness, count)
		b.foreignMayDrop(t, victims[1])
	} else {
		situations = nil
	}
	for i, s := range situations {
		b.oneWay = i >= len(foreign)
		round(s.name, s.do)
		s.undo()
		b.mend(t)
	}
	round("the shims are dead", func() {
		for _, v := range victims[:2] {
			v.child.KillShim()
		}
	})
	total := 0
	for _, n := range count {
		total += n
	}
	t.Logf("%d situations, by what became of the packet: %v", total, count)
	if os.Getenv(part) == "" && (count[api.Passes] < 40 || count[api.Dropped] < 15 || count[api.Broken] < 5) {
		t.Errorf("too few situations of a kind were compared: %v", count)
	}
}

// policyRounds puts policies into force under connections that stand, and then hurts
// what the kernel has of them.
func (b *bed) policyRounds(t *testing.T, round func(string, func()), victims []victim) {
	t.Helper()
	all := slices.Concat(judged(programsBroken()), judged(entriesBroken()))
	if os.Getenv(everything) == "" {
		all = []breakage{all[0], all[len(all)-1]}
	}
	b.oneWay = true
	defer func() { b.oneWay = false }()
	for i, doc := range policies {
		round(fmt.Sprintf("policy %d", i), func() { b.policy(t, doc) })
		for _, br := range all {
			round(fmt.Sprintf("policy %d, %s", i, br.name), func() {
				for _, v := range victims {
					br.do(t, v)
				}
			})
			b.mend(t)
		}
	}
	netlab.Run(t, b.Daemon, "policy", "delete", "--config", b.Config, "attachment/odd", "networkacl/odd", "securitygroup/odd")
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

// judged leaves out those under which nobody can tell what a packet meets.
func judged(all []breakage) []breakage {
	return slices.DeleteFunc(all, func(br breakage) bool { return br.unjudged })
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

// inNamespaces are rules in the endpoints' own namespaces, as a service mesh or an
// administrator makes them.
func inNamespaces(t *testing.T, victims []victim) []situation {
	rule := func(pod, child string) situation {
		return situation{"in the namespaces: " + pod, func() {
			for _, v := range victims {
				text := pod
				if v.child != nil {
					text = child
				}
				v.ns.Run(t, "iptables", strings.Fields("-A "+text)...)
			}
		}, func() {
			for _, v := range victims {
				v.ns.Run(t, "iptables", "-F")
			}
		}}
	}
	all := []situation{
		rule("OUTPUT -p tcp --dport 80 -j DROP", "FORWARD -i eth0 -p tcp --dport 80 -j DROP"),
		rule("INPUT -p icmp --icmp-type 8 -j REJECT", "FORWARD -i mkhost0 -p icmp --icmp-type 8 -j REJECT"),
		rule("INPUT -m conntrack --ctstate ESTABLISHED -j DROP", "FORWARD -i mkhost0 -m conntrack --ctstate ESTABLISHED -j DROP"),
		rule("OUTPUT -m conntrack --ctstate NEW -j DROP", "FORWARD -i eth0 -m conntrack --ctstate NEW -j DROP"),
	}
	if os.Getenv(everything) == "" {
		return all[:1]
	}
	return all
}

// round begins connections, breaks something, and then asks explain, and the kernel,
// about every flow.
func (b *bed) round(t *testing.T, name string, hurt func(), victims []victim, witness victim, count map[api.Outcome]int) {
	t.Helper()
	all, done := begun(t, victims, witness, !b.oneWay)
	defer done()
	hurt()
	// What ARP has learnt before, and what was learnt of MTUs, must not carry a packet
	// now, or stop one.
	netlab.Run(t, "ip", "neigh", "flush", "all")
	netlab.Run(t, "ip", "route", "flush", "cache")
	for _, v := range append(append([]victim{}, victims...), witness) {
		v.ns.Run(t, "ip", "neigh", "flush", "all")
		v.ns.Run(t, "ip", "route", "flush", "cache")
		v.inside().Run(t, "ip", "route", "flush", "cache")
	}
	for _, v := range victims {
		all = append(all, flows(t, v, witness)...)
	}
	if os.Getenv(everything) == "" {
		all = b.some(all)
	}
	said := b.explain(t, name, all)
	came := make([]bool, len(all))
	t.Logf("%s: %d questions", name, len(all))
	var sending sync.WaitGroup
	for i, f := range all {
		sending.Go(func() { came[i] = f.send() })
	}
	sending.Wait()
	for i, f := range all {
		count[said[i].Verdict]++
		if (said[i].Verdict == api.Passes) != came[i] || said[i].Verdict == api.Unknown {
			t.Errorf("%s: %s, %s -> %s: explain says %s (%s), the answer came: %v", name, f.name, f.ask.From, f.ask.To, said[i].Verdict, said[i].Because, came[i])
		}
	}
}

// some takes a third of the questions, in each round another one.
func (b *bed) some(all []flow) (list []flow) {
	b.rounds++
	for i, f := range all {
		if i%3 == b.rounds%3 {
			list = append(list, f)
		}
	}
	return list
}

// explain asks about every flow.
func (b *bed) explain(t *testing.T, name string, all []flow) []api.Explanation {
	t.Helper()
	said := make([]api.Explanation, len(all))
	const lanes = 2 // mknetd serves no more surveys at once
	c := b.Client(t)
	var asking sync.WaitGroup
	for lane := range lanes {
		asking.Go(func() {
			for i := lane; i < len(all); i += lanes {
				ctx, cancel := context.WithTimeout(context.Background(), 2*node.Patience)
				x, err := c.Explain(ctx, all[i].ask)
				cancel()
				if err != nil {
					t.Errorf("%s: explain %+v: %v", name, all[i].ask, err)
				}
				said[i] = x
			}
		})
	}
	asking.Wait()
	return said
}

// listen accepts connections on port 80 and sends back what it is sent.
func listen(t *testing.T, ns *netlab.Namespace, addr string) {
	t.Helper()
	var l net.Listener
	var err error
	c := net.ListenConfig{KeepAlive: quiet}
	ns.Do(t, func() { l, err = c.Listen(context.Background(), "tcp", addr+":80") })
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, c)
			mu.Unlock()
			serving.Go(func() {
				_, _ = io.Copy(c, c) // its end is the caller's, or the test's
				c.Close()
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for _, c := range open {
			c.Close()
		}
		mu.Unlock()
		serving.Wait()
	})
}
