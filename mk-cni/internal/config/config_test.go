package config

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/spec/endpoint"
)

// conf is a minimal configuration with further members.
func conf(members string) []byte {
	if members != "" {
		members = "," + members
	}
	return []byte(`{"cniVersion":"1.1.0","name":"mknet","type":"mk-cni"` + members + `}`)
}

func parse(t *testing.T, members string) (Config, []Problem) {
	t.Helper()
	c, problems, err := Parse(conf(members))
	if err != nil {
		t.Fatalf("Parse(%s): %v", members, err)
	}
	return c, problems
}

func TestDefaults(t *testing.T) {
	c, problems := parse(t, "")
	want := Config{
		CNIVersion: "1.1.0", Name: "mknet", Type: "mk-cni",
		Daemon: Daemon{Network: "unix", Address: "/run/mknetd.sock"}, CacheDir: "/var/lib/cni/multikernel",
		Mode: endpoint.Multikernel, HostAccess: endpoint.Deny, PodAccess: endpoint.Deny, PublishPorts: true,
	}
	if !reflect.DeepEqual(c, want) || len(problems) != 0 {
		t.Errorf("Parse = %+v, %v\nwant %+v", c, problems, want)
	}
}

func TestKeys(t *testing.T) {
	for _, tc := range []struct {
		members string
		got     func(Config) any
		want    any
	}{
		{`"socket":"/run/x.sock"`, func(c Config) any { return c.Daemon.String() }, "unix:///run/x.sock"},
		{`"daemon-endpoint":"unix:///run/y.sock"`, func(c Config) any { return c.Daemon.String() }, "unix:///run/y.sock"},
		{
			`"daemon-endpoint":"tcp://[::1]:7443","tls-ca-file":"/a","tls-cert-file":"/b","tls-key-file":"/c"`,
			func(c Config) any { return c.Daemon },
			Daemon{"tcp", "[::1]:7443", "/a", "/b", "/c"},
		},
		{`"cacheDir":"/var/cache/x"`, func(c Config) any { return c.CacheDir }, "/var/cache/x"},
		{`"mode":"veth"`, func(c Config) any { return c.Mode }, endpoint.Veth},
		{`"mtu":1400`, func(c Config) any { return c.MTUBytes }, 1400},
		{`"mtu":0`, func(c Config) any { return c.MTUBytes }, 0},
		{`"mtu":null`, func(c Config) any { return c.MTUBytes }, 0},
		{`"log-file":"/var/log/mk-cni.log"`, func(c Config) any { return c.LogFile }, "/var/log/mk-cni.log"},
		{`"enable-debug":true`, func(c Config) any { return c.Debug }, true},
		{`"hostAccess":"allow"`, func(c Config) any { return c.HostAccess }, endpoint.Allow},
		{`"podAccess":"allow"`, func(c Config) any { return c.PodAccess }, endpoint.Allow},
		{`"publishPorts":false`, func(c Config) any { return c.PublishPorts }, false},
		{
			`"dns":{"nameservers":["1.1.1.1"],"search":["x.local"]}`, func(c Config) any { return c.EffectiveDNS() },
			endpoint.DNS{Nameservers: []string{"1.1.1.1"}, Search: []string{"x.local"}},
		},
		{`"mode":"veth","ipMasq":true,"ipam":{"type":"host-local","subnet":"10.0.0.0/8"}`, func(c Config) any { return []any{c.IPAMType, *c.IPMasq} }, []any{"host-local", true}},
		{`"mode":"veth","ipam":{"type":"dhcp"},"ipamLink":"lan0.5"`, func(c Config) any { return c.IPAMLink }, "lan0.5"},
		{`"mode":"veth","ipamLink":""`, func(c Config) any { return c.IPAMLink }, ""},
		{`"ipam":{},"ipMasq":true,"dns":{}`, func(c Config) any { return c.IPAMType }, ""},
		// what runtimes add
		{
			`"args":{"cni":{"labels":[]}},"capabilities":{"dns":true},"disableCheck":true,"_x":1,"cni.dev/new":{},"deviceID":"a","pciBusID":"b"`,
			func(c Config) any { return c.MTUBytes }, 0,
		},
		// containerd writes Go field names, libcni lower case
		{
			`"runtimeConfig":{"dns":{"Servers":["10.96.0.10"],"Searches":["svc.local"],"Options":["ndots:5"]}}`, func(c Config) any { return c.EffectiveDNS() },
			endpoint.DNS{Nameservers: []string{"10.96.0.10"}, Search: []string{"svc.local"}, Options: []string{"ndots:5"}},
		},
		{
			`"runtimeConfig":{"Bandwidth":{"IngressRate":1000,"IngressBurst":2000,"EgressRate":3000,"EgressBurst":4000}}`, func(c Config) any { return *c.Runtime.Bandwidth },
			endpoint.Bandwidth{IngressRate: 1000, IngressBurst: 2000, EgressRate: 3000, EgressBurst: 4000},
		},
		{`"runtimeConfig":{"bandwidth":{"ingressRate":0}}`, func(c Config) any { return c.Runtime.Bandwidth == nil }, true},
		{
			`"runtimeConfig":{"ips":["172.30.0.6/24"],"mac":"00:00:00:00:00:00","portMappings":[],"aliases":{},"dns":null}`,
			func(c Config) any { return c.Runtime.IPs },
			[]netip.Addr{netip.MustParseAddr("172.30.0.6")},
		},
	} {
		c, problems := parse(t, tc.members)
		if got := tc.got(c); !reflect.DeepEqual(got, tc.want) || len(problems) != 0 {
			t.Errorf("%s\n got %+v, problems %v\nwant %+v", tc.members, got, problems, tc.want)
		}
	}
}

