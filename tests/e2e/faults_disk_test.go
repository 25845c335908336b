package e2e

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/tests/netlab"
	"mknet/tests/node"
)

// disk is a small file system of a test's own.
type disk struct{ dir string }

// newDisk mounts one of the given size on dir, until the test ends or unmount.
func newDisk(t *testing.T, dir, size string) *disk {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0700,size="+size); err != nil {
		t.Fatal(err)
	}
	d := &disk{dir}
	t.Cleanup(func() {
		if d.dir != "" {
			d.unmount(t)
		}
	})
	return d
}

func (d *disk) unmount(t *testing.T) {
	t.Helper()
	if err := unix.Unmount(d.dir, unix.MNT_DETACH); err != nil {
		t.Error(err)
	}
	d.dir = ""
}

// remount sets or takes away MS_RDONLY.
func (d *disk) remount(t *testing.T, flags uintptr) {
	t.Helper()
	if err := unix.Mount("", d.dir, "", unix.MS_REMOUNT|flags, ""); err != nil {
		t.Fatal(err)
	}
}

// fill leaves room for the given number of pages and returns how to make room.
func (d *disk) fill(t *testing.T, pages int64) (empty func()) {
	t.Helper()
	f, err := os.Create(d.dir + "/filler")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page := make([]byte, os.Getpagesize())
	var size int64
	for {
		n, err := f.Write(page)
		size += int64(n)
		if errors.Is(err, unix.ENOSPC) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Truncate(size - pages*int64(len(page))); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := os.Remove(d.dir + "/filler"); err != nil {
			t.Fatal(err)
		}
	}
}

// noRecords waits until the daemon has none.
func noRecords(t *testing.T, n *node.Node) {
	t.Helper()
	netlab.Eventually(t, node.Patience, func() error {
		if left := n.List(t); len(left) != 0 {
			return fmt.Errorf("%d records are left, the first is %s", len(left), left[0].State)
		}
		return nil
	})
}

// nothingOf fails the test when an ADD that failed has left something.
func nothingOf(t *testing.T, n *node.Node, pod *netlab.Namespace, rules string) {
	t.Helper()
	noRecords(t, n)
	if after := ruleset(t); after != rules {
		t.Errorf("rules are left:\n%s", after)
	}
	if out := pod.Run(t, "ip", "-br", "link"); strings.Contains(out, "eth0") || strings.Contains(out, "mkhost") {
		t.Errorf("links are left:\n%s", out)
	}
}

// The disk of mk-cni's cache fills up, before an ADD or in the middle of it.
func TestFullCache(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	before := ruleset(t)
	cache := newDisk(t, n.Dir+"/cache", "64k")
	for _, c := range []struct {
		pages int64
		finding
	}{
		{0, finding{"cache disk full before an ADD", "ADD 5, names the file; mknetd is not even asked"}},
		{1, finding{"cache disk full once mknetd has made the endpoint", "ADD 5, names the file; the endpoint is rolled back, nothing is left"}},
	} {
		room := cache.fill(t, c.pages)
		_, err := n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c1", Netns: pod.Path(), IfName: "eth0"})
		node.WantCode(t, err, 5, "no space left on device")
		if !strings.Contains(fmt.Sprint(err), cache.dir) {
			t.Errorf("the error names no file: %v", err)
		}
		nothingOf(t, n, pod, before)
		room()
		if names, err := os.ReadDir(cache.dir); err != nil || len(names) != 0 {
			t.Errorf("the cache holds %v, %v", names, err)
		}
		observed(t, c.finding)
	}
	ep := n.Add(t, "c1", pod, "eth0")
	room := cache.fill(t, 0)
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	if err := n.Del(t, ep); err != nil {
		t.Errorf("DEL: %v", err)
	}
	node.Gone(t, ep)
	room()
	observed(t, finding{"cache disk full, CHECK and DEL", "both work"})
}

