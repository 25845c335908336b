package delqueue

import (
	"context"
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

	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/spec/privdir"
)

const bootID = "0b5a1f2e-1c2d-4e3f-8a9b-0c1d2e3f4a5b"

func entry(n int) Entry {
	return Entry{
		Attachment: endpoint.Attachment{Network: "mknet", ContainerID: fmt.Sprintf("c%d", n), IfName: "eth0"},
		Generation: endpoint.Generation{15: byte(n + 1), 0: byte(n >> 8)},
		BootID:     bootID,
		Cookie:     4711,
		Daemon:     "unix:///run/mknetd.sock",
		QueuedAt:   time.Date(2026, 11, 30, 12, 0, 0, 123456789, time.UTC),
		SinceBoot:  time.Hour,
	}
}

func unknown(n int) Entry { e := entry(n); e.Generation = endpoint.Generation{}; return e }

func all(Entry) bool { return true }

func newQueue(t *testing.T) (*Queue, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "queue")
	q, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = q.Close() })
	return q, dir
}

func list(t *testing.T, q *Queue) []string {
	t.Helper()
	items, err := q.List()
	if err != nil {
		t.Fatal(err)
	}
	names := []string{}
	for _, it := range items {
		names = append(names, it.File)
	}
	return names
}

func TestEnqueueIsReadBackExactly(t *testing.T) {
	q, _ := newQueue(t)
	want := []Entry{entry(1), unknown(1), entry(2)}
	for _, e := range want {
		if err := q.Enqueue(e); err != nil {
			t.Fatal(err)
		}
	}
	items, err := q.List()
	if err != nil || len(items) != len(want) {
		t.Fatalf("List = %d items, %v; want %d", len(items), err, len(want))
	}
	for _, it := range items {
		if it.Err != nil || it.Claimed || !slices.Contains(want, it.Entry) {
			t.Errorf("item %+v is not one of those queued", it)
		}
	}
}

func TestRepeatedDelReplacesItsOwnEntry(t *testing.T) {
	q, _ := newQueue(t)
	first, second := unknown(1), unknown(1)
	second.QueuedAt = second.QueuedAt.Add(time.Minute)
	for _, e := range []Entry{first, second, second} {
		if err := q.Enqueue(e); err != nil {
			t.Fatal(err)
		}
	}
	items, err := q.List()
	if err != nil || len(items) != 1 || items[0].Entry != second {
		t.Fatalf("List = %+v, %v; want only the second entry", items, err)
	}
}

func TestClaimSettleRelease(t *testing.T) {
	q, _ := newQueue(t)
	for n := range 3 {
		if err := q.Enqueue(entry(n)); err != nil {
			t.Fatal(err)
		}
	}
	var seen []string
	for c, err := range q.Claims(all) {
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, c.ContainerID)
		for other, err := range q.ClaimsOf(c.Attachment) {
			t.Fatalf("claimed twice: %v, %v", other, err)
		}
		switch c.ContainerID {
		case "c0":
			err = c.Settle()
		case "c1":
			err = c.Release()
		} // c2 is left to the loop
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) != 3 {
		t.Fatalf("claimed %v, want three entries", seen)
	}
	got := list(t, q)
	want := []string{entry(1).Name(), entry(2).Name()}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("left %v, want %v", got, want)
	}
}

// A worker that dies keeps nothing: its lock ends with it.
func TestClaimOfADeadWorkerIsTakenOver(t *testing.T) {
	q, dir := newQueue(t)
	e := entry(1)
	if err := q.Enqueue(e); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, e.Name()), filepath.Join(dir, e.Name()+claimedSuffix)); err != nil {
		t.Fatal(err)
	}
	n := 0
	for c, err := range q.ClaimsOf(e.Attachment) {
		if err != nil {
			t.Fatal(err)
		}
		n++
		if err := c.Settle(); err != nil {
			t.Fatal(err)
		}
	}
	if n != 1 || len(list(t, q)) != 0 {
		t.Errorf("took over %d claims, left %v", n, list(t, q))
	}
}

func TestReleaseKeepsTheYoungerEntry(t *testing.T) {
	q, _ := newQueue(t)
	old, young := unknown(1), unknown(1)
	young.QueuedAt = young.QueuedAt.Add(time.Hour)
	if err := q.Enqueue(old); err != nil {
		t.Fatal(err)
	}
	for c, err := range q.Claims(all) {
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(q.Enqueue(young), c.Release()); err != nil {
			t.Fatal(err)
		}
	}
	items, err := q.List()
	if err != nil || len(items) != 1 || items[0].Entry != young {
		t.Errorf("List = %+v, %v; want the younger entry alone", items, err)
	}
}

