package datapath

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/classifier"
	"mknet/mknetd/internal/mapdump"
	"mknet/spec/endpoint"
	"mknet/spec/policy"
	"mknet/tests/bench/report"
)

// perPacket is what from_child takes of the processor for a frame of endpoint i, in
// nanoseconds.
func (l *policyLab) perPacket(i int, f frame) float64 {
	l.t.Helper()
	const repeat = 20_000
	o := ebpf.RunOptions{Data: f.bytes(), Context: skb{IfIndex: l.index[i]}, Repeat: repeat}
	before := processorTime(l.t)
	if _, err := l.d.names["from_child"].Run(&o); err != nil {
		l.t.Fatal(err)
	}
	return float64(processorTime(l.t)-before) / repeat
}

// processorTime is what this process has used so far.
func processorTime(t testing.TB) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// ruleSet is an ACL for one endpoint with n rules of egress, of which only the last
// matches what the benchmark sends.
func ruleSet(name string, n int, last policy.Action, at netip.Addr) []policy.Object {
	header := func(k policy.Kind) policy.Header {
		return policy.Header{APIVersion: policy.APIVersion, Kind: k, Metadata: policy.Metadata{Name: name}}
	}
	acl := &policy.NetworkACL{Header: header(policy.KindNetworkACL)}
	for i := range n - 1 {
		cidr := netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)}), 32)
		acl.Spec.Egress = append(acl.Spec.Egress, policy.ACLRule{Priority: uint16(i + 1), Action: policy.Allow, Protocol: policy.TCP, CIDR: cidr, Ports: []policy.PortRange{{From: uint16(1000 + i), To: uint16(1000 + i)}}})
	}
	acl.Spec.Egress = append(acl.Spec.Egress, policy.ACLRule{Priority: uint16(n), Action: last, Protocol: policy.AnyProtocol})
	return []policy.Object{acl, &policy.Attachment{Header: header(policy.KindAttachment), Spec: policy.AttachmentSpec{NetworkACL: &policy.Ref{Name: name}, Subnets: []netip.Prefix{netip.PrefixFrom(at, 32)}}}}
}

// cost is what something took, by the clock and of the processor: on a busy machine
// only the second says much.
type cost struct{ wall, cpu time.Duration }

