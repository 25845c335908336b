package ipt

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// everything is a record whose rules use every match and target that we have.
func reading(t *testing.T, f *Firewall) *Reading {
	t.Helper()
	r, err := f.Read(ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func everything(slot uint32) endpoint.Endpoint {
	ep := testEndpoint(endpoint.NewGeneration(), slot)
	ep.Publishes = true
	ep.DNS.Nameservers = []string{"169.254.169.254", "10.0.0.53"}
	return ep
}

// What we render is what the kernel tools print, so that the operator reads in
// spec/firewall.md and in `iptables -S` the same text.
func TestPrintedAsRendered(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		ep := everything(1)
		t.Cleanup(func() { l.remove(ep) })
		l.ensure(ep)
		for _, table := range l.fw.tables() {
			p, err := l.fw.part(table, ep)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range p.chains {
				want := "-N " + c.name
				for _, r := range c.rules {
					want += "\n" + placed{c.name, r}.String()
				}
				if got := l.ipt("-t", table, "-S", c.name); got != want {
					t.Errorf("table %s: got\n%s\nwant\n%s", table, got, want)
				}
			}
		}
		if faults, err := l.fw.CheckShared(ctx(t)); err != nil || faults != nil {
			t.Errorf("shared parts: %v, %v", faults, err)
		}
	})
}

// Every single rule, deleted by hand, is named by Check and put back by Ensure.
func TestEveryMissingRuleIsNamed(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		ep := everything(1)
		t.Cleanup(func() { l.remove(ep) })
		l.ensure(ep)
		healthy := l.rules()
		for _, table := range l.fw.Tables(ep) {
			p, err := l.fw.part(table.table, ep)
			if err != nil {
				t.Fatal(err)
			}
			var mine []placed
			for _, c := range p.chains {
				for _, r := range c.rules {
					mine = append(mine, placed{c.name, r})
				}
			}
			for _, d := range p.dispatch {
				mine = append(append(mine, d.leaf), d.path...)
			}
			for _, r := range mine {
				if err := l.fw.restore(ctx(t), table.table, []string{"-D " + r.chain + " " + r.rule.String()}); err != nil {
					t.Fatal(err)
				}
				got := l.faultsOf(table)
				if len(got) != 1 || !strings.HasPrefix(got[0], table.table+" "+r.chain+": ") || !strings.HasSuffix(got[0], "is missing: "+r.String()) {
					t.Errorf("%s without %s: faults %q", table.Name(), r, got)
				}
				if err := table.Ensure(ctx(t)); err != nil {
					t.Fatal(err)
				}
			}
		}
		if got := l.faults(ep); got != nil {
			t.Errorf("after all repairs: faults %q", got)
		}
		if got := l.rules(); sorted(got) != sorted(healthy) {
			t.Errorf("after all repairs: got\n%s\nwant\n%s", got, healthy)
		}
	})
}

func sorted(text string) string {
	lines := strings.Split(text, "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func TestForeignRulesAreFaultsAndOrderCounts(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		ep := everything(1)
		t.Cleanup(func() { l.remove(ep) })
		l.ensure(ep)
		digits := ep.Generation.String()[:2]
		for _, test := range []struct {
			name   string
			breaks []string
			want   string
		}{
			{"a foreign rule in the endpoint's chain", []string{"-I", ep.Chain, "2", "-p", "tcp", "-j", "ACCEPT"}, "filter " + ep.Chain + ": rule 2 is foreign: -A " + ep.Chain + " -p tcp -j ACCEPT"},
			{"a foreign rule in a leaf", []string{"-I", fwdRoot + "-" + digits, "1", "-j", "RETURN"}, "filter " + fwdRoot + "-" + digits + ": a foreign rule: -A " + fwdRoot + "-" + digits + " -j RETURN"},
			{"a foreign rule in a root", []string{"-I", outRoot, "1", "-j", "ACCEPT"}, "filter " + outRoot + ": a foreign rule: -A " + outRoot + " -j ACCEPT"},
		} {
			l.ipt(test.breaks...)
			if got := l.faults(ep); !slices.Equal(got, []string{test.want}) {
				t.Errorf("%s: got %q, want %q", test.name, got, test.want)
			}
			if err := l.fw.EnsureShared(ctx(t)); err != nil {
				t.Fatal(err)
			}
			l.ensure(ep)
			if got := l.faults(ep); got != nil {
				t.Errorf("%s, repaired: %q", test.name, got)
			}
		}
		// The last rule moved to the front: all are there, and nothing works.
		last := "-m comment --comment \"mknet " + ep.Generation.String() + "\" -j DROP"
		if err := l.fw.restore(ctx(t), "filter", []string{"-D " + ep.Chain + " " + last, "-I " + ep.Chain + " 1 " + last}); err != nil {
			t.Fatal(err)
		}
		if got := l.faults(ep); len(got) != 1 || !strings.Contains(got[0], "out of order") {
			t.Errorf("order: got %q", got)
		}
		l.ensure(ep)
		if all := reading(t, l.fw).Endpoints([]endpoint.Endpoint{ep}); len(all) != 0 {
			t.Errorf("a healthy endpoint: %v", all)
		}
	})
}

