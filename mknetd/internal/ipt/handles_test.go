package ipt

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"mknet/tests/netlab"
)

func TestHandled(t *testing.T) {
	t.Parallel()
	out := "-N c\n-A c -s 10.0.0.1/32 -m comment --comment \"a b\" -j DROP\n-A cc -j DROP\n-A c -j RETURN\n"
	got, ok := handled("c", out, []uint64{4, 9})
	want := []Handled{{4, 1, `-s 10.0.0.1/32 -m comment --comment "a b" -j DROP`}, {9, 2, "-j RETURN"}}
	if !ok || !slices.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, ok, want)
	}
	for _, handles := range [][]uint64{nil, {4}, {4, 9, 10}} {
		if got, ok := handled("c", out, handles); ok {
			t.Errorf("%v: %v", handles, got)
		}
	}
}

var printed = regexp.MustCompile(`# handle (\d+)\n`)

// Handles are those of nft(8), texts those of iptables, also behind a rule that was
// put between.
func TestHandlesOfAChain(t *testing.T) {
	prime(t)
	netlab.Clean(t)
	l := newLab(t, NFT)
	c := l.child(5)
	name := c.ep.Generation.Chain()
	netlab.Run(t, "iptables-nft", "-I", name, "2", "-s", "192.0.2.1", "-j", "RETURN")
	got, err := l.fw.Handles(ctx(t), "filter", name)
	if err != nil {
		t.Fatal(err)
	}
	var handles, texts []string
	for _, h := range got {
		handles, texts = append(handles, fmt.Sprint(h.Handle)), append(texts, "-A "+name+" "+h.Rule)
	}
	var want []string
	_, rules, _ := strings.Cut(netlab.Run(t, "nft", "-a", "list", "chain", "ip", "filter", name)+"\n", "{ # handle")
	for _, m := range printed.FindAllStringSubmatch(rules, -1) {
		want = append(want, m[1])
	}
	if !slices.Equal(handles, want) || len(got) < 4 || !strings.HasPrefix(got[1].Rule, "-s 192.0.2.1/32") || got[1].Number != 2 {
		t.Errorf("got %+v, nft has the handles %v", got, want)
	}
	if want := netlab.Run(t, "iptables-nft", "-S", name); want != "-N "+name+"\n"+strings.Join(texts, "\n") {
		t.Errorf("got\n%s\niptables prints\n%s", strings.Join(texts, "\n"), want)
	}
	for _, c := range [][2]string{{"filter", "MK-ffffffffffff"}, {"fw", "FORWARD"}} {
		if got, err := l.fw.Handles(ctx(t), c[0], c[1]); err == nil {
			t.Errorf("%v: %v", c, got)
		}
	}
}
