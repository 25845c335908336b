package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// logSince returns what the daemon's log says since the offset, and its end.
func logSince(t *testing.T, n *node.Node, offset int) (said string, end int) {
	t.Helper()
	text, err := os.ReadFile(n.Dir + "/mknetd.log")
	if err != nil {
		t.Fatal(err)
	}
	return string(text[offset:]), len(text)
}

// repaired reports whether the log tells of a repair of what has these words.
func repaired(said, what string) bool {
	for line := range strings.Lines(said) {
		if strings.Contains(line, "repaired") && strings.Contains(line, what) {
			return true
		}
	}
	return false
}

// loseChain removes a chain with every rule that leads to it.
func loseChain(t *testing.T, table, chain string) {
	t.Helper()
	for line := range strings.Lines(netlab.Run(t, "iptables-save", "-t", table)) {
		f := strings.Fields(line)
		if len(f) > 2 && f[0] == "-A" && (strings.HasSuffix(strings.TrimSpace(line), "-g "+chain) || strings.HasSuffix(strings.TrimSpace(line), "-j "+chain)) {
			// Quoted words of iptables-save are for a shell.
			netlab.Run(t, "sh", "-c", "iptables -t "+table+" -D "+strings.TrimPrefix(strings.TrimSpace(line), "-A "))
		}
	}
	netlab.Run(t, "iptables", "-t", table, "-F", chain)
	netlab.Run(t, "iptables", "-t", table, "-X", chain)
}

