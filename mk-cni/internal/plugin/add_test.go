package plugin

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/mk-cni/internal/cache"
	"mknet/mk-cni/internal/version"
	"mknet/spec/api"
	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// C29: the result of each version, byte for byte but for the namespace's path.
func TestC29_ResultOfEachVersion(t *testing.T) {
	for _, v := range version.Supported {
		t.Run(v, func(t *testing.T) {
			l := newLab(t)
			l.daemon.generation = endpoint.Generation{0xab, 0xcd, 15: 1}
			in := l.add()
			in.version = v
			in.members = `"dns":{"nameservers":["1.1.1.1"],"domain":"x.local","search":["x.local"],"options":["ndots:2"]}`
			got := strings.ReplaceAll(l.ok(in).stdout, l.ns.Path(), "/run/netns/NS")
			golden := filepath.Join("testdata", "result-"+v+".golden")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("result\n%s\nwant (update with -update)\n%s", got, want)
			}
		})
	}
}

// What callers need of the result: go-cni maps by name and CRI takes the address
// of eth0; Podman wants a MAC address on everything in the sandbox and, on a
// reload, takes any of those interfaces for the one; portmap looks for the address
// of the interface that is called CNI_IFNAME.
func TestResultServesTheCallers(t *testing.T) {
	l := newLab(t)
	var res struct {
		Interfaces []struct{ Name, Mac, Sandbox string }
		IPs        []struct {
			Interface int
			Address   string
		}
	}
	if err := json.Unmarshal([]byte(l.ok(l.add()).stdout), &res); err != nil {
		t.Fatal(err)
	}
	inside := 0
	for i, inf := range res.Interfaces {
		if inf.Sandbox == "" {
			if inf.Name == "eth0" {
				t.Errorf("interfaces[%d] is a host link called eth0", i)
			}
			continue
		}
		inside++
		if inf.Name != "eth0" || inf.Mac != "00:00:00:00:00:00" || inf.Sandbox != l.ns.Path() {
			t.Errorf("interfaces[%d] = %+v", i, inf)
		}
	}
	if inside != 1 || len(res.IPs) != 1 || res.IPs[0].Interface != 0 || res.IPs[0].Address != "172.30.0.2/30" {
		t.Errorf("result %+v: want one interface inside and its one address", res)
	}
}

func TestAddAsksForWhatItWasGiven(t *testing.T) {
	l := newLab(t)
	in := l.add()
	in.args = "K8S_POD_UID=u1;IgnoreUnknown=1;K8S_POD_NAME=p;FOO=BAR;K8S_POD_NAMESPACE=ns"
	in.members = `"mtu":1300,"hostAccess":"allow","podAccess":"allow","publishPorts":false,"dns":{"nameservers":["1.1.1.1"]},` +
		`"runtimeConfig":{"dns":{"Servers":["2.2.2.2"]},"bandwidth":{"ingressRate":8000,"ingressBurst":800},"ips":["172.30.0.6/30"]}`
	l.ok(in)
	want := api.CreateRequest{
		Attachment: l.att(), Mode: endpoint.Multikernel, NetnsPath: l.ns.Path(), MTUBytes: 1300, Address: netip.MustParseAddr("172.30.0.6"),
		DNS: endpoint.DNS{Nameservers: []string{"2.2.2.2"}}, HostAccess: endpoint.Allow, PodAccess: endpoint.Allow,
		Bandwidth: &endpoint.Bandwidth{IngressRate: 8000, IngressBurst: 800}, Pod: endpoint.Pod{Namespace: "ns", Name: "p", UID: "u1"},
	}
	if got := l.daemon.lastReq; !reflect.DeepEqual(got, want) {
		t.Errorf("asked for %+v\nwant      %+v", got, want)
	}
	if got := l.cacheFiles(); len(got) != 1 {
		t.Errorf("cache holds %v, want one entry", got)
	}
}

// Podman's reload deletes and adds again with the addresses of the last result.
func TestPodmanReload(t *testing.T) {
	l := newLab(t)
	l.ok(l.add())
	l.ok(invocation{verb: "DEL", netns: l.ns.Path()})
	in := l.add()
	in.args = "IgnoreUnknown=1;K8S_POD_NAME=web;MAC=00:00:00:00:00:00;IP=172.30.0.2"
	if res := l.ok(in); !strings.Contains(res.stdout, "172.30.0.2/30") {
		t.Errorf("address is not the one asked for: %s", res.stdout)
	}
}