// C30: the runtime's DNS goes before the configuration's, the daemon's comes last.
func TestC30_DNSPrecedence(t *testing.T) {
	for _, tc := range []struct{ members, want string }{
		{`"dns":{"nameservers":["1.1.1.1"]},"runtimeConfig":{"dns":{"servers":["2.2.2.2"]}}`, "2.2.2.2"},
		{`"dns":{"nameservers":["1.1.1.1"]},"runtimeConfig":{"dns":{"Servers":null,"Searches":null,"Options":null}}`, "1.1.1.1"},
		{`"dns":{"nameservers":["1.1.1.1"]}`, "1.1.1.1"},
		{``, ""},
	} {
		c, problems := parse(t, tc.members)
		if got := strings.Join(c.EffectiveDNS().Nameservers, " "); got != tc.want || len(problems) != 0 {
			t.Errorf("%s: servers %q, problems %v; want %q", tc.members, got, problems, tc.want)
		}
	}
}

func TestProblemsNameKeyValueAndReason(t *testing.T) {
	long := strings.Repeat("x", 108)
	for _, tc := range []struct {
		members string
		code    uint
		has     []string
	}{
		{`"sockett":"/x"`, types.ErrUnsupportedField, []string{"sockett", `"/x"`, `did you mean "socket"`}},
		{`"MTU":1400`, types.ErrUnsupportedField, []string{"MTU", "1400", `did you mean "mtu"`}},
		{`"cachedir":"/x"`, types.ErrUnsupportedField, []string{`did you mean "cacheDir"`}},
		{`"log_file":"/x"`, types.ErrUnsupportedField, []string{`did you mean "log-file"`}},
		{`"bridge":"cni0"`, types.ErrUnsupportedField, []string{"bridge", "no such key"}},
		{`"mtu":1400,"mtu":1500`, types.ErrInvalidNetworkConfig, []string{"mtu", "twice"}},
		{`"mtu":100`, types.ErrInvalidNetworkConfig, []string{"mtu", "100", "576"}},
		{`"mtu":"1400"`, types.ErrInvalidNetworkConfig, []string{"mtu", "whole number"}},
		{`"mtu":1.5`, types.ErrInvalidNetworkConfig, []string{"mtu", "1.5"}},
		{`"socket":"run/x"`, types.ErrInvalidNetworkConfig, []string{"socket", "absolute"}},
		{`"socket":"/run/../x"`, types.ErrInvalidNetworkConfig, []string{"socket", "absolute"}},
		{`"socket":"/` + long + `"`, types.ErrInvalidNetworkConfig, []string{"socket", "107"}},
		{`"socket":1`, types.ErrInvalidNetworkConfig, []string{"socket", "string"}},
		{`"socket":"/a","daemon-endpoint":"unix:///b"`, types.ErrInvalidNetworkConfig, []string{"daemon-endpoint", "one of them"}},
		{`"daemon-endpoint":"http://x"`, types.ErrInvalidNetworkConfig, []string{"unix:// or tcp://"}},
		{`"daemon-endpoint":"tcp://x"`, types.ErrInvalidNetworkConfig, []string{"HOST:PORT"}},
		{`"daemon-endpoint":"tcp://x:1"`, types.ErrInvalidNetworkConfig, []string{"mutual TLS"}},
		{`"tls-ca-file":"/x"`, types.ErrInvalidNetworkConfig, []string{"tcp://"}},
		{`"cacheDir":"/"`, types.ErrInvalidNetworkConfig, []string{"cacheDir"}},
		{`"mode":"bridge"`, types.ErrInvalidNetworkConfig, []string{"mode", "multikernel", "veth"}},
		{`"enable-debug":"yes"`, types.ErrInvalidNetworkConfig, []string{"enable-debug", "true or false"}},
		{`"hostAccess":"maybe"`, types.ErrInvalidNetworkConfig, []string{"hostAccess", "deny"}},
		{`"dns":{"nameservers":["ns1"]}`, types.ErrInvalidNetworkConfig, []string{"dns", "ns1"}},
		{`"dns":{"search":["a\nnameserver 6.6.6.6"]}`, types.ErrInvalidNetworkConfig, []string{"dns", "white space"}},
		{`"ipam":{"type":"host-local"}`, types.ErrUnsupportedField, []string{"ipam.type", "host-local", "pool"}},
		{`"ipamLink":"lan0"`, types.ErrUnsupportedField, []string{"ipamLink", "lan0", "veth"}},
		{`"mode":"veth","ipamLink":"lan0"`, types.ErrInvalidNetworkConfig, []string{"ipamLink", "without", "ipam"}},
		{`"mode":"veth","ipam":{"type":"dhcp"},"ipamLink":"../lan0"`, types.ErrInvalidNetworkConfig, []string{"ipamLink", "name of a link"}},
		{`"mode":"veth","ipam":{"type":"dhcp"},"ipamLink":"abcdefghijklmnop"`, types.ErrInvalidNetworkConfig, []string{"ipamLink", "15"}},
		{`"ipMasq":false`, types.ErrUnsupportedField, []string{"ipMasq", "false"}},
		{`"runtimeConfig":{"mac":"02:00:00:00:00:01"}`, types.ErrUnsupportedField, []string{"runtimeConfig.mac", "02:00:00:00:00:01"}},
		{`"runtimeConfig":{"mac":"zz"}`, types.ErrInvalidNetworkConfig, []string{"runtimeConfig.mac", "zz"}},
		{`"runtimeConfig":{"ips":["fd00::1/64"]}`, types.ErrUnsupportedField, []string{"runtimeConfig.ips", "fd00::1"}},
		{`"runtimeConfig":{"ips":["x"]}`, types.ErrInvalidNetworkConfig, []string{"runtimeConfig.ips", "x"}},
		{`"runtimeConfig":{"portMappings":[{"hostPort":80}]}`, types.ErrUnsupportedField, []string{"runtimeConfig.portMappings", "hostPort", "portmap"}},
		{`"runtimeConfig":{"bandwidth":{"ingressRate":-1}}`, types.ErrInvalidNetworkConfig, []string{"runtimeConfig.bandwidth", "-1"}},
		{`"runtimeConfig":{"aliases":{"n":["a"]}}`, types.ErrUnsupportedField, []string{"runtimeConfig.aliases", "capabilit"}},
		{`"runtimeConfig":[1]`, types.ErrInvalidNetworkConfig, []string{"runtimeConfig", "object"}},
		{`"cni.dev/valid-attachments":{}`, types.ErrInvalidNetworkConfig, []string{"cni.dev/valid-attachments"}},
		{`"cni.dev/attachments":[{"containerID":"a"}]`, types.ErrInvalidNetworkConfig, []string{"ifname"}},
	} {
		_, problems := parse(t, tc.members)
		if len(problems) != 1 || problems[0].Code != tc.code {
			t.Errorf("%s: problems %+v, want one with code %d", tc.members, problems, tc.code)
			continue
		}
		for _, s := range tc.has {
			if !strings.Contains(problems[0].String(), s) {
				t.Errorf("%s: %q does not say %q", tc.members, problems[0], s)
			}
		}
	}
}

