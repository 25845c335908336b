package pods

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"strings"
	"testing"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// Pods reach the internet by the node's address whatever the FORWARD policy is,
// not where ipMasq is off, and nobody's address but their own is let through.
func TestPodFirewall(t *testing.T) {
	n := node.New(t, podPools, "auditInterval: 10h")
	netlab.Run(t, "iptables", "-P", "FORWARD", "DROP")
	defer netlab.Run(t, "iptables", "-P", "FORWARD", "ACCEPT")
	one, two, bare := netlab.New(t), netlab.New(t), netlab.New(t)
	a := n.AddPod(t, "c1", one)
	b := n.AddPod(t, "c2", two, map[string]any{"hostAccess": "deny"})
	c := n.AddPod(t, "c3", bare, map[string]any{"ipMasq": false})

	netlab.MustPing(t, one, netlab.InternetAddr)
	netlab.MustPing(t, two, netlab.InternetAddr)
	netlab.MustPing(t, one, b.Address.String())
	netlab.MustNotPing(t, bare, netlab.InternetAddr) // it does not know the pods' addresses
	n.Internet.Run(t, "ip", "route", "add", "10.91.0.0/24", "via", netlab.HostAddr)
	netlab.MustPing(t, bare, netlab.InternetAddr)
	netlab.MustPing(t, n.Internet, c.Address.String())

	// hostAccess: deny leaves the echo, and answers to the node.
	host := netlab.ServeTCP(t, nil, netlab.HostAddr+":8081")
	if err := netlab.Connect(one, host); err != nil {
		t.Errorf("pod to its node: %v", err)
	}
	if err := netlab.Connect(two, host); err == nil {
		t.Error("a pod with hostAccess deny reached its node")
	}
	netlab.MustPing(t, two, netlab.HostAddr)
	if err := netlab.Connect(nil, netlab.ServeTCP(t, two, b.Address.String()+":8082")); err != nil {
		t.Errorf("node to a pod with hostAccess deny: %v", err)
	}

	// A source address that is not the pod's is dropped, here by either line.
	one.Run(t, "ip", "addr", "add", "10.91.0.200/32", "dev", "eth0")
	netlab.MustNotPing(t, one, b.Address.String(), "-I", "10.91.0.200")
	netlab.MustNotPing(t, one, netlab.InternetAddr, "-I", "10.91.0.200")
	one.Run(t, "ip", "addr", "del", "10.91.0.200/32", "dev", "eth0")

	// Somebody flushes; the daemon's start mends, and the inventory says so before,
	// since no audit comes in between.
	netlab.Run(t, "iptables", "-t", "nat", "-F", "MKNET-PODS")
	if out, err := netlab.Try(n.Daemon, "inventory", "--config", n.Config); err == nil || !strings.Contains(out+err.Error(), "MKNET-PODS") {
		t.Errorf("inventory after a flush: %v\n%s", err, out)
	}
	n.Kill(t)
	n.Start(t)
	n.CheckInventory(t)
	for _, ep := range []endpoint.Endpoint{a, b, c} {
		if err := n.Check(t, ep); err != nil {
			t.Errorf("CHECK: %v", err)
		}
	}
}

// podAccess between pods and children, and whose decision it is: a child's says
// whether it reaches pods, and it takes both for a pod to reach the child.
func TestPodAccessMatrix(t *testing.T) {
	n := node.New(t, podPools)
	type end struct {
		ns *netlab.Namespace
		ep endpoint.Endpoint
	}
	pods, children := map[string]end{}, map[string]end{}
	for _, access := range []string{"deny", "allow"} {
		ns := netlab.New(t)
		pods[access] = end{ns, n.AddPod(t, "pod-"+access, ns, map[string]any{"podAccess": access})}
		outer := netlab.New(t)
		ep := n.AddCall(t, node.Call{ContainerID: "child-" + access, Netns: outer.Path(), IfName: "eth0", Config: map[string]any{"podAccess": access}})
		children[access] = end{n.Boot(t, ep, "boot-1").Namespace, ep}
	}
	for podSays, pod := range pods {
		for childSays, child := range children {
			if childSays == "allow" {
				netlab.MustPing(t, child.ns, pod.ep.Address.String())
			} else {
				netlab.MustNotPing(t, child.ns, pod.ep.Address.String())
			}
			if childSays == "allow" && podSays == "allow" {
				netlab.MustPing(t, pod.ns, child.ep.Address.String())
			} else {
				netlab.MustNotPing(t, pod.ns, child.ep.Address.String())
			}
		}
	}
}

