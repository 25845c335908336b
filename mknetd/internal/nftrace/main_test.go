package nftrace

import (
	"testing"

	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }
