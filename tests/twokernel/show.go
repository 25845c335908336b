package main

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// show prints the steps and counts them.
type show struct {
	out            io.Writer
	verbose        bool
	passed, failed int
}

func (s *show) chapter(title string) { fmt.Fprintf(s.out, "\n== %s\n", title) }

// pass reports a step that held.
func (s *show) pass(what string, took time.Duration) {
	s.passed++
	fmt.Fprintf(s.out, "ok    %6.1f s  %s\n", took.Seconds(), what)
}

// fault reports a step that did not hold.
func (s *show) fault(what string) {
	s.failed++
	fmt.Fprintf(s.out, "FAIL            %s\n", indent(what))
}

func indent(text string) string { return strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n      ") }

// check runs a step; its error is what did not hold.
func (s *show) check(what string, f func() error) bool {
	begin := time.Now()
	if err := f(); err != nil {
		s.fault(fmt.Sprintf("%s: %v", what, err))
		return false
	}
	s.pass(what, time.Since(begin))
	return true
}

// expect is what a command line must show.
type expect struct {
	status int      // exit status; anyFailure: any but 0
	has    []string // each must be in the output
	lacks  []string // none may be in the output
	limit  time.Duration
}

const anyFailure = -1

// command runs a line on a machine and compares. The output is returned.
func (s *show) command(what string, m machine, line string, want expect) string {
	var out string
	s.check(what, func() error {
		limit := want.limit
		if limit == 0 {
			limit = stepLimit
		}
		var status int
		var err error
		out, status, err = m.Run(line, limit)
		if s.verbose {
			fmt.Fprintf(s.out, "      $ %s\n      %s\n", line, indent(out))
		}
		var faults []string
		switch {
		case err != nil:
			faults = append(faults, err.Error())
		case want.status == anyFailure && status == 0:
			faults = append(faults, "succeeded, must not")
		case want.status != anyFailure && status != want.status:
			faults = append(faults, fmt.Sprintf("exit status %d, want %d", status, want.status))
		}
		for _, w := range want.has {
			if !strings.Contains(out, w) {
				faults = append(faults, fmt.Sprintf("output lacks %q", w))
			}
		}
		for _, w := range want.lacks {
			if strings.Contains(out, w) {
				faults = append(faults, fmt.Sprintf("output has %q", w))
			}
		}
		if len(faults) > 0 {
			return fmt.Errorf("%s\n$ %s\n%s", strings.Join(faults, "; "), line, out)
		}
		return nil
	})
	return out
}

// until polls f and gives up with its last error.
func until(limit time.Duration, f func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := f()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(200 * time.Millisecond)
	}
}
