package plugin

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"mknet/mk-cni/internal/config"
	"mknet/mk-cni/internal/input"
	"mknet/mk-cni/internal/version"
	"mknet/spec/api"
	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
)

// panicEnv makes this test binary the plugin with a defect.
const panicEnv = "MKCNI_TEST_PANIC"

// panickingDaemon has a defect in everything.
type panickingDaemon struct{ daemon }

func (panickingDaemon) CreateEndpoint(context.Context, api.CreateRequest, *os.File) (endpoint.Endpoint, error) {
	if _, err := os.Stdout.WriteString("a library prints\n"); err != nil {
		return endpoint.Endpoint{}, err
	}
	if _, err := syscall.Write(1, []byte("another writes to descriptor 1\n")); err != nil {
		return endpoint.Endpoint{}, err
	}
	panic("a defect")
}
func (panickingDaemon) Close() {}

func panickingHost() Host {
	return Host{Version: "test", QueueDir: delqueue.DefaultDir, dial: func(config.Daemon, string) (daemon, error) { return panickingDaemon{}, nil }}
}

func text(s string) *string { return &s }

func TestVersionAnswersInTheInputsVersion(t *testing.T) {
	l := newLab(t)
	for stdin, want := range map[string]string{
		`{"cniVersion":"0.3.1"}`:              "0.3.1",
		`{"cniVersion":"0.4.0","name":1}`:     "0.4.0",
		`{"cniVersion":"1.0.0"}`:              "1.0.0",
		`{"cniVersion":"1.1.0"}`:              "1.1.0",
		`{"cniVersion":"0.2.0"}`:              "0.2.0",
		`{"cniVersion":"9.9.9"}`:              "9.9.9",
		`{"cniVersion":"<script>\n\"{}"}`:     "1.1.0",
		`{"cniVersion":1}`:                    "1.1.0",
		`{}`:                                  "1.1.0",
		``:                                    "1.1.0",
		`garbage`:                             "1.1.0",
		strings.Repeat("x", input.MaxBytes+1): "1.1.0",
	} {
		out := l.ok(invocation{verb: "VERSION", bareEnv: true, stdin: &stdin})
		var doc struct {
			CNIVersion        string   `json:"cniVersion"`
			SupportedVersions []string `json:"supportedVersions"`
		}
		if err := json.Unmarshal([]byte(out.stdout), &doc); err != nil || doc.CNIVersion != want || !slices.Equal(doc.SupportedVersions, version.Supported) {
			t.Errorf("VERSION with %.40q = %+v, %v; want cniVersion %s", stdin, doc, err, want)
		}
		if out.stderr != "" {
			t.Errorf("VERSION wrote to standard error: %s", out.stderr)
		}
	}
	if calls := l.daemon.called(); len(calls) != 0 {
		t.Errorf("VERSION called mknetd: %v", calls)
	}
	l.unchanged()
}

// A caller that never closes our standard input does not hang VERSION.
func TestVersionDoesNotWaitForTheEndOfInput(t *testing.T) {
	for _, given := range []string{"", `{"cniVersion":"1.0.0"}`} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, given); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		cmd := exec.CommandContext(ctx, binary)
		cmd.Env, cmd.Stdin = []string{"CNI_COMMAND=VERSION"}, r
		out, err := cmd.Output()
		cancel()
		if err != nil || !strings.Contains(string(out), "supportedVersions") {
			t.Errorf("VERSION with an open pipe and %q: %v, %s", given, err, out)
		}
		_, _ = r.Close(), w.Close()
	}
}

func TestByHandItSaysWhatItIs(t *testing.T) {
	for _, args := range [][]string{nil, {"--help"}, {"--version"}} {
		cmd := exec.Command(binary, args...)
		cmd.Env = []string{}
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil || len(out) != 0 {
			t.Errorf("mk-cni %v: %v, standard output %q; want exit code 0 and none", args, err, out)
		}
		for _, w := range []string{"CNI plugin mk-cni", "cnitool", "1.1.0"} {
			if !strings.Contains(stderr.String(), w) {
				t.Errorf("mk-cni %v does not say %q: %s", args, w, stderr.String())
			}
		}
	}
}

