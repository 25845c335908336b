package policydir_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"mknet/mknetd/internal/policydir"
	"mknet/spec/policy"
)

func group(name string) string {
	return "apiVersion: mknet/v1\nkind: SecurityGroup\nmetadata: {name: " + name + "}\nspec: {}\n"
}

func write(t *testing.T, dir, name, text string, mode os.FileMode) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), mode), os.Chmod(path+".new", mode), os.Rename(path+".new", path)); err != nil {
		t.Fatal(err)
	}
}

func TestRead(t *testing.T) {
	if objects, err := policydir.Read(filepath.Join(t.TempDir(), "missing")); !errors.Is(err, fs.ErrNotExist) || objects != nil {
		t.Errorf("missing: got %v, %v", objects, err)
	}
	dir := t.TempDir()
	write(t, dir, "b.yaml", group("b"), 0o644)
	write(t, dir, "a.json", `{"apiVersion":"mknet/v1","kind":"SecurityGroup","metadata":{"name":"a"},"spec":{}}`, 0o600)
	write(t, dir, ".hidden.yaml", "no", 0o644)
	write(t, dir, "b.yaml~", "no", 0o644)
	objects, err := policydir.Read(dir)
	if err != nil || len(objects) != 2 || objects[0].Key().Name != "a" || objects[1].Key().Name != "b" {
		t.Fatalf("got %v, %v", objects, err)
	}
	write(t, dir, "c.yaml", "kind: X\n", 0o644)
	write(t, dir, "d.yml", group("d"), 0o666)
	write(t, dir, "e.yaml", group("a"), 0o644)
	if err := os.Mkdir(filepath.Join(dir, "f.yaml"), 0o755); err != nil {
		t.Fatal(err)
	}
	objects, err = policydir.Read(dir)
	var faults *policy.Error
	if objects != nil || !errors.As(err, &faults) {
		t.Fatalf("got %v, %v", objects, err)
	}
	for _, want := range []string{"c.yaml: document 1 (line 1): apiVersion", "d.yml: has mode 0666", "e.yaml: SecurityGroup/a is also in " + filepath.Join(dir, "a.json"), "f.yaml: is not an ordinary file"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
}

func TestWatch(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "policy.d")
	ctx, cancel := context.WithCancel(context.Background())
	calls := make(chan struct{}, 16)
	done := make(chan struct{})
	go func() {
		defer close(done)
		policydir.Watch(ctx, dir, 5*time.Millisecond, func(bool) error { calls <- struct{}{}; return nil })
	}()
	called := func(what string) {
		t.Helper()
		select {
		case <-calls:
		case <-time.After(time.Minute):
			t.Fatalf("%s was not noticed", what)
		}
	}
	called("the start")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	called("the folder")
	write(t, dir, "a.yaml", group("a"), 0o644)
	called("a file")
	write(t, dir, "a.yaml", group("b"), 0o644)
	called("its replacement")
	if err := os.Remove(filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	called("its removal")
	cancel()
	<-done
}

// What was not taken is tried again without a change of a file, ever less often,
// until it is; a change is taken at its own time.
func TestWatchTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		ctx, cancel := context.WithCancel(t.Context())
		type call struct {
			after time.Duration // since the call before
			again bool
		}
		var mu sync.Mutex // the race detector does not know that time passes in between
		var calls []call
		fails, last := true, time.Now()
		done := make(chan struct{})
		go func() {
			defer close(done)
			policydir.Watch(ctx, dir, time.Second, func(again bool) error {
				mu.Lock()
				defer mu.Unlock()
				calls = append(calls, call{time.Since(last), again})
				last = time.Now()
				if fails {
					return errors.New("too many open files")
				}
				return nil
			})
		}()
		// step lets time pass, and compares the calls that there were meanwhile.
		step := func(what string, pass time.Duration, want ...call) {
			t.Helper()
			time.Sleep(pass)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(calls, want) {
				t.Errorf("%s: got calls %v, want %v", what, calls, want)
			}
			calls = nil
		}
		const s = time.Second
		step("failing", 92*s, call{0, false}, call{1 * s, true}, call{2 * s, true}, call{4 * s, true}, call{8 * s, true}, call{16 * s, true}, call{30 * s, true}, call{30 * s, true})
		write(t, dir, "a.yaml", group("a"), 0o644)
		step("a change, failing", 5*s, call{3 * s, false}, call{1 * s, true}, call{2 * s, true})
		mu.Lock()
		fails = false
		mu.Unlock()
		step("the cause is over", 4*s, call{4 * s, true})
		step("taken", time.Hour)
		cancel()
		<-done
	})
}