func TestUnusableFilesAreSetAsideAndNeverActedOn(t *testing.T) {
	valid, err := entry(1).encode()
	if err != nil {
		t.Fatal(err)
	}
	other, err := entry(2).encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"empty":             {},
		"half":              valid[:len(valid)/2],
		"trailing":          append(slices.Clone(valid), '{'),
		"of another":        other,
		"unknown field":     []byte(strings.Replace(string(valid), `{"v":1`, `{"x":1,"v":1`, 1)),
		"other version":     []byte(strings.Replace(string(valid), `{"v":1`, `{"v":2`, 1)),
		"key in other case": []byte(strings.Replace(string(valid), `"network"`, `"Network"`, 1)),
		"too large":         append(slices.Clone(valid), make([]byte, MaxEntryBytes)...),
		"bad boot ID":       []byte(strings.Replace(string(valid), bootID, "x", 1)),
	} {
		t.Run(name, func(t *testing.T) {
			q, dir := newQueue(t)
			file := filepath.Join(dir, entry(1).Name())
			if err := os.WriteFile(file, content, 0o600); err != nil {
				t.Fatal(err)
			}
			_, _, err := q.Replay(context.Background(), 8, all, func(context.Context, Entry) error {
				t.Error("acted on an unusable file")
				return nil
			})
			if err == nil {
				t.Error("no word about the unusable file")
			}
			if got, want := list(t, q), []string{entry(1).Name() + badSuffix}; !slices.Equal(got, want) {
				t.Errorf("left %v, want %v", got, want)
			}
		})
	}
}

func TestForeignFilesAreNotTouched(t *testing.T) {
	q, dir := newQueue(t)
	for _, name := range []string{"README", "0123-unknown", strings.Repeat("g", 32) + "-unknown"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, entry(1).Name())); err != nil {
		t.Fatal(err)
	}
	_, _, err := q.Replay(context.Background(), 8, all, func(context.Context, Entry) error { t.Error("acted on it"); return nil })
	var unsafeErr *privdir.UnsafeError
	if !errors.As(err, &unsafeErr) {
		t.Errorf("Replay = %v, want an UnsafeError about the symbolic link", err)
	}
	if got := list(t, q); len(got) != 4 {
		t.Errorf("left %v, want all four", got)
	}
}

func TestReplay(t *testing.T) {
	unreachable := errors.New("connection refused")
	for _, tc := range []struct {
		name    string
		outcome error
		left    int
	}{
		{"deleted", nil, 0},
		{"gone", api.Errorf(api.NotFound, "no endpoint"), 0},
		{"another generation lives", api.Errorf(api.StaleGeneration, "other"), 0},
		{"another namespace", api.Errorf(api.StaleIdentity, "other"), 0},
		{"shim alive", api.Retryablef(api.FailedPrecondition, "bound"), 1},
		{"refused", api.Errorf(api.InvalidArgument, "no"), 1},
		{"unreachable", unreachable, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			q, _ := newQueue(t)
			if err := q.Enqueue(entry(1)); err != nil {
				t.Fatal(err)
			}
			settled, kept, err := q.Replay(context.Background(), 8, all, func(_ context.Context, e Entry) error {
				if e != entry(1) {
					t.Errorf("replayed %+v", e)
				}
				return tc.outcome
			})
			if settled != 1-tc.left || kept != tc.left || len(list(t, q)) != tc.left || (err != nil) != (tc.left == 1) {
				t.Errorf("settled %d, kept %d, left %v, err %v; want %d left", settled, kept, list(t, q), err, tc.left)
			}
		})
	}
}

