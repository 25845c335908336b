package suite

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
)

// Versions are the versions of the specification that the suite speaks, oldest
// first.
var Versions = []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// Check is one item of the list.
type Check struct {
	Item  int
	Name  string // the test's name without its number
	Asks  string // what the item asks, one line
	Since string // first version that has it; empty: all
	run   func(p *Probe)
}

// Title is the name of the item's test, for example "18_CheckUsesPrevResult".
func (c Check) Title() string { return fmt.Sprintf("%02d_%s", c.Item, c.Name) }

// AppliesTo reports whether the item exists in that version of the specification.
func (c Check) AppliesTo(version string) bool {
	return slices.Index(Versions, version) >= max(0, slices.Index(Versions, c.Since))
}

// Checks returns all items in order.
func Checks() []Check {
	all := slices.Concat(parameterChecks, addChecks, delChecks, checkChecks, statusChecks,
		versionChecks, gcChecks, executionChecks, delegationChecks, resultChecks)
	slices.SortFunc(all, func(a, b Check) int { return a.Item - b.Item })
	return all
}

// Outcome is how one item went in one version.
type Outcome string

// The outcomes. NotApplicable carries a reason; Absent means that the version
// does not have the item.
const (
	Pass          Outcome = "pass"
	Fail          Outcome = "fail"
	NotApplicable Outcome = "n/a"
	Absent        Outcome = "-"
)

// Cell is the outcome of one item in one version for one plugin.
type Cell struct {
	Plugin  string   `json:"plugin"`
	Item    int      `json:"item"`
	Name    string   `json:"name"`
	Version string   `json:"version"`
	Outcome Outcome  `json:"outcome"`
	Reasons []string `json:"reasons,omitempty"` // of a failure, or why not applicable
}

// Run runs one item in one version against the driver's plugin. The driver has
// been started; whatever the item leaves behind is removed before Run returns.
func Run(d Driver, c Check, version string) Cell {
	cell := Cell{Plugin: d.Name(), Item: c.Item, Name: c.Name, Version: version, Outcome: Absent}
	if !c.AppliesTo(version) {
		return cell
	}
	p := newProbe(d, c, version)
	done := make(chan struct{})
	go func() { // a goroutine of its own, so that Fatalf can end it
		defer close(done)
		defer func() {
			if r := recover(); r != nil {
				stack := make([]byte, 4096)
				p.Errorf("the check panicked: %v\n%s", r, stack[:runtime.Stack(stack, false)])
			}
		}()
		c.run(p)
	}()
	<-done
	p.cleanUp()
	switch {
	case len(p.failures) > 0:
		cell.Outcome, cell.Reasons = Fail, p.failures
	case p.notApplicable != "":
		cell.Outcome, cell.Reasons = NotApplicable, []string{p.notApplicable}
	default:
		cell.Outcome = Pass
	}
	return cell
}

// Errorf records a failure and goes on.
func (p *Probe) Errorf(format string, args ...any) {
	p.failures = append(p.failures, strings.TrimSpace(fmt.Sprintf(format, args...)))
}

// Fatalf records a failure and ends the check.
func (p *Probe) Fatalf(format string, args ...any) {
	p.Errorf(format, args...)
	runtime.Goexit()
}

// NotApplicable ends the check: the plugin has no such notion, for this reason.
func (p *Probe) NotApplicable(reason string) {
	p.notApplicable = reason
	runtime.Goexit()
}

// require ends the check where a provocation is not possible with this plugin.
func (p *Probe) require(err error) {
	if reason := meaningless(""); errors.As(err, &reason) {
		p.NotApplicable(string(reason))
	}
	if err != nil {
		p.Fatalf("provoke: %v", err)
	}
}
