package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Where programs are looked for; the image puts the real tools before busybox's.
const searchPath = "/mknet:/usr/sbin:/usr/bin:/sbin:/bin"

// boot makes a usable system of the initramfs.
func boot() error {
	for _, m := range []struct{ fs, dir, options string }{
		{"proc", "/proc", ""},
		{"sysfs", "/sys", ""},
		{"devtmpfs", "/dev", ""},
		{"tmpfs", "/run", "mode=0755"},
		{"tmpfs", "/tmp", "mode=1777"},
		{"bpf", "/sys/fs/bpf", "mode=0700"},
		{"cgroup2", "/sys/fs/cgroup", ""},
	} {
		if err := os.MkdirAll(m.dir, 0o755); err != nil && !errors.Is(err, unix.EROFS) && !errors.Is(err, unix.EPERM) {
			return err
		}
		if err := unix.Mount(m.fs, m.dir, m.fs, 0, m.options); err != nil {
			return fmt.Errorf("mount %s: %w", m.dir, err)
		}
	}
	for _, dir := range []string{"/run/netns", "/run/lock", "/log", "/var/lib"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := os.Setenv("PATH", searchPath); err != nil {
		return err
	}
	if err := loadModules("/modules"); err != nil {
		return err
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		return fmt.Errorf("ip link set lo up: %w: %s", err, out)
	}
	return nil
}

// loadModules loads the modules that the file "order" of the folder names.
func loadModules(dir string) error {
	order, err := os.Open(filepath.Join(dir, "order"))
	if err != nil {
		return err
	}
	defer order.Close()
	lines := bufio.NewScanner(order)
	for lines.Scan() {
		f, err := os.Open(filepath.Join(dir, lines.Text()))
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load %s: %w", lines.Text(), err)
		}
	}
	return lines.Err()
}