// C1, C19, C20: whatever somebody flushed, DEL succeeds and leaves nothing.
func TestFlushThenRemove(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		for _, test := range []struct {
			name string
			do   func(l *lab)
		}{
			{"flushed", func(l *lab) { flush(l, "-F") }},
			{"flushed and chains deleted", func(l *lab) { flush(l, "-F", "-X") }},
			{"one chain gone", func(l *lab) {
				l.ipt("-F", "MKNET-IN")
				flush(l, "-t filter -F FORWARD")
			}},
		} {
			t.Run(test.name, func(t *testing.T) {
				l := newLab(t, flavour)
				before := l.rules()
				ep := everything(1)
				l.ensure(ep)
				test.do(l)
				if len(l.faults(ep)) == 0 {
					t.Error("CHECK found nothing")
				}
				l.remove(ep)
				l.remove(ep) // DEL repeats
				if owned := reading(t, l.fw).Owned(); len(owned) != 0 {
					t.Errorf("left: %v", owned)
				}
				// The daemon restores what is shared, and an endpoint can be added again.
				if err := l.fw.EnsureShared(ctx(t)); err != nil {
					t.Fatal(err)
				}
				if got := l.rules(); sorted(got) != sorted(before) {
					t.Errorf("restored: got\n%s\nwant\n%s", got, before)
				}
				l.ensure(ep)
				if got := l.faults(ep); got != nil {
					t.Errorf("added again: %q", got)
				}
				l.remove(ep)
			})
		}
	})
}

func flush(l *lab, what ...string) {
	l.t.Helper()
	for _, w := range what {
		if strings.HasPrefix(w, "-t") {
			l.ipt(strings.Fields(w)...)
			continue
		}
		for _, table := range l.fw.tables() {
			l.ipt("-t", table, w)
		}
	}
}

// An ADD into a flushed ruleset must not leave a child that no rule is asked about.
func TestEnsureRestoresTheWay(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		flush(l, "-F", "-X")
		ep := everything(1)
		t.Cleanup(func() { l.remove(ep) })
		l.ensure(ep)
		if got := l.faults(ep); got != nil {
			t.Errorf("faults: %q", got)
		}
		if faults, err := l.fw.CheckShared(ctx(t)); err != nil || faults != nil {
			t.Errorf("shared parts: %v, %v", faults, err)
		}
	})
}

// C38: what belongs to one endpoint is not touched with another's.
func TestNeighboursAreUntouched(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		a, b := everything(1), everything(2)
		copy(b.Generation[:2], a.Generation[:2]) // the same leaves
		t.Cleanup(func() { l.remove(a) })
		l.ensure(a)
		alone := l.rules()
		l.ensure(b)
		both := l.rules()
		l.ensure(b)
		if got := l.rules(); got != both {
			t.Errorf("the second Ensure changed something: got\n%s\nwant\n%s", got, both)
		}
		l.remove(b)
		if got := l.rules(); got != alone {
			t.Errorf("got\n%s\nwant\n%s", got, alone)
		}
	})
}

