package engine

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestKeyedLocksExcludePerKey(t *testing.T) {
	var l keyedLocks[string]
	var wg sync.WaitGroup
	counts := map[string]*int{"a": new(int), "b": new(int)}
	for i := range 200 {
		key := []string{"a", "b"}[i%2]
		wg.Go(func() {
			unlock, err := l.lock(t.Context(), key)
			if err != nil {
				t.Error(err)
				return
			}
			defer unlock()
			*counts[key]++ // the race detector watches
		})
	}
	wg.Wait()
	if *counts["a"] != 100 || *counts["b"] != 100 {
		t.Errorf("got %d and %d, want 100 each", *counts["a"], *counts["b"])
	}
	if len(l.held) != 0 {
		t.Errorf("%d locks are kept for keys that nobody wants", len(l.held))
	}
}

func TestKeyedLockGivesUpWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l keyedLocks[string]
		unlock, err := l.lock(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := l.lock(ctx, "a"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the context's error", err)
		}
		unlock()
		again, err := l.lock(t.Context(), "a")
		if err != nil {
			t.Fatalf("after the release: %v", err)
		}
		again()
		if len(l.held) != 0 {
			t.Errorf("%d locks are kept", len(l.held))
		}
	})
}

func TestKeyedLockIsTried(t *testing.T) {
	var l keyedLocks[string]
	unlock, ok := l.tryLock("a")
	if !ok {
		t.Fatal("a free lock was refused")
	}
	if _, ok := l.tryLock("a"); ok {
		t.Error("a held lock was given twice")
	}
	if other, ok := l.tryLock("b"); !ok {
		t.Error("another key's lock was refused")
	} else {
		other()
	}
	waited := make(chan error, 1)
	go func() {
		second, err := l.lock(t.Context(), "a")
		if err == nil {
			second()
		}
		waited <- err
	}()
	unlock()
	if err := <-waited; err != nil {
		t.Errorf("who waits behind a tried lock: %v", err)
	}
	if len(l.held) != 0 {
		t.Errorf("%d locks are kept", len(l.held))
	}
}

// Quarantine and leases are measured on CLOCK_BOOTTIME (/proc/uptime, proc(5)):
// setting the clock, by a day or by an NTP step, moves neither.
func TestTimeIsThatSinceBoot(t *testing.T) {
	uptime := func() time.Duration {
		text, err := os.ReadFile("/proc/uptime")
		if err != nil {
			t.Fatal(err)
		}
		first, _, _ := strings.Cut(string(text), " ")
		d, err := time.ParseDuration(first + "s")
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	e := &Engine{bootID: "b"}
	before := uptime()
	now := e.now()
	after := uptime()
	const tick = 10 * time.Millisecond // what /proc/uptime rounds to
	if now.At < before-tick || now.At > after+tick || now.BootID != "b" {
		t.Errorf("now is %v, the host has been up for %s to %s", now, before, after)
	}
}
