package suite

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"mknet/tests/netlab"
)

// IPAMDouble is the delegate of the delegation checks: the plugin double under
// another name. SetTools says where it is.
var ipamDoubleDir string

// SetTools names the folder that holds the suite's own helper binaries (the IPAM
// double) and the reference plugins.
func SetTools(dir string) { ipamDoubleDir = dir }

// pluginDirs is CNI_PATH: the plugin's own folder, then the tools.
func pluginDirs(d Driver) []string {
	dirs := []string{filepath.Dir(d.Plugin())}
	if ipamDoubleDir != "" && ipamDoubleDir != dirs[0] {
		dirs = append(dirs, ipamDoubleDir)
	}
	return dirs
}

// SetUpHost gives the private host an egress with a default route, as a real
// host has: up0, 198.51.100.10/24, by 198.51.100.1.
func SetUpHost() error {
	for _, cmd := range [][]string{
		{"ip", "netns", "add", "internet"},
		{"ip", "link", "add", netlab.UplinkName, "type", "veth", "peer", "name", "inet0", "netns", "internet"},
		{"ip", "addr", "add", netlab.HostAddr + "/24", "dev", netlab.UplinkName},
		{"ip", "link", "set", netlab.UplinkName, "up"},
		{"ip", "-n", "internet", "addr", "add", netlab.InternetAddr + "/24", "dev", "inet0"},
		{"ip", "-n", "internet", "link", "set", "inet0", "up"},
		{"ip", "route", "add", "default", "via", netlab.InternetAddr, "dev", netlab.UplinkName},
	} {
		if _, err := netlab.Try(cmd[0], cmd[1:]...); err != nil {
			return fmt.Errorf("set up the host's egress: %w", err)
		}
	}
	return nil
}

// prime does one ADD and one DEL, so that what a plugin makes once and for all (a
// bridge, the tables of iptables) is there before anything is compared.
func prime(d Driver) error {
	p := newProbe(d, Check{}, Versions[len(Versions)-1])
	p.Network = "prime"
	done := make(chan struct{})
	go func() {
		defer close(done)
		a := p.attachment()
		p.result(p.call("ADD", a).Do())
		p.succeeds("DEL", p.call("DEL", a).Do())
	}()
	<-done
	for _, ns := range p.namespaces {
		p.removeNamespace(ns)
	}
	if len(p.failures) > 0 {
		return fmt.Errorf("%s: first ADD and DEL: %s", d.Name(), strings.Join(p.failures, "; "))
	}
	return nil
}

// scrub brings the private host back to the snapshot by force: links,
// namespaces, firewall rules and the state folders of plugins.
func scrub(before netlab.Snapshot) error {
	for _, line := range before.Left() {
		kind, what, _ := strings.Cut(line, ": ")
		switch kind {
		case "link":
			_, _ = netlab.Try("ip", "link", "del", what) // may have gone with its peer
		case "netns":
			if err := netlab.RemoveNamespace(what); err != nil {
				return err
			}
		case "rule":
			_, pref, _ := strings.Cut(what, ":")
			_, _ = netlab.Try("ip", append([]string{"rule", "del"}, strings.Fields(pref)...)...)
		}
	}
	for _, flavour := range []string{"iptables-nft", "iptables-legacy"} {
		if _, err := exec.LookPath(flavour); err != nil {
			continue
		}
		if err := emptyTables(flavour); err != nil {
			return err
		}
	}
	for _, dir := range []string{"/var/lib/cni"} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return fmt.Errorf("empty %s: %w", dir, err)
		}
		for _, e := range entries {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return fmt.Errorf("empty %s: %w", dir, err)
			}
		}
	}
	return nil
}

// emptyTables removes every rule, and every chain that somebody made, of a flavour.
func emptyTables(flavour string) error {
	saved, err := netlab.SavedRules(flavour + "-save")
	if err != nil {
		return err
	}
	var tables []string
	for line := range strings.Lines(saved) {
		if strings.HasPrefix(line, "*") {
			tables = append(tables, strings.TrimSpace(line)+"\nCOMMIT\n")
		}
	}
	if len(tables) == 0 {
		return nil
	}
	cmd := exec.Command(flavour+"-restore", "-w") // without --noflush it empties what it is told of
	cmd.Stdin = strings.NewReader(strings.Join(tables, ""))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("empty the tables of %s: %w: %s", flavour, err, out)
	}
	return nil
}

// rulesSince lists the iptables rules that appeared since the snapshot, by flavour
// and table, in the form that iptables -A takes.
func rulesSince(before netlab.Snapshot) ([]rule, error) {
	var out []rule
	for _, save := range []string{"iptables-nft", "iptables-legacy"} {
		text, err := netlab.SavedRules(save + "-save")
		if err != nil {
			continue // not installed
		}
		table := ""
		for line := range strings.Lines(text) {
			line = strings.TrimSpace(line)
			switch {
			case strings.HasPrefix(line, "*"):
				table = line[1:]
			case strings.HasPrefix(line, "-A ") && !before[save+"-save: "+line]:
				out = append(out, rule{save, table, line})
			}
		}
	}
	return out, nil
}

// rule is one firewall rule as iptables-save prints it.
type rule struct{ flavour, table, line string }

// remove deletes exactly this rule.
func (r rule) remove() error {
	text := fmt.Sprintf("*%s\n-D%s\nCOMMIT\n", r.table, strings.TrimPrefix(r.line, "-A"))
	cmd := exec.Command(r.flavour+"-restore", "--noflush", "-w")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s-restore: %w: %s: %s", r.flavour, err, out, text)
	}
	return nil
}

// saveRules remembers all rules of a flavour, order included; the returned
// function puts them back.
func saveRules(flavour string) (restore func() error, err error) {
	saved, err := netlab.Try(flavour + "-save")
	if err != nil {
		return nil, err
	}
	return func() error {
		cmd := exec.Command(flavour+"-restore", "-w")
		cmd.Stdin = strings.NewReader(saved + "\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s-restore: %w: %s", flavour, err, out)
		}
		return nil
	}, nil
}

// LoadConf reads a plugin's configuration: one plugin's object, or a list whose
// first plugin is taken.
func LoadConf(path string) (Conf, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var list struct {
		Plugins []Conf `json:"plugins"`
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(list.Plugins) > 0 {
		return list.Plugins[0], nil
	}
	var one Conf
	if err := json.Unmarshal(raw, &one); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return one, nil
}

// tree remembers which files lie below some folders.
type tree struct {
	roots []string
	seen  map[string]bool
}

func newTree(roots ...string) tree {
	t := tree{roots: roots}
	t.seen = t.walk()
	return t
}

func (t tree) walk() map[string]bool {
	seen := map[string]bool{}
	for _, root := range t.roots {
		_ = filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
			if err == nil {
				seen[path] = true
			}
			return nil
		})
	}
	return seen
}

// added lists what is there now and was not.
func (t tree) added() []string {
	var out []string
	for path := range t.walk() {
		if !t.seen[path] {
			out = append(out, path)
		}
	}
	return out
}
