package operate

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"mknet/spec/api"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// apply puts policy documents in force.
func apply(t *testing.T, n *node.Node, text string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	netlab.Run(t, n.Daemon, "policy", "apply", "--config", n.Config, "-f", path)
}

// trace runs the command and returns what it wrote, whatever its status.
func trace(t *testing.T, n *node.Node, args ...string) (out string, status int) {
	t.Helper()
	cmd := exec.CommandContext(within(t), n.Daemon, append([]string{"trace", "--config", n.Config}, args...)...)
	text, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(text), cmd.ProcessState.ExitCode()
}

const wall = `apiVersion: mknet/v1
kind: NetworkACL
metadata: {name: wall}
spec: {egress: [{priority: 5, action: deny, protocol: tcp, ports: [{port: 81}]}, {priority: 6, action: allow}]}
---
apiVersion: mknet/v1
kind: SecurityGroup
metadata: {name: web}
spec: {ingress: [{protocol: tcp, ports: [{port: 80}]}, {protocol: icmp}]}
---
apiVersion: mknet/v1
kind: Attachment
metadata: {name: wall}
spec: {networkACLRef: {name: wall}, subnets: [%s/32]}
---
apiVersion: mknet/v1
kind: Attachment
metadata: {name: web}
spec: {securityGroupRefs: [{name: web}], endpoints: [{name: "p2"}]}
`

// Probes through a running daemon: each verdict with the rule that makes it, as it
// is in the document.
func TestTraceWithProbes(t *testing.T) {
	n := node.New(t, "pools: [{name: pods, prefix: 10.90.0.0/24}]")
	from, to := n.AddPod(t, "p1", netlab.New(t)), n.AddPod(t, "p2", netlab.New(t))
	apply(t, n, fmt.Sprintf(wall, from.Address))
	for _, c := range []struct {
		name   string
		args   []string
		status int
		want   []string
	}{
		{"allowed, and nobody listens", []string{"--to", "p2", "--port", "80"}, 0, []string{
			"100 entered", "208 conntrack miss (egress of " + from.Address.String() + ")", "300 acl pass (egress of " + from.Address.String() + ") NetworkACL/wall spec.egress[1]",
			"302 sg pass (ingress of " + to.Address.String() + ") SecurityGroup/web spec.ingress[0]", "[peer]", "an answer", "209 conntrack hit",
			"probe: tcp from " + from.Address.String() + " to " + to.Address.String() + ": refused: connection refused", "PASSES: redirected to peer",
		}},
		{"denied by the ACL", []string{"--to", to.Address.String(), "--port", "81", "--proto", "tcp"}, 1, []string{
			"301 acl drop (egress of " + from.Address.String() + ") NetworkACL/wall spec.egress[0]", "503 dropped [drop-acl]", "no answer within", "DROPPED: dropped: acl drop at egress of",
		}},
		{"denied by the group", []string{"--to", to.Generation.Short(), "--port", "82"}, 1, []string{
			"303 sg drop (ingress of " + to.Address.String() + ") default", "503 dropped [drop-group]", "DROPPED: dropped: sg drop at ingress of " + to.Address.String() + " default",
		}},
		{"an echo", []string{"--to", to.Attachment.String()}, 0, []string{"SecurityGroup/web spec.ingress[1]", "answered: echo reply", "PASSES"}},
		{"to the host stack", []string{"--to", netlab.InternetAddr, "--proto", "udp", "--port", "9"}, 0, []string{"502 to the host stack [stack]", "udp from", "PASSES: to the host stack: acl pass"}},
	} {
		out, status := trace(t, n, append([]string{"--from", from.Address.String(), "--probe"}, c.args...)...)
		if status != c.status {
			t.Errorf("%s: status %d, want %d\n%s", c.name, status, c.status, out)
		}
		for _, want := range c.want {
			if !strings.Contains(out, want) {
				t.Errorf("%s: lacks %q\n%s", c.name, want, out)
			}
		}
	}
	for _, c := range []struct {
		args  []string
		words string
	}{
		{[]string{"--from", "nobody", "--to", "p2"}, "is no IPv4 address, and no endpoint is called so"},
		{[]string{"--from", "192.0.2.1", "--to", "192.0.2.2"}, "neither 192.0.2.1 nor 192.0.2.2 is an endpoint of this node"},
		{[]string{"--from", "p1", "--to", "p2", "--proto", "gre", "--probe"}, "can be icmp, tcp or udp"},
		{[]string{"--from", "p1", "--to", "p2", "--proto", "icmp", "--port", "3"}, "icmp has no ports"},
		{[]string{"--from", "192.0.2.1", "--to", "p2", "--probe"}, "a probe is sent by an ordinary pod of this node"},
		{[]string{"--from", "p1", "--to", "p2", "--timeout", "11m"}, "must be 1 to 600"},
	} {
		if out, status := trace(t, n, c.args...); status != 4 || !strings.Contains(out, c.words) {
			t.Errorf("%v: status %d\n%s", c.args, status, out)
		}
	}
}

