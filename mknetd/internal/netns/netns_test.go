package netns_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/netns"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

func open(t *testing.T, path string) *netns.Namespace {
	t.Helper()
	n, err := netns.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

func TestOpenIdentifies(t *testing.T) {
	netlab.Clean(t)
	a, b := netlab.New(t), netlab.New(t)
	first, second, other := open(t, a.Path()), open(t, a.Path()), open(t, b.Path())
	id := first.ID()
	if id.Cookie == 0 || id.Inode == 0 || id.Device == 0 || len(id.BootID) != 36 || id.Path != a.Path() || id.Owned {
		t.Errorf("ID() = %+v: something is missing", id)
	}
	if !id.Same(second.ID()) {
		t.Errorf("the same namespace opened twice differs: %+v, %+v", id, second.ID())
	}
	if id.Same(other.ID()) {
		t.Errorf("two namespaces are the same: %+v, %+v", id, other.ID())
	}
	fromFile, err := netns.FromFile(a.Open(t), "")
	if err != nil {
		t.Fatal(err)
	}
	defer fromFile.Close()
	if !fromFile.ID().Same(id) {
		t.Errorf("FromFile: %+v, want the identity of %+v", fromFile.ID(), id)
	}
}

// Case C13 (a plain file), C39 (the host's own), and their relatives.
func TestOpenRefuses(t *testing.T) {
	netlab.Clean(t)
	dir := t.TempDir()
	plain, fifo := filepath.Join(dir, "plain"), filepath.Join(dir, "fifo")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	loop := filepath.Join(dir, "loop")
	if err := os.Symlink(loop, loop); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, path string
		want       error
	}{
		{"plain file", plain, netns.ErrNotNamespace},
		{"fifo", fifo, netns.ErrNotNamespace},
		{"folder", dir, netns.ErrNotNamespace},
		{"device", "/dev/null", netns.ErrNotNamespace},
		{"empty", "", netns.ErrNotNamespace},
		{"too long", "/" + strings.Repeat("a", 5000), netns.ErrNotNamespace},
		{"nul", "/run/netns/a\x00b", netns.ErrNotNamespace},
		{"mount namespace", "/proc/self/ns/mnt", netns.ErrNotNamespace},
		{"pid namespace", "/proc/self/ns/pid", netns.ErrNotNamespace},
		{"absent", filepath.Join(dir, "absent"), fs.ErrNotExist},
		{"below a file", filepath.Join(plain, "x"), fs.ErrNotExist},
		{"symlink loop", loop, unix.ELOOP},
		{"host by self", "/proc/self/ns/net", netns.ErrHostNamespace},
		{"host by pid", fmt.Sprintf("/proc/%d/ns/net", os.Getpid()), netns.ErrHostNamespace},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n, err := netns.Open(tt.path)
			if n != nil {
				_ = n.Close()
			}
			if !errors.Is(err, tt.want) {
				t.Errorf("Open(%q) = %v, want %v", tt.path, err, tt.want)
			}
		})
	}
	t.Run("FromFile closes what it refuses", func(t *testing.T) {
		f, err := os.Open(plain)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := netns.FromFile(f, ""); !errors.Is(err, netns.ErrNotNamespace) {
			t.Errorf("FromFile(plain) = %v, want %v", err, netns.ErrNotNamespace)
		}
		if _, err := f.Stat(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("the file is still open: %v", err)
		}
		host, err := os.Open("/proc/self/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := netns.FromFile(host, ""); !errors.Is(err, netns.ErrHostNamespace) {
			t.Errorf("FromFile(host) = %v, want %v", err, netns.ErrHostNamespace)
		}
	})
}

// threads returns the namespace of every thread of this process.
func threads(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil || len(paths) == 0 {
		t.Fatalf("list threads: %v, %d found", err, len(paths))
	}
	found := map[string]string{}
	for _, p := range paths {
		if target, err := os.Readlink(p); err == nil { // else the thread has ended
			found[p] = target
		}
	}
	return found
}

