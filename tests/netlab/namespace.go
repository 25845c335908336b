package netlab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// CommandTimeout bounds every command that Run and Output start.
const CommandTimeout = 60 * time.Second

const (
	namespaceDir    = "/run/netns"
	threadNamespace = "/proc/thread-self/ns/net"
)

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
	if err := MakeNamespace(ns.Name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Remove(t) })
	return ns
}

// MakeNamespace makes a namespace with lo up, as `ip netns add` does but without two
// programs, which take more time than all the rest.
func MakeNamespace(name string) error {
	path := namespaceDir + "/" + name
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0)
	if err != nil {
		return fmt.Errorf("make namespace %s: %w", name, err)
	}
	f.Close()
	err = apart(func() error { return unix.Unshare(unix.CLONE_NEWNET) }, func() error {
		if err := unix.Mount(threadNamespace, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount %s: %w", path, err)
		}
		return raiseLoopback()
	})
	if err != nil {
		return errors.Join(fmt.Errorf("make namespace %s: %w", name, err), RemoveNamespace(name))
	}
	return nil
}

// RemoveNamespace takes a namespace's name away; absent is success.
func RemoveNamespace(name string) error {
	path := namespaceDir + "/" + name
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove namespace %s: %w", name, err)
	}
	return nil
}

func raiseLoopback() error {
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// Path is the namespace's file, as a runtime would put it into CNI_NETNS.
func (n *Namespace) Path() string { return namespaceDir + "/" + n.Name }

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
	if err := RemoveNamespace(n.Name); err != nil {
		t.Fatal(err)
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
	return TryIn(n.Path(), name, args...)
}

// TryIn is Try for the namespace of a path. The program is started by a thread inside
// it: nsenter would be a second program each time.
func TryIn(path, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), CommandTimeout)
	defer cancel()
	out, err := output(exec.CommandContext(ctx, name, args...), func(start func() error) error { return enter(path, start) })
	if err != nil {
		return out, fmt.Errorf("in %s: %w", path, err)
	}
	return out, nil
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
	if err := enter(n.Path(), func() error { f(); return nil }); err != nil {
		t.Fatalf("enter namespace %s: %v", n.Name, err)
	}
}

// enter runs f with its thread inside the namespace of a path.
func enter(path string, f func() error) error {
	target, err := os.Open(path)
	if err != nil {
		return err
	}
	defer target.Close()
	return apart(func() error { return setns(target) }, f)
}

// apart runs f in a goroutine of its own, on a thread that change has moved to another
// namespace.
func apart(change, f func() error) error {
	done := make(chan error, 1)
	go func() {
		// Never unlocked where the way back fails: the thread is then destroyed.
		runtime.LockOSThread()
		host, err := os.Open(threadNamespace)
		if err == nil {
			defer host.Close()
			err = change()
		}
		if err != nil {
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
		err = f()
		finished = true
		done <- err
	}()
	return <-done
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
	return output(exec.CommandContext(ctx, name, args...), here)
}

func here(start func() error) error { return start() }

func hostRun(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := Try(name, args...)
	if err != nil {
		t.Fatalf("host: %v", err)
	}
	return out
}

// output runs a command that is started by way of begin.
func output(cmd *exec.Cmd, begin func(start func() error) error) (string, error) {
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := begin(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
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
