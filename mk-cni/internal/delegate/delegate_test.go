package delegate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	const one = `"ips":[{"address":"10.1.2.3/24","gateway":"10.1.2.1"}]`
	for _, tc := range []struct {
		name, doc, want string
		err             string
	}{
		{"of 1.0.0", `{` + one + `,"routes":[{"dst":"0.0.0.0/0"}]}`, "10.1.2.3/24 10.1.2.1 [0.0.0.0/0]", ""},
		{"of 0.4.0", `{"ips":[{"version":"4","address":"10.1.2.3/24"}],"dns":{}}`, "10.1.2.3/24 invalid IP []", ""},
		{"routes by the gateway", `{` + one + `,"routes":[{"dst":"10.9.1.1/16","gw":"10.1.2.1","table":254,"scope":0},{"dst":"0.0.0.0/0"}]}`, "10.1.2.3/24 10.1.2.1 [10.9.0.0/16 0.0.0.0/0]", ""},
		{"an interface", `{"interfaces":[{"name":"x"}],` + one + `}`, "10.1.2.3/24 10.1.2.1 []", ""},
		{"no address", `{"ips":[]}`, "", "no address"},
		{"null", `{"ips":[null]}`, "", "no address"},
		{"empty", ``, "", "no JSON"},
		{"two addresses", `{"ips":[{"address":"10.1.2.3/24"},{"address":"fd00::2/64"}]}`, "", "2 addresses"},
		{"IPv6", `{"ips":[{"address":"fd00::2/64"}]}`, "", "IPv4 addresses only"},
		{"no prefix length", `{"ips":[{"address":"10.1.2.3"}]}`, "", "no prefix length"},
		{"gateway", `{"ips":[{"address":"10.1.2.3/24","gateway":"x"}]}`, "", "is no address"},
		{"null route", `{` + one + `,"routes":[null]}`, "", "null"},
		{"IPv6 route", `{` + one + `,"routes":[{"dst":"::/0"}]}`, "", "IPv4 routes only"},
		{"another gateway", `{` + one + `,"routes":[{"dst":"10.9.0.0/16","gw":"10.1.2.9"}]}`, "", "gw 10.1.2.9"},
		{"mtu", `{` + one + `,"routes":[{"dst":"10.9.0.0/16","mtu":1300}]}`, "", "mtu 1300"},
		{"advmss", `{` + one + `,"routes":[{"dst":"10.9.0.0/16","advmss":1200}]}`, "", "advmss 1200"},
		{"priority", `{` + one + `,"routes":[{"dst":"10.9.0.0/16","priority":5}]}`, "", "priority 5"},
		{"table", `{` + one + `,"routes":[{"dst":"10.9.0.0/16","table":7}]}`, "", "table 7"},
		{"scope", `{` + one + `,"routes":[{"dst":"10.9.0.0/16","scope":253}]}`, "", "scope 253"},
		{"dns", `{` + one + `,"dns":{"nameservers":["no address"]}}`, "", "its dns"},
	} {
		g, err := parse([]byte(tc.doc))
		switch {
		case tc.err != "":
			if err == nil || !strings.Contains(err.Error(), tc.err) {
				t.Errorf("%s: %v, want an error with %q", tc.name, err, tc.err)
			}
		case err != nil:
			t.Errorf("%s: %v", tc.name, err)
		default:
			if got := fmt.Sprintf("%s %s %v", g.Address, g.Gateway, g.Routes); got != tc.want {
				t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
			}
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"ips":[{"address":"10.1.2.3/24","gateway":"10.1.2.1"}],"routes":[{"dst":"0.0.0.0/0","table":254}],"dns":{"search":["x"]}}`))
	f.Add([]byte(`{"ips":[null],"routes":[null]}`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		g, err := parse(doc)
		if err != nil {
			return
		}
		if !g.Address.Addr().Is4() || g.DNS.Validate() != nil {
			t.Errorf("accepted %q as %+v", doc, g)
		}
		for _, r := range g.Routes {
			if !r.Addr().Is4() || r != r.Masked() {
				t.Errorf("accepted %q with route %s", doc, r)
			}
		}
	})
}

// script is an IPAM plugin made of shell, in a CNI_PATH whose first folder does not
// have it.
func script(t *testing.T, text string) *Plugin {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "ipam"), []byte("#!/bin/sh\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	env := []string{"PATH=" + os.Getenv("PATH"), "CNI_COMMAND=ADD", "CNI_CONTAINERID=c1", "CNI_IFNAME=eth0", "CNI_NETNS=/run/x", "CNI_ARGS=A=B", "OTHER=kept"}
	p, err := Find("ipam", "/nonexistent:"+dir, env, []byte("the whole configuration"))
	if err != nil {
		t.Fatal(err)
	}
	p.Stderr = new(bytes.Buffer)
	return p
}

// The plugin gets the caller's environment with its own verb, and the whole
// configuration; what it says to standard error goes on.
func TestPluginGetsEverything(t *testing.T) {
	p := script(t, `echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME $CNI_NETNS $CNI_ARGS $OTHER" "$(cat)" >&2`)
	if err := p.Do(t.Context(), "STATUS"); err != nil {
		t.Fatal(err)
	}
	if err := p.Of("c2", "net1").Do(t.Context(), "DEL"); err != nil {
		t.Fatal(err)
	}
	host := p.On("/proc/7/ns/net", "lan0")
	for _, q := range []*Plugin{host, host.Of("c2", "net1")} {
		if err := q.Do(t.Context(), "DEL"); err != nil {
			t.Fatal(err)
		}
	}
	want := "STATUS c1 eth0 /run/x A=B kept the whole configuration\nDEL c2 net1   kept the whole configuration\n" +
		"DEL c1.eth0 lan0 /proc/7/ns/net A=B kept the whole configuration\nDEL c2.net1 lan0 /proc/7/ns/net  kept the whole configuration\n"
	if got := p.Stderr.(*bytes.Buffer).String(); got != want {
		t.Errorf("it saw\n%s\nwant\n%s", got, want)
	}
}

