package privdir

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func newDir(t *testing.T) (*Dir, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "a", "b")
	d, err := Open(path, true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d, path
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestOpenMakesAPrivateFolder(t *testing.T) {
	_, path := newDir(t)
	st, err := os.Stat(path)
	must(t, err)
	if st.Mode().Perm() != 0o700 {
		t.Errorf("mode is %v, want 0700", st.Mode())
	}
	if st, err = os.Stat(filepath.Dir(path)); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("parent is %v, %v; want 0755", st.Mode(), err)
	}
}

func TestOpenRefusesWhatOthersCouldSwap(t *testing.T) {
	for _, tc := range []struct {
		name  string
		make  func(t *testing.T, root string) string
		fault string // end of UnsafeError.Path
	}{
		{"folder is a link", func(t *testing.T, root string) string {
			must(t, os.Mkdir(root+"/real", 0o700))
			must(t, os.Symlink("real", root+"/link"))
			return root + "/link"
		}, "/link"},
		{"parent is a link", func(t *testing.T, root string) string {
			must(t, os.MkdirAll(root+"/real/dir", 0o700))
			must(t, os.Symlink("real", root+"/link"))
			return root + "/link/dir"
		}, "/link"},
		{"parent is writable by others", func(t *testing.T, root string) string {
			must(t, os.MkdirAll(root+"/open/dir", 0o700))
			must(t, os.Chmod(root+"/open", 0o777))
			return root + "/open/dir"
		}, "/open"},
		{"parent belongs to another user", func(t *testing.T, root string) string {
			must(t, os.MkdirAll(root+"/his/dir", 0o700))
			must(t, os.Chown(root+"/his", 12345, 0))
			return root + "/his/dir"
		}, "/his"},
		{"folder belongs to another user", func(t *testing.T, root string) string {
			must(t, os.Mkdir(root+"/his", 0o700))
			must(t, os.Chown(root+"/his", 12345, 0))
			return root + "/his"
		}, "/his"},
		{"folder is readable by others", func(t *testing.T, root string) string {
			must(t, os.Mkdir(root+"/open", 0o755))
			return root + "/open"
		}, "/open"},
		{"folder is a file", func(t *testing.T, root string) string {
			must(t, os.WriteFile(root+"/file", nil, 0o600))
			return root + "/file"
		}, "/file"},
		{"path is relative", func(*testing.T, string) string { return "rel/dir" }, "rel/dir"},
		{"path is not clean", func(_ *testing.T, root string) string { return root + "/../x" }, "/../x"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := t.TempDir()
			path := tc.make(t, root)
			d, err := Open(path, true)
			if err == nil {
				_ = d.Close()
			}
			var unsafeErr *UnsafeError
			if !errors.As(err, &unsafeErr) || !strings.HasSuffix(unsafeErr.Path, tc.fault) {
				t.Errorf("Open(%s) = %v, want an UnsafeError about %s", path, err, tc.fault)
			}
		})
	}
}

func TestOpenWithoutCreate(t *testing.T) {
	if _, err := Open(filepath.Join(t.TempDir(), "x", "y"), false); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Open = %v, want fs.ErrNotExist", err)
	}
}

func TestPublishReadRemove(t *testing.T) {
	d, path := newDir(t)
	for _, content := range []string{"one", "two and longer", ""} {
		must(t, d.Publish("f", []byte(content), Synced))
		got, err := d.Read("f", 100)
		if err != nil || string(got) != content {
			t.Fatalf("Read = %q, %v; want %q", got, err, content)
		}
	}
	if st, err := os.Stat(path + "/f"); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", st.Mode(), err)
	}
	must(t, d.Publish("f", bytes.Repeat([]byte("x"), 101), Unsynced))
	if _, err := d.Read("f", 100); !errors.Is(err, ErrTooLarge) {
		t.Errorf("Read of 101 bytes = %v, want ErrTooLarge", err)
	}
	must(t, d.Remove("f"))
	must(t, d.Remove("f"))
	if _, err := d.Read("f", 100); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Read after Remove = %v, want fs.ErrNotExist", err)
	}
	if names, err := os.ReadDir(path); err != nil || len(names) != 0 {
		t.Errorf("left %v, %v", names, err)
	}
}

