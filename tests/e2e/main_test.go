// Package e2e holds the end-to-end tests: mknet's real programs on the real
// kernel, in a private host. Each test says what a user sees.
package e2e

import (
	"fmt"
	"strings"
	"testing"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

func TestMain(m *testing.M) { node.Main(m) }

// mustPing fails the test unless one echo request from ns is answered.
func mustPing(t *testing.T, ns *netlab.Namespace, addr string, more ...string) {
	t.Helper()
	args := append([]string{"-c3", "-i0.2", "-W20"}, more...)
	out, err := ns.Try("ping", append(args, addr)...)
	if err != nil {
		t.Errorf("ping %s: %v", addr, err)
	}
	_ = out
}

// mustNotPing fails the test when an echo request is answered.
func mustNotPing(t *testing.T, ns *netlab.Namespace, addr string, more ...string) {
	t.Helper()
	args := append([]string{"-c2", "-i0.2", "-W1"}, more...)
	if out, err := ns.Try("ping", append(args, addr)...); err == nil {
		t.Errorf("ping %s was answered:\n%s", addr, out)
	}
}

// wantCode fails the test unless err is a CNI error with the code and the words.
func wantCode(t *testing.T, err error, code uint, words string) {
	t.Helper()
	if node.CodeOf(err) != code || !strings.Contains(fmt.Sprint(err), words) {
		t.Errorf("got %v (code %d), want code %d with %q", err, node.CodeOf(err), code, words)
	}
}

// counter returns the packets of the first rule of `iptables -t table -L -nvx`
// whose line has all the words.
func counter(t *testing.T, table string, words ...string) int {
	t.Helper()
	for line := range strings.Lines(netlab.Run(t, "iptables-save", "-c", "-t", table)) {
		all := true
		for _, w := range words {
			all = all && strings.Contains(line, w)
		}
		if !all {
			continue
		}
		var packets, bytes int
		if _, err := fmt.Sscanf(line, "[%d:%d]", &packets, &bytes); err == nil {
			return packets
		}
	}
	t.Fatalf("no rule in table %s has %q", table, words)
	return 0
}

// gone fails the test when the kernel keeps anything of the endpoint. A DEL that
// a busy machine made longer than mk-cni waits is still under way in mknetd.
func gone(t *testing.T, ep endpoint.Endpoint) {
	t.Helper()
	digits := ep.Generation.String()[:11]
	netlab.Eventually(t, node.Patience, func() error {
		for _, cmd := range [][]string{{"ip", "-o", "link"}, {"ip", "route"}, {"iptables-save"}, {"conntrack", "-L"}} {
			out := netlab.Run(t, cmd[0], cmd[1:]...)
			for _, mark := range []string{digits, ep.Subnet.String(), "src=" + ep.Address.String() + " "} {
				if strings.Contains(out, mark) {
					return fmt.Errorf("%s still shows %s", strings.Join(cmd, " "), mark)
				}
			}
		}
		return nil
	})
}

// containsAll reports whether s has every word.
func containsAll(s string, words ...string) bool {
	for _, w := range words {
		if !strings.Contains(s, w) {
			return false
		}
	}
	return true
}