func TestAddRefusals(t *testing.T) {
	for _, tc := range []struct {
		err  *api.Error
		code uint
	}{
		{api.Errorf(api.AlreadyExists, "eth0 is there already"), 100},
		{api.Errorf(api.ResourceExhausted, "no free address"), 104},
		{api.Retryablef(api.ResourceExhausted, "too many calls"), 11},
		{api.Errorf(api.Unavailable, "egress is missing"), 11},
		{api.Errorf(api.Unsupported, "no TUN in this kernel"), 2},
		{api.Errorf(api.InvalidArgument, "mtu"), 7},
		{api.Errorf(api.Internal, "defect"), 105},
	} {
		t.Run(string(tc.err.Code), func(t *testing.T) {
			l := newLab(t)
			tc.err.Details = []string{"a further line"}
			l.daemon.fail["POST /v1/endpoints"] = tc.err
			l.fails(l.add(), tc.code, tc.err.Message, string(tc.err.Code), "a further line", "mknet/c1/eth0")
			l.unchanged()
		})
	}
}

func TestDuplicateAddLeavesTheFirst(t *testing.T) {
	l := newLab(t)
	res := l.added(l.add())
	l.fails(l.add(), 100, "mknet/c1/eth0")
	l.ok(invocation{verb: "CHECK", netns: l.ns.Path(), members: withPrev(res)})
	l.daemon.called()
	l.ok(invocation{verb: "DEL"})
	if calls := l.daemon.called(); !slices.Equal(calls, []string{"DELETE /v1/endpoints/G"}) {
		t.Errorf("DEL called %v, want the generation alone", calls)
	}
	l.unchanged()
}

func TestVethModeIsTheDaemonsToRefuse(t *testing.T) {
	l := newLab(t)
	l.daemon.fail["POST /v1/endpoints"] = api.Errorf(api.Unsupported, `"mode": "veth" is not supported by this daemon`)
	in := l.add()
	in.members = `"mode":"veth","ipMasq":true`
	l.fails(in, 2, "veth")
	l.unchanged()
}

func TestC13_NetnsIsAPlainFile(t *testing.T) {
	l := newLab(t)
	dir := t.TempDir()
	plain, fifo := dir+"/plain", dir+"/fifo"
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{plain, fifo, dir, "/dev/null", "/proc/self/ns/mnt", "/nonexistent", "/proc/0/ns/net"} {
		l.fails(invocation{verb: "ADD", netns: path}, 4, "CNI_NETNS", path)
		l.ok(invocation{verb: "DEL", netns: path})
	}
	for _, call := range l.daemon.called() {
		if call != "POST /v1/delete" {
			t.Errorf("called %s", call)
		}
	}
	l.unchanged()
}

func TestC39_TheHostsOwnNamespaceIsRefused(t *testing.T) {
	l := newLab(t)
	own := fmt.Sprintf("/proc/%d/ns/net", os.Getpid())
	l.fails(invocation{verb: "ADD", netns: own}, 4, "CNI_NETNS", "host's own")
	l.ok(invocation{verb: "DEL", netns: own})
	l.unchanged()
}

// C14: the namespace goes away while mknetd works; its path then means nothing or
// another one. The ADD is taken back: nobody will say DEL for it.
func TestC14_NamespaceVanishesDuringAdd(t *testing.T) {
	for _, replaced := range []bool{false, true} {
		l := newLab(t)
		other := netlab.New(t)
		l.daemon.onCreate = func(*endpoint.Endpoint) {
			l.ns.Remove(t)
			if !replaced {
				return
			}
			if err := os.Symlink(other.Path(), l.ns.Path()); err != nil {
				t.Error(err)
			}
		}
		t.Cleanup(func() { _ = os.Remove(l.ns.Path()) })
		l.fails(l.add(), 4, "CNI_NETNS", "removed while the ADD was at work")
		l.unchanged()
		if n := l.daemon.count(); n != 0 {
			t.Errorf("replaced %v: mknetd still has %d endpoints", replaced, n)
		}
		l.ok(invocation{verb: "DEL", netns: "/run/netns/gone"})
	}
}

