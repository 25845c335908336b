package explain_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
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

// talker is a UDP socket of one address that answers what it is asked, and asks.
type talker struct {
	conn *net.UDPConn
	at   netip.AddrPort

	mu      sync.Mutex
	asked   int
	waiting map[string]chan struct{} // by the question
	done    chan struct{}
}

// A datagram is a question or an answer, and then what was asked.
const question, answer = '?', '!'

// talk opens a socket; close ends it.
func talk(t *testing.T, ns *netlab.Namespace, address string) *talker {
	t.Helper()
	k := &talker{waiting: map[string]chan struct{}{}, done: make(chan struct{})}
	var err error
	ns.Do(t, func() { k.conn, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(address)}) })
	if err != nil {
		t.Fatal(err)
	}
	k.at = k.conn.LocalAddr().(*net.UDPAddr).AddrPort()
	go k.serve()
	return k
}

func (k *talker) close() {
	k.conn.Close()
	<-k.done
}

func (k *talker) serve() {
	defer close(k.done)
	b := make([]byte, 100)
	for {
		n, from, err := k.conn.ReadFromUDPAddrPort(b)
		switch {
		case err != nil:
			return
		case n > 0 && b[0] == question:
			b[0] = answer
			_, _ = k.conn.WriteToUDPAddrPort(b[:n], from) // a rule may refuse it, and then none comes
		case n > 0:
			k.mu.Lock()
			if c := k.waiting[string(b[1:n])]; c != nil {
				close(c)
				delete(k.waiting, string(b[1:n]))
			}
			k.mu.Unlock()
		}
	}
}

// asks reports whether an answer to one datagram came in time.
func (k *talker) asks(to netip.AddrPort, wait time.Duration) bool {
	came := make(chan struct{})
	k.mu.Lock()
	k.asked++
	text := fmt.Sprintf("%s %d", k.at, k.asked)
	k.waiting[text] = came
	k.mu.Unlock()
	if _, err := k.conn.WriteToUDPAddrPort(append([]byte{question}, text...), to); err != nil {
		return false // a rule refused it at once
	}
	select {
	case <-came:
		return true
	case <-time.After(wait):
		return false
	}
}

// Policy forgets an echo after 30 s and a UDP flow after 60 s (spec/policy-datapath.md),
// the kernel, which is told to, later. One that might end between question and packet is
// not asked about.
var forgets = map[string]time.Duration{"": 30 * time.Second, "udp": 60 * time.Second} // by protocol as it is asked for

const margin = 3 * time.Second

// lives reports whether the flow is not near its end.
func (f *standing) lives() bool {
	return f.begin == nil || time.Since(f.begun) < forgets[f.ask.Protocol]-margin
}

// firstWait is how long the answer to a flow's first packet may take before something
// is changed; of some flows none is expected.
const firstWait = 2 * time.Second

// standing is a flow without a connection.
type standing struct {
	flow
	begin func() // sends its first packet; nil: it does not exist yet
	begun time.Time
}

// datagramFlows are flows of UDP and ICMP about one victim. talkers wait at both ends;
// client opens another one for a single flow.
func datagramFlows(v, witness victim, talkers map[string]*talker, client func(victim) *talker, id func() int) (list []*standing) {
	add := func(name string, ask api.WayRequest, begin func(), send func() bool) {
		list = append(list, &standing{flow: flow{name, ask, send}, begin: begin})
	}
	echo := func(name string, from victim, to string, exists bool) {
		n := id()
		send := pings(from.inside(), to, "-e", fmt.Sprint(n))
		var begin func()
		if exists {
			short := pings(from.inside(), to, "-e", fmt.Sprint(n), "-W"+fmt.Sprint(firstWait.Seconds()))
			begin = func() { short() }
		}
		add(name, api.WayRequest{From: from.Address.String(), SourcePort: n, To: to}, begin, send)
	}
	udp := func(name string, from victim, to *talker, otherEnd bool) {
		k := client(from)
		ask := func(a, b *talker) api.WayRequest {
			return api.WayRequest{From: a.at.String(), To: b.at.String(), Protocol: "udp"} // the ports are in the texts
		}
		begin := func() { k.asks(to.at, firstWait) } // whether it passes is policy's
		if otherEnd {
			add(name+", from the other end", ask(to, k), begin, func() bool { return to.asks(k.at, giveUp) })
			return
		}
		add(name, ask(k, to), begin, func() bool { return k.asks(to.at, giveUp) })
	}
	here := talkers[v.Address.String()]
	echo("an echo from a pod", witness, v.Address.String(), true)
	echo("an echo to the world", v, netlab.InternetAddr, true)
	echo("a new echo from a pod", witness, v.Address.String(), false)
	udp("UDP from a pod", witness, here, false)
	udp("UDP from a pod", witness, here, true)
	udp("UDP to a pod", v, talkers[witness.Address.String()], false)
	udp("UDP to the world", v, talkers[netlab.InternetAddr], false)
	return list
}

// onlyIn lets one protocol into a child and a pod, and everything out of them.
func onlyIn(protocol string) string {
	return `
{apiVersion: mknet/v1, kind: NetworkACL, metadata: {name: odd}, spec: {egress: [{priority: 20, action: allow}]}}
---
{apiVersion: mknet/v1, kind: SecurityGroup, metadata: {name: odd}, spec: {ingress: [{protocol: ` + protocol + `}]}}
---
{apiVersion: mknet/v1, kind: Attachment, metadata: {name: odd}, spec: {networkACLRef: {name: odd}, pools: [children, pods], securityGroupRefs: [{name: odd}], endpoints: [{name: pod1}, {name: child1}]}}
`
}

