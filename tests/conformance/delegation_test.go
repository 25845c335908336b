package main

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"mknet/tests/conformance/suite"
	"mknet/tests/netlab"
)

// The items that the multikernel mode has nothing to say to are those of the veth
// mode with an IPAM plugin. `go run ./tests/conformance -compare veth` tries it with
// all the others too.
func TestPodsDelegate(t *testing.T) {
	tools, err := toolsDir()
	if err != nil {
		t.Fatal(err)
	}
	d := pods(tools)
	if opts.plugin != "" {
		netlab.Missing(t, errors.New("another plugin is under test"), "leave -plugin out")
	}
	if err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
	newest := suite.Versions[len(suite.Versions)-1]
	for _, n := range slices.Sorted(maps.Keys(delegation)) {
		c := suite.Checks()[n-1]
		t.Run(c.Title(), func(t *testing.T) {
			if cell := suite.Run(d, c, newest); cell.Outcome != suite.Pass {
				t.Errorf("%s: %s: %s\n%s", cell.Plugin, c.Asks, cell.Outcome, strings.Join(cell.Reasons, "\n"))
			}
		})
	}
}
