package plugin

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/delqueue"
)

// One input of nothing but unknown keys is refused quickly, and what it writes into
// the log is bounded.
func TestManyUnknownKeys(t *testing.T) {
	l := newLab(t)
	logFile := filepath.Join(t.TempDir(), "mk-cni.log")
	members := []string{`"log-file":"` + logFile + `"`}
	for i := range 12000 {
		members = append(members, fmt.Sprintf("%q:0", fmt.Sprintf("%064d", i)))
	}
	in := l.add()
	in.members = strings.Join(members, ",")
	l.fails(in, 2, fmt.Sprintf("%064d", 0))
	in.verb = "DEL"
	if out := l.ok(in); out.took > 30*time.Second { // a second on a quiet machine
		t.Errorf("took %s", out.took)
	}
	log, err := os.ReadFile(logFile)
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(log, []byte("\n")); n > maxWarnings+16 {
		t.Errorf("two calls wrote %d lines", n)
	}
	if !bytes.Contains(log, []byte(fmt.Sprintf("problems=%d", 12000-maxWarnings))) {
		t.Errorf("the log does not say how many it left out:\n%.2000s", log)
	}
	l.unchanged()
}

// A list that cannot be read is no empty list, however much else is wrong.
func TestGCListAmongManyProblems(t *testing.T) {
	l := newLab(t)
	l.ok(l.add())
	var members []string
	for i := range 100 {
		members = append(members, fmt.Sprintf("\"unknown%d\":0", i))
	}
	members = append(members, `"cni.dev/valid-attachments":[{"containerID":7}]`)
	l.fails(invocation{verb: "GC", members: strings.Join(members, ",")}, 7, "cni.dev/valid-attachments")
	if n := l.daemon.count(); n != 1 {
		t.Errorf("%d endpoints, want the one", n)
	}
}

// What would make every ADD fail before mknetd is asked is a cause of STATUS.
func TestStatusLooksAtOurFolders(t *testing.T) {
	l := newLab(t)
	l.ok(invocation{verb: "STATUS"}) // folders that are missing are made by the ADD
	if files(t, l.cache) != nil || files(t, delqueue.DefaultDir) != nil {
		t.Error("STATUS made a folder")
	}
	l.ok(l.add())
	for _, tc := range []struct {
		name, code string
		spoil      func(*testing.T, string)
	}{
		{"another's", "belongs to user 1000", func(t *testing.T, dir string) { must(t, os.Chown(dir, 1000, 1000)) }},
		{"open to others", "chmod 0700", func(t *testing.T, dir string) { must(t, os.Chmod(dir, 0o755)) }},
		{"no folder", "symbolic link or no folder", func(t *testing.T, dir string) {
			must(t, os.RemoveAll(dir))
			must(t, os.WriteFile(dir, nil, 0o600))
		}},
		{"read-only", "read-only file system", func(t *testing.T, dir string) {
			must(t, unix.Mount("tmpfs", dir, "tmpfs", unix.MS_RDONLY, "mode=0700"))
			t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
		}},
	} {
		for folder, dir := range map[string]string{"cache-unusable": filepath.Join(t.TempDir(), "cache"), "queue-unusable": delqueue.DefaultDir} {
			t.Run(tc.name+" "+folder, func(t *testing.T) {
				l := &lab{t: t, daemon: l.daemon, cache: filepath.Join(t.TempDir(), "cache"), ns: l.ns}
				if folder == "cache-unusable" {
					l.cache = dir
				}
				must(t, os.RemoveAll(dir))
				t.Cleanup(func() { _ = os.RemoveAll(dir) })
				must(t, os.MkdirAll(dir, 0o700))
				tc.spoil(t, dir)
				l.fails(invocation{verb: "STATUS"}, 50, folder, dir, tc.code)
			})
		}
	}
}

// DEL with a cache entry of 1 GB reads none of it.
func TestHugeCacheEntry(t *testing.T) {
	l := newLab(t)
	l.ok(l.add())
	must(t, os.Truncate(filepath.Join(l.cache, l.cacheFiles()[0]), 1<<30))
	l.ok(invocation{verb: "DEL", netns: l.ns.Path()})
	l.unchanged()
}

// A log-file that leads elsewhere, or blocks, is not written and fails nothing.
func TestHostileLogFiles(t *testing.T) {
	l := newLab(t)
	dir := t.TempDir()
	target := filepath.Join(dir, "target")
	must(t, os.WriteFile(target, nil, 0o600))
	must(t, os.Symlink(target, filepath.Join(dir, "symlink")))
	must(t, os.WriteFile(filepath.Join(dir, "two-names"), nil, 0o600))
	must(t, os.Link(filepath.Join(dir, "two-names"), filepath.Join(dir, "second")))
	must(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	must(t, os.Mkdir(filepath.Join(dir, "folder"), 0o700))
	must(t, os.WriteFile(filepath.Join(dir, "another's"), nil, 0o600))
	must(t, os.Chown(filepath.Join(dir, "another's"), 1000, 1000))
	for _, name := range []string{"symlink", "two-names", "fifo", "folder", "another's"} {
		out := l.ok(invocation{verb: "STATUS", members: fmt.Sprintf(`"log-file":%q,"enable-debug":true`, filepath.Join(dir, name))})
		if !strings.Contains(out.stderr, "log-file") {
			t.Errorf("%s: standard error does not say so: %q", name, out.stderr)
		}
	}
	for _, name := range []string{"target", "two-names", "another's"} {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Size() != 0 {
			t.Errorf("%s was written: %v, %v", name, st, err)
		}
	}
}

// CNI_ARGS at their oddest: the library's form is wider than its description.
func TestOddArguments(t *testing.T) {
	for _, tc := range []struct {
		args  string
		words []string // nil: accepted
	}{
		{"", nil},
		{";;IgnoreUnknown=1;;", nil},
		{"FOO=BAR;IgnoreUnknown=TRUE", nil},
		{"K8S_POD_NAME=a=b;K8S_POD_NAMESPACE=", nil},
		{"IgnoreUnknown=1;FOO", []string{"FOO", "KEY=VALUE"}},
		{"IgnoreUnknown=yes", []string{"IgnoreUnknown", "yes"}},
		{"IgnoreUnknown=1;IgnoreUnknown=0;FOO=BAR", []string{"FOO=BAR"}},
		{"k8s_pod_name=x", []string{"k8s_pod_name"}},
		{"K8S_POD_NAME=a\nb", []string{"K8S_POD_NAME"}},
		{"K8S_POD_UID=" + strings.Repeat("x", 254), []string{"K8S_POD_UID", "253"}},
		{"IP=", []string{"IP"}},
		{"=x", []string{"=x"}},
		{strings.Repeat("A=1;", 20000), []string{"A=1"}},
	} {
		l := newLab(t)
		in := l.add()
		in.args = tc.args
		if tc.words == nil {
			l.ok(in)
		} else {
			l.fails(in, 4, tc.words...)
		}
		in.verb = "DEL"
		l.ok(in)
		l.unchanged()
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