// The egress changes: the chains are replaced in one commit each.
func TestEnsureFollowsTheRecord(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		ep := everything(1)
		t.Cleanup(func() { l.remove(ep) })
		l.ensure(ep)
		ep.Egress, ep.HostAccess, ep.Publishes = "wlan0", endpoint.Allow, false
		if got := l.faults(ep); !slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, "-o ens4") }) {
			t.Errorf("the old egress is not named: %q", got)
		}
		l.ensure(ep)
		if got := l.faults(ep); got != nil {
			t.Errorf("faults: %q", got)
		}
		if got := l.rules(); strings.Contains(got, "ens4") {
			t.Errorf("the old egress is still in the rules:\n%s", got)
		}
	})
}

func TestForeignChainIsNeverTouched(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		ep := everything(1)
		other := stranger(ep.Generation)
		l.ipt("-N", ep.Chain)
		l.ipt("-A", ep.Chain, "-m", "comment", "--comment", "mknet "+other.String(), "-j", "RETURN")
		l.ipt("-A", "FORWARD", "-j", ep.Chain)
		t.Cleanup(func() {
			l.ipt("-D", "FORWARD", "-j", ep.Chain)
			l.ipt("-F", ep.Chain)
			l.ipt("-X", ep.Chain)
		})
		before := l.rules()
		tables := l.fw.Tables(ep)
		filter := tables[len(tables)-1]
		err := filter.Ensure(ctx(t))
		if err == nil || !strings.Contains(err.Error(), "chain "+ep.Chain+" exists and is not ours") {
			t.Errorf("Ensure: got %v", err)
		}
		l.remove(ep)
		if err := l.fw.RemoveOwned(ctx(t), ep.Generation); err != nil {
			t.Error(err)
		}
		if got := l.rules(); got != before {
			t.Errorf("got\n%s\nwant\n%s", got, before)
		}
	})
}

func TestOwnedIsFoundAndRemoved(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		before := l.rules()
		lost, kept := everything(1), everything(2)
		t.Cleanup(func() { l.remove(kept) })
		l.ensure(kept)
		withKept := l.rules()
		l.ensure(lost)
		l.ipt("-t", "mangle", "-A", "POSTROUTING", "-m", "comment", "--comment", "mknet "+lost.Generation.String(), "-j", "RETURN")
		l.ipt("-N", "MK-ffffffffffff") // looks ours, carries nothing
		t.Cleanup(func() { l.ipt("-X", "MK-ffffffffffff") })
		owned := reading(t, l.fw).Owned()
		count := map[endpoint.Generation]int{}
		for _, o := range owned {
			count[o.Generation]++
		}
		// 8 chains and 8 dispatch rules each, the stray rule, the empty chain.
		if count[lost.Generation] != 17 || count[kept.Generation] != 16 || count[endpoint.Generation{}] != 1 || len(owned) != 34 {
			t.Errorf("owned: got %v of %v", count, owned)
		}
		if err := l.fw.RemoveOwned(ctx(t), lost.Generation); err != nil {
			t.Fatal(err)
		}
		if err := l.fw.RemoveOwned(ctx(t), lost.Generation); err != nil {
			t.Errorf("again: %v", err)
		}
		if got, want := strings.ReplaceAll(l.rules(), "-N MK-ffffffffffff\n", ""), withKept; got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
		if err := l.fw.RemoveShared(ctx(t)); err == nil || !strings.Contains(err.Error(), "an endpoint still has rules: -A MKNET-") {
			t.Errorf("RemoveShared with an endpoint: got %v", err)
		}
		l.remove(kept)
		if got := strings.ReplaceAll(l.rules(), "-N MK-ffffffffffff\n", ""); got != before {
			t.Errorf("got\n%s\nwant\n%s", got, before)
		}
	})
}

