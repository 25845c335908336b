package store

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	bolt "go.etcd.io/bbolt"

	"mknet/spec/endpoint"
)

// filled makes a closed store with records in every state, freed slots and
// documents, over enough pages to have branches, overflow and free pages.
func filled(t testing.TB, endpoints int) (dir string, content []byte) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "state")
	s := open(t, dir)
	for slot := range uint32(endpoints) {
		ep := begin(t, s, slot)
		switch slot % 4 {
		case 1:
			must(s.MarkReady(ep.Generation, nil))(t)
		case 2:
			must(s.BeginDelete(ep.Generation, nil))(t)
		case 3:
			must(s.BeginDelete(ep.Generation, nil))(t)
			if err := s.Finish(ep.Generation, Freed{BootID: "b", At: 1}); err != nil {
				t.Fatal(err)
			}
		}
	}
	docs := must(s.Documents("policy"))(t)
	if err := errors.Join(docs.Put("small", []byte("x")), docs.Put("large", make([]byte, 20000)), s.Close()); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(filepath.Join(dir, FileName))
	if err != nil {
		t.Fatal(err)
	}
	return dir, content
}

// tryOpen opens a store and reads all of it.
func tryOpen(dir string) (list []endpoint.Endpoint, err error) {
	s, err := Open(Options{Dir: dir, Pools: testPools})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if _, _, err := s.Slots(); err != nil {
		return nil, err
	}
	return s.List()
}

// A flipped bit anywhere is either found, and then the file is left as it was, or
// lies where nothing is read: every record is still exactly what it was.
func TestFlippedBits(t *testing.T) {
	dir, good := filled(t, 60)
	want := fmt.Sprintf("%+v", must(tryOpen(dir))(t))
	path := filepath.Join(dir, FileName)
	random := rand.New(rand.NewPCG(1, 2))
	offsets := []int{}
	for at := 0; at < 16384; at += 32 { // headers, list of free pages: densely
		offsets = append(offsets, at+random.IntN(32))
	}
	for range 500 {
		offsets = append(offsets, random.IntN(len(good)))
	}
	found := 0
	for _, at := range offsets {
		bad := bytes.Clone(good)
		bad[at] ^= 1 << random.IntN(8)
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		list, err := tryOpen(dir)
		if in := must(Inspect(dir, testPools))(t); (err == nil) != (len(in.Faults) == 0) {
			t.Fatalf("byte %d: Open says %v, Inspect %v", at, err, in.Faults)
		}
		var corrupt *CorruptError
		switch {
		case err == nil && fmt.Sprintf("%+v", list) != want:
			t.Fatalf("byte %d: the store opened with other records", at)
		case err == nil:
			continue
		case !errors.As(err, &corrupt):
			t.Fatalf("byte %d: got %v (%T), want a *CorruptError", at, err, err)
		}
		found++
		if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, bad) {
			t.Fatalf("byte %d: a refused file was changed (%v)", at, err)
		}
	}
	if found < len(offsets)/20 {
		t.Errorf("only %d of %d flips were found: the test does not reach what is in use", found, len(offsets))
	}
	t.Logf("%d of %d flips were found, the others lay in unused bytes", found, len(offsets))
}

func TestTruncated(t *testing.T) {
	dir, good := filled(t, 60)
	path := filepath.Join(dir, FileName)
	used := usedBytes(t, dir)
	sizes := []int{1, 100, 4095, 4097, used/2 + 1, used - 1}
	for page := range used / os.Getpagesize() {
		sizes = append(sizes, page*os.Getpagesize())
	}
	for _, n := range sizes {
		if err := os.WriteFile(path, good[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		var corrupt *CorruptError
		if _, err := tryOpen(dir); !errors.As(err, &corrupt) {
			t.Errorf("%d of %d bytes: got %v, want a *CorruptError", n, len(good), err)
		}
		if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, good[:n]) {
			t.Errorf("%d bytes: a refused file was changed (%v)", n, err)
		}
	}
}

// usedBytes is the end of the last page that counts.
func usedBytes(t *testing.T, dir string) int {
	t.Helper()
	f, err := os.Open(filepath.Join(dir, FileName))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m, err := (&walker{file: f}).metas()
	if err != nil {
		t.Fatal(err)
	}
	return int(m.pages) * int(m.pageSize)
}

func TestForeignFiles(t *testing.T) {
	for name, content := range map[string][]byte{
		"text":    bytes.Repeat([]byte("hello\n"), 4000),
		"zeros":   make([]byte, 65536),
		"nothing": {},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, FileName), content, 0o600)); err != nil {
				t.Fatal(err)
			}
			var corrupt *CorruptError
			if _, err := tryOpen(dir); !errors.As(err, &corrupt) {
				t.Errorf("got %v", err)
			}
		})
	}
	t.Run("another program's bbolt file", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "state")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		db, err := bolt.Open(filepath.Join(dir, FileName), 0o600, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		var corrupt *CorruptError
		if _, err := tryOpen(dir); !errors.As(err, &corrupt) {
			t.Errorf("got %v", err)
		}
	})
}

