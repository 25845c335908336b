package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/api"
	"mknet/tests/conformance/suite"
	"mknet/tests/netlab"
)

// settle is how long the kernel and the callers' daemons get to finish what they
// do in the background after a call returned.
const settle = 20 * time.Second

// host is the private host of the whole matrix, with the plugin under test.
type host struct {
	dirs    folders
	dir     string // everything of this run, on the private /run
	plugin  string // name of the plugin in front
	network        // the one that callers use now
	daemon  *daemon
	verbose bool
}

// network is one network list, as an operator would write it.
type network struct {
	mode string // of mk-cni; the plugin's name where another one is in front
	name string
	list string
}

// The lists: the project's own, unmodified, one for each mode, and a chain behind
// ptp and bridge, to try the matrix itself.
const (
	multikernel = `{"cniVersion":"1.0.0","cniVersions":["0.3.1","0.4.0","1.0.0","1.1.0"],"name":"mknet",
 "plugins":[{"type":"mk-cni","socket":"/run/mknetd.sock","cacheDir":"/var/lib/cni/multikernel","capabilities":{"dns":true,"bandwidth":true}},
            {"type":"portmap","capabilities":{"portMappings":true}}]}
`
	veth = `{"cniVersion":"1.0.0","cniVersions":["0.3.1","0.4.0","1.0.0","1.1.0"],"name":"mkpods",
 "plugins":[{"type":"mk-cni","mode":"veth","socket":"/run/mknetd.sock","capabilities":{"dns":true,"ips":true,"mac":true}},
            {"type":"portmap","capabilities":{"portMappings":true}},
            {"type":"bandwidth","ingressRate":100000000,"ingressBurst":10000000,"egressRate":100000000,"egressBurst":10000000},
            {"type":"tuning","sysctl":{"net.core.somaxconn":"500"}},
            {"type":"firewall"}]}
`
	pools  = "pools: [{name: pods, prefix: 10.91.0.0/16}]\n" // of mknetd, for the second
	theirs = `{"cniVersion":"1.0.0","cniVersions":["0.3.1","0.4.0","1.0.0","1.1.0"],"name":"mknet",
 "plugins":[{"type":%q,"isGateway":true,"ipMasq":true,"ipam":{"type":"host-local","subnet":"10.92.0.0/16","routes":[{"dst":"0.0.0.0/0"}]},"capabilities":{"dns":true}},
            {"type":"portmap","capabilities":{"portMappings":true}}]}
`
)

// newHost sets the private host up: an egress, folders that the callers insist
// on, and our daemon.
func newHost(plugin, bin string, verbose bool) (*host, error) {
	dirs, err := locate(bin)
	if err != nil {
		return nil, err
	}
	if err := suite.SetUpHost(); err != nil {
		return nil, err
	}
	for _, dir := range []string{"/opt", "/etc/containers", "/var/lib/containers", "/var/lib/containerd"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"); err != nil {
			return nil, fmt.Errorf("mount a tmpfs on %s: %w", dir, err)
		}
	}
	h := &host{dirs: dirs, dir: "/run/callers", plugin: plugin, verbose: verbose}
	if err := os.MkdirAll(filepath.Join(h.dir, "real"), 0o755); err != nil {
		return nil, err
	}
	names := []string{"portmap", "bandwidth", "tuning", "firewall", "loopback", "host-local", "ptp", "bridge"}
	from := h.dirs.reference
	for _, name := range names {
		if err := os.Symlink(filepath.Join(from, name), filepath.Join(h.dir, "real", name)); err != nil {
			return nil, err
		}
	}
	if plugin != "mk" {
		return h, nil
	}
	if err := os.WriteFile("/etc/mknetd/config.yaml", []byte(pools), 0o600); err != nil {
		return nil, err
	}
	h.plugin = "mk-cni"
	if err := os.Symlink(filepath.Join(h.dirs.ours, "mk-cni"), filepath.Join(h.dir, "real", "mk-cni")); err != nil {
		return nil, err
	}
	h.daemon, err = start("mknetd", filepath.Join(h.dir, "mknetd.log"), nil, func() error {
		_, err := h.mknetd("endpoints")
		return err
	}, filepath.Join(h.dirs.ours, "mknetd"), "serve")
	return h, err
}

// networks are the networks that every caller is tried with.
func (h *host) networks() []network {
	if h.plugin != "mk-cni" {
		return []network{{h.plugin, "mknet", fmt.Sprintf(theirs, h.plugin)}}
	}
	return []network{{"multikernel", "mknet", multikernel}, {"veth", "mkpods", veth}}
}

// mknetd asks the daemon by its own command line.
func (h *host) mknetd(args ...string) ([]byte, error) {
	out, err := exec.Command(filepath.Join(h.dirs.ours, "mknetd"), append(args, "-o", "json")...).Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = fmt.Errorf("mknetd %s: %w: %s", strings.Join(args, " "), err, exit.Stderr)
	}
	return out, err
}

