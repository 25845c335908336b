package netlab_test

import (
	"strings"
	"testing"

	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

func TestNamespaceIsApart(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	ns.Run(t, "ip", "link", "add", "x0", "type", "veth", "peer", "name", "x1")
	if out := netlab.Run(t, "ip", "-br", "link"); strings.Contains(out, "x0") {
		t.Errorf("host shows a link of the namespace:\n%s", out)
	}
	var links string
	ns.Do(t, func() { links, _ = netlab.Try("ip", "-br", "link") })
	if !strings.Contains(links, "x0") {
		t.Errorf("Do did not enter the namespace:\n%s", links)
	}
}

func TestUplinkReachesTheInternet(t *testing.T) {
	netlab.Clean(t)
	netlab.Uplink(t, "1400")
	netlab.Run(t, "ping", "-c1", "-W5", netlab.InternetAddr)
}

func TestPrivateHostHasNothingOfTheMachine(t *testing.T) {
	if out := netlab.Run(t, "ip", "-br", "link"); strings.Count(out, "\n") != 0 || !strings.HasPrefix(out, "lo") {
		t.Errorf("a fresh private host has lo alone, got:\n%s", out)
	}
}
