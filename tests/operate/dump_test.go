package operate

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// The maps of a node are dumped in every form by the program itself, with mknetd
// running, killed, and before there are any.
func TestDumpWithAndWithoutADaemon(t *testing.T) {
	n := node.Prepare(t, "pools: [{name: pods, prefix: 10.90.0.0/24}]")
	dump := func(args ...string) (string, error) {
		out, err := exec.Command(n.Daemon, append([]string{"bpf", "dump", "--config", n.Config}, args...)...).CombinedOutput()
		return string(out), err
	}
	if out, err := dump("endpoints"); err == nil || !strings.Contains(out, "nothing is pinned in /sys/fs/bpf/mknet-") {
		t.Errorf("before mknetd ever ran: %v\n%s", err, out)
	}
	n.Start(t)
	ns := netlab.New(t)
	ep, other := n.AddPod(t, "p1", ns), n.AddPod(t, "p2", netlab.New(t))
	ns.Run(t, "ping", "-n", "-c1", "-W5", other.Address.String())
	for _, running := range []bool{true, false} {
		if !running {
			n.Kill(t)
		}
		address := fmt.Sprint("address=", ep.Address)
		if out, err := dump("endpoints", "--filter", address); err != nil || !strings.Contains(out, ep.Generation.String()[:16]) || !strings.HasPrefix(out, "ADDRESS ") || strings.Count(out, "\n") != 2 {
			t.Errorf("running %t: table: %v\n%s", running, err, out)
		}
		var got struct {
			Entries []struct {
				Address, Outcome string
				Packets          int
			}
			Lookups int
		}
		args := []string{"counts", "--filter", address, "--filter", "outcome=peer", "-o"}
		for form, parse := range map[string]func([]byte, any) error{"json": json.Unmarshal, "yaml": func(b []byte, v any) error { return yaml.Unmarshal(b, v) }} {
			out, err := dump(append(args, form)...)
			if err == nil {
				err = parse([]byte(out), &got)
			}
			if err != nil || len(got.Entries) != 1 || got.Entries[0].Packets != 1 || got.Lookups != 1 {
				t.Errorf("running %t: %s: %v\n%s", running, form, err, out)
			}
		}
		if out, err := dump("endpoints", "--limit", "1"); err != nil || !strings.Contains(out, "there are more than the 1 of --limit") {
			t.Errorf("running %t: limit: %v\n%s", running, err, out)
		}
	}
	n.Start(t)
}
