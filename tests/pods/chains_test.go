package pods

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"testing"
	"time"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// chainLink is one plugin of a chain with its configuration.
type chainLink struct {
	plugin string
	config map[string]any
}

// podChain is an ordinary pod with reference plugins behind mk-cni, called as libcni
// calls them: each ADD gets the result of the one before, CHECK and DEL the last one.
type podChain struct {
	n      *node.Node
	call   node.Call
	behind []chainLink
	result json.RawMessage
	endpoint.Endpoint
}

func addChain(t *testing.T, n *node.Node, id string, ns *netlab.Namespace, behind ...chainLink) *podChain {
	t.Helper()
	c := &podChain{n: n, behind: behind, call: node.Call{ContainerID: id, Netns: ns.Path(), IfName: "eth0", Config: map[string]any{"mode": "veth"}}}
	c.result = n.AddResult(t, c.call)
	for _, ep := range n.List(t) {
		if ep.ContainerID == id {
			c.Endpoint = ep
		}
	}
	for _, l := range behind {
		out, err := c.run(t, "ADD", l)
		if err != nil {
			t.Fatal(err)
		}
		c.result = out
	}
	return c
}

func (c *podChain) run(t *testing.T, verb string, l chainLink) (json.RawMessage, error) {
	t.Helper()
	conf := map[string]any{"cniVersion": "1.1.0", "name": node.Network, "type": l.plugin, "prevResult": c.result}
	for k, v := range l.config {
		conf[k] = v
	}
	stdin, err := json.Marshal(conf)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(node.Reference(t, "meta/"+l.plugin))
	cmd.Stdin = bytes.NewReader(stdin)
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb, "CNI_CONTAINERID="+c.call.ContainerID, "CNI_NETNS="+c.call.Netns, "CNI_IFNAME=eth0", "CNI_PATH="+c.n.Dir)
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", l.plugin, verb, err, out)
	}
	return out, nil
}

func (c *podChain) check(t *testing.T) {
	t.Helper()
	call := c.call
	call.Verb, call.Config = "CHECK", map[string]any{"mode": "veth", "prevResult": c.result}
	if _, err := c.n.CNI(t, call); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	for _, l := range c.behind {
		if _, err := c.run(t, "CHECK", l); err != nil {
			t.Error(err)
		}
	}
}

func (c *podChain) del(t *testing.T) {
	t.Helper()
	for i := len(c.behind) - 1; i >= 0; i-- {
		if _, err := c.run(t, "DEL", c.behind[i]); err != nil {
			t.Error(err)
		}
	}
	if err := c.n.Del(t, c.Endpoint); err != nil {
		t.Error(err)
	}
	podGone(t, c.Endpoint)
}

func published(hostPort int) chainLink {
	port := map[string]any{"hostPort": hostPort, "containerPort": 80, "protocol": "tcp"}
	return chainLink{"portmap", map[string]any{"backend": "iptables", "runtimeConfig": map[string]any{"portMappings": []any{port}}}}
}

var (
	firewall = chainLink{"firewall", map[string]any{"backend": "iptables"}}
	tuning   = chainLink{"tuning", map[string]any{"sysctl": map[string]string{"net.core.somaxconn": "500"}}}
	sbr      = chainLink{"sbr", nil}
)

// A pod reaches another pod of its node, and itself, by a published port and by a
// service address that somebody translates (D18): the replies find back.
func TestPodsByTranslatedAddresses(t *testing.T) {
	n := node.New(t, podPools)
	one, two := netlab.New(t), netlab.New(t)
	a := addChain(t, n, "c1", one, published(8080), firewall)
	b := addChain(t, n, "c2", two, published(8081), firewall)
	const service = "10.96.0.10"
	for _, chain := range []string{"PREROUTING", "OUTPUT"} {
		rule := []string{"-t", "nat", "-A", chain, "-d", service, "-p", "tcp", "--dport", "80", "-j", "DNAT", "--to-destination", a.Address.String() + ":80"}
		netlab.Run(t, "iptables", rule...)
		rule[2] = "-D"
		defer netlab.Run(t, "iptables", rule...)
	}
	// A pod that reaches itself by a service needs its source translated too, as
	// kube-proxy does it; portmap does so for its own ports.
	hairpin := []string{"-t", "nat", "-A", "POSTROUTING", "-s", a.Address.String(), "-d", a.Address.String(), "-j", "MASQUERADE"}
	netlab.Run(t, "iptables", hairpin...)
	hairpin[2] = "-D"
	defer netlab.Run(t, "iptables", hairpin...)

	netlab.ServeTCP(t, one, a.Address.String()+":80")
	netlab.ServeTCP(t, two, b.Address.String()+":80")
	for _, tc := range []struct {
		who  string
		from *netlab.Namespace
		to   string
	}{
		{"pod to pod", two, a.Address.String() + ":80"},
		{"pod to pod by host port", two, netlab.HostAddr + ":8080"},
		{"the other way round", one, netlab.HostAddr + ":8081"},
		{"pod to pod by a service address", two, service + ":80"},
		{"pod to itself by host port", one, netlab.HostAddr + ":8080"},
		{"pod to itself by a service address", one, service + ":80"},
		{"node to pod by host port", nil, netlab.HostAddr + ":8080"},
		{"node to pod by a service address", nil, service + ":80"},
		{"internet to pod by host port", n.Internet, netlab.HostAddr + ":8080"},
		{"pod to pod once more", two, a.Address.String() + ":80"},
	} {
		if err := netlab.Connect(tc.from, tc.to); err != nil {
			t.Errorf("%s (%s): %v", tc.who, tc.to, err)
		}
	}
	for _, c := range []*podChain{a, b} {
		c.check(t)
	}
	for _, c := range []*podChain{a, b} {
		c.del(t)
	}
	node.PurgeReference(t)
	n.CheckInventory(t)
}

