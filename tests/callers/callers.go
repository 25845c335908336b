package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"mknet/tests/netlab"
)

// caller is one program that runs CNI plugins.
type caller struct {
	name    string
	version string   // what it negotiates with our list, see host.go
	sends   []string // the verbs it is known to send; the others come from adopt
	refused []string // verbs that it also sends where the plugin must refuse
	missing func(h *host) string
	run     func(s *session) error
}

var callers = []caller{
	{"cnitool-1.3.1", "1.1.0", []string{"STATUS", "ADD", "CHECK", "GC", "DEL"}, nil, programs, cnitool},
	{"libcni-1.3.1", "1.1.0", verbs, []string{"ADD", "CHECK"}, programs, libcni},
	{"go-cni-1.1.15", "1.1.0", []string{"STATUS", "ADD", "CHECK", "DEL"}, nil, programs, gocni},
	{"ctr-1.6", "1.0.0", []string{"ADD", "DEL"}, nil, debian("containerd", "1.6.", "--version", "runc", "busybox"), ctr},
	{"podman-4.3", "1.0.0", []string{"VERSION", "ADD", "DEL"}, nil, debian("podman", "4.3.", "--version", "runc", "conmon", "busybox"), podman},
	{"cri-containerd-1.6", "1.0.0", []string{"ADD", "DEL"}, nil, debian("containerd", "1.6.", "--version", "runc", "busybox"), cri16},
	{"cri-containerd-2", "1.1.0", []string{"STATUS", "ADD", "DEL"}, nil, containerd2, cri2},
}

// spoilsCache reports a caller whose DEL also comes without a result, on purpose. The
// reference firewall plugin finds its rules by the result's address and leaves them
// then.
func (c caller) spoilsCache() bool { return strings.HasPrefix(c.name, "libcni-") }

func programs(h *host) string { return notBuilt(h.dirs.tools, "programs") }

// containerd2 is built here; runc and busybox are the machine's.
func containerd2(h *host) string {
	if why := programs(h); why != "" {
		return why
	}
	if why := notBuilt(h.dirs.containerd, "containerd2"); why != "" {
		return why
	}
	return lacking("runc", "busybox")
}

// debian asks for a program of a version, and for others beside it.
func debian(program, version, flag string, also ...string) func(*host) string {
	return func(h *host) string {
		if why := programs(h); why != "" {
			return why
		}
		if why := lacking(append(also, program)...); why != "" {
			return why
		}
		out, err := exec.Command(program, flag).Output()
		if err != nil || !strings.Contains(string(out), " "+version) {
			return fmt.Sprintf("%s %s says %q (%v), want version %sx", program, flag, out, err, version)
		}
		return ""
	}
}

func lacking(programs ...string) string {
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			return p + " is not installed: scripts/setup.sh tests/callers/packages.txt"
		}
	}
	return ""
}

// cnitool does every verb on one namespace; DEL and GC come when it is gone.
func cnitool(s *session) error {
	ns, err := s.netns("cnitool")
	if err != nil {
		return err
	}
	tool := filepath.Join(s.dirs.tools, "cnitool")
	do := func(verb string) error {
		return s.exec(verb, s.env("NETCONFPATH="+s.confDir, "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAME=p1",
			`CAP_ARGS={"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}`), tool, verb, s.name, ns)
	}
	for _, verb := range []string{"status", "add", "check"} {
		if err := do(verb); err != nil {
			return err
		}
	}
	if err := do("del"); err != nil {
		return err
	}
	if err := do("add"); err != nil {
		return err
	}
	if _, err := netlab.Try("ip", "netns", "del", filepath.Base(ns)); err != nil {
		return err
	}
	for _, verb := range []string{"gc", "del"} { // libcni's GC deletes every cached attachment first
		if err := do(verb); err != nil {
			return err
		}
	}
	return nil
}

func libcni(s *session) error {
	a, err := s.netns("libcni-a")
	if err != nil {
		return err
	}
	b, err := s.netns("libcni-b")
	if err != nil {
		return err
	}
	return s.exec("libcni", s.env(), filepath.Join(s.dirs.tools, "libcni"), s.confFile(), filepath.Join(s.dir, "cache"), a, b)
}

func gocni(s *session) error {
	ns, err := s.netns("gocni")
	if err != nil {
		return err
	}
	return s.exec("gocni", s.env(), filepath.Join(s.dirs.tools, "gocni"), append([]string{s.confDir, ns}, s.adopt()...)...)
}

