package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"

	"mknet/spec/endpoint"
)

var update = flag.Bool("update", false, "write the golden files")

// golden is what the stores under testdata/schema hold.
const golden = "testdata/schema/document.golden"

// placed puts a store of an old schema where Open looks for it.
func placed(t *testing.T, name string) (dir string) {
	t.Helper()
	content, err := os.ReadFile("testdata/schema/" + name)
	if err != nil {
		t.Fatal(err)
	}
	dir = filepath.Join(t.TempDir(), "state")
	if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, FileName), content, 0o600)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func export(t *testing.T, dir string) *Inspection {
	t.Helper()
	in, err := Inspect(dir, testPools)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

func asJSON(t *testing.T, v any) string {
	t.Helper()
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return string(text) + "\n"
}

// Every schema that mknetd ever wrote is brought to the present one with nothing
// lost, and the file of before stays.
func TestOldSchemas(t *testing.T) {
	files, err := filepath.Glob("testdata/schema/*.db")
	if err != nil || len(files) != SchemaVersion-1 {
		t.Fatalf("%d stores of old schemas for %d schemas (%v)", len(files), SchemaVersion-1, err)
	}
	for n := 1; n < SchemaVersion; n++ {
		t.Run(fmt.Sprint("schema ", n), func(t *testing.T) {
			dir := placed(t, fmt.Sprintf("%d.db", n))
			before := export(t, dir)
			if before.Schema != n || len(before.Faults) > 0 {
				t.Fatalf("schema %d, faults %v", before.Schema, before.Faults)
			}
			s, err := Open(Options{Dir: dir, Pools: testPools, Writer: "v9"})
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			after := export(t, dir)
			if after.Schema != SchemaVersion || after.Content.Writer != "v9" || len(after.Faults) > 0 {
				t.Errorf("schema %d, writer %q, faults %v", after.Schema, after.Content.Writer, after.Faults)
			}
			got := asJSON(t, after.Content)
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if want, err := os.ReadFile(golden); err != nil || got != string(want) {
				t.Errorf("%v: got\n%s\nwant\n%s", err, got, want)
			}
			kept := must(inspectFile(filepath.Join(dir, fmt.Sprintf("%s.schema-%d", FileName, n)), testPools))(t)
			if kept.Schema != n || !reflect.DeepEqual(kept.Content.Endpoints, before.Content.Endpoints) {
				t.Errorf("the kept copy has schema %d and %d endpoints", kept.Schema, len(kept.Content.Endpoints))
			}
		})
	}
}

// A step that fails, or that leaves what its schema does not allow, changes
// nothing.
func TestMigrationThatFails(t *testing.T) {
	for name, step := range map[string]func(*bolt.Tx, string) error{
		"an error":        func(*bolt.Tx, string) error { return errors.New("no") },
		"a lost index":    func(tx *bolt.Tx, _ string) error { return clear(tx.Bucket(bucketAttachments)) },
		"a lost record":   func(tx *bolt.Tx, _ string) error { return clear(tx.Bucket(bucketEndpoints)) },
		"without its due": func(*bolt.Tx, string) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			before := migrations
			t.Cleanup(func() { migrations = before })
			migrations = []migration{{to: 2, what: "is a test", apply: step}}
			dir := placed(t, "1.db")
			want := asJSON(t, export(t, dir).Content)
			if _, err := Open(Options{Dir: dir, Pools: testPools}); err == nil || !strings.Contains(err.Error(), "schema 1 to 2") {
				t.Errorf("got %v", err)
			}
			in := export(t, dir)
			if got := asJSON(t, in.Content); in.Schema != 1 || len(in.Faults) > 0 || got != want {
				t.Errorf("schema %d, faults %v, content\n%s", in.Schema, in.Faults, got)
			}
			migrations = before
			must(tryOpen(dir))(t)
		})
	}
}

func clear(b *bolt.Bucket) error {
	k, _ := b.Cursor().First()
	return b.Delete(k)
}

