package pods

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// applyPolicy puts documents in force with the command, as an operator does.
func applyPolicy(t *testing.T, n *node.Node, text string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	out := netlab.Run(t, n.Daemon, "policy", "apply", "-f", path, "--config", n.Config)
	if strings.Contains(out, "warning") {
		t.Fatalf("policy apply: %s", out)
	}
}

func document(kind, name, spec string) string {
	return fmt.Sprintf("---\napiVersion: mknet/v1\nkind: %s\nmetadata: {name: %s}\nspec: %s\n", kind, name, spec)
}

// explained asks the model whether the first packet of a TCP connection passes.
func explained(t *testing.T, n *node.Node, from, to endpoint.Endpoint, port string) bool {
	t.Helper()
	out := netlab.Run(t, n.Daemon, "policy", "explain", "--from", from.Address.String(), "--to", to.Address.String(), "--proto", "tcp", "--port", port, "--config", n.Config)
	return strings.Contains(out, "allowed") && !strings.Contains(out, "denied")
}

// A pod, another pod and a child under one set of documents: every connection
// between them is allowed or refused as `policy explain` says beforehand, also
// while no mknetd runs, and after it has come back.
func TestPolicyOfPodsAndChildren(t *testing.T) {
	n := node.New(t, podPools, "auditInterval: 0s")
	open := map[string]any{"podAccess": "allow"}
	type end struct {
		name string
		ns   *netlab.Namespace
		ep   endpoint.Endpoint
	}
	var ends []end
	for _, name := range []string{"web", "db"} {
		ns := netlab.New(t)
		ends = append(ends, end{name, ns, n.AddPod(t, name, ns, open)})
	}
	outer := netlab.New(t)
	child := n.AddCall(t, node.Call{ContainerID: "kernel", Netns: outer.Path(), IfName: "eth0", Config: open})
	ends = append(ends, end{"kernel", n.Boot(t, child, "boot-1").Namespace, child})
	for _, e := range ends {
		netlab.ServeTCP(t, e.ns, e.ep.Address.String()+":5432")
		netlab.ServeTCP(t, e.ns, e.ep.Address.String()+":80")
	}
	applyPolicy(t, n, document("SecurityGroup", "db", "{ingress: [{from: [{securityGroupRef: {name: clients}}], protocol: tcp, ports: [{port: 5432}]}]}")+
		document("SecurityGroup", "clients", "{ingress: [{protocol: tcp, ports: [{port: 80}]}]}")+
		document("NetworkACL", "pods", "{ingress: [{priority: 1, action: deny, protocol: udp}, {priority: 2, action: allow}], egress: []}")+
		document("Attachment", "db", "{securityGroupRefs: [{name: db}], endpoints: [{name: db}], networkACLRef: {name: pods}, pools: [pods]}")+
		document("Attachment", "clients", "{securityGroupRefs: [{name: clients}], endpoints: [{name: kernel}]}"))
	allowed := func(from, to end, port string) bool {
		return to.name == "web" || to.name == "db" && from.name == "kernel" && port == "5432" || to.name == "kernel" && port == "80"
	}
	each := func(f func(from, to end, port string)) {
		var all sync.WaitGroup
		for _, from := range ends {
			for _, to := range ends {
				for _, port := range []string{"80", "5432"} {
					if from.name != to.name {
						all.Go(func() { f(from, to, port) })
					}
				}
			}
		}
		all.Wait()
	}
	matrix := func(when string) {
		t.Helper()
		each(func(from, to end, port string) {
			want := allowed(from, to, port)
			if err := netlab.Connect(from.ns, to.ep.Address.String()+":"+port); (err == nil) != want {
				t.Errorf("%s: %s to %s:%s: %v, want allowed: %t", when, from.name, to.name, port, err, want)
			}
		})
	}
	each(func(from, to end, port string) {
		if got, want := explained(t, n, from.ep, to.ep, port), allowed(from, to, port); got != want {
			t.Errorf("explain %s to %s:%s: %t, want %t", from.name, to.name, port, got, want)
		}
	})
	matrix("applied")
	n.Kill(t)
	matrix("D14: without mknetd")
	n.Start(t)
	matrix("after the restart")
	n.CheckInventory(t)
	for _, e := range ends {
		if err := n.Check(t, e.ep); err != nil {
			t.Errorf("CHECK of %s: %v", e.name, err)
		}
	}
	netlab.Run(t, n.Daemon, "policy", "delete", "attachment/db", "attachment/clients", "--config", n.Config)
	if err := netlab.Connect(ends[0].ns, ends[1].ep.Address.String()+":80"); err != nil {
		t.Errorf("after the attachments went: %v", err)
	}
}

