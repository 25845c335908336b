package ipt

import (
	"slices"
	"strings"
	"testing"

	"mknet/mknetd/internal/netns"
	"mknet/tests/netlab"
)

// The rules of another namespace are read with whichever flavour they were made, and
// nothing is made by reading.
func TestDumpIn(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		f := open(t, flavour)
		lab := netlab.New(t)
		ns, err := netns.Open(lab.Path())
		if err != nil {
			t.Fatal(err)
		}
		defer ns.Close()
		for range 2 {
			if tables, chains, err := f.DumpIn(t.Context(), ns); err != nil || len(tables) > 0 || len(chains) > 0 {
				t.Fatalf("of an empty namespace: %+v, %+v, %v", tables, chains, err)
			}
		}
		for _, by := range []string{NFT, Legacy} {
			lab.Run(t, "iptables-"+by, "-A", "OUTPUT", "-p", "tcp", "--dport", "80", "-m", "comment", "--comment", "by "+by, "-j", "DROP")
		}
		lab.Run(t, "nft", "add table inet other; add chain inet other f { type filter hook input priority 9; policy drop; }")
		tables, chains, err := f.DumpIn(t.Context(), ns)
		if err != nil {
			t.Fatal(err)
		}
		for _, by := range []string{NFT, Legacy} {
			i := slices.IndexFunc(tables, func(s Saved) bool { return s.Flavour == by && s.Table == "filter" })
			if i < 0 || len(tables[i].Chains["OUTPUT"].Rules) != 1 || !strings.Contains(strings.Join(tables[i].Chains["OUTPUT"].Rules[0], " "), "by "+by) {
				t.Errorf("%s: got %+v", by, tables)
			}
		}
		if !slices.ContainsFunc(chains, func(c BaseChain) bool { return c.Table == "other" && c.Drops && c.Hook == "input" }) {
			t.Errorf("base chains: %+v", chains)
		}
	})
}
