// Package crash declares the points at which the crash tests kill a program.
//
// A point is a value, declared beside the step it follows:
//
//	var afterReady = crash.New("engine.ready-recorded")
//	...
//	afterReady.Here()
//
// In an ordinary build Here does nothing and costs nothing. With the build tag
// crashpoints, MKNET_CRASH_TRACE names a file that gets a line "name" for each
// declared point and a line "name#N" for its Nth visit in this process, and
// MKNET_CRASH names the visit at which the process ends itself with SIGKILL:
// "name" or "name#1" is the first, "name#3" the third.
//
// Points of a table of steps have a family name and the step's own:
// crash.New("engine.object-made").At("02-veth-host") is engine.object-made/02-veth-host.
//
// # A new point
//
// Declaring it is all: tests/crash runs its stories once with the trace on, kills
// the program at every visit that was recorded, and fails for a declared point
// that no story visits. What no story does yet needs one more step in the story of
// its program (tests/crash/daemon_test.go, plugin_test.go, shim_test.go).
package crash

import (
	"slices"
	"sync"
)

// Point is one place where a program may be made to die.
type Point struct{ name string }

var (
	mu    sync.Mutex
	names []string
)

// New declares a point. Call it in a package-level var; a name declared twice
// panics at start-up.
func New(name string) *Point {
	mu.Lock()
	defer mu.Unlock()
	if slices.Contains(names, name) {
		panic("crash point declared twice: " + name)
	}
	names = append(names, name)
	declared(name)
	return &Point{name: name}
}

// Names returns every declared point of this program, sorted.
func Names() []string {
	mu.Lock()
	defer mu.Unlock()
	return slices.Sorted(slices.Values(names))
}

// Here is the point itself.
func (p *Point) Here() { reached(p.name) }

// At is one step of a family of points, named family/step.
func (p *Point) At(step string) {
	if Enabled {
		reached(p.name + "/" + step)
	}
}
