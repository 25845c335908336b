package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mknet/tests/conformance/suite"
	"mknet/tests/netlab"
)

// The plugin under test comes from the command line:
//
//	go test ./tests/conformance -args -plugin PATH [-config FILE]
var (
	opts      = registerFlags(flag.CommandLine)
	underTest suite.Driver
	// started is set by the first item: the tests of the suite itself come before,
	// on a host that has nothing of the plugin under test.
	started bool
)

func startOnce(t *testing.T) {
	t.Helper()
	if started {
		return
	}
	if err := underTest.Start(); err != nil {
		t.Fatal(err)
	}
	started = true
}

// versions are those that every change must pass, the oldest and the newest;
// MKNET_CONFORMANCE=all, and the command, try all of them.
func versions() []string {
	if os.Getenv("MKNET_CONFORMANCE") == "all" {
		return suite.Versions
	}
	return []string{suite.Versions[0], suite.Versions[len(suite.Versions)-1]}
}

func TestMain(m *testing.M) {
	flag.Parse()
	if !netlab.Inside() {
		if err := opts.prepare(); err != nil {
			fmt.Fprintln(os.Stderr, "conformance:", err)
			os.Exit(2)
		}
	}
	netlab.Private(func() int {
		status, err := runTests(m)
		if err != nil {
			fmt.Fprintln(os.Stderr, "conformance:", err)
			return 2
		}
		return status
	})
}

func runTests(m *testing.M) (int, error) {
	if err := suite.SetUpHost(); err != nil {
		return 0, err
	}
	drivers, err := opts.drivers()
	if err != nil {
		return 0, err
	}
	underTest = drivers[0]
	status := m.Run()
	if !started {
		return status, nil
	}
	return status, underTest.Stop()
}

// delegation holds the items that ask how a plugin delegates. Our multikernel
// mode delegates nothing, so that exactly these are not applicable.
var delegation = map[int]bool{24: true, 31: true, 38: true, 46: true, 47: true, 48: true, 49: true, 50: true, 51: true}

// item runs one item in every version that has it.
func item(t *testing.T, n int) {
	c := suite.Checks()[n-1]
	if want := "Test" + c.Title(); t.Name() != want {
		t.Fatalf("this test is named %s, item %d is %s", t.Name(), n, want)
	}
	startOnce(t)
	for _, v := range versions() {
		if !c.AppliesTo(v) {
			continue
		}
		t.Run(v, func(t *testing.T) {
			cell := suite.Run(underTest, c, v)
			text := strings.Join(cell.Reasons, "\n")
			if cell.Outcome == suite.Fail {
				t.Errorf("%s: %s\n%s", cell.Plugin, c.Asks, text)
			}
			if opts.plugin != "" {
				return // what does not apply to another plugin is its own affair
			}
			if na := cell.Outcome == suite.NotApplicable; na != delegation[n] {
				t.Errorf("%s: %s: not applicable: %v, expected: %v: %s", cell.Plugin, c.Asks, na, delegation[n], text)
			}
		})
	}
}

func TestItemsAreComplete(t *testing.T) {
	for i, c := range suite.Checks() {
		if c.Item != i+1 || c.Name == "" || c.Asks == "" {
			t.Errorf("place %d holds item %d, %q, %q", i+1, c.Item, c.Name, c.Asks)
		}
	}
	if n := len(suite.Checks()); n != 59 {
		t.Errorf("%d items, the list has 59", n)
	}
}

// double returns the driver of a plugin double with a defect, or without.
func double(t *testing.T, defect string) suite.Driver {
	t.Helper()
	tools, err := toolsDir()
	if err != nil {
		t.Fatal(err)
	}
	name := "double"
	if defect != "" {
		name += "-" + defect
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.Symlink(filepath.Join(tools, "double"), path); err != nil {
		t.Fatal(err)
	}
	d := suite.NewDouble(path)
	if err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
	return d
}
