package doctor

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/config"
	"mknet/spec/api"
	"mknet/spec/delqueue"
	"mknet/spec/endpoint"
	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// lab is a private host where nothing is wrong, and a daemon of which a test
// chooses the answers.
type lab struct {
	*Node
	dir    string
	health api.Health
	conf   api.DaemonConfig
	inv    api.Inventory
	server *http.Server
}

// network is the text of a CNI network of ours.
const ourNetwork = `{"cniVersion":"1.0.0","name":"mknet","plugins":[{"type":"mk-cni","socket":"%s"},{"type":"portmap","capabilities":{"portMappings":true}}]}`

func healthy(t *testing.T) *lab {
	t.Helper()
	netlab.Uplink(t, "1400")
	netlab.Run(t, "sysctl", "-qw", "net.ipv4.conf."+netlab.UplinkName+".forwarding=1")
	dir, err := os.MkdirTemp("/run", "doctor-") // every folder above it is root's
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	cfg, err := config.Load("", false, config.Override{Key: "socket", Value: dir + "/s"}, config.Override{Key: "stateDir", Value: dir + "/state"},
		config.Override{Key: "deferredDelDir", Value: dir + "/queue"})
	if err != nil {
		t.Fatal(err)
	}
	cfg.PodPools = []endpoint.Pool{{Name: "pods"}}
	l := &lab{
		dir: dir,
		Node: &Node{
			Version: "v1", Config: cfg, ConfigAt: dir + "/config.yaml", CNIConfDir: dir + "/net.d", CNIBinDirs: []string{dir + "/bin"},
			Adjtimex: func(*unix.Timex) (int, error) { return unix.TIME_OK, nil },
		},
		health: api.Health{Ready: true, Version: "v1", FreeSlots: cfg.Pools.Slots(), Endpoints: map[string]int{}},
		conf:   api.DaemonConfig{Firewall: "nft", ChildPool: cfg.Pools.Child, Egress: netlab.UplinkName},
		inv:    api.Inventory{Items: []api.InventoryItem{{Kind: "veth", Object: "mkv0", Where: endpoint.InHost, Status: api.Recorded}}},
	}
	l.Config.PodPools = nil
	l.write(t, "net.d/10-mknet.conflist", fmt.Sprintf(ourNetwork, cfg.Socket))
	for _, bin := range []string{"mk-cni", "portmap"} {
		l.write(t, "bin/"+bin, "#!/bin/sh\n")
	}
	if err := os.Mkdir(cfg.StateDir, 0o700); err != nil {
		t.Fatal(err)
	}
	l.serve(t)
	t.Cleanup(l.Close)
	return l
}

func (l *lab) write(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join(l.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}

// serve answers what the doctor asks a daemon.
func (l *lab) serve(t *testing.T) {
	t.Helper()
	listener, err := net.Listen("unix", l.Config.Socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(l.Config.Socket, 0o600); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	answer := func(path string, value func() any) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(value()) // the caller has gone
		})
	}
	answer("/v1/daemon/health", func() any { return l.health })
	answer("/v1/daemon/config", func() any { return l.conf })
	answer("/v1/inventory", func() any { return l.inv })
	answer("/v1/endpoints", func() any { return api.EndpointList{Endpoints: []endpoint.Endpoint{}} })
	answer("/v1/events", func() any { return api.EventList{Instance: "i", Events: []api.Event{}} })
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "mknet_ready_bool 1") })
	l.server = &http.Server{Handler: mux}
	ended := make(chan struct{})
	go func() { _ = l.server.Serve(listener); close(ended) }()
	t.Cleanup(func() { l.server.Close(); <-ended })
}

func (l *lab) stop(t *testing.T) {
	t.Helper()
	if err := l.server.Close(); err != nil {
		t.Fatal(err)
	}
}

func (l *lab) nft(t *testing.T, lines ...string) {
	t.Helper()
	for _, line := range lines {
		netlab.Run(t, "nft", strings.Fields(line)...)
	}
}

func (l *lab) queue(t *testing.T, age time.Duration) {
	t.Helper()
	q, err := delqueue.Open(l.Config.DeferredDelDir)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	err = q.Enqueue(delqueue.Entry{
		Attachment: endpoint.Attachment{Network: "n", ContainerID: "c", IfName: "eth0"}, BootID: "00000000-0000-4000-8000-000000000000", Daemon: "unix:///elsewhere", QueuedAt: time.Now().Add(-age),
	})
	if err != nil {
		t.Fatal(err)
	}
}