// A node with children only gets its data path with the first policy, and a child
// that stands is policed from then on; nothing is left of it after DEL.
func TestPolicyOfAStandingChild(t *testing.T) {
	n := node.New(t, "auditInterval: 0s")
	outer := netlab.New(t)
	ep := n.AddCall(t, node.Call{ContainerID: "kernel", Netns: outer.Path(), IfName: "eth0", Config: map[string]any{"hostAccess": "allow"}})
	c := n.Boot(t, ep, "boot-1")
	host := netlab.ServeTCP(t, nil, netlab.HostAddr+":8081")
	if err := netlab.Connect(c.Namespace, host); err != nil {
		t.Fatalf("without policy: %v", err)
	}
	if pins, _ := filepath.Glob("/sys/fs/bpf/*/links/*"); len(pins) != 0 {
		t.Fatalf("programs without policy: %v", pins)
	}
	applyPolicy(t, n, document("NetworkACL", "a", "{egress: [{priority: 1, action: deny, protocol: tcp, ports: [{port: 8081}]}, {priority: 2, action: allow}]}")+
		document("Attachment", "a", "{networkACLRef: {name: a}, pools: [children]}"))
	if err := netlab.Connect(c.Namespace, host); err == nil {
		t.Error("what the ACL denies passes")
	}
	if err := netlab.Connect(c.Namespace, netlab.ServeTCP(t, nil, netlab.HostAddr+":8082")); err != nil {
		t.Errorf("what the ACL allows: %v", err)
	}
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	netlab.Run(t, n.Daemon, "policy", "delete", "attachment/a", "networkacl/a", "--config", n.Config)
	if err := netlab.Connect(c.Namespace, host); err != nil {
		t.Errorf("after the policy went: %v", err)
	}
	n.Kill(t)
	n.Start(t)
	c.Halt(t)
	netlab.Eventually(t, node.Patience, func() error { return n.Del(t, ep) })
	if pins, _ := filepath.Glob("/sys/fs/bpf/*/links/*"); len(pins) != 0 {
		t.Errorf("left after DEL: %v", pins)
	}
	n.CheckInventory(t)
}

// D11: a rule that goes takes its flows along within a second, and those of other
// rules go on. D10: a flow that was open before its first policy goes on where the
// rules allow it.
func TestD10D11RulesChangeUnderFlows(t *testing.T) {
	n := node.New(t, podPools, "auditInterval: 0s")
	one, two := netlab.New(t), netlab.New(t)
	n.AddPod(t, "client", one)
	b := n.AddPod(t, "server", two)
	rules := func(ports string) string {
		return document("SecurityGroup", "s", "{ingress: [{protocol: tcp, ports: ["+ports+"]}]}") +
			document("Attachment", "s", "{securityGroupRefs: [{name: s}], endpoints: [{name: server}]}")
	}
	first, second := openFlow(t, one, two, b.Address.String()+":7001"), openFlow(t, one, two, b.Address.String()+":7002")
	if err := first.echo(node.Patience); err != nil {
		t.Fatal(err)
	}
	applyPolicy(t, n, rules("{port: 7001}, {port: 7002}"))
	for _, f := range []*flow{first, second} {
		if err := f.echo(node.Patience); err != nil {
			t.Errorf("D10: a flow that was open: %v", err)
		}
	}
	applyPolicy(t, n, rules("{port: 7002}"))
	if err := first.echo(time.Second); err == nil {
		t.Error("D11: a flow whose rule is gone goes on")
	}
	if err := second.echo(node.Patience); err != nil {
		t.Errorf("D11: a flow whose rule stays: %v", err)
	}
	applyPolicy(t, n, rules("{port: 7001}, {port: 7002}"))
	if err := first.answer(node.Patience); err != nil { // by retransmission
		t.Errorf("the rule is back: %v", err)
	}
}

