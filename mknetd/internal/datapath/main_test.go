package datapath

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"

	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// needBPF is for machines without BPF.
func needBPF(t testing.TB) {
	t.Helper()
	if err := features.HaveProgramType(ebpf.SchedCLS); err != nil {
		netlab.Missing(t, fmt.Errorf("TC programs: %w", err), "run as root on a kernel with CONFIG_BPF_SYSCALL and CONFIG_NET_CLS_ACT")
	}
}

// open opens a data path of the test's own and purges it at the end.
func open(t testing.TB, cfg Config) *Datapath {
	t.Helper()
	needBPF(t)
	if cfg.Flows == 0 {
		cfg.Flows = 16384 // quicker to make
	}
	if cfg.Dir == "" {
		cfg.Dir = DefaultMount + "/t" + fmt.Sprint(os.Getpid()) + strings.ReplaceAll(strings.ReplaceAll(t.Name(), "/", "-"), ".", "-")
	}
	d, err := Open(cfg)
	if err != nil {
		var verifier *ebpf.VerifierError
		if errors.As(err, &verifier) {
			t.Fatalf("%+v", verifier)
		}
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Purge(); err != nil {
			t.Error(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}
