// Package doctor looks at a node as an operator would who knows what to look for:
// kernel, configuration, sockets, firewall, records and the CNI side. It changes
// nothing, and works with mknetd down. [Checks] is the table; each check returns
// findings, none where all is well.
package doctor

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// Severity orders findings.
type Severity string

// The severities. An Error keeps endpoints from being made or from working, a
// Warning may, a Note is for who wonders.
const (
	Error   Severity = "error"
	Warning Severity = "warning"
	Note    Severity = "note"
)

var rank = map[Severity]int{Error: 0, Warning: 1, Note: 2}

// Finding is one thing that an operator should know.
type Finding struct {
	Check    string   `json:"check"`
	Severity Severity `json:"severity"`
	What     string   `json:"what"` // with the object's name and value
	Why      string   `json:"why"`  // why it matters
	Do       string   `json:"do"`   // what to do about it, best a command
}

// Report is everything that was found, worst first.
type Report struct {
	At       time.Time `json:"at"`
	Version  string    `json:"version"`
	Kernel   string    `json:"kernel"`
	Daemon   string    `json:"daemon"` // its version, "down" where it does not answer
	Checks   []string  `json:"checks"` // that were run
	Findings []Finding `json:"findings"`
}

// Worst is the severity of the first finding; empty where there is none.
func (r Report) Worst() Severity {
	if len(r.Findings) == 0 {
		return ""
	}
	return r.Findings[0].Severity
}

// Check is one line of the table.
type Check struct {
	Name  string
	About string // what it looks at
	run   func(context.Context, *Node) []Finding
}

// checkTime bounds one check: a kernel or a daemon that hangs must not hang the
// doctor.
const checkTime = 20 * time.Second

// Run runs every check, or those named.
func (n *Node) Run(ctx context.Context, only ...string) (Report, error) {
	for _, name := range only {
		if !slices.ContainsFunc(Checks(), func(c Check) bool { return c.Name == name }) {
			return Report{}, fmt.Errorf("check %q: there is none of that name (see --list)", name)
		}
	}
	n.look(ctx)
	r := Report{At: n.now().UTC().Truncate(time.Second), Version: n.Version, Kernel: n.release(), Daemon: "down", Checks: []string{}, Findings: []Finding{}}
	if n.daemonErr == nil {
		r.Daemon = n.health.Version
	}
	for _, c := range Checks() {
		if len(only) > 0 && !slices.Contains(only, c.Name) {
			continue
		}
		r.Checks = append(r.Checks, c.Name)
		checking, cancel := context.WithTimeout(ctx, checkTime)
		found := c.run(checking, n)
		cancel()
		for _, f := range found {
			f.Check = c.Name
			r.Findings = append(r.Findings, f)
		}
	}
	slices.SortStableFunc(r.Findings, func(a, b Finding) int { return rank[a.Severity] - rank[b.Severity] })
	return r, nil
}

// unlooked is the finding of a check that could not look.
func unlooked(what string, err error) []Finding {
	return []Finding{{
		Severity: Warning, What: fmt.Sprintf("%s: %v", what, err), Why: "the check could not look, so that nothing is known",
		Do: "run mknetd doctor as root",
	}}
}