func TestReadRefusesWhatOthersCouldTouch(t *testing.T) {
	for name, put := range map[string]func(t *testing.T, file string){
		"symbolic link": func(t *testing.T, f string) { must(t, os.Symlink("/etc/hostname", f)) },
		"dangling link": func(t *testing.T, f string) { must(t, os.Symlink("none", f)) },
		"fifo":          func(t *testing.T, f string) { must(t, unix.Mkfifo(f, 0o600)) },
		"folder":        func(t *testing.T, f string) { must(t, os.Mkdir(f, 0o700)) },
		"open to others": func(t *testing.T, f string) {
			must(t, os.WriteFile(f, nil, 0o600))
			must(t, os.Chmod(f, 0o644))
		},
		"of another user": func(t *testing.T, f string) {
			must(t, os.WriteFile(f, nil, 0o600))
			must(t, os.Chown(f, 12345, 0))
		},
		"two names": func(t *testing.T, f string) {
			must(t, os.WriteFile(f, nil, 0o600))
			must(t, os.Link(f, f+"2"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			d, path := newDir(t)
			put(t, path+"/f")
			var unsafeErr *UnsafeError
			if _, err := d.Read("f", 100); !errors.As(err, &unsafeErr) {
				t.Errorf("Read = %v, want an UnsafeError", err)
			}
			if _, _, err := d.TryLock("f"); !errors.As(err, &unsafeErr) {
				t.Errorf("TryLock = %v, want an UnsafeError", err)
			}
		})
	}
}

func TestNamesAreOnePlainFile(t *testing.T) {
	d, _ := newDir(t)
	for _, name := range []string{"", ".", "..", "a/b", "/etc/passwd", ".hidden", "a\x00b", strings.Repeat("x", 129)} {
		if _, err := d.Read(name, 1); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("Read(%q) = %v, want fs.ErrInvalid", name, err)
		}
		if err := d.Publish(name, nil, Unsynced); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("Publish(%q) = %v, want fs.ErrInvalid", name, err)
		}
		if err := d.Remove(name); !errors.Is(err, fs.ErrInvalid) {
			t.Errorf("Remove(%q) = %v, want fs.ErrInvalid", name, err)
		}
	}
}

// A folder that is replaced after Open is not followed.
func TestSwappedFolderIsNotFollowed(t *testing.T) {
	d, path := newDir(t)
	must(t, d.Publish("f", []byte("ours"), Unsynced))
	must(t, os.Rename(path, path+"-moved"))
	must(t, os.Mkdir(path, 0o700))
	must(t, os.WriteFile(path+"/f", []byte("theirs"), 0o600))
	if got, err := d.Read("f", 100); err != nil || string(got) != "ours" {
		t.Errorf("Read = %q, %v; want what was published", got, err)
	}
}

// Readers see the old or the new content and nothing else while writers replace it.
func TestPublishIsAtomic(t *testing.T) {
	d, _ := newDir(t)
	contents := []string{strings.Repeat("a", 3000), strings.Repeat("b", 10)}
	must(t, d.Publish("f", []byte(contents[0]), Unsynced))
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for _, c := range contents {
		wg.Go(func() {
			for range 300 {
				if err := d.Publish("f", []byte(c), Unsynced); err != nil {
					t.Error(err)
				}
			}
		})
	}
	var readers sync.WaitGroup
	readers.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			got, err := d.Read("f", 4000)
			var changed *ChangedError
			if err != nil && !errors.As(err, &changed) {
				t.Errorf("Read: %v", err)
			}
			if err == nil && !slices.Contains(contents, string(got)) {
				t.Errorf("Read a mixture of %d bytes", len(got))
			}
		}
	})
	wg.Wait()
	close(stop)
	readers.Wait()
}

func TestRenameReplacesNothing(t *testing.T) {
	d, _ := newDir(t)
	must(t, d.Publish("a", nil, Unsynced))
	must(t, d.Publish("b", nil, Unsynced))
	if err := d.Rename("a", "b"); !errors.Is(err, fs.ErrExist) {
		t.Errorf("Rename onto a file = %v, want fs.ErrExist", err)
	}
	if err := d.Rename("none", "c"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Rename of nothing = %v, want fs.ErrNotExist", err)
	}
	must(t, d.Rename("a", "c"))
	if names, err := d.Names(); err != nil || !slices.Equal(names, []string{"b", "c"}) {
		t.Errorf("Names = %v, %v", names, err)
	}
}

