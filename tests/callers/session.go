package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"mknet/tests/netlab"
)

// Bounds on a busy machine.
const (
	stepTimeout  = 4 * time.Minute
	daemonStart  = 90 * time.Second
	daemonEnding = 60 * time.Second
)

// session is one caller's run: plugin folder, configuration folder, namespaces.
type session struct {
	*host
	dir     string
	binDir  string // CNI_PATH: the tracer under every plugin's name
	confDir string
	netnses []string
	mounts  []string
}

func (h *host) session(c caller) (*session, error) {
	dir := filepath.Join(h.dir, h.name, c.name)
	s := &session{host: h, dir: dir, binDir: filepath.Join(dir, "bin"), confDir: filepath.Join(dir, "net.d")}
	for _, sub := range []string{s.binDir, s.confDir} {
		if err := os.MkdirAll(sub, 0o755); err != nil {
			return nil, err
		}
	}
	settings, err := json.Marshal(map[string]string{"real": filepath.Join(h.dir, "real"), "log": s.trace()})
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(s.binDir, ".trace"), settings, 0o644); err != nil {
		return nil, err
	}
	plugins, err := os.ReadDir(filepath.Join(h.dir, "real"))
	if err != nil {
		return nil, err
	}
	for _, p := range plugins {
		if err := os.Symlink(filepath.Join(h.dirs.tools, "trace"), filepath.Join(s.binDir, p.Name())); err != nil {
			return nil, err
		}
	}
	return s, os.WriteFile(s.confFile(), []byte(h.list), 0o644)
}

func (s *session) trace() string    { return filepath.Join(s.dir, "trace.log") }
func (s *session) confFile() string { return filepath.Join(s.confDir, "10-mk.conflist") }

// env is the environment of a caller: this process's, the plugin folder, and more.
func (s *session) env(more ...string) []string {
	return append(append(os.Environ(), "CNI_PATH="+s.binDir), more...)
}

// netns makes a namespace that end removes, and returns its path.
func (s *session) netns(name string) (string, error) {
	if _, err := netlab.Try("ip", "netns", "add", name); err != nil {
		return "", err
	}
	path := "/run/netns/" + name
	s.netnses = append(s.netnses, path)
	return path, nil
}

// end removes what the session made itself.
func (s *session) end() {
	for _, path := range s.netnses {
		if _, err := os.Lstat(path); err == nil {
			_, _ = netlab.Try("ip", "netns", "del", filepath.Base(path)) // left behind then, and reported
		}
	}
	for _, m := range s.mounts {
		_ = unix.Unmount(m, unix.MNT_DETACH)
	}
}

// exec runs one step of a caller; the error has its output.
func (s *session) exec(step string, env []string, name string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = env
	cmd.Dir = "/"
	cmd.WaitDelay = 5 * time.Second // a container that keeps the pipe open
	out, err := cmd.CombinedOutput()
	if s.verbose {
		fmt.Fprintf(os.Stderr, "  %s: %v\n%s", step, err, indent(string(out)))
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil // the step itself ended well
	}
	if err != nil {
		return fmt.Errorf("%s: %w:\n%s", step, err, indent(wrong(string(out))))
	}
	return nil
}

// wrong picks the failed steps out of a caller's output, or all of it.
func wrong(out string) string {
	var lines []string
	for line := range strings.Lines(out) {
		if strings.Contains(line, "\tfailed\t") {
			lines = append(lines, line)
		}
	}
	if len(lines) == 0 {
		return out
	}
	return strings.Join(lines, "")
}

func indent(s string) string {
	var b strings.Builder
	for line := range strings.Lines(s) {
		b.WriteString("    " + strings.TrimRight(line, "\n") + "\n")
	}
	return b.String()
}

// fixedPlaces puts plugins and configuration where ctr looks for them.
func (s *session) fixedPlaces() error {
	const bin, conf = "/opt/cni/bin", "/etc/cni/net.d"
	for from, to := range map[string]string{s.binDir: bin, s.confDir: conf} {
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s: %w", to, err)
		}
		s.mounts = append(s.mounts, to)
	}
	return nil
}

