package ipt

import (
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// sizes are how many endpoints stand beside the one that is measured.
var sizes = []int{0, 1000, 4000}

// crowd puts n endpoints into the tables, a few commits a table, and returns what
// takes them out again.
func (l *lab) crowd(b *testing.B, n int) (undo func()) {
	b.Helper()
	eps := make([]endpoint.Endpoint, n)
	for i := range eps {
		eps[i] = testEndpoint(endpoint.NewGeneration(), uint32(i+100))
		eps[i].Egress = netlab.UplinkName
	}
	for batch := range slices.Chunk(eps, 500) {
		for _, table := range l.fw.tables() {
			var all []string
			for _, ep := range batch {
				p, err := l.fw.part(table, ep)
				if err != nil {
					b.Fatal(err)
				}
				for i := range p.dispatch {
					p.dispatch[i].path = nil
				}
				all = append(all, p.create()...)
			}
			if err := l.fw.restore(ctx(b), table, all); err != nil {
				b.Fatal(err)
			}
		}
	}
	return func() {
		for _, table := range l.fw.tables() {
			l.ipt("-t", table, "-F")
			l.ipt("-t", table, "-X")
		}
		share(b, l.fw.flavour)
	}
}

func benchmarkSizes(b *testing.B, f func(b *testing.B, l *lab)) {
	for _, flavour := range []string{NFT, Legacy} {
		for _, n := range sizes {
			b.Run(fmt.Sprintf("%s/%d", flavour, n), func(b *testing.B) {
				prime(b)
				l := newLab(b, flavour)
				undo := l.crowd(b, n)
				defer undo()
				f(b, l)
			})
		}
	}
}

// childrenCPU is the processor time of all programs run so far: unlike the wall
// clock it does not measure who else uses the machine.
func childrenCPU(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkEnsure is what an ADD pays: four commits.
func BenchmarkEnsure(b *testing.B) {
	benchmarkSizes(b, func(b *testing.B, l *lab) {
		var cpu time.Duration
		for b.Loop() {
			ep := everything(1)
			start := childrenCPU(b)
			l.ensure(ep)
			cpu += childrenCPU(b) - start
			b.StopTimer()
			l.remove(ep)
			b.StartTimer()
		}
		b.ReportMetric(float64(cpu.Milliseconds())/float64(b.N), "cpu-ms/op")
	})
}

// BenchmarkEnsureAtOnce is what each of 50 ADDs pays that begin at once, their
// commits joined (group) or each for itself.
func BenchmarkEnsureAtOnce(b *testing.B) {
	const n = 50
	for _, joined := range []bool{true, false} {
		b.Run(fmt.Sprintf("joined=%v", joined), func(b *testing.B) {
			benchmarkSizes(b, func(b *testing.B, l *lab) {
				var cpu time.Duration
				for b.Loop() {
					var eps []endpoint.Endpoint
					for i := range n {
						eps = append(eps, everything(uint32(i)))
					}
					start := childrenCPU(b)
					var wg sync.WaitGroup
					for _, ep := range eps {
						wg.Go(func() {
							for _, t := range l.fw.Tables(ep) {
								if err := l.atOnce(t, joined); err != nil {
									b.Error(err)
								}
							}
						})
					}
					wg.Wait()
					cpu += childrenCPU(b) - start
					b.StopTimer()
					for _, ep := range eps {
						wg.Go(func() { l.remove(ep) })
					}
					wg.Wait()
					b.StartTimer()
				}
				b.ReportMetric(float64(cpu.Milliseconds())/float64(b.N*n), "cpu-ms/endpoint")
			})
		})
	}
}

func (l *lab) atOnce(t *Table, joined bool) error {
	if joined {
		return t.Ensure(ctx(l.t))
	}
	p, err := l.fw.part(t.table, t.ep)
	if err != nil {
		return err
	}
	return l.fw.restore(ctx(l.t), t.table, p.create())
}

// BenchmarkRemove is what a DEL pays.
func BenchmarkRemove(b *testing.B) {
	benchmarkSizes(b, func(b *testing.B, l *lab) {
		var cpu time.Duration
		for b.Loop() {
			b.StopTimer()
			ep := everything(1)
			l.ensure(ep)
			b.StartTimer()
			start := childrenCPU(b)
			l.remove(ep)
			cpu += childrenCPU(b) - start
		}
		b.ReportMetric(float64(cpu.Milliseconds())/float64(b.N), "cpu-ms/op")
	})
}

// BenchmarkCheck is what a CHECK pays.
func BenchmarkCheck(b *testing.B) {
	benchmarkSizes(b, func(b *testing.B, l *lab) {
		ep := everything(1)
		l.ensure(ep)
		start := childrenCPU(b)
		for b.Loop() {
			if got := l.faults(ep); got != nil {
				b.Fatal(got)
			}
		}
		b.ReportMetric(float64((childrenCPU(b)-start).Milliseconds())/float64(b.N), "cpu-ms/op")
		l.remove(ep)
	})
}

// BenchmarkPacket sends datagrams of an established flow, and of new flows, from
// a child through the primary; both run in the sender's system call.
func BenchmarkPacket(b *testing.B) {
	benchmarkSizes(b, func(b *testing.B, l *lab) {
		c := l.child(1)
		conn, err := dial(b, c.Namespace, "udp4", "", netlab.InternetAddr+":9", passes)
		if err != nil {
			b.Fatal(err)
		}
		defer conn.Close()
		b.Run("established", func(b *testing.B) {
			for b.Loop() {
				_, _ = conn.Write([]byte("x")) // refused now and then: nobody listens
			}
		})
		var free net.PacketConn
		within(b, c.Namespace, func() {
			if free, err = net.ListenPacket("udp4", addrPort(c.ep.Address, 0)); err != nil {
				b.Error(err)
			}
		})
		defer free.Close()
		b.Run("new", func(b *testing.B) {
			to := net.UDPAddr{IP: net.ParseIP(netlab.InternetAddr)}
			for i := 0; b.Loop(); i++ {
				to.Port = 1024 + i%60000
				_, _ = free.WriteTo([]byte("x"), &to)
			}
		})
	})
}
