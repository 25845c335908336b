package ipt

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mknet/spec/endpoint"
)

// What is ours in the other flavour is found and removed, what is foreign stays.
func TestOtherFlavour(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		t.Cleanup(func() { share(t, flavour) })
		current := open(t, map[string]string{NFT: Legacy, Legacy: NFT}[flavour])
		l.ipt("-A", "FORWARD", "-i", "nobody0", "-j", "ACCEPT")
		t.Cleanup(func() { l.ipt("-D", "FORWARD", "-i", "nobody0", "-j", "ACCEPT") })
		a, b := testEndpoint(endpoint.NewGeneration(), 1), testEndpoint(endpoint.NewGeneration(), 2)
		l.ensure(a)
		l.ensure(b)
		l.ipt("-t", "raw", "-F", b.Chain) // loses its mark there
		if got, err := current.Elsewhere(ctx(t), false); err != nil || got != flavour {
			t.Fatalf("Elsewhere: got %q, %v, want %s", got, err, flavour)
		}
		for _, want := range []bool{true, false} { // twice: absent is success
			found, err := l.fw.RemoveAll(ctx(t), []endpoint.Generation{a.Generation, b.Generation})
			if err != nil || found != want {
				t.Errorf("RemoveAll: got %v, %v, want %v", found, err, want)
			}
		}
		rules := l.rules()
		if strings.Contains(rules, "MK") || strings.Contains(rules, "mknet") {
			t.Errorf("ours is left:\n%s", rules)
		}
		if !strings.Contains(rules, "-A FORWARD -i nobody0 -j ACCEPT") {
			t.Errorf("the foreign rule is gone:\n%s", rules)
		}
		if got, err := current.Elsewhere(ctx(t), true); err != nil || got != "" {
			t.Errorf("Elsewhere: got %q, %v, want none", got, err)
		}
	})
}

// A foreign rule keeps a shared chain, and is named.
func TestSharedChainIsHeld(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		t.Cleanup(func() { share(t, flavour) })
		l.ipt("-A", "FORWARD", "-i", "nobody0", "-j", fwdRoot)
		_, err := l.fw.RemoveAll(ctx(t), nil)
		if want := "-A FORWARD -i nobody0 -j " + fwdRoot; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
		l.ipt("-D", "FORWARD", "-i", "nobody0", "-j", fwdRoot)
		if found, err := l.fw.RemoveAll(ctx(t), nil); err != nil || !found {
			t.Errorf("RemoveAll: got %v, %v", found, err)
		}
	})
}

// Legacy programs that are absent made nothing, unless a record knows better; those
// that do not answer are no absence.
func TestOtherFlavourIsLookedFor(t *testing.T) {
	prime(t) // legacy has tables, and chains of ours
	current := open(t, NFT)
	for _, test := range []struct {
		name     string
		save     string // what iptables-legacy-save does; "": not installed
		expected bool
		want     string
		err      string
	}{
		{name: "absent"},
		{name: "absent and expected", expected: true, err: "iptables legacy"},
		{name: "killed", save: "kill -9 $$", err: "iptables-legacy-save"},
		{name: "nonsense", save: "echo nonsense", err: "cannot read the line"},
		{name: "foreign", save: `printf '*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -j ACCEPT\nCOMMIT\n'`},
		{name: "an empty chain of anybody", save: `printf '*filter\n:MK-ffffffffffff - [0:0]\nCOMMIT\n'`},
		{name: "ours", save: `printf '*nat\n:MKNET-POST - [0:0]\nCOMMIT\n'`, want: Legacy},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, does := range map[string]string{"iptables-legacy": "echo 'iptables v1.8.9 (legacy)'", "iptables-legacy-restore": "exit 0", "iptables-legacy-save": test.save} {
				if test.save == "" {
					continue
				}
				if err := os.WriteFile(filepath.Join(dir, name), fmt.Appendf(nil, "#!/bin/sh\n%s\n", does), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("PATH", dir)
			got, err := current.Elsewhere(ctx(t), test.expected)
			if got != test.want || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("got %q, %v, want %q, %q", got, err, test.want, test.err)
			}
		})
	}
}
