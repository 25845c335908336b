// Package e2e holds the end-to-end tests: mknet's real programs on the real
// kernel, in a private host. Each test says what a user sees.
package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

func TestMain(m *testing.M) {
	if os.Getenv(superviseEnv) != "" {
		fmt.Fprintln(os.Stderr, "become the supervised mknetd:", becomeSupervised())
		os.Exit(1)
	}
	node.Main(m)
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
