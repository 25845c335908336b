package crash

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// purge is `mknetd purge` that dies; a daemon must start afterwards, and the next
// purge must leave nothing.
var purge = story{name: "mknetd-purge", play: func(t *testing.T, n *node.Node, v *victim, o *outcome) {
	n.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), storyBudget)
	defer cancel()
	c, daemon := newCaller(t, n), n.Client(t)
	ep, err := c.add(ctx, daemon, "eth0")
	if err == nil {
		_, err = c.add(ctx, daemon, "net1")
	}
	if err == nil {
		err = c.attachShim(ctx, t, daemon, ep.Generation, endpoint.Sandbox{ID: "s1", Generation: "g1"})
	}
	if err != nil {
		t.Fatal(err)
	}
	n.Stop(t)

	out, err := runPurge(n, v.env("purge")...)
	switch {
	case killed(err):
		o.Reached = true
	case err != nil:
		t.Fatalf("purge: %v\n%s", err, out)
	}
	n.Start(t)
	inventory(t, n, o, agree)
	n.Stop(t)
	if out, err := runPurge(n); err != nil {
		o.fault(clean, "purge after the crash: %v\n%s", err, out)
	}
	for _, cmd := range [][]string{{"iptables-save"}, {"ip", "link"}} {
		for line := range strings.Lines(netlab.Run(t, cmd[0], cmd[1:]...)) {
			if strings.Contains(line, "MK-") || strings.Contains(line, "MKNET-") || strings.Contains(line, " mkv") {
				o.fault(clean, "purge left %s", line)
			}
		}
	}
	n.Start(t)
	judge(t, n, o, nil, func() {})
}}

func runPurge(n *node.Node, env ...string) (string, error) {
	cmd := exec.Command(n.Daemon, "purge", "--config", n.Config, "--yes")
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}
