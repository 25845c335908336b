package e2e

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// The tests named C.. are failures that users of CNI plugins and their daemons
// have met in public; the comment of each says which.

// ruleset is every iptables rule, without counters.
func ruleset(t *testing.T) string {
	t.Helper()
	var rules []string
	for line := range strings.Lines(netlab.Run(t, "iptables-save")) {
		if !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, ":") {
			rules = append(rules, line)
		}
	}
	return strings.Join(rules, "")
}

// waitGone waits until the daemon has no record of the endpoint.
func waitGone(t *testing.T, n *node.Node, ep endpoint.Endpoint) {
	t.Helper()
	netlab.Eventually(t, node.Patience, func() error {
		if n.Endpoint(t, ep.Generation) != nil {
			return errors.New("the endpoint is still there")
		}
		return nil
	})
	node.Gone(t, ep)
}

// askForAudit has mknetd compare kernel and records soon: a DEL that finds nothing
// is a reason to look. Tests that must see a fault before it is repaired give the
// daemon a long auditInterval.
func askForAudit(t *testing.T, n *node.Node) {
	t.Helper()
	if _, err := n.CNI(t, node.Call{Verb: "DEL", ContainerID: "nobody", IfName: "eth0"}); err != nil {
		t.Errorf("DEL of nothing: %v", err)
	}
}

// Masquerade rules stayed when the namespace had gone first.
func TestC01_NoRuleStaysWhenTheNamespaceWentFirst(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	before := ruleset(t)
	ep := n.Add(t, "c1", pod, "eth0")
	pod.Remove(t)
	if err := n.Del(t, ep); err != nil {
		t.Fatal(err)
	}
	if after := ruleset(t); after != before {
		t.Errorf("rules before:\n%s\nafter:\n%s", before, after)
	}
	node.Gone(t, ep)
	observed(t, finding{"the namespace is removed before DEL", "DEL works; rules and route are gone"})
}

// A reboot kept leases. Another boot ID and no kernel objects are what a daemon
// finds after one.
func TestC02_ARebootFreesWhatWasThere(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	n.Kill(t)
	pod.Remove(t)
	for _, table := range []string{"raw", "security", "nat", "filter"} {
		netlab.Run(t, "iptables", "-t", table, "-F")
		netlab.Run(t, "iptables", "-t", table, "-X")
	}
	anotherBoot(t, n)
	n.Start(t)
	if n.Endpoint(t, ep.Generation) != nil {
		t.Error("the endpoint of the former boot is still recorded")
	}
	pod2 := netlab.New(t)
	again := n.AddCall(t, node.Call{ContainerID: "c1", Netns: pod2.Path(), IfName: "eth0", Args: "IgnoreUnknown=1;IP=" + ep.Address.String()})
	if again.Address != ep.Address {
		t.Errorf("got %s, want the freed %s", again.Address, ep.Address)
	}
	if err := n.Del(t, again); err != nil {
		t.Error(err)
	}
	n.Stop(t)
	observed(t, finding{"reboot (another boot ID, no kernel object left)", "the records of before are released at the start, their addresses are free"})
}

// anotherBoot gives the host another boot ID until the test ends.
func anotherBoot(t *testing.T, n *node.Node) {
	t.Helper()
	bootID := n.Dir + "/boot_id"
	if err := os.WriteFile(bootID, []byte("00000000-1111-4222-8333-444444444444\n"), 0o444); err != nil {
		t.Fatal(err)
	}
	const proc = "/proc/sys/kernel/random/boot_id"
	if err := unix.Mount(bootID, proc, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(proc, 0); err != nil {
			t.Error(err)
		}
	})
}

// A daemon that was down, refused or hung made DEL fail or wait.
func TestC07_DelIsBoundedAndQueuedWhateverTheSocketDoes(t *testing.T) {
	for _, socket := range []string{"missing", "refusing", "hung"} {
		t.Run(socket, func(t *testing.T) {
			n := node.New(t)
			pod := netlab.New(t)
			ep := n.Add(t, "c1", pod, "eth0")
			n.Stop(t)
			switch socket {
			case "refusing", "hung":
				l, err := net.ListenUnix("unix", &net.UnixAddr{Name: n.Socket, Net: "unix"})
				if err != nil {
					t.Fatal(err)
				}
				if err := os.Chmod(n.Socket, 0o600); err != nil {
					t.Fatal(err)
				}
				l.SetUnlinkOnClose(false)
				if socket == "refusing" { // the file stays, nobody listens
					l.Close()
				}
				defer l.Close()
			}
			began := time.Now()
			err := n.Del(t, ep)
			if took := time.Since(began); took > 20*time.Second { // 2 s on an idle machine
				t.Errorf("DEL took %s", took)
			}
			if err != nil {
				t.Errorf("DEL: %v", err)
			}
			if left := queued(t, n); left != 1 {
				t.Errorf("%d DELs are queued, want 1", left)
			}
			if err := os.Remove(n.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Fatal(err)
			}
			n.Start(t)
			waitGone(t, n, ep)
			allReplayed(t, n, node.Patience)
		})
	}
	observed(t, finding{"mknetd is away, refuses, or hangs", "DEL works within its time and is queued; done when mknetd is back"})
}