// An answer that is not exactly what was asked for is taken back.
func TestMismatchingAnswersAreRolledBack(t *testing.T) {
	for name, change := range map[string]func(*endpoint.Endpoint){
		"other network":   func(ep *endpoint.Endpoint) { ep.Network = "other" },
		"other container": func(ep *endpoint.Endpoint) { ep.ContainerID = "c2" },
		"other interface": func(ep *endpoint.Endpoint) { ep.IfName = "eth1" },
		"other mode":      func(ep *endpoint.Endpoint) { ep.Mode = endpoint.Veth },
		"not ready":       func(ep *endpoint.Endpoint) { ep.State = endpoint.Allocating },
		"no state":        func(ep *endpoint.Endpoint) { ep.State = "" },
		"already bound":   func(ep *endpoint.Endpoint) { ep.Binding = &endpoint.Binding{} },
		"being deleted":   func(ep *endpoint.Endpoint) { now := time.Now(); ep.DeleteRequested = &now },
		"not a /30":       func(ep *endpoint.Endpoint) { ep.Subnet = netip.MustParsePrefix("172.30.0.0/29") },
		"host bits":       func(ep *endpoint.Endpoint) { ep.Subnet = netip.MustParsePrefix("172.30.0.1/30") },
		"public address":  func(ep *endpoint.Endpoint) { ep.Subnet = netip.MustParsePrefix("8.8.8.0/30") },
		"no subnet":       func(ep *endpoint.Endpoint) { ep.Subnet = netip.Prefix{} },
		"wrong gateway":   func(ep *endpoint.Endpoint) { ep.Gateway = ep.Address },
		"wrong address":   func(ep *endpoint.Endpoint) { ep.Address = ep.Gateway },
		"address not asked": func(ep *endpoint.Endpoint) {
			a := endpoint.DefaultPools.At(7)
			ep.Subnet, ep.Gateway, ep.Address = a.Subnet, a.Gateway, a.Child
		},
		"no mtu":               func(ep *endpoint.Endpoint) { ep.MTUBytes = 0 },
		"other mtu":            func(ep *endpoint.Endpoint) { ep.MTUBytes = 1500 },
		"other boot":           func(ep *endpoint.Endpoint) { ep.Namespace.BootID = "x" },
		"no cookie":            func(ep *endpoint.Endpoint) { ep.Namespace.Cookie = 0 },
		"other namespace":      func(ep *endpoint.Endpoint) { ep.Namespace.Inode++ },
		"foreign host link":    func(ep *endpoint.Endpoint) { ep.HostLink = "eth0" },
		"foreign chain":        func(ep *endpoint.Endpoint) { ep.Chain = "FORWARD" },
		"host access":          func(ep *endpoint.Endpoint) { ep.HostAccess = endpoint.Allow },
		"pod access":           func(ep *endpoint.Endpoint) { ep.PodAccess = endpoint.Allow },
		"publishes":            func(ep *endpoint.Endpoint) { ep.Publishes = false },
		"other pod":            func(ep *endpoint.Endpoint) { ep.Pod.Name = "other" },
		"other resolver":       func(ep *endpoint.Endpoint) { ep.DNS.Nameservers = []string{"6.6.6.6"} },
		"no shaping":           func(ep *endpoint.Endpoint) { ep.Bandwidth = nil },
		"no generation at all": func(ep *endpoint.Endpoint) { ep.Generation = endpoint.Generation{} },
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			l.daemon.onCreate = change
			in := l.add()
			in.members = `"mtu":1400,"dns":{"nameservers":["1.1.1.1"]},"runtimeConfig":{"ips":["172.30.0.2"],"bandwidth":{"egressRate":1000,"egressBurst":10}}`
			e := l.fails(in, CodeBadReply, "same release")
			if !strings.Contains(e.Msg, "mknet/c1/eth0") && !strings.Contains(e.Msg, "POST /v1/endpoints") {
				t.Errorf("error does not say what: %s", e.Msg)
			}
			l.unchanged()
		})
	}
}

// An answer that names somebody else's endpoint must not have that one deleted.
func TestRollbackNeverDeletesAnothersEndpoint(t *testing.T) {
	l := newLab(t)
	other := endpoint.Attachment{Network: "mknet", ContainerID: "innocent", IfName: "eth0"}
	g := l.daemon.put(other)
	l.daemon.onCreate = func(ep *endpoint.Endpoint) { ep.Generation, ep.Attachment = g, other }
	l.fails(l.add(), CodeBadReply)
	if _, err := l.daemon.answerGet(g); err != nil {
		t.Error("the innocent endpoint is gone")
	}
}

func TestUnreadableAnswersAreRolledBack(t *testing.T) {
	for name, body := range map[string]string{"garbage": "hello", "empty object": "{}", "cut": `{"generation":"`, "list": "[]"} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			l.daemon.raw["POST /v1/endpoints"] = body
			l.fails(l.add(), CodeBadReply, "unexpected answer")
			l.unchanged()
		})
	}
}

