package config

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"mknet/spec/endpoint"
)

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestMissingFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none.yaml")
	got, err := Load(path, false)
	if err != nil {
		t.Fatal(err)
	}
	if got.Pools != endpoint.DefaultPools || got.Quarantine != 30*time.Second || got.ConnectionLimit != 16384 || got.HostAccess != endpoint.Deny || got.Socket != "/run/mknetd.sock" {
		t.Errorf("defaults: %+v", got)
	}
	if _, err := Load(path, true); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a named file that is missing: %v", err)
	}
}

func TestEverything(t *testing.T) {
	path := write(t, `
# a comment
socket: /run/a/b.sock
socketGroup: adm
tcp: {address: "10.0.0.1:7443", certificate: /c.pem, key: /k.pem, clientCA: /ca.pem}
stateDir: /s
deferredDelDir: /d
childPool: 10.64.0.0/12
transitPool: 100.64.0.0/10
egress: ens4
mtu: 1400
resolver:
  nameservers: [169.254.169.254]
  search: [a.example]
metadataAddresses: [169.254.169.254, 169.254.0.1]
hostAccess: allow
podAccess: allow
nodeProbes: allow
connectionLimit: 0
quarantine: 0s
shimGrace: 1s
firewall: legacy
log:
  level: debug
  format: json
`)
	got, err := Load(path, true, Override{"log.level", "error"}, Override{"mtu", "9000"}, Override{"connectionLimit", "7"})
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		Socket: "/run/a/b.sock", SocketGroup: "adm", TCP: &TCP{"10.0.0.1:7443", "/c.pem", "/k.pem", "/ca.pem"},
		StateDir: "/s", DeferredDelDir: "/d", PolicyDir: DefaultPolicyDir,
		Pools:  endpoint.Pools{Child: netip.MustParsePrefix("10.64.0.0/12"), Transit: netip.MustParsePrefix("100.64.0.0/10")},
		Egress: "ens4", MTUBytes: 9000,
		Resolver:   endpoint.DNS{Nameservers: []string{"169.254.169.254"}, Search: []string{"a.example"}},
		Metadata:   []netip.Addr{netip.MustParseAddr("169.254.169.254"), netip.MustParseAddr("169.254.0.1")},
		HostAccess: endpoint.Allow, PodAccess: endpoint.Allow, NodeProbes: endpoint.Allow, ConnectionLimit: 7, ShimGrace: time.Second, AuditInterval: DefaultAuditInterval, Firewall: Legacy,
		Log: Log{Level: 8, Format: "json"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestFaults(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       []string // each is part of the error
	}{
		{"unknown key", "sockett: /run/a", []string{"sockett: is not a key", "did you mean socket?"}},
		{"other case", "childpool: 10.0.0.0/16", []string{"did you mean childPool?"}},
		{"nested unknown key", "log: {levle: info}", []string{"log.levle", "did you mean log.level?"}},
		{"nothing near", "kubernetesNamespaceSelector: x", []string{"is not a key"}},
		{"twice", "mtu: 1400\nmtu: 1500", []string{"already"}},
		{"no YAML", "a: [", []string{"is not YAML"}},
		{"a list", "- a", []string{"keys and values"}},
		{"wrong type", "mtu: many", []string{"mtu: is a string, want a whole number"}},
		{"number for text", "egress: 4", []string{"egress: is a number, want a text"}},
		{"relative socket", "socket: run/a", []string{"socket: \"run/a\" must be a clean absolute path"}},
		{"all at once", "mtu: 5\nhostAccess: maybe\nquarantine: 30\nfirewall: pf", []string{"mtu:", "hostAccess:", "quarantine:", "firewall:"}},
		{"host bits", "childPool: 172.30.0.1/16", []string{"did you mean 172.30.0.0/16"}},
		{"public pool", "childPool: 8.8.8.0/24", []string{"must be private"}},
		{"overlap", "childPool: 10.0.0.0/16\ntransitPool: 10.0.0.0/8", []string{"overlap"}},
		{"bad pool", "childPool: x", []string{"childPool: \"x\" must be an IPv4 prefix"}},
		{"bad resolver", "resolver: {nameservers: [ns]}", []string{"resolver: dns nameserver"}},
		{"metadata in a pool", "metadataAddresses: [172.30.0.2]", []string{"metadataAddresses[0]: 172.30.0.2 lies in"}},
		{"metadata twice", "metadataAddresses: [1.2.3.4, 1.2.3.4]", []string{"[1]: 1.2.3.4 occurs twice"}},
		{"tcp without TLS", "tcp: {address: 'a:1'}", []string{"tcp.certificate: is needed", "tcp.key: is needed", "tcp.clientCA: is needed"}},
		{"endless quarantine", "quarantine: 30000h", []string{"at most 24h"}},
		{"one folder for two", "deferredDelDir: /var/lib/mknet", []string{"must not be stateDir"}},
		{"metrics for the world", "metricsAddress: '0.0.0.0:9464'", []string{"metricsAddress: \"0.0.0.0:9464\" is not a loopback address"}},
		{"metrics at a name", "metricsAddress: 'localhost:9464'", []string{"metricsAddress: \"localhost:9464\" must be an IP address"}},
		{"long interface", "egress: abcdefghijklmnop", []string{"egress:"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := write(t, c.text)
			_, err := Load(path, true)
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("%q: got %v, want an *Error", c.text, err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q: %v\nlacks %q", c.text, err, w)
				}
			}
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("several lines: %q", err)
			}
		})
	}
}

