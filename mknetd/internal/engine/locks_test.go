package engine

import (
	"context"
	"errors"
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