// What is wrong never keeps a lenient reader from the rest.
func TestProblemsLeaveTheDefaultsStanding(t *testing.T) {
	c, problems := parse(t, `"mtu":"x","socket":7,"cacheDir":"rel","mode":1,"unknown":1,"hostAccess":[],"log-file":"/l"`)
	if len(problems) != 6 || c.MTUBytes != 0 || c.Daemon.Address != "/run/mknetd.sock" || c.CacheDir != DefaultCacheDir || c.Mode != endpoint.Multikernel || c.LogFile != "/l" {
		t.Errorf("Parse = %+v with %d problems; want the defaults and 6", c, len(problems))
	}
	e := &Error{Problems: problems}
	if n := strings.Count(e.Details(), ";"); n != 4 {
		t.Errorf("details %q have %d separators, want all five further problems", e.Details(), n)
	}
}

func TestNotAnObject(t *testing.T) {
	for _, in := range []string{"", "null", "[]", "1", `"x"`, "{", `{"a"}`, `{"a":}`, `{"a":1}{}`, `{"a":1} x`, "\x00"} {
		if _, _, err := Parse([]byte(in)); err == nil {
			t.Errorf("Parse(%q) accepted", in)
		}
	}
}

// C28: both keys, either, none and an empty list are different things.
func TestC28_GCKeys(t *testing.T) {
	a := types.GCAttachment{ContainerID: "a", IfName: "eth0"}
	b := types.GCAttachment{ContainerID: "b", IfName: "eth0"}
	const listA, listB = `[{"containerID":"a","ifname":"eth0"}]`, `[{"containerID":"b","ifname":"eth0"}]`
	for _, tc := range []struct {
		members string
		want    *[]types.GCAttachment
	}{
		{``, nil},
		{`"cni.dev/valid-attachments":null`, nil},
		{`"cni.dev/valid-attachments":[]`, &[]types.GCAttachment{}},
		{`"cni.dev/attachments":[]`, &[]types.GCAttachment{}},
		{`"cni.dev/valid-attachments":` + listA, &[]types.GCAttachment{a}},
		{`"cni.dev/attachments":` + listA, &[]types.GCAttachment{a}},
		{`"cni.dev/attachments":` + listA + `,"cni.dev/valid-attachments":` + listB, &[]types.GCAttachment{a, b}},
	} {
		c, problems := parse(t, tc.members)
		if !reflect.DeepEqual(c.ValidAttachments, tc.want) || len(problems) != 0 {
			t.Errorf("%s: %v, problems %v; want %v", tc.members, c.ValidAttachments, problems, tc.want)
		}
	}
}

