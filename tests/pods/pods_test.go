package pods

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// podPools is a configuration with two pools: one for all, one for a namespace.
const podPools = `pools:
- {name: pods, prefix: 10.91.0.0/24}
- {name: blue, prefix: 10.92.0.0/29, gateway: 10.92.0.6, namespaces: [blue, navy]}`

// An ordinary pod: what ADD prints, what stands in the pod, that it reaches its
// node, another pod and the other way round, and that CHECK and DEL agree.
func TestPod(t *testing.T) {
	n := node.New(t, podPools)
	one, two := netlab.New(t), netlab.New(t)
	out, err := n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c1", Netns: one.Path(), IfName: "eth0", Config: map[string]any{"mode": "veth"}, Args: "K8S_POD_NAMESPACE=default;K8S_POD_NAME=web"})
	if err != nil {
		t.Fatal(err)
	}
	var result struct {
		Interfaces []struct{ Name, Mac, Sandbox string }
		IPs        []struct {
			Interface        int
			Address, Gateway string
		}
		Routes []struct {
			Dst, GW string
			MTU     int
		}
	}
	if err := json.Unmarshal(out, &result); err != nil {
		t.Fatal(err)
	}
	a := n.List(t)[0]
	want := fmt.Sprintf("[{%s %s } {eth0 %s %s}] [{1 10.91.0.2/24 10.91.0.1}] [{10.91.0.1/32  0} {0.0.0.0/0 10.91.0.1 1400}]",
		endpoint.PodHostLink("c1", "eth0"), endpoint.MAC(a.Generation.HostMAC()), a.PodMAC(), one.Path())
	if got := fmt.Sprintf("%v %v %v", result.Interfaces, result.IPs, result.Routes); got != want {
		t.Errorf("result\n%s\nwant\n%s", got, want)
	}
	if a.Pool != "pods" || a.Pod != (endpoint.Pod{Namespace: "default", Name: "web"}) || !a.IPMasq || a.HostAccess != endpoint.Allow || a.PodAccess != endpoint.Deny {
		t.Errorf("record %+v", a)
	}
	b := n.AddPod(t, "c2", two)
	for _, ep := range []endpoint.Endpoint{a, b} {
		if err := n.Check(t, ep); err != nil {
			t.Errorf("CHECK: %v", err)
		}
		netlab.Run(t, "ping", "-c3", "-i0.2", "-W20", ep.Address.String())
	}
	netlab.MustPing(t, one, b.Address.String())
	netlab.MustPing(t, two, a.Address.String())
	netlab.MustPing(t, one, a.Gateway.String())
	netlab.MustPing(t, one, netlab.HostAddr)
	n.CheckInventory(t)

	// A second ADD of the same attachment, and one of an interface that is there.
	_, err = n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c1", Netns: one.Path(), IfName: "eth0", Config: map[string]any{"mode": "veth"}})
	node.WantCode(t, err, 100, "already has the endpoint")
	_, err = n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c3", Netns: one.Path(), IfName: "eth0", Config: map[string]any{"mode": "veth"}})
	node.WantCode(t, err, 100, "interface already exists")
	// Another network with the same container and interface has the same host link.
	_, err = n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c1", Netns: two.Path(), IfName: "eth0", Config: map[string]any{"mode": "veth", "name": "other"}})
	if err == nil {
		t.Error("ADD into a namespace that has an eth0 succeeded")
	}
	_, err = n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c1", Netns: netlab.New(t).Path(), IfName: "eth0", Config: map[string]any{"mode": "veth", "name": "other"}})
	node.WantCode(t, err, 100, a.HostLink)

	ctx := t.Context()
	sandbox := endpoint.Sandbox{ID: "s", Generation: "1"}
	if _, err := n.Client(t).Bind(ctx, api.BindRequest{Selector: api.Selector{Generation: a.Generation}, Sandbox: sandbox}); api.CodeOf(err) != api.Unsupported {
		t.Errorf("BIND of a pod: %v", err)
	}
	if err := n.Del(t, a); err != nil {
		t.Error(err)
	}
	podGone(t, a)
	if err := n.Del(t, a); err != nil {
		t.Errorf("a second DEL: %v", err)
	}
	two.Remove(t)
	if err := n.Del(t, b); err != nil {
		t.Errorf("DEL without the namespace: %v", err)
	}
	podGone(t, b)
	n.CheckInventory(t)
}

