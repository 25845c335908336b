package netlab

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// insideEnv is set in the re-executed test binary.
const insideEnv = "MKNET_NETLAB"

// Main runs the tests of m in a private host and exits with their status. It
// needs root; without it every test of the binary fails and says so.
func Main(m *testing.M) {
	if slices.Contains(os.Args, "-test.fuzzworker") {
		os.Exit(m.Run()) // a worker of a fuzzing run that is already inside
	}
	Private(m.Run)
}

// Private is Main for a program that is no test: it runs f in a private host of
// its own and exits with f's status. Call it first in main.
func Private(f func() int) {
	if os.Getenv(insideEnv) != "" {
		_ = os.Unsetenv(insideEnv) // programs started from here have hosts of their own
		if err := setUpHost(); err != nil {
			fmt.Fprintln(os.Stderr, "netlab: set up the private host:", err)
			os.Exit(1)
		}
		os.Exit(f())
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "netlab: this makes network namespaces: run it as root")
		os.Exit(1)
	}
	os.Exit(reexec())
}

// reexec runs this binary again in fresh network, mount and IPC namespaces and
// returns its exit status.
func reexec() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL, // a killed `go test` leaves no private host behind
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "netlab: start the private host:", err)
		return 1
	}
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s)
		}
	}()
	err := cmd.Wait()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit) && exit.ExitCode() >= 0:
		return exit.ExitCode()
	}
	fmt.Fprintln(os.Stderr, "netlab: private host:", err)
	return 1
}

// setUpHost turns the fresh namespaces into something a host looks like: /run
// and the CNI folders are empty tmpfs, /sys shows this network namespace, lo is
// up. Nothing reaches the machine's own mounts.
func setUpHost() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// A new sysfs shows the links of this namespace; the cgroup tree and bpffs
	// below the old one are carried over.
	keep := "/tmp"
	stash, err := os.MkdirTemp(keep, "netlab-cgroup-")
	if err != nil {
		return fmt.Errorf("make a mount point: %w", err)
	}
	if err := unix.Mount("/sys/fs/cgroup", stash, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep /sys/fs/cgroup: %w", err)
	}
	if err := unix.Mount("sysfs", "/sys", "sysfs", 0, ""); err != nil {
		return fmt.Errorf("mount /sys: %w", err)
	}
	if err := unix.Mount(stash, "/sys/fs/cgroup", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("restore /sys/fs/cgroup: %w", err)
	}
	_ = os.Remove(stash)
	if err := unix.Mount("bpf", "/sys/fs/bpf", "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount bpffs: %w", err)
	}
	for _, dir := range []string{"/run", "/var/lib/cni", "/etc/cni", "/var/lib/mknet", "/etc/mknetd"} {
		if err := privateDir(dir); err != nil {
			return err
		}
	}
	for _, dir := range []string{namespaceDir, "/run/lock"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make %s: %w", dir, err)
		}
	}
	// As ip-netns(8) does once: names that are mounted before and after it are then one.
	if err := unix.Mount(namespaceDir, namespaceDir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount %s: %w", namespaceDir, err)
	}
	if err := unix.Mount("", namespaceDir, "", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("share %s: %w", namespaceDir, err)
	}
	return raiseLoopback()
}

// privateDir covers dir with an empty tmpfs. A folder that the machine lacks is
// made on a tmpfs over its first existing parent only when that parent is itself
// one of ours; else it is simply created, empty, on the machine.
func privateDir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", dir, err)
	}
	if err := unix.Mount("tmpfs", filepath.Clean(dir), "tmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", dir, err)
	}
	return nil
}
