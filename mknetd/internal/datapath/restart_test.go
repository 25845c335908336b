package datapath

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"mknet/tests/netlab"
)

// again opens a second Datapath on the same pins, as the next daemon does.
func again(t *testing.T, d *Datapath) *Datapath {
	t.Helper()
	next, err := Open(d.cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { next.Close() })
	return next
}

// D13: opened anew twenty times under ping and without a lost packet, there is one
// program on each hook, on the same maps, and of the newest load.
func TestD13Restart(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, _ Outcome) {
		a, b := startPod(t, d, 10, 1500), startPod(t, d, 20, 1500)
		maps, err := d.objects.Endpoints.Info()
		if err != nil {
			t.Fatal(err)
		}
		stop := make(chan struct{})
		quit := sync.OnceFunc(func() { close(stop) })
		lost := make(chan []string, 1)
		go func() {
			var said []string
			defer func() { lost <- said; close(lost) }()
			for {
				select {
				case <-stop:
					return
				default:
				}
				out, err := a.ns.Try("ping", "-n", "-q", "-c50", "-i0.002", "-W5", b.Address.String())
				if err != nil || !strings.Contains(out, " 50 received") {
					said = append(said, fmt.Sprintf("%v: %s", err, out))
				}
			}
		}()
		defer func() { quit(); <-lost }()
		for range 20 {
			next := again(t, d)
			a.d = next
			a.healthy(t)
			info, err := next.objects.Endpoints.Info()
			if err != nil {
				t.Fatal(err)
			}
			was, _ := maps.ID()
			if is, _ := info.ID(); is != was {
				t.Fatalf("endpoint map is %d, was %d", is, was)
			}
			for _, h := range hooks {
				if n := programsOn(t, next, a.HostLink, h); len(n) != 1 {
					t.Fatalf("%s %s has programs %v, want one", a.HostLink, h, n)
				}
			}
		}
		a.d = d
		quit()
		if said := <-lost; len(said) > 0 {
			t.Errorf("%d rounds of ping lost packets:\n%s", len(said), strings.Join(said, "\n"))
		}
		if got := a.counters(t); got[Stack].Packets > 0 {
			t.Errorf("%v: some packets were not redirected", got)
		}
	})
}

// programsOn lists the programs on a hook, in order.
func programsOn(t *testing.T, d *Datapath, name string, h hook) []ebpf.ProgramID {
	t.Helper()
	l, err := d.linkByName(name)
	if err != nil || l == nil {
		t.Fatalf("link %s: %v", name, err)
	}
	a := &attachment{d: d, link: name, hook: h}
	var ids []ebpf.ProgramID
	if d.Way() == TCX {
		q, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: h.tcx()})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range q.Programs {
			ids = append(ids, p.ID)
		}
		return ids
	}
	filters, err := a.filters(l)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range filters {
		if mine, _ := own([]netlinkFilter{f}); mine != nil {
			ids = append(ids, ebpf.ProgramID(mine.Id))
		}
	}
	return ids
}

// D14: with no daemon there, pods are forwarded and sources are checked.
func TestD14WithoutDaemon(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, by Outcome) {
		running := again(t, d)
		a, b := startPod(t, running, 10, 1500), startPod(t, running, 20, 1500)
		if err := running.Close(); err != nil {
			t.Fatal(err)
		}
		a.d, b.d = d, d // for reading and for cleaning up
		a.ns.Run(t, "ip", "addr", "add", "10.9.0.99/32", "dev", "eth0")
		got := a.grew(t, func() {
			a.mustPing(t, b.Address, "-I", a.Address.String())
			if n := a.ping(t, b.Address, 1, "-I", "10.9.0.99", "-W1"); n != 0 {
				t.Errorf("%d pings with another's address answered", n)
			}
		})
		if got[by].Packets != 3 || got[DropAddress].Packets == 0 {
			t.Errorf("%v, want 3 by %s and a dropped address", got, by)
		}
	})
}