// A store of the future is refused with the name of who wrote it.
func TestNewerSchema(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := open(t, dir)
	err := s.db.Update(func(tx *bolt.Tx) error {
		return errors.Join(putWriter(tx, "v99.1"), putSchema(tx, SchemaVersion+1))
	})
	if err := errors.Join(err, s.Close()); err != nil {
		t.Fatal(err)
	}
	_, openErr := tryOpen(dir)
	_, inspectErr := Inspect(dir, testPools)
	for name, err := range map[string]error{"Open": openErr, "Inspect": inspectErr} {
		var version *VersionError
		if !errors.As(err, &version) || version.Got != SchemaVersion+1 || !strings.Contains(err.Error(), "run mknetd v99.1") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestInspectAtWork(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if _, err := Inspect(dir, testPools); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no store: %v", err)
	}
	s := open(t, dir)
	begin(t, s, 1)
	var locked *LockedError
	if _, err := Inspect(dir, testPools); !errors.As(err, &locked) || locked.Holder != os.Getpid() {
		t.Errorf("beside a daemon: %v", err)
	}
	if _, err := Import(dir, &Document{}, "", true); !errors.As(err, &locked) {
		t.Errorf("import beside a daemon: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if in := export(t, dir); len(in.Faults) > 0 || len(in.Content.Endpoints) != 1 || !in.Whole {
		t.Errorf("found %+v", in)
	}
}

// Export and import give the same store again; what stood there is kept.
func TestExportImport(t *testing.T) {
	dir, _ := filled(t, 60)
	first := export(t, dir)
	first.Content.ExportedAt = time.Unix(7, 0).UTC()
	text := asJSON(t, first.Content)
	d, err := ReadDocument(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Import(dir, d, "v2", false); !errors.Is(err, fs.ErrExist) {
		t.Fatalf("over a store: %v", err)
	}
	fresh := filepath.Join(t.TempDir(), "fresh")
	if kept, err := Import(fresh, d, "v2", false); err != nil || kept != "" {
		t.Fatalf("kept %q, %v", kept, err)
	}
	second := export(t, fresh)
	if len(second.Faults) > 0 || second.Content.Writer != "v2" {
		t.Errorf("faults %v, writer %q", second.Faults, second.Content.Writer)
	}
	second.Content.Writer, second.Content.ExportedAt = first.Content.Writer, first.Content.ExportedAt
	if got := asJSON(t, second.Content); got != text {
		t.Errorf("got\n%s\nwant\n%s", got, text)
	}
	list, err := tryOpen(fresh)
	if err != nil || !reflect.DeepEqual(list, first.Content.Endpoints) {
		t.Errorf("opened with %d endpoints, %v", len(list), err)
	}
	d.Endpoints = d.Endpoints[:1]
	d.Freed = nil
	kept, err := Import(fresh, d, "v3", true)
	if err != nil {
		t.Fatal(err)
	}
	if old := must(inspectFile(kept, testPools))(t); len(old.Content.Endpoints) != len(list) {
		t.Errorf("the kept store has %d endpoints", len(old.Content.Endpoints))
	}
	if now := must(tryOpen(fresh))(t); len(now) != 1 {
		t.Errorf("the new store has %d endpoints", len(now))
	}
}

func TestDocumentsThatAreRefused(t *testing.T) {
	dir, _ := filled(t, 8)
	good := export(t, dir).Content
	for _, c := range []struct{ name, old, new, want string }{
		{"other format", `"mknet-state"`, `"other"`, "format"},
		{"later form", `"version": 1`, `"version": 2`, "document version"},
		{"later schema", fmt.Sprintf(`"schema": %d`, SchemaVersion), `"schema": 99`, "schema 99"},
		{"unknown field", `"schema":`, `"colour": 1, "schema":`, "colour"},
		{"bad pool", `172.30.0.0/16`, `8.8.8.0/24`, "private"},
		{"other address", good.Endpoints[0].Address.String() + `"`, `172.30.9.9"`, "addresses"},
		{"twice the same", good.Endpoints[0].ContainerID + `"`, good.Endpoints[1].ContainerID + `"`, "belongs to"},
		{"bad state", `"ALLOCATING"`, `"PAUSED"`, "state"},
		{"freed twice", fmt.Sprintf(`"slot": %d,`+"\n      \"bootID\"", good.Freed[0].Slot), fmt.Sprintf(`"slot": %d,`+"\n      \"bootID\"", good.Freed[1].Slot), "freed"},
		{"something behind", "\n}\n", "\n}\n{}", "followed"},
		{"cut off", "\n}\n", "", "unexpected EOF"},
		{"bad kind", `"kind": "policy"`, `"kind": "a b"`, "kind"},
	} {
		t.Run(c.name, func(t *testing.T) {
			text := replace(asJSON(t, good), c.old, c.new)
			if _, err := ReadDocument(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// Whatever page is gone: each is named, what is read is what was written, what is
// missing is said, and a store can be made of the rest.
func TestEveryDamagedPage(t *testing.T) {
	dir, good := filled(t, 60)
	all := map[endpoint.Generation]string{}
	for _, ep := range export(t, dir).Content.Endpoints {
		all[ep.Generation] = asJSON(t, ep)
	}
	path := filepath.Join(dir, FileName)
	pageSize, used := os.Getpagesize(), usedBytes(t, dir)
	unused := 0
	try := func(what string, bad []byte) {
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		in := export(t, dir)
		if _, err := tryOpen(dir); (err == nil) != (len(in.Faults) == 0) {
			t.Fatalf("%s: Open says %v, Inspect %v", what, err, in.Faults)
		}
		if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, bad) {
			t.Fatalf("%s: the file was changed (%v)", what, err)
		}
		if len(in.Faults) == 0 {
			unused++
			return
		}
		for _, ep := range in.Content.Endpoints {
			if got := asJSON(t, ep); got != all[ep.Generation] {
				t.Errorf("%s: read\n%s\nwritten\n%s", what, got, all[ep.Generation])
			}
		}
		if len(in.Content.Endpoints) < len(all) && len(in.Content.LeftOut) == 0 {
			t.Errorf("%s: %d of %d endpoints, and nothing is said to be left out", what, len(in.Content.Endpoints), len(all))
		}
		fresh := filepath.Join(t.TempDir(), "fresh")
		d, err := ReadDocument(strings.NewReader(asJSON(t, in.Content)))
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if _, err := Import(fresh, d, "", false); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if list := must(tryOpen(fresh))(t); len(list) != len(d.Endpoints) {
			t.Errorf("%s: %d endpoints were imported, %d are there", what, len(d.Endpoints), len(list))
		}
		t.Logf("%s: %d faults, %d of %d endpoints; first: %v", what, len(in.Faults), len(in.Content.Endpoints), len(all), in.Faults[0].Fault())
	}
	for at := 0; at < used; at += pageSize {
		bad := bytes.Clone(good)
		copy(bad[at:at+pageSize], make([]byte, pageSize))
		try(fmt.Sprintf("page %d zeroed", at/pageSize), bad)
		try(fmt.Sprintf("truncated at page %d", at/pageSize), good[:at])
	}
	if unused > used/pageSize/2 {
		t.Errorf("%d of %d pages were not in use: the test does not reach the others", unused, used/pageSize)
	}
}
