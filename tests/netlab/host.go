package netlab

import "os"

// Inside reports, before Main or Private, whether this process is the
// re-executed one. What needs the machine's network (downloads, builds) happens
// where it is false.
func Inside() bool { return os.Getenv(insideEnv) != "" }

// Snapshot is what the private host holds at one moment: the same things that
// Clean compares.
type Snapshot map[string]bool

// Take records the private host as it is now.
func Take() Snapshot { return snapshot() }

// Left lists what is there now and was not when s was taken, sorted.
func (s Snapshot) Left() []string { return diff(s, snapshot()) }

// Lost lists what was there when s was taken and is gone now, sorted.
func (s Snapshot) Lost() []string { return diff(snapshot(), s) }