// daemon is a long-running process of the matrix.
type daemon struct {
	name   string
	socket string
	cmd    *exec.Cmd
	exited chan struct{} // closed when it has ended; end is then set
	end    error
}

// start runs a daemon and waits until ready returns nil.
func start(name, log string, env []string, ready func() error, program string, args ...string) (*daemon, error) {
	out, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(program, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr, cmd.Dir = env, out, out, "/"
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	d := &daemon{name: name, cmd: cmd, exited: make(chan struct{})}
	go func() {
		defer close(d.exited)
		d.end = cmd.Wait()
	}()
	deadline := time.Now().Add(daemonStart)
	for {
		err := ready()
		if err == nil {
			return d, nil
		}
		select {
		case <-d.exited:
			return nil, fmt.Errorf("%s ended at once: %w: %s", name, errors.Join(d.end, err), tail(log))
		case <-time.After(100 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return nil, errors.Join(fmt.Errorf("%s is not ready within %s: %w: %s", name, daemonStart, err, tail(log)), d.stop())
		}
	}
}

// stop ends the daemon: kindly, then not.
func (d *daemon) stop() error {
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-d.exited:
		return nil
	case <-time.After(daemonEnding):
		_ = d.cmd.Process.Kill()
		<-d.exited
		return fmt.Errorf("%s does not end within %s", d.name, daemonEnding)
	}
}

func tail(path string) string {
	raw, _ := os.ReadFile(path)
	if len(raw) > 3000 {
		raw = raw[len(raw)-3000:]
	}
	return string(raw)
}

// Configurations of containerd; @DIR@, @BIN@, @CONF@ and @PAUSE@ are filled in.
const (
	containerd16Config = `version = 2
root = "@DIR@/root"
state = "@DIR@/state"
[grpc]
  address = "@DIR@/containerd.sock"
[ttrpc]
  address = "@DIR@/containerd.sock.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
  path = "@DIR@/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "@PAUSE@"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "@BIN@"
    conf_dir = "@CONF@"
`
	containerd2Config = `version = 3
root = "@DIR@/root"
state = "@DIR@/state"
[grpc]
  address = "@DIR@/containerd.sock"
[ttrpc]
  address = "@DIR@/containerd.sock.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
  path = "@DIR@/opt"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "@PAUSE@"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["@BIN@"]
    conf_dir = "@CONF@"
`
)

// containerd starts a containerd of the session's own; first is a folder to look
// for its shim in.
func (s *session) containerd(program, first, config string) (*daemon, error) {
	text := strings.NewReplacer("@DIR@", s.dir, "@BIN@", s.binDir, "@CONF@", s.confDir, "@PAUSE@", pauseName).Replace(config)
	file := filepath.Join(s.dir, "containerd.toml")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		return nil, err
	}
	env := s.env()
	if first != "" {
		env = append(env, "PATH="+first+":"+os.Getenv("PATH"))
	}
	socket := filepath.Join(s.dir, "containerd.sock")
	d, err := start("containerd", filepath.Join(s.dir, "containerd.log"), env, func() error {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			err = conn.Close()
		}
		return err
	}, program, "-c", file)
	if err != nil {
		return nil, err
	}
	d.socket = socket
	return d, nil
}

// podmanConfig makes podman use the CNI back end with our folders. Ulimits are
// those that an unprivileged machine can give.
func (s *session) podmanConfig() error {
	conf := fmt.Sprintf(`[containers]
default_ulimits = ["nofile=1024:4096","nproc=1000:1000"]
[network]
network_backend = "cni"
cni_plugin_dirs = [%q]
network_config_dir = %q
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
`, s.binDir, s.confDir)
	if err := os.WriteFile("/etc/containers/containers.conf", []byte(conf), 0o644); err != nil {
		return err
	}
	return os.WriteFile("/etc/containers/policy.json", []byte(`{"default":[{"type":"insecureAcceptAnything"}]}`), 0o644)
}