func (h *host) close() error {
	var err error
	if h.daemon != nil {
		err = h.daemon.stop()
	}
	// What still runs in this private host was started by a caller and outlived it.
	for _, pid := range h.processes() {
		err = errors.Join(err, unix.Kill(pid, unix.SIGKILL))
	}
	return err
}

// prime runs the chain once, so that what its plugins make for good (portmap's
// top chains, a bridge, iptables' base tables) is there before anything is compared.
func (h *host) prime() error {
	s, err := h.session(caller{name: "prime"})
	if err != nil {
		return err
	}
	defer s.end()
	if err := cnitool(s); err != nil {
		return fmt.Errorf("first ADD and DEL: %w", err)
	}
	return nil
}

// try runs one caller and looks at what came of it.
func (h *host) try(c caller) report {
	r := report{caller: c, mode: h.mode}
	if r.notRun = c.missing(h); r.notRun != "" {
		return r
	}
	fmt.Fprintf(os.Stderr, "callers: %s %s\n", c.name, h.mode)
	before := h.take()
	s, err := h.session(c)
	if err == nil {
		err = c.run(s)
		s.end()
	}
	if err != nil {
		r.problems = append(r.problems, err.Error())
	}
	if s != nil {
		if r.calls, err = readTrace(s.trace(), h.plugin); err != nil {
			r.problems = append(r.problems, err.Error())
		}
	}
	r.judge()
	r.left = h.left(before, c.spoilsCache())
	return r
}

// state is everything that a caller could leave behind.
type state struct {
	kernel    netlab.Snapshot
	files     map[string]bool
	processes map[int]bool
}

// watched are the folders that plugins and libcni keep state in.
var watched = []string{"/var/lib/cni", "/var/lib/mknet/deferred-del", "/run/netns"}

func (h *host) take() state {
	s := state{kernel: netlab.Take(), files: files(), processes: map[int]bool{}}
	for _, pid := range h.processes() {
		s.processes[pid] = true
	}
	return s
}

func files() map[string]bool {
	seen := map[string]bool{}
	for _, root := range watched {
		_ = filepath.WalkDir(root, func(path string, e os.DirEntry, err error) error {
			if err == nil && !e.IsDir() && !permanent(path) {
				seen[path] = true
			}
			return nil
		})
	}
	return seen
}

// permanent reports whether a file is a plugin's own for good: host-local's lock
// and the last address it gave out.
func permanent(path string) bool {
	base := filepath.Base(path)
	return base == "lock" || strings.HasPrefix(base, "last_reserved_ip")
}

// left lists what is there beyond a state, each with its kind.
func (h *host) left(before state, spoilsCache bool) []string {
	deadline := time.Now().Add(settle)
	for {
		left := h.leftNow(before, spoilsCache)
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
		time.Sleep(200 * time.Millisecond)
	}
}

func (h *host) leftNow(before state, spoilsCache bool) []string {
	var out []string
	for _, line := range before.kernel.Left() {
		kind, what, _ := strings.Cut(line, ": ")
		switch {
		case spoilsCache && strings.HasPrefix(what, "-A CNI-FORWARD "):
			continue // see caller.spoilsCache
		case kind == "descriptor", kind == "file":
			continue // callers' own folders under /run; files below covers ours
		case strings.HasSuffix(kind, "-save"):
			kind = "firewall"
		}
		out = append(out, kind+": "+what)
	}
	for path := range files() {
		if !before.files[path] {
			out = append(out, "file: "+path)
		}
	}
	for _, pid := range h.processes() {
		if !before.processes[pid] {
			comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			out = append(out, fmt.Sprintf("process: %d %s", pid, strings.TrimSpace(string(comm))))
		}
	}
	if h.daemon != nil {
		out = append(out, h.records()...)
	}
	return out
}

// records asks mknetd whether it still has endpoints, and whether the kernel is
// as its records say.
func (h *host) records() []string {
	var out []string
	raw, err := h.mknetd("endpoints")
	var list api.EndpointList
	if err == nil {
		err = json.Unmarshal(raw, &list)
	}
	if err != nil {
		out = append(out, "endpoint: unknown: "+err.Error())
	}
	for _, e := range list.Endpoints {
		out = append(out, fmt.Sprintf("endpoint: %s %s %s", e.Generation.Short(), e.Attachment, e.State))
	}
	if raw, err := h.mknetd("inventory"); err != nil {
		out = append(out, "inventory: "+err.Error()+": "+strings.Join(strings.Fields(string(raw)), " "))
	}
	return out
}

// processes lists the processes of this private host other than this one: those
// that share its mount namespace, which nobody else can.
func (h *host) processes() []int {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return nil
	}
	var out []int
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid)); err == nil && ns == own {
			out = append(out, pid)
		}
	}
	return out
}