func TestLockIsExclusiveAndFollowsTheFile(t *testing.T) {
	d, _ := newDir(t)
	must(t, d.Publish("a", []byte("1"), Unsynced))
	l, ok, err := d.TryLock("a")
	if err != nil || !ok {
		t.Fatalf("TryLock = %v, %v", ok, err)
	}
	if _, ok, err := d.TryLock("a"); ok || err != nil {
		t.Errorf("second TryLock = %v, %v; want false", ok, err)
	}
	must(t, d.Rename("a", "b"))
	if !d.Means("b", l) || d.Means("a", l) {
		t.Error("the lock does not follow the file")
	}
	must(t, d.Publish("b", []byte("2"), Unsynced))
	if d.Means("b", l) {
		t.Error("the lock holds a file that was replaced")
	}
	l.Unlock()
	if l, ok, err = d.TryLock("b"); !ok || err != nil {
		t.Errorf("TryLock after Unlock = %v, %v", ok, err)
	}
	l.Unlock()
	if _, ok, err := d.TryLock("none"); ok || err != nil {
		t.Errorf("TryLock of nothing = %v, %v; want false, nil", ok, err)
	}
}

func TestSweepRemovesOnlyOldHalfWrittenFiles(t *testing.T) {
	d, path := newDir(t)
	for _, n := range []string{tempPrefix + "old", tempPrefix + "new", "real"} {
		must(t, os.WriteFile(filepath.Join(path, n), nil, 0o600))
	}
	past := time.Now().Add(-time.Hour)
	must(t, os.Chtimes(filepath.Join(path, tempPrefix+"old"), past, past))
	must(t, os.Chtimes(filepath.Join(path, "real"), past, past))
	if n, err := d.Sweep(time.Now().Add(-time.Minute)); n != 1 || err != nil {
		t.Errorf("Sweep = %d, %v; want 1", n, err)
	}
	if _, err := os.Stat(filepath.Join(path, tempPrefix+"new")); err != nil {
		t.Errorf("a file that is being written is gone: %v", err)
	}
}

func TestPublishOnAFullDiskLeavesTheOldContent(t *testing.T) {
	mount := t.TempDir()
	if err := unix.Mount("tmpfs", mount, "tmpfs", 0, "size=64k,mode=0700"); err != nil {
		t.Fatalf("mount a small tmpfs: %v (run as root)", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(mount, unix.MNT_DETACH) })
	d, err := Open(mount+"/d", true)
	must(t, err)
	defer func() { _ = d.Close() }()
	must(t, d.Publish("f", []byte("old"), Synced))
	must(t, os.WriteFile(mount+"/fill", make([]byte, 40<<10), 0o600))
	if err := d.Publish("f", make([]byte, 100<<10), Synced); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("Publish = %v, want ENOSPC", err)
	}
	if got, err := d.Read("f", 100); err != nil || string(got) != "old" {
		t.Errorf("Read = %q, %v; want the old content", got, err)
	}
	if names, err := os.ReadDir(mount + "/d"); err != nil || len(names) != 1 {
		t.Errorf("left %v, %v", names, err)
	}
}

func TestAppendFileIsPrivateAndBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log", "mk-cni.log")
	const limit = 1000
	line := strings.Repeat("x", 99) + "\n"
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 50 {
				f, err := AppendFile(path, limit)
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := fmt.Fprint(f, line); err != nil {
					t.Error(err)
				}
				_ = f.Close()
			}
		})
	}
	wg.Wait()
	for _, p := range []string{path, path + OldSuffix} {
		st, err := os.Stat(p)
		must(t, err)
		if st.Mode().Perm() != 0o600 || st.Size() > limit+4*int64(len(line)) {
			t.Errorf("%s: mode %v, %d bytes; want 0600 and about %d at most", p, st.Mode(), st.Size(), limit)
		}
	}
	if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 2 {
		t.Errorf("files %v, %v; want the log and its old", entries, err)
	}
}

func TestAppendFileRefusesLinks(t *testing.T) {
	dir := t.TempDir()
	victim := dir + "/victim"
	must(t, os.WriteFile(victim, []byte("keep"), 0o600))
	must(t, os.Symlink(victim, dir+"/log"))
	must(t, os.Symlink(dir, dir+"/dirlink"))
	for _, path := range []string{dir + "/log", dir + "/dirlink/log2"} {
		var unsafeErr *UnsafeError
		if f, err := AppendFile(path, 1); !errors.As(err, &unsafeErr) {
			t.Errorf("AppendFile(%s) = %v, %v; want an UnsafeError", path, f, err)
		}
	}
	if got, err := os.ReadFile(victim); err != nil || string(got) != "keep" {
		t.Errorf("victim is %q, %v", got, err)
	}
}