// Damage that a checksum cannot show, because somebody wrote it on purpose or a
// defect of ours did: content that contradicts itself.
func TestContradictions(t *testing.T) {
	for _, c := range []struct {
		name string
		make func(tx *bolt.Tx, s *Store, ep endpoint.Endpoint) error
	}{
		{"record under another key", func(tx *bolt.Tx, s *Store, ep endpoint.Endpoint) error {
			v := bytes.Clone(tx.Bucket(bucketEndpoints).Get(ep.Generation[:]))
			other := endpoint.NewGeneration()
			return tx.Bucket(bucketEndpoints).Put(other[:], v)
		}},
		{"record of another endpoint, sealed", func(tx *bolt.Tx, s *Store, ep endpoint.Endpoint) error {
			doc, _ := s.encodeEndpoint(&ep)
			other := endpoint.NewGeneration()
			return tx.Bucket(bucketEndpoints).Put(other[:], seal(bucketEndpoints, other[:], doc))
		}},
		{"no index entry", func(tx *bolt.Tx, _ *Store, ep endpoint.Endpoint) error {
			return tx.Bucket(bucketAttachments).Delete(attachmentKey(ep.Attachment))
		}},
		{"an index entry too many", func(tx *bolt.Tx, _ *Store, ep endpoint.Endpoint) error {
			return tx.Bucket(bucketAttachments).Put([]byte("a\x00b\x00c"), ep.Generation[:])
		}},
		{"no namespace entry", func(tx *bolt.Tx, _ *Store, ep endpoint.Endpoint) error {
			return tx.Bucket(bucketNamespaces).Delete(namespaceKey(&ep))
		}},
		{"slot of nobody", func(tx *bolt.Tx, _ *Store, ep endpoint.Endpoint) error {
			return tx.Bucket(bucketSlots).Put(slotKey(77), append([]byte{slotLive}, ep.Generation[:]...))
		}},
		{"slot both live and freed", func(tx *bolt.Tx, _ *Store, ep endpoint.Endpoint) error {
			return queueSlot(tx, Freed{Slot: ep.Slot})
		}},
		{"freed slot outside the pool", func(tx *bolt.Tx, s *Store, _ endpoint.Endpoint) error {
			return queueSlot(tx, Freed{Slot: s.pools.Slots()})
		}},
		{"a slot of rubbish", func(tx *bolt.Tx, _ *Store, _ endpoint.Endpoint) error {
			return tx.Bucket(bucketSlots).Put(slotKey(77), []byte{})
		}},
		{"wrong address", func(tx *bolt.Tx, _ *Store, ep endpoint.Endpoint) error {
			return putRaw(tx, ep, func(s string) string { return replace(s, ep.Address.String(), "172.30.9.9") })
		}},
		{"unknown state", func(tx *bolt.Tx, _ *Store, ep endpoint.Endpoint) error {
			return putRaw(tx, ep, func(s string) string { return replace(s, `"ALLOCATING"`, `"PAUSED"`) })
		}},
		{"unknown field", func(tx *bolt.Tx, _ *Store, ep endpoint.Endpoint) error {
			return putRaw(tx, ep, func(s string) string { return replace(s, `"mode"`, `"colour":"red","mode"`) })
		}},
		{"foreign chain", func(tx *bolt.Tx, _ *Store, ep endpoint.Endpoint) error {
			return putRaw(tx, ep, func(s string) string { return replace(s, ep.Chain, "DOCKER-USER") })
		}},
		{"no bucket", func(tx *bolt.Tx, _ *Store, _ endpoint.Endpoint) error { return tx.DeleteBucket(bucketFreed) }},
		{"document with a wrong checksum", func(tx *bolt.Tx, _ *Store, _ endpoint.Endpoint) error {
			b, err := tx.Bucket(bucketDocuments).CreateBucket([]byte("policy"))
			if err != nil {
				return err
			}
			return b.Put([]byte("a"), seal([]byte("other"), []byte("a"), []byte("x")))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			s := open(t, dir)
			ep := begin(t, s, 5)
			if err := s.db.Update(func(tx *bolt.Tx) error { return c.make(tx, s, ep) }); err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			var corrupt *CorruptError
			if _, err := tryOpen(dir); !errors.As(err, &corrupt) {
				t.Errorf("got %v, want a *CorruptError", err)
			}
			in := must(Inspect(dir, testPools))(t)
			if len(in.Faults) == 0 || !in.Whole {
				t.Errorf("Inspect finds %v, pages sound: %v", in.Faults, in.Whole)
			}
			if _, err := Import(filepath.Join(t.TempDir(), "fresh"), &in.Content, "v2", false); err != nil {
				t.Errorf("what was exported cannot be imported: %v", err)
			}
		})
	}
}

func putRaw(tx *bolt.Tx, ep endpoint.Endpoint, change func(string) string) error {
	b := tx.Bucket(bucketEndpoints)
	doc := change(string(b.Get(ep.Generation[:])[headerBytes:]))
	return b.Put(ep.Generation[:], seal(bucketEndpoints, ep.Generation[:], []byte(doc)))
}

