package ipt

import (
	"slices"
	"strings"
	"testing"
)

func TestLinesOf(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       []string
	}{
		{"one line each", "*filter\n:X - [0:0]\n\n-A X -j DROP\r\nCOMMIT", []string{"*filter", ":X - [0:0]", "", "-A X -j DROP", "COMMIT"}},
		{"a newline in a comment", "-A X -m comment --comment \"a\nb\" -j DROP\n-A Y -j DROP\n", []string{"-A X -m comment --comment \"a\nb\" -j DROP", "-A Y -j DROP"}},
		{"what looks like a rule", "-A X -m comment --comment \"a\n-A FORWARD -j DROP\n\n*nat\" -j DROP\nCOMMIT\n", []string{"-A X -m comment --comment \"a\n-A FORWARD -j DROP\n\n*nat\" -j DROP", "COMMIT"}},
		{"escapes", "-A X --comment \"a\\\"\nb\\\\\" -j DROP\n-N Y\n", []string{"-A X --comment \"a\\\"\nb\\\\\" -j DROP", "-N Y"}},
		{"quotes in the names of chains", ":a\"b - [0:0]\n-A FORWARD -j \"x\n-A \"x -j a\"b\n-N Y\n", []string{":a\"b - [0:0]", "-A FORWARD -j \"x", "-A \"x -j a\"b", "-N Y"}},
		{"cut off", "-N Y\n-A X --comment \"a\n", []string{"-N Y", "-A X --comment \"a\n"}},
	} {
		if got := slices.Collect(linesOf(test.text)); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %q, want %q", test.name, got, test.want)
		}
	}
}

func TestReadTableWithNewlines(t *testing.T) {
	const text = ":FORWARD ACCEPT [0:0]\n-A FORWARD -m comment --comment \"a\n-A FORWARD -j DROP\nCOMMIT\" -j ACCEPT\n-A FORWARD -i b -j DROP\n"
	v := newView("filter")
	if err := v.parse(text); err != nil {
		t.Fatal(err)
	}
	want := []string{"-m comment --comment \"a\n-A FORWARD -j DROP\nCOMMIT\" -j ACCEPT", "-i b -j DROP"}
	var got []string
	for _, r := range v.chains["FORWARD"] {
		got = append(got, r.String())
	}
	if !slices.Equal(got, want) {
		t.Errorf("parse: got %q, want %q", got, want)
	}
	tables, err := byTable("*filter\n" + text + "COMMIT\n*nat\n:X - [0:0]\nCOMMIT\n")
	if err != nil || tables["filter"] != text || tables["nat"] != ":X - [0:0]\n" {
		t.Errorf("byTable: got %q, %v", tables, err)
	}
	saved := ParseSave(NFT, "*filter\n"+text+"COMMIT\n")
	if len(saved) != 1 || len(saved[0].Chains["FORWARD"].Rules) != 2 {
		t.Errorf("ParseSave: got %q", saved)
	}
	const cut = "-A FORWARD -m comment --comment \"a\n"
	for name, err := range map[string]error{"parse": newView("filter").parse(cut), "byTable": second(byTable("*filter\n" + cut + "COMMIT\n*nat\nCOMMIT\n"))} {
		if err == nil || !strings.Contains(err.Error(), "table filter: the quote does not end in the line") {
			t.Errorf("%s of a quote that does not end: got %v", name, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func FuzzLinesOf(f *testing.F) {
	for _, s := range []string{"a\nb", "a\n-A FORWARD -j DROP", `"`, "\\\n", "\"\n*nat\nCOMMIT\n", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, comment string) {
		line := rule{"-A", "X", "--comment", comment, "-j", "DROP"}.String()
		got := slices.Collect(linesOf("*filter\n" + line + "\nCOMMIT\n"))
		if len(got) != 3 || got[1] != line || split(got[1])[3] != comment {
			t.Fatalf("comment %q: lines %q", comment, got)
		}
	})
}

// A newline in anybody's comment stops nothing, and a line of it is no rule.
func TestBesideACommentWithANewline(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		foreign := []string{"INPUT", "-m", "comment", "--comment", "a\n-A FORWARD -j DROP\nCOMMIT\n*nat", "-j", "ACCEPT"}
		l.ipt(append([]string{"-A"}, foreign...)...)
		t.Cleanup(func() { l.ipt(append([]string{"-D"}, foreign...)...) })
		before := l.rules()
		if err := l.fw.EnsureShared(ctx(t)); err != nil {
			t.Fatal(err)
		}
		r := reading(t, l.fw)
		if faults := r.Shared(); faults != nil {
			t.Errorf("faults: %v", faults)
		}
		if v := r.views[tableFilter]; len(v.chains["INPUT"]) != 2 || len(v.chains["FORWARD"]) != 2 {
			t.Errorf("INPUT %q, FORWARD %q: want two rules each", v.chains["INPUT"], v.chains["FORWARD"])
		}
		ep := everything(1)
		l.ensure(ep)
		l.ipt("-F", ep.Chain) // so that DEL reads
		l.remove(ep)
		if err := l.fw.RemoveOwned(ctx(t), ep.Generation); err != nil {
			t.Error(err)
		}
		// In a chain of ours it is a fault of one line, and goes.
		l.ipt("-A", fwdRoot, "-m", "comment", "--comment", "c\nd \"e\" \\", "-j", "RETURN")
		faults, err := l.fw.CheckShared(ctx(t))
		if err != nil || len(faults) != 1 || !strings.Contains(faults[0].String(), `a foreign rule: -A MKNET-FWD`) || strings.Contains(faults[0].String(), "\n") {
			t.Errorf("a foreign rule in a chain of ours: %v, %v", faults, err)
		}
		if err := l.fw.EnsureShared(ctx(t)); err != nil {
			t.Error(err)
		}
		if got := l.rules(); got != before {
			t.Errorf("got\n%s\nwant\n%s", got, before)
		}
	})
}