// ctr looks for plugins and configuration in fixed places.
func ctr(s *session) (err error) {
	if err := s.fixedPlaces(); err != nil {
		return err
	}
	d, err := s.containerd("containerd", "", containerd16Config)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.stop()) }()
	rootfs, err := s.rootfs()
	if err != nil {
		return err
	}
	const id = "mknet-ctr"
	address := s.env("CONTAINERD_ADDRESS=" + d.socket)
	// Only the foreground form does DEL, so adopt comes while it waits.
	ran := make(chan error, 1)
	go func() {
		ran <- s.exec("ctr run", address, "ctr", "run", "--rm", "--cni", "--rootfs", rootfs, id,
			"/bin/sh", "-c", "ip link show dev eth0 && touch /up && until [ -e /done ]; do sleep 0.1; done")
	}()
	up := filepath.Join(rootfs, "up")
	for deadline := time.Now().Add(stepTimeout); ; time.Sleep(100 * time.Millisecond) {
		if _, err := os.Stat(up); err == nil {
			break
		}
		select {
		case err := <-ran:
			return errors.Join(errors.New("the container ended before it was up"), err)
		default:
		}
		if time.Now().After(deadline) {
			return errors.New("the container does not come up")
		}
	}
	adopt := s.adopt()
	err = s.exec("adopt", s.env(), adopt[0], adopt[1:]...)
	err = errors.Join(err, os.WriteFile(filepath.Join(rootfs, "done"), nil, 0o644))
	return errors.Join(err, <-ran)
}

// adopt is the command that sends the verbs that a caller lacks to what it has
// attached, see programs/adopt.
func (s *session) adopt() []string {
	return []string{"/usr/bin/env", "CNI_PATH=" + s.binDir, "TRACE_BY=adopt", filepath.Join(s.dirs.tools, "adopt"), s.confFile(), "/var/lib/cni", "/run/cni"}
}

func cri16(s *session) error { return s.cri("containerd", "ctr", "", containerd16Config) }

func cri2(s *session) error {
	return s.cri(filepath.Join(s.dirs.containerd, "containerd"), filepath.Join(s.dirs.containerd, "ctr"), s.dirs.containerd, containerd2Config)
}

// cri starts a containerd, gives it the images, and runs a pod.
func (s *session) cri(program, client, path, config string) (err error) {
	d, err := s.containerd(program, path, config)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.stop()) }()
	image, err := s.image()
	if err != nil {
		return err
	}
	args := []string{"-a", d.socket, "-n", "k8s.io", "images", "import"}
	if path != "" {
		args = append(args, "--local") // containerd 2 would use its transfer service
	}
	if err := s.exec("import the image", s.env(), client, append(args, image)...); err != nil {
		return err
	}
	return s.exec("cri", s.env(), filepath.Join(s.dirs.tools, "cri"), append([]string{d.socket, imageName}, s.adopt()...)...)
}

// podman runs, reloads, disconnects and connects containers on our network.
func podman(s *session) error {
	if err := s.podmanConfig(); err != nil {
		return err
	}
	rootfs, err := s.rootfs()
	if err != nil {
		return err
	}
	do := func(args ...string) error {
		return s.exec("podman "+strings.Join(args[:min(2, len(args))], " "), s.env(), "podman",
			append([]string{"--root", filepath.Join(s.dir, "root"), "--runroot", filepath.Join(s.dir, "runroot"), "--storage-driver", "overlay"}, args...)...)
	}
	defer func() { _ = do("rm", "-f", "-a", "-t", "0") }() // after a step that failed
	image := filepath.Join(s.dir, "rootfs.tar")
	if err := s.exec("tar", s.env(), "tar", "-C", rootfs, "-cf", image, "."); err != nil {
		return err
	}
	adopt := s.adopt()
	for _, args := range [][]string{
		{"import", image, "bb:1"},
		{"run", "--rm", "--network", s.name, "-p", "8085:80", "bb:1", "/bin/ip", "link", "show", "dev", "eth0"},
		{"run", "-d", "--network", s.name, "--name", "mk", "bb:1", "/bin/sleep", "600"},
		{"exec", "mk", "/bin/ip", "link", "show", "dev", "eth0"},
		adopt,
		{"network", "reload", "mk"},
		{"exec", "mk", "/bin/ip", "link", "show", "dev", "eth0"},
		{"network", "disconnect", s.name, "mk"},
		{"network", "connect", s.name, "mk"},
		{"rm", "-f", "-t", "0", "mk"},
	} {
		if args[0] == adopt[0] {
			err = s.exec("adopt", s.env(), args[0], args[1:]...)
		} else {
			err = do(args...)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
