package datapath

import (
	"net"
	"net/netip"
	"testing"
	"time"

	inet "golang.org/x/net/ipv4"

	"mknet/mknetd/internal/enforcer"
	"mknet/spec/policy"
)

// enforced puts pods that are wired up under policies; their names are ep0, ep1 and
// so on.
func enforced(t testing.TB, d *Datapath, pods ...*livePod) *policyLab {
	t.Helper()
	l := &policyLab{t: t, d: d, pools: policy.Pools{"all": netip.MustParsePrefix("10.9.0.0/16")}, numbers: enforcer.Numbers{}}
	for _, p := range pods {
		l.add(p.Endpoint)
	}
	l.begin()
	return l
}

// burst sends packets of one protocol out of a pod, many with one system call.
type burst struct {
	t        testing.TB
	conn     *inet.PacketConn
	messages []inet.Message
}

// burstBatch is how many packets are under way at most before somebody looks: no
// queue on their way is shorter (net.core.netdev_max_backlog: 1000).
const burstBatch = 256

// burst opens a raw socket in the pod. The kernel makes the IP header.
func (p *livePod) burst(t testing.TB, protocol string) *burst {
	t.Helper()
	var c net.PacketConn
	p.ns.Do(t, func() {
		var err error
		if c, err = net.ListenPacket("ip4:"+protocol, p.Address.String()); err != nil {
			t.Error(err)
		}
	})
	if c == nil {
		t.FailNow()
	}
	t.Cleanup(func() { c.Close() })
	return &burst{t: t, conn: inet.NewPacketConn(c)}
}

// send sends one packet for each payload, which begins with the transport's header.
func (b *burst) send(to netip.Addr, payloads [][]byte) {
	b.t.Helper()
	b.messages = b.messages[:0]
	for _, p := range payloads {
		b.messages = append(b.messages, inet.Message{Buffers: [][]byte{p}, Addr: &net.IPAddr{IP: to.AsSlice()}})
	}
	for rest := b.messages; len(rest) > 0; {
		n, err := b.conn.WriteBatch(rest, 0)
		if err != nil {
			b.t.Fatal(err)
		}
		rest = rest[n:]
	}
}

// await waits until so many packets of the pod had the outcome.
func (p *livePod) await(t *testing.T, o Outcome, packets uint64) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Microsecond) {
		c := p.counters(t)
		if c[o].Packets >= packets {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %d packets of %d are %s: %v", p.HostLink, c[o].Packets, packets, o, c)
		}
	}
}

// refusedPackets is how many packets of the pod, or for it, policy has dropped.
func (p *livePod) refusedPackets(t *testing.T) uint64 {
	t.Helper()
	c := p.counters(t)
	return c[DropACL].Packets + c[DropGroup].Packets + c[DropPolicy].Packets
}
