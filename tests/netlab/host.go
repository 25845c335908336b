package netlab

import (
	"fmt"
	"os"
)

// Inside reports whether this process already runs in a private host. Work that
// needs the machine's network (downloads, builds) belongs before Main or Enter.
func Inside() bool { return os.Getenv(insideEnv) != "" }

// Enter is Main for a command that is no test: the first call re-executes the
// program in a private host and ends with its status; inside, it sets the host
// up and returns. Programs that are started later do not inherit the mark, so
// one that calls Enter itself gets a private host of its own.
func Enter() {
	if !Inside() {
		if os.Geteuid() != 0 {
			fmt.Fprintln(os.Stderr, "netlab: this program makes network namespaces: run it as root")
			os.Exit(1)
		}
		os.Exit(reexec())
	}
	if err := setUpHost(); err != nil {
		fmt.Fprintln(os.Stderr, "netlab: set up the private host:", err)
		os.Exit(1)
	}
	_ = os.Unsetenv(insideEnv)
}

// Snapshot is what the private host holds at one moment: the same things that
// Clean compares.
type Snapshot map[string]bool

// Take records the private host as it is now.
func Take() Snapshot { return snapshot() }

// Left lists what is there now and was not when s was taken, sorted.
func (s Snapshot) Left() []string { return diff(s, snapshot()) }

// Lost lists what was there when s was taken and is gone now, sorted.
func (s Snapshot) Lost() []string { return diff(snapshot(), s) }
