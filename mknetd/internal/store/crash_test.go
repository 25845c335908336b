package store

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

// Arguments that make this test binary another program.
const (
	writerArg = "store-writer" // writes until it is killed, see writerMain
	holderArg = "store-holder" // opens the store, says so, and waits for its input to end
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 {
		switch os.Args[1] {
		case writerArg:
			writerMain(os.Args[2])
		case holderArg:
			holderMain(os.Args[2])
		}
	}
	netlab.Main(m)
}

// writerMain lives endpoints through, several at a time, and says what it has been
// promised: "+ gen slot" once Begin has returned, "r gen" once READY, "- gen" once
// the record is gone.
func writerMain(dir string) {
	s, err := Open(Options{Dir: dir, Pools: testPools})
	if err != nil {
		fmt.Println("open:", err)
		os.Exit(1)
	}
	var mu sync.Mutex
	say := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Printf(format+"\n", args...)
	}
	say("ready")
	for w := range uint32(4) {
		go func() {
			for n := uint32(0); ; n++ {
				slot := w*1000 + n%50
				ep := testEndpoint(slot)
				ep.ContainerID = ep.Generation.Short()
				if _, err := s.Begin(ep); err != nil {
					if e := new(ExistsError); errors.As(err, &e) { // of an earlier life
						continue
					}
					say("begin: %v", err)
					continue
				}
				say("+ %s %d", ep.Generation, slot)
				if _, err := s.MarkReady(ep.Generation, nil); err == nil {
					say("r %s", ep.Generation)
				}
				if n%3 == 0 {
					continue // stays
				}
				if _, err := s.BeginDelete(ep.Generation, nil); err == nil {
					say("d %s", ep.Generation)
				}
				if err := s.Finish(ep.Generation, Freed{BootID: "b", At: time.Duration(n)}); err == nil {
					say("- %s", ep.Generation)
				}
			}
		}()
	}
	select {}
}

func holderMain(dir string) {
	s, err := Open(Options{Dir: dir, Pools: testPools})
	if err != nil {
		fmt.Println("open:", err)
		os.Exit(1)
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
	_ = s.Close()
	os.Exit(0)
}

// child starts this binary as another program and waits for its first line.
func child(t *testing.T, arg, dir string) (*exec.Cmd, *bufio.Scanner, io.Closer) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", arg, dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "ready" {
		t.Fatalf("%s said %q", arg, lines.Text())
	}
	return cmd, lines, in
}

// Killed at any moment, the store keeps every step that it has acknowledged, and a
// record is whole or absent: whatever was not acknowledged may be one step further
// than the last word, never less.
func TestC04_AKilledWriterLeavesRecordsWholeOrAbsent(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	open(t, dir).Close()
	known := map[string]string{} // generation -> last word
	for round := range 12 {
		cmd, lines, _ := child(t, writerArg, dir)
		words := 0
		for lines.Scan() {
			w := strings.Fields(lines.Text())
			if len(w) < 2 || len(w[1]) != 32 {
				if strings.Contains(lines.Text(), ":") {
					t.Fatalf("writer: %s", lines.Text())
				}
				continue // cut by the kill
			}
			known[w[1]] = w[0]
			if words++; words == 5+round*7 {
				_ = cmd.Process.Kill() // what it still said is read to the end
			}
		}
		_ = cmd.Wait()
		list, err := tryOpen(dir)
		if err != nil {
			t.Fatalf("round %d: after %d steps: %v", round, words, err)
		}
		have := map[string]endpoint.State{}
		for _, ep := range list {
			have[ep.Generation.String()] = ep.State
		}
		for gen, word := range known {
			state, there := have[gen]
			ok := false
			switch word {
			case "+": // READY may have been written, not said
				ok = there && state != endpoint.Deleting
			case "r": // DELETING too
				ok = there && state != endpoint.Allocating
			case "d":
				ok = !there || state == endpoint.Deleting
			case "-":
				ok = !there
			}
			if !ok {
				t.Errorf("round %d: endpoint %s: last word %q, found %q (%v)", round, gen, word, state, there)
			}
		}
	}
	if len(known) < 50 {
		t.Errorf("only %d endpoints were begun", len(known))
	}
}

// Killed while it makes the store, it leaves none or a whole one.
func TestKilledAtCreation(t *testing.T) {
	for round := range 20 {
		dir := filepath.Join(t.TempDir(), "state")
		cmd := exec.Command("/proc/self/exe", holderArg, dir)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(round) * 500 * time.Microsecond) // the moment to be hit, not a wait
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if _, err := tryOpen(dir); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 1 {
			t.Errorf("round %d: %v, %v: the rest of an interrupted start is left", round, entries, err)
		}
	}
}

