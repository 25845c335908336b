package e2e

import (
	"os"
	"strings"
	"testing"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// A pool that overlaps a foreign route is refused by the route's name: when the
// daemon starts, and by ADD when the route comes later.
func TestOverlappingPoolIsRefusedByName(t *testing.T) {
	n := node.Prepare(t)
	netlab.Run(t, "ip", "route", "add", "172.30.0.0/24", "via", netlab.InternetAddr)
	out, err := netlab.Try(n.Programs.Daemon, "serve", "--config", n.Config)
	if err == nil || !strings.Contains(err.Error()+out, "172.30.0.0/24") {
		t.Errorf("mknetd with an overlapping pool: %v %s", err, out)
	}
	netlab.Run(t, "ip", "route", "del", "172.30.0.0/24")
	n.Start(t)
	pod := netlab.New(t)
	netlab.Run(t, "ip", "route", "add", "172.30.0.0/24", "via", netlab.InternetAddr)
	_, err = n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c1", Netns: pod.Path(), IfName: "eth0"})
	if err == nil || !strings.Contains(err.Error(), "172.30.0.0/24") {
		t.Errorf("ADD beside an overlapping route: %v", err)
	}
	netlab.Run(t, "ip", "route", "del", "172.30.0.0/24")
	if left := n.List(t); len(left) != 0 {
		t.Errorf("the refused ADD left %d records", len(left))
	}
}

// A configuration with faults is refused, each fault by its key.
func TestBadConfigurationIsRefusedByKey(t *testing.T) {
	n := node.New(t)
	for text, want := range map[string][]string{
		"hostAcess: deny\n":                               {"hostAcess", "did you mean hostAccess"},
		"socket: relative\nchildPool: 8.8.8.0/24\n":       {"socket", "childPool"},
		"socket: /run/a.sock\nsocket: /run/b.sock\n":      {"socket"},
		"quarantine: soon\nconnectionLimit: -1\nmtu: 1\n": {"quarantine", "connectionLimit", "mtu"},
	} {
		path := n.Dir + "/bad.yaml"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := netlab.Try(n.Programs.Daemon, "config", "check", "--config", path)
		if err == nil {
			t.Errorf("accepted: %q: %s", text, out)
			continue
		}
		for _, key := range want {
			if !strings.Contains(err.Error(), key) {
				t.Errorf("the refusal of %q lacks %q: %v", text, key, err)
			}
		}
	}
}