func replace(s, old, new string) string {
	out := bytes.ReplaceAll([]byte(s), []byte(old), []byte(new))
	if string(out) == s {
		panic("nothing was replaced: " + old)
	}
	return string(out)
}

// Places that are refused, and permissions that are put right.
func TestPlaces(t *testing.T) {
	refused := func(t *testing.T, dir string) {
		t.Helper()
		if _, err := tryOpen(dir); err == nil {
			t.Error("was opened")
		}
	}
	t.Run("relative", func(t *testing.T) { refused(t, "state") })
	t.Run("symbolic link as folder", func(t *testing.T) {
		base := t.TempDir()
		if err := errors.Join(os.Mkdir(base+"/real", 0o700), os.Symlink(base+"/real", base+"/l")); err != nil {
			t.Fatal(err)
		}
		refused(t, base+"/l")
	})
	t.Run("symbolic link as file", func(t *testing.T) {
		dir, _ := filled(t, 1)
		path := filepath.Join(dir, FileName)
		if err := errors.Join(os.Rename(path, path+".real"), os.Symlink(path+".real", path)); err != nil {
			t.Fatal(err)
		}
		refused(t, dir)
	})
	t.Run("folder as file", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "state")
		if err := os.MkdirAll(filepath.Join(dir, FileName), 0o700); err != nil {
			t.Fatal(err)
		}
		refused(t, dir)
	})
	t.Run("folder of another user", func(t *testing.T) {
		dir, _ := filled(t, 1)
		if err := os.Chown(dir, 65534, 65534); err != nil {
			t.Fatal(err)
		}
		refused(t, dir)
	})
	t.Run("file of another user", func(t *testing.T) {
		dir, _ := filled(t, 1)
		if err := os.Chown(filepath.Join(dir, FileName), 65534, 65534); err != nil {
			t.Fatal(err)
		}
		refused(t, dir)
	})
	t.Run("open permissions are closed", func(t *testing.T) {
		dir, _ := filled(t, 1)
		path := filepath.Join(dir, FileName)
		if err := errors.Join(os.Chmod(dir, 0o755), os.Chmod(path, 0o644)); err != nil {
			t.Fatal(err)
		}
		must(tryOpen(dir))(t)
		for p, want := range map[string]fs.FileMode{dir: 0o700, path: 0o600} {
			if fi, err := os.Stat(p); err != nil || fi.Mode().Perm() != want {
				t.Errorf("%s: %v %v, want %o", p, fi.Mode(), err, want)
			}
		}
	})
}

// FuzzPages: whatever the file holds, Open ends with a store or an error; it never
// panics and never faults, and what it opens can be read.
func FuzzPages(f *testing.F) {
	dir, good := filled(f, 12)
	good = good[:min(len(good), 1<<17)]
	f.Add(uint32(0), []byte{0})
	f.Add(uint32(16), []byte("\xed\xda\x0c\xed"))
	f.Add(uint32(8192), []byte{2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 255, 255})
	f.Add(uint32(12288+16), bytes.Repeat([]byte{255}, 64))
	path := filepath.Join(dir, FileName)
	f.Fuzz(func(t *testing.T, at uint32, patch []byte) {
		bad := bytes.Clone(good)
		copy(bad[int(at)%len(bad):], patch)
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		_, openErr := tryOpen(dir)
		in, err := Inspect(dir, testPools)
		var version *VersionError
		if errors.As(err, &version) {
			return
		}
		if err != nil {
			t.Fatalf("Inspect: %v", err)
		}
		if (openErr == nil) != (len(in.Faults) == 0) {
			t.Fatalf("Open says %v, Inspect %v", openErr, in.Faults)
		}
		if err := in.Content.validate(); err != nil {
			t.Fatalf("what was read is not valid: %v", err)
		}
	})
}

// FuzzRecord: no payload panics, and an accepted one is written back the same.
func FuzzRecord(f *testing.F) {
	s := &Store{path: "x", pools: testPools}
	for slot := range uint32(3) {
		ep := testEndpoint(slot)
		ep.CreatedAt = ep.CreatedAt.UTC()
		doc, err := s.encodeEndpoint(&ep)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(doc)
	}
	f.Add([]byte(`{}`))
	f.Add([]byte(`{"slot":4294967295,"mode":"multikernel"}`))
	f.Add([]byte(`{"mode":"veth","state":"READY","binding":{}}`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		ep, err := parseEndpoint(doc, testPools)
		if err != nil {
			return
		}
		again, err := s.encodeEndpoint(ep)
		if err != nil {
			t.Fatalf("%q was accepted and cannot be stored: %v", doc, err)
		}
		back, err := parseEndpoint(again, testPools)
		if err != nil {
			t.Fatalf("%q: %v", again, err)
		}
		if third, err := s.encodeEndpoint(back); err != nil || !bytes.Equal(again, third) {
			t.Fatalf("%q became %q (%v)", again, third, err)
		}
	})
}
