package datapath

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"mknet/tests/netlab"
)

type netlinkFilter = netlink.Filter

// foreignProgram is somebody else's: it lets everything go on.
func foreignProgram(t *testing.T) *ebpf.Program {
	t.Helper()
	p, _ := countingProgram(t)
	return p
}

// countingProgram is a foreign program that counts what it sees in the map's one
// entry.
func countingProgram(t *testing.T) (*ebpf.Program, *ebpf.Map) {
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "strange", Type: ebpf.SchedCLS, License: "MIT",
		Instructions: asm.Instructions{
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.LoadMapPtr(asm.R1, m.FD()),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.Mov.Imm(asm.R0, -1).WithSymbol("out"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p, m
}

// addForeignFilter attaches p as a filter of the hook's clsact qdisc.
func addForeignFilter(t *testing.T, d *Datapath, name string, h hook, priority uint16, handle uint32, p *ebpf.Program) {
	t.Helper()
	err := d.links.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: int(indexOf(t, d, name)), Parent: h.parent(), Handle: handle, Priority: priority, Protocol: unix.ETH_P_ALL,
		},
		Fd: p.FD(), Name: "strange", DirectAction: true,
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Programs and filters of others stay when ours are made, healed and removed, and
// they see what goes to the host stack.
func TestForeignFiltersStay(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, _ Outcome) {
		netlab.Uplink(t, "1500")
		a := startPod(t, d, 10, 1500)
		if d.Way() == TCX {
			netlab.Run(t, "tc", "qdisc", "add", "dev", a.HostLink, "clsact")
		}
		filter, seenByFilter := countingProgram(t)
		for _, h := range hooks {
			addForeignFilter(t, d, a.HostLink, h, 10, 1, filter)
		}
		behind, seenBehind := countingProgram(t)
		if d.Way() == TCX {
			l, err := link.AttachTCX(link.TCXOptions{Interface: int(indexOf(t, d, a.HostLink)), Program: behind, Attach: ebpf.AttachTCXIngress, Anchor: link.Tail()})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
		}
		again(t, d)
		a.heal(t)
		netlab.Run(t, "ping", "-n", "-c3", "-i0.02", "-W5", a.Address.String())
		if n := seen(t, seenByFilter); n < 6 {
			t.Errorf("the foreign filters saw %d packets, want at least 6", n)
		}
		if n := seen(t, seenBehind); d.Way() == TCX && n < 3 {
			t.Errorf("the foreign program saw %d packets, want at least 3", n)
		}
		for _, o := range d.Objects(a.Endpoint) {
			if err := o.Remove(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
		for _, h := range hooks {
			out := netlab.Run(t, "tc", "filter", "show", "dev", a.HostLink, string(h))
			if !strings.Contains(out, "strange") || strings.Contains(out, "mknet-") {
				t.Errorf("%s: want the foreign filter alone:\n%s", h, out)
			}
		}
		if d.Way() == TCX {
			info, err := behind.Info()
			if err != nil {
				t.Fatal(err)
			}
			id, _ := info.ID()
			if got := programsOn(t, d, a.HostLink, ingress); !slices.Equal(got, []ebpf.ProgramID{id}) {
				t.Errorf("programs on ingress %v, want the foreign one alone, %d", got, id)
			}
		}
	})
}

func seen(t *testing.T, m *ebpf.Map) uint64 {
	t.Helper()
	var n uint64
	if err := m.Lookup(uint32(0), &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// A foreign filter that comes before ours at our own priority is a fault, which
// Ensure cannot mend and names. One that was there earlier runs after ours.
func TestForeignFilterInOurPlace(t *testing.T) {
	d := open(t, Config{Attach: Clsact})
	ep := pod("10.9.0.10", 1500)
	addLink(t, ep)
	netlab.Run(t, "tc", "qdisc", "add", "dev", ep.HostLink, "clsact")
	addForeignFilter(t, d, ep.HostLink, ingress, FilterPriority, 1, foreignProgram(t))
	o := d.Objects(ep)[1]
	if err := o.Ensure(context.Background()); err != nil {
		t.Fatal(err)
	}
	if f, err := o.Check(context.Background()); err != nil || len(f) > 0 {
		t.Errorf("check: %v, %v, want no fault", f, err)
	}
	addForeignFilter(t, d, ep.HostLink, ingress, FilterPriority, 2, foreignProgram(t))
	f, err := o.Check(context.Background())
	if err != nil || len(f) != 1 || !strings.Contains(f[0].Problem, "shadowed") {
		t.Errorf("check: %v, %v, want a fault", f, err)
	}
	err = o.Ensure(context.Background())
	if !errors.Is(err, ErrShadowed) || !strings.Contains(err.Error(), "bpf filter with priority 1, handle 0x2") {
		t.Errorf("ensure: %v, want %v", err, ErrShadowed)
	}
}
