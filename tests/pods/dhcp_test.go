package pods

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// lan is the network behind the host's link lan0, with a DHCP server that gives pods
// the addresses of a subnet that is routed to the host.
type lan struct{ leases string }

const (
	lanLink   = "lan0"
	lanHost   = "192.0.2.2"
	lanServer = "192.0.2.1"
	lanSubnet = "10.48.0.0/24"
	lanRouter = "10.48.0.1" // of the leases: pods ask their own node for it
)

func newLAN(t *testing.T, dir string) *lan {
	t.Helper()
	ns := netlab.New(t)
	netlab.Run(t, "ip", "link", "add", lanLink, "type", "veth", "peer", "name", "eth0", "netns", ns.Name)
	t.Cleanup(func() { netlab.Run(t, "ip", "link", "del", lanLink) })
	netlab.Run(t, "ip", "addr", "add", lanHost+"/24", "dev", lanLink)
	netlab.Run(t, "ip", "link", "set", lanLink, "up")
	ns.Run(t, "ip", "addr", "add", lanServer+"/24", "dev", "eth0")
	ns.Run(t, "ip", "link", "set", "eth0", "up")
	ns.Run(t, "ip", "route", "add", lanSubnet, "via", lanHost)
	l := &lan{leases: filepath.Join(dir, "leases")}
	// A lease is renewed after three seconds (T1), though it lasts two minutes: less
	// the server does not give.
	background(t, filepath.Join(dir, "dnsmasq.log"), "DHCP, IP range", ns.Command(context.WithoutCancel(t.Context()), "dnsmasq",
		"--keep-in-foreground", "--log-facility=-", "--conf-file=/dev/null", "--pid-file=", "--user=root", "--port=0",
		"--interface=eth0", "--bind-interfaces", "--dhcp-authoritative", "--no-ping", "--dhcp-leasefile="+l.leases,
		"--shared-network=eth0,10.48.0.0", "--dhcp-range=10.48.0.10,10.48.0.19,255.255.255.0,2m",
		"--dhcp-option=option:router,"+lanRouter, "--dhcp-option=option:T1,3"))
	return l
}

// background starts a program that ends with the test, and waits until it has said
// that it is ready.
func background(t *testing.T, log, ready string, cmd *exec.Cmd) {
	t.Helper()
	out, err := os.Create(log)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
		if text, err := os.ReadFile(log); err == nil && t.Failed() {
			t.Logf("%s:\n%s", log, text)
		}
	})
	netlab.Eventually(t, node.Patience, func() error {
		text, err := os.ReadFile(log)
		if err == nil && !strings.Contains(string(text), ready) {
			err = fmt.Errorf("%s lacks %q: %s", log, ready, text)
		}
		return err
	})
}

// leased are the server's leases: when each address' runs out.
func (l *lan) leased(t *testing.T) map[string]int64 {
	t.Helper()
	text, err := os.ReadFile(l.leases)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	list := map[string]int64{}
	for line := range strings.Lines(string(text)) {
		var until int64
		var mac, address string
		if _, err := fmt.Sscan(line, &until, &mac, &address); err != nil {
			t.Fatalf("lease %q: %v", line, err)
		}
		list[address] = until
	}
	return list
}

// renewed waits until a lease has been renewed so often.
func (l *lan) renewed(t *testing.T, a netip.Addr, times int) {
	t.Helper()
	for until := l.leased(t)[a.String()]; times > 0; times-- {
		netlab.Eventually(t, node.Patience, func() error {
			now := l.leased(t)[a.String()]
			if now <= until {
				return fmt.Errorf("the lease of %s runs out at %d, before at %d", a, now, until)
			}
			until = now
			return nil
		})
	}
}

