package ipt

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// The rules of the other flavour are left out only where nobody can have made any.
func TestDumpReadsBothFlavours(t *testing.T) {
	for _, test := range []struct {
		name   string
		legacy string // its script; empty: not installed
		dumped bool   // its tables are among the others
		err    string // part of the error
	}{
		{name: "both are installed", legacy: `exec "$real" "$@"`, dumped: true},
		{name: "legacy is not installed"},
		{name: "legacy is killed", legacy: "kill -9 $$", err: "read iptables legacy"},
		{name: "legacy ends with an error", legacy: "exit 4", err: "read iptables legacy"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			for _, name := range []string{"iptables-nft", "iptables-nft-restore", "iptables-nft-save", "iptables-legacy", "iptables-legacy-restore", "iptables-legacy-save"} {
				script := `exec "$real" "$@"`
				if strings.HasPrefix(name, "iptables-legacy") {
					if script = test.legacy; script == "" {
						continue
					}
				}
				script = "#!/bin/sh\nreal=/usr/sbin/" + name + "\n" + script + "\n"
				if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			host := netlab.New(t)
			for _, flavour := range []string{NFT, Legacy} {
				host.Run(t, "iptables-"+flavour, "-A", "FORWARD", "-i", "docker0", "-j", "ACCEPT")
			}
			if err := os.WriteFile(filepath.Join(dir, "iptables"), []byte("#!/bin/sh\nexec /usr/sbin/iptables-nft \"$@\"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			t.Setenv("PATH", dir)
			host.Do(t, func() {
				fw, err := Open(ctx(t), Config{Flavour: NFT, ChildPool: endpoint.DefaultPools.Child})
				if err != nil {
					t.Error(err)
					return
				}
				all, err := fw.Dump(ctx(t))
				if test.err != "" {
					if err == nil || !strings.Contains(err.Error(), test.err) {
						t.Errorf("got %d tables, %v; want an error with %q", len(all), err, test.err)
					}
					return
				}
				found := map[string]bool{}
				for _, table := range all {
					found[table.Flavour] = true
				}
				if err != nil || !found[NFT] || found[Legacy] != test.dumped {
					t.Errorf("got tables of %v, %v; want legacy's: %t", found, err, test.dumped)
				}
			})
		})
	}
}