// Go's threads were left in the wrong namespace, and stray interfaces on the host.
func TestC15_ThreadsStayInTheHostsNamespace(t *testing.T) {
	n := node.New(t)
	var wg sync.WaitGroup
	limit := make(chan struct{}, 16)
	pods := make([]*netlab.Namespace, 32)
	for i := range pods {
		pods[i] = netlab.New(t)
	}
	var made atomic.Int64
	for i, pod := range pods {
		wg.Go(func() {
			limit <- struct{}{}
			defer func() { <-limit }()
			for _, ifName := range []string{"eth0", "net1"} {
				call := node.Call{ContainerID: fmt.Sprintf("c%d", i), Netns: pod.Path(), IfName: ifName}
				call.Verb = "ADD"
				switch _, err := n.CNI(t, call); {
				case err == nil:
					made.Add(1)
				case node.CodeOf(err) == types.ErrTryAgainLater: // so many at once are too many for a busy machine
				default:
					t.Error(err)
				}
				call.Verb = "DEL"
				if _, err := n.CNI(t, call); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/ns/net", n.DaemonPID()))
	if err != nil || len(tasks) == 0 {
		t.Fatalf("no threads: %v", err)
	}
	host, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		if ns, err := os.Readlink(task); err == nil && ns != host {
			t.Errorf("%s is in %s, the host is %s", task, ns, host)
		}
	}
	if out := netlab.Run(t, "ip", "-br", "link"); strings.Contains(out, "eth0") {
		t.Errorf("a stray interface on the host:\n%s", out)
	}
	if made.Load() == 0 {
		t.Error("no ADD worked")
	}
	netlab.Eventually(t, node.Patience, func() error { // a DEL may have been queued
		if left := n.List(t); len(left) != 0 {
			return fmt.Errorf("%d endpoints are left", len(left))
		}
		return nil
	})
}

// A firewall manager's reload wiped the rules.
func TestC19_AFlushedRulesetIsNoticedAndRestored(t *testing.T) {
	n := node.New(t, "auditInterval: 10h")
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	before := ruleset(t)
	for _, table := range []string{"raw", "security", "nat", "filter"} {
		netlab.Run(t, "iptables", "-t", table, "-F")
	}
	if err := n.Check(t, ep); err == nil {
		t.Error("CHECK found nothing wrong with a flushed ruleset")
	} else if !strings.Contains(err.Error(), "MK") {
		t.Errorf("CHECK names no chain: %v", err)
	}
	askForAudit(t, n)
	netlab.Eventually(t, 3*node.Patience, func() error { return n.Check(t, ep) })
	if after := ruleset(t); after != before {
		t.Errorf("restored rules differ:\n%s\n--- before\n%s", after, before)
	}
}

// DEL failed after a reload had taken the rules away.
func TestC20_DelAfterAFlushSucceeds(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	for _, table := range []string{"raw", "security", "nat", "filter"} {
		netlab.Run(t, "iptables", "-t", table, "-F")
		netlab.Run(t, "iptables", "-t", table, "-X")
	}
	if err := n.Del(t, ep); err != nil {
		t.Errorf("DEL: %v", err)
	}
	node.Gone(t, ep)
	askForAudit(t, n) // which puts the shared chains back
	netlab.Eventually(t, 3*node.Patience, func() error {
		_, err := netlab.Try(n.Programs.Daemon, "inventory", "--config", n.Config)
		return err
	})
	observed(t, finding{"all rules and chains removed before DEL", "DEL works; the shared chains are put back by the audit"})
}

// Datagrams went on to a former owner of the address, by its conntrack entries.
func TestC21_UDPReachesTheNewOwnerOfAnAddress(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	old := n.Boot(t, ep, "g1")
	client, err := net.Dial("udp4", ep.Address.String()+":7777")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // a client that never pauses
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
				_, _ = client.Write([]byte("are you there?"))
			}
		}
	})
	defer func() { close(stop); wg.Wait() }()
	if err := old.StopShim(); err != nil {
		t.Error(err)
	}
	if err := n.Del(t, ep); err != nil {
		t.Fatal(err)
	}
	pod2 := netlab.New(t)
	again := n.AddCall(t, node.Call{ContainerID: "c2", Netns: pod2.Path(), IfName: "eth0", Args: "IgnoreUnknown=1;IP=" + ep.Address.String()})
	if again.Address != ep.Address {
		t.Fatalf("got %s, want %s", again.Address, ep.Address)
	}
	child := n.Boot(t, again, "g1")
	var server net.PacketConn
	child.Do(t, func() { server, err = net.ListenPacket("udp4", ep.Address.String()+":7777") })
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	if err := server.SetReadDeadline(time.Now().Add(node.Patience)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := server.ReadFrom(make([]byte, 64)); err != nil {
		t.Errorf("no datagram reached the new owner: %v", err)
	}
	if err := child.StopShim(); err != nil {
		t.Error(err)
	}
}