func TestEnvironmentAndInputErrors(t *testing.T) {
	l := newLab(t)
	id128 := strings.Repeat("a", 128)
	for _, tc := range []struct {
		name  string
		in    invocation
		code  uint
		words []string
	}{
		{"unknown verb", invocation{verb: "PLAY"}, 4, []string{"CNI_COMMAND"}},
		{"nothing given", invocation{verb: "ADD", bareEnv: true}, 4, []string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"}},
		{"no netns", invocation{verb: "ADD"}, 4, []string{"CNI_NETNS"}},
		{"bad container ID", invocation{verb: "ADD", netns: l.ns.Path(), containerID: "a/b"}, 4, []string{"a/b"}},
		{"long container ID", invocation{verb: "ADD", netns: l.ns.Path(), containerID: id128 + "a"}, 4, []string{"CNI_CONTAINERID", "128"}},
		{"long ifname", invocation{verb: "ADD", netns: l.ns.Path(), ifName: "eth0123456789abc"}, 4, nil},
		{"ifname with slash", invocation{verb: "ADD", netns: l.ns.Path(), ifName: "a/b"}, 4, nil},
		{"ifname with percent", invocation{verb: "ADD", netns: l.ns.Path(), ifName: "a%d"}, 4, []string{"CNI_IFNAME", "a%d"}},
		{"ifname of ours", invocation{verb: "ADD", netns: l.ns.Path(), ifName: "mkhost0"}, 4, []string{"mkhost0"}},
		{"lo", invocation{verb: "ADD", netns: l.ns.Path(), ifName: "lo"}, 4, []string{"lo"}},
		{"no JSON", invocation{verb: "ADD", netns: l.ns.Path(), stdin: text("{")}, 6, nil},
		{"empty", invocation{verb: "ADD", netns: l.ns.Path(), stdin: text("")}, 6, nil},
		{"two documents", invocation{verb: "ADD", netns: l.ns.Path(), stdin: text(l.conf(invocation{}) + "{}")}, 6, nil},
		{"no name", invocation{verb: "ADD", netns: l.ns.Path(), stdin: text(`{"cniVersion":"1.0.0"}`)}, 7, []string{"name"}},
		{"bad name", invocation{verb: "ADD", netns: l.ns.Path(), stdin: text(`{"cniVersion":"1.0.0","name":"a b"}`)}, 7, nil},
		{"long name", invocation{verb: "ADD", netns: l.ns.Path(), stdin: text(`{"cniVersion":"1.0.0","name":"` + id128 + `a"}`)}, 7, []string{"128"}},
		{"old version", invocation{verb: "ADD", netns: l.ns.Path(), version: "0.2.0"}, 1, []string{"0.2.0"}},
		{"new version", invocation{verb: "ADD", netns: l.ns.Path(), version: "9.9.9"}, 1, []string{"9.9.9"}},
		{"CHECK before 0.4.0", invocation{verb: "CHECK", netns: l.ns.Path(), version: "0.3.1"}, 1, []string{"CHECK"}},
		{"GC before 1.1.0", invocation{verb: "GC", version: "1.0.0"}, 1, []string{"GC"}},
		{"STATUS before 1.1.0", invocation{verb: "STATUS", version: "1.0.0"}, 1, []string{"STATUS"}},
		{"unknown key", invocation{verb: "ADD", netns: l.ns.Path(), members: `"sokcet":"/x"`}, 2, []string{"sokcet", "/x", `"socket"`}},
		{"two problems", invocation{verb: "ADD", netns: l.ns.Path(), members: `"sokcet":"/x","mtu":5`}, 2, []string{"sokcet", "mtu 5"}},
		{"bad value", invocation{verb: "ADD", netns: l.ns.Path(), members: `"mtu":5`}, 7, []string{"mtu 5"}},
		{"unknown argument", invocation{verb: "ADD", netns: l.ns.Path(), args: "FOO=BAR"}, 4, []string{"CNI_ARGS", "FOO=BAR", "IgnoreUnknown"}},
		{"MAC argument", invocation{verb: "ADD", netns: l.ns.Path(), args: "MAC=02:00:00:00:00:01"}, 2, []string{"MAC", "02:00:00:00:00:01", "TUN"}},
		{"mac capability", invocation{verb: "ADD", netns: l.ns.Path(), members: `"runtimeConfig":{"mac":"02:00:00:00:00:01"}`}, 2, []string{"runtimeConfig.mac", "02:00:00:00:00:01"}},
		{"portMappings capability", invocation{verb: "ADD", netns: l.ns.Path(), members: `"runtimeConfig":{"portMappings":[{"hostPort":80}]}`}, 2, []string{"portMappings", "portmap"}},
		{"two addresses", invocation{verb: "ADD", netns: l.ns.Path(), members: `"runtimeConfig":{"ips":["172.30.0.6","172.30.0.10"]}`}, 2, []string{"172.30.0.10"}},
		{"a capability twice", invocation{verb: "ADD", netns: l.ns.Path(), members: `"runtimeConfig":{"bandwidth":{"ingressRate":1},"Bandwidth":{"ingressRate":2}}`}, 7, []string{"runtimeConfig.Bandwidth", "twice"}},
		{"not first in the chain", invocation{verb: "ADD", netns: l.ns.Path(), members: `"prevResult":{"cniVersion":"1.1.0"}`}, 7, []string{"prevResult", "first"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := &lab{t: t, daemon: l.daemon, cache: l.cache, ns: l.ns}
			e := l.fails(tc.in, tc.code, tc.words...)
			if want := tc.in.version; want != "" && e.CNIVersion != want {
				t.Errorf("error has cniVersion %s, input %s", e.CNIVersion, want)
			}
		})
	}
	if calls := l.daemon.called(); len(calls) != 0 {
		t.Errorf("refused calls reached mknetd: %v", calls)
	}
	l.unchanged()
}

func TestC31_OneDocumentWhateverHappens(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	l := newLab(t)
	logFile := filepath.Join(t.TempDir(), "mk-cni.log")
	t.Run("panic and printing libraries", func(t *testing.T) {
		l := &lab{t: t, daemon: l.daemon, cache: l.cache, ns: l.ns}
		in := l.add()
		in.program, in.env, in.version = self, []string{panicEnv + "=1"}, "1.0.0"
		if e := l.fails(in, CodeInternal, "panic", "a defect"); e.CNIVersion != "1.0.0" {
			t.Errorf("error has cniVersion %s", e.CNIVersion)
		}
		out := l.run(in)
		for _, w := range []string{"a library prints", "another writes", "goroutine"} {
			if !strings.Contains(out.stderr, w) {
				t.Errorf("standard error lacks %q: %s", w, out.stderr)
			}
		}
		if err := os.RemoveAll(l.cache); err != nil {
			t.Fatal(err)
		}
	})
	for _, members := range []string{`"log-file":"` + logFile + `","enable-debug":true`, `"log-file":"` + logFile + `"`, `"log-file":"/proc/no/such.log","enable-debug":true`} {
		in := l.add()
		in.members = members
		res := l.added(in)
		for _, next := range []invocation{
			{verb: "CHECK", netns: l.ns.Path(), members: members + "," + withPrev(res)},
			{verb: "STATUS", members: members},
			{verb: "GC", members: members + `,"cni.dev/valid-attachments":[{"containerID":"c1","ifname":"eth0"}]`},
			{verb: "DEL", netns: l.ns.Path(), members: members},
		} {
			if out := l.ok(next); out.stdout != "" {
				t.Errorf("%s printed %s", next.verb, out.stdout)
			}
		}
	}
	log, err := os.ReadFile(logFile)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []string{"verb=ADD", "verb=DEL", "endpoint=mknet/c1/eth0", "generation=", "netns="} {
		if !strings.Contains(string(log), w) {
			t.Errorf("log lacks %s:\n%s", w, log)
		}
	}
	if st, err := os.Stat(logFile); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("log is %v, %v; want 0600", st.Mode(), err)
	}
	l.unchanged()
}