// dhcp behind the veth mode, with the reference plugin, its daemon and a real server:
// pods of one link have a lease each, which is kept while they live, and given up by
// DEL, also with mknetd down, and by an ADD that fails.
func TestDHCPGivesPodsAddresses(t *testing.T) {
	if _, err := exec.LookPath("dnsmasq"); err != nil {
		netlab.Missing(t, err, "scripts/setup.sh")
	}
	d := newDelegated(t, "dhcp", map[string]any{})
	socket := filepath.Join(d.n.Dir, "dhcp.sock")
	d.conf["ipam"].(map[string]any)["daemonSocketPath"] = socket
	d.conf["ipamLink"] = lanLink
	l := newLAN(t, d.n.Dir)

	_, err := d.call("ADD", "c0", netlab.New(t).Path())
	node.WantCode(t, err, 109, "DHCP daemon") // which does not run yet
	log := filepath.Join(d.n.Dir, "dhcp.log")
	background(t, log, "", exec.Command(filepath.Join(d.path, "dhcp"), "daemon", "-socketpath", socket))
	netlab.Eventually(t, node.Patience, func() error { _, err := os.Stat(socket); return err })
	// The daemon cannot send its release with an address that is not the host's: it
	// renews no more, and the lease runs out.
	givenUp := func(when, id string) {
		t.Helper()
		if text, err := os.ReadFile(log); err != nil || !strings.Contains(string(text), id+".eth0/"+node.Network+"/"+lanLink+": releasing lease") {
			t.Errorf("%s: the plugin's daemon has not given up the lease of %s: %v\n%s", when, id, err, text)
		}
	}
	if _, err := d.call("STATUS", "", ""); err != nil {
		t.Errorf("STATUS: %v", err)
	}

	one, two := netlab.New(t), netlab.New(t)
	a, b := d.add("c1", one), d.add("c2", two)
	for _, ep := range []struct{ got, want string }{
		{a.IPAM, "dhcp"}, {a.Subnet.String(), lanSubnet}, {a.Gateway.String(), lanRouter}, {b.Gateway.String(), lanRouter},
	} {
		if ep.got != ep.want {
			t.Errorf("the record has %s, want %s", ep.got, ep.want)
		}
	}
	if got := l.leased(t); len(got) != 2 || got[a.Address.String()] == 0 || got[b.Address.String()] == 0 {
		t.Errorf("the server has leases %v, want %s and %s", got, a.Address, b.Address)
	}
	netlab.MustPing(t, one, b.Address.String())
	netlab.MustPing(t, two, a.Address.String())
	netlab.MustPing(t, one, netlab.InternetAddr)
	d.n.CheckInventory(t)
	l.renewed(t, a.Address, 2)
	l.renewed(t, b.Address, 1)
	for id, ns := range map[string]*netlab.Namespace{"c1": one, "c2": two} {
		if _, err := d.call("CHECK", id, ns.Path()); err != nil {
			t.Errorf("CHECK of %s: %v", id, err)
		}
	}

	// mknetd refuses after the server gave an address.
	_, err = d.call("ADD", "c3", one.Path())
	node.WantCode(t, err, 100, "interface already exists")
	givenUp("after an ADD that was refused", "c3")
	if _, err := d.call("GC", "", "", map[string]any{"cni.dev/valid-attachments": []any{map[string]any{"containerID": "c2", "ifname": "eth0"}}}); err != nil {
		t.Errorf("GC: %v", err)
	}
	podGone(t, a)
	givenUp("after a GC that keeps c2", "c1")
	until := l.leased(t)[a.Address.String()]
	l.renewed(t, b.Address, 3)
	if got := l.leased(t)[a.Address.String()]; got != until {
		t.Errorf("the lease of a pod that is gone is renewed: it runs out at %d, before at %d", got, until)
	}
	d.n.Kill(t)
	two.Remove(t)
	if _, err := d.call("DEL", "c2", two.Path()); err != nil {
		t.Errorf("DEL while mknetd is down, without the namespace: %v", err)
	}
	givenUp("after DEL", "c2")
	d.n.Start(t)
	podGone(t, b)
	d.n.CheckInventory(t)
}
