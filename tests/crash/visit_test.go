package crash

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// The four checks after each crash, as spec/life-cycle.md promises them.
const (
	acknowledged = iota // what a caller was told is done survived
	agree               // kernel equals records
	again               // a second reconciliation changes nothing
	clean               // nothing is left after DEL, GC or purge
	numChecks
)

var checkNames = [numChecks]string{"acknowledged", "kernel=records", "again", "clean"}

// story is what callers do with a node, in which one program can be made to die.
type story struct {
	name string // program that may die, and what it does
	// play runs the story on a node without a running mknetd, up to the crash or to
	// its end, then makes the four checks and leaves nothing behind.
	play func(t *testing.T, n *node.Node, v *victim, o *outcome)
}

// visit is one visit of one crash point by one process of a story.
type visit struct {
	Story, Step string // the step of a story that starts the process
	Point       string // with its number: "engine.object-made/02-veth-host#3"
}

func (v visit) String() string { return v.Story + " " + v.Step + " " + v.Point }

// point is the declared point: without step of a family and number.
func (v visit) point() string {
	name, _, _ := strings.Cut(v.Point, "#")
	name, _, _ = strings.Cut(name, "/")
	return name
}

// first reports whether it is the first visit in its process.
func (v visit) first() bool { return strings.HasSuffix(v.Point, "#1") }

// victim tells each process of a story what to do at its points: to record them, or
// to die at one.
type victim struct {
	at    *visit // nil: record
	dir   string // of the records
	steps []string
}

// env is what the process that a step starts gets into its environment.
func (v *victim) env(step string) []string {
	switch {
	case v.at == nil:
		v.steps = append(v.steps, step)
		return []string{"MKNET_CRASH_TRACE=" + filepath.Join(v.dir, step)}
	case v.at.Step == step:
		return []string{"MKNET_CRASH=" + v.at.Point}
	}
	return nil
}

// records reads what the processes recorded: the visits in order, and every
// declared point.
func (v *victim) records(t *testing.T, story string) (visits []visit, declared []string) {
	t.Helper()
	for _, step := range v.steps {
		text, err := os.ReadFile(filepath.Join(v.dir, step))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			line = strings.TrimSpace(line)
			if strings.Contains(line, "#") {
				visits = append(visits, visit{Story: story, Step: step, Point: line})
			} else {
				declared = append(declared, line)
			}
		}
	}
	return visits, declared
}

// outcome is what came of one visit.
type outcome struct {
	Visit    visit
	Reached  bool // the process died there
	Problems [numChecks][]string

	// Of a story without a crash: what its processes recorded.
	Visits   []visit  `json:",omitempty"`
	Declared []string `json:",omitempty"`
}

func (o *outcome) fault(check int, format string, args ...any) {
	o.Problems[check] = append(o.Problems[check], fmt.Sprintf(format, args...))
}

// clean reports whether all checks hold.
func (o *outcome) clean() bool {
	return !slices.ContainsFunc(o.Problems[:], func(p []string) bool { return len(p) > 0 })
}

// passed reports whether the process died at the point and all checks hold.
func (o *outcome) passed() bool { return o.Reached && o.clean() }

func (o *outcome) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-84s", o.Visit)
	for i, problems := range o.Problems {
		word := "ok"
		switch {
		case len(problems) > 0:
			word = "FAIL"
		case !o.Reached:
			word = "-"
		}
		fmt.Fprintf(&b, " %-*s", len(checkNames[i]), word)
	}
	if !o.Reached {
		b.WriteString(" did not come")
	}
	for i, problems := range o.Problems {
		for _, p := range problems {
			fmt.Fprintf(&b, "\n    %s: %s", checkNames[i], p)
		}
	}
	return b.String()
}

// keep appends the outcome to a file, one line of JSON.
func (o *outcome) keep(t *testing.T, path string) {
	t.Helper()
	line, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(append(line, '\n')); err != nil {
		t.Fatal(err)
	}
}

// judge is what every story ends with: mknetd starts again after the crash (or
// went on), and all checks are made that do not depend on the story. alive are the
// endpoints that must be there; end takes everything away that the node still has.
func judge(t *testing.T, n *node.Node, o *outcome, alive []endpoint.Generation, end func()) {
	t.Helper()
	healthy(t, n, o, alive)
	inventory(t, n, o, agree)

	before := state(t, n)
	n.Kill(t)
	n.Start(t)
	if after := state(t, n); after != before {
		o.fault(again, "a second reconciliation changed something: %s", difference(before, after))
	}
	healthy(t, n, o, alive)

	end()
	inventory(t, n, o, clean)
	for _, ep := range n.List(t) {
		o.fault(clean, "endpoint %s (%s) is left, %s", ep.Generation, ep.Attachment, ep.State)
	}
	n.Stop(t)
	reset(t, n)
}

// healthy checks that what was acknowledged is there and whole.
func healthy(t *testing.T, n *node.Node, o *outcome, alive []endpoint.Generation) {
	t.Helper()
	have := map[endpoint.Generation]endpoint.Endpoint{}
	for _, ep := range n.List(t) {
		have[ep.Generation] = ep
		if ep.State == endpoint.Ready && len(ep.Degraded) > 0 {
			o.fault(agree, "endpoint %s came back degraded: %v", ep.Generation, ep.Degraded)
		}
	}
	for _, gen := range alive {
		if ep, ok := have[gen]; !ok || ep.State != endpoint.Ready {
			o.fault(acknowledged, "endpoint %s was acknowledged and is gone (state %q)", gen, ep.State)
		}
	}
}

// inventory is `mknetd inventory`, which fails at the first difference between
// kernel and records.
func inventory(t *testing.T, n *node.Node, o *outcome, check int) {
	t.Helper()
	if out, err := netlab.Try(n.Daemon, "inventory", "--config", n.Config); err != nil {
		o.fault(check, "inventory: %v\n%s", err, out)
	}
}

// reset takes away what a node without endpoints still has on disk, so that the
// next story starts as on a fresh node. The shared chains stay: they cost a second.
func reset(t *testing.T, n *node.Node) {
	t.Helper()
	for _, dir := range []string{n.Dir + "/state", n.Dir + "/cache", n.DeferredDir} {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
}

// state is everything of ours in kernel and records, as text.
func state(t *testing.T, n *node.Node) string {
	t.Helper()
	var out []string
	for _, ep := range n.List(t) {
		out = append(out, fmt.Sprintf("%s %s %s %v %v %v", ep.Generation, ep.State, ep.Address, ep.Binding, ep.DeleteRequested, ep.Degraded))
	}
	for _, cmd := range [][]string{{"ip", "-o", "link"}, {"ip", "-4", "route", "show", "table", "all"}, {"iptables-save"}} {
		for line := range strings.Lines(netlab.Run(t, cmd[0], cmd[1:]...)) {
			if !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, ":") {
				out = append(out, strings.TrimSpace(line))
			}
		}
	}
	return strings.Join(out, "\n")
}

// difference is the lines that only one of two texts has.
func difference(before, after string) string {
	var out []string
	b, a := strings.Split(before, "\n"), strings.Split(after, "\n")
	for _, line := range b {
		if !slices.Contains(a, line) {
			out = append(out, "- "+line)
		}
	}
	for _, line := range a {
		if !slices.Contains(b, line) {
			out = append(out, "+ "+line)
		}
	}
	return strconv.Itoa(len(out)) + " lines\n" + strings.Join(out, "\n")
}
