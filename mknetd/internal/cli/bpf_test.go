package cli

import (
	"strings"
	"testing"

	"mknet/mknetd/internal/config"
	"mknet/mknetd/internal/mapdump"
)

func TestBPF(t *testing.T) {
	dir := t.TempDir()
	var stateDir string
	p := Program{MapDir: func(cfg config.Config) string { stateDir = cfg.StateDir; return dir + "/maps" }}
	ask := func(args ...string) (int, string, string) {
		return run(t, p, append([]string{"bpf"}, args...)...)
	}
	status, out, _ := ask("list")
	for _, m := range mapdump.Maps() {
		if status != ExitOK || !strings.Contains(out, m.Name+" ") || !strings.Contains(out, strings.Join(m.Names(), ",")) {
			t.Errorf("list: status %d, lacks %s\n%s", status, m.Name, out)
		}
	}
	conf := write(t, "stateDir: /var/lib/other\n")
	for _, c := range []struct {
		args   []string
		status int
		words  string
	}{
		{nil, ExitUsage, "a command is needed"},
		{[]string{"dump"}, ExitUsage, "needs the name of one map"},
		{[]string{"dump", "endpoints", "flows"}, ExitUsage, "needs the name of one map"},
		{[]string{"dump", "nothing", "--config", conf}, ExitUsage, `map "nothing": must be one of endpoints,`},
		{[]string{"dump", "endpoints", "--config", conf, "--filter", "mtu=x"}, ExitUsage, "must be a number"},
		{[]string{"dump", "endpoints", "--config", conf, "--limit", "many"}, ExitUsage, "--limit"},
		{[]string{"dump", "endpoints", "--config", conf, "--inner", "1"}, ExitUsage, "has no inner maps"},
		{[]string{"dump", "endpoints", "--config", conf, "-o", "xml"}, ExitUsage, "must be table, json or yaml"},
		{[]string{"dump", "endpoints", "--config", conf}, ExitRefused, "nothing is pinned in " + dir + "/maps"},
	} {
		if status, out, errs := ask(c.args...); status != c.status || !strings.Contains(errs, c.words) || out != "" {
			t.Errorf("%v: status %d, %s%s", c.args, status, out, errs)
		}
	}
	if stateDir != "/var/lib/other" {
		t.Errorf("the maps of state folder %q were looked for", stateDir)
	}
}
