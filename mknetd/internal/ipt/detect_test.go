package ipt

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

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

// What does not answer is not taken for a flavour without rules, nor for one that is
// not installed: with the other one every endpoint's rules would be built anew.
func TestFlavourIsNotGuessed(t *testing.T) {
	const nft, legacy = "echo 'iptables v1.8.9 (nf_tables)'", "echo 'iptables v1.8.9 (legacy)'"
	interrupted := func(times int) func(*nl.NetlinkRequest) ([][]byte, error) {
		ask := askNFT
		return func(req *nl.NetlinkRequest) ([][]byte, error) {
			if times--; times >= 0 {
				return nil, netlink.ErrDumpInterrupted
			}
			return ask(req)
		}
	}
	refused := func(err error) func(*nl.NetlinkRequest) ([][]byte, error) {
		return func(*nl.NetlinkRequest) ([][]byte, error) { return nil, err }
	}
	for _, test := range []struct {
		name     string
		programs map[string]string // name: script, in place of a whole program
		ask      func(*nl.NetlinkRequest) ([][]byte, error)
		want     string // of auto: flavour, or
		err      string // part of the error
	}{
		// The host has rules of nft; the plain iptables is legacy.
		{name: "all answer", want: NFT},
		{name: "changes interrupt the list three times", ask: interrupted(3), want: NFT},
		{name: "changes interrupt the list for ever", ask: interrupted(1 << 30), err: "list nftables"},
		{name: "the kernel has no memory", ask: refused(unix.ENOMEM), err: "list nftables: cannot allocate memory"},
		{name: "the kernel has no nftables", ask: refused(unix.EINVAL), want: Legacy},
		{name: "iptables-nft is killed", programs: map[string]string{"iptables-nft": "kill -9 $$"}, err: "iptables-nft"},
		{name: "iptables-nft ends with an error", programs: map[string]string{"iptables-nft": "exit 4"}, err: "iptables-nft"},
		{name: "iptables-nft is not installed", programs: map[string]string{"iptables-nft": ""}, want: Legacy},
		{name: "the plain one is killed", programs: map[string]string{"iptables": "kill -9 $$"}, ask: refused(unix.EINVAL), err: "iptables --version"},
		{name: "the plain one is not installed", programs: map[string]string{"iptables": ""}, ask: refused(unix.EINVAL), want: NFT},
		{name: "legacy has tables and is killed", programs: map[string]string{"iptables-legacy-save": "kill -9 $$"}, err: "iptables-legacy-save"},
		{name: "legacy has tables and cannot be read", programs: map[string]string{"iptables-legacy-save": "echo nonsense"}, err: "cannot read the line"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, script := range map[string]string{"iptables-nft": nft, "iptables-nft-save": "", "iptables-legacy": legacy, "iptables-legacy-save": "exit 0", "iptables": legacy} {
				if other, ok := test.programs[name]; ok {
					if script = other; other == "" {
						continue
					}
				}
				if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			for _, name := range []string{"iptables-nft-restore", "iptables-legacy-restore"} {
				if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			host := netlab.New(t)
			host.Run(t, "iptables-nft", "-A", "FORWARD", "-i", "docker0", "-j", "ACCEPT")
			host.Run(t, "iptables-legacy", "-S") // makes its tables
			t.Setenv("PATH", dir)
			if test.ask != nil {
				real := askNFT
				askNFT = test.ask
				defer func() { askNFT = real }()
			}
			host.Do(t, func() {
				got, err := detect(ctx(t), "")
				switch {
				case test.err == "" && (err != nil || got.flavour != test.want):
					t.Errorf("got %q, %v, want %s", got.flavour, err, test.want)
				case test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err) || !strings.Contains(err.Error(), "configure `firewall: nft`")):
					t.Errorf("got %q, %v, want an error with %q that says what to configure", got.flavour, err, test.err)
				}
				if got, err := detect(ctx(t), Legacy); err != nil || got.flavour != Legacy {
					t.Errorf("asked for legacy: got %q, %v", got.flavour, err)
				}
			})
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