func TestRollbackThatFailsIsTold(t *testing.T) {
	l := newLab(t)
	l.daemon.onCreate = func(ep *endpoint.Endpoint) { ep.MTUBytes = 0 }
	l.daemon.fail["POST /v1/delete"] = api.Errorf(api.Internal, "store is broken")
	l.fails(l.add(), CodeBadReply, "mtu 0", "store is broken", "roll back")
}

func TestRollbackThatCannotReachMknetdIsQueued(t *testing.T) {
	l := newLab(t)
	l.daemon.hang["POST /v1/delete"] = true
	l.rollbackIsQueued()
}

// rollbackIsQueued makes an ADD whose answer does not fit and looks for its undo.
func (l *lab) rollbackIsQueued() {
	l.t.Helper()
	var g endpoint.Generation
	l.daemon.onCreate = func(ep *endpoint.Endpoint) { g = ep.Generation; ep.MTUBytes = 0 }
	l.fails(l.add(), CodeBadReply, "mtu 0")
	if q := queued(l.t); len(q) != 1 || q[0].Generation != g || q[0].Attachment != l.att() {
		l.t.Errorf("queue %+v, want the generation %s", q, g)
	}
}

// Nobody makes the DEL of a rollback again: to the caller there is no endpoint.
func TestRollbackThatIsRefusedForNowIsQueued(t *testing.T) {
	for _, refusal := range []*api.Error{
		api.Errorf(api.Unavailable, "no file descriptor left"),
		api.Retryablef(api.ResourceExhausted, "too many connections"),
	} {
		t.Run(string(refusal.Code), func(t *testing.T) {
			l := newLab(t)
			l.daemon.fail["POST /v1/delete"] = refusal
			l.rollbackIsQueued()
		})
	}
}

// Nor when nobody reads the result.
func TestUndeliveredResultIsTakenBackLater(t *testing.T) {
	l := newLab(t)
	l.daemon.fail["POST /v1/delete"] = api.Retryablef(api.ResourceExhausted, "too many connections")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := l.command(ctx, l.add())
	cmd.Stdout = w
	if err := cmd.Run(); err == nil {
		t.Error("exit code 0 with nobody to read the result")
	}
	_ = w.Close()
	if q := queued(t); len(q) != 1 || q[0].Generation.IsZero() || q[0].Attachment != l.att() {
		t.Errorf("queue %+v, want the generation that was made", q)
	}
}

// A cache that cannot be used refuses the ADD before anything is made.
func TestUnsafeCacheRefusesTheAdd(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, path string) error{
		"symbolic link": func(t *testing.T, path string) error { return os.Symlink(t.TempDir(), path) },
		"open to others": func(_ *testing.T, path string) error {
			if err := os.Mkdir(path, 0o755); err != nil {
				return err
			}
			return os.Chmod(path, 0o755)
		},
		"of another user": func(_ *testing.T, path string) error {
			if err := os.Mkdir(path, 0o700); err != nil {
				return err
			}
			return os.Chown(path, 12345, 12345)
		},
		"a file": func(_ *testing.T, path string) error { return os.WriteFile(path, nil, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			if err := spoil(t, l.cache); err != nil {
				t.Fatal(err)
			}
			l.fails(l.add(), 5, l.cache)
			if calls := l.daemon.called(); len(calls) != 0 {
				t.Errorf("called %v", calls)
			}
		})
	}
}

// A generation that cannot be cached is rolled back.
func TestUncacheableAddIsRolledBack(t *testing.T) {
	t.Run("disk full", func(t *testing.T) {
		l := newLab(t)
		mount := t.TempDir()
		if err := unix.Mount("tmpfs", mount, "tmpfs", 0, "size=64k,mode=0700"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(mount, unix.MNT_DETACH) })
		l.cache = filepath.Join(mount, "cache")
		l.daemon.onCreate = func(*endpoint.Endpoint) {
			fill := make([]byte, 1<<20)
			_ = os.WriteFile(filepath.Join(mount, "fill"), fill, 0o600) // as much as goes
		}
		l.fails(l.add(), 5, "no space left", "mknet/c1/eth0")
		if n := l.daemon.count(); n != 0 {
			t.Errorf("%d endpoints are left", n)
		}
	})
	t.Run("deleted meanwhile", func(t *testing.T) {
		l := newLab(t)
		l.daemon.onCreate = func(*endpoint.Endpoint) {
			store, err := cache.Open(l.cache, false)
			if err != nil {
				t.Error(err)
				return
			}
			defer store.Close()
			if err := store.Remove(l.att()); err != nil {
				t.Error(err)
			}
		}
		l.fails(l.add(), 11, "meanwhile")
		l.unchanged()
	})
}

