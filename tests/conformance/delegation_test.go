package main

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"mknet/tests/conformance/suite"
)

// The items that the multikernel mode has nothing to say to are those of the veth
// mode with an IPAM plugin. `make conformance` tries it with all the others too.
func TestPodsDelegate(t *testing.T) {
	tools, err := toolsDir()
	if err != nil {
		t.Fatal(err)
	}
	d := pods(tools)
	if opts.plugin != "" {
		t.Skip("another plugin is under test (-plugin): leave the flag out")
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
