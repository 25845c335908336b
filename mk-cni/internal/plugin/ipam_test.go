package plugin

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mknet/mk-cni/internal/cache"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// pool is an IPAM plugin made of shell: a lease is a file of the attachment's name,
// as with host-local, and a second one is refused.
type pool struct {
	t   *testing.T
	dir string
}

const poolScript = `#!/bin/sh
dir=$(dirname "$0")
lease=$dir/leases/$CNI_CONTAINERID-$CNI_IFNAME
echo "$CNI_COMMAND $CNI_CONTAINERID" >> $dir/calls
cat > $dir/stdin
if [ -e $dir/fail-$CNI_COMMAND ]; then cat $dir/fail-$CNI_COMMAND; exit 1; fi
case $CNI_COMMAND in
ADD)
	if [ -e $lease ]; then echo '{"code":999,"msg":"duplicate allocation"}'; exit 1; fi
	touch $lease
	echo '{"cniVersion":"1.1.0","ips":[{"address":"10.45.0.7/24","gateway":"10.45.0.1"}],"routes":[{"dst":"0.0.0.0/0"},{"dst":"10.9.0.0/16"}],"dns":{"nameservers":["9.9.9.9"]}}' ;;
DEL) rm -f $lease ;;
CHECK) [ -e $lease ] || { echo '{"code":999,"msg":"no lease"}'; exit 1; } ;;
esac
`

func newPool(t *testing.T) *pool {
	t.Helper()
	p := &pool{t, t.TempDir()}
	if err := os.Mkdir(p.dir+"/leases", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p.dir+"/pool", []byte(poolScript), 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

// fail has the plugin fail a verb with an error object; an empty one mends it.
func (p *pool) fail(verb, object string) {
	p.t.Helper()
	path := p.dir + "/fail-" + verb
	err := os.Remove(path)
	if object != "" {
		err = os.WriteFile(path, []byte(object), 0o644)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.t.Fatal(err)
	}
}

func (p *pool) leases() []string { return files(p.t, p.dir+"/leases") }

// called returns the plugin's calls so far and forgets them.
func (p *pool) called() string {
	p.t.Helper()
	data, err := os.ReadFile(p.dir + "/calls")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.t.Fatal(err)
	}
	_ = os.Remove(p.dir + "/calls")
	return strings.Join(strings.Fields(string(data)), " ")
}

// with makes an invocation delegate to the pool.
func (p *pool) with(in invocation, members ...string) invocation {
	in.path = "/nonexistent:" + p.dir
	in.members = strings.Join(append([]string{`"mode":"veth","ipam":{"type":"pool","some":"thing"}`}, members...), ",")
	return in
}

// Every verb of a delegating network runs the plugin too; what it gave is what
// mknetd is asked for and what the result says.
func TestDelegatedAddress(t *testing.T) {
	l, p := newLab(t), newPool(t)
	in := p.with(l.add())
	res := l.added(in)
	want := &api.IPAMResult{
		Type: "pool", Address: netip.MustParsePrefix("10.45.0.7/24"), Gateway: netip.MustParseAddr("10.45.0.1"),
		Routes: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("10.9.0.0/16")},
	}
	if got := l.daemon.lastReq; fmt.Sprint(got.IPAM) != fmt.Sprint(want) || !slices.Equal(got.DNS.Nameservers, []string{"9.9.9.9"}) {
		t.Errorf("asked for %+v with dns %v, want %+v", got.IPAM, got.DNS, want)
	}
	got := fmt.Sprintf("%v %v", res["ips"], res["routes"])
	if wantResult := "[map[address:10.45.0.7/24 gateway:10.45.0.1 interface:1]] [map[dst:10.45.0.1/32] map[dst:0.0.0.0/0 gw:10.45.0.1 mtu:1400] map[dst:10.9.0.0/16 gw:10.45.0.1 mtu:1400]]"; got != wantResult {
		t.Errorf("result\n%s\nwant\n%s", got, wantResult)
	}
	if data, err := os.ReadFile(p.dir + "/stdin"); err != nil || string(data) != l.conf(in) {
		t.Errorf("the plugin read\n%s\nwant\n%s", data, l.conf(in))
	}
	check := p.with(invocation{verb: "CHECK", netns: l.ns.Path()}, withPrev(res))
	l.ok(check)
	l.ok(p.with(invocation{verb: "STATUS", bareEnv: true, env: []string{"CNI_PATH=" + p.dir}}))
	l.ok(p.with(invocation{verb: "GC", bareEnv: true, env: []string{"CNI_PATH=" + p.dir}}, `"cni.dev/valid-attachments":[{"containerID":"c1","ifname":"eth0"}]`))
	if got := p.called(); got != "ADD c1 CHECK c1 STATUS GC" {
		t.Errorf("the plugin was called with %s", got)
	}
	if err := os.Remove(p.dir + "/leases/c1-eth0"); err != nil {
		t.Fatal(err)
	}
	l.fails(check, CodeCheckFailed, "ipam pool: CHECK: no lease (its code 999)")
	l.ok(p.with(invocation{verb: "DEL"}))
	l.ok(p.with(invocation{verb: "DEL"}))
	if got := p.called(); got != "CHECK c1 DEL c1 DEL c1" {
		t.Errorf("the plugin was called with %s", got)
	}
	l.unchanged()
}