// ailment makes a check fire.
type ailment struct {
	check    string
	name     string
	severity Severity
	what     string // part of what is found
	cause    func(t *testing.T, l *lab)
}

var ailments = []ailment{
	{"config", "a fault", Error, "egres: is not a key", func(_ *testing.T, l *lab) {
		l.ConfigErr = fmt.Errorf("configuration: egres: is not a key")
	}},
	{"daemon", "down", Error, "does not answer", func(t *testing.T, l *lab) { l.stop(t) }},
	{"version", "older", Note, "version v0, this program is v1", func(_ *testing.T, l *lab) { l.health.Version = "v0" }},
	{"health", "refuses", Error, "egress-missing: no route", func(_ *testing.T, l *lab) {
		l.health.Causes = []api.HealthCause{{Code: "egress-missing", Message: "no route", Blocks: true}}
	}},
	{"health", "limps", Warning, "degraded: 3", func(_ *testing.T, l *lab) {
		l.health.Causes = []api.HealthCause{{Code: "degraded", Message: "3 endpoints"}}
	}},
	{"socket", "open to all", Error, "has mode 0666, want 0600", func(t *testing.T, l *lab) { chmod(t, l.Config.Socket, 0o666) }},
	{"socket", "a folder of others", Error, "others may write to it", func(t *testing.T, l *lab) { chmod(t, l.dir, 0o777) }},
	{"folders", "of others", Error, "state has mode 0777", func(t *testing.T, l *lab) { chmod(t, l.Config.StateDir, 0o777) }},
	{"folders", "somebody else's", Error, "belongs to uid 7", func(t *testing.T, l *lab) {
		if err := os.Chown(l.Config.StateDir, 7, 7); err != nil {
			t.Fatal(err)
		}
	}},
	{"folders", "full", Error, "MiB free", func(t *testing.T, l *lab) { mountOn(t, l.Config.StateDir, 0, "size=1m") }},
	{"folders", "read-only", Error, "mounted read-only", func(t *testing.T, l *lab) { mountOn(t, l.Config.StateDir, unix.MS_RDONLY, "") }},
	{"privileges", "none", Warning, "lacks CAP_NET_ADMIN, CAP_SYS_ADMIN", func(t *testing.T, l *lab) {
		l.write(t, "proc/self/status", "Name:\tx\nCapEff:\t0000000000002000\n")
		l.Proc = l.dir + "/proc"
	}},
	{"kernel", "too old", Error, "5.10.0-8-amd64", func(_ *testing.T, l *lab) { l.Release = "5.10.0-8-amd64" }},
	{"kernel", "old", Note, "no UDP segmentation", func(_ *testing.T, l *lab) { l.Release = "6.1.0" }},
	{"tun", "missing", Error, "/net/tun: no such file", func(_ *testing.T, l *lab) { l.Dev = l.dir }},
	{"tun", "no TUN", Error, "ask for its features", func(t *testing.T, l *lab) {
		l.write(t, "dev/net/tun", "")
		l.Dev = l.dir + "/dev"
	}},
	{"bpf", "no bpffs", Warning, "no bpffs is mounted", func(_ *testing.T, l *lab) {
		l.Config.PodPools = []endpoint.Pool{{Name: "pods"}}
		l.BPF = l.dir
	}},
	{"bpf", "no TCX", Note, "has no TCX", func(_ *testing.T, l *lab) {
		l.Config.PodPools = []endpoint.Pool{{Name: "pods"}}
		l.Release = "6.5.1"
	}},
	{"clock", "never set", Warning, "the clock says 1970", func(_ *testing.T, l *lab) { l.Now = func() time.Time { return time.Unix(60, 0) } }},
	{"clock", "not kept", Note, "nothing keeps the wall clock", func(_ *testing.T, l *lab) {
		l.Adjtimex = func(tx *unix.Timex) (int, error) { tx.Status = unix.STA_UNSYNC; return unix.TIME_ERROR, nil }
	}},
	{"conntrack", "full", Error, "has 95 of 100 entries", func(t *testing.T, l *lab) {
		l.write(t, "proc/sys/net/netfilter/nf_conntrack_count", "95\n")
		l.write(t, "proc/sys/net/netfilter/nf_conntrack_max", "100\n")
		l.Proc = l.dir + "/proc"
	}},
	{"iptables", "two flavours", Warning, "iptables legacy holds 1 rules", func(t *testing.T, _ *lab) {
		netlab.Run(t, "iptables-legacy", "-A", "FORWARD", "-j", "ACCEPT")
		t.Cleanup(func() { netlab.Run(t, "iptables-legacy", "-F") })
	}},
	{"iptables", "a rule of nft", Error, "iptables cannot read table filter", func(t *testing.T, l *lab) {
		netlab.Run(t, "iptables-nft", "-P", "INPUT", "ACCEPT")
		l.nft(t, "add rule ip filter INPUT ct state new counter")
		t.Cleanup(func() { l.nft(t, "flush chain ip filter INPUT") })
	}},
	{"base-chains", "a policy", Warning, "inet other f has the policy drop", func(t *testing.T, l *lab) {
		l.nft(t, "add table inet other", "add chain inet other f { type filter hook forward priority 5 ; policy drop ; }")
		t.Cleanup(func() { l.nft(t, "delete table inet other") })
	}},
	{"base-chains", "a rule", Warning, "ip other i has a rule that drops", func(t *testing.T, l *lab) {
		l.nft(t, "add table ip other", "add chain ip other i { type filter hook input priority 5 ; }", "add rule ip other i counter reject")
		t.Cleanup(func() { l.nft(t, "delete table ip other") })
	}},
	{"base-chains", "the other flavour", Warning, "legacy filter FORWARD has the policy DROP", func(t *testing.T, _ *lab) {
		netlab.Run(t, "iptables-legacy", "-P", "FORWARD", "DROP")
		t.Cleanup(func() { netlab.Run(t, "iptables-legacy", "-P", "FORWARD", "ACCEPT") })
	}},
	{"forwarding", "off under endpoints", Error, "forwarding is off on the egress", func(t *testing.T, l *lab) {
		l.health.Endpoints["READY"] = 1
		netlab.Run(t, "sysctl", "-qw", "net.ipv4.conf."+netlab.UplinkName+".forwarding=0")
	}},
	{"forwarding", "no egress", Error, "no IPv4 default route", func(t *testing.T, _ *lab) { netlab.Run(t, "ip", "route", "del", "default") }},
	{"rp-filter", "strict with two ways", Warning, "rp_filter is strict on", func(t *testing.T, _ *lab) {
		netlab.Run(t, "ip", "link", "add", "second", "type", "veth", "peer", "name", "second1")
		t.Cleanup(func() { netlab.Run(t, "ip", "link", "del", "second") })
		netlab.Run(t, "ip", "link", "set", "second", "up")
		netlab.Run(t, "ip", "route", "add", "default", "dev", "second", "metric", "900")
		netlab.Run(t, "sysctl", "-qw", "net.ipv4.conf."+netlab.UplinkName+".rp_filter=1")
	}},
	{"overlaps", "an address", Error, "child pool 172.30.0.0/16 overlaps address 172.30.5.1/24 of other", func(t *testing.T, _ *lab) {
		netlab.Run(t, "ip", "link", "add", "other", "type", "veth", "peer", "name", "other1")
		t.Cleanup(func() { netlab.Run(t, "ip", "link", "del", "other") })
		netlab.Run(t, "ip", "addr", "add", "172.30.5.1/24", "dev", "other")
	}},
	{"pools", "nearly empty", Warning, "child pool 172.30.0.0/16: 12 of 16384 addresses", func(_ *testing.T, l *lab) { l.health.FreeSlots = 12 }},
	{"deferred-dels", "waits too long", Warning, "1 deferred DELs wait", func(t *testing.T, l *lab) { l.queue(t, time.Hour) }},
	{"deferred-dels", "set aside", Warning, ".bad cannot be read", func(t *testing.T, l *lab) {
		l.queue(t, 0)
		files, err := os.ReadDir(l.Config.DeferredDelDir)
		if err != nil || len(files) != 1 {
			t.Fatalf("%d files, %v", len(files), err)
		}
		file := filepath.Join(l.Config.DeferredDelDir, files[0].Name())
		if err := os.Rename(file, file+".bad"); err != nil {
			t.Fatal(err)
		}
	}},
	{"objects", "altered", Error, "mtu eth0 (namespace) of endpoint 010101010101 is altered: mtu is 9", func(_ *testing.T, l *lab) {
		l.inv.Items = append(l.inv.Items, api.InventoryItem{Kind: "mtu", Object: "eth0", Where: endpoint.InNamespace, Generation: oneGeneration(), Status: api.Altered, Problem: "mtu is 9", Inspect: "ip link"})
	}},
	{"objects", "what many rely on", Error, "sysctl net/ipv4/conf/up0/forwarding (host) of endpoint 010101010101 and 1 others is altered: is 0, want 1", func(_ *testing.T, l *lab) {
		for i := range 2 {
			g := oneGeneration()
			g[15] += byte(i)
			l.inv.Items = append(l.inv.Items, api.InventoryItem{Kind: "sysctl", Object: "net/ipv4/conf/up0/forwarding", Where: endpoint.InHost, Generation: g, Status: api.Altered, Problem: "is 0, want 1", Inspect: "sysctl"})
		}
	}},
	{"objects", "an orphan", Warning, "veth mkv1 (host) is orphan", func(_ *testing.T, l *lab) {
		l.inv.Items = append(l.inv.Items, api.InventoryItem{Kind: "veth", Object: "mkv1", Where: endpoint.InHost, Status: api.Orphan, Problem: "no record"})
	}},
	{"metrics", "nobody listens", Warning, "metrics at 127.0.0.1:9", func(_ *testing.T, l *lab) { l.Config.MetricsAddress = "127.0.0.1:9" }},
	{"cni-active", "another comes first", Warning, `the active network is "other"`, func(t *testing.T, l *lab) {
		l.write(t, "net.d/05-other.conf", `{"cniVersion":"1.0.0","name":"other","type":"bridge"}`)
	}},
	{"cni-active", "a broken file", Warning, "00-broken.conflist cannot be used", func(t *testing.T, l *lab) { l.write(t, "net.d/00-broken.conflist", "{") }},
	{"cni-ignored", "a conf of ours beside the list", Warning, "20-mknet.conf (network \"mknet\") is ignored beside", func(t *testing.T, l *lab) {
		l.write(t, "net.d/20-mknet.conf", `{"cniVersion":"1.0.0","name":"mknet","type":"mk-cni","mtu":9000,"socket":"`+l.Config.Socket+`"}`)
	}},
	{"cni-injected", "a folder", Warning, "also runs the plugins of", func(t *testing.T, l *lab) { l.write(t, "net.d/mknet/evil.conf", `{"type":"x"}`) }},
	{"cni-binaries", "not there", Error, "plugin portmap of", func(t *testing.T, l *lab) {
		if err := os.Remove(l.dir + "/bin/portmap"); err != nil {
			t.Fatal(err)
		}
	}},
	{"cni-check", "disabled", Note, "disableCheck is set", func(t *testing.T, l *lab) {
		text := fmt.Sprintf(ourNetwork, l.Config.Socket)
		l.write(t, "net.d/10-mknet.conflist", strings.Replace(text, `"name"`, `"disableCheck":true,"name"`, 1))
	}},
	{"cni-socket", "another daemon's", Error, "asks /run/other.sock", func(t *testing.T, l *lab) {
		l.write(t, "net.d/10-mknet.conflist", fmt.Sprintf(ourNetwork, "/run/other.sock"))
	}},
	{"cni-socket", "not the first", Error, "plugin portmap comes before mk-cni", func(t *testing.T, l *lab) {
		l.write(t, "net.d/10-mknet.conflist", `{"name":"mknet","plugins":[{"type":"portmap"},{"type":"mk-cni","socket":"`+l.Config.Socket+`"}]}`)
	}},
}