// A rule of somebody else that jumps to our chain keeps the chain, not our rules.
func TestChainHeldByAForeignRule(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		ep := everything(1)
		l.ensure(ep)
		l.ipt("-A", "FORWARD", "-i", "eth7", "-j", ep.Chain)
		tables := l.fw.Tables(ep)
		filter := tables[len(tables)-1]
		err := filter.Remove(ctx(t))
		want := "delete that rule: -A FORWARD -i eth7 -j " + ep.Chain
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
		if got := l.ipt("-S", ep.Chain); got != "-N "+ep.Chain {
			t.Errorf("the chain still holds %s", got)
		}
		l.ipt("-D", "FORWARD", "-i", "eth7", "-j", ep.Chain)
		l.remove(ep)
	})
}

func TestOurJumpsComeFirst(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		l.ipt("-I", "FORWARD", "1", "-i", "docker0", "-j", "ACCEPT")
		l.ipt("-I", "FORWARD", "3", "-i", "docker1", "-j", "ACCEPT")
		t.Cleanup(func() {
			l.ipt("-D", "FORWARD", "-i", "docker0", "-j", "ACCEPT")
			l.ipt("-D", "FORWARD", "-i", "docker1", "-j", "ACCEPT")
		})
		if faults, err := l.fw.CheckShared(ctx(t)); err != nil || faults != nil {
			t.Errorf("a rule before ours is no fault: %v, %v", faults, err)
		}
		if err := l.fw.EnsureShared(ctx(t)); err != nil {
			t.Fatal(err)
		}
		want := "-P FORWARD ACCEPT\n" +
			"-A FORWARD -o mkv+ -m comment --comment \"mknet shared\" -j MKNET-OUT\n" +
			"-A FORWARD -i mkv+ -m comment --comment \"mknet shared\" -j MKNET-FWD\n" +
			"-A FORWARD -i docker0 -j ACCEPT\n-A FORWARD -i docker1 -j ACCEPT"
		if got := l.ipt("-S", "FORWARD"); got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
	})
}

// The pool was changed while no endpoint existed: the old tree goes.
// Who puts a rule for every packet before our jumps is named, and stands behind
// them after the next repair. One with a match is somebody's choice.
func TestNothingTakesEveryPacketBeforeUs(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		for _, base := range []string{"FORWARD", "INPUT"} {
			for _, verdict := range []string{"REJECT", "ACCEPT"} {
				l.ipt("-I", base, "1", "-i", "docker0", "-j", verdict)
				if faults, err := l.fw.CheckShared(ctx(t)); err != nil || faults != nil {
					t.Errorf("%s with a match in %s: %v, %v", verdict, base, faults, err)
				}
				l.ipt("-D", base, "-i", "docker0", "-j", verdict)
				l.ipt("-I", base, "1", "-j", verdict)
				faults, err := l.fw.CheckShared(ctx(t))
				if err != nil || len(faults) != 1 || !strings.Contains(faults[0].String(), base+" (host): a foreign rule takes every packet before our jump: -A "+base+" -j "+verdict) {
					t.Errorf("%s in %s: %v, %v", verdict, base, faults, err)
				}
				if err := l.fw.EnsureShared(ctx(t)); err != nil {
					t.Error(err)
				}
				if faults, err := l.fw.CheckShared(ctx(t)); err != nil || faults != nil {
					t.Errorf("%s in %s, repaired: %v, %v", verdict, base, faults, err)
				}
				l.ipt("-D", base, "-j", verdict) // it still stands
			}
		}
	})
}

func TestPoolChange(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		small := open(t, flavour, func(c *Config) {
			c.ChildPool = netip.MustParsePrefix("10.77.0.0/24")
		})
		t.Cleanup(func() { share(t, flavour) })
		if err := small.EnsureShared(ctx(t)); err != nil {
			t.Fatal(err)
		}
		want := "-P PREROUTING ACCEPT\n-P INPUT ACCEPT\n-P OUTPUT ACCEPT\n-P POSTROUTING ACCEPT\n-N MKNET-POST\n" +
			"-A POSTROUTING -s 10.77.0.0/24 -m comment --comment \"mknet shared\" -j MKNET-POST"
		if got := l.ipt("-t", "nat", "-S"); got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
	})
}

