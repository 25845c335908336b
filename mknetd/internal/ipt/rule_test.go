package ipt

import (
	"slices"
	"testing"
)

func TestSplitAndQuote(t *testing.T) {
	for _, test := range []struct {
		line string
		want []string
	}{
		{`-A X ! -s 1.2.3.4/32 -j DROP`, []string{"-A", "X", "!", "-s", "1.2.3.4/32", "-j", "DROP"}},
		{`-m comment --comment "mknet 00ff"`, []string{"-m", "comment", "--comment", "mknet 00ff"}},
		{`--comment "it\'s \"q\" \\ x" -j A`, []string{"--comment", `it's "q" \ x`, "-j", "A"}},
		{`--log-prefix ""  -j LOG`, []string{"--log-prefix", "", "-j", "LOG"}},
		{`a"b c"d`, []string{"ab cd"}},
		{``, nil},
	} {
		got := split(test.line)
		if !slices.Equal(got, test.want) {
			t.Errorf("split(%s): got %q, want %q", test.line, got, test.want)
		}
		if again := split(rule(got).String()); !slices.Equal(again, got) {
			t.Errorf("split(%s): written and read again: got %q, want %q", test.line, again, got)
		}
	}
}

func FuzzSplit(f *testing.F) {
	for _, s := range []string{`-A X -m comment --comment "a \"b\" \\"`, `"`, `\`, `a\ b "c`, "\t x", "!", "-A X !", "--comment \"a\n-A b\""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		words := split(line)
		if again := split(rule(words).String()); !slices.Equal(again, words) {
			t.Fatalf("%q: words %q, written and read again %q", line, words, again)
		}
		_ = rule(words).key()
	})
}

func TestNormalForm(t *testing.T) {
	for _, test := range []struct {
		name, a, b string
		same       bool
	}{
		{"implied matches", `-p udp -m udp --dport 53 -j ACCEPT`, `-p udp --dport 53 -j ACCEPT`, true},
		{"place of the comment", `-m comment --comment "mknet x" -i a -j DROP`, `-i a -m comment --comment "mknet x" -j DROP`, true},
		{"host prefix", `-s 1.2.3.4 -j DROP`, `-s 1.2.3.4/32 -j DROP`, true},
		{"order of states", `-m conntrack --ctstate ESTABLISHED,RELATED -j X`, `-m conntrack --ctstate RELATED,ESTABLISHED -j X`, true},
		{"order of options", `-m conntrack --ctdir REPLY --ctstate NEW -j X`, `-m conntrack --ctstate NEW --ctdir REPLY -j X`, true},
		{"counters", `-i a -c 7 9 -j X`, `-i a -j X`, true},
		{"negation", `! -s 1.2.3.4/32 -j DROP`, `-s 1.2.3.4/32 -j DROP`, false},
		{"negation of another option", `! -i a -o b -j DROP`, `-i a ! -o b -j DROP`, false},
		{"jump and goto", `-i a -j X`, `-i a -g X`, false},
		{"other comment", `-m comment --comment a -j X`, `-m comment --comment b -j X`, false},
		{"a match without options", `-m socket -j X`, `-j X`, false},
		{"prefix", `-s 1.2.3.0/24 -j DROP`, `-s 1.2.3.0/25 -j DROP`, false},
	} {
		a, b := rule(split(test.a)), rule(split(test.b))
		if (a.key() == b.key()) != test.same {
			t.Errorf("%s: %q and %q: same is %v, want %v (%s | %s)", test.name, a, b, !test.same, test.same, a.key(), b.key())
		}
	}
}

func TestCompare(t *testing.T) {
	want := []rule{words("-s 1.1.1.1/32 -j A"), words("-i b -j B"), words("-j DROP")}
	for _, test := range []struct {
		name string
		have []string
		want []string
	}{
		{"equal", []string{"-s 1.1.1.1 -j A", "-i b -j B", "-j DROP"}, nil},
		{"one missing", []string{"-s 1.1.1.1 -j A", "-j DROP"}, []string{"rule 2 is missing: -A C -i b -j B"}},
		{"one foreign", []string{"-s 1.1.1.1 -j A", "-j ACCEPT", "-i b -j B", "-j DROP"}, []string{"rule 2 is foreign: -A C -j ACCEPT"}},
		{"twice", []string{"-s 1.1.1.1 -j A", "-i b -j B", "-i b -j B", "-j DROP"}, []string{"rule 3 is foreign: -A C -i b -j B"}},
		{"order", []string{"-s 1.1.1.1 -j A", "-j DROP", "-i b -j B"}, []string{"rule 2 is out of order: -A C -j DROP"}},
		{"empty", nil, []string{"rule 1 is missing: -A C -s 1.1.1.1/32 -j A", "rule 2 is missing: -A C -i b -j B", "rule 3 is missing: -A C -j DROP"}},
	} {
		var have []rule
		for _, h := range test.have {
			have = append(have, rule(split(h)))
		}
		var got []string
		for _, f := range compare("filter", "C", want, have) {
			got = append(got, f.Problem)
			if f.Inspect != "iptables -t filter -S C" || f.Object != "filter C" || f.Kind != "iptables" {
				t.Errorf("%s: fault %+v", test.name, f)
			}
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: got %q, want %q", test.name, got, test.want)
		}
		if same(want, have) != (test.want == nil) {
			t.Errorf("%s: same is %v", test.name, same(want, have))
		}
	}
}

func TestReadTable(t *testing.T) {
	v := newView("filter")
	err := v.parse("# Generated\n*filter\n:FORWARD DROP [1:2]\n:MK-x - [0:0]\n[3:4] -A FORWARD -i a -j MK-x\n-P INPUT ACCEPT\n-N Y\n-A Y -j DROP\nCOMMIT\n")
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"FORWARD", "MK-x", "INPUT", "Y"}; !slices.Equal(v.order, want) {
		t.Errorf("chains: got %q, want %q", v.order, want)
	}
	if got := v.count(placed{"FORWARD", words("-i a -j MK-x")}); got != 1 {
		t.Errorf("count: got %d, want 1", got)
	}
	if err := newView("nat").parse("nonsense\n"); err == nil || err.Error() != `table nat: cannot read the line "nonsense"` {
		t.Errorf("got error %v", err)
	}
}
