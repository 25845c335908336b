package carrier

import (
	"os"
	"runtime"
	"testing"
	"time"

	"mknet/tests/netlab"
)

// Many restarts of the agent under traffic cost neither descriptors nor
// goroutines, in the shim or in the agent.
func TestRestartsDoNotLeak(t *testing.T) {
	netlab.Clean(t)
	d, c := newDaemon(t), newChild(t)
	s := start(t, d, c, nil)
	round := func() {
		c.serve()
		select {
		case <-c.begun:
		case <-time.After(patience):
			t.Fatalf("the shim does not come back: %+v", s.Status())
		}
		c.halt()
	}
	round() // the child has an address from here on
	flood := c.Command(t.Context(), "ping", "-i", "0.01", "-q", "172.30.0.1")
	if err := flood.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = flood.Process.Kill() // it would go on for ever
		_ = flood.Wait()
	}()
	for range 3 {
		round()
	}
	fds, goroutines := usage(t)
	for range 40 {
		round()
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		f, g := usage(t)
		if f <= fds && g <= goroutines {
			break
		}
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<20)
			t.Fatalf("%d descriptors and %d goroutines after 40 more restarts, had %d and %d\n%s", f, g, fds, goroutines, buf[:runtime.Stack(buf, true)])
		}
	}
	s.stop(t)
}

func usage(t *testing.T) (fds, goroutines int) {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names), runtime.NumGoroutine()
}
