package main

import (
	"strings"
	"testing"

	"mknet/tests/conformance/suite"
)

// defects are what the plugin double can do wrong, and the items that must find
// it. Every item is named at least once, so that none passes whatever happens.
var defects = []struct {
	name    string
	items   []int
	version string // default 1.1.0
}{
	{"exit-zero", []int{1, 2}, ""},
	{"errors-on-stderr", []int{2, 58}, ""},
	{"any-id", []int{3}, ""},
	{"any-ifname", []int{4}, ""},
	{"any-network", []int{5, 59}, ""},
	{"no-link", []int{6}, ""},
	{"no-result", []int{7}, ""},
	{"drops-prev", []int{8, 57}, ""},
	{"replaces", []int{9, 42}, ""},
	{"guess-params", []int{10}, ""},
	{"keeps-rules", []int{11, 14, 36}, ""},
	{"del-needs-prev", []int{12, 16}, ""},
	{"del-needs-netns", []int{13, 17}, ""},
	{"del-needs-daemon", []int{15}, ""},
	{"check-ignores-prev", []int{18}, ""},
	{"check-strict", []int{19}, ""},
	{"check-lazy", []int{20, 21, 22}, "0.4.0"},
	{"check-early", []int{23}, "0.4.0"},
	{"delegate-no-check", []int{24, 49}, ""},
	{"check-talks", []int{25}, ""},
	{"status-fails", []int{26, 32}, ""},
	{"status-always-ok", []int{27, 28, 30}, ""},
	{"status-51", []int{28}, ""},
	{"needs-status", []int{29}, ""},
	{"down-means-down", []int{30}, ""},
	{"delegate-no-status", []int{31, 49}, ""},
	{"status-needs-container", []int{32}, ""},
	{"version-fixed", []int{33}, "1.0.0"},
	{"version-writes", []int{34}, ""},
	{"gc-noop", []int{35, 36}, ""},
	{"gc-all", []int{35, 40}, ""},
	{"gc-stops", []int{37}, ""},
	{"gc-swallows", []int{37}, ""},
	{"delegate-no-gc", []int{38, 49}, ""},
	{"gc-talks", []int{39}, ""},
	{"gc-old-key-only", []int{40}, ""},
	{"clash", []int{41}, ""},
	{"sticky", []int{42}, ""},
	{"del-trusts-prev", []int{43}, ""},
	{"needs-runtime-config", []int{44}, ""},
	{"refuses-args", []int{45}, ""},
	{"delegate-first-dir", []int{46}, ""},
	{"delegate-ipam-only", []int{47}, ""},
	{"delegate-mute", []int{48}, ""},
	{"delegate-no-del", []int{49}, ""},
	{"delegate-no-undo", []int{50}, ""},
	{"delegate-unfilled", []int{51}, ""},
	{"result-version", []int{52}, "0.4.0"},
	{"no-host-interface", []int{22, 53}, ""},
	{"bad-mac", []int{53}, ""},
	{"no-gateway", []int{54}, ""},
	{"bad-index", []int{54}, "0.3.1"},
	{"bad-route", []int{55}, ""},
	{"no-dns", []int{56}, ""},
	{"no-error-version", []int{58}, ""},
	{"code-999", []int{59}, ""},
}

func TestDefectsAreFound(t *testing.T) {
	found := map[int]bool{}
	for _, d := range defects {
		t.Run(d.name, func(t *testing.T) {
			version := d.version
			if version == "" {
				version = "1.1.0"
			}
			driver := double(t, d.name)
			for _, n := range d.items {
				found[n] = true
				cell := suite.Run(driver, suite.Checks()[n-1], version)
				if cell.Outcome != suite.Fail {
					t.Errorf("item %d, version %s: %s %v, want fail", n, version, cell.Outcome, cell.Reasons)
				} else {
					t.Logf("item %d: %s", n, strings.Join(cell.Reasons, "; "))
				}
			}
		})
	}
	if !t.Failed() && len(found) != len(suite.Checks()) {
		for _, c := range suite.Checks() {
			if !found[c.Item] {
				t.Errorf("no defect is meant for item %d", c.Item)
			}
		}
	}
}

// TestSoundDoublePasses is the other half: a plugin without a defect passes, so
// that what TestDefectsAreFound sees is the defect.
func TestSoundDoublePasses(t *testing.T) {
	driver := double(t, "")
	for _, c := range suite.Checks() {
		if cell := suite.Run(driver, c, "1.1.0"); cell.Outcome != suite.Pass {
			t.Errorf("item %d: %s: %s", c.Item, cell.Outcome, strings.Join(cell.Reasons, "; "))
		}
	}
}