// The programs of the data path stand on a pod's link; one that is detached by hand
// is found by CHECK and put back.
func TestPodPrograms(t *testing.T) {
	n := node.New(t, podPools, "auditInterval: 0s")
	one, two := netlab.New(t), netlab.New(t)
	a, b := n.AddPod(t, "c1", one), n.AddPod(t, "c2", two)
	out := netlab.Run(t, n.Daemon, "inventory", "--config", n.Config)
	for _, want := range []string{a.HostLink + "-ingress", a.HostLink + "-egress", "bpf-endpoint"} {
		if !strings.Contains(out, want) {
			t.Fatalf("the inventory lacks %s:\n%s", want, out)
		}
	}
	netlab.MustPing(t, one, b.Address.String())
	pins := netlab.Run(t, "find", "/sys/fs/bpf", "-name", a.HostLink+"-ingress")
	for pin := range strings.Lines(pins) { // a TCX link goes with its pin
		netlab.Run(t, "rm", strings.TrimSpace(pin))
	}
	if pins != "" {
		if err := n.Check(t, a); err == nil {
			t.Error("CHECK finds nothing without the program")
		}
		netlab.MustPing(t, one, b.Address.String()) // by the host stack
		n.Kill(t)
		n.Start(t)
	}
	if err := n.Check(t, a); err != nil {
		t.Errorf("CHECK after the restart: %v", err)
	}
	netlab.MustPing(t, one, b.Address.String())
}

// A data path that cannot be opened is told by mknetd's health and hinders no pod;
// once what was wrong has gone an audit opens it and gives the pods their programs.
func TestPodPathIsOpenedLater(t *testing.T) {
	n := node.Prepare(t, podPools, "auditInterval: 1s")
	sum := sha256.Sum256([]byte(n.Dir + "/state"))
	pins := "/sys/fs/bpf/mknet-" + hex.EncodeToString(sum[:4])
	wrong := pins + "/maps/endpoints" // a folder where the map's pin belongs
	if err := os.MkdirAll(wrong, 0o700); err != nil {
		t.Fatal(err)
	}
	n.Start(t)
	one, two := netlab.New(t), netlab.New(t)
	a, b := n.AddPod(t, "c1", one), n.AddPod(t, "c2", two)
	netlab.MustPing(t, one, b.Address.String())
	trouble := func() string {
		h, err := n.Client(t).Health(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range h.Causes {
			if c.Code == "pod-path-degraded" {
				return c.Message
			}
		}
		return ""
	}
	if got := trouble(); !strings.Contains(got, wrong) {
		t.Errorf("health says %q, want it to name %s", got, wrong)
	}
	if _, err := n.CNI(t, node.Call{Verb: "STATUS", Config: map[string]any{"mode": "veth"}}); err != nil {
		t.Errorf("STATUS: %v", err)
	}
	if err := os.Remove(wrong); err != nil {
		t.Fatal(err)
	}
	netlab.Eventually(t, node.Patience, func() error {
		if got := trouble(); got != "" {
			return errors.New(got)
		}
		return errors.Join(n.Check(t, a), n.Check(t, b)) // their programs stand
	})
	netlab.MustPing(t, one, b.Address.String())
}
