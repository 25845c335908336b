package node

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"mknet/tests/netlab"
)

// Reference builds one of the reference plugins ("meta/portmap") once per machine, at
// the version that the callers' matrix uses too, and returns its path.
func Reference(t testing.TB, plugin string) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cache, "mknet", "e2e")
	bin := filepath.Join(dir, filepath.Base(plugin))
	if _, err := os.Stat(bin); err == nil {
		return bin
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-o", bin, "github.com/containernetworking/plugins/plugins/"+plugin)
	cmd.Dir = "../callers/reference"
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the reference plugin %s: %v\n%s", plugin, err, out)
	}
	return bin
}

// PurgeReference removes the chains that the reference plugins leave when their
// last rule goes.
func PurgeReference(t testing.TB) {
	t.Helper()
	for _, rule := range [][]string{
		{"-t", "nat", "-D", "PREROUTING", "-m", "addrtype", "--dst-type", "LOCAL", "-j", "CNI-HOSTPORT-DNAT"},
		{"-t", "nat", "-D", "OUTPUT", "-m", "addrtype", "--dst-type", "LOCAL", "-j", "CNI-HOSTPORT-DNAT"},
		{"-t", "nat", "-D", "POSTROUTING", "-m", "comment", "--comment", "CNI portfwd requiring masquerade", "-j", "CNI-HOSTPORT-MASQ"},
		{"-D", "FORWARD", "-m", "comment", "--comment", "CNI firewall plugin rules", "-j", "CNI-FORWARD"},
	} {
		_, _ = netlab.Try("iptables", rule...)
	}
	for _, table := range []string{"nat", "filter"} {
		for _, op := range []string{"-F", "-X"} {
			for line := range strings.Lines(netlab.Run(t, "iptables-save", "-t", table)) {
				if name, ok := strings.CutPrefix(line, ":CNI-"); ok {
					_, _ = netlab.Try("iptables", "-t", table, op, "CNI-"+strings.Fields(name)[0])
				}
			}
		}
	}
}
