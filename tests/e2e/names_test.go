package e2e

import (
	"fmt"
	"strings"
	"testing"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// Interface names made of a truncated container ID clashed, and the later pod's
// plugin deleted the earlier one's link. A foreign link whose name looks like ours
// stands whatever we do.
func TestC23_IDsWithOnePrefixAndForeignLinks(t *testing.T) {
	n := node.New(t)
	const foreign = "mkv0123456789a"
	netlab.Run(t, "ip", "link", "add", foreign, "type", "veth", "peer", "name", "stranger")
	t.Cleanup(func() { netlab.Run(t, "ip", "link", "del", foreign) })
	before := netlab.Run(t, "ip", "-o", "link", "show", foreign)
	stands := func(when string) {
		t.Helper()
		if after, err := netlab.Try("ip", "-o", "link", "show", foreign); err != nil || after != before {
			t.Errorf("%s: the foreign link was\n%s and is\n%s%v", when, before, after, err)
		}
	}
	links := map[string]bool{foreign: true}
	var eps []endpoint.Endpoint
	for i := range 4 {
		ep := n.Add(t, strings.Repeat("a", 63)+fmt.Sprint(i), netlab.New(t), "eth0")
		if links[ep.HostLink] || len(ep.HostLink) > 15 {
			t.Errorf("host link %s is taken or too long; there are %v", ep.HostLink, links)
		}
		links[ep.HostLink] = true
		eps = append(eps, ep)
	}
	stands("after ADD")
	n.Kill(t)
	n.Start(t)
	stands("after a restart")
	for i, ep := range eps {
		if err := n.Del(t, ep); err != nil {
			t.Error(err)
		}
		for _, later := range eps[i+1:] {
			netlab.Run(t, "ip", "link", "show", later.HostLink)
		}
	}
	stands("after DEL")
	for _, ep := range eps {
		node.Gone(t, ep)
	}
}
