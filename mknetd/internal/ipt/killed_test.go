package ipt

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"mknet/spec/endpoint"
)

// adderEnv makes the test's program an adder, which is killed.
const adderEnv = "MKNET_TEST_ADDER"

// A commit that waits, as for the lock, ends with the mknetd that began it: its
// successor has undone the ADD by then, and nobody would know of the rules.
func TestCommitEndsWithWhoBeganIt(t *testing.T) {
	bothFlavours(t, func(t *testing.T, flavour string) {
		l := newLab(t, flavour)
		before := l.rules()
		dir := t.TempDir()
		started, gate := filepath.Join(dir, "started"), filepath.Join(dir, "gate")
		if err := syscall.Mkfifo(gate, 0o600); err != nil {
			t.Fatal(err)
		}
		name := "iptables-" + flavour + "-restore"
		script := fmt.Sprintf("#!/bin/sh\necho $$ > %[1]s.new && mv %[1]s.new %[1]s\nread go < %[2]s\nexec /usr/sbin/%[3]s \"$@\"\n", started, gate, name)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		// In this private host, and not in one of its own.
		killed := exec.Command("/proc/self/exe")
		killed.Env = append(os.Environ(), adderEnv+"="+flavour, "PATH="+dir+":"+os.Getenv("PATH"))
		killed.Stderr = os.Stderr
		if err := killed.Start(); err != nil {
			t.Fatal(err)
		}
		var pid int
		within := func(what string, done func() bool) {
			t.Helper()
			for deadline := time.Now().Add(20 * time.Second); !done(); time.Sleep(10 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Errorf("%s: not within 20 s", what)
					return
				}
			}
		}
		within("the commit begins", func() bool {
			text, err := os.ReadFile(started)
			_, scanErr := fmt.Sscan(string(text), &pid)
			return err == nil && scanErr == nil
		})
		if err := killed.Process.Kill(); err != nil {
			t.Error(err)
		}
		var exit *exec.ExitError
		if err := killed.Wait(); !errors.As(err, &exit) {
			t.Errorf("the adder: %v", err)
		}
		gone := func() bool {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			return err != nil || strings.Contains(string(stat), ") Z ") // nobody may have reaped it yet
		}
		if pid != 0 {
			within("the commit ends", gone)
		}
		// The lock is free: one that still waits commits.
		if g, err := os.OpenFile(gate, os.O_WRONLY|syscall.O_NONBLOCK, 0); err == nil {
			fmt.Fprintln(g, "go")
			g.Close()
			within("the commit that was left ends", gone)
		}
		if got := l.rules(); got != before {
			t.Errorf("got\n%s\nwant\n%s", got, before)
			for _, o := range reading(t, l.fw).Owned() {
				if err := l.fw.RemoveOwned(ctx(t), o.Generation); err != nil {
					t.Error(err)
				}
			}
		}
	})
}

// adder is the mknetd of TestCommitEndsWithWhoBeganIt; it returns its exit status.
func adder(flavour string) int {
	fw, err := Open(context.Background(), Config{Flavour: flavour, ChildPool: endpoint.DefaultPools.Child})
	if err == nil {
		err = fw.Tables(everything(1))[0].Ensure(context.Background())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "adder:", err)
		return 1
	}
	return 0
}