// podGone fails the test when the kernel keeps anything of a pod.
func podGone(t *testing.T, ep endpoint.Endpoint) {
	t.Helper()
	netlab.Eventually(t, node.Patience, func() error {
		for _, cmd := range [][]string{{"ip", "-o", "link"}, {"ip", "route"}, {"ip", "neigh"}, {"iptables-save"}, {"conntrack", "-L"}} {
			out := netlab.Run(t, cmd[0], cmd[1:]...)
			for _, mark := range []string{ep.HostLink, ep.Generation.String(), ep.Address.String() + " "} {
				if strings.Contains(out, mark) {
					return fmt.Errorf("%s still shows %s", strings.Join(cmd, " "), mark)
				}
			}
		}
		return nil
	})
}

// Pools: by Kubernetes namespace, requested addresses and MAC addresses,
// exhaustion, and that a freed address comes last.
func TestPodAddresses(t *testing.T) {
	n := node.New(t, podPools, "quarantine: 0s")
	veth := map[string]any{"mode": "veth"}
	add := func(id, args string, config map[string]any) (endpoint.Endpoint, error) {
		t.Helper()
		out, err := n.CNI(t, node.Call{Verb: "ADD", ContainerID: id, Netns: netlab.New(t).Path(), IfName: "eth0", Config: config, Args: args})
		if err != nil {
			return endpoint.Endpoint{}, err
		}
		for _, ep := range n.List(t) {
			if ep.ContainerID == id {
				return ep, nil
			}
		}
		t.Fatalf("no record of %s: %s", id, out)
		return endpoint.Endpoint{}, nil
	}
	blue := "K8S_POD_NAMESPACE=blue;K8S_POD_NAME=p"
	var all []endpoint.Endpoint
	for i, want := range []string{"10.92.0.1", "10.92.0.2", "10.92.0.3", "10.92.0.4", "10.92.0.5"} {
		ep, err := add(fmt.Sprintf("b%d", i), blue, veth)
		if err != nil || ep.Address.String() != want || ep.Gateway.String() != "10.92.0.6" {
			t.Fatalf("pod %d of pool blue: %s, %v, want %s", i, ep.Address, err, want)
		}
		all = append(all, ep)
	}
	_, err := add("full", blue, veth)
	node.WantCode(t, err, 11, "pool blue is exhausted: all 5 addresses of 10.92.0.0/29")
	for _, i := range []int{3, 1} { // freed in this order, given out in this order
		if err := n.Del(t, all[i]); err != nil {
			t.Fatal(err)
		}
	}
	n.Kill(t) // the order is durable
	n.Start(t)
	for _, i := range []int{3, 1} {
		ep, err := add(fmt.Sprintf("again%d", i), blue, veth)
		if err != nil || ep.Address != all[i].Address {
			t.Errorf("address after DEL: %s, %v, want %s", ep.Address, err, all[i].Address)
		}
	}
	ep, err := add("asked", "IP=10.91.0.77;MAC=02:00:5e:00:00:77", veth)
	if err != nil || ep.Address.String() != "10.91.0.77" || ep.PodMAC().String() != "02:00:5e:00:00:77" {
		t.Errorf("requested in CNI_ARGS: %s %s, %v", ep.Address, ep.PodMAC(), err)
	}
	_, err = add("asked2", "IP=10.91.0.77", veth)
	node.WantCode(t, err, 100, "requested address 10.91.0.77: is in use")
	_, err = add("asked3", "IP=10.91.0.1", veth)
	node.WantCode(t, err, 7, "is the gateway of pool pods")
	_, err = add("asked4", "IP=10.92.0.1", veth)
	node.WantCode(t, err, 7, "is not in pool pods")
	ep, err = add("caps", "", map[string]any{"mode": "veth", "capabilities": map[string]any{"ips": true, "mac": true}, "runtimeConfig": map[string]any{"ips": []string{"10.91.0.78/24"}, "mac": "02:00:5e:00:00:78"}})
	if err != nil || ep.Address.String() != "10.91.0.78" || ep.PodMAC().String() != "02:00:5e:00:00:78" {
		t.Errorf("requested as capabilities: %s %s, %v", ep.Address, ep.PodMAC(), err)
	}
	if err := n.Check(t, ep); err != nil {
		t.Error(err)
	}
}

