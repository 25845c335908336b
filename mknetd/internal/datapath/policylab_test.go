package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/enforcer"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
)

// policyLab is endpoints under documents, in the kernel's maps and in the model.
// Frames are handed to the programs by BPF_PROG_TEST_RUN.
type policyLab struct {
	t       testing.TB
	d       *Datapath
	enforce *enforcer.Enforcer
	eps     []endpoint.Endpoint
	index   []uint32
	pools   policy.Pools
	numbers enforcer.Numbers
	world   *policy.World
	probes  bool
}

// newPolicyLab makes one endpoint a address; their names are ep0, ep1 and so on.
func newPolicyLab(t testing.TB, cfg Config, mode endpoint.Mode, addresses ...string) *policyLab {
	t.Helper()
	l := &policyLab{t: t, d: open(t, cfg), pools: policy.Pools{"all": netip.MustParsePrefix("10.9.0.0/16")}, numbers: enforcer.Numbers{}}
	for _, a := range addresses {
		ep := pod(a, 1500)
		if ep.Mode = mode; mode == endpoint.Multikernel {
			ep.HostLink = ep.Generation.HostLink()
		}
		addLink(t, ep)
		objects := l.d.Objects(ep)
		if err := objects[len(objects)-1].Ensure(context.Background()); err != nil {
			t.Fatal(err)
		}
		l.add(ep)
	}
	l.begin()
	return l
}

// add takes an endpoint whose link is there.
func (l *policyLab) add(ep endpoint.Endpoint) {
	l.t.Helper()
	ep.ContainerID = fmt.Sprint("ep", len(l.eps))
	link, err := l.d.linkByName(ep.HostLink)
	if err != nil || link == nil {
		l.t.Fatalf("link %s: %v", ep.HostLink, err)
	}
	l.eps, l.index = append(l.eps, ep), append(l.index, uint32(link.Attrs().Index))
}

// begin opens the enforcer, without any document.
func (l *policyLab) begin() {
	l.t.Helper()
	var err error
	if l.enforce, err = enforcer.Open(l.d.Policy(), l.pools); err != nil {
		l.t.Fatal(err)
	}
}

// documents reads documents in a short form: "acl NAME SPEC", "sg NAME SPEC",
// "at NAME SPEC", one a line.
func documents(t testing.TB, short string) []policy.Object {
	t.Helper()
	var text strings.Builder
	for line := range strings.Lines(short) {
		parts := strings.SplitN(strings.TrimSpace(line), " ", 3)
		if len(parts) != 3 {
			continue
		}
		kind := map[string]policy.Kind{"acl": policy.KindNetworkACL, "sg": policy.KindSecurityGroup, "at": policy.KindAttachment}[parts[0]]
		fmt.Fprintf(&text, "---\napiVersion: mknet/v1\nkind: %s\nmetadata: {name: %s}\nspec: %s\n", kind, parts[1], parts[2])
	}
	if text.Len() == 0 {
		return nil
	}
	objects, err := policy.Parse([]byte(text.String()))
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

// apply puts documents in force, in the kernel and in the model.
func (l *policyLab) apply(objects []policy.Object) {
	l.t.Helper()
	if err := l.applyTo(l.enforce, objects); err != nil {
		l.t.Fatal(err)
	}
}

func (l *policyLab) applyTo(e *enforcer.Enforcer, objects []policy.Object) error {
	l.t.Helper()
	set, err := policy.NewSet(objects...)
	if err != nil {
		l.t.Fatal(err)
	}
	for _, o := range objects {
		if _, ok := l.numbers[o.Key()]; !ok && o.Key().Kind != policy.KindAttachment {
			l.numbers[o.Key()] = uint32(len(l.numbers) + 1)
		}
	}
	var wanted []enforcer.Endpoint
	var modelled []policy.Endpoint
	for _, ep := range l.eps {
		w := l.wanted(ep)
		wanted = append(wanted, w)
		modelled = append(modelled, w.Endpoint)
	}
	l.world = policy.NewWorld(set, l.pools, modelled...)
	return e.Apply(set, l.numbers, wanted)
}

// wanted is an endpoint as the engine names it to the enforcer.
func (l *policyLab) wanted(ep endpoint.Endpoint) enforcer.Endpoint {
	p := policy.Endpoint{Address: ep.Address, Network: "net", Name: ep.ContainerID}
	return enforcer.Endpoint{Endpoint: p, ID: Identity(ep.Generation), Probes: l.probes}
}

// number is that of the policy of this name, whatever its kind.
func (l *policyLab) number(name string) uint32 {
	l.t.Helper()
	for key, n := range l.numbers {
		if key.Name == name {
			return n
		}
	}
	l.t.Fatalf("no policy is called %q", name)
	return 0
}

// pass hands a packet to the program of endpoint i and reports whether it went on.
func (l *policyLab) pass(d policy.Direction, i int, p ipv4) bool {
	l.t.Helper()
	return l.run(d, i, frame{ip: &p}, skb{}) != retDrop
}

func (l *policyLab) run(d policy.Direction, i int, f frame, in skb) uint32 {
	l.t.Helper()
	name := map[bool]map[policy.Direction]string{
		true:  {policy.Egress: "from_container", policy.Ingress: "to_container"},
		false: {policy.Egress: "from_child", policy.Ingress: "to_child"},
	}[l.eps[i].Mode == endpoint.Veth][d]
	if d == policy.Egress {
		f.src, f.dst = l.eps[i].Generation.PeerMAC(), l.eps[i].Generation.HostMAC()
	} else {
		f.src, f.dst = l.eps[i].Generation.HostMAC(), l.eps[i].Generation.PeerMAC()
	}
	in.IfIndex = l.index[i]
	o := ebpf.RunOptions{Data: f.bytes(), Context: in}
	for {
		ret, err := l.d.names[name].Run(&o)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			l.t.Fatalf("%s: %v", name, err)
		}
		return ret
	}
}