// begin starts a trace by the command and waits until it has begun.
func begin(t *testing.T, n *node.Node, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(n.Daemon, append([]string{"trace", "--config", n.Config, "-o", "json", "--timeout", "10m"}, args...)...)
	pipe, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	var l api.TraceLine
	line, err := bufio.NewReader(pipe).ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &l)
	}
	if err != nil || l.Begin == nil {
		t.Fatalf("%s: %v", line, err)
	}
	return cmd
}

// tables are what traces have in nf_tables.
func tables(t *testing.T) (found []string) {
	t.Helper()
	for line := range strings.Lines(netlab.Run(t, "nft", "list", "tables")) {
		if strings.Contains(line, "mknet-trace-") {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

// sessions is how many traces the programs know.
func sessions(t *testing.T, n *node.Node) int {
	t.Helper()
	var d struct{ Entries []any }
	if err := json.Unmarshal([]byte(netlab.Run(t, n.Daemon, "bpf", "dump", "trace_sessions", "--config", n.Config, "-o", "json")), &d); err != nil {
		t.Fatal(err)
	}
	running := 0
	for _, e := range d.Entries {
		if e.(map[string]any)["until"].(float64) > 0 {
			running++
		}
	}
	return running
}

// Sixteen run at once; one whose command is killed gives its place back at once, and
// all of them are gone with the daemon and the next one's start.
func TestTraceSessionsEnd(t *testing.T) {
	n := node.New(t, "pools: [{name: pods, prefix: 10.90.0.0/24}]")
	n.AddPod(t, "p1", netlab.New(t))
	var all []*exec.Cmd
	for i := range 16 {
		all = append(all, begin(t, n, "--from", "p1", "--to", "192.0.2.1", "--port", fmt.Sprint(100+i)))
	}
	if got := sessions(t, n); got != 16 {
		t.Errorf("%d sessions in the kernel, want 16", got)
	}
	if got := tables(t); len(got) != 16 {
		t.Errorf("16 traces have the tables %q", got)
	}
	if out, status := trace(t, n, "--from", "p1", "--to", "192.0.2.1"); status != 4 || !strings.Contains(out, "16 traces run, which is all there can be") {
		t.Errorf("one more: status %d\n%s", status, out)
	}
	if err := all[3].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	netlab.Eventually(t, node.Patience, func() error {
		if got := sessions(t, n); got != 15 {
			return fmt.Errorf("%d sessions in the kernel, want 15", got)
		}
		if got := tables(t); len(got) != 15 {
			return fmt.Errorf("tables %q, want 15", got)
		}
		return nil
	})
	begin(t, n, "--from", "p1", "--to", "192.0.2.1", "--port", "999")
	n.Kill(t)
	if got := sessions(t, n); got != 16 {
		t.Errorf("%d sessions in the kernel after the daemon was killed, want 16 with an end of their own", got)
	}
	if got := tables(t); got != nil {
		t.Errorf("a daemon that was killed has left %q", got)
	}
	n.Start(t)
	if got := sessions(t, n); got != 0 {
		t.Errorf("%d sessions in the kernel of the next daemon", got)
	}
}