func TestC37_HugeInputChangesNothing(t *testing.T) {
	l := newLab(t)
	in := l.add()
	in.stdin = text(l.conf(invocation{members: `"_pad":"` + strings.Repeat("x", input.MaxBytes) + `"`}))
	l.fails(in, 6, "1048576")
	in.members, in.stdin = "", nil
	fits := l.conf(invocation{members: `"_pad":"` + strings.Repeat("x", input.MaxBytes-1000) + `"`})
	in.stdin = &fits
	l.ok(in)
	l.ok(invocation{verb: "DEL", stdin: &fits})
	l.unchanged()
}

func TestC27_StatusAndGCNeedNoEnvironment(t *testing.T) {
	l := newLab(t)
	l.ok(invocation{verb: "STATUS", bareEnv: true})
	l.ok(invocation{verb: "GC", bareEnv: true})
	l.ok(invocation{verb: "GC", bareEnv: true, members: `"cni.dev/valid-attachments":[]`})
}

func TestStatus(t *testing.T) {
	l := newLab(t)
	exhausted := api.HealthCause{Code: "pool-exhausted", Message: "no free address in 172.30.0.0/30", Blocks: true, Mode: endpoint.Multikernel}
	pools := api.HealthCause{Code: api.CausePodPools, Message: "pool pods overlaps a route"}
	for _, tc := range []struct {
		name    string
		health  api.Health
		code    uint
		words   []string
		members string // of the configuration
	}{
		{"ready", api.Health{Ready: true, Causes: []api.HealthCause{{Code: "degraded", Message: "one endpoint"}}, LimitsExisting: true}, 0, nil, ""},
		{"exhausted", api.Health{Causes: []api.HealthCause{exhausted}}, 50, []string{"pool-exhausted", "172.30.0.0/30"}, ""},
		{"no pod pool for children", api.Health{Ready: true, Causes: []api.HealthCause{pools}}, 0, nil, ""},
		{"no pod pool for pods", api.Health{Ready: true, Causes: []api.HealthCause{pools}}, 50, []string{"overlaps a route"}, `"mode":"veth"`},
		{"no address for children, asked for pods", api.Health{Causes: []api.HealthCause{exhausted}}, 0, nil, `"mode":"veth"`},
		{"no pod pool and no egress", api.Health{LimitsExisting: true, Causes: []api.HealthCause{pools}}, 51, []string{"overlaps a route"}, `"mode":"veth"`},
		{
			"egress missing",
			api.Health{LimitsExisting: true, Causes: []api.HealthCause{{Code: "egress-missing", Message: "no default route", Blocks: true}, exhausted}},
			51,
			[]string{"egress-missing", "no default route", "pool-exhausted"},
			"",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := &lab{t: t, daemon: l.daemon, cache: l.cache, ns: l.ns}
			l.daemon.health = tc.health
			if in := (invocation{verb: "STATUS", members: tc.members}); tc.code == 0 {
				l.ok(in)
			} else {
				l.fails(in, tc.code, tc.words...)
			}
		})
	}
	l.daemon.hang["GET /v1/daemon/health"] = true
	if l.fails(invocation{verb: "STATUS"}, 50, "does not answer"); len(queued(t)) != 0 {
		t.Error("STATUS queued something")
	}
	l.daemon.hang["GET /v1/daemon/health"] = false
	l.daemon.fail["GET /v1/daemon/health"] = api.Errorf(api.Internal, "store is closed")
	l.fails(invocation{verb: "STATUS"}, 50, "store is closed")
	// Unknown keys are a matter of ADD.
	l.daemon.fail = map[string]*api.Error{}
	l.daemon.health = api.Health{Ready: true}
	l.daemon.pools = nil
	l.fails(invocation{verb: "STATUS", members: `"mode":"veth"`}, 50, "has no pool", "`pools`")
	l.ok(invocation{verb: "STATUS"})
	l.ok(invocation{verb: "STATUS", members: `"sokcet":1,"mtu":"x"`})
}