// Whatever somebody changes by hand, CHECK names it, and the audit puts it right
// under a running pump and says so.
func TestDriftIsNamedAndRepaired(t *testing.T) {
	n := node.New(t, "auditInterval: 10h")
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	host := func(cmd string, args ...string) func() { return func() { netlab.Run(t, cmd, args...) } }
	inside := func(cmd string, args ...string) func() { return func() { pod.Run(t, cmd, args...) } }
	subnet, link, peer := ep.Subnet.String(), ep.HostLink, ep.PeerLink
	table := fmt.Sprint(ep.RouteTable)
	for _, c := range []struct {
		change func()
		named  string // in CHECK's error
		logged string // in the log of the repair
		seen   finding
	}{
		{host("iptables", "-t", "raw", "-F"), "MKNET-PRE", "shared firewall chains", finding{"`iptables -t raw -F`", "CHECK names the rules; repaired, logged"}},
		{host("iptables", "-t", "security", "-F"), "security", "shared firewall chains", finding{"`iptables -t security -F`", "CHECK names the rules; repaired, logged"}},
		{host("iptables", "-t", "nat", "-F"), "MKNET-POST", "shared firewall chains", finding{"`iptables -t nat -F`", "CHECK names the rules; repaired, logged"}},
		{host("iptables", "-t", "filter", "-F"), "MKNET-FWD", "shared firewall chains", finding{"`iptables -F`", "CHECK names the rules; repaired, logged"}},
		{func() { loseChain(t, "filter", ep.Chain) }, ep.Chain, "filter", finding{"an endpoint's chain deleted", "CHECK names the chain; repaired, logged"}},
		{host("iptables", "-I", ep.Chain, "1", "-j", "ACCEPT"), "is foreign", "filter", finding{"a foreign rule inserted in an endpoint's chain", "CHECK names the rule; removed, logged"}},
		{host("iptables", "-I", "FORWARD", "1", "-j", "REJECT"), "takes every packet before our jump", "shared firewall chains", finding{"`iptables -I FORWARD -j REJECT`", "CHECK names the rule; our jump is put before it, logged"}},
		{host("iptables", "-I", "INPUT", "1", "-j", "ACCEPT"), "takes every packet before our jump", "shared firewall chains", finding{"`iptables -I INPUT -j ACCEPT`", "CHECK names the rule; our jump is put before it, logged"}},
		{host("ip", "route", "del", subnet), subnet, subnet, finding{"the host's route deleted", "CHECK names the route; repaired, logged"}},
		{inside("ip", "route", "del", subnet), subnet, subnet, finding{"the namespace's route deleted", "CHECK names the route; repaired, logged"}},
		{inside("ip", "route", "del", "default", "table", table), "table " + table, "table " + table, finding{"the default route of the endpoint's table deleted", "CHECK names the route; repaired, logged"}},
		{inside("ip", "rule", "del", "iif", "eth0"), "iif eth0", "rule", finding{"the namespace's rule deleted", "CHECK names the rule; repaired, logged"}},
		{inside("sysctl", "-qw", "net.ipv4.ip_forward=0"), "ip_forward", "ip_forward", finding{"`ip_forward` of the namespace switched off", "CHECK names the sysctl; repaired, logged"}},
		{host("sysctl", "-qw", "net.ipv4.conf."+link+".forwarding=0"), link + "/forwarding", link + "/forwarding", finding{"forwarding of the host's link switched off", "CHECK names the sysctl; repaired, logged"}},
		{host("sysctl", "-qw", "net.ipv4.conf.up0.forwarding=0"), "up0/forwarding", "up0/forwarding", finding{"forwarding of the egress switched off", "CHECK names the sysctl; repaired, logged"}},
		{host("ip", "link", "set", link, "down"), link, link, finding{"the host's link set down", "CHECK names the link; repaired with its routes, logged"}},
		{inside("ip", "link", "set", peer, "down"), peer, peer, finding{"the namespace's link set down", "CHECK names the link; repaired with its routes, logged"}},
		{inside("ip", "link", "set", "eth0", "down"), "eth0", "eth0", finding{"the TUN set down", "CHECK names the link; repaired with its routes, logged"}},
		{host("ip", "link", "set", link, "mtu", "1300"), "mtu", "mtu " + link, finding{"MTU of the host's link changed", "CHECK names link and MTU; repaired, logged"}},
		{inside("ip", "link", "set", "eth0", "mtu", "1300"), "mtu", "mtu eth0", finding{"MTU of the TUN changed", "CHECK names link and MTU; repaired, logged"}},
		{host("ip", "addr", "flush", "dev", link), ep.TransitHost.String(), ep.TransitHost.String(), finding{"the host's transit address removed", "CHECK names the address; repaired with its routes, logged"}},
		{inside("ip", "addr", "flush", "dev", "eth0"), ep.Gateway.String(), ep.Gateway.String(), finding{"the gateway's address removed", "CHECK names the address; repaired with its routes, logged"}},
	} {
		_, from := logSince(t, n, 0)
		c.change()
		err := n.Check(t, ep)
		// What the kernel reports may be repaired before CHECK looks.
		if said, _ := logSince(t, n, from); (err == nil || !strings.Contains(err.Error(), c.named)) && !repaired(said, c.logged) {
			t.Errorf("%s: CHECK says %v, want %q", c.seen.fault, err, c.named)
		}
		askForAudit(t, n)
		// The log costs less to ask than CHECK, whose readings of all rules would
		// slow the audit down.
		netlab.Eventually(t, 2*node.Patience, func() error {
			said, _ := logSince(t, n, from)
			if repaired(said, c.logged) {
				return nil
			}
			return fmt.Errorf("%s: no line of the log says that %q was repaired:\n%s", c.seen.fault, c.logged, said)
		})
		netlab.Eventually(t, 2*node.Patience, func() error { return n.Check(t, ep) })
		netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
		observed(t, c.seen)
	}
	for _, rule := range [][]string{{"FORWARD", "-j", "REJECT"}, {"INPUT", "-j", "ACCEPT"}} {
		// The audit puts our jump before them and lets them stand.
		netlab.Run(t, "iptables", append([]string{"-D"}, rule...)...)
	}
	if got := n.Endpoint(t, ep.Generation); got == nil || len(got.Degraded) > 0 {
		t.Errorf("after all repairs the record is %v", got)
	}
	if err := child.StopShim(); err != nil {
		t.Error(err)
	}
}