// The network's name was changed between ADD and DEL.
func TestC22_ARenamedNetworkLeavesNothing(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	if _, err := n.CNI(t, node.Call{Verb: "DEL", ContainerID: "c1", Netns: pod.Path(), IfName: "eth0", Config: map[string]any{"name": "renamed"}}); err != nil {
		t.Errorf("DEL by the new name: %v", err)
	}
	pod.Remove(t)
	if _, err := n.CNI(t, node.Call{Verb: "DEL", ContainerID: "c1", IfName: "eth0", Config: map[string]any{"name": "renamed"}}); err != nil {
		t.Errorf("DEL again: %v", err)
	}
	waitGone(t, n, ep)
}

// A host without IPv6.
func TestC25_NoIPv6(t *testing.T) {
	const tree = "/proc/sys/net/ipv6"
	n := node.Prepare(t)
	if err := unix.Mount("tmpfs", tree, "tmpfs", unix.MS_RDONLY, "size=4k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(tree, 0); err != nil {
			t.Error(err)
		}
	})
	n.Start(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	if err := child.StopShim(); err != nil {
		t.Error(err)
	}
	if err := n.Del(t, ep); err != nil {
		t.Error(err)
	}
	n.Stop(t)
}

// Forwarding was switched off later.
func TestC26_ForwardingSwitchedOffIsNamed(t *testing.T) {
	n := node.New(t, "auditInterval: 10h")
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	for where, off := range map[string]func(){
		"namespace": func() { pod.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=0") },
		"host":      func() { netlab.Run(t, "sysctl", "-qw", "net.ipv4.conf."+ep.HostLink+".forwarding=0") },
	} {
		off()
		if err := n.Check(t, ep); err == nil || !strings.Contains(err.Error(), "forward") {
			t.Errorf("%s: CHECK says %v", where, err)
		}
		askForAudit(t, n)
		netlab.Eventually(t, 3*node.Patience, func() error { return n.Check(t, ep) })
	}
}

// A restart forgot what was there, or left a stale socket in its own way.
func TestC32_RestartAndSecondInstance(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	if out, err := netlab.Try(n.Programs.Daemon, "serve", "--config", n.Config); err == nil || !strings.Contains(err.Error()+out, "only one mknetd") {
		t.Errorf("a second instance: %v %s", err, out)
	}
	if err := n.Check(t, ep); err != nil {
		t.Errorf("after the second instance: %v", err)
	}
	n.Kill(t)
	n.Start(t)
	if err := n.Check(t, ep); err != nil {
		t.Errorf("after a restart: %v", err)
	}
	if got := n.Endpoint(t, ep.Generation); got == nil || got.Address != ep.Address || len(got.Degraded) > 0 {
		t.Errorf("after a restart the record is %v", got)
	}
	if err := n.Del(t, ep); err != nil {
		t.Error(err)
	}
}

// A crashed proxy took its link with it.
func TestC33_AKilledPumpComesBack(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	index := pod.Run(t, "cat", "/sys/class/net/lo/ifindex") // the namespace is alive
	child.KillShim()
	if out := pod.Run(t, "ip", "-br", "link"); !strings.Contains(out, "eth0") {
		t.Errorf("the TUN went with the pump (%s):\n%s", index, out)
	}
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK without a pump: %v", err)
	}
	child.StartShim(t)
	child.WaitLink(t)
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
	if err := child.StopShim(); err != nil {
		t.Error(err)
	}
}

// Others than root reached the daemon's socket.
func TestC34_SocketIsForRootAlone(t *testing.T) {
	n := node.New(t)
	for path, want := range map[string]os.FileMode{n.Socket: 0o600, n.Dir: 0o700, n.Dir + "/state": 0o700} {
		fi, err := os.Lstat(path)
		if err != nil {
			t.Error(err)
		} else if fi.Mode().Perm() != want {
			t.Errorf("%s has mode %#o, want %#o", path, fi.Mode().Perm(), want)
		}
	}
	if err := os.Chmod(n.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(n.Socket, 0o666); err != nil { // somebody's mistake
		t.Fatal(err)
	}
	cmd := exec.Command(n.Programs.Daemon, "endpoints", "--socket", n.Socket)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err == nil {
		t.Errorf("nobody got an answer:\n%s", out)
	}
	n.Stop(t)
	if err := os.Symlink("/etc/passwd", n.Socket); err != nil {
		t.Fatal(err)
	}
	if out, err := netlab.Try(n.Programs.Daemon, "serve", "--config", n.Config); err == nil || !strings.Contains(err.Error()+out, n.Socket) {
		t.Errorf("a symbolic link in the socket's place: %v", err)
	}
	if err := os.Remove(n.Socket); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(n.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
}

// A cache entry of zero bytes blocked DEL.
func TestC35_AnEmptyCacheEntryDoesNotBlockDel(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	entries, err := filepath.Glob(n.Dir + "/cache/*")
	if err != nil || len(entries) == 0 {
		t.Fatalf("no cache entry: %v", err)
	}
	for _, name := range entries {
		if err := os.Truncate(name, 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.Del(t, ep); err != nil {
		t.Errorf("DEL: %v", err)
	}
	node.Gone(t, ep)
	observed(t, finding{"a cache entry cut to zero bytes", "DEL works"})
}
