// Package crash kills mknetd, mk-cni and mk-shim at every one of their crash
// points (spec/crash) and holds them to their promise: what was acknowledged
// survives, kernel and records agree, reconciling again changes nothing, and
// nothing is left after DEL, GC or purge. It does the same by chance
// (TestChurn).
//
// Each program has stories: what callers do with it. One run of a story with the
// trace on finds every visit of a point; then the story runs once for each visit,
// up to the crash. The visits are shared out among a few private hosts.
//
//	MKNET_CRASH_WALK=all      every visit, not one for each point
//	MKNET_CRASH_STORY=NAME    only this story
//	MKNET_CRASH_ONLY=TEXT     only visits whose name contains TEXT
//	MKNET_CRASH_HOSTS=N       private hosts side by side; default 2
//	MKNET_CRASH_PROGRAMS=DIR  programs that were built with -tags crashpoints
package crash

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"mknet/tests/node"
)

func TestMain(m *testing.M) { node.Main(m) }

// stories are all there are. Every declared point must be visited by one of them.
var stories = []story{life, startUp, purge, plugin, shim}

// workEnv names the folder of a worker: visits.json and outcomes.
const workEnv = "MKNET_CRASH_WORK"

const defaultHosts = 2

// TestEveryCrashPoint walks the points.
func TestEveryCrashPoint(t *testing.T) {
	if dir := os.Getenv(workEnv); dir != "" {
		work(t, dir)
		return
	}
	dir := t.TempDir()
	usePrograms(t, filepath.Join(dir, "bin"))
	hosts := hostsWanted(t)
	all := trace(t, filepath.Join(dir, "trace"), hosts)
	visits := choose(all)
	outcomes := share(t, filepath.Join(dir, "0"), visits, hosts)
	// How fast the machine is decides some visits: a slow DEL is queued, a shim tells
	// its counters once more. A point that was not met is looked for at its others.
	for round := 1; round <= maxRounds && os.Getenv("MKNET_CRASH_ONLY") == ""; round++ {
		others := instead(all, outcomes)
		if len(others) == 0 {
			break
		}
		visits = append(visits, others...)
		outcomes = append(outcomes, share(t, filepath.Join(dir, fmt.Sprint(round)), others, hosts)...)
	}
	report(t, visits, outcomes)
}

const maxRounds = 3

// instead chooses one more visit for each point that no outcome has reached.
func instead(all []visit, outcomes []outcome) []visit {
	reached, tried := map[string]bool{}, map[visit]bool{}
	for _, o := range outcomes {
		tried[o.Visit] = true
		if o.Reached {
			reached[o.Visit.point()] = true
		}
	}
	var more []visit
	for _, v := range all {
		if !reached[v.point()] && !tried[v] {
			reached[v.point()] = true
			more = append(more, v)
		}
	}
	return more
}

// usePrograms has this process and its workers use programs with crash points.
func usePrograms(t *testing.T, dir string) {
	t.Helper()
	if built := os.Getenv("MKNET_CRASH_PROGRAMS"); built != "" {
		dir = built
	} else if _, err := node.BuildInto(dir, "-tags", "crashpoints"); err != nil {
		t.Fatal(err)
	}
	t.Setenv("MKNET_PROGRAMS", dir)
}

// trace has every story played once and returns all visits. It fails for a
// declared point that none of them visits.
func trace(t *testing.T, dir string, hosts int) []visit {
	t.Helper()
	only := os.Getenv("MKNET_CRASH_STORY")
	var parts [][]visit
	for _, s := range stories {
		if only == "" || s.name == only {
			parts = append(parts, []visit{{Story: s.name}})
		}
	}
	var all []visit
	declared, visited := map[string]bool{}, map[string]bool{}
	for _, o := range play(t, dir, parts, hosts) {
		if !o.clean() {
			t.Fatalf("without a crash: %s", &o)
		}
		for _, p := range o.Declared {
			declared[p] = true
		}
		for _, v := range o.Visits {
			visited[v.point()] = true
		}
		t.Logf("%s: %d visits", o.Visit.Story, len(o.Visits))
		all = append(all, o.Visits...)
	}
	for _, p := range slices.Sorted(maps.Keys(declared)) {
		if !visited[p] && only == "" {
			t.Errorf("crash point %s is declared, but no story visits it", p)
		}
	}
	if len(declared) == 0 {
		t.Fatal("no crash point is declared: the programs were built without the tag crashpoints")
	}
	return all
}

// choose takes all visits, or one for each point: the one in the middle of all that
// are the first in their process.
func choose(all []visit) []visit {
	only := os.Getenv("MKNET_CRASH_ONLY")
	all = slices.DeleteFunc(all, func(v visit) bool { return !strings.Contains(v.String(), only) })
	if os.Getenv("MKNET_CRASH_WALK") == "all" || only != "" {
		return all
	}
	byPoint := map[string][]visit{}
	var order []string
	for _, v := range all {
		if !v.first() {
			continue
		}
		key := v.point()
		if len(byPoint[key]) == 0 {
			order = append(order, key)
		}
		byPoint[key] = append(byPoint[key], v)
	}
	var few []visit
	for _, key := range order {
		few = append(few, byPoint[key][len(byPoint[key])/2])
	}
	return few
}

// share deals the visits out to private hosts and returns the outcomes.
func share(t *testing.T, dir string, visits []visit, hosts int) []outcome {
	t.Helper()
	parts := make([][]visit, min(hosts, len(visits)))
	for i, v := range visits {
		parts[i%len(parts)] = append(parts[i%len(parts)], v)
	}
	return play(t, dir, parts, hosts)
}

// hostsWanted is how many private hosts work side by side.
func hostsWanted(t *testing.T) int {
	t.Helper()
	s := os.Getenv("MKNET_CRASH_HOSTS")
	if s == "" {
		return defaultHosts
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("MKNET_CRASH_HOSTS=%s: want a number from 1", s)
	}
	return n
}

// report prints every outcome and fails the test for those that did not pass, and
// for points that were reached at none of their visits.
func report(t *testing.T, visits []visit, outcomes []outcome) {
	t.Helper()
	passed, failed, missed := 0, len(visits)-len(outcomes), 0 // a worker that died has none of some
	reached := map[string]bool{}
	var b strings.Builder
	fmt.Fprintf(&b, "%-84s %s\n", "story, step, point", strings.Join(checkNames[:], " "))
	slices.SortFunc(outcomes, func(a, b outcome) int { return strings.Compare(a.Visit.String(), b.Visit.String()) })
	for _, o := range outcomes {
		reached[o.Visit.point()] = reached[o.Visit.point()] || o.Reached
		switch {
		case o.passed():
			passed++
		case o.clean():
			missed++
		default:
			failed++
		}
		b.WriteString(o.String() + "\n")
	}
	for _, point := range slices.Sorted(maps.Keys(reached)) {
		if !reached[point] {
			failed++
			fmt.Fprintf(&b, "%s: reached at none of its visits\n", point)
		}
	}
	if missed > 0 {
		fmt.Fprintf(&b, "%d visits did not come this time\n", missed)
	}
	fmt.Fprintf(&b, "%d passed, %d failed", passed, failed)
	t.Log("\n" + b.String())
	if failed > 0 {
		t.Fail()
	}
}
