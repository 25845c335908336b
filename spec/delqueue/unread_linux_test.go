package delqueue

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"mknet/tests/netlab"
)

// An acknowledged DEL is not lost because it could not be read for a while.
func TestWithoutDescriptorsNothingIsSetAside(t *testing.T) {
	for _, suffix := range []string{"", claimedSuffix} {
		for spare := range 2 { // the folder cannot be listed; the file cannot be opened a second time
			q, dir := newQueue(t)
			for n := range 3 {
				if err := q.Enqueue(entry(n)); err != nil {
					t.Fatal(err)
				}
				if err := os.Rename(filepath.Join(dir, entry(n).Name()), filepath.Join(dir, entry(n).Name()+suffix)); err != nil {
					t.Fatal(err)
				}
			}
			before := list(t, q)
			replay := func() (int, error) {
				settled, _, err := q.Replay(context.Background(), 8, all, func(context.Context, Entry) error { return nil })
				return settled, err
			}
			restore := netlab.Exhaust(t, spare)
			settled, err := replay()
			restore()
			if settled != 0 || !errors.Is(err, unix.EMFILE) {
				t.Errorf("%q, %d descriptors to spare: settled %d, %v; want EMFILE", suffix, spare, settled, err)
			}
			if err != nil && strings.Contains(err.Error(), "\n") {
				t.Errorf("%q, %d descriptors to spare: %v; want the first error alone", suffix, spare, err)
			}
			if got := list(t, q); !slices.Equal(got, before) {
				t.Errorf("%q, %d descriptors to spare: left %v, want %v", suffix, spare, got, before)
			}
			if settled, err := replay(); settled != 3 || err != nil {
				t.Errorf("%q, with descriptors again: settled %d, %v; want 3", suffix, settled, err)
			}
		}
	}
}

// What will never be replayed is told apart from what waits.
func TestListTellsWhatIsUnusable(t *testing.T) {
	q, dir := newQueue(t)
	if err := q.Enqueue(entry(1)); err != nil {
		t.Fatal(err)
	}
	valid, err := entry(2).encode()
	if err != nil {
		t.Fatal(err)
	}
	other, err := entry(9).encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		entry(2).Name() + badSuffix: valid, entry(3).Name() + badSuffix: {}, entry(4).Name(): {'{'}, entry(5).Name(): other, "README": {'x'},
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, entry(6).Name())); err != nil {
		t.Fatal(err)
	}
	items, err := q.List()
	if err != nil || len(items) != 7 {
		t.Fatalf("List: %d items, %v; want 7", len(items), err)
	}
	for _, it := range items {
		waits := it.File == entry(1).Name()
		if it.Unusable == waits || (it.Err == nil) != waits || (it.Entry != Entry{}) != waits {
			t.Errorf("%s: unusable %t, %v, %+v; want only %s to wait", it.File, it.Unusable, it.Err, it.Entry, entry(1).Name())
		}
	}
	// A file that cannot be opened now may well be in order.
	restore := netlab.Exhaust(t, 0)
	_, err = q.read(entry(1).Name(), entry(1).Name())
	restore()
	if !errors.Is(err, unix.EMFILE) || errors.As(err, new(*contentError)) {
		t.Errorf("read without a descriptor: %v, want EMFILE", err)
	}
}