func TestAdd(t *testing.T) {
	p := script(t, `echo '{"cniVersion":"1.1.0","ips":[{"address":"10.1.2.3/24"}],"dns":{"nameservers":["1.1.1.1"]}}'`)
	g, err := p.Add(t.Context())
	if err != nil || g.Address.String() != "10.1.2.3/24" || !slices.Equal(g.DNS.Nameservers, []string{"1.1.1.1"}) {
		t.Errorf("%+v, %v", g, err)
	}
}

func TestPluginFails(t *testing.T) {
	for name, tc := range map[string]struct {
		script string
		code   uint
		words  string
	}{
		"error object":     {`echo '{"code":11,"msg":"busy","details":"later"}'; exit 1`, 11, "ipam ipam: ADD: busy; later"},
		"no error object":  {`echo words >&2; exit 3`, 0, `exit status 3, and no error object: "words"`},
		"killed":           {`kill -9 $$`, 0, "killed"},
		"junk":             {`echo junk`, 2, "no JSON"},
		"more than enough": {`yes 0123456789abcdef | head -c 2000000`, 0, "wrote more than"},
	} {
		_, err := script(t, tc.script).Add(t.Context())
		var said *Error
		if !errors.As(err, &said) || said.Code != tc.code || !strings.Contains(err.Error(), tc.words) {
			t.Errorf("%s: %v, want code %d with %q", name, err, tc.code, tc.words)
		}
	}
	for _, name := range []string{"", "..", "a/b", "absent"} {
		var missing *NotFoundError
		if _, err := Find(name, "/usr/bin:/bin", nil, nil); !errors.As(err, &missing) {
			t.Errorf("Find(%q): %v", name, err)
		}
	}
}

// A plugin that hangs, and one that leaves its output to a process that does, end
// with their time.
func TestPluginHangs(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	var said *Error
	if _, err := script(t, `exec sleep 600`).Add(ctx); !errors.As(err, &said) || said.Code != 11 {
		t.Errorf("a plugin that hangs: %v, want code 11", err)
	}
	pid := filepath.Join(t.TempDir(), "pid")
	err := script(t, `sleep 600 & echo $! > `+pid).Do(t.Context(), "DEL")
	if err == nil || !strings.Contains(err.Error(), "WaitDelay") {
		t.Errorf("a plugin whose output stays open: %v", err)
	}
	if data, err := os.ReadFile(pid); err != nil {
		t.Error(err)
	} else if p := pidOf(t, string(data)); p != nil {
		_ = p.Kill()
	}
}

func pidOf(t *testing.T, text string) *os.Process {
	t.Helper()
	var n int
	if _, err := fmt.Sscan(text, &n); err != nil {
		t.Fatal(err)
	}
	p, err := os.FindProcess(n)
	if err != nil {
		t.Fatal(err)
	}
	return p
}