func TestArgs(t *testing.T) {
	pod := endpoint.Pod{Namespace: "default", Name: "p1", UID: "u-1"}
	for _, tc := range []struct {
		in       string
		want     Args
		problems int
	}{
		{"", Args{}, 0},
		{"IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=p1;K8S_POD_INFRA_CONTAINER_ID=c;K8S_POD_UID=u-1", Args{Pod: pod, InfraContainerID: "c"}, 0},
		{"K8S_POD_UID=u-1;K8S_POD_NAME=p1;FOO=BAR;K8S_POD_NAMESPACE=default;IgnoreUnknown=true", Args{Pod: pod}, 0},
		{"FOO=BAR;BAZ=1", Args{}, 2},
		{"IgnoreUnknown=0;FOO=BAR", Args{}, 1},
		{"IgnoreUnknown=perhaps", Args{}, 1},
		{"novalue", Args{}, 1},
		{"IP=172.30.0.6", Args{IP: netip.MustParseAddr("172.30.0.6")}, 0},
		{"IP=172.30.0.6/30;", Args{IP: netip.MustParseAddr("172.30.0.6")}, 0},
		{"IP=x", Args{}, 1},
		{"GATEWAY=10.0.0.1", Args{Gateway: "10.0.0.1"}, 0},
		{"IgnoreUnknown=1;GATEWAY=10.0.0.1", Args{}, 0},
		{"MAC=00:00:00:00:00:00", Args{}, 0},
		{"MAC=02:00:00:00:00:01", Args{MAC: []byte{2, 0, 0, 0, 0, 1}}, 0},
		{"MAC=02", Args{}, 1},
		{"K8S_POD_NAME=a b", Args{}, 1},
		{"K8S_POD_NAME=" + strings.Repeat("x", 254), Args{}, 1},
	} {
		got, problems := ParseArgs(tc.in)
		if !reflect.DeepEqual(got, tc.want) || len(problems) != tc.problems {
			t.Errorf("ParseArgs(%q) = %+v, %v; want %+v, %d problems", tc.in, got, problems, tc.want, tc.problems)
		}
		for _, p := range problems {
			if p.Code != types.ErrInvalidEnvironmentVariables || !strings.Contains(p.Key, "CNI_ARGS") {
				t.Errorf("ParseArgs(%q): problem %+v does not name CNI_ARGS", tc.in, p)
			}
		}
	}
	static := Args{Gateway: "10.0.0.1"}
	if a, b, c := static.VethProblems(true), static.VethProblems(false), static.MultikernelProblems(); len(a) != 0 || len(b) != 1 || len(c) != 1 {
		t.Errorf("GATEWAY with an IPAM plugin, without, and for a child: %v, %v, %v; want none, one, one", a, b, c)
	}
	if p := (Args{MAC: []byte{2, 0, 0, 0, 0, 1}}).MultikernelProblems(); len(p) != 1 || p[0].Code != types.ErrUnsupportedField {
		t.Errorf("a MAC for a TUN: %v, want code 2", p)
	}
}