func TestReplayStopsAtItsLimit(t *testing.T) {
	q, _ := newQueue(t)
	for n := range 20 {
		if err := q.Enqueue(entry(n)); err != nil {
			t.Fatal(err)
		}
	}
	settled, kept, err := q.Replay(context.Background(), 8, all, func(context.Context, Entry) error { return nil })
	if settled != 8 || kept != 0 || err != nil || len(list(t, q)) != 12 {
		t.Errorf("settled %d, kept %d, %v, left %d; want 8, 0, nil, 12", settled, kept, err, len(list(t, q)))
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if settled, kept, err = q.Replay(ctx, 8, all, nil); settled+kept != 0 || err != nil {
		t.Errorf("after cancel: settled %d, kept %d, %v", settled, kept, err)
	}
}

// Many workers, one queue: each entry is settled by exactly one of them.
func TestWorkersNeverShareAnEntry(t *testing.T) {
	q, dir := newQueue(t)
	const entries = 200
	for n := range entries {
		if err := q.Enqueue(entry(n)); err != nil {
			t.Fatal(err)
		}
	}
	var mu sync.Mutex
	count := map[string]int{}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			own, err := Open(dir)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = own.Close() }()
			if _, _, err := own.Replay(context.Background(), entries, all, func(_ context.Context, e Entry) error {
				mu.Lock()
				defer mu.Unlock()
				count[e.ContainerID]++
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for id, n := range count {
		if n != 1 {
			t.Errorf("%s was replayed %d times", id, n)
		}
	}
	if len(count) != entries || len(list(t, q)) != 0 {
		t.Errorf("replayed %d of %d, left %d", len(count), entries, len(list(t, q)))
	}
}

func TestFullQueueIsAnError(t *testing.T) {
	q, dir := newQueue(t)
	for n := range MaxEntries {
		f, err := os.OpenFile(filepath.Join(dir, fmt.Sprintf("%032x-unknown", n)), os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
	}
	if err := q.Enqueue(entry(1)); !errors.Is(err, ErrFull) {
		t.Errorf("Enqueue = %v, want ErrFull", err)
	}
}

func TestOpenExisting(t *testing.T) {
	if _, err := OpenExisting(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("OpenExisting = %v, want fs.ErrNotExist", err)
	}
}

func TestEnqueueRefusesWhatCannotBeReadBack(t *testing.T) {
	q, _ := newQueue(t)
	for name, change := range map[string]func(*Entry){
		"network": func(e *Entry) { e.Network = "a/b" },
		"boot ID": func(e *Entry) { e.BootID = "" },
		"daemon":  func(e *Entry) { e.Daemon = strings.Repeat("x", MaxDaemonBytes+1) },
		"time":    func(e *Entry) { e.QueuedAt = time.Time{} },
		"boot":    func(e *Entry) { e.SinceBoot = -1 },
	} {
		e := entry(1)
		change(&e)
		if err := q.Enqueue(e); err == nil {
			t.Errorf("%s: Enqueue accepted %+v", name, e)
		}
	}
	if got := list(t, q); len(got) != 0 {
		t.Errorf("left %v", got)
	}
}

func TestDeleteRequest(t *testing.T) {
	known, unk := entry(1).DeleteRequest(), unknown(1).DeleteRequest()
	if known.Generation != entry(1).Generation || known.NotAfter != nil {
		t.Errorf("known: %+v; want the generation and no time", known)
	}
	if !unk.Generation.IsZero() || unk.NotAfter == nil || !unk.NotAfter.Equal(unknown(1).QueuedAt) {
		t.Errorf("unknown: %+v; want the time of queueing", unk)
	}
	if unk.NotAfterBoot == nil || unk.NotAfterBoot.BootID != bootID || unk.NotAfterBoot.SinceBoot != unknown(1).SinceBoot {
		t.Errorf("unknown: %+v; want the time of queueing since the boot", unk.NotAfterBoot)
	}
	old := unknown(1)
	if old.SinceBoot = 0; old.DeleteRequest().NotAfterBoot != nil {
		t.Error("an entry that knows no time since the boot asks with one")
	}
	if unk.Namespace == nil || unk.Namespace.Cookie != 4711 || unk.Namespace.BootID != bootID {
		t.Errorf("unknown: namespace %+v, want the cookie", unk.Namespace)
	}
	e := unknown(1)
	if e.Obsolete(bootID) || !e.Obsolete("1"+bootID[1:]) || entry(1).Obsolete("1"+bootID[1:]) {
		t.Error("only an unknown generation of another boot is obsolete")
	}
}

func TestDaemon(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Mkdir(dir+"/run", 0o755), os.Symlink("run", dir+"/varrun")); err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string]string{
		"unix://" + dir + "/run/s":            "unix://" + dir + "/run/s",
		"unix://" + dir + "/varrun/s":         "unix://" + dir + "/run/s",
		"unix://" + dir + "/varrun/a/b/s":     "unix://" + dir + "/run/a/b/s", // folders that are not there yet
		"unix://" + dir + "/varrun//a/../b/s": "unix://" + dir + "/run/b/s",
		"unix:///none/a/s":                    "unix:///none/a/s",
		"unix:///s":                           "unix:///s",
		"unix://s":                            "unix://s",
		"tcp://varrun:1":                      "tcp://varrun:1",
	} {
		if got := Daemon(address); got != want {
			t.Errorf("Daemon(%s) = %s, want %s", address, got, want)
		}
		e := entry(1)
		e.Daemon = address
		if !e.MeantFor(want) || e.MeantFor(want+"2") {
			t.Errorf("an entry for %s: for %s %t, for %s2 %t", address, want, e.MeantFor(want), want, e.MeantFor(want+"2"))
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, e := range []Entry{entry(1), unknown(2)} {
		data, err := e.encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
		f.Add(data[:len(data)/2])
	}
	f.Add([]byte(""))
	f.Fuzz(func(t *testing.T, data []byte) {
		e, err := parse(data)
		if err != nil {
			return
		}
		again, err := e.encode()
		if err != nil || string(again) != string(data) {
			t.Errorf("parse accepted %q but encodes %q, %v", data, again, err)
		}
		if !isEntryName(e.Name()) {
			t.Errorf("name %q is not one of ours", e.Name())
		}
	})
}
