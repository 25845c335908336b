package plugin

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"testing"

	"mknet/mk-cni/internal/version"
	"mknet/spec/api"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

func TestCheckInEachVersion(t *testing.T) {
	for _, v := range version.Supported[1:] { // CHECK came with 0.4.0
		l := newLab(t)
		in := l.add()
		in.version = v
		res := l.added(in)
		if out := l.ok(invocation{verb: "CHECK", netns: l.ns.Path(), version: v, members: withPrev(res)}); out.stdout != "" {
			t.Errorf("CHECK of %s printed %s", v, out.stdout)
		}
	}
}

// C16: what later plugins of the chain added or changed is theirs.
func TestC16_CheckToleratesLaterPlugins(t *testing.T) {
	l := newLab(t)
	res := l.added(l.add())
	var prev map[string]any
	doc, _ := json.Marshal(res)
	if err := json.Unmarshal(doc, &prev); err != nil {
		t.Fatal(err)
	}
	list := func(key string) []any { l, _ := prev[key].([]any); return l }
	prev["interfaces"] = append([]any{map[string]any{"name": "eth0", "mac": "02:00:00:00:00:01"}}, append(list("interfaces"), map[string]any{"name": "ifb0"})...)
	for _, ip := range list("ips") {
		ip.(map[string]any)["interface"] = 1
	}
	prev["ips"] = append(list("ips"), map[string]any{"address": "fd00::5/64", "interface": 1}, map[string]any{"address": "10.9.9.9/24"})
	prev["routes"] = []any{map[string]any{"dst": "10.0.0.0/8", "gw": "172.30.0.1", "mtu": 1200}}
	prev["dns"] = map[string]any{}
	l.ok(invocation{verb: "CHECK", netns: l.ns.Path(), members: withPrev(prev) + `,"disableCheck":true,"sokcet":1`})
}

// The same namespace under another path is the same namespace.
func TestCheckKnowsTheNamespaceByItsInode(t *testing.T) {
	l := newLab(t)
	res := l.added(l.add())
	l.ok(invocation{verb: "CHECK", netns: "/proc/self/root" + l.ns.Path(), members: withPrev(res)})
}

func TestC17_MalformedPrevResult(t *testing.T) {
	l := newLab(t)
	l.ok(l.add())
	inf := func(sandbox string) string { return fmt.Sprintf(`{"name":"eth0","sandbox":%q}`, sandbox) }
	good := inf(l.ns.Path())
	for name, prev := range map[string]string{
		"missing":             `null`,
		"empty":               `{}`,
		"a string":            `"x"`,
		"a list":              `[]`,
		"empty sandbox":       `{"interfaces":[` + inf("") + `],"ips":[{"address":"172.30.0.2/30","interface":0}]}`,
		"bad CIDR":            `{"interfaces":[` + good + `],"ips":[{"address":"172.30.0.2","interface":0}]}`,
		"worse CIDR":          `{"interfaces":[` + good + `],"ips":[{"address":"999.1.1.1/99","interface":0}]}`,
		"index 99":            `{"interfaces":[` + good + `],"ips":[{"address":"172.30.0.2/30","interface":99}]}`,
		"index -1":            `{"interfaces":[` + good + `],"ips":[{"address":"172.30.0.2/30","interface":-1}]}`,
		"index is a word":     `{"interfaces":[` + good + `],"ips":[{"address":"172.30.0.2/30","interface":"0"}]}`,
		"null interface":      `{"interfaces":[null],"ips":[]}`,
		"null address":        `{"interfaces":[` + good + `],"ips":[null]}`,
		"null route":          `{"interfaces":[` + good + `],"ips":[],"routes":[null]}`,
		"bad route":           `{"interfaces":[` + good + `],"ips":[],"routes":[{"dst":"default"}]}`,
		"bad gateway":         `{"interfaces":[` + good + `],"ips":[{"address":"172.30.0.2/30","gateway":"x","interface":0}]}`,
		"interface not there": `{"interfaces":[{"name":"eth1","sandbox":"/x"}],"ips":[]}`,
		"interface twice":     `{"interfaces":[` + good + `,` + good + `],"ips":[]}`,
		"interfaces a map":    `{"interfaces":{}}`,
		"ip4 of 0.2.0":        `{"ip4":{"ip":"172.30.0.2/30"}}`,
	} {
		t.Run(name, func(t *testing.T) {
			l := &lab{t: t, daemon: l.daemon, cache: l.cache, ns: l.ns}
			l.fails(invocation{verb: "CHECK", netns: l.ns.Path(), members: `"prevResult":` + prev}, 7, "prevResult")
		})
	}
	l.ok(invocation{verb: "DEL", netns: l.ns.Path(), members: `"prevResult":{"ips":[{"interface":99}]}`})
	l.unchanged()
}