func TestFileThatOthersMayWrite(t *testing.T) {
	path := write(t, "")
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path, true); err == nil || !strings.Contains(err.Error(), "others may write") {
		t.Errorf("got %v", err)
	}
}

func TestEveryKeyCanBeOverridden(t *testing.T) {
	values := map[string]string{
		"mtu": "1400", "connectionLimit": "5", "childPool": "10.0.0.0/16", "transitPool": "100.64.0.0/10", "hostAccess": "allow", "podAccess": "allow", "nodeProbes": "allow",
		"metricsAddress": "[::1]:9464", "quarantine": "1s", "shimGrace": "1s", "auditInterval": "1s", "firewall": "nft", "log.level": "warn", "log.format": "json", "tcp.address": "h:1",
	}
	var all []Override
	for _, k := range Keys() {
		v := values[k.Name]
		if v == "" {
			v = "/" + strings.ReplaceAll(k.Name, ".", "/")
		}
		if k.Name == "egress" || k.Name == "socketGroup" {
			v = "word"
		}
		all = append(all, Override{k.Name, v})
	}
	if len(all) < 18 {
		t.Fatalf("only %d keys: %v", len(all), all)
	}
	got, err := parse("", nil, all)
	if err != nil {
		t.Fatal(err)
	}
	if got.TCP == nil || got.TCP.ClientCA != "/tcp/clientCA" || got.Socket != "/socket" || got.ConnectionLimit != 5 || got.Egress != "word" {
		t.Errorf("got %+v", got)
	}
	for _, o := range []Override{{"resolver", "x"}, {"nothing", "x"}, {"mtu", "x"}, {"resolver.domain", "x"}} {
		if _, err := parse("", nil, []Override{o}); err == nil {
			t.Errorf("override %+v was accepted", o)
		}
	}
}

func TestFlagNames(t *testing.T) {
	for path, want := range map[string]string{"childPool": "child-pool", "tcp.clientCA": "tcp-client-ca", "mtu": "mtu", "log.level": "log-level"} {
		if got := kebab(path); got != want {
			t.Errorf("%s: got %s, want %s", path, got, want)
		}
	}
}

// FuzzParse: no text panics, and what is accepted is a configuration that passes
// the checks of the types it is made of.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"", "mtu: 1400", "log: {level: info}", "a: &a [*a]", "tcp: null", "connectionLimit: null", "resolver: {nameservers: [1.1.1.1]}", "childPool: 10.0.0.0/12", "\x00", "? - a"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		cfg, err := parse("f", data, nil)
		if err != nil {
			return
		}
		if err := cfg.Pools.Validate(); err != nil {
			t.Errorf("%q: pools: %v", data, err)
		}
		if !filepath.IsAbs(cfg.Socket) || !filepath.IsAbs(cfg.StateDir) || cfg.Quarantine < 0 {
			t.Errorf("%q: %+v", data, cfg)
		}
	})
}
