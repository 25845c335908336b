package ipt

import (
	"fmt"
	"strings"
	"testing"

	"mknet/mknetd/internal/netns"
	"mknet/tests/netlab"
)

// What is said of a foreign base chain is what nft(8) has put into the kernel.
func TestBaseChainsAreJudged(t *testing.T) {
	t.Parallel()
	lab := netlab.New(t)
	ns, err := netns.Open(lab.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	const (
		mayStop = 1 << iota
		takesRest
		takesAll
	)
	cases := []struct {
		name, rules string // ; between two
		want        int
	}{
		{"empty", "", 0},
		{"counts", "counter; ip saddr 10.0.0.0/8 counter; log prefix \"x\" limit rate 1/second; meta mark 5 counter", 0},
		{"accepts", "ct state established,related accept; iifname { \"a\", \"b\" } accept; tcp dport @ports accept; return", 0},
		{"clamps", "tcp flags syn tcp option maxseg size set 1300", 0},
		{"traces", "ip protocol icmp counter limit rate 20/second meta nftrace set 1", 0},
		{"traces_all_and_drops", "meta nftrace set 1; drop", mayStop | takesRest | takesAll},
		{"calls_harmless", "jump harmless", 0},
		{"drops_some", "ip saddr 10.0.0.0/8 drop", mayStop},
		{"calls", "oifname \"a\" jump harmful", mayStop},
		{"calls_deeply", "goto between", mayStop},
		{"by_map", "iifname vmap { \"a\" : drop, \"b\" : accept }", mayStop},
		{"marks", "meta mark set 5", mayStop},
		{"untracks", "notrack", mayStop},
		{"rejects_rest", "ct state established accept; counter reject", mayStop | takesRest},
		{"drops_behind_a_call", "jump harmless; drop", mayStop | takesRest},
		{"drops_all", "counter; ip saddr 10.0.0.0/8 drop; counter log drop; accept", mayStop | takesRest | takesAll},
	}
	text := "table inet fw {\n set ports { type inet_service; elements = { 80 } }\n chain harmless { counter; }\n chain harmful { drop; }\n chain between { jump harmful; }\n"
	for i, c := range cases {
		text += fmt.Sprintf("chain %s { type filter hook prerouting priority %d;\n%s\n}\n", c.name, i-3, strings.ReplaceAll(c.rules, "; ", "\n"))
	}
	text += "}\ntable ip mknet-trace-0123abcd {\n chain ours { type filter hook prerouting priority -301;\n ip protocol udp meta nftrace set 1\n}\n" +
		" chain theirs { type filter hook prerouting priority -301;\n ip protocol udp drop\n}\n"
	text += "}\ntable ip tr { chain n { type nat hook postrouting priority srcnat; policy accept;\n oifname \"a\" masquerade\n}\n}\n"
	lab.Run(t, "nft", text)
	var chains []BaseChain
	if err := ns.Do(func() (err error) { chains, err = BaseChains(); return err }); err != nil {
		t.Fatal(err)
	}
	found := map[string]BaseChain{}
	for _, c := range chains {
		found[c.Name] = c
	}
	for i, c := range cases {
		got, there := found[c.name]
		have := 0
		for bit, is := range map[int]bool{mayStop: got.MayStop, takesRest: got.TakesRest, takesAll: got.TakesAll} {
			if is {
				have |= bit
			}
		}
		if !there || have != c.want || got.Priority != i-3 || got.Type != "filter" || got.Hook != "prerouting" {
			t.Errorf("%s: %q: %+v, want %b", c.name, c.rules, got, c.want)
		}
	}
	if _, there := found["ours"]; there || !found["theirs"].MayStop {
		t.Errorf("of a table with the name of a trace's: %+v, %+v", found["ours"], found["theirs"])
	}
	if n := found["n"]; n.Type != "nat" || n.Priority != 100 || !n.MayStop || n.Hook != "postrouting" || n.Drops {
		t.Errorf("nat: %+v", n)
	}
}