// The rate of the bandwidth plugin, and the bucket that passes at once.
const (
	shapedBits   = 8_000_000
	shapedBucket = 64 << 10 // bytes
)

// bandwidth, tuning, firewall and sbr behind the veth mode: CHECKed, deleted, and
// what the bandwidth plugin shapes is shaped in both directions, also between two
// pods of the node, whose packets would pass by its queues the short way.
func TestPodChainShapes(t *testing.T) {
	n := node.New(t, podPools, "auditInterval: 0s")
	one, two := netlab.New(t), netlab.New(t)
	limits := chainLink{"bandwidth", map[string]any{
		"ingressRate": shapedBits, "ingressBurst": shapedBucket * 8, "egressRate": shapedBits, "egressBurst": shapedBucket * 8,
	}}
	a := addChain(t, n, "c1", one, limits, tuning, firewall, sbr)
	b := n.AddPod(t, "c2", two)
	a.check(t)
	n.CheckInventory(t)
	var result struct{ Interfaces []struct{ Name string } }
	if err := json.Unmarshal(a.result, &result); err != nil {
		t.Fatal(err)
	}
	ifb := result.Interfaces[len(result.Interfaces)-1].Name

	const amount = 1 << 20
	for _, way := range []struct {
		name       string
		from, to   *netlab.Namespace
		sender, at endpoint.Endpoint
		queue      string
	}{
		{"into the pod", two, one, b, a.Endpoint, a.HostLink},
		{"out of the pod", one, two, a.Endpoint, b, ifb},
	} {
		before := passedBy(t, way.queue)
		took := send(t, way.from, way.to, way.sender.Address, way.at.Address, amount)
		passed := passedBy(t, way.queue) - before
		if passed < amount {
			t.Errorf("%s: %d bytes were sent, %d passed the queue of %s", way.name, amount, passed, way.queue)
		}
		if rate := float64(amount-2*shapedBucket) * 8 / took.Seconds(); rate > 1.3*shapedBits {
			t.Errorf("%s: %.1f Mbit/s, the limit is %.1f", way.name, rate/1e6, shapedBits/1e6)
		}
	}
	a.check(t)
	a.del(t)
	if out, err := netlab.Try("ip", "link", "show", ifb); err == nil {
		t.Errorf("the plugin's ifb is left: %s", out)
	}
	// What nobody shapes any more goes the short way.
	c := n.AddPod(t, "c3", netlab.New(t))
	netlab.MustPing(t, two, c.Address.String())
	node.PurgeReference(t)
}

// passedBy is how many bytes the root of a link has passed on.
func passedBy(t *testing.T, link string) int {
	t.Helper()
	var list []struct {
		Kind  string
		Root  bool
		Bytes int
	}
	if err := json.Unmarshal([]byte(netlab.Run(t, "tc", "-s", "-j", "qdisc", "show", "dev", link)), &list); err != nil {
		t.Fatal(err)
	}
	for _, q := range list {
		if q.Root && q.Kind == "tbf" {
			return q.Bytes
		}
	}
	t.Fatalf("%s has no tbf: %+v", link, list)
	return 0
}

// send sends an amount of bytes over TCP and returns how long they took to
// arrive. The sender binds its address: sbr gives routes to nobody who does not.
func send(t *testing.T, from, to *netlab.Namespace, source, dest netip.Addr, amount int64) time.Duration {
	t.Helper()
	var l net.Listener
	var c net.Conn
	var err error
	addr := netip.AddrPortFrom(dest, 9000).String()
	to.Do(t, func() { l, err = net.Listen("tcp4", addr) })
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	sent := make(chan error, 1)
	dialer := net.Dialer{Timeout: node.Patience, LocalAddr: &net.TCPAddr{IP: source.AsSlice()}}
	from.Do(t, func() { c, err = dialer.Dial("tcp4", addr) })
	if err != nil {
		t.Fatalf("connect to %s: %v", addr, err)
	}
	go func() {
		_, err := io.CopyN(c, zeros{}, amount)
		sent <- errors.Join(err, c.Close())
	}()
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	_ = in.SetDeadline(time.Now().Add(node.Patience))
	began := time.Now()
	n, err := io.Copy(io.Discard, in)
	took := time.Since(began)
	if err := errors.Join(err, <-sent); err != nil || n != amount {
		t.Fatalf("%d of %d bytes came from %s: %v", n, amount, source, err)
	}
	return took
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
