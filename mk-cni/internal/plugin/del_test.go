package plugin

import (
	"context"
	"errors"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"mknet/mk-cni/internal/version"
	"mknet/spec/api"
	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

const (
	byGeneration = "DELETE /v1/endpoints/G"
	byAttachment = "POST /v1/delete"
)

func TestDelGoesByTheCachedGeneration(t *testing.T) {
	l := newLab(t)
	l.ok(l.add())
	l.daemon.called()
	out := l.ok(invocation{verb: "DEL", netns: l.ns.Path()})
	if calls := l.daemon.called(); !slices.Equal(calls, []string{byGeneration}) || out.stdout != "" {
		t.Errorf("called %v, printed %q", calls, out.stdout)
	}
	// Again, and once more with everything gone.
	l.ok(invocation{verb: "DEL", netns: l.ns.Path()})
	l.ok(invocation{verb: "DEL"})
	if calls := l.daemon.called(); !slices.Equal(calls, []string{byAttachment, byAttachment}) {
		t.Errorf("called %v", calls)
	}
	l.unchanged()
}

func TestC03_NamespaceIsGone(t *testing.T) {
	l := newLab(t)
	l.ok(l.add())
	l.ns.Remove(t)
	l.ok(invocation{verb: "DEL", netns: l.ns.Path()})
	l.unchanged()
}

// C5, C35: what is wrong with our cache never keeps a DEL from working.
func TestC05_C35_UnusableCacheEntry(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, file string) error{
		"zero bytes": func(_ *testing.T, f string) error { return os.Truncate(f, 0) },
		"half":       func(_ *testing.T, f string) error { return os.Truncate(f, 50) },
		"garbage":    func(_ *testing.T, f string) error { return os.WriteFile(f, []byte("{garbage"), 0o600) },
		"of another attachment": func(_ *testing.T, f string) error {
			data, err := os.ReadFile(f)
			return errors.Join(err, os.WriteFile(f, []byte(strings.Replace(string(data), `"c1"`, `"c2"`, 1)), 0o600))
		},
		"symbolic link": func(t *testing.T, f string) error {
			return errors.Join(os.Rename(f, f+"-real"), os.Symlink(f+"-real", f), os.Rename(f+"-real", filepath.Join(t.TempDir(), "real")))
		},
		"open to others": func(_ *testing.T, f string) error { return os.Chmod(f, 0o644) },
		"too large":      func(_ *testing.T, f string) error { return os.Truncate(f, 1<<20) },
		"gone":           func(_ *testing.T, f string) error { return os.Remove(f) },
		"folder gone":    func(_ *testing.T, f string) error { return os.RemoveAll(filepath.Dir(f)) },
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			res := l.added(l.add())
			if err := spoil(t, filepath.Join(l.cache, l.cacheFiles()[0])); err != nil {
				t.Fatal(err)
			}
			out := l.run(invocation{verb: "CHECK", netns: l.ns.Path(), members: withPrev(res)})
			if out.code != 1 || !strings.Contains(out.stdout, "delete and add it again") {
				t.Errorf("CHECK says %s", out.stdout)
			}
			l.daemon.called()
			l.ok(invocation{verb: "DEL", netns: l.ns.Path()})
			if calls := l.daemon.called(); !slices.Equal(calls, []string{byAttachment}) {
				t.Errorf("called %v, want the attachment", calls)
			}
			l.unchanged()
		})
	}
}

func TestDelOfAnUnsafeCacheFolder(t *testing.T) {
	l := newLab(t)
	l.ok(l.add())
	if err := os.Chmod(l.cache, 0o777); err != nil {
		t.Fatal(err)
	}
	l.ok(invocation{verb: "DEL"})
	if n := l.daemon.count(); n != 0 {
		t.Errorf("%d endpoints are left", n)
	}
}