// D15: what was detached, replaced, shadowed or deleted by hand is found, Check
// fails meanwhile, and Ensure puts it back.
func TestD15Heal(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, by Outcome) {
		a, b := startPod(t, d, 10, 1500), startPod(t, d, 20, 1500)
		strange := foreignProgram(t)
		key := address(a.Address.As4())
		for _, c := range []struct {
			name, problem string
			only          Way
			harm          func(*attachment)
		}{
			{"detached", "not attached", TCX, func(at *attachment) {
				l, err := link.LoadPinnedLink(at.pin(), nil)
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				if err := l.Detach(); err != nil {
					t.Fatal(err)
				}
			}},
			{"pin removed", "not attached", TCX, func(at *attachment) {
				if err := os.Remove(at.pin()); err != nil {
					t.Fatal(err)
				}
			}},
			{"replaced", "replaced by program", TCX, func(at *attachment) {
				l, err := link.LoadPinnedLink(at.pin(), nil)
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				if err := l.Update(strange); err != nil {
					t.Fatal(err)
				}
			}},
			{"shadowed", "shadowed by program", TCX, func(at *attachment) {
				l, err := link.AttachTCX(link.TCXOptions{Interface: int(indexOf(t, d, a.HostLink)), Program: strange, Attach: at.hook.tcx(), Anchor: link.Head()})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { l.Close() })
			}},
			{"filter deleted", "not attached", Clsact, func(at *attachment) {
				netlab.Run(t, "tc", "filter", "del", "dev", a.HostLink, string(at.hook))
			}},
			{"qdisc deleted", "not attached", Clsact, func(*attachment) {
				netlab.Run(t, "tc", "qdisc", "del", "dev", a.HostLink, "clsact")
			}},
			{"replaced", "replaced by program", Clsact, func(at *attachment) {
				l, err := d.linkByName(a.HostLink)
				if err != nil {
					t.Fatal(err)
				}
				f := at.filter(l)
				f.Fd = strange.FD()
				if err := d.links.FilterReplace(f); err != nil {
					t.Fatal(err)
				}
			}},
		} {
			if c.only != d.Way() {
				continue
			}
			for _, h := range hooks {
				c.harm(&attachment{d: d, link: a.HostLink, hook: h})
				if f := a.faults(t); len(f) == 0 || !strings.Contains(f[0].Problem, c.problem) {
					t.Errorf("%s, %s: faults %v, want %q", c.name, h, f, c.problem)
				}
				a.heal(t)
			}
		}
		for _, harm := range []func() error{
			func() error { return d.objects.Endpoints.Delete(key) },
			func() error { return d.objects.Attachments.Delete(indexOf(t, d, a.HostLink)) },
			func() error {
				return d.objects.Endpoints.Put(key, endpointValue{IfIndex: 1})
			},
		} {
			if err := harm(); err != nil {
				t.Fatal(err)
			}
			if f := a.faults(t); len(f) != 1 || f[0].Kind != KindEntry {
				t.Errorf("faults %v, want one of the entry", f)
			}
			a.heal(t)
		}
		if got := a.grew(t, func() { a.mustPing(t, b.Address) }); got[by].Packets != 3 {
			t.Errorf("healed: %v, want 3 by %s", got, by)
		}
	})
}

// A link that was deleted and made again has nothing attached; Check tells.
func TestLinkMadeAgain(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, by Outcome) {
		a, b := startPod(t, d, 10, 1500), startPod(t, d, 20, 1500)
		netlab.Run(t, "ip", "link", "del", a.HostLink)
		if f := a.faults(t); len(f) != 3 {
			t.Errorf("faults %v, want three for a link that is gone", f)
		}
		a.addLink(t)
		if f := a.faults(t); len(f) != 3 {
			t.Errorf("faults %v, want three for another link", f)
		}
		a.heal(t)
		a.up(t)
		if got := a.grew(t, func() { a.mustPing(t, b.Address) }); got[by].Packets != 3 {
			t.Errorf("%v, want 3 by %s", got, by)
		}
	})
}

// Remove is idempotent, also with the link gone, and an old endpoint's takes
// nothing from its successor at the same address.
func TestRemove(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, _ Outcome) {
		a := startPod(t, d, 10, 1500)
		next := &livePod{Endpoint: pod("10.9.0.10", 1500), ns: netlab.New(t), d: d}
		next.addLink(t)
		next.heal(t)
		a.remove(t)
		next.healthy(t)
		next.remove(t)
		next.remove(t)
		if _, err := d.Counters(next.Address); !errors.Is(err, ErrNoEndpoint) {
			t.Errorf("counters after removal: %v, want %v", err, ErrNoEndpoint)
		}
		nothingLeft(t, d)
	})
}

// A pod whose namespace vanished leaves its name to the next of the same container ID
// and interface in another network. What is done for it from then on takes nothing
// from that one, whether its link is marked already or not.
func TestSuccessorOfTheSameName(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, by Outcome) {
		other := startPod(t, d, 30, 1500)
		for _, marked := range []bool{false, true} {
			a := startPod(t, d, 10, 1500)
			netlab.Run(t, "ip", "link", "del", a.HostLink)
			next := &livePod{Endpoint: pod("10.9.0.20", 1500), ns: netlab.New(t), d: d}
			next.HostLink = a.HostLink
			next.addLink(t)
			if marked {
				netlab.Run(t, "ip", "link", "set", next.HostLink, "alias", next.Generation.Alias())
			}
			t.Cleanup(func() { next.remove(t) })
			next.heal(t)
			next.up(t)
			for _, o := range d.Objects(a.Endpoint) {
				if f, err := o.Check(t.Context()); err != nil || len(f) != 1 {
					t.Errorf("%s %s of the one that is gone: faults %v, %v, want that it has no link", o.Kind(), o.Name(), f, err)
				}
				if err := o.Ensure(t.Context()); err == nil {
					t.Errorf("%s %s of the one that is gone was made on its successor's link", o.Kind(), o.Name())
				}
				if err := o.Remove(t.Context()); err != nil {
					t.Error(err)
				}
				next.healthy(t)
			}
			for _, h := range hooks {
				if n := programsOn(t, d, next.HostLink, h); len(n) != 1 {
					t.Errorf("%s has programs %v on %s, want one", next.HostLink, n, h)
				}
			}
			if got := next.grew(t, func() { next.mustPing(t, other.Address) }); got[by].Packets != 3 {
				t.Errorf("%v, want 3 by %s", got, by)
			}
			next.remove(t)
		}
		other.remove(t)
		nothingLeft(t, d)
	})
}