// The TUN is deleted while no shim has had it yet, and again between two shims.
func TestTunDeletedBeforeAttach(t *testing.T) {
	n := node.New(t, "auditInterval: 10h")
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.BootAlone(t, ep, "g1")
	for range 2 {
		pod.Run(t, "ip", "link", "del", "eth0")
		if err := n.Check(t, ep); err == nil || !strings.Contains(err.Error(), "eth0") {
			t.Errorf("CHECK without the TUN: %v", err)
		}
		child.StartShim(t)
		child.WaitLink(t)
		netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
		if err := n.Check(t, ep); err != nil {
			t.Errorf("CHECK: %v", err)
		}
		if err := child.StopShim(); err != nil { // which unbinds
			t.Error(err)
		}
	}
	observed(t, finding{"the TUN deleted while no shim is attached", "CHECK names it; the next ATTACH makes it anew"})
}

// The egress gets another address, then another interface takes its place.
func TestEgressChanges(t *testing.T) {
	n := node.New(t, "auditInterval: 10h")
	ep := n.Add(t, "c1", netlab.New(t), "eth0")
	child := n.Boot(t, ep, "g1")
	follows := func(link, addr string) {
		t.Helper()
		netlab.Eventually(t, node.Patience, func() error {
			got := n.Endpoint(t, ep.Generation)
			if got == nil || got.Egress != link || got.EgressAddr.String() != addr {
				return fmt.Errorf("the endpoint leaves by %v", got)
			}
			return n.Check(t, ep)
		})
		netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
	}
	const second = "198.51.100.77"
	netlab.Run(t, "ip", "addr", "flush", "dev", netlab.UplinkName)
	netlab.Run(t, "ip", "addr", "add", second+"/24", "dev", netlab.UplinkName)
	netlab.Run(t, "ip", "route", "replace", "default", "via", netlab.InternetAddr, "dev", netlab.UplinkName)
	follows(netlab.UplinkName, second)
	observed(t, finding{"the egress's address changed", "endpoints follow at once: rules, routes and flows; logged as `egress-changed`"})

	netlab.Run(t, "ip", "link", "set", netlab.UplinkName, "down")
	netlab.Run(t, "ip", "link", "set", netlab.UplinkName, "name", "up1")
	defer func() {
		netlab.Run(t, "ip", "link", "set", "up1", "down")
		netlab.Run(t, "ip", "link", "set", "up1", "name", netlab.UplinkName)
	}()
	netlab.Run(t, "ip", "link", "set", "up1", "up")
	netlab.Run(t, "ip", "route", "replace", "default", "via", netlab.InternetAddr, "dev", "up1")
	follows("up1", second)
	if said, _ := logSince(t, n, 0); strings.Count(said, "egress-changed") < 2 {
		t.Errorf("the log does not say that the egress changed:\n%s", said)
	}
	observed(t, finding{"the egress replaced by another interface", "endpoints follow at once: rules, routes and flows; logged as `egress-changed`"})
	if err := child.StopShim(); err != nil {
		t.Error(err)
	}
	if err := n.Del(t, ep); err != nil {
		t.Error(err)
	}
}

