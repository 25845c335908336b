// Package crash declares the points at which the crash tests kill a program.
//
// A point is a value, declared beside the step it follows:
//
//	var afterReady = crash.New("engine.ready-recorded")
//	...
//	afterReady.Here()
//
// In an ordinary build Here does nothing and costs nothing. With the build tag
// crashpoints it writes the point's name to the file that MKNET_CRASH_TRACE
// names, and ends the process with SIGKILL where MKNET_CRASH names the point:
// "name" for its first visit, "name#3" for its third.
//
// Points of a table of steps have a family name and the step's own:
// crash.New("engine.object-made").At("veth mkv...").
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
