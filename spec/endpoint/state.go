package endpoint

import (
	"fmt"
	"slices"
)

// State is where an endpoint is in its life. See spec/life-cycle.md.
type State string

// The states, in the order of life. A record whose deletion has finished is
// gone; there is no state for it.
const (
	Allocating State = "ALLOCATING" // written before the first kernel object is made
	Ready      State = "READY"      // written after the last kernel object stands
	Deleting   State = "DELETING"   // written before the first kernel object is removed
)

// next holds every transition. A DELETING record is removed, never revived.
var next = map[State][]State{
	Allocating: {Ready, Deleting},
	Ready:      {Deleting},
	Deleting:   {},
}

// Valid reports whether s is one of the three states.
func (s State) Valid() bool { _, ok := next[s]; return ok }

// To returns a *StateError unless an endpoint may go from s to t.
func (s State) To(id Generation, t State) error {
	if slices.Contains(next[s], t) {
		return nil
	}
	return &StateError{Generation: id, From: s, To: t}
}

// StateError is returned where a record would take a step that the table of
// states does not have.
type StateError struct {
	Generation Generation
	From, To   State
}

func (e *StateError) Error() string {
	return fmt.Sprintf("endpoint %s: cannot go from %s to %s", e.Generation.Short(), e.From, e.To)
}