// D17: a probe from the node reaches a pod that denies everything, where the
// configuration says so, and only there.
func TestD17NodeProbes(t *testing.T) {
	for _, probes := range []string{"deny", "allow"} {
		t.Run(probes, func(t *testing.T) {
			n := node.New(t, podPools, "nodeProbes: "+probes)
			one, two := netlab.New(t), netlab.New(t)
			a := n.AddPod(t, "closed", one)
			n.AddPod(t, "other", two)
			addr := netlab.ServeTCP(t, one, a.Address.String()+":8080")
			applyPolicy(t, n, document("SecurityGroup", "closed", "{egressDefault: deny}")+
				document("Attachment", "closed", "{securityGroupRefs: [{name: closed}], endpoints: [{name: closed}]}"))
			if err := netlab.Connect(nil, addr); (err == nil) != (probes == "allow") {
				t.Errorf("from the node: %v", err)
			}
			if err := netlab.Connect(two, addr); err == nil {
				t.Error("from another pod: passed")
			}
			if err := netlab.Connect(one, netlab.HostAddr+":1"); err == nil {
				t.Error("the pod's own connection passed")
			}
		})
	}
}

// flow is an open TCP connection between two namespaces with an echo behind it.
type flow struct {
	c net.Conn
	r *bufio.Reader
	n int
}

func openFlow(t *testing.T, from, to *netlab.Namespace, addr string) *flow {
	t.Helper()
	var l net.Listener
	var err error
	to.Do(t, func() { l, err = net.Listen("tcp4", addr) })
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		r := bufio.NewReader(c)
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				return
			}
			if _, err := c.Write([]byte(line)); err != nil {
				return
			}
		}
	}()
	f := &flow{}
	from.Do(t, func() { f.c, err = net.DialTimeout("tcp4", addr, node.Patience) })
	if err != nil {
		t.Fatal(err)
	}
	f.r = bufio.NewReader(f.c)
	t.Cleanup(func() {
		_ = f.c.(*net.TCPConn).SetLinger(0)
		f.c.Close()
		l.Close()
		<-done
	})
	return f
}

// echo sends a line and waits for it to come back.
func (f *flow) echo(wait time.Duration) error {
	f.n++
	if _, err := fmt.Fprintf(f.c, "line %d\n", f.n); err != nil {
		return err
	}
	return f.answer(wait)
}

func (f *flow) answer(wait time.Duration) error {
	if err := f.c.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	line, err := f.r.ReadString('\n')
	if err == nil && line != fmt.Sprintf("line %d\n", f.n) {
		err = fmt.Errorf("got %q instead of line %d", line, f.n)
	}
	return err
}

// Documents in the watched folder are enforced within seconds, one with a fault
// changes nothing, and what is dropped is counted.
func TestPolicyFolder(t *testing.T) {
	n := node.New(t, podPools, "auditInterval: 0s")
	one, two := netlab.New(t), netlab.New(t)
	n.AddPod(t, "client", one)
	b := n.AddPod(t, "server", two)
	addr := netlab.ServeTCP(t, two, b.Address.String()+":80")
	folder := filepath.Join(n.Dir, "policy.d")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	put := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(folder, "all.yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	health := func(word string) {
		t.Helper()
		netlab.Eventually(t, node.Patience, func() error {
			out := netlab.Run(t, "curl", "-s", "--unix-socket", n.Socket, "http://mknetd/v1/daemon/health")
			if !strings.Contains(out, word) {
				return fmt.Errorf("health lacks %q: %s", word, out)
			}
			return nil
		})
	}
	closed := document("SecurityGroup", "closed", "{}") + document("Attachment", "closed", "{securityGroupRefs: [{name: closed}], endpoints: [{name: server}]}")
	put(closed)
	netlab.Eventually(t, node.Patience, func() error {
		if netlab.Connect(one, addr) == nil {
			return fmt.Errorf("the folder's policy is not enforced")
		}
		return nil
	})
	put("kind: nonsense")
	health("policy-not-applied")
	if err := netlab.Connect(one, addr); err == nil {
		t.Error("a fault in the folder opened the pod")
	}
	metrics := netlab.Run(t, "curl", "-s", "--unix-socket", n.Socket, "http://mknetd/metrics")
	if !strings.Contains(metrics, `mknet_policy_packets_total{reason="sg drop"}`) {
		t.Errorf("what is dropped is not counted:\n%s", metrics)
	}
	if err := os.Remove(filepath.Join(folder, "all.yaml")); err != nil {
		t.Fatal(err)
	}
	netlab.Eventually(t, node.Patience, func() error { return netlab.Connect(one, addr) })
}
