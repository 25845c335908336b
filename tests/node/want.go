package node

import (
	"fmt"
	"strings"
	"testing"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// WantCode fails the test unless err is a CNI error with the code and the words.
func WantCode(t testing.TB, err error, code uint, words string) {
	t.Helper()
	if CodeOf(err) != code || !strings.Contains(fmt.Sprint(err), words) {
		t.Errorf("got %v (code %d), want code %d with %q", err, CodeOf(err), code, words)
	}
}

// Gone fails the test when the kernel keeps anything of the endpoint. A DEL that
// a busy machine made longer than mk-cni waits is still under way in mknetd.
func Gone(t testing.TB, ep endpoint.Endpoint) {
	t.Helper()
	digits := ep.Generation.String()[:11]
	netlab.Eventually(t, Patience, func() error {
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