// out and in are a packet that leaves, or enters, endpoint 0; peer is the other end.
func (l *policyLab) out(peer string, proto uint8, payload []byte) bool {
	l.t.Helper()
	return l.pass(policy.Egress, 0, ipv4{src: l.eps[0].Address, dst: netip.MustParseAddr(peer), proto: proto, payload: payload})
}

func (l *policyLab) in(peer string, proto uint8, payload []byte) bool {
	l.t.Helper()
	return l.pass(policy.Ingress, 0, ipv4{src: netip.MustParseAddr(peer), dst: l.eps[0].Address, proto: proto, payload: payload})
}

// reasons returns the counts, and what has been added to before.
func (l *policyLab) reasons(before map[policy.Reason]uint64) map[policy.Reason]uint64 {
	l.t.Helper()
	now, err := l.d.Policy().Reasons()
	if err != nil {
		l.t.Fatal(err)
	}
	for r, n := range before {
		if now[r] -= n; now[r] == 0 {
			delete(now, r)
		}
	}
	return now
}

// forget removes every flow.
func (l *policyLab) forget() {
	l.t.Helper()
	var keys []ctKey
	if err := l.d.Policy().eachFlow(func(k ctKey, _ ctValue) error { keys = append(keys, k); return nil }); err != nil {
		l.t.Fatal(err)
	}
	if len(keys) == 0 {
		return
	}
	if _, err := l.d.objects.PolicyConntrack.BatchDelete(keys, nil); err != nil {
		l.t.Fatal(err)
	}
}

// age makes every flow d nanoseconds older than it is.
func (l *policyLab) age(d int64) {
	l.t.Helper()
	all := map[ctKey]ctValue{}
	if err := l.d.Policy().eachFlow(func(k ctKey, v ctValue) error { all[k] = v; return nil }); err != nil {
		l.t.Fatal(err)
	}
	for k, v := range all {
		v.Seen -= uint64(d)
		if err := l.d.objects.PolicyConntrack.Put(k, v); err != nil {
			l.t.Fatal(err)
		}
	}
}

// fill puts n entries of endpoint 0 into the table, of which every fourth has ended.
func (l *policyLab) fill(n int) {
	l.t.Helper()
	l.forget()
	for at := 0; at < n; at += collectBatch {
		l.put(at, collectBatch, func(id int) bool { return id%4 == 0 })
	}
}

// put puts n entries of endpoint 0 into the table, numbered from the first on. Those
// that have ended did so an hour ago.
func (l *policyLab) put(first, n int, ended func(id int) bool) {
	l.t.Helper()
	now, err := monotonic()
	if err != nil {
		l.t.Fatal(err)
	}
	owner := address(l.eps[0].Address.As4())
	keys, values := make([]ctKey, n), make([]ctValue, n)
	for i := range keys {
		id := first + i
		keys[i] = ctKey{Source: owner, Destination: address{1, 2, byte(id >> 16), 4}, SourcePort: [2]byte{byte(id >> 8), byte(id)}, Protocol: protoUDP, Hook: uint8(policy.Egress)}
		values[i].Seen = now
		if ended(id) {
			values[i].Seen = now - uint64(time.Hour)
		}
	}
	if _, err := l.d.objects.PolicyConntrack.BatchUpdate(keys, values, &ebpf.BatchOptions{}); err != nil {
		l.t.Fatal(err)
	}
}

func (l *policyLab) flows() int {
	l.t.Helper()
	list, err := l.d.Policy().Flows()
	if err != nil {
		l.t.Fatal(err)
	}
	return len(list)
}

const (
	protoICMP = unix.IPPROTO_ICMP
	protoTCP  = unix.IPPROTO_TCP
	protoUDP  = unix.IPPROTO_UDP
	protoGRE  = unix.IPPROTO_GRE
	protoESP  = unix.IPPROTO_ESP
	protoSCTP = unix.IPPROTO_SCTP
)

// sctp is a common header.
func sctp(sport, dport uint16) []byte { return udp(sport, dport, 0, 0, 0, 0)[:12] }

// longRun is the number of packets that MKNET_POLICY_FUZZ asks for, else def.
func longRun(t testing.TB, def int) int {
	v := os.Getenv("MKNET_POLICY_FUZZ")
	if v == "" {
		return def
	}
	var n int
	if _, err := fmt.Sscan(v, &n); err != nil || n < 1 {
		t.Fatalf("MKNET_POLICY_FUZZ=%s: must be a number of packets", v)
	}
	return n
}