// C12: a DEL that comes late, with a generation that is no longer the one.
func TestC12_StaleGenerationDeletesNothingYounger(t *testing.T) {
	l := newLab(t)
	l.ok(l.add())
	// Its endpoint goes, and the same attachment gets a younger one that this cache
	// does not know.
	l.daemon.mu.Lock()
	l.daemon.remove(0)
	l.daemon.mu.Unlock()
	young := l.daemon.put(l.att())
	l.ok(invocation{verb: "DEL"})
	if _, err := l.daemon.answerGet(young); err != nil {
		t.Error("the younger endpoint was deleted")
	}
}

// C11: a DEL before the ADD is harmless.
func TestC11_DelBeforeAdd(t *testing.T) {
	l := newLab(t)
	l.ok(invocation{verb: "DEL", netns: l.ns.Path()})
	l.ok(l.add())
	l.ok(invocation{verb: "DEL", netns: l.ns.Path()})
	l.unchanged()
}

// C9, C10: a killed ADD leaves an entry that says so; the DEL then goes by
// attachment too, but never beyond the moment it began.
func TestC09_DelAfterAKilledAdd(t *testing.T) {
	for _, before := range []bool{false, true} {
		l := newLab(t)
		if before { // an older endpoint, whose cache entry is still there
			l.ok(l.add())
			l.daemon.mu.Lock()
			l.daemon.remove(0)
			l.daemon.mu.Unlock()
		}
		l.killedAdd()
		l.daemon.put(l.att()) // what mknetd made of it
		l.daemon.called()
		l.ok(invocation{verb: "DEL", netns: l.ns.Path()})
		want := []string{byAttachment}
		if before {
			want = []string{byGeneration, byAttachment}
		}
		if calls := l.daemon.called(); !slices.Equal(calls, want) {
			t.Errorf("called %v, want %v", calls, want)
		}
		if d := l.daemon.lastDel; d.NotAfter == nil || d.NetnsPath != l.ns.Path() {
			t.Errorf("asked for %+v, want a time and the namespace", d)
		}
		l.unchanged()
	}
}

// killedAdd runs an ADD that mknetd does not answer and that is killed while it waits.
func (l *lab) killedAdd() {
	l.t.Helper()
	l.daemon.hang["POST /v1/endpoints"] = true
	l.daemon.called()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := l.command(ctx, l.add())
	if err := cmd.Start(); err != nil {
		l.t.Fatal(err)
	}
	netlab.Eventually(l.t, 30*time.Second, func() error {
		if slices.Contains(l.daemon.called(), "POST /v1/endpoints") {
			return nil
		}
		return errors.New("mknetd was not asked yet")
	})
	if err := cmd.Process.Kill(); err != nil {
		l.t.Fatal(err)
	}
	_ = cmd.Wait()
}

// What a killed ADD made is in a namespace that nobody noted: its deferred DEL does not
// go by that of the endpoint before, which mknetd has no more.
func TestDeferredDelAfterAKilledAddNamesNoOlderNamespace(t *testing.T) {
	l := newLab(t)
	l.ok(l.add())
	older := l.daemon.endpoints[0].Generation
	l.daemon.mu.Lock()
	l.daemon.remove(0)
	l.daemon.mu.Unlock()
	l.killedAdd()
	l.daemon.socket = "/nonexistent/mknetd.sock"
	l.ok(invocation{verb: "DEL", netns: l.ns.Path()})
	got := map[endpoint.Generation]uint64{}
	for _, e := range queued(t) {
		got[e.Generation] = e.Cookie
		if e.QueuedAt.IsZero() || e.SinceBoot == 0 {
			t.Errorf("entry %+v does not say when it was queued", e)
		}
	}
	if want := map[endpoint.Generation]uint64{older: fakeCookie, {}: 0}; !maps.Equal(got, want) {
		t.Errorf("queued cookies %v, want %v", got, want)
	}
}

