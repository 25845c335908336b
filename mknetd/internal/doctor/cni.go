package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// network is one file of the CNI folder.
type network struct {
	file    string
	name    string
	plugins []plugin
	err     error // it cannot be used

	inlinedOnly  bool // no plugins are added from a folder
	disableCheck bool
}

type plugin struct {
	Type           string `json:"type"`
	Mode           string `json:"mode"`
	Socket         string `json:"socket"`
	DaemonEndpoint string `json:"daemon-endpoint"`
	IPAM           struct {
		Type string `json:"type"`
	} `json:"ipam"`
}

// ours are the names that mk-cni is installed as.
var ours = []string{"mk-cni", "multikernel"}

func (p plugin) ours() bool { return slices.Contains(ours, p.Type) }

func (n network) ours() bool { return slices.ContainsFunc(n.plugins, plugin.ours) }

// networks reads the folder as libcni does (libcni/conf.go, ConfFiles): the first
// that is valid, by name, is the network that containerd, CRI-O and podman take
// where none is asked for.
func (n *Node) networks() ([]network, error) {
	entries, err := os.ReadDir(n.confDir())
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all []network
	for _, e := range entries { // sorted by name
		if ext := filepath.Ext(e.Name()); !e.IsDir() && slices.Contains([]string{".conf", ".conflist", ".json"}, ext) {
			all = append(all, readNetwork(filepath.Join(n.confDir(), e.Name())))
		}
	}
	return all, nil
}

func readNetwork(file string) network {
	out := network{file: file}
	data, err := os.ReadFile(file)
	if err != nil {
		out.err = err
		return out
	}
	var doc struct {
		plugin
		Name    string   `json:"name"`
		Plugins []plugin `json:"plugins"`
		Inlined bool     `json:"loadOnlyInlinedPlugins"`
		// A string too in what people write; runtimes take "true" and "yes" for it.
		DisableCheck any `json:"disableCheck"`
	}
	if err := json.Unmarshal(data, &doc); err != nil {
		out.err = err
		return out
	}
	out.name, out.plugins, out.inlinedOnly = doc.Name, doc.Plugins, doc.Inlined
	out.disableCheck = doc.DisableCheck == true || doc.DisableCheck == "true"
	if filepath.Ext(file) != ".conflist" && len(doc.Plugins) == 0 {
		out.plugins = []plugin{doc.plugin}
	}
	switch {
	case out.name == "":
		out.err = fmt.Errorf("has no name")
	case len(out.plugins) == 0 && out.inlinedOnly:
		out.err = fmt.Errorf("has no plugins")
	}
	return out
}

// active is the network that runtimes load first; nil where there is none.
func active(all []network) *network {
	for i := range all {
		if all[i].err == nil {
			return &all[i]
		}
	}
	return nil
}

func checkCNIActive(_ context.Context, n *Node) []Finding {
	all, err := n.networks()
	if err != nil {
		return unlooked("CNI folder", err)
	}
	var found []Finding
	mine := ""
	for _, w := range all {
		if w.err != nil {
			found = append(found, Finding{
				Severity: Warning, What: fmt.Sprintf("%s cannot be used: %v", w.file, w.err), Why: "runtimes skip it and take the next file, or fail", Do: "correct or remove it",
			})
		}
		if mine == "" && w.ours() {
			mine = w.file
		}
	}
	first := active(all)
	switch {
	case first == nil:
		found = append(found, Finding{
			Severity: Note, What: "no network is configured in " + n.confDir(), Why: "runtimes call no plugin there; those that have their own folder, or call mk-cni themselves, do not care", Do: "the README's section on installing has a network for mknet",
		})
	case !first.ours() && mine != "":
		found = append(found, Finding{
			Severity: Warning, What: fmt.Sprintf("the active network is %q of %s, not mknet's of %s", first.name, first.file, mine),
			Why: "containerd, CRI-O and podman take the first file by name: containers get the other network unless they name mknet's", Do: fmt.Sprintf("mv %s %s", mine, filepath.Join(n.confDir(), "00-"+strings.TrimLeft(filepath.Base(mine), "0123456789-"))),
		})
	case !first.ours():
		found = append(found, Finding{Severity: Note, What: fmt.Sprintf("the active network is %q of %s, and no file names mk-cni", first.name, first.file), Why: "runtimes do not call mknet by themselves", Do: "add a network of mknet, see the README"})
	}
	return found
}

