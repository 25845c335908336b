//go:build crashpoints

package crash

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// Enabled reports whether this build has crash points.
const Enabled = true

var (
	trace  = openTrace(os.Getenv("MKNET_CRASH_TRACE"))
	target = parseTarget(os.Getenv("MKNET_CRASH"))
	visits = map[string]int{} // guarded by mu
)

type visit struct {
	name string
	nth  int
}

func parseTarget(s string) visit {
	name, nth, ok := strings.Cut(s, "#")
	if !ok {
		return visit{name: name, nth: 1}
	}
	n, err := strconv.Atoi(nth)
	if err != nil || n < 1 {
		panic("MKNET_CRASH=" + s + ": want name or name#N with N from 1")
	}
	return visit{name: name, nth: n}
}

func openTrace(path string) *os.File {
	if path == "" {
		return nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		panic("MKNET_CRASH_TRACE: " + err.Error())
	}
	return f
}

// declared is called with mu held.
func declared(name string) {
	if trace != nil {
		fmt.Fprintln(trace, name)
	}
}

func reached(name string) {
	mu.Lock()
	defer mu.Unlock()
	visits[name]++
	n := visits[name]
	if trace != nil {
		fmt.Fprintf(trace, "%s#%d\n", name, n) // one write(2) a line: whole in an append-only file
	}
	if target.name == name && target.nth == n {
		_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
		select {} // no further step is taken while the signal is on its way
	}
}
