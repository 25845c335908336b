// Package pump holds the end-to-end tests of the packet pump: mk-shim and mk-agent
// between a node and its children, whatever restarts, in a private host.
package pump

import (
	"testing"

	"mknet/tests/node"
)

func TestMain(m *testing.M) { node.Main(m) }