// C18: under a held lock each commit is all or nothing, and says so.
func TestHeldLock(t *testing.T) {
	prime(t)
	netlab.Clean(t)
	l := newLab(t, Legacy)
	hasty := open(t, Legacy, func(c *Config) { c.Wait = time.Second })
	before := l.rules()

	lock, err := os.OpenFile("/run/xtables.lock", os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	release := time.AfterFunc(8*time.Second, func() { _ = unix.Flock(int(lock.Fd()), unix.LOCK_UN) })
	defer release.Stop()

	patient := patientOf(t, l)
	var wg sync.WaitGroup
	results := make([]error, 8)
	eps := make([]endpoint.Endpoint, 8)
	for i := range eps {
		eps[i] = everything(uint32(i))
		fw := patient
		if i%2 == 1 {
			fw = hasty
		}
		wg.Go(func() {
			for _, table := range fw.Tables(eps[i]) {
				results[i] = errors.Join(results[i], table.Ensure(ctx(t)))
			}
		})
	}
	wg.Wait()
	for i, err := range results {
		for _, table := range l.fw.Tables(eps[i]) {
			faults, cerr := table.Check(ctx(t))
			if cerr != nil {
				t.Fatal(cerr)
			}
			present := strings.Contains(l.ipt("-t", table.table, "-S"), eps[i].Generation.String())
			switch {
			case i%2 == 0 && (err != nil || faults != nil):
				t.Errorf("endpoint %d waited long enough: error %v, faults %v", i, err, faults)
			case present && faults != nil:
				t.Errorf("endpoint %d: half of table %s: %v", i, table.table, faults)
			}
		}
		if i%2 == 1 && (!errors.Is(err, ErrBusy) || !strings.Contains(fmt.Sprint(err), "try again")) {
			t.Errorf("endpoint %d: got error %v, want ErrBusy", i, err)
		}
	}
	for i := range eps {
		wg.Go(func() {
			for _, table := range patient.Tables(eps[i]) {
				if err := table.Remove(ctx(t)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := l.rules(); got != before {
		t.Errorf("got\n%s\nwant\n%s", got, before)
	}
}

func patientOf(t *testing.T, l *lab) *Firewall {
	t.Helper()
	return &Firewall{layout: l.fw.layout, tools: l.fw.tools, wait: 60 * time.Second}
}

// Eight at once, also into an empty ruleset, under nft, which takes no lock.
func TestParallel(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		fw := patientOf(t, l)
		before := l.rules()
		flush(l, "-F", "-X")
		var wg sync.WaitGroup
		eps := make([]endpoint.Endpoint, 8)
		each := func(f func(*Table) error) {
			for i := range eps {
				wg.Go(func() {
					for _, table := range fw.Tables(eps[i]) {
						if err := f(table); err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
		}
		for i := range eps {
			eps[i] = everything(uint32(i))
		}
		each(func(table *Table) error { return table.Ensure(ctx(t)) })
		if all := reading(t, fw).Endpoints(eps); len(all) > 0 {
			t.Errorf("%v", all)
		}
		each(func(table *Table) error { return table.Remove(ctx(t)) })
		if got := l.rules(); sorted(got) != sorted(before) {
			t.Errorf("got\n%s\nwant\n%s", got, before)
		}
	})
}

// Purge leaves the tables as they were before mknet.
func TestSharedComesAndGoes(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		// What an earlier test had repaired stands at the end of its chain.
		if err := errors.Join(l.fw.RemoveShared(ctx(t)), l.fw.EnsureShared(ctx(t))); err != nil {
			t.Fatal(err)
		}
		with := l.rules()
		for range 2 {
			if err := l.fw.RemoveShared(ctx(t)); err != nil {
				t.Fatal(err)
			}
			if got := l.rules(); strings.Contains(got, "MK") || strings.Contains(got, "mk") {
				t.Errorf("left:\n%s", got)
			}
		}
		if faults, err := l.fw.CheckShared(ctx(t)); err != nil || len(faults) < 1000 {
			t.Errorf("without shared parts CheckShared finds %d faults, %v", len(faults), err)
		}
		if err := l.fw.EnsureShared(ctx(t)); err != nil {
			t.Fatal(err)
		}
		if got := l.rules(); got != with {
			t.Errorf("made again: got\n%s\nwant\n%s", got, with)
		}
	})
}
