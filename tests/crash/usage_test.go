package crash

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// usage is what an idle mknetd holds.
type usage struct {
	descriptors, goroutines int
	// Resident memory in KiB: its own, and that of mapped files, which are its
	// program and the store.
	anon, file int
}

func (u usage) String() string {
	return fmt.Sprintf("%d KiB of its own and %d KiB of mapped files, %d descriptors, %d goroutines", u.anon, u.file, u.descriptors, u.goroutines)
}

// slackKiB is above what the garbage collector may keep at one moment and not at
// another: it lets a heap of some MiB double, and returns memory late.
const slackKiB = 32 << 10

// hold fails the test where something has grown. Descriptors and goroutines of an
// idle mknetd do not depend on chance.
func (u usage) hold(t *testing.T, before usage) {
	t.Helper()
	if u.descriptors > before.descriptors || u.goroutines > before.goroutines || u.anon+u.file > before.anon+before.file+slackKiB {
		t.Errorf("mknetd holds %s after the churn, it was %s (allowed: %d KiB more)", u, before, slackKiB)
	}
}

const idleFor = 3 * time.Second

// measure looks at a mknetd that has nothing to do.
func (c *churn) measure(t *testing.T) usage {
	t.Helper()
	if !c.healthy() {
		return usage{}
	}
	c.n.Client(t).Close()
	pid := c.n.DaemonPID()
	u := usage{descriptors: math.MaxInt}
	// Connections end a moment after their callers, and the audit opens what it looks
	// at: what stays is the least of some seconds.
	for end := time.Now().Add(idleFor); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			t.Fatal(err)
		}
		u.descriptors = min(u.descriptors, len(fds))
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		field, rest, _ := strings.Cut(line, ":")
		into := map[string]*int{"RssAnon": &u.anon, "RssFile": &u.file}[field]
		if into == nil {
			continue
		}
		if *into, err = strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(rest), " kB")); err != nil {
			t.Fatal(err)
		}
	}
	return u
}

var goroutineHead = regexp.MustCompile(`(?m)^goroutine [1-9][0-9]* .*\[`)

// goroutines ends mknetd with SIGQUIT, for which the Go runtime prints every
// goroutine, and counts them.
func (c *churn) goroutines(t *testing.T) int {
	t.Helper()
	log := c.n.Dir + "/mknetd.log"
	before, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	c.n.Signal(syscall.SIGQUIT)
	c.n.WaitDead(t)
	all, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	dump := bytes.TrimPrefix(all, before)
	n := len(goroutineHead.FindAll(dump, -1))
	if n < 2 {
		t.Fatalf("mknetd says nothing of its goroutines:\n%s", dump)
	}
	return n
}
