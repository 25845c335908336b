// Package pods holds the end-to-end tests of ordinary pods: their addresses, their
// data path, plugins chained behind, and policy on live traffic, with mknet's real
// programs in a private host.
package pods

import (
	"testing"

	"mknet/tests/node"
)

func TestMain(m *testing.M) { node.Main(m) }
