package e2e

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"mknet/tests/netlab"
	"mknet/tests/node"
)

// said runs mknetd and returns all that it prints.
func said(n *node.Node, args ...string) (string, error) {
	out, err := netlab.Try(n.Daemon, append(args, "--config", n.Config)...)
	return fmt.Sprint(out, err), err
}

func state(n *node.Node, verb string, args ...string) (string, error) {
	return said(n, append([]string{"state", verb}, args...)...)
}

func storePath(n *node.Node) string { return n.Dir + "/state/state.db" }

// storeHeader has what the tests need of a header of the store (go.etcd.io/bbolt,
// common.Meta).
type storeHeader struct {
	pages uint64 // in use, from the file's begin
	txid  uint64
}

// storeHeaders reads both headers; the one with the higher txid counts.
func storeHeaders(t *testing.T, n *node.Node) (h [2]storeHeader) {
	t.Helper()
	f, err := os.Open(storePath(n))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for i := range h {
		var b [64]byte // behind the page's own head of 16 bytes
		if _, err := f.ReadAt(b[:], int64(i*os.Getpagesize()+16)); err != nil {
			t.Fatal(err)
		}
		h[i] = storeHeader{pages: binary.NativeEndian.Uint64(b[40:]), txid: binary.NativeEndian.Uint64(b[48:])}
	}
	return h
}

// A store that was cut off, at each of its pages.
func TestTruncatedStore(t *testing.T) {
	n := node.New(t)
	ep := n.Add(t, "c1", netlab.New(t), "eth0")
	n.Stop(t)
	whole, err := os.ReadFile(storePath(n))
	if err != nil {
		t.Fatal(err)
	}
	headers := storeHeaders(t, n)
	pages := int(max(headers[0].pages, headers[1].pages))
	for page := range pages {
		size := page * os.Getpagesize()
		if err := os.Truncate(storePath(n), int64(size)); err != nil {
			t.Fatal(err)
		}
		out, err := said(n, "serve")
		if err == nil || !strings.Contains(out, storePath(n)) || !strings.Contains(out, "mknetd state check") {
			t.Errorf("serve on the first %d of %d pages: %v\n%s", page, pages, err, out)
		}
		where := "at byte"
		if size == 0 {
			where = "is empty"
		}
		if out, err := state(n, "check"); err == nil || !strings.Contains(out, where) {
			t.Errorf("check of the first %d of %d pages: %v\n%s", page, pages, err, out)
		}
		if after, err := os.ReadFile(storePath(n)); err != nil || !bytes.Equal(after, whole[:size]) {
			t.Errorf("the refused store of %d pages was changed (%v)", page, err)
		}
		if err := os.WriteFile(storePath(n), whole, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n.Start(t)
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK with the whole store: %v", err)
	}
	observed(t, finding{"the store cut off at each of its pages", "mknetd does not start, names file, byte and the commands that help; the file stays as it is; objects of the kernel stand"})
}

// A damaged store: the daemon says which commands help, they bring back every
// endpoint that can be read, and its traffic goes on meanwhile.
func TestDamagedStoreIsExportedAndImported(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	child := n.Boot(t, ep, "g1")
	if out, err := state(n, "check"); err == nil || !strings.Contains(out, "is in use by process") {
		t.Errorf("check beside a running daemon: %v\n%s", err, out)
	}
	if out, err := state(n, "import", "--force", n.Config); err == nil {
		t.Errorf("import of what is no document, beside a running daemon:\n%s", out)
	}
	n.Stop(t)
	if out, err := state(n, "check"); err != nil || !strings.Contains(out, "1 endpoints") || !strings.Contains(out, "0 faults") {
		t.Errorf("check of a sound store: %v\n%s", err, out)
	}

	// One header of two: nothing of the records is lost, but mknetd must not guess.
	path := storePath(n)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	older := int64(0)
	if headers := storeHeaders(t, n); headers[0].txid > headers[1].txid {
		older = int64(os.Getpagesize())
	}
	if _, err := f.WriteAt([]byte{0xff}, older+20); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	out, err := said(n, "serve")
	if err == nil || !strings.Contains(out, "mknetd state check") || !strings.Contains(out, "state export") {
		t.Errorf("serve on a damaged store: %v\n%s", err, out)
	}
	if out, err := state(n, "check"); err == nil || !strings.Contains(out, "at byte") {
		t.Errorf("check of a damaged store: %v\n%s", err, out)
	}
	saved := n.Dir + "/saved.json"
	if out, err := state(n, "export", saved); err == nil || !strings.Contains(out, "left out: ") {
		t.Errorf("export: %v\n%s", err, out)
	}
	if fi, err := os.Stat(saved); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the document: %v, %v", fi, err)
	}
	if out, err := state(n, "import", saved); err == nil || !strings.Contains(out, "--force") {
		t.Errorf("import over a store: %v\n%s", err, out)
	}
	if out, err := state(n, "import", "--force", saved); err != nil || !strings.Contains(out, "kept as") || !strings.Contains(out, "imported 1 endpoints") {
		t.Errorf("import: %v\n%s", err, out)
	}
	n.Start(t)
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK after the import: %v", err)
	}
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
	if err := unix.Kill(child.ShimPID(), 0); err != nil {
		t.Errorf("the shim did not stay: %v", err)
	}
	if err := child.StopShim(); err != nil {
		t.Error(err)
	}
	if err := n.Del(t, ep); err != nil {
		t.Error(err)
	}
	node.Gone(t, ep)
	observed(t, finding{"bytes of the store flipped", "mknetd does not start, names the byte and the commands that help; export and import bring back what a checksum proves; packets pass meanwhile"})
}