func TestCheckFindsWhatIsWrong(t *testing.T) {
	other := netlab.New(t)
	for name, tc := range map[string]struct {
		spoil func(l *lab, in *invocation, prev map[string]any)
		code  uint
		words []string
	}{
		"kernel faults": {func(l *lab, _ *invocation, _ map[string]any) {
			l.daemon.faults = []endpoint.Fault{
				{Kind: "route", Object: "default", Where: endpoint.InNamespace, Problem: "missing", Inspect: "ip route"},
				{Kind: "sysctl", Object: "net.ipv4.ip_forward", Where: endpoint.InNamespace, Problem: "is 0, want 1"},
			}
		}, CodeCheckFailed, []string{"2 faults", "route default", "ip route", "ip_forward"}},
		"degraded": {func(l *lab, _ *invocation, _ map[string]any) {
			l.daemon.onCheck = func(ep *endpoint.Endpoint) { ep.Degraded = []string{"veth is down"} }
		}, CodeCheckFailed, []string{"veth is down"}},
		"being deleted": {func(l *lab, _ *invocation, _ map[string]any) {
			l.daemon.onCheck = func(ep *endpoint.Endpoint) { ep.State = endpoint.Deleting }
		}, CodeCheckFailed, []string{"DELETING"}},
		"record of another": {func(l *lab, _ *invocation, _ map[string]any) {
			l.daemon.onCheck = func(ep *endpoint.Endpoint) { ep.ContainerID = "c2" }
		}, CodeCheckFailed, []string{"mknet/c2/eth0"}},
		"other namespace": {func(_ *lab, in *invocation, prev map[string]any) {
			in.netns = other.Path()
			for _, inf := range prev["interfaces"].([]any) {
				if m := inf.(map[string]any); m["sandbox"] != nil {
					m["sandbox"] = other.Path()
				}
			}
		}, CodeCheckFailed, []string{"not the namespace"}},
		"other sandbox": {func(_ *lab, _ *invocation, prev map[string]any) {
			prev["interfaces"].([]any)[0].(map[string]any)["sandbox"] = other.Path()
		}, CodeCheckFailed, []string{"sandbox"}},
		"address lost": {func(_ *lab, _ *invocation, prev map[string]any) {
			prev["ips"] = []any{}
		}, CodeCheckFailed, []string{"172.30.0.2/30"}},
		"other address": {func(_ *lab, _ *invocation, prev map[string]any) {
			prev["ips"].([]any)[0].(map[string]any)["address"] = "172.30.0.6/30"
		}, CodeCheckFailed, []string{"172.30.0.2/30"}},
		"other gateway": {func(_ *lab, _ *invocation, prev map[string]any) {
			prev["ips"].([]any)[0].(map[string]any)["gateway"] = "172.30.0.2"
		}, CodeCheckFailed, []string{"gateway 172.30.0.1"}},
		"endpoint gone": {func(l *lab, _ *invocation, _ map[string]any) {
			l.daemon.endpoints = nil
		}, 3, []string{"no endpoint"}},
		"namespace gone": {func(_ *lab, in *invocation, _ map[string]any) { in.netns = "/run/netns/none" }, 4, []string{"CNI_NETNS"}},
		"mknetd away":    {func(l *lab, _ *invocation, _ map[string]any) { l.daemon.socket = "/nonexistent.sock" }, 11, []string{"/nonexistent.sock"}},
		"mknetd refuses": {func(l *lab, _ *invocation, _ map[string]any) {
			l.daemon.fail["POST /v1/endpoints/G/check"] = api.Errorf(api.StaleIdentity, "now of another namespace")
		}, 101, []string{"another namespace"}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			res := l.added(l.add())
			prev := maps.Clone(res)
			in := invocation{verb: "CHECK", netns: l.ns.Path()}
			tc.spoil(l, &in, prev)
			in.members = withPrev(prev)
			l.fails(in, tc.code, tc.words...)
		})
	}
}

func TestCheckOfAnAttachmentThatWasNeverAdded(t *testing.T) {
	l := newLab(t)
	res := l.added(l.add())
	l.ok(invocation{verb: "DEL"})
	l.fails(invocation{verb: "CHECK", netns: l.ns.Path(), members: withPrev(res)}, 3, "not attached")
}