func checkCNIIgnored(_ context.Context, n *Node) []Finding {
	all, err := n.networks()
	first := active(all)
	if err != nil || first == nil {
		return nil // said elsewhere
	}
	var found []Finding
	for _, w := range all {
		if w.err != nil || w.file == first.file || !w.ours() || filepath.Ext(w.file) == ".conflist" && w.name != first.name {
			continue // a network of its own, which others may name
		}
		found = append(found, Finding{
			Severity: Warning, What: fmt.Sprintf("%s (network %q) is ignored beside %s", w.file, w.name, first.file),
			Why: "runtimes take the first file by name; what you change in this one has no effect", Do: "remove it, or make it the first",
		})
	}
	return found
}

func checkCNIInjected(_ context.Context, n *Node) []Finding {
	all, _ := n.networks() // an error is said elsewhere
	var found []Finding
	for _, w := range all {
		if w.err != nil || !w.ours() || w.inlinedOnly {
			continue
		}
		files, err := filepath.Glob(filepath.Join(n.confDir(), w.name, "*.conf"))
		if err != nil || len(files) == 0 {
			continue
		}
		found = append(found, Finding{
			Severity: Warning, What: fmt.Sprintf("network %q of %s also runs the plugins of %s", w.name, w.file, strings.Join(files, ", ")),
			Why: "runtimes with libcni 1.3 or newer append every *.conf of the folder that is called like the network: what is there runs as root at each ADD",
			Do:  `remove the files, or set "loadOnlyInlinedPlugins": true in ` + w.file,
		})
	}
	return found
}

func checkCNIBinaries(_ context.Context, n *Node) []Finding {
	all, _ := n.networks() // an error is said elsewhere
	var found []Finding
	for _, w := range all {
		if w.err != nil || !w.ours() {
			continue
		}
		for _, p := range w.plugins {
			for _, name := range []string{p.Type, p.IPAM.Type} {
				if name == "" || n.installed(name) {
					continue
				}
				found = append(found, Finding{
					Severity: Error, What: fmt.Sprintf("plugin %s of %s is in none of %s", name, w.file, strings.Join(n.binDirs(), ", ")),
					Why: "every ADD of this network fails, and every DEL too", Do: "install it (mk-cni: the README; others: the package of the CNI plugins), or take it out of the network",
				})
			}
		}
	}
	return found
}

func (n *Node) installed(name string) bool {
	for _, dir := range n.binDirs() {
		if fi, err := os.Stat(filepath.Join(dir, name)); err == nil && fi.Mode().IsRegular() && fi.Mode().Perm()&0o111 != 0 {
			return true
		}
	}
	return false
}

func checkCNICheck(_ context.Context, n *Node) []Finding {
	all, _ := n.networks() // an error is said elsewhere
	var found []Finding
	for _, w := range all {
		if w.err == nil && w.ours() && w.disableCheck {
			found = append(found, Finding{
				Severity: Note, What: "disableCheck is set in " + w.file, Why: "runtimes never run CHECK: only mknetd's audit and this program notice a broken endpoint", Do: "take it out unless a plugin behind mk-cni fails CHECK",
			})
		}
	}
	return found
}

func checkCNISocket(_ context.Context, n *Node) []Finding {
	all, _ := n.networks() // an error is said elsewhere
	var found []Finding
	for _, w := range all {
		if w.err != nil || !w.ours() {
			continue
		}
		if !w.plugins[0].ours() {
			found = append(found, Finding{
				Severity: Error, What: fmt.Sprintf("plugin %s comes before mk-cni in %s", w.plugins[0].Type, w.file), Why: "mk-cni refuses an ADD that has the result of another plugin", Do: "put mk-cni first",
			})
		}
		for _, p := range w.plugins {
			asks := p.Socket
			if asks == "" {
				asks = strings.TrimPrefix(p.DaemonEndpoint, "unix://")
			}
			if asks == "" {
				asks = "/run/mknetd.sock"
			}
			if !p.ours() || strings.HasPrefix(asks, "tcp://") || same(asks, n.Config.Socket) {
				continue
			}
			found = append(found, Finding{
				Severity: Error, What: fmt.Sprintf("mk-cni of %s asks %s, mknetd's socket is %s", w.file, asks, n.Config.Socket),
				Why: "its ADDs fail and its DELs are queued for a daemon that is not there", Do: fmt.Sprintf("set \"socket\": %q in %s, or `socket: %s` in %s", n.Config.Socket, w.file, asks, n.ConfigAt),
			})
		}
	}
	return found
}

// same reports whether two paths of sockets are one; a folder on the way may be a link.
func same(a, b string) bool {
	real := func(p string) string {
		if dir, err := filepath.EvalSymlinks(filepath.Dir(p)); err == nil {
			return filepath.Join(dir, filepath.Base(p))
		}
		return p
	}
	return a == b || real(a) == real(b)
}
