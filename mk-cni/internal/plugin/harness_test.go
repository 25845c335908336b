package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

var update = flag.Bool("update", false, "write the golden files")

// binary is mk-cni, built once for all tests.
var binary string

func TestMain(m *testing.M) {
	if os.Getenv(panicEnv) != "" {
		os.Exit(Main(panickingHost()))
	}
	if slices.Contains(os.Args, "-test.fuzzworker") {
		os.Exit(m.Run())
	}
	netlab.Private(func() int {
		dir, err := os.MkdirTemp("", "mk-cni-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer func() { _ = os.RemoveAll(dir) }()
		binary = filepath.Join(dir, "mk-cni")
		if out, err := exec.Command("go", "build", "-o", binary, "mknet/mk-cni").CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build mk-cni: %v\n%s", err, out)
			return 1
		}
		return m.Run()
	})
}

// invocation is one call of the plugin as a process.
type invocation struct {
	verb        string
	containerID string // default "c1"
	ifName      string // default "eth0"
	netns       string
	args        string
	env         []string // further variables
	bareEnv     bool     // CNI_COMMAND and env only
	version     string   // default 1.1.0
	members     string   // further members of the configuration
	stdin       *string  // replaces the configuration
	program     string   // default binary
	path        string   // CNI_PATH, default /opt/cni/bin
}

// outcome is what came of it.
type outcome struct {
	code           int
	stdout, stderr string
	took           time.Duration
}

// lab is a fake daemon, folders and one namespace.
type lab struct {
	t      *testing.T
	daemon *fakeDaemon
	cache  string
	ns     *netlab.Namespace
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{t: t, daemon: startFake(t), cache: filepath.Join(t.TempDir(), "cache"), ns: netlab.New(t)}
	if err := os.RemoveAll(delqueue.DefaultDir); err != nil {
		t.Fatal(err)
	}
	return l
}

func (l *lab) att() endpoint.Attachment {
	return endpoint.Attachment{Network: "mknet", ContainerID: "c1", IfName: "eth0"}
}

// conf is the configuration of an invocation.
func (l *lab) conf(in invocation) string {
	version := in.version
	if version == "" {
		version = "1.1.0"
	}
	members := in.members
	if members != "" {
		members = "," + members
	}
	return fmt.Sprintf(`{"cniVersion":%q,"name":"mknet","type":"mk-cni","socket":%q,"cacheDir":%q,"capabilities":{"dns":true}%s}`,
		version, l.daemon.socket, l.cache, members)
}

func (l *lab) command(ctx context.Context, in invocation) *exec.Cmd {
	orDefault := func(s, d string) string {
		if s == "" {
			return d
		}
		return s
	}
	cmd := exec.CommandContext(ctx, orDefault(in.program, binary))
	cmd.Env = append([]string{"CNI_COMMAND=" + in.verb}, in.env...)
	if !in.bareEnv {
		cmd.Env = append(cmd.Env, "CNI_CONTAINERID="+orDefault(in.containerID, "c1"), "CNI_IFNAME="+orDefault(in.ifName, "eth0"),
			"CNI_NETNS="+in.netns, "CNI_ARGS="+in.args, "CNI_PATH="+orDefault(in.path, "/opt/cni/bin"))
	}
	stdin := l.conf(in)
	if in.stdin != nil {
		stdin = *in.stdin
	}
	cmd.Stdin = strings.NewReader(stdin)
	return cmd
}

// run executes the plugin and checks what holds for every call: at most one JSON
// document on standard output, an error object exactly where the exit code is 1.
func (l *lab) run(in invocation) outcome {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := l.command(ctx, in)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	started := time.Now()
	err := cmd.Run()
	out := outcome{stdout: stdout.String(), stderr: stderr.String(), took: time.Since(started)}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		out.code = exit.ExitCode()
	case err != nil:
		l.t.Fatalf("%s: %v", in.verb, err)
	}
	l.checkOneDocument(in, out)
	return out
}

