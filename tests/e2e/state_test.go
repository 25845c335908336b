package e2e

import (
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
	path := n.Dir + "/state/state.db"
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	// go.etcd.io/bbolt common.Meta.txid, behind the page header of 16 bytes.
	txid := func(header []byte) uint64 { return binary.NativeEndian.Uint64(header[48:]) }
	older := int64(0)
	var headers [2][64]byte
	for i := range headers {
		if _, err := f.ReadAt(headers[i][:], int64(i*os.Getpagesize()+16)); err != nil {
			t.Fatal(err)
		}
	}
	if txid(headers[0][:]) > txid(headers[1][:]) {
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
