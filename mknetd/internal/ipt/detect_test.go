package ipt

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

func TestFlavourIsDetected(t *testing.T) {
	plain, err := flavourOf(ctx(t), "iptables")
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name  string
		rules []string // flavours that hold a rule already
		want  string
	}{
		{"none holds rules", nil, plain},
		{"legacy holds rules", []string{Legacy}, Legacy},
		{"nft holds rules", []string{NFT}, NFT},
		{"both hold rules", []string{NFT, Legacy}, plain},
	} {
		t.Run(test.name, func(t *testing.T) {
			host := netlab.New(t)
			for _, flavour := range test.rules {
				host.Run(t, "iptables-"+flavour, "-A", "FORWARD", "-i", "docker0", "-j", "ACCEPT")
			}
			host.Do(t, func() {
				fw, err := Open(ctx(t), Config{ChildPool: endpoint.DefaultPools.Child})
				if err != nil {
					t.Error(err)
					return
				}
				if fw.Flavour() != test.want {
					t.Errorf("got flavour %s, want %s", fw.Flavour(), test.want)
				}
			})
		})
	}
}

func TestOpenRefuses(t *testing.T) {
	for _, test := range []struct {
		name string
		cfg  Config
		want string
	}{
		{"unknown flavour", Config{Flavour: "ebtables", ChildPool: endpoint.DefaultPools.Child}, `iptables flavour "ebtables": must be "nft" or "legacy"`},
		{"no pool", Config{}, `child pool "invalid Prefix": must be an IPv4 prefix`},
	} {
		if _, err := Open(ctx(t), test.cfg); err == nil || err.Error() != test.want {
			t.Errorf("%s: got error %v, want %s", test.name, err, test.want)
		}
	}
}

// Programs that are missing, too old, or only there under the plain name.
func TestProgramsAreFound(t *testing.T) {
	for _, test := range []struct {
		name     string
		programs map[string]string // name: what --version prints
		want     string            // flavour, or
		err      string            // part of the error
	}{
		{name: "nothing installed", err: "no usable iptables"},
		{name: "only legacy", programs: map[string]string{"iptables-legacy": "iptables v1.8.9 (legacy)"}, want: Legacy},
		{name: "only the plain name, nft", programs: map[string]string{"iptables": "iptables v1.8.10 (nf_tables)"}, want: NFT},
		{name: "only the plain name, legacy", programs: map[string]string{"iptables": "iptables v1.8.7 (legacy)"}, want: Legacy},
		{name: "too old", programs: map[string]string{"iptables": "iptables v1.6.1"}, err: "is version 1.6.1, 1.8.0 or later is needed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, version := range test.programs {
				for _, suffix := range []string{"", "-restore", "-save"} {
					script := "#!/bin/sh\necho '" + version + "'\n"
					if err := os.WriteFile(filepath.Join(dir, name+suffix), []byte(script), 0o755); err != nil {
						t.Fatal(err)
					}
				}
			}
			t.Setenv("PATH", dir)
			got, err := detect(ctx(t), "")
			switch {
			case test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)):
				t.Errorf("got %q, %v, want an error with %q", got.flavour, err, test.err)
			case test.err == "" && (err != nil || got.flavour != test.want):
				t.Errorf("got %q, %v, want %s", got.flavour, err, test.want)
			}
		})
	}
}

// Only a program that says so proves that there is no security table.
func TestGuardTableIsChosenOnProof(t *testing.T) {
	for _, test := range []struct {
		name, ends string
		guard      string // "": Open fails
	}{
		{"there is one", "exit 0", tableSecurity},
		{"the table does not exist", "exit 3", tableMangle},
		{"nothing of that kind", "exit 1", tableMangle},
		{"no memory", "exit 4", ""},
		{"killed", "kill -9 $$", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			for _, suffix := range []string{"", "-restore", "-save"} {
				script := "#!/bin/sh\ncase \"$*\" in *security*) " + test.ends + ";; esac\necho 'iptables v1.8.9 (nf_tables)'\n"
				if err := os.WriteFile(filepath.Join(dir, "iptables"+suffix), []byte(script), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("PATH", dir)
			fw, err := Open(ctx(t), Config{ChildPool: endpoint.DefaultPools.Child})
			switch {
			case test.guard == "" && (err == nil || !strings.Contains(err.Error(), "look for table security")):
				t.Errorf("got %v, want an error that names the table", err)
			case test.guard != "" && (err != nil || fw.GuardTable() != test.guard):
				t.Errorf("got %v, want the guard in %s", err, test.guard)
			}
		})
	}
}

// A program that hangs ends with the context, and so does what it started.
func TestHungProgram(t *testing.T) {
	limited, cancel := context.WithTimeout(ctx(t), 100*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err := run(limited, time.Hour, "", "/bin/sleep", "3600")
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want a deadline", err)
	}
	if took := time.Since(start); took > 30*time.Second {
		t.Errorf("took %s", took)
	}
}

// Without a security table the guard is in mangle, before filter.
func TestGuardInMangle(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		if err := l.fw.RemoveShared(ctx(t)); err != nil {
			t.Fatal(err)
		}
		l.fw.guard = tableMangle
		if err := l.fw.EnsureShared(ctx(t)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := l.fw.RemoveShared(ctx(t)); err != nil {
				t.Error(err)
			}
			share(t, flavour)
		})
		a, b := l.child(1), l.child(2)
		serve(t, b.Namespace, addrPort(b.ep.Address, 80))
		serve(t, l.internet, "0.0.0.0:8080")
		l.ipt("-I", "FORWARD", "1", "-j", "ACCEPT")
		t.Cleanup(func() { l.ipt("-D", "FORWARD", "-j", "ACCEPT") })
		_ = mustNotReach(t, a.Namespace, "tcp4", addrPort(b.ep.Address, 80))
		mustReach(t, a.Namespace, "tcp4", netlab.InternetAddr+":8080", netlab.HostAddr)
		if got := l.faults(a.ep); got != nil {
			t.Errorf("faults: %q", got)
		}
		if got := l.ipt("-t", tableSecurity, "-S"); strings.Contains(got, "MK") {
			t.Errorf("security holds\n%s", got)
		}
	})
}