func (l *lab) checkOneDocument(in invocation, out outcome) {
	l.t.Helper()
	if out.stdout == "" && out.code == 0 {
		return
	}
	dec := json.NewDecoder(strings.NewReader(out.stdout))
	var doc map[string]any
	if err := dec.Decode(&doc); err != nil {
		l.t.Fatalf("%s: standard output is no JSON: %v\n%s\nstderr: %s", in.verb, err, out.stdout, out.stderr)
	}
	if dec.More() {
		l.t.Errorf("%s: more than one document on standard output:\n%s", in.verb, out.stdout)
	}
	_, isError := doc["code"]
	if isError != (out.code == 1) || out.code > 1 {
		l.t.Errorf("%s: exit code %d with\n%s\nstderr: %s", in.verb, out.code, out.stdout, out.stderr)
	}
	if doc["cniVersion"] == "" || doc["cniVersion"] == nil {
		l.t.Errorf("%s: no cniVersion in\n%s", in.verb, out.stdout)
	}
}

// ok runs the plugin and wants success.
func (l *lab) ok(in invocation) outcome {
	l.t.Helper()
	out := l.run(in)
	if out.code != 0 {
		l.t.Fatalf("%s: exit code %d:\n%s\nstderr: %s", in.verb, out.code, out.stdout, out.stderr)
	}
	return out
}

// errorObject is CNI's.
type errorObject struct {
	CNIVersion string `json:"cniVersion"`
	Code       uint   `json:"code"`
	Msg        string `json:"msg"`
	Details    string `json:"details"`
}

// fails runs the plugin and wants an error with the code and the words.
func (l *lab) fails(in invocation, code uint, words ...string) errorObject {
	l.t.Helper()
	out := l.run(in)
	var e errorObject
	if err := json.Unmarshal([]byte(out.stdout), &e); err != nil || out.code != 1 || e.Code != code {
		l.t.Fatalf("%s: exit code %d, %v; want CNI code %d:\n%s\nstderr: %s", in.verb, out.code, err, code, out.stdout, out.stderr)
	}
	for _, w := range words {
		if !strings.Contains(e.Msg+" | "+e.Details, w) {
			l.t.Errorf("%s: error does not say %q:\n%s", in.verb, w, out.stdout)
		}
	}
	return e
}

func (l *lab) add() invocation { return invocation{verb: "ADD", netns: l.ns.Path()} }

// added runs an ADD and returns its result.
func (l *lab) added(in invocation) map[string]any {
	l.t.Helper()
	out := l.ok(in)
	var doc map[string]any
	if err := json.Unmarshal([]byte(out.stdout), &doc); err != nil {
		l.t.Fatal(err)
	}
	return doc
}

// withPrev is a configuration member with the result of an ADD.
func withPrev(result any) string {
	doc, err := json.Marshal(result)
	if err != nil {
		return err.Error()
	}
	return `"prevResult":` + string(doc)
}

// cacheFiles lists the cache folder.
func (l *lab) cacheFiles() []string {
	l.t.Helper()
	return files(l.t, l.cache)
}

func files(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// queued lists the deferred DELs.
func queued(t testing.TB) []delqueue.Entry {
	t.Helper()
	q, err := delqueue.OpenExisting(delqueue.DefaultDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = q.Close() }()
	items, err := q.List()
	if err != nil {
		t.Fatal(err)
	}
	var list []delqueue.Entry
	for _, it := range items {
		if it.Err != nil {
			t.Errorf("queue: %v", it.Err)
		}
		list = append(list, it.Entry)
	}
	return list
}

// unchanged wants no endpoint, no cache entry and no deferred DEL.
func (l *lab) unchanged() {
	l.t.Helper()
	if n, c, q := l.daemon.count(), l.cacheFiles(), queued(l.t); n != 0 || len(c) != 0 || len(q) != 0 {
		l.t.Errorf("left %d endpoints, cache %v, deferred DELs %v; want nothing", n, c, q)
	}
}