func TestAddress(t *testing.T) {
	a, b := netip.MustParseAddr("172.30.0.6"), netip.MustParseAddr("172.30.0.10")
	for _, tc := range []struct {
		name     string
		ips      []netip.Addr
		arg      netip.Addr
		want     netip.Addr
		problems int
	}{
		{"none", nil, netip.Addr{}, netip.Addr{}, 0},
		{"capability", []netip.Addr{a}, netip.Addr{}, a, 0},
		{"argument", nil, a, a, 0},
		{"both agree", []netip.Addr{a}, a, a, 0},
		{"both differ", []netip.Addr{b}, a, a, 1},
		{"two", []netip.Addr{a, b}, netip.Addr{}, a, 1},
	} {
		got, problems := Address(Config{Runtime: Runtime{IPs: tc.ips}}, Args{IP: tc.arg})
		if got != tc.want || len(problems) != tc.problems {
			t.Errorf("%s: %v, %v; want %v, %d problems", tc.name, got, problems, tc.want, tc.problems)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, members := range []string{
		"", `"socket":"/run/x.sock","cacheDir":"/var/x","mtu":1400,"mode":"veth","ipam":{"type":"static"}`,
		`"daemon-endpoint":"tcp://h:1","tls-ca-file":"/a","tls-cert-file":"/b","tls-key-file":"/c"`,
		`"runtimeConfig":{"Dns":{"Servers":["1.1.1.1"]},"mac":"02:00:00:00:00:01","ips":["172.30.0.6/30"],"bandwidth":{"ingressRate":1}}`,
		`"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"}],"prevResult":{"ips":[null]}`,
		`"mtu":1e9,"mtu":null,"_x":[[[]]],"sokcet":"/x"`,
	} {
		f.Add(conf(members))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, problems, err := Parse(data)
		if err != nil {
			if json.Valid(data) && strings.HasPrefix(strings.TrimSpace(string(data)), "{") {
				t.Errorf("refused a JSON object: %v", err)
			}
			return
		}
		if !json.Valid(data) {
			t.Error("accepted what is no JSON")
		}
		// A configuration that ADD accepts holds only values in range.
		if len(problems) > 0 {
			for _, p := range problems {
				if p.Code == 0 || p.Key == "" && !strings.Contains(string(data), `""`) || p.Reason == "" || len(p.Value) > 200 {
					t.Errorf("problem %+v is not usable", p)
				}
			}
			return
		}
		if c.MTUBytes != 0 && endpoint.ValidateMTU(c.MTUBytes) != nil || len(c.Daemon.Address) > 300 || c.CacheDir[0] != '/' {
			t.Errorf("accepted %+v", c)
		}
		if err := c.EffectiveDNS().Validate(); err != nil {
			t.Errorf("accepted dns: %v", err)
		}
	})
}

func FuzzArgs(f *testing.F) {
	for _, s := range []string{"", "IgnoreUnknown=1;K8S_POD_NAME=p", "MAC=02:00:00:00:00:01;IP=1.2.3.4/8", "A=B;;C", "=;=", "IgnoreUnknown=2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, problems := ParseArgs(s)
		for _, p := range problems {
			if p.Code == 0 || p.Reason == "" {
				t.Errorf("problem %+v is not usable", p)
			}
		}
		for _, word := range []string{a.Pod.Name, a.Pod.Namespace, a.Pod.UID, a.InfraContainerID} {
			if len(word) > 253 || strings.ContainsAny(word, "\n\r\t ;") {
				t.Errorf("ParseArgs(%q) kept %q", s, word)
			}
		}
		if a.MAC != nil && len(a.MAC) != 6 {
			t.Errorf("MAC %v", a.MAC)
		}
	})
}

func ExampleParse() {
	_, problems, _ := Parse([]byte(`{"name":"mknet","type":"mk-cni","sokcet":"/run/mknetd.sock"}`))
	fmt.Println(problems[0])
	// Output: sokcet "/run/mknetd.sock": mk-cni has no such key, did you mean "socket"
}
