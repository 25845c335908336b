package datapath

import (
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"mknet/spec/endpoint"
	"mknet/spec/policy"
	"mknet/tests/bench/report"
)

// tracePackets are what programs have most to do with: an endpoint without policy, a
// known flow, and a packet of a pod to the world.
func tracePackets(b testing.TB) (l *policyLab, run map[string]func(p *ebpf.Program) float64, programs map[string]string) {
	l = newPolicyLab(b, Config{}, endpoint.Veth, "10.9.0.10", "10.9.0.11")
	l.apply(ruleSet("allow", 16, policy.Allow, l.eps[1].Address))
	perPacket := func(p *ebpf.Program, i int, f frame) float64 {
		// Less than a time slice: what else the machine does comes between two, not within.
		const repeat = 2_000
		o := ebpf.RunOptions{Data: f.bytes(), Context: skb{IfIndex: l.index[i]}, Repeat: repeat}
		begin := time.Now()
		if _, err := p.Run(&o); err != nil {
			b.Fatal(err)
		}
		return float64(time.Since(begin).Nanoseconds()) / repeat
	}
	packet := func(i int) frame {
		return frame{
			src: l.eps[i].Generation.PeerMAC(), dst: l.eps[i].Generation.HostMAC(),
			ip: &ipv4{src: l.eps[i].Address, dst: netip.MustParseAddr(peerAddr), proto: protoUDP, payload: udp(1, 53)},
		}
	}
	programs = map[string]string{"child-no-policy": "from_child", "child-known-flow": "from_child", "pod-no-policy": "from_container", "pod-known-flow": "from_container"}
	run = map[string]func(p *ebpf.Program) float64{}
	for name := range programs {
		i := 0
		if name == "child-known-flow" || name == "pod-known-flow" {
			i = 1
		}
		run[name] = func(p *ebpf.Program) float64 { return perPacket(p, i, packet(i)) }
	}
	return l, run, programs
}

// BenchmarkTrace says what a packet costs more while a trace of another flow runs.
// Ratios are medians of those within a round. With BENCH_OUT=DIR it writes trace.json.
func BenchmarkTrace(b *testing.B) {
	l, run, programs := tracePackets(b)
	none, other := map[string][]float64{}, map[string][]float64{}
	for b.Loop() {
		for range 201 {
			for name, once := range run {
				none[name] = append(none[name], once(l.d.names[programs[name]]))
			}
			tr, err := l.d.Trace(TraceFilter{From: netip.MustParseAddr("192.0.2.1"), Protocol: policy.TCP, Port: 80}, time.Hour)
			if err != nil {
				b.Fatal(err)
			}
			for name, once := range run {
				other[name] = append(other[name], once(l.d.names[programs[name]]))
			}
			if err := tr.Close(); err != nil {
				b.Fatal(err)
			}
		}
	}
	var figures []report.Figure
	for name := range run {
		var ratios []float64
		for i := range none[name] {
			ratios = append(ratios, other[name][i]/none[name][i])
		}
		figures = append(figures,
			report.Figure{Name: name + ".no-session", Value: report.Median(none[name]), Unit: "ns"},
			report.Figure{Name: name + ".other-session", Value: report.Median(other[name]), Unit: "ns"},
			report.Figure{Name: name + ".other-session/no-session", Value: report.Median(ratios), Unit: "x"})
	}
	if err := report.Write("trace", figures); err != nil {
		b.Fatal(err)
	}
	for _, f := range figures {
		fmt.Fprintf(os.Stdout, "%-44s %9.2f %s\n", f.Name, f.Value, f.Unit)
	}
}