func TestC38_TwoInterfacesOfOneContainer(t *testing.T) {
	l := newLab(t)
	l.ok(l.add())
	second := l.add()
	second.ifName = "net1"
	l.ok(second)
	l.ok(invocation{verb: "DEL", ifName: "net1"})
	if n, c := l.daemon.count(), l.cacheFiles(); n != 1 || len(c) != 1 {
		t.Errorf("left %d endpoints, cache %v; want those of eth0", n, c)
	}
	l.ok(invocation{verb: "DEL"})
	l.unchanged()
}

// C6, C7: whatever way mknetd is away, the DEL is on disk within two seconds.
func TestC06_C07_DaemonAway(t *testing.T) {
	for name, takeAway := range map[string]func(t *testing.T, l *lab){
		"socket missing": func(_ *testing.T, l *lab) { l.daemon.socket = "/nonexistent/mknetd.sock" },
		"nobody listens": func(t *testing.T, l *lab) {
			path := filepath.Join(t.TempDir(), "dead.sock")
			ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			ln.SetUnlinkOnClose(false)
			_ = ln.Close()
			l.daemon.socket = path
		},
		"never accepts": func(t *testing.T, l *lab) {
			path := filepath.Join(t.TempDir(), "deaf.sock")
			ln, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = ln.Close() })
			l.daemon.socket = path
		},
		"never answers": func(_ *testing.T, l *lab) {
			l.daemon.hang[byGeneration], l.daemon.hang[byAttachment] = true, true
		},
		"speaks another language": func(_ *testing.T, l *lab) {
			l.daemon.raw[byGeneration], l.daemon.raw[byAttachment] = "220 smtp ready", "220 smtp ready"
		},
	} {
		for _, known := range []bool{true, false} {
			t.Run(name+map[bool]string{true: ", generation known", false: ", unknown"}[known], func(t *testing.T) {
				l := newLab(t)
				l.ok(l.add())
				g := l.daemon.endpoints[0].Generation
				if !known {
					g = endpoint.Generation{}
					if err := os.RemoveAll(l.cache); err != nil {
						t.Fatal(err)
					}
				}
				takeAway(t, l)
				before := time.Now()
				out := l.ok(invocation{verb: "DEL", netns: l.ns.Path()})
				if out.took > DelBudget+time.Second { // exec and a busy machine included
					t.Errorf("took %s, want at most %s", out.took, DelBudget)
				}
				q := queued(t)
				if len(q) != 1 || q[0].Attachment != l.att() || q[0].Generation != g || q[0].Daemon != "unix://"+l.daemon.socket || q[0].QueuedAt.Before(before) {
					t.Fatalf("queue %+v, want generation %s of %s", q, g, l.att())
				}
				if got := l.cacheFiles(); len(got) != 0 {
					t.Errorf("cache %v; the queue has it now", got)
				}
			})
		}
	}
}

// /var/run is /run: the entry has the name that mknetd knows itself by.
func TestDeferredDelNamesTheRealSocket(t *testing.T) {
	l := newLab(t)
	dir := t.TempDir()
	if err := errors.Join(os.Mkdir(dir+"/run", 0o755), os.Symlink("run", dir+"/varrun")); err != nil {
		t.Fatal(err)
	}
	l.daemon.socket = dir + "/varrun/mknetd.sock"
	l.ok(invocation{verb: "DEL"})
	if q := queued(t); len(q) != 1 || q[0].Daemon != "unix://"+dir+"/run/mknetd.sock" {
		t.Errorf("queue %+v", q)
	}
}