// A caller that does not read the result has not got an endpoint.
func TestResultThatCannotBeDeliveredIsTakenBack(t *testing.T) {
	l := newLab(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := l.command(ctx, l.add())
	cmd.Stdout = w
	if err := cmd.Run(); err == nil {
		t.Error("exit code 0 with nobody to read the result")
	}
	_ = w.Close()
	l.unchanged()
}

func TestC36_HungDaemonIsAnsweredBeforeTheCallerGivesUp(t *testing.T) {
	l := newLab(t)
	l.daemon.hang["POST /v1/endpoints"] = true
	in := l.add()
	ctx, cancel := context.WithTimeout(context.Background(), AddBudget+10*time.Second)
	defer cancel()
	started := time.Now()
	out, err := l.command(ctx, in).Output()
	if took := time.Since(started); err == nil || took > AddBudget || !strings.Contains(string(out), `"code": 11`) {
		t.Errorf("after %s: %v, %s; want code 11 within %s", took, err, out, AddBudget)
	}
	// Whether mknetd made it is not known: a deferred DEL and the DEL itself go by
	// attachment.
	if q := queued(t); len(q) != 1 || !q[0].Generation.IsZero() || q[0].Attachment != l.att() {
		t.Errorf("queue %+v, want one of unknown generation", q)
	}
	l.daemon.put(l.att())
	l.daemon.called()
	l.ok(invocation{verb: "DEL"})
	if n := l.daemon.count(); n != 0 {
		t.Errorf("%d endpoints are left", n)
	}
}

// A runtime that is told to stop ends the ADD in order.
func TestTerminatedAddAnswersAndQueues(t *testing.T) {
	l := newLab(t)
	l.daemon.hang["POST /v1/endpoints"] = true
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := l.command(ctx, l.add())
	var stdout strings.Builder
	cmd.Stdout = &stdout
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	netlab.Eventually(t, 30*time.Second, func() error {
		if slices.Contains(l.daemon.called(), "POST /v1/endpoints") {
			return nil
		}
		return fmt.Errorf("mknetd was not asked yet")
	})
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || !strings.Contains(stdout.String(), `"code": 11`) {
		t.Errorf("%v, %s; want code 11", err, stdout.String())
	}
	if q := queued(t); len(q) != 1 {
		t.Errorf("queue %+v, want one", q)
	}
}

func TestUnreachableDaemonChangesNothingOnAdd(t *testing.T) {
	l := newLab(t)
	l.daemon.socket = "/nonexistent/mknetd.sock"
	l.fails(l.add(), 11, "/nonexistent/mknetd.sock", "running?")
	l.unchanged()
}

// An ADD first does what the queue still holds of its own attachment.
func TestAddSettlesItsOwnDeferredDel(t *testing.T) {
	l := newLab(t)
	res := l.added(l.add())
	if res == nil {
		t.Fatal("no result")
	}
	socket := l.daemon.socket
	l.daemon.socket = "/nonexistent/mknetd.sock"
	l.ok(invocation{verb: "DEL", netns: l.ns.Path()})
	q, err := delqueue.Open(delqueue.DefaultDir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = q.Close() }()
	if got := queued(t); len(got) != 1 || got[0].Cookie != fakeCookie {
		t.Fatalf("queue %+v, want one with the namespace's cookie", got)
	}
	l.daemon.socket = socket
	l.daemon.called()
	l.ok(l.add())
	if calls := l.daemon.called(); !slices.Equal(calls, []string{"DELETE /v1/endpoints/G", "POST /v1/endpoints"}) {
		t.Errorf("called %v, want the deferred DEL first", calls)
	}
	if got := queued(t); len(got) != 0 {
		t.Errorf("queue %+v, want it empty", got)
	}
}

func TestAddFailsWhereItsDeferredDelIsRefused(t *testing.T) {
	l := newLab(t)
	l.ok(l.add())
	socket := l.daemon.socket
	l.daemon.socket = "/nonexistent/mknetd.sock"
	l.ok(invocation{verb: "DEL"})
	l.daemon.socket = socket
	l.daemon.fail["DELETE /v1/endpoints/G"] = api.Retryablef(api.FailedPrecondition, "its shim lives")
	l.fails(l.add(), 11, "its shim lives", "deferred DEL")
	if got := queued(t); len(got) != 1 {
		t.Errorf("queue %+v, want the entry kept", got)
	}
}