// Case C15: every thread is back in the host's namespace after a rush.
func TestDoInParallelLeavesNoThreadBehind(t *testing.T) {
	netlab.Clean(t)
	host, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	var spaces []*netns.Namespace
	for range 4 {
		spaces = append(spaces, open(t, netlab.New(t).Path()))
	}
	const parallel, rounds = 64, 20
	start := make(chan struct{})
	var all sync.WaitGroup
	for i := range parallel {
		n := spaces[i%len(spaces)]
		want := fmt.Sprintf("net:[%d]", n.ID().Inode)
		all.Go(func() {
			<-start
			for range rounds {
				err := n.Do(func() error {
					if got, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || got != want {
						return fmt.Errorf("inside: %s, want %s (%w)", got, want, err)
					}
					runtime.Gosched()
					if got, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || got != want {
						return fmt.Errorf("after a switch of goroutines: %s, want %s (%w)", got, want, err)
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
				if got, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || got != host {
					t.Errorf("outside: %s, want %s (%v)", got, host, err)
				}
			}
		})
	}
	close(start)
	all.Wait()
	for path, got := range threads(t) {
		if got != host {
			t.Errorf("%s is in %s, want the host's %s", path, got, host)
		}
	}
}

func TestDoReturnsTheErrorAndSurvivesGoexit(t *testing.T) {
	netlab.Clean(t)
	n := open(t, netlab.New(t).Path())
	mine := errors.New("mine")
	if err := n.Do(func() error { return mine }); !errors.Is(err, mine) {
		t.Errorf("Do() = %v, want the function's error", err)
	}
	if err := n.Do(func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("Do() = nil for a function that ended its goroutine")
	}
	host, _ := os.Readlink("/proc/self/ns/net")
	for path, got := range threads(t) {
		if got != host {
			t.Errorf("%s is in %s, want the host's %s", path, got, host)
		}
	}
}

func TestNetlinkIsInside(t *testing.T) {
	netlab.Clean(t)
	lab := netlab.New(t)
	lab.Run(t, "ip", "link", "add", "inside0", "type", "veth", "peer", "name", "inside1")
	n := open(t, lab.Path())
	h, err := n.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.LinkByName("inside0"); err != nil {
		t.Errorf("LinkByName(inside0): %v", err)
	}
	again, err := n.Netlink()
	if err != nil || again != h {
		t.Errorf("a second Netlink() = %p, %v, want the first, %p", again, err, h)
	}
}

func TestFind(t *testing.T) {
	netlab.Clean(t)
	ctx := context.Background()
	lab := netlab.New(t)
	n := open(t, lab.Path())
	id := n.ID()

	found := func(name string, want endpoint.Namespace) {
		t.Helper()
		f, err := netns.Find(ctx, want)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
		if !f.ID().Same(id) {
			t.Errorf("%s: found %+v, want %+v", name, f.ID(), id)
		}
		_ = f.Close()
	}
	gone := func(name string, want endpoint.Namespace) {
		t.Helper()
		f, err := netns.Find(ctx, want)
		if f != nil {
			_ = f.Close()
		}
		if !errors.Is(err, netns.ErrGone) {
			t.Errorf("%s: %v, want %v", name, err, netns.ErrGone)
		}
	}

	found("by path", id)
	moved := id
	moved.Path = "/run/netns/elsewhere"
	found("mounted elsewhere", moved)
	moved.Path = ""
	found("came as a descriptor", moved)
	impostor := id
	impostor.Path = netlab.New(t).Path() // the path leads to another one by now
	found("path reused", impostor)

	other := id
	other.Cookie++
	gone("another cookie", other)
	rebooted := id
	rebooted.BootID = "00000000-0000-0000-0000-000000000000"
	gone("another boot", rebooted)

	// Mounted under a name with characters that mountinfo escapes.
	odd := filepath.Join(netns.Dir, "a b\\c")
	if err := os.WriteFile(odd, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(lab.Path(), odd, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	lab.Remove(t)
	found("mounted under an odd name", id)
	if err := errors.Join(unix.Unmount(odd, unix.MNT_DETACH), os.Remove(odd)); err != nil {
		t.Fatal(err)
	}

	// No mount is left; a process keeps it.
	sleeper := exec.Command("cat")
	reader, stdin, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	sleeper.Stdin = reader
	if err := n.Do(sleeper.Start); err != nil {
		t.Fatal(err)
	}
	_ = reader.Close()
	found("kept by a process", id)
	_ = stdin.Close()
	if err := sleeper.Wait(); err != nil {
		t.Error(err)
	}
	gone("nothing leads there", id)
}

func TestMakeAndRemove(t *testing.T) {
	netlab.Clean(t)
	g := endpoint.NewGeneration()
	n, err := netns.Make(g)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if id := n.ID(); !id.Owned || id.Path != netns.OwnedPath(g) || id.Cookie == 0 {
		t.Errorf("Make: ID %+v", id)
	}
	if out := netlab.Run(t, "ip", "-n", g.OwnedNamespace(), "-br", "link", "show", "lo"); !strings.Contains(out, "UP") {
		t.Errorf("lo is not up: %s", out)
	}
	if _, err := netns.Make(g); !errors.Is(err, netns.ErrForeign) {
		t.Errorf("a second Make = %v, want %v", err, netns.ErrForeign)
	}
	again, err := netns.FindOwned(g)
	if err != nil {
		t.Fatal(err)
	}
	if !again.ID().Same(n.ID()) || !again.ID().Owned {
		t.Errorf("FindOwned: %+v, want %+v", again.ID(), n.ID())
	}
	_ = again.Close()
	if owned, err := netns.Owned(); err != nil || len(owned) != 1 || owned[0] != (netns.Made{Name: g.OwnedNamespace(), Generation: g}) {
		t.Errorf("Owned() = %v, %v, want %s", owned, err, g)
	}
	for i := range 2 {
		if err := netns.Remove(g); err != nil {
			t.Errorf("Remove %d: %v", i+1, err)
		}
	}
	if _, err := netns.FindOwned(g); !errors.Is(err, netns.ErrGone) {
		t.Errorf("FindOwned after Remove = %v, want %v", err, netns.ErrGone)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	// Find by cookie must not bring it back.
	netlab.Eventually(t, 30*time.Second, func() error {
		f, err := netns.Find(context.Background(), n.ID())
		if err == nil {
			_ = f.Close()
			return errors.New("still found")
		}
		if !errors.Is(err, netns.ErrGone) {
			return err
		}
		return nil
	})
}

func TestMakeManyAtOnce(t *testing.T) {
	netlab.Clean(t)
	host, _ := os.Readlink("/proc/self/ns/net")
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			g := endpoint.NewGeneration()
			n, err := netns.Make(g)
			if err != nil {
				t.Error(err)
				return
			}
			if err := errors.Join(n.Close(), netns.Remove(g)); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	for path, got := range threads(t) {
		if got != host {
			t.Errorf("%s is in %s, want the host's %s", path, got, host)
		}
	}
}

// left asks for the removal of what is foreign under the generation's name.
func left(t *testing.T, g endpoint.Generation) {
	t.Helper()
	if err := netns.Remove(g); err != nil {
		t.Errorf("Remove = %v, want success: ours is absent", err)
	}
	if _, err := os.Lstat(netns.OwnedPath(g)); err != nil {
		t.Errorf("what was not ours is gone: %v", err)
	}
	if _, err := netns.FindOwned(g); !errors.Is(err, netns.ErrForeign) || !errors.Is(err, netns.ErrGone) {
		t.Errorf("FindOwned = %v, want %v and %v", err, netns.ErrGone, netns.ErrForeign)
	}
}

func TestRemoveLeavesForeignAlone(t *testing.T) {
	netlab.Clean(t)
	t.Run("namespace without our mark", func(t *testing.T) {
		g := endpoint.NewGeneration()
		netlab.Run(t, "ip", "netns", "add", g.OwnedNamespace())
		defer netlab.Run(t, "ip", "netns", "del", g.OwnedNamespace())
		left(t, g)
		if owned, err := netns.Owned(); err != nil || len(owned) != 0 {
			t.Errorf("Owned() = %v, %v, want none", owned, err)
		}
		netlab.Run(t, "ip", "-n", g.OwnedNamespace(), "link", "show", "lo")
	})
	t.Run("same first digits", func(t *testing.T) {
		g := endpoint.NewGeneration()
		twin := g
		twin[15] ^= 1
		n, err := netns.Make(g)
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close()
		left(t, twin)
		if err := netns.Remove(g); err != nil {
			t.Error(err)
		}
	})
	t.Run("file with content", func(t *testing.T) {
		g := endpoint.NewGeneration()
		path := netns.OwnedPath(g)
		if err := os.WriteFile(path, []byte("mine"), 0o600); err != nil {
			t.Fatal(err)
		}
		defer os.Remove(path)
		left(t, g)
		if _, err := netns.Make(g); !errors.Is(err, netns.ErrForeign) {
			t.Errorf("Make = %v, want %v", err, netns.ErrForeign)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != "mine" {
			t.Errorf("the file has changed: %q, %v", b, err)
		}
	})
	t.Run("what a dying Make leaves", func(t *testing.T) {
		g := endpoint.NewGeneration()
		path := netns.OwnedPath(g)
		removals := map[string]func() error{
			"by generation": func() error { return netns.Remove(g) },
			"by name":       netns.Made{Name: g.OwnedNamespace()}.Remove,
		}
		for name, remove := range removals {
			f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o400)
			if err != nil {
				t.Fatal(err)
			}
			lock := func(how int) {
				conn, err := f.SyscallConn()
				if err == nil {
					err = conn.Control(func(fd uintptr) { err = unix.Flock(int(fd), how) })
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			lock(unix.LOCK_EX) // Make is at work
			owned, err := netns.Owned()
			if err != nil || len(owned) != 0 {
				t.Errorf("%s: Owned() = %v, %v beside a living Make, want none", name, owned, err)
			}
			if err := remove(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if _, err := os.Lstat(path); err != nil {
				t.Errorf("%s: took a living Make's file: %v", name, err)
			}
			_ = f.Close() // Make dies
			if owned, err = netns.Owned(); err != nil || !slices.Equal(owned, []netns.Made{{Name: g.OwnedNamespace()}}) {
				t.Errorf("%s: Owned() = %v, %v, want the empty file", name, owned, err)
			}
			if err := remove(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s: the empty file is still there: %v", name, err)
			}
		}
	})
}