// The disk of the queue is full while mknetd is away: such a DEL must not say that
// it worked.
func TestFullQueue(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	n.Stop(t)
	queue := newDisk(t, n.DeferredDir, "64k")
	room := queue.fill(t, 0)
	err := n.Del(t, ep)
	node.WantCode(t, err, 5, "cannot be queued")
	if !strings.Contains(fmt.Sprint(err), "no space left on device") {
		t.Errorf("DEL gives no reason: %v", err)
	}
	room()
	if err := n.Del(t, ep); err != nil {
		t.Errorf("DEL with room again: %v", err)
	}
	if got := queued(t, n); got != 1 {
		t.Errorf("%d DELs are queued, want 1", got)
	}
	n.Start(t)
	waitGone(t, n, ep)
	observed(t, finding{"mknetd away and the queue's disk full", "DEL 5, says that it is not queued; the same DEL is queued once there is room, and done when mknetd is back"})
}

// The disks of cache and queue become read-only under a node that works.
func TestReadOnlyCacheAndQueue(t *testing.T) {
	n := node.New(t)
	pod, other := netlab.New(t), netlab.New(t)
	cache, queue := newDisk(t, n.Dir+"/cache", "64k"), newDisk(t, n.DeferredDir, "64k")
	kept := n.Add(t, "kept", pod, "eth0")
	before := ruleset(t)
	cache.remount(t, unix.MS_RDONLY)
	_, err := n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c1", Netns: other.Path(), IfName: "eth0"})
	node.WantCode(t, err, 5, "read-only file system")
	if left := n.List(t); len(left) != 1 || ruleset(t) != before {
		t.Errorf("%d records after the ADD, want that of before; or its rules are left", len(left))
	}
	if err := n.Check(t, kept); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	n.Stop(t)
	queue.remount(t, unix.MS_RDONLY)
	err = n.Del(t, kept)
	node.WantCode(t, err, 5, "cannot be queued")
	if !strings.Contains(fmt.Sprint(err), "read-only file system") {
		t.Errorf("DEL gives no reason: %v", err)
	}
	n.Start(t)
	if err := n.Del(t, kept); err != nil {
		t.Errorf("DEL with mknetd, the cache still read-only: %v", err)
	}
	waitGone(t, n, kept)
	cache.remount(t, 0)
	queue.remount(t, 0)
	again := n.Add(t, "kept", pod, "eth0")
	if err := n.Del(t, again); err != nil {
		t.Errorf("DEL: %v", err)
	}
	waitGone(t, n, again)
	observed(t, finding{"the disks of cache and queue become read-only", "ADD 5, nothing of it stays; CHECK works, and DEL with mknetd; DEL without mknetd 5, says that it is not queued; all works once they can be written again"})
}

// bigDNS makes a record of several pages, so that a store cannot write it into
// what it has free.
func bigDNS() map[string]any {
	var search []string
	for i := range 30 {
		search = append(search, fmt.Sprintf("%03d.%s.example", i, strings.Repeat("x", 60)))
	}
	return map[string]any{"dns": map[string]any{"nameservers": []string{"192.0.2.53"}, "search": search}}
}

// The store's disk fills up under a running daemon.
func TestFullStore(t *testing.T) {
	n := node.Prepare(t)
	disk := newDisk(t, n.Dir+"/state", "1m")
	n.Start(t)
	pod := netlab.New(t)
	kept := n.Add(t, "kept", pod, "eth0")
	child := n.Boot(t, kept, "g1")
	room := disk.fill(t, 0)
	var worked []endpoint.Endpoint
	var err error
	for i := range 20 { // until the pages that the store has free are used
		call := node.Call{Verb: "ADD", ContainerID: fmt.Sprintf("c%d", i), Netns: pod.Path(), IfName: fmt.Sprintf("n%d", i), Config: bigDNS()}
		if _, err = n.CNI(t, call); err != nil {
			break
		}
		for _, ep := range n.List(t) {
			if ep.ContainerID == call.ContainerID {
				worked = append(worked, ep)
			}
		}
	}
	node.WantCode(t, err, 11, "no space left on device")
	if err := n.Check(t, kept); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
	room()
	netlab.Eventually(t, node.Patience, func() error {
		if left := n.List(t); len(left) != 1+len(worked) {
			return fmt.Errorf("%d records, want %d", len(left), 1+len(worked))
		}
		return nil
	})
	n.CheckInventory(t)
	again := n.AddCall(t, node.Call{ContainerID: "again", Netns: pod.Path(), IfName: "again", Config: bigDNS()})
	if err := child.StopShim(); err != nil {
		t.Error(err)
	}
	for _, ep := range append(worked, again, kept) {
		if err := n.Del(t, ep); err != nil {
			t.Errorf("DEL: %v", err)
		}
	}
	noRecords(t, n)
	n.Stop(t)
	disk.unmount(t)
	observed(t, finding{"the store's disk full under a running mknetd", "ADD 11, nothing of it stays; existing endpoints carry packets and pass CHECK; with room again ADD works, no restart"})
}

