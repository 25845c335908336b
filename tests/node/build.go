package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"mknet/tests/netlab"
)

// Main runs the tests of m in a private host.
func Main(m *testing.M) {
	netlab.Main(m)
}

// Programs are the built binaries.
type Programs struct{ CNI, Daemon, Shim, Agent string }

var programs struct {
	once sync.Once
	Programs
	err error
}

// Build builds the four programs once per test binary. extra are go build's
// flags, such as "-tags", "crashpoints"; they count at the first call only.
// Without any, MKNET_PROGRAMS may name a folder that has the programs already
// (make build makes bin/): linking them takes minutes on a busy machine.
func Build(t testing.TB, extra ...string) Programs {
	t.Helper()
	programs.once.Do(func() { programs.Programs, programs.err = build(extra) })
	if programs.err != nil {
		t.Fatal(programs.err)
	}
	return programs.Programs
}

func build(extra []string) (Programs, error) {
	if dir := os.Getenv("MKNET_PROGRAMS"); dir != "" && len(extra) == 0 {
		p := Programs{CNI: dir + "/mk-cni", Daemon: dir + "/mknetd", Shim: dir + "/mk-shim", Agent: dir + "/mk-agent"}
		for _, path := range []string{p.CNI, p.Daemon, p.Shim, p.Agent} {
			if _, err := os.Stat(path); err != nil {
				return p, fmt.Errorf("MKNET_PROGRAMS: %w", err)
			}
		}
		return p, nil
	}
	// /run is the private host's own tmpfs and goes with it.
	return BuildInto("/run/mknet-bin", extra...)
}

// BuildInto builds the four programs into a folder, with these flags of go build.
func BuildInto(dir string, extra ...string) (Programs, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Programs{}, err
	}
	_, self, _, _ := runtime.Caller(0)
	root := filepath.Dir(filepath.Dir(filepath.Dir(self)))
	p := Programs{CNI: dir + "/mk-cni", Daemon: dir + "/mknetd", Shim: dir + "/mk-shim", Agent: dir + "/mk-agent"}
	for _, b := range []struct{ out, pkg string }{{p.CNI, "./mk-cni"}, {p.Daemon, "./mknetd"}, {p.Shim, "./shim"}, {p.Agent, "./mk-agent"}} {
		args := append(append([]string{"build"}, extra...), "-o", b.out, b.pkg)
		cmd := exec.Command("go", args...)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return p, fmt.Errorf("go %v: %w\n%s", args, err, out)
		}
	}
	return p, nil
}