// Nobody sees the egress change: mknetd is away, or the kernel does not tell it.
func TestEgressChangesUnseen(t *testing.T) {
	n := node.New(t, "auditInterval: 10h")
	ep := n.Add(t, "c1", netlab.New(t), "eth0")
	change := func(addr string) {
		t.Helper()
		netlab.Run(t, "ip", "addr", "flush", "dev", netlab.UplinkName)
		netlab.Run(t, "ip", "addr", "add", addr+"/24", "dev", netlab.UplinkName)
		netlab.Run(t, "ip", "route", "replace", "default", "via", netlab.InternetAddr, "dev", netlab.UplinkName)
	}
	follows := func(addr string) {
		t.Helper()
		netlab.Eventually(t, node.Patience, func() error {
			if got := n.Endpoint(t, ep.Generation); got == nil || got.EgressAddr.String() != addr {
				return fmt.Errorf("the endpoint leaves by %v", got)
			}
			return n.Check(t, ep)
		})
	}
	n.Stop(t)
	change("198.51.100.77")
	s := supervise(t, n)
	follows("198.51.100.77")
	observed(t, finding{"the egress changes while mknetd is away", "endpoints follow at its next start"})

	stop := s.failNth(1, unix.EBUSY)
	change("198.51.100.78")
	follows("198.51.100.78")
	if stop() == nil {
		t.Error("no request failed")
	}
	observed(t, finding{"the kernel does not tell the changed egress at once (EBUSY)", "mknetd asks again; endpoints follow"})
	if err := n.Del(t, ep); err != nil {
		t.Error(err)
	}
}

// Objects of somebody else whose names look like ours stand whatever mknet does.
func TestForeignObjectsStand(t *testing.T) {
	n := node.New(t)
	gen := endpoint.NewGeneration()
	links := []string{gen.HostLink(), endpoint.PodHostLink("stranger", "eth0")}
	for i, l := range links {
		netlab.Run(t, "ip", "link", "add", l, "type", "veth", "peer", "name", fmt.Sprintf("stranger%d", i))
		defer netlab.Run(t, "ip", "link", "del", l)
	}
	netlab.Run(t, "ip", "netns", "add", gen.OwnedNamespace())
	defer netlab.Run(t, "ip", "netns", "del", gen.OwnedNamespace())
	netlab.Run(t, "iptables", "-N", gen.Chain())
	netlab.Run(t, "iptables", "-A", gen.Chain(), "-m", "comment", "--comment", "a stranger's", "-j", "RETURN")
	netlab.Run(t, "iptables", "-A", "FORWARD", "-i", links[0], "-j", gen.Chain())
	defer func() {
		netlab.Run(t, "iptables", "-D", "FORWARD", "-i", links[0], "-j", gen.Chain())
		netlab.Run(t, "iptables", "-F", gen.Chain())
		netlab.Run(t, "iptables", "-X", gen.Chain())
	}()
	foreign := func() string {
		out := netlab.Run(t, "stat", "-L", "-c", "%i", "/run/netns/"+gen.OwnedNamespace())
		for _, l := range links {
			out += "\n" + netlab.Run(t, "ip", "-o", "link", "show", l)
		}
		return out + "\n" + strings.Join(node.Rules(t, gen.Chain()), "\n")
	}
	pod := netlab.New(t)
	before := foreign()
	stand := func(when string) {
		t.Helper()
		if after := foreign(); after != before {
			t.Errorf("%s: foreign objects were\n%s\nand are\n%s", when, before, after)
		}
	}
	ep := n.Add(t, "c1", pod, "eth0")
	stand("after ADD")
	n.Kill(t)
	n.Start(t)
	stand("after a restart")
	askForAudit(t, n)
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	n.CheckInventory(t)
	if _, err := n.CNI(t, node.Call{Verb: "GC", Config: map[string]any{"cni.dev/valid-attachments": []any{}}}); err != nil {
		t.Errorf("GC: %v", err)
	}
	stand("after GC")
	node.Gone(t, ep)
	ep = n.Add(t, "c2", pod, "eth0")
	if err := n.Del(t, ep); err != nil {
		t.Error(err)
	}
	stand("after DEL")
	n.Stop(t)
	if out, err := netlab.Try(n.Programs.Daemon, "purge", "--config", n.Config, "--yes"); err != nil {
		t.Errorf("purge: %v\n%s", err, out)
	}
	stand("after purge")
	observed(t, finding{"links, chain, rule and namespace of somebody else with names like ours", "stand after ADD, restart, audit, GC, DEL and purge; CHECK and inventory are clean"})
}