// The folder of mknetd's socket is gone with mknetd, which comes back: the DEL is
// found again, also one that was queued under the name that was given.
func TestDeferredDelFindsItsDaemonAgain(t *testing.T) {
	l := newLab(t)
	dir := t.TempDir()
	if err := errors.Join(os.Mkdir(dir+"/run", 0o755), os.Symlink("run", dir+"/varrun")); err != nil {
		t.Fatal(err)
	}
	l.daemon.socket = dir + "/varrun/mknet/mknetd.sock"
	l.ok(invocation{verb: "DEL"})
	got := queued(t)
	if len(got) != 1 || got[0].Daemon != "unix://"+dir+"/run/mknet/mknetd.sock" {
		t.Fatalf("queue %+v, want the name with links followed", got)
	}
	asGiven := got[0]
	asGiven.ContainerID, asGiven.Daemon = "another", "unix://"+l.daemon.socket
	q, err := delqueue.Open(delqueue.DefaultDir)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(q.Enqueue(asGiven), q.Close(), os.Mkdir(dir+"/run/mknet", 0o755)); err != nil {
		t.Fatal(err)
	}
	l.daemon.listen()
	call := l.add()
	call.containerID = "third"
	l.ok(call)
	if q := queued(t); len(q) != 0 {
		t.Errorf("queue %+v, want both done", q)
	}
}

func TestRefusedDelIsNeverQueued(t *testing.T) {
	for _, tc := range []struct {
		err  *api.Error
		code uint // 0: success
	}{
		{api.Retryablef(api.FailedPrecondition, "its shim lives"), 11},
		{api.Errorf(api.Unavailable, "store cannot be written"), 11},
		{api.Errorf(api.InvalidArgument, "no"), 7},
		{api.Errorf(api.Internal, "defect"), 105},
		{api.Errorf(api.NotFound, "none"), 0},
		{api.Errorf(api.StaleGeneration, "another lives"), 0},
		{api.Errorf(api.StaleIdentity, "another namespace"), 0},
	} {
		t.Run(string(tc.err.Code), func(t *testing.T) {
			l := newLab(t)
			l.ok(l.add())
			l.daemon.fail[byGeneration] = tc.err
			if tc.code == 0 {
				l.ok(invocation{verb: "DEL"})
			} else {
				l.fails(invocation{verb: "DEL"}, tc.code, tc.err.Message)
				if got := l.cacheFiles(); len(got) != 1 {
					t.Errorf("cache %v; a refused DEL must find its generation again", got)
				}
			}
			if q := queued(t); len(q) != 0 {
				t.Errorf("queue %+v", q)
			}
		})
	}
}

func TestDelThatCannotBeQueuedIsAnError(t *testing.T) {
	for name, tc := range map[string]struct {
		spoil func(t *testing.T) error
		word  string
	}{
		"a file": {func(*testing.T) error { return os.WriteFile(delqueue.DefaultDir, nil, 0o600) }, "deferred-del"},
		"open to others": {func(*testing.T) error {
			return errors.Join(os.Mkdir(delqueue.DefaultDir, 0o700), os.Chmod(delqueue.DefaultDir, 0o777))
		}, "chmod 0700"},
		"symbolic link": {func(t *testing.T) error { return os.Symlink(t.TempDir(), delqueue.DefaultDir) }, "symbolic link"},
		"of another user": {func(*testing.T) error {
			return errors.Join(os.Mkdir(delqueue.DefaultDir, 0o700), os.Chown(delqueue.DefaultDir, 12345, 0))
		}, "12345"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			l.ok(l.add())
			l.daemon.socket = "/nonexistent/mknetd.sock"
			t.Cleanup(func() { _ = os.RemoveAll(delqueue.DefaultDir) })
			if err := tc.spoil(t); err != nil {
				t.Fatal(err)
			}
			l.fails(invocation{verb: "DEL"}, 5, "cannot be queued", "/nonexistent/mknetd.sock", "mknet/c1/eth0", tc.word)
			if got := l.cacheFiles(); len(got) != 1 {
				t.Errorf("cache %v; the DEL was not done", got)
			}
		})
	}
}

