package cache

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mknet/spec/endpoint"
)

const bootID = "0b5a1f2e-1c2d-4e3f-8a9b-0c1d2e3f4a5b"

var (
	eth0 = endpoint.Attachment{Network: "mknet", ContainerID: "c1", IfName: "eth0"}
	gen1 = endpoint.Generation{1}
	gen2 = endpoint.Generation{2}
)

func newCache(t *testing.T) (*Cache, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "cache")
	c, err := Open(dir, true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c, dir
}

func begin(t *testing.T, c *Cache) *Pending {
	t.Helper()
	p, err := c.Begin(eth0, bootID)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func commit(t *testing.T, p *Pending, g endpoint.Generation) {
	t.Helper()
	if err := p.Commit(g, 42); err != nil {
		t.Fatal(err)
	}
}

func TestLifeOfAnEntry(t *testing.T) {
	c, dir := newCache(t)
	if _, err := c.Get(eth0); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("Get of nothing = %v, want fs.ErrNotExist", err)
	}
	p := begin(t, c)
	if e, err := c.Get(eth0); err != nil || e.Adding == "" || !e.Generation.IsZero() {
		t.Errorf("after Begin: %+v, %v; want an unknown generation that is being added", e, err)
	}
	commit(t, p, gen1)
	want := Entry{Attachment: eth0, Generation: gen1, Cookie: 42, BootID: bootID}
	if e, err := c.Get(eth0); err != nil || e != want {
		t.Errorf("after Commit: %+v, %v; want %+v", e, err, want)
	}
	// An ADD that is refused leaves the first one known.
	if err := begin(t, c).Abort(); err != nil {
		t.Fatal(err)
	}
	if e, err := c.Get(eth0); err != nil || e != want {
		t.Errorf("after Abort: %+v, %v; want %+v", e, err, want)
	}
	// One whose end is not known keeps the older generation beside it.
	begin(t, c)
	if e, err := c.Get(eth0); err != nil || e.Adding == "" || e.Generation != gen1 || e.Cookie != 42 {
		t.Errorf("after a Begin without an end: %+v, %v", e, err)
	}
	for range 2 {
		if err := c.Remove(eth0); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestCommitAfterSomebodyElse(t *testing.T) {
	c, _ := newCache(t)
	p := begin(t, c)
	if err := c.Remove(eth0); err != nil { // a DEL
		t.Fatal(err)
	}
	if err := p.Commit(gen1, 42); !errors.Is(err, ErrSuperseded) {
		t.Errorf("Commit after a DEL = %v, want ErrSuperseded", err)
	}
	first, second := begin(t, c), begin(t, c)
	if err := first.Commit(gen1, 42); !errors.Is(err, ErrSuperseded) {
		t.Errorf("Commit after another Begin = %v, want ErrSuperseded", err)
	}
	if err := errors.Join(first.Abort(), first.Forget(gen2)); err != nil {
		t.Fatal(err)
	}
	commit(t, second, gen2)
	if err := first.Abort(); err != nil {
		t.Fatal(err)
	}
	if e, err := c.Get(eth0); err != nil || e.Generation != gen2 {
		t.Errorf("the loser touched the winner's entry: %+v, %v", e, err)
	}
	if err := second.Forget(gen1); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Get(eth0); err != nil {
		t.Errorf("Forget of another generation removed the entry: %v", err)
	}
	if err := second.Forget(gen2); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Get(eth0); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after Forget: %v, want fs.ErrNotExist", err)
	}
}

func TestBrokenEntriesAreNamedAndReplaced(t *testing.T) {
	good, err := Entry{Attachment: eth0, Generation: gen1, BootID: bootID}.encode()
	if err != nil {
		t.Fatal(err)
	}
	change := func(old, to string) string {
		s := strings.Replace(string(good), old, to, 1)
		if s == string(good) {
			t.Fatalf("%q is not in %s", old, good)
		}
		return s
	}
	for name, content := range map[string]string{
		"empty":               "",
		"half":                string(good[:len(good)/2]),
		"twice":               string(good) + string(good),
		"other version":       change(`"v":1`, `"v":2`),
		"other attachment":    change(`"c1"`, `"c2"`),
		"unknown field":       change(`"v":1`, `"v":1,"x":2`),
		"field in other case": change(`"network"`, `"Network"`),
		"bad generation":      change(gen1.String(), strings.ToUpper(gen1.String()[:1])+"Z"+gen1.String()[2:]),
		"bad container":       change(`"c1"`, `"c/1"`),
		"long field":          change(bootID, strings.Repeat("x", 65)),
		"large":               string(good) + strings.Repeat(" ", maxEntryBytes),
	} {
		t.Run(name, func(t *testing.T) {
			c, dir := newCache(t)
			if err := os.WriteFile(filepath.Join(dir, fileName(eth0)), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			var corrupt *CorruptError
			if e, err := c.Get(eth0); !errors.As(err, &corrupt) || corrupt.Reason == "" || !strings.Contains(err.Error(), dir) {
				t.Errorf("Get = %+v, %v; want a CorruptError that names the file", e, err)
			}
			if list, err := c.Entries("mknet"); err != nil || len(list) != 0 {
				t.Errorf("Entries = %v, %v", list, err)
			}
			p := begin(t, c)
			commit(t, p, gen2)
			if e, err := c.Get(eth0); err != nil || e.Generation != gen2 {
				t.Errorf("after an ADD: %+v, %v", e, err)
			}
		})
	}
}

func TestEntriesOfOneNetwork(t *testing.T) {
	c, dir := newCache(t)
	for _, a := range []endpoint.Attachment{eth0, {Network: "mknet", ContainerID: "c2", IfName: "net1"}, {Network: "other", ContainerID: "c1", IfName: "eth0"}} {
		p, err := c.Begin(a, bootID)
		if err != nil {
			t.Fatal(err)
		}
		commit(t, p, gen1)
	}
	half := filepath.Join(dir, ".tmp-DEAD")
	past := time.Now().Add(-2 * tempAge)
	if err := errors.Join(os.WriteFile(half, nil, 0o600), os.Chtimes(half, past, past)); err != nil {
		t.Fatal(err)
	}
	list, err := c.Entries("mknet")
	if err != nil || len(list) != 2 {
		t.Errorf("Entries = %v, %v; want two", list, err)
	}
	if _, err := os.Stat(half); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a killed writer's file is still there: %v", err)
	}
}

// The three parts are told apart, wherever the border between them is.
func TestKeysDoNotRunTogether(t *testing.T) {
	seen := map[string]endpoint.Attachment{}
	for _, a := range []endpoint.Attachment{
		{Network: "a", ContainerID: "bc", IfName: "d"},
		{Network: "ab", ContainerID: "c", IfName: "d"},
		{Network: "a", ContainerID: "b", IfName: "cd"},
		{Network: "d", ContainerID: "bc", IfName: "a"},
	} {
		name := fileName(a)
		if other, ok := seen[name]; ok {
			t.Errorf("%s and %s share a file", a, other)
		}
		seen[name] = a
	}
}

func FuzzParse(f *testing.F) {
	for _, e := range []Entry{{Attachment: eth0, Generation: gen1, Cookie: 42, BootID: bootID}, {Attachment: eth0, BootID: bootID, Adding: "NONCE"}} {
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
		if again, err := e.encode(); err != nil || string(again) != string(data) {
			t.Errorf("accepted %q, which would be written as %q", data, again)
		}
		if err := e.Validate(); err != nil {
			t.Errorf("accepted %q: %v", data, err)
		}
	})
}