func TestSecondInstance(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	cmd, _, stdin := child(t, holderArg, dir)
	var locked *LockedError
	if _, err := Open(Options{Dir: dir, Pools: testPools, LockTimeout: 50 * time.Millisecond}); !errors.As(err, &locked) || locked.Holder != cmd.Process.Pid || locked.Comm == "" {
		t.Fatalf("got %v, want a *LockedError that names process %d", err, cmd.Process.Pid)
	}
	// One that is just ending is waited for.
	go func() { _ = stdin.Close() }()
	s, err := Open(Options{Dir: dir, Pools: testPools, LockTimeout: 60 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// tinyDisk is a file system of the given size.
func tinyDisk(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755,size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// On a full disk a write fails with a typed error and leaves nothing; once there
// is room, the same store goes on.
func TestC04_AFullDiskLosesNothing(t *testing.T) {
	disk := tinyDisk(t, "256k")
	s := open(t, disk+"/state")
	begun := map[endpoint.Generation]bool{}
	var err error
	slot := uint32(0)
	for ; slot < 2000 && err == nil; slot++ {
		ep := testEndpoint(slot)
		if ep, err = s.Begin(ep); err == nil {
			begun[ep.Generation] = true
		}
	}
	var we *WriteError
	if !errors.As(err, &we) || !errors.Is(err, unix.ENOSPC) || we.Broken {
		t.Fatalf("after %d records: got %v, want a *WriteError that can be tried again", len(begun), err)
	}
	same := func(when string) {
		t.Helper()
		list := must(s.List())(t)
		if len(list) != len(begun) || s.Counts().Total != len(begun) {
			t.Errorf("%s: %d records (%d counted), want %d", when, len(list), s.Counts().Total, len(begun))
		}
		for _, ep := range list {
			if !begun[ep.Generation] {
				t.Errorf("%s: record %s was never acknowledged", when, ep.Generation)
			}
		}
	}
	same("on the full disk")
	for range 20 { // a smaller write may still fit; a larger one is refused without harm
		slot++
		switch ep, err := s.Begin(testEndpoint(slot)); {
		case err == nil:
			begun[ep.Generation] = true
		case !errors.Is(err, unix.ENOSPC):
			t.Fatalf("again: %v", err)
		}
	}
	slot++
	same("after further tries")
	if err := unix.Mount("", disk, "", unix.MS_REMOUNT, "size=4m"); err != nil {
		t.Fatal(err)
	}
	ep, err := s.Begin(testEndpoint(slot))
	if err != nil {
		t.Fatalf("with room again: %v", err)
	}
	begun[ep.Generation] = true
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, disk+"/state")
	same("after reopening")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// A disk that is full from the start: no store, nothing left of the attempt, and a
// later start works.
func TestFullDiskAtCreation(t *testing.T) {
	for _, size := range []string{"4k", "8k", "16k", "20k", "28k"} {
		t.Run(size, func(t *testing.T) {
			disk := tinyDisk(t, size)
			s, err := Open(Options{Dir: disk + "/state", Pools: testPools})
			if err == nil { // just enough
				if err := s.Close(); err != nil {
					t.Error(err)
				}
				return
			}
			if !errors.Is(err, unix.ENOSPC) {
				t.Errorf("got %v", err)
			}
			if entries, _ := os.ReadDir(disk + "/state"); len(entries) != 0 {
				t.Errorf("left behind: %v", entries)
			}
			if err := unix.Mount("", disk, "", unix.MS_REMOUNT, "size=4m"); err != nil {
				t.Fatal(err)
			}
			must(tryOpen(disk + "/state"))(t)
		})
	}
}

// Many writers at once share transactions; one that is refused or fails costs the
// others nothing.
func TestConcurrentWriters(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := open(t, dir)
	const writers, each = 32, 8
	var wg sync.WaitGroup
	errs := make(chan error, writers*each)
	for w := range uint32(writers) {
		wg.Go(func() {
			for n := range uint32(each) {
				ep := testEndpoint(w*each + n)
				if _, err := s.Begin(ep); err != nil {
					errs <- err
					continue
				}
				if _, err := s.Begin(ep); err == nil {
					errs <- errors.New("the same record was begun twice")
				}
				_, err := s.Update(ep.Generation, func(*endpoint.Endpoint) error {
					if n == 3 {
						panic("x")
					}
					return nil
				})
				if (err != nil) != (n == 3) {
					errs <- fmt.Errorf("update %d: %w", n, err)
				}
				if n%2 == 0 {
					_, err := s.BeginDelete(ep.Generation, nil)
					errs <- errors.Join(err, s.Finish(ep.Generation, Freed{BootID: "b"}))
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
	if c := s.Counts(); c.Total != writers*each/2 {
		t.Errorf("counts: %+v", c)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if list := must(tryOpen(dir))(t); len(list) != writers*each/2 {
		t.Errorf("%d records", len(list))
	}
}

// BenchmarkLife is what one ADD and DEL cost the store: four transactions.
func BenchmarkLife(b *testing.B) {
	for _, records := range []int{0, 2000} {
		b.Run(fmt.Sprintf("beside %d records", records), func(b *testing.B) {
			s := open(b, filepath.Join(b.TempDir(), "state"))
			var wg sync.WaitGroup
			for w := range 50 { // together: they share the fsyncs
				wg.Go(func() {
					for slot := w; slot < records; slot += 50 {
						if _, err := s.Begin(testEndpoint(uint32(slot))); err != nil {
							b.Error(err)
						}
					}
				})
			}
			wg.Wait()
			b.ResetTimer()
			for b.Loop() {
				ep := begin(b, s, 16000)
				must(s.MarkReady(ep.Generation, nil))(b)
				must(s.BeginDelete(ep.Generation, nil))(b)
				if err := s.Finish(ep.Generation, Freed{BootID: "b"}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("32 at once", func(b *testing.B) {
		s := open(b, filepath.Join(b.TempDir(), "state"))
		slots := make(chan uint32, 64)
		for i := range uint32(64) {
			slots <- i
		}
		b.SetParallelism(16)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				slot := <-slots
				ep := begin(b, s, slot)
				must(s.MarkReady(ep.Generation, nil))(b)
				must(s.BeginDelete(ep.Generation, nil))(b)
				if err := s.Finish(ep.Generation, Freed{BootID: "b"}); err != nil {
					b.Fatal(err)
				}
				slots <- slot
			}
		})
	})
}
