package ipt

import (
	"os"
	"testing"

	"mknet/tests/netlab"
)

func TestMain(m *testing.M) {
	if flavour := os.Getenv(adderEnv); flavour != "" { // in the private host of the test that started it
		os.Exit(adder(flavour))
	}
	netlab.Main(m)
}