func (c cost) String() string {
	return fmt.Sprintf("%s, %s of the processor", c.wall.Round(time.Millisecond), c.cpu.Round(time.Millisecond))
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// costOf runs f, which must succeed. Nothing else may work in this process meanwhile.
func costOf(t testing.TB, f func() error) cost {
	t.Helper()
	runtime.GC()
	begin, before := time.Now(), processorTime(t)
	if err := f(); err != nil {
		t.Fatal(err)
	}
	return cost{time.Since(begin), processorTime(t) - before}
}

// tableCosts are medians of passes over a full table: the listing, a dump with a
// filter, the collector where a fourth of the entries has ended, and where none has.
func (l *policyLab) tableCosts() map[string]cost {
	l.t.Helper()
	const rounds = 5
	p := l.d.Policy()
	took := map[string][]cost{}
	collect := func() error { _, err := p.Collect(); return err }
	for range rounds {
		l.fill(DefaultFlows)
		for _, c := range []struct {
			name string
			pass func() error
		}{
			{"list", func() error { _, err := p.Flows(); return err }},
			{"dump", func() error { // as mknetd bpf dump reads it, for what is not there
				_, err := mapdump.Read(filepath.Join(l.d.cfg.Dir, mapsDir), mapdump.Request{Map: "policy_conntrack", Filters: []string{"proto=TCP"}})
				return err
			}},
			{"collect-65536", collect},
			{"collect-0", collect},
		} {
			took[c.name] = append(took[c.name], costOf(l.t, c.pass))
		}
	}
	medians := map[string]cost{}
	for name, costs := range took {
		var wall, cpu []float64
		for _, c := range costs {
			wall, cpu = append(wall, float64(c.wall)), append(cpu, float64(c.cpu))
		}
		medians[name] = cost{time.Duration(report.Median(wall)), time.Duration(report.Median(cpu))}
	}
	return medians
}

// BenchmarkPolicy is `make bench-policy`: what policy costs a packet, a change and
// the memory, at 16, 128 and 1,024 rules. Times are of the processor, since the wall
// clock is everybody's, and ratios are medians of those within a round, because a
// busy machine moves all variants together. With BENCH_OUT=DIR it
// writes policy.json, to which `bench policy` of tests/bench adds.
func BenchmarkPolicy(b *testing.B) {
	counts := []int{16, 128, 1024}
	l := newPolicyLab(b, Config{Flows: DefaultFlows}, endpoint.Multikernel, "10.9.0.10", "10.9.0.11", "10.9.0.12", "10.9.0.20", "10.9.0.21", "10.9.0.22", "10.9.0.30")
	var figures []report.Figure
	say := func(name string, value float64, unit string) {
		figures = append(figures, report.Figure{Name: name, Value: value, Unit: unit})
	}
	goal := func(name string, value float64, unit string, bound float64) {
		figures = append(figures, report.Figure{Name: name, Value: value, Unit: unit}.Judge(report.Goal{AtMost: true, Bound: bound}))
	}
	var all []policy.Object
	for i, n := range counts {
		all = append(all, ruleSet(fmt.Sprint("deny", n), n, policy.Deny, l.eps[i].Address)...)
		all = append(all, ruleSet(fmt.Sprint("allow", n), n, policy.Allow, l.eps[3+i].Address)...)
	}
	for i, n := range counts {
		var took []float64
		for range 5 {
			l.apply(nil)
			begin := time.Now()
			l.apply(all[4*i : 4*i+2])
			took = append(took, float64(time.Since(begin).Microseconds())/1000)
		}
		c, _ := classifier.ClassOf(all[4*i].(*policy.NetworkACL).Rules(policy.Egress).Size())
		say(fmt.Sprintf("change.%d-rules", n), report.Median(took), "ms")
		say(fmt.Sprintf("memory.%d-rules", n), float64(c.KernelBytes())/1024, "KiB")
	}
	l.apply(all)
	cost := make([][]float64, len(l.eps))
	var newFlow, knownFlow []float64
	for b.Loop() {
		for range 15 {
			for i := range l.eps {
				f := frame{ip: &ipv4{src: l.eps[i].Address, dst: netip.MustParseAddr(peerAddr), proto: protoUDP, payload: udp(1, 53)}}
				cost[i] = append(cost[i], l.perPacket(i, f))
			}
			last := func(i int) float64 { return cost[i][len(cost[i])-1] }
			newFlow, knownFlow = append(newFlow, last(2)/last(0)), append(knownFlow, last(5)/last(3))
		}
	}
	say("none-attached", report.Median(cost[6]), "ns")
	for i, n := range counts {
		say(fmt.Sprintf("new-flow.%d-rules", n), report.Median(cost[i]), "ns")
		say(fmt.Sprintf("known-flow.%d-rules", n), report.Median(cost[3+i]), "ns")
	}
	goal("new-flow.1024-rules/16-rules", report.Median(newFlow), "x", 1.15)
	goal("known-flow.1024-rules/16-rules", report.Median(knownFlow), "x", 1.15)

	costs := l.tableCosts()
	for _, name := range []string{"list", "dump", "collect-65536", "collect-0"} {
		c := costs[name]
		goal(name+".262144-entries", milliseconds(c.cpu), "ms", 500)
		say(name+"-wall.262144-entries", milliseconds(c.wall), "ms")
	}
	if err := report.Write("policy", figures); err != nil {
		b.Fatal(err)
	}
	for _, f := range figures {
		verdict := ""
		if f.Met != nil {
			verdict = fmt.Sprintf("%s: %t", f.Goal, *f.Met)
		}
		fmt.Fprintf(os.Stdout, "%-32s %9.2f %-4s %s\n", f.Name, f.Value, f.Unit, verdict)
	}
}
