package netlab

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// CommandTimeout bounds every command that Run and Output start.
const CommandTimeout = 60 * time.Second

var counter atomic.Uint32

// Namespace is a network namespace made by a test, named under /run/netns.
type Namespace struct {
	Name string
}

// New makes a namespace with lo up and removes it when the test ends. A test may
// remove it itself before, see Remove.
func New(t testing.TB) *Namespace {
	t.Helper()
	ns := &Namespace{Name: fmt.Sprintf("t%d-%d", os.Getpid(), counter.Add(1))}
	hostRun(t, "ip", "netns", "add", ns.Name)
	t.Cleanup(func() { ns.Remove(t) })
	ns.Run(t, "ip", "link", "set", "lo", "up")
	return ns
}

// Path is the namespace's file, as a runtime would put it into CNI_NETNS.
func (n *Namespace) Path() string { return "/run/netns/" + n.Name }

// Open returns the namespace's file; the caller closes it.
func (n *Namespace) Open(t testing.TB) *os.File {
	t.Helper()
	f, err := os.Open(n.Path())
	if err != nil {
		t.Fatalf("open namespace %s: %v", n.Name, err)
	}
	return f
}

// Remove deletes the namespace; absent is success.
func (n *Namespace) Remove(t testing.TB) {
	t.Helper()
	if _, err := os.Lstat(n.Path()); err == nil {
		hostRun(t, "ip", "netns", "del", n.Name)
	}
}

// Command prepares a command that runs inside the namespace.
func (n *Namespace) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + n.Path(), "--", name}, args...)...)
}

// Run runs a command inside the namespace, fails the test when it fails, and
// returns its standard output without the last line break.
func (n *Namespace) Run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := n.Try(name, args...)
	if err != nil {
		t.Fatalf("namespace %s: %v", n.Name, err)
	}
	return out
}

// Try is Run for a command that may fail; the error carries its output.
func (n *Namespace) Try(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), CommandTimeout)
	defer cancel()
	return output(n.Command(ctx, name, args...))
}

// Do runs f with its thread inside the namespace (nil: the host): a socket stays
// in the namespace that it was made in. f must not start goroutines that are to
// stay there.
func (n *Namespace) Do(t testing.TB, f func()) {
	t.Helper()
	if n == nil {
		f()
		return
	}
	done := make(chan error, 1)
	go func() {
		// Never unlocked where the way back fails: the thread is then destroyed.
		runtime.LockOSThread()
		host, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			done <- err
			return
		}
		defer host.Close()
		target, err := os.Open(n.Path())
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer target.Close()
		if err := setns(target); err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		finished := false
		defer func() {
			if err := setns(host); err == nil {
				runtime.UnlockOSThread()
			}
			if !finished { // f called t.FailNow: the goroutine is ending
				done <- nil
			}
		}()
		f()
		finished = true
		done <- nil
	}()
	if err := <-done; err != nil {
		t.Fatalf("enter namespace %s: %v", n.Name, err)
	}
}

func setns(f *os.File) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := conn.Control(func(fd uintptr) { inner = unix.Setns(int(fd), unix.CLONE_NEWNET) }); err != nil {
		return err
	}
	return inner
}

// Run runs a command on the private host and returns its standard output.
func Run(t testing.TB, name string, args ...string) string {
	t.Helper()
	return hostRun(t, name, args...)
}

// Try is Run for a command that may fail; the error carries its output.
func Try(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), CommandTimeout)
	defer cancel()
	return output(exec.CommandContext(ctx, name, args...))
}

func hostRun(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := Try(name, args...)
	if err != nil {
		t.Fatalf("host: %v", err)
	}
	return out
}

func output(cmd *exec.Cmd) (string, error) {
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %w: %s%s", strings.Join(cmd.Args, " "), err, stdout.String(), stderr.String())
	}
	return strings.TrimRight(stdout.String(), "\n"), nil
}

// Eventually polls f until it returns nil, and fails the test with its last
// error when that has not happened within limit. Choose limits for a machine
// that is ten times slower than yours.
func Eventually(t testing.TB, limit time.Duration, f func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %v", limit, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