func TestC10_C28_GC(t *testing.T) {
	attachment := func(id string) string { return fmt.Sprintf(`{"containerID":%q,"ifname":"eth0"}`, id) }
	for name, tc := range map[string]struct {
		members string
		want    []string // containers that stay
		absent  bool     // mknetd got no list
	}{
		"new key":   {`"cni.dev/valid-attachments":[` + attachment("a") + `]`, []string{"a"}, false},
		"old key":   {`"cni.dev/attachments":[` + attachment("a") + `,` + attachment("b") + `]`, []string{"a", "b"}, false},
		"both keys": {`"cni.dev/valid-attachments":[` + attachment("a") + `],"cni.dev/attachments":[` + attachment("a") + `]`, []string{"a"}, false},
		"no key":    {``, []string{"a", "b", "c"}, true},
		"null":      {`"cni.dev/valid-attachments":null`, []string{"a", "b", "c"}, true},
		"empty":     {`"cni.dev/valid-attachments":[]`, nil, false},
		"foreign":   {`"cni.dev/valid-attachments":[{"containerID":"a","ifname":"lo"},{"containerID":"","ifname":"eth0"},` + attachment("c") + `]`, []string{"c"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			for _, id := range []string{"a", "b", "c"} {
				in := l.add()
				in.containerID = id
				l.ok(in)
			}
			if out := l.ok(invocation{verb: "GC", bareEnv: true, members: tc.members}); out.stdout != "" {
				t.Errorf("GC printed %s", out.stdout)
			}
			if got := l.daemon.lastGC; got.Network != "mknet" || (got.Valid == nil) != tc.absent {
				t.Errorf("asked for %+v", got)
			}
			var left []string
			for _, ep := range l.daemon.endpoints {
				left = append(left, ep.ContainerID)
			}
			if !slices.Equal(left, tc.want) || len(l.cacheFiles()) != len(tc.want) {
				t.Errorf("left %v, cache %v; want %v", left, l.cacheFiles(), tc.want)
			}
		})
	}
}

func TestGCReportsAndGoesOn(t *testing.T) {
	l := newLab(t)
	l.ok(l.add())
	l.daemon.gcErrors = []string{"endpoint 0123: rule stays", "endpoint 4567: veth stays"}
	l.fails(invocation{verb: "GC", members: `"cni.dev/valid-attachments":[]`}, CodeIncomplete, "1 removed, 2 could not", "rule stays", "veth stays")
	l.unchanged()
	l.daemon.fail["POST /v1/gc"] = api.Errorf(api.Unavailable, "busy")
	l.fails(invocation{verb: "GC"}, 11, "busy")
	l.daemon.socket = "/nonexistent.sock"
	l.fails(invocation{verb: "GC"}, 11, "/nonexistent.sock")
}

// A list that cannot be read must not pass for no list, or for an empty one.
func TestGCRefusesABrokenList(t *testing.T) {
	l := newLab(t)
	for _, list := range []string{`{}`, `"x"`, `[1]`, `[{"containerID":"a"}]`, `[null]`} {
		l.fails(invocation{verb: "GC", members: `"cni.dev/valid-attachments":` + list}, 7, "cni.dev/valid-attachments")
	}
	if calls := l.daemon.called(); len(calls) != 0 {
		t.Errorf("called %v", calls)
	}
}

// Cache entries whose endpoint mknetd no longer has go with the next GC; those of
// other networks and of listed attachments stay.
func TestGCForgetsWhatIsGone(t *testing.T) {
	l := newLab(t)
	for _, id := range []string{"a", "b"} {
		in := l.add()
		in.containerID = id
		l.ok(in)
	}
	l.daemon.endpoints = nil // a reboot, say
	other := `{"cniVersion":"1.1.0","name":"other","type":"mk-cni","socket":"` + l.daemon.socket + `","cacheDir":"` + l.cache + `"}`
	l.ok(invocation{verb: "GC", stdin: &other})
	if got := l.cacheFiles(); len(got) != 2 {
		t.Errorf("cache %v; GC of another network touched it", got)
	}
	l.ok(invocation{verb: "GC", members: `"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"}]`})
	if got := l.cacheFiles(); len(got) != 1 {
		t.Errorf("cache %v; want that of a alone", got)
	}
	l.ok(invocation{verb: "GC"})
	l.unchanged()
}

func FuzzPrevResult(f *testing.F) {
	for _, s := range []string{
		`{"interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"address":"172.30.0.2/30","gateway":"172.30.0.1","interface":0}],"routes":[{"dst":"0.0.0.0/0","gw":"172.30.0.1"}]}`,
		`{"interfaces":[null],"ips":[null],"routes":[null]}`, `{"interfaces":[{"name":"eth0"}],"ips":[{"interface":-1}]}`, `null`, `[]`, `{`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		prev, err := parsePrevResult(raw, "eth0")
		if err != nil {
			if e := cniError(err); e.Code != 7 {
				t.Errorf("code %d for %q", e.Code, raw)
			}
			return
		}
		if prev.sandbox == "" {
			t.Errorf("accepted %q without a sandbox", raw)
		}
		for _, ip := range prev.ips {
			if !ip.address.IsValid() {
				t.Errorf("accepted %q with address %v", raw, ip.address)
			}
		}
	})
}