// nothingLeft wants no pins of links and no entries.
func nothingLeft(t *testing.T, d *Datapath) {
	t.Helper()
	orphans, err := d.Orphans(func(string) bool { return false })
	if err != nil || len(orphans) > 0 {
		t.Errorf("left: %v, %v", orphans, err)
	}
}

// What a record that is gone left behind is found and removed; what is known stays.
func TestOrphans(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, _ Outcome) {
		a, b := startPod(t, d, 10, 1500), startPod(t, d, 20, 1500)
		known := func(name string) bool { return name == b.HostLink }
		found, err := d.Orphans(known)
		if err != nil || len(found) != 3 {
			t.Fatalf("orphans %v, %v, want two programs and an entry", found, err)
		}
		netlab.Run(t, "ip", "link", "del", a.HostLink)
		if err := d.RemoveOrphans(known); err != nil {
			t.Fatal(err)
		}
		if found, err = d.Orphans(known); err != nil || len(found) > 0 {
			t.Errorf("orphans %v, %v after their removal", found, err)
		}
		b.healthy(t)
	})
}

// Objects of an endpoint whose maker died between two steps are removed.
func TestHalfMade(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, _ Outcome) {
		ep := pod("10.9.0.10", 1500)
		addLink(t, ep)
		at := attachmentValue{Address: address(ep.Address.As4())}
		copy(at.Name[:], ep.HostLink)
		if err := d.objects.Attachments.Put(indexOf(t, d, ep.HostLink), at); err != nil {
			t.Fatal(err)
		}
		for _, o := range d.Objects(ep) {
			if err := o.Remove(context.Background()); err != nil {
				t.Error(err)
			}
		}
		nothingLeft(t, d)
	})
}

// A map of another layout is refused with its path, and what runs goes on.
func TestIncompatibleMap(t *testing.T) {
	d := open(t, Config{})
	for _, s := range []*ebpf.MapSpec{
		{Name: "endpoints", Type: ebpf.Hash, KeySize: 4, ValueSize: 12, MaxEntries: 16},
		{Name: "policy_small", Type: ebpf.HashOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 4096, InnerMap: &ebpf.MapSpec{
			Type: ebpf.Array, KeySize: 4, ValueSize: 5896, MaxEntries: 1,
		}},
	} {
		cfg := d.cfg
		cfg.Dir += "-" + s.Name
		if err := os.MkdirAll(filepath.Join(cfg.Dir, mapsDir), 0o700); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(cfg.Dir) })
		m, err := ebpf.NewMap(s)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(cfg.Dir, mapsDir, s.Name)
		if err := m.Pin(path); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(cfg); !errors.Is(err, ErrIncompatible) || !strings.Contains(err.Error(), path) {
			t.Errorf("open: %v, want %v with %s", err, ErrIncompatible, path)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A pin that a daemon left which died while it replaced one is swept away.
func TestSweep(t *testing.T) {
	d := open(t, Config{})
	path := filepath.Join(d.cfg.Dir, programsDir, "from_container"+nextSuffix)
	p, err := d.names["from_container"].Clone()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := p.Pin(path); err != nil {
		t.Fatal(err)
	}
	again(t, d)
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("stat %s: %v, want it gone", path, err)
	}
}

// A bpffs is mounted where the folder is on none.
func TestMountsBpffs(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "bpf", "mknet")
	t.Cleanup(func() { _, _ = netlab.Try("umount", dir) }) // after the purge
	d := open(t, Config{Dir: dir})
	if on, err := onBpffs(dir); err != nil || !on {
		t.Errorf("%s is on a bpffs: %v, %v", dir, on, err)
	}
	again(t, d)
}

// What an earlier process left is purged without a program being loaded.
func TestPurgeOfWhatIsNotOpen(t *testing.T) {
	ways(t, func(t *testing.T, d *Datapath, _ Outcome) {
		startPod(t, d, 10, 1500)
		if list, err := d.attachments(); err != nil || len(list) != 2 {
			t.Fatalf("before: %d attachments, %v, want 2", len(list), err)
		}
		if found, err := Purge(d.cfg); !found || err != nil {
			t.Errorf("purge: found %v, %v", found, err)
		}
		if list, err := d.attachments(); err != nil || len(list) != 0 {
			t.Errorf("after: %d attachments, %v, want none", len(list), err)
		}
		if _, err := os.Stat(d.cfg.Dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the folder of pins: %v, want it gone", err)
		}
		if found, err := Purge(d.cfg); found || err != nil {
			t.Errorf("second purge: found %v, %v, want nothing", found, err)
		}
	})
}