// The store can be written no more, for a reason that leaves open what is on the
// disk (EIO and its like; here EFBIG, by RLIMIT_FSIZE).
func TestUnwritableStore(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	kept := n.Add(t, "kept", pod, "eth0")
	child := n.Boot(t, kept, "g1")
	netlab.Run(t, "prlimit", "--pid", fmt.Sprint(n.DaemonPID()), "--fsize=4096:unlimited")
	_, err := n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c1", Netns: pod.Path(), IfName: "n1"})
	node.WantCode(t, err, 11, "restart mknetd")
	netlab.Run(t, "prlimit", "--pid", fmt.Sprint(n.DaemonPID()), "--fsize=unlimited:unlimited")
	_, err = n.CNI(t, node.Call{Verb: "ADD", ContainerID: "c1", Netns: pod.Path(), IfName: "n1"})
	node.WantCode(t, err, 11, "restart mknetd")
	_, err = n.CNI(t, node.Call{Verb: "STATUS"})
	node.WantCode(t, err, 50, "mknetd accepts no ADD now")
	if !strings.Contains(fmt.Sprint(err), "store-unwritable") {
		t.Errorf("STATUS names no cause: %v", err)
	}
	if err := n.Check(t, kept); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	netlab.MustPing(t, child.Namespace, netlab.InternetAddr)
	n.Stop(t)
	n.Start(t)
	if got := n.List(t); len(got) != 1 || got[0].Generation != kept.Generation {
		t.Errorf("after a restart the records are %v", got)
	}
	ep := n.Add(t, "c1", pod, "n1")
	for _, ep := range []endpoint.Endpoint{ep, kept} {
		if ep.Generation == kept.Generation {
			if err := child.StopShim(); err != nil {
				t.Error(err)
			}
		}
		if err := n.Del(t, ep); err != nil {
			t.Errorf("DEL: %v", err)
		}
	}
	observed(t, finding{"a write of the store fails (as with EIO) under a running mknetd", "ADD 11, says to restart mknetd; STATUS 50 with `store-unwritable`; existing endpoints carry packets and pass CHECK; all works after the restart"})
}

// The store lies on a file system that was mounted read-only.
func TestReadOnlyStore(t *testing.T) {
	n := node.New(t)
	pod := netlab.New(t)
	ep := n.Add(t, "c1", pod, "eth0")
	n.Stop(t)
	state := n.Dir + "/state"
	if err := errors.Join(unix.Mount(state, state, "", unix.MS_BIND, ""), unix.Mount("", state, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")); err != nil {
		t.Fatal(err)
	}
	out, err := netlab.Try(n.Programs.Daemon, "serve", "--config", n.Config)
	if err == nil || !strings.Contains(out+err.Error(), state) || !strings.Contains(out+err.Error(), "read-only file system") {
		t.Errorf("mknetd on a read-only store: %v %s", err, out)
	}
	if err := unix.Unmount(state, 0); err != nil {
		t.Fatal(err)
	}
	n.Start(t)
	if err := n.Check(t, ep); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	observed(t, finding{"the store's folder read-only at the start", "mknetd does not start and names folder and reason; nothing is touched"})
}
