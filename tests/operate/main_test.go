// Package operate tests what an operator sees of a node: metrics, events, findings
// and the explained way of a packet, against the kernel's own truth.
package operate

import (
	"context"
	"testing"

	"mknet/tests/node"
)

func TestMain(m *testing.M) { node.Main(m) }

// within is a context for the calls of one test.
func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), node.Patience)
	t.Cleanup(cancel)
	return ctx
}