// datagramRounds begin flows of UDP and ICMP, change what is in force, and ask explain
// and the kernel about each flow's next packet.
func (b *bed) datagramRounds(t *testing.T, victims []victim, witness victim, count map[api.Outcome]int) {
	t.Helper()
	talkers := map[string]*talker{netlab.InternetAddr: talk(t, b.Internet, netlab.InternetAddr)}
	for _, v := range append(slices.Clone(victims), witness) {
		talkers[v.Address.String()] = talk(t, v.inside(), v.Address.String())
	}
	defer func() {
		for _, k := range talkers {
			k.close()
		}
	}()
	for _, of := range []string{"icmp_timeout", "udp_timeout", "udp_timeout_stream"} {
		netlab.Run(t, "sysctl", "-qw", "net.netfilter.nf_conntrack_"+of+"=600")
	}
	ids, compared := 4000, 0
	newRule := strings.Fields("FORWARD -m conntrack --ctstate NEW -j DROP")
	for i, story := range []situation{
		{"flows of no connection, new ones are dropped in FORWARD", func() {
			netlab.Run(t, "iptables", append([]string{"-I"}, newRule...)...)
		}, func() { netlab.Run(t, "iptables", append([]string{"-D"}, newRule...)...) }},
		{"flows of no connection, UDP alone comes in by policy", func() { b.policy(t, onlyIn("udp")) }, func() {}},
		{"flows of no connection, the rule for UDP goes", func() { b.policy(t, onlyIn("icmp")) }, func() {}},
		{"flows of no connection, the rule for UDP comes back", func() { b.policy(t, onlyIn("udp")) }, func() {}},
	} {
		var all []*standing
		var clients []*talker
		for j, v := range victims {
			flows := datagramFlows(v, witness, talkers, func(of victim) *talker {
				k := talk(t, of.inside(), of.Address.String())
				clients = append(clients, k)
				return k
			}, func() int { ids++; return ids })
			for n, f := range flows {
				if os.Getenv(everything) != "" || (i+j+n)%2 == 0 {
					all = append(all, f)
				}
			}
		}
		// What a machine forgets first is asked about first.
		slices.SortStableFunc(all, func(x, y *standing) int { return strings.Compare(x.ask.Protocol, y.ask.Protocol) })
		compared += b.datagramRound(t, story, all, count)
		for _, k := range clients {
			k.close()
		}
	}
	if compared == 0 {
		t.Error("of no flow the question was answered in time")
	}
	netlab.Run(t, b.Daemon, "policy", "delete", "--config", b.Config, "attachment/odd", "networkacl/odd", "securitygroup/odd")
}

// datagramRound is one of them; it returns how many flows could be asked about.
func (b *bed) datagramRound(t *testing.T, story situation, all []*standing, count map[api.Outcome]int) (compared int) {
	t.Helper()
	var beginning sync.WaitGroup
	for _, f := range all {
		f.begun = time.Now()
		if f.begin != nil {
			beginning.Go(f.begin)
		}
	}
	beginning.Wait()
	story.do()
	said := make([]api.Explanation, len(all))
	came := make([]bool, len(all))
	var asking, sending sync.WaitGroup
	c := b.Client(t)
	const lanes = 2 // mknetd serves no more surveys at once
	for lane := range lanes {
		asking.Go(func() {
			for i := lane; i < len(all); i += lanes {
				if !all[i].lives() {
					continue
				}
				ctx, cancel := context.WithTimeout(context.Background(), 2*node.Patience)
				x, err := c.Explain(ctx, all[i].ask)
				cancel()
				if err != nil {
					t.Errorf("%s: explain %+v: %v", story.name, all[i].ask, err)
				}
				if !all[i].lives() {
					continue // the answer took too long
				}
				said[i] = x
				sending.Go(func() { came[i] = all[i].send() })
			}
		})
	}
	asking.Wait()
	sending.Wait()
	story.undo()
	for i, f := range all {
		x := said[i]
		if x.Verdict == "" {
			continue
		}
		compared++
		count[x.Verdict]++
		if (x.Verdict == api.Passes) != came[i] || x.Verdict == api.Unknown {
			t.Errorf("%s: %s, %s -> %s: explain says %s (%s), the answer came: %v", story.name, f.name, f.ask.From, f.ask.To, x.Verdict, x.Because, came[i])
		}
	}
	t.Logf("%s: %d of %d flows", story.name, compared, len(all))
	return compared
}

// bystander is a table of somebody else at every hook that packets of endpoints pass:
// it can stop nothing, and explain says so.
const bystander = `table inet bystander {
	chain a { type filter hook prerouting priority -5; counter; ct state established accept; }
	chain b { type filter hook forward priority 5; policy accept; iifname "lo" accept; counter; }
	chain c { type filter hook postrouting priority 5; counter; }
}`

// A foreign chain that may drop the packet is named, whatever else says that it passes.
func (b *bed) foreignMayDrop(t *testing.T, v victim) {
	t.Helper()
	netlab.Run(t, "nft", `table inet rival { chain f { type filter hook forward priority 7; ip daddr 192.0.2.77 drop; }; }`)
	defer netlab.Run(t, "nft", "delete", "table", "inet", "rival")
	x := b.explain(t, "a rival", []flow{{ask: api.WayRequest{From: v.Address.String(), To: netlab.InternetAddr}}})[0]
	const object, look = "nftables inet rival f", "nft list chain inet rival f"
	if x.Verdict != api.Unknown || len(x.NotJudged) != 1 || x.NotJudged[0].Object != object || x.NotJudged[0].Inspect != look || !strings.Contains(x.Because, "hook forward, priority 7: it may decide") {
		t.Errorf("a foreign chain may drop: %s, %s, not judged: %+v", x.Verdict, x.Because, x.NotJudged)
	}
}
