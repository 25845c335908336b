package datapath

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"mknet/spec/endpoint"
	"mknet/spec/policy"
	"mknet/tests/netlab"
)

// D5: 20,000 new flows as fast as the pods send them, and the collector over and
// over, with something to take in each pass: nothing that is allowed is dropped, and
// every reply passes.
func TestD5CollectorUnderLoad(t *testing.T) {
	const flows, firstPort = 20_000, 10_000
	d := open(t, Config{Flows: 131072})
	a, b := startPod(t, d, 10, 1500), startPod(t, d, 20, 1500)
	for _, p := range []*livePod{a, b} {
		// The pods have no socket on these ports; what their kernels say of that is
		// none of the packets that are counted.
		p.ns.Run(t, "iptables", "-A", "OUTPUT", "-p", "icmp", "-j", "DROP")
	}
	l := enforced(t, d, a, b)
	l.apply(documents(t, clientOnly))
	l.fill(65536)
	there, back := a.burst(t, "udp"), b.burst(t, "udp")

	var passes, expired atomic.Int64
	failed := make(chan error, 1)
	stop := make(chan struct{})
	var collector sync.WaitGroup
	collector.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			c, err := d.Policy().Collect()
			if err != nil {
				failed <- err
				return
			}
			passes.Add(1)
			expired.Add(int64(c.Expired))
		}
	})
	halt := sync.OnceFunc(func() { close(stop); collector.Wait() })
	defer halt()
	// On a busy machine the flows may all come while one pass lasts.
	passed := func(n int64) {
		netlab.Eventually(t, time.Minute, func() error {
			if got := passes.Load(); got < n {
				return fmt.Errorf("%d passes of the collector, want %d", got, n)
			}
			return nil
		})
	}

	begin := time.Now()
	for sent := 0; sent < flows; {
		var requests, replies [][]byte
		for range min(burstBatch, flows-sent) {
			port := uint16(firstPort + sent)
			requests, replies = append(requests, udp(port, 53)), append(replies, udp(53, port))
			sent++
		}
		there.send(b.Address, requests)
		a.await(t, Peer, uint64(sent))
		back.send(a.Address, replies)
		b.await(t, Peer, uint64(sent))
		l.put(1<<20+sent, burstBatch, func(int) bool { return true })
		if sent >= flows/2 {
			passed(1)
		}
	}
	passed(2)
	took := time.Since(begin)
	halt()
	select {
	case err := <-failed:
		t.Error(err)
	default:
	}
	if n := a.refusedPackets(t) + b.refusedPackets(t); n != 0 {
		t.Errorf("%d packets that are allowed are dropped: %v and %v", n, a.counters(t), b.counters(t))
	}
	if got := l.reasons(nil)[policy.ConntrackFull]; got != 0 {
		t.Errorf("the table was full for %d packets", got)
	}
	admitted := 0
	if err := d.Policy().EachFlow(func(f Flow) error {
		if f.Source() == b.Address || f.Destination() == b.Address {
			admitted++
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if admitted != 2*flows {
		t.Errorf("%d entries of the flows, want two for each of %d", admitted, flows)
	}
	if expired.Load() < 16384 {
		t.Errorf("the collector took %d entries: want at least the 16384 that had ended before", expired.Load())
	}
	t.Logf("%d flows in %s (%.0f/s), %d passes of the collector took %d entries", flows, took.Round(time.Millisecond), flows/took.Seconds(), passes.Load(), expired.Load())
}

// D6: of 100,000 flows that are only a SYN nothing is left once their time is over,
// and an established one stays.
func TestD6SYNsOnly(t *testing.T) {
	const syns, firstPort = 100_000, 10_000
	d := open(t, Config{Flows: DefaultFlows})
	a := startPod(t, d, 10, 1500)
	netlab.Run(t, "ip", "route", "add", "blackhole", "192.0.2.0/24") // nobody answers
	defer netlab.Run(t, "ip", "route", "del", "blackhole", "192.0.2.0/24")
	l := enforced(t, d, a)
	l.apply(documents(t, clientOnly))
	l.play(protoTCP, []step{
		{"SYN", true, segment(2, 80, synFlag, 1, 0, 100, 0), true, 2},
		{"its SYN-ACK", false, segment(80, 2, synFlag|ackFlag, 9, 2, 100, 0), true, 2},
		{"its ACK", true, segment(2, 80, ackFlag, 2, 10, 100, 0), true, 2},
	})
	before := a.counters(t)[Stack].Packets
	begin := time.Now()
	out := a.burst(t, "tcp")
	for sent := 0; sent < syns; {
		var batch [][]byte
		for range min(burstBatch, syns-sent) {
			batch = append(batch, tcp(uint16(firstPort+sent%50_000), uint16(80+sent/50_000), synFlag))
			sent++
		}
		out.send(netip.MustParseAddr("192.0.2.1"), batch)
		a.await(t, Stack, before+uint64(sent))
	}
	now, err := monotonic()
	if err != nil {
		t.Fatal(err)
	}
	took := time.Since(begin)
	for _, c := range []struct {
		after   time.Duration
		expired int
	}{
		{149*time.Second - took, 0}, // the TTL of 120 s and 30 s more, of the first SYN
		{152 * time.Second, 2 * syns},
		{59 * time.Minute, 0},
	} {
		got, err := d.Policy().collectAt(now + uint64(c.after))
		if err != nil || got.Expired != c.expired {
			t.Errorf("%s later: collected %+v, %v, want %d expired", c.after, got, err, c.expired)
		}
	}
	if n := l.flows(); n != 2 {
		t.Errorf("%d entries are left, want the two of the established flow", n)
	}
	if !l.in(peerAddr, protoTCP, segment(80, 2, ackFlag, 10, 2, 100, 5)) {
		t.Error("the established flow is cut")
	}
}

// D3 and D4: behind a router whose next hop takes 1,400 bytes, TCP of a pod that
// nobody may connect to goes on with what the router says, although the host
// translates the pod's address and the router quotes the translated one.
func TestD3D4TCPOverASmallerHop(t *testing.T) {
	const hop, near, far = "hop0", "203.0.113.1", "203.0.113.2"
	ways(t, func(t *testing.T, d *Datapath, _ Outcome) {
		router := netlab.Uplink(t, "1500")
		server := &livePod{ns: netlab.New(t), Endpoint: endpoint.Endpoint{Address: netip.MustParseAddr(far)}}
		router.Run(t, "ip", "link", "add", hop, "type", "veth", "peer", "name", "eth0", "netns", server.ns.Name)
		router.Run(t, "ip", "addr", "add", near+"/24", "dev", hop)
		router.Run(t, "ip", "link", "set", hop, "up")
		router.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1")
		// The server's own link takes 1,500, or its handshake would say what fits.
		router.Run(t, "ip", "route", "add", far+"/32", "dev", hop, "mtu", "lock", "1400")
		server.ns.Run(t, "ip", "addr", "add", far+"/24", "dev", "eth0")
		server.ns.Run(t, "ip", "link", "set", "eth0", "up")
		server.ns.Run(t, "ip", "route", "add", "default", "via", near)
		server.serve(t, 80)
		a := startPod(t, d, 10, 1500)
		netlab.Run(t, "iptables", "-t", "nat", "-A", "POSTROUTING", "-s", a.Address.String(), "-o", netlab.UplinkName, "-j", "MASQUERADE")
		defer netlab.Run(t, "iptables", "-t", "nat", "-F")
		l := enforced(t, d, a)
		l.apply(documents(t, clientOnly))
		a.echo(t, "tcp4", server.Address, 80, 1<<20)
		if got := l.reasons(nil); got[policy.Related] == 0 || got[policy.GroupDrop] != 0 {
			t.Errorf("%v: want errors that are related, and nothing dropped", got)
		}
		if out := a.ns.Run(t, "ip", "route", "get", far); !strings.Contains(out, "mtu 1400") {
			t.Errorf("the pod has not learnt what the hop takes: %s", out)
		}
		// An error about a flow that there is not changes nothing for the pod.
		before := l.reasons(nil)
		quoted := ipv4{src: a.Address, dst: server.Address, proto: protoTCP, payload: segment(9, 9, ackFlag, 1, 1, 9, 0)}
		if l.pass(policy.Ingress, 0, ipv4{src: netip.MustParseAddr(near), dst: a.Address, proto: protoICMP, payload: icmp(3, 4, 600, quoted.bytes()...)}) {
			t.Error("an error that quotes an unknown flow passes")
		}
		if got := l.reasons(before)[policy.GroupDrop]; got != 1 {
			t.Errorf("%d packets dropped, want that error", got)
		}
	})
}

// tagger is a program that puts a tag beside every frame, as a device does that has
// taken it off: skb->vlan_present, which BPF_PROG_TEST_RUN cannot set.
func tagger(t *testing.T) *ebpf.Program {
	t.Helper()
	const number = 5
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.LoadImm(asm.R2, 0x0081, asm.DWord), // ETH_P_8021Q, as on the wire
		asm.LoadImm(asm.R3, number, asm.DWord),
		asm.FnSkbVlanPush.Call(),
		asm.Mov.Imm(asm.R0, -1), // TCX_NEXT
		asm.Return(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// D19: a tag that lies beside the frame counts as one in it: dropped where the
// direction is enforced, 305, and passed where it is not, at pods and at children.
func TestD19AcceleratedTags(t *testing.T) {
	outcomes := map[endpoint.Mode]map[policy.Direction]Outcome{
		endpoint.Veth:        {policy.Egress: Other, policy.Ingress: Other},
		endpoint.Multikernel: {policy.Egress: Stack, policy.Ingress: Delivered},
	}
	for mode, passed := range outcomes {
		t.Run(string(mode), func(t *testing.T) {
			netlab.Clean(t)
			d := open(t, Config{Attach: TCX, PassOther: true})
			a := startPodAs(t, d, 10, 1500, func(ep *endpoint.Endpoint) {
				if ep.Mode = mode; mode == endpoint.Multikernel {
					ep.HostLink = ep.Generation.HostLink()
				}
			})
			// The neighbours are known and speak no IPv6: nothing but the test's own
			// datagrams is tagged.
			a.ns.Run(t, "ip", "neigh", "replace", a.Gateway.String(), "lladdr", mac(a.Generation.HostMAC()), "dev", "eth0")
			a.ns.Run(t, "sysctl", "-qw", "net.ipv6.conf.eth0.disable_ipv6=1")
			netlab.Run(t, "ip", "neigh", "replace", a.Address.String(), "lladdr", mac(a.Generation.PeerMAC()), "dev", a.HostLink)
			netlab.Run(t, "sysctl", "-qw", "net.ipv6.conf."+a.HostLink+".disable_ipv6=1")
			tags := tagger(t)
			for _, h := range hooks {
				l, err := link.AttachTCX(link.TCXOptions{Interface: int(indexOf(t, d, a.HostLink)), Program: tags, Attach: h.tcx(), Anchor: link.Head()})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { l.Close() })
			}
			send := map[policy.Direction]func(){
				policy.Egress:  func() { a.ns.Run(t, "bash", "-c", "echo x > /dev/udp/"+a.Gateway.String()+"/9") },
				policy.Ingress: func() { netlab.Run(t, "bash", "-c", "echo x > /dev/udp/"+a.Address.String()+"/9") },
			}
			l := enforced(t, d, a)
			for docs, enforcedIn := range map[string]map[policy.Direction]bool{
				"":         {},
				clientOnly: {policy.Egress: true, policy.Ingress: true},
				"acl a {ingress: [{priority: 1, action: allow}]}\nat a {networkACLRef: {name: a}, pools: [all]}": {policy.Ingress: true},
			} {
				l.apply(documents(t, docs))
				for _, dir := range policy.Directions {
					want, frames := passed[dir], uint64(0)
					if enforcedIn[dir] {
						want, frames = DropVLAN, 1
					}
					before, reasons := a.counters(t)[want].Packets, l.reasons(nil)
					send[dir]()
					a.await(t, want, before+1)
					if got := l.reasons(reasons)[policy.FrameDrop]; got != frames {
						t.Errorf("%q, %s: %d frames counted as 305, want %d", docs, dir, got, frames)
					}
				}
			}
		})
	}
}

// A full table of 262,144 entries is collected and listed in a fraction of a second.
func TestCollectFullTable(t *testing.T) {
	l := newPolicyLab(t, Config{Flows: DefaultFlows}, endpoint.Multikernel, "10.9.0.10", "10.9.0.20")
	l.apply(documents(t, clientOnly))
	l.fill(DefaultFlows)
	var list []Flow
	listed := costOf(t, func() (err error) { list, err = l.d.Policy().Flows(); return err })
	if len(list) != DefaultFlows*3/4 {
		t.Errorf("%d flows listed", len(list))
	}
	var first, second Collected
	taken := costOf(t, func() (err error) { first, err = l.d.Policy().Collect(); return err })
	if first.Expired != DefaultFlows/4 || first.Entries < DefaultFlows*9/10 {
		t.Errorf("collected %+v", first)
	}
	idle := costOf(t, func() (err error) { second, err = l.d.Policy().Collect(); return err })
	if second.Expired != 0 || second.Entries != DefaultFlows*3/4 {
		t.Errorf("collected %+v", second)
	}
	for what, c := range map[string]cost{"listed": listed, "collected, with 65536 that have ended": taken, "collected, with none": idle} {
		t.Logf("%d entries %s: %s", DefaultFlows, what, c)
		// Of the processor: the wall clock is everybody's.
		if c.cpu > time.Second {
			t.Errorf("%s: %s, goal 0.5 s", what, c)
		}
	}
}