// The configuration's and the runtime's dns go before the plugin's.
func TestDelegatedDNS(t *testing.T) {
	l, p := newLab(t), newPool(t)
	l.ok(p.with(l.add(), `"dns":{"nameservers":["1.1.1.1"]}`))
	if got := l.daemon.lastReq.DNS.Nameservers; !slices.Equal(got, []string{"1.1.1.1"}) {
		t.Errorf("dns %v, want the configuration's", got)
	}
}

// Whatever fails after the plugin gave an address, the address is given back.
func TestFailedAddGivesTheAddressBack(t *testing.T) {
	for name, tc := range map[string]struct {
		spoil func(*lab, *pool)
		code  uint
		words string
		calls string
	}{
		"the plugin itself, busy": {func(_ *lab, p *pool) { p.fail("ADD", `{"code":11,"msg":"busy"}`) }, 11, "ipam pool: ADD: busy", "ADD c1 DEL c1"},
		"the plugin itself":       {func(_ *lab, p *pool) { p.fail("ADD", `{"code":100,"msg":"its own"}`) }, CodeIPAM, "its own", "ADD c1 DEL c1"},
		"mknetd refuses": {func(l *lab, _ *pool) {
			l.daemon.fail["POST /v1/endpoints"] = api.Errorf(api.FailedPrecondition, "overlaps")
		}, 103, "overlaps", "ADD c1 DEL c1"},
		"mknetd's answer does not fit": {func(l *lab, _ *pool) {
			l.daemon.onCreate = func(ep *endpoint.Endpoint) { ep.Address = netip.MustParseAddr("10.45.0.8") }
		}, CodeBadReply, "ipam pool gave", "ADD c1 DEL c1"},
		"another gateway": {func(l *lab, _ *pool) {
			l.daemon.onCreate = func(ep *endpoint.Endpoint) { ep.Gateway = netip.MustParseAddr("10.45.0.9") }
		}, CodeBadReply, "gateway is 10.45.0.9", "ADD c1 DEL c1"},
		"mknetd is away":  {func(l *lab, _ *pool) { _ = l.daemon.server.Close() }, 11, "mknetd.sock", ""},
		"a live endpoint": {func(l *lab, _ *pool) { l.daemon.put(l.att()) }, 100, "already has the endpoint", ""},
	} {
		t.Run(name, func(t *testing.T) {
			l, p := newLab(t), newPool(t)
			tc.spoil(l, p)
			l.fails(p.with(l.add()), tc.code, tc.words)
			if got := p.called(); got != tc.calls || len(p.leases()) != 0 {
				t.Errorf("the plugin was called with %q, want %q; leases %v", got, tc.calls, p.leases())
			}
			if c := l.cacheFiles(); len(c) != 0 {
				t.Errorf("cache %v is left", c)
			}
		})
	}
}