func oneGeneration() endpoint.Generation {
	var g endpoint.Generation
	for i := range g {
		g[i] = 1
	}
	return g
}

func chmod(t *testing.T, path string, mode os.FileMode) {
	t.Helper()
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

func mountOn(t *testing.T, dir string, flags uintptr, options string) {
	t.Helper()
	if err := unix.Mount("tmpfs", dir, "tmpfs", flags, "mode=0700,"+options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
}

// Each check finds what is wrong, and nothing else fires for the same cause but
// what must.
func TestEachCheckFires(t *testing.T) {
	for _, c := range Checks() {
		if !slices.ContainsFunc(ailments, func(a ailment) bool { return a.check == c.Name }) {
			t.Errorf("%s: nothing makes it fire", c.Name)
		}
	}
	for _, a := range ailments {
		t.Run(a.check+"/"+a.name, func(t *testing.T) {
			l := healthy(t)
			a.cause(t, l)
			r, err := l.Run(t.Context(), a.check)
			if err != nil {
				t.Fatal(err)
			}
			if len(r.Findings) != 1 {
				t.Fatalf("%d findings: %+v", len(r.Findings), r.Findings)
			}
			f := r.Findings[0]
			if f.Check != a.check || f.Severity != a.severity || !strings.Contains(f.What, a.what) || f.Why == "" || f.Do == "" {
				t.Errorf("found %+v, want %s %q", f, a.severity, a.what)
			}
		})
	}
}

// Where nothing is wrong every check is silent.
func TestAHealthyNodeIsSilent(t *testing.T) {
	l := healthy(t)
	l.Config.PodPools = []endpoint.Pool{{Name: "pods"}}
	r, err := l.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range r.Findings {
		t.Errorf("%+v", f)
	}
	if len(r.Checks) != len(Checks()) || r.Daemon != "v1" || r.Worst() != "" {
		t.Errorf("report %+v", r)
	}
}

// With mknetd down everything but what only it knows is looked at.
func TestWithoutTheDaemon(t *testing.T) {
	l := healthy(t)
	l.stop(t)
	l.queue(t, time.Hour)
	netlab.Run(t, "sysctl", "-qw", "net.ipv4.conf."+netlab.UplinkName+".forwarding=0")
	l.write(t, "net.d/05-other.conf", `{"name":"other","type":"bridge"}`)
	r, err := l.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range r.Findings {
		got = append(got, string(f.Severity)+" "+f.Check)
	}
	want := []string{"error daemon", "warning forwarding", "warning cni-active", "note deferred-dels"}
	if !slices.Equal(got, want) || r.Daemon != "down" {
		t.Errorf("found %q, want %q", got, want)
	}
}

func TestUnknownCheck(t *testing.T) {
	if _, err := new(Node).Run(t.Context(), "tea-leaves"); err == nil || !strings.Contains(err.Error(), "tea-leaves") {
		t.Errorf("got %v", err)
	}
}

// The bundle has what it promises, and no secret.
func TestBundle(t *testing.T) {
	l := healthy(t)
	l.write(t, "config.yaml", "socket: "+l.Config.Socket+"\n# a comment\nmytoken: hunter2\ntcp: {key: /etc/k.pem}\n")
	l.write(t, "net.d/30-other.conflist", `{"name":"o","plugins":[{"type":"calico","kubernetes":{"k8s_auth_token":"hunter2"},"list":[{"password":"hunter2"}],"etcd_key_file":"/etc/key"}]}`)
	l.write(t, "net.d/40-broken.conflist", `{"password": "hunter2"`)
	l.write(t, "net.d/mknet/more.conf", `{"type":"tuning","secret":"hunter2"}`)
	r, err := l.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var file bytes.Buffer
	if err := l.Bundle(t.Context(), &file, r); err != nil {
		t.Fatal(err)
	}
	parts := unpack(t, &file)
	for name, want := range map[string]string{
		"report.json": `"cni-injected"`, "config.yaml": "# a comment\nmytoken: (left out)", "cni/10-mknet.conflist": `"portmap"`,
		"cni/30-other.conflist": `"etcd_key_file": "/etc/key"`, "cni/mknet_more.conf": `"tuning"`, "cni/40-broken.conflist": "is no JSON",
		"inventory.json": "mkv0", "metrics.txt": "mknet_ready_bool 1", "events.json": `"instance": "i"`, "endpoints.json": "[]",
		"in-force.json": netlab.UplinkName, "host/ip-route.txt": "default via", "host/ip-link.txt": netlab.UplinkName, "host/sysctl-ipv4.txt": "ip_forward", "errors.txt": "",
	} {
		text, there := parts["mknet/"+name]
		if !there || !strings.Contains(text, want) {
			t.Errorf("%s: is there: %v, lacks %q:\n%.300s", name, there, want, text)
		}
	}
	for name, text := range parts {
		if strings.Contains(text, "hunter2") {
			t.Errorf("%s: has a secret:\n%s", name, text)
		}
	}
}

func unpack(t *testing.T, r io.Reader) map[string]string {
	t.Helper()
	zip, err := gzip.NewReader(r)
	if err != nil {
		t.Fatal(err)
	}
	parts := map[string]string{}
	for files := tar.NewReader(zip); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			return parts
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(files)
		if err != nil {
			t.Fatal(err)
		}
		parts[h.Name] = string(text)
	}
}