// What no ADD accepts cannot exist, and a configuration that became wrong does not
// keep a sandbox from being removed.
func TestDelIsLenient(t *testing.T) {
	l := newLab(t)
	l.ok(l.add())
	for _, in := range []invocation{
		{verb: "DEL", ifName: "mkhost0"},
		{verb: "DEL", ifName: "lo"},
		{verb: "DEL", ifName: "a%d"},
		{verb: "DEL", containerID: strings.Repeat("a", 129)},
	} {
		l.ok(in)
	}
	if n := l.daemon.count(); n != 1 {
		t.Fatalf("%d endpoints, want the one", n)
	}
	for _, prev := range []string{"null", "{}", "[]", `"x"`, `{"ips":[null],"interfaces":[null]}`, `{"cniVersion":7}`} {
		l.ok(invocation{verb: "DEL", netns: l.ns.Path(), args: "FOO=BAR;;=", members: `"sokcet":1,"mtu":"x","mode":[],"runtimeConfig":{"mac":"zz"},"prevResult":` + prev})
	}
	for _, v := range version.Supported {
		l.ok(invocation{verb: "DEL", version: v})
	}
	l.unchanged()
}

// The queue is worked off by later calls, a little at a time, and never by VERSION
// and STATUS.
func TestReplayByOtherCalls(t *testing.T) {
	l := newLab(t)
	socket := l.daemon.socket
	const n = replayLimit + 3
	for i := range n {
		in := l.add()
		in.containerID = "old" + string(rune('a'+i))
		l.ok(in)
	}
	l.daemon.socket = "/nonexistent/mknetd.sock"
	for i := range n {
		l.ok(invocation{verb: "DEL", containerID: "old" + string(rune('a'+i))})
	}
	// Entries are for the mknetd that they were meant for.
	l.daemon.socket = socket
	l.ok(l.add())
	if got := len(queued(t)); got != n {
		t.Fatalf("%d deferred DELs are left, want all %d: they were for another mknetd", got, n)
	}
	q, err := delqueue.Open(delqueue.DefaultDir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range queued(t) {
		e.Daemon = "unix://" + socket
		if err := q.Enqueue(e); err != nil {
			t.Fatal(err)
		}
	}
	_ = q.Close()
	for _, verb := range []string{"VERSION", "STATUS"} {
		l.ok(invocation{verb: verb})
	}
	if got := len(queued(t)); got != n {
		t.Fatalf("%d deferred DELs are left after STATUS, want %d", got, n)
	}
	// How many fit into 200 ms depends on the machine; eight is the most.
	left := n
	for range n {
		l.ok(invocation{verb: "DEL"})
		now := len(queued(t))
		if left-now > replayLimit {
			t.Errorf("one call replayed %d", left-now)
		}
		if left = now; left == 0 {
			break
		}
	}
	if left != 0 {
		t.Errorf("%d deferred DELs are left", left)
	}
	l.unchanged()
}

// An entry of unknown generation deletes nothing that is younger than itself.
func TestReplayedUnknownGenerationSparesTheYoung(t *testing.T) {
	l := newLab(t)
	boot, err := bootID()
	if err != nil {
		t.Fatal(err)
	}
	q, err := delqueue.Open(delqueue.DefaultDir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = q.Close() }()
	other := endpoint.Attachment{Network: "mknet", ContainerID: "c9", IfName: "eth0"}
	e := delqueue.Entry{Attachment: other, BootID: boot, Daemon: "unix://" + l.daemon.socket, QueuedAt: time.Now().Add(-time.Hour)}
	if err := q.Enqueue(e); err != nil {
		t.Fatal(err)
	}
	young := l.daemon.put(other)
	l.ok(invocation{verb: "DEL"})
	if _, err := l.daemon.answerGet(young); err != nil {
		t.Error("the younger endpoint was deleted")
	}
	if got := queued(t); len(got) != 0 {
		t.Errorf("queue %+v", got)
	}
	// One of an earlier boot is dropped without a word to mknetd.
	e.BootID = "00000000-0000-4000-8000-000000000000"
	if err := q.Enqueue(e); err != nil {
		t.Fatal(err)
	}
	l.daemon.called()
	l.ok(invocation{verb: "DEL"})
	if calls, got := l.daemon.called(), queued(t); !slices.Equal(calls, []string{byAttachment}) || len(got) != 0 {
		t.Errorf("called %v, queue %+v", calls, got)
	}
}