func TestTraceContextIsPassedOn(t *testing.T) {
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	l := newLab(t)
	l.ok(invocation{verb: "STATUS", env: []string{"TRACEPARENT=" + trace}})
	l.ok(invocation{verb: "STATUS", env: []string{"TRACEPARENT=not\na trace"}})
	if !slices.Equal(l.daemon.traces, []string{trace, ""}) {
		t.Errorf("mknetd saw %q, want the valid one alone", l.daemon.traces)
	}
	for _, bad := range []string{"", "00", trace + "-00", strings.ToUpper(trace), "ff" + trace[2:], "00-" + strings.Repeat("0", 32) + trace[35:], trace[:36] + strings.Repeat("0", 16) + "-01"} {
		if got := traceParent(bad); got != "" {
			t.Errorf("traceParent(%q) = %q, want none", bad, got)
		}
	}
}

// The plugin stays small: what it must not touch, it does not even contain.
func TestImportGraph(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "mknet/mk-cni").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, pkg := range strings.Fields(string(out)) {
		for _, bad := range []string{"vishvananda/netlink", "mdlayher/", "go-iptables", "bbolt", "spf13/", "ti-mo/", "prometheus", "cilium/ebpf", "mknet/mknetd", "mknet/shim", "mknet/mk-agent", "mknet/tests"} {
			if strings.Contains(pkg, bad) {
				t.Errorf("mk-cni imports %s", pkg)
			}
		}
	}
}

// VERSION is answered before the expensive packages are even initialised: see
// package version for how.
func TestVersionStartsNothingOfTheNetwork(t *testing.T) {
	cmd := exec.Command(binary)
	cmd.Env = []string{"CNI_COMMAND=VERSION", "GODEBUG=inittrace=1"}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if out, err := cmd.Output(); err != nil || !strings.Contains(string(out), "supportedVersions") {
		t.Fatalf("VERSION: %v, %s", err, out)
	}
	if !strings.Contains(stderr.String(), "init os @") {
		t.Fatalf("no trace of initialisations:\n%s", stderr.String())
	}
	for line := range strings.Lines(stderr.String()) {
		pkg := strings.Fields(line + " - -")[1]
		for _, late := range []string{"net", "net/http", "net/netip", "crypto/tls", "crypto/x509", "regexp", "github.com/containernetworking/", "mknet/spec/", "mknet/mk-cni/internal/config"} {
			if pkg == late || strings.HasSuffix(late, "/") && strings.HasPrefix(pkg, late) {
				t.Errorf("%s is initialised before VERSION is answered", pkg)
			}
		}
	}
}

func TestBudgetsAddUp(t *testing.T) {
	if AddBudget != 20*time.Second || DelBudget != 2*time.Second {
		t.Errorf("AddBudget is %s and DelBudget %s; spec/cni.md says 20 s and 2 s", AddBudget, DelBudget)
	}
	if replayBudget >= queueBudget || delCallBudget+queueBudget > DelBudget {
		t.Error("a DEL with its replay does not fit its budget")
	}
}