// A lease keeps an address until its owner's endpoint claims it, it is released,
// or its time is over; it survives the daemon.
func TestPodLeases(t *testing.T) {
	n := node.New(t, podPools, "quarantine: 0s")
	c := n.Client(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*node.Patience)
	defer cancel()
	pod := endpoint.Pod{Namespace: "blue", Name: "web"}
	free := func() uint32 {
		conf, err := c.Config(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return conf.Pools[1].Free
	}
	lease := func(ttl int) api.Lease {
		t.Helper()
		l, err := c.Allocate(ctx, api.LeaseRequest{Pod: pod, TTLSeconds: ttl})
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	kept, short, given := lease(600), lease(1), lease(600)
	if kept.Owner != "blue/web" || kept.Pool != "blue" || kept.Subnet != netip.MustParsePrefix("10.92.0.0/29") || kept.Address == given.Address {
		t.Errorf("leases %+v and %+v", kept, given)
	}
	if err := c.ReleaseLease(ctx, given.ID); err != nil {
		t.Error(err)
	}
	if err := c.ReleaseLease(ctx, given.ID); err != nil {
		t.Errorf("a second release: %v", err)
	}
	netlab.Eventually(t, node.Patience, func() error {
		if f := free(); f != 4 {
			return fmt.Errorf("%d addresses are free, want 4: lease %s must expire", f, short.ID)
		}
		return nil
	})
	n.Kill(t)
	n.Start(t)
	if f := free(); f != 4 {
		t.Errorf("%d addresses are free after a restart, want 4", f)
	}
	ns := netlab.New(t)
	req := api.CreateRequest{Attachment: endpoint.Attachment{Network: node.Network, ContainerID: "l1", IfName: "eth0"}, Mode: endpoint.Veth, NetnsPath: ns.Path(), Lease: kept.ID}
	if _, err := c.CreateEndpoint(ctx, req, nil); api.CodeOf(err) != api.StaleIdentity {
		t.Errorf("a lease of somebody else: %v", err)
	}
	req.Pod = pod
	ep, err := c.CreateEndpoint(ctx, req, nil)
	if err != nil || ep.Address != kept.Address {
		t.Fatalf("claim: %s, %v, want %s", ep.Address, err, kept.Address)
	}
	req.ContainerID, req.NetnsPath = "l2", netlab.New(t).Path()
	if _, err := c.CreateEndpoint(ctx, req, nil); api.CodeOf(err) != api.NotFound {
		t.Errorf("a lease that was claimed: %v", err)
	}
	if f := free(); f != 4 {
		t.Errorf("%d addresses are free, want 4", f)
	}
}

// The daemon killed and restarted, and its DELs while it is down: pods go on, and
// nothing leaks.
func TestPodsOutliveTheDaemon(t *testing.T) {
	n := node.New(t, podPools)
	one, two := netlab.New(t), netlab.New(t)
	a, b := n.AddPod(t, "c1", one), n.AddPod(t, "c2", two)
	var out string
	var pingErr error
	done := make(chan struct{})
	go func() {
		defer close(done)
		out, pingErr = one.Try("ping", "-i0.05", "-c100", "-W5", b.Address.String())
	}()
	for running := true; running; {
		n.Kill(t)
		n.Start(t)
		select {
		case <-done:
			running = false
		default:
		}
	}
	if pingErr != nil || !strings.Contains(out, " 0% packet loss") {
		t.Errorf("ping between pods while the daemon is killed and restarted: %v\n%s", pingErr, out)
	}
	for _, ep := range []endpoint.Endpoint{a, b} {
		if err := n.Check(t, ep); err != nil {
			t.Errorf("CHECK after the restarts: %v", err)
		}
	}
	n.Kill(t)
	if err := n.Del(t, a); err != nil {
		t.Errorf("DEL while the daemon is down: %v", err)
	}
	two.Remove(t)
	n.Start(t)
	podGone(t, a)
	podGone(t, b)
	netlab.Eventually(t, node.Patience, func() error {
		if left := n.List(t); len(left) != 0 {
			return fmt.Errorf("%d records are left", len(left))
		}
		return nil
	})
	n.CheckInventory(t)
}