// The failure of an undo is told, and what the plugin says does not hide the cause.
func TestFailedReleaseIsTold(t *testing.T) {
	l, p := newLab(t), newPool(t)
	l.daemon.fail["POST /v1/endpoints"] = api.Errorf(api.ResourceExhausted, "no place")
	p.fail("DEL", `{"code":5,"msg":"disk full"}`)
	l.fails(p.with(l.add()), 104, "no place", "release the address", "disk full")
	l.fails(p.with(invocation{verb: "DEL"}), 5, "release the address", "disk full")
	p.fail("DEL", "")
	l.ok(p.with(invocation{verb: "DEL"}))
	if len(p.leases()) != 0 {
		t.Errorf("leases %v", p.leases())
	}
}

// A DEL that mknetd cannot hear is queued, and the address is released; one that
// mknetd refuses keeps the address for the next try.
func TestDelReleasesTheAddress(t *testing.T) {
	l, p := newLab(t), newPool(t)
	l.ok(p.with(l.add()))
	l.daemon.fail["DELETE /v1/endpoints/G"] = api.Errorf(api.Internal, "a defect")
	l.fails(p.with(invocation{verb: "DEL"}), 105, "a defect")
	if len(p.leases()) != 1 {
		t.Fatalf("leases %v after a DEL that mknetd refused", p.leases())
	}
	_ = l.daemon.server.Close()
	l.ok(p.with(invocation{verb: "DEL"}))
	if q := queued(t); len(q) != 1 || len(p.leases()) != 0 {
		t.Errorf("queue %v, leases %v", q, p.leases())
	}
}

// GC releases what it removes, and what an ADD left that was killed between the
// plugin and mknetd.
func TestGCReleasesTheAddress(t *testing.T) {
	l, p := newLab(t), newPool(t)
	for _, id := range []string{"a", "b"} {
		in := p.with(l.add())
		in.containerID = id
		l.ok(in)
	}
	// What a killed ADD leaves: its cache entry and the plugin's lease.
	store, err := cache.Open(l.cache, true)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	boot, err := bootID()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Begin(endpoint.Attachment{Network: "mknet", ContainerID: "k", IfName: "eth0"}, boot); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(p.dir, "leases", "k-eth0"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	gc := p.with(invocation{verb: "GC", bareEnv: true, env: []string{"CNI_PATH=" + p.dir}}, `"cni.dev/valid-attachments":[{"containerID":"b","ifname":"eth0"}]`)
	p.fail("DEL", `{"code":5,"msg":"disk full"}`)
	l.fails(gc, CodeIncomplete, "disk full")
	if len(l.cacheFiles()) != 3 {
		t.Errorf("cache %v: an entry went whose address stays", l.cacheFiles())
	}
	p.fail("DEL", "")
	l.ok(gc)
	if got := p.leases(); !slices.Equal(got, []string{"b-eth0"}) || len(l.cacheFiles()) != 1 {
		t.Errorf("leases %v, cache %v; want those of b alone", got, l.cacheFiles())
	}
}

func TestDelegatedStatus(t *testing.T) {
	l, p := newLab(t), newPool(t)
	l.daemon.health.Causes = []api.HealthCause{{Code: api.CausePodPools, Message: "no pool"}}
	status := p.with(invocation{verb: "STATUS"})
	l.ok(status) // mknetd's pools do not concern it
	p.fail("STATUS", `{"code":999,"msg":"full"}`)
	l.fails(status, 50, "ipam pool: STATUS: full")
	p.fail("STATUS", `{"code":51,"msg":"half"}`)
	l.fails(status, 51, "half")
	status.path = "/nonexistent"
	l.fails(status, 50, `CNI_PATH "/nonexistent"`, `"pool"`)
}

// Without the plugin nothing is begun.
func TestNoDelegate(t *testing.T) {
	l, p := newLab(t), newPool(t)
	in := p.with(l.add())
	in.path = "/nonexistent"
	l.fails(in, 4, "CNI_PATH", "pool")
	l.unchanged()
	in = p.with(invocation{verb: "DEL", path: "/nonexistent"})
	in.path = "/nonexistent"
	l.fails(in, 4, "CNI_PATH")
	multikernel := l.add()
	multikernel.members, multikernel.path = `"ipam":{"type":"pool"}`, p.dir
	l.fails(multikernel, 2, "ipam.type", "mknetd's pool")
	l.unchanged()
	if got := p.called(); got != "" {
		t.Errorf("the plugin was called with %s", got)
	}
}
