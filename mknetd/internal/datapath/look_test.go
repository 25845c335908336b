package datapath

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"

	"mknet/spec/endpoint"
	"mknet/spec/policy"
	"mknet/tests/netlab"
)

// An admission is seen as the programs would see it at both of the endpoint's hooks,
// and a change of what concerns it is.
func TestAdmission(t *testing.T) {
	l := clientLab(t)
	p := l.d.Policy()
	self, peer := netip.AddrPortFrom(l.eps[0].Address, 5), netip.AddrPortFrom(netip.MustParseAddr(peerAddr), 53)
	ask := func(d policy.Direction) *Admission {
		t.Helper()
		a, b := self, peer
		if d == policy.Ingress {
			a, b = b, a
		}
		got, err := p.Admission(d, a, b, policy.UDP)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := ask(policy.Egress); got != nil {
		t.Errorf("before the first packet: %+v", got)
	}
	l.out(peerAddr, protoUDP, udp(5, 53))
	for _, c := range []struct {
		name string
		d    policy.Direction
		want Admission
	}{
		{"as it was admitted", policy.Egress, Admission{Current: true}},
		{"its answers", policy.Ingress, Admission{Reply: true, Current: true}},
	} {
		if got := ask(c.d); got == nil || *got != c.want {
			t.Errorf("%s: got %+v, want %+v", c.name, got, c.want)
		}
	}
	l.apply(documents(t, strings.Replace(clientOnly, "sg g {}", "sg g {egress: [{protocol: udp}]}", 1)))
	if got := ask(policy.Egress); got == nil || got.Current {
		t.Errorf("after a change: %+v", got)
	}
	l.age(int64(flowTTL(ctKey{Protocol: protoUDP}, ctValue{})) + 1)
	if got := ask(policy.Egress); got != nil {
		t.Errorf("after its time: %+v", got)
	}
}

func TestPath(t *testing.T) {
	b := newBench(t, Config{})
	x, y := netip.AddrPortFrom(b.a.Address, 1000), netip.AddrPortFrom(b.b.Address, 80)
	for _, c := range []struct {
		name  string
		proto policy.Protocol
		path  uint8
		age   uint32
		want  Path
	}{
		{"redirected", policy.TCP, byRedirect, 0, ByRedirect},
		{"delivered by the host", policy.TCP, byStack, 70000, ByStack},
		{"a day old", policy.TCP, byStack, 80001, Unremembered},
		{"UDP", policy.UDP, byStack, 699, ByStack},
		{"UDP, too old", policy.UDP, byStack, 701, Unremembered},
	} {
		b.setPath(t, keyOf(uint8(c.proto), b.a.Address, b.b.Address, 1000, 80), c.path, c.age)
		for _, way := range [][2]netip.AddrPort{{x, y}, {y, x}} {
			if got, err := b.d.Path(way[0], way[1], c.proto); err != nil || got != c.want {
				t.Errorf("%s: %v: got %d, %v, want %d", c.name, way, got, err, c.want)
			}
		}
	}
	if got, err := b.d.Path(x, netip.AddrPortFrom(b.b.Address, 81), policy.TCP); err != nil || got != Unremembered {
		t.Errorf("another port: %d, %v", got, err)
	}
}

// What stands on the hooks of a link is told apart, and what the maps say of it.
func TestLook(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, _ Outcome) {
		a := startPod(t, d, 10, 1500)
		look := func() View {
			t.Helper()
			v, err := d.Look(a.Endpoint)
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
		v := look()
		if v.From != Ours || v.To != Ours || !v.Known || v.Entry == nil {
			t.Fatalf("whole: %+v", v)
		}
		if want := (Entry{OwnLink: true, PodMAC: a.PodMAC(), HostMAC: a.Generation.HostMAC(), MTUBytes: 1500}); *v.Entry != want {
			t.Errorf("entry %+v, want %+v", *v.Entry, want)
		}
		from := &attachment{d: d, gen: a.Generation, link: a.HostLink, hook: ingress, program: "from_container"}
		if err := from.Remove(t.Context()); err != nil {
			t.Fatal(err)
		}
		netlab.Eventually(t, 20*time.Second, func() error { // the kernel detaches a link some time after its last reference
			if v := look(); v.From != Absent || v.To != Ours {
				return fmt.Errorf("without its program: %+v", v)
			}
			return nil
		})
		a.heal(t)
		if d.Way() == TCX {
			l, err := link.AttachTCX(link.TCXOptions{Interface: int(indexOf(t, d, a.HostLink)), Program: foreignProgram(t), Attach: ingress.tcx(), Anchor: link.Head()})
			if err != nil {
				t.Fatal(err)
			}
			if v := look(); v.From != Strange || v.To != Ours {
				t.Errorf("behind another's: %+v", v)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if err := d.objects.Endpoints.Delete(address(a.Address.As4())); err != nil {
			t.Fatal(err)
		}
		if err := d.objects.Attachments.Delete(indexOf(t, d, a.HostLink)); err != nil {
			t.Fatal(err)
		}
		if v := look(); v.Known || v.Entry != nil {
			t.Errorf("without entries: %+v", v)
		}
		a.heal(t)
		if v, err := d.Look(endpoint.Endpoint{Address: a.Address, HostLink: "nowhere"}); err != nil || v.From != Absent || v.Entry == nil || v.Entry.OwnLink {
			t.Errorf("without the link: %+v, %v", v, err)
		}
	})
}
