package ipt

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"

	"mknet/tests/netlab"
)

// What iptables cannot read is not taken for empty: nothing is missing from it, nothing
// is removed from it, and the error says where to look.
func TestTableThatIptablesCannotRead(t *testing.T) {
	prime(t)
	netlab.Clean(t)
	l := newLab(t, NFT)
	ep := everything(1)
	t.Cleanup(func() { l.remove(ep) })
	l.ensure(ep)
	filter := l.fw.Tables(ep)[3]
	before := l.rules()
	for _, test := range []struct {
		name, chain string
		do          func(ctx context.Context) error
	}{
		{"Read", "INPUT", func(ctx context.Context) error { _, err := l.fw.Read(ctx); return err }},
		{"CheckShared", "INPUT", func(ctx context.Context) error { _, err := l.fw.CheckShared(ctx); return err }},
		{"EnsureShared", "INPUT", l.fw.EnsureShared},
		{"RemoveShared", "INPUT", l.fw.RemoveShared},
		{"RemoveOwned", "OUTPUT", func(ctx context.Context) error { return l.fw.RemoveOwned(ctx, stranger(ep.Generation)) }},
		{"Dump", "OUTPUT", func(ctx context.Context) error { _, err := l.fw.Dump(ctx); return err }},
		{"Check of an endpoint", "FORWARD", func(ctx context.Context) error { _, err := filter.Check(ctx); return err }},
		{"DEL of a chain that a foreign rule holds", "INPUT", func(ctx context.Context) error {
			l.ipt("-A", "FORWARD", "-i", "eth7", "-j", ep.Chain)
			defer l.ipt("-D", "FORWARD", "-i", "eth7", "-j", ep.Chain)
			return filter.Remove(ctx)
		}},
	} {
		netlab.Run(t, "nft", "add", "rule", "ip", "filter", test.chain, "ct", "state", "new", "counter")
		err := test.do(ctx(t))
		unreadable(t, test.chain)
		var incompatible *IncompatibleError
		if !errors.As(err, &incompatible) || incompatible.Table != tableFilter || !strings.Contains(err.Error(), "look: nft list table ip filter;") {
			t.Errorf("%s: got %v, want an error that names the table filter", test.name, err)
		}
		if got := l.rules(); got != before {
			t.Fatalf("%s: got\n%s\nwant\n%s", test.name, got, before)
		}
	}
}

// unreadable deletes the last rule of a chain of filter, which iptables cannot.
func unreadable(t *testing.T, chain string) {
	t.Helper()
	handles, err := chainHandles(tableFilter, chain)
	if err != nil || len(handles) == 0 {
		t.Fatalf("chain %s: %d rules, %v", chain, len(handles), err)
	}
	netlab.Run(t, "nft", "delete", "rule", "ip", "filter", chain, "handle", strconv.FormatUint(slices.Max(handles), 10))
}

// ADD and DEL need no reading: they work beside such a rule, DEL also of an endpoint
// of which half is gone.
func TestEndpointBesideARuleOfNFT(t *testing.T) {
	prime(t)
	netlab.Clean(t)
	l := newLab(t, NFT)
	before := l.rules()
	netlab.Run(t, "nft", "add", "rule", "ip", "filter", "INPUT", "ct", "state", "new", "counter")
	whole, half := everything(1), everything(2)
	l.ensure(whole)
	l.ensure(half)
	l.ipt("-F", half.Chain)
	l.remove(whole)
	l.remove(half)
	unreadable(t, "INPUT")
	if got := l.rules(); got != before {
		t.Errorf("got\n%s\nwant\n%s", got, before)
	}
}

// A table that is not in use and holds nothing of ours may hold what it likes.
func TestTableOfOthersThatIptablesCannotRead(t *testing.T) {
	host := netlab.New(t)
	host.Run(t, "iptables-nft", "-t", "mangle", "-P", "FORWARD", "ACCEPT")
	host.Run(t, "nft", "add", "rule", "ip", "mangle", "FORWARD", "ct", "state", "new", "counter")
	host.Do(t, func() {
		fw := open(t, NFT)
		if err := fw.EnsureShared(ctx(t)); err != nil {
			t.Error(err)
		}
		r, err := fw.Read(ctx(t))
		if err != nil {
			t.Error(err)
		} else if faults := r.Shared(); faults != nil {
			t.Errorf("faults: %v", faults)
		}
	})
	host.Run(t, "iptables-nft", "-t", "mangle", "-N", "MK-0123456789ab") // of a daemon with another guard
	host.Do(t, func() {
		var incompatible *IncompatibleError
		if _, err := open(t, NFT).Read(ctx(t)); !errors.As(err, &incompatible) || incompatible.Table != tableMangle {
			t.Errorf("got %v, want an error that names the table mangle", err)
		}
	})
}

// The guard stays where it is if its table cannot be read.
func TestGuardThatIptablesCannotRead(t *testing.T) {
	host := netlab.New(t)
	host.Run(t, "iptables-nft", "-t", "security", "-P", "FORWARD", "ACCEPT")
	host.Run(t, "nft", "add", "rule", "ip", "security", "FORWARD", "ct", "state", "new", "counter")
	host.Do(t, func() {
		if got := open(t, NFT).GuardTable(); got != tableSecurity {
			t.Errorf("got the guard in %s", got)
		}
	})
}

// A table that another program is changing can be incompatible for a moment.
func TestUntilCompatible(t *testing.T) {
	for _, test := range []struct {
		name         string
		failures     int
		wantAttempts int
		wantErr      bool
	}{
		{"readable", 0, 1, false},
		{"readable again", readAttempts - 1, readAttempts, false},
		{"not readable", readAttempts + 1, readAttempts, true},
	} {
		attempts := 0
		err := untilCompatible(ctx(t), func() error {
			if attempts++; attempts <= test.failures {
				return &IncompatibleError{tableNAT}
			}
			return nil
		})
		if attempts != test.wantAttempts || (err != nil) != test.wantErr {
			t.Errorf("%s: %d attempts, %v", test.name, attempts, err)
		}
	}
	gone, cancel := context.WithCancel(ctx(t))
	cancel()
	attempts := 0
	err := untilCompatible(gone, func() error { attempts++; return &IncompatibleError{tableNAT} })
	if attempts != 1 || err == nil {
		t.Errorf("after the caller has left: %d attempts, %v", attempts, err)
	}
}

func TestIncompatible(t *testing.T) {
	const out = "# Warning: iptables-legacy tables present\n# Table `nat' is incompatible, use 'nft' tool.\n" +
		"# Table `filter' contains incompatible base-chains, use 'nft' tool to list them.\n*filter\n:INPUT ACCEPT [0:0]\n" +
		"-A INPUT -m comment --comment \"# Table `raw' is incompatible\" -j DROP\nCOMMIT\n"
	if got := Incompatible(out); !slices.Equal(got, []string{tableNAT}) {
		t.Errorf("got %q", got)
	}
}
