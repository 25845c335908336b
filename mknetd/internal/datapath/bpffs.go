package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// DefaultMount is where a host has its bpffs.
const DefaultMount = "/sys/fs/bpf"

// DefaultDir is the folder of the pins unless Config.Dir names another.
const DefaultDir = DefaultMount + "/mknet"

// Folders below Config.Dir.
const (
	mapsDir     = "maps"
	programsDir = "programs"
	linksDir    = "links"
)

// ensureDir makes the folders of the pins, on a bpffs: where dir is on none, one
// is mounted on /sys/fs/bpf if dir lies there, else on dir itself.
func ensureDir(dir string) error {
	on, err := onBpffs(dir)
	if err != nil {
		return err
	}
	if !on {
		mount := dir
		if strings.HasPrefix(dir, DefaultMount+"/") {
			mount = DefaultMount
		}
		if err := os.MkdirAll(mount, 0o700); err != nil {
			return fmt.Errorf("make the mount point of bpffs: %w", err)
		}
		if err := unix.Mount("bpf", mount, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
			return fmt.Errorf("mount bpffs on %s: %w (mknetd needs CAP_SYS_ADMIN)", mount, err)
		}
	}
	for _, sub := range []string{mapsDir, programsDir, linksDir} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return fmt.Errorf("make a folder for pins: %w", err)
		}
	}
	return nil
}

// MapDir is where the maps of a data path in dir are pinned, by their names.
func MapDir(dir string) string { return filepath.Join(dir, mapsDir) }

// Pinned reports whether a process has left a data path in dir.
func Pinned(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, mapsDir, "endpoints"))
	return err == nil
}

// Inspect is a command that shows a map.
func (d *Datapath) Inspect(name string) string {
	return "bpftool map dump pinned " + filepath.Join(d.cfg.Dir, mapsDir, name)
}

// onBpffs reports whether dir, or the nearest parent that exists, is on a bpffs.
func onBpffs(dir string) (bool, error) {
	for at := dir; ; at = filepath.Dir(at) {
		var fs unix.Statfs_t
		switch err := unix.Statfs(at, &fs); {
		case err == nil:
			return fs.Type == unix.BPF_FS_MAGIC, nil
		case !errors.Is(err, unix.ENOENT) || at == filepath.Dir(at):
			return false, fmt.Errorf("statfs %s: %w", at, err)
		}
	}
}

// sweep removes the pins that a process left which died within repin.
func sweep(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, "*", "*"+nextSuffix))
	if err != nil {
		return fmt.Errorf("list pins: %w", err)
	}
	for _, path := range left {
		if err := unpin(path); err != nil {
			return err
		}
	}
	return nil
}

// nextSuffix marks a pin that is about to take the place of another. bpffs allows
// no dots in names (kernel/bpf/inode.c: bpf_lookup).
const nextSuffix = "-next"

// pinner is a map, program or link.
type pinner interface{ Pin(path string) error }

// repin pins o at path in place of what is pinned there, in one step: what held
// on to its life by the pin alone goes only when o is there.
func repin(o pinner, path string) error {
	next := path + nextSuffix
	if err := o.Pin(next); err != nil {
		return fmt.Errorf("pin %s: %w", path, err)
	}
	if err := os.Rename(next, path); err != nil {
		return errors.Join(fmt.Errorf("pin %s: %w", path, err), unpin(next))
	}
	return nil
}

// unpin removes a pin; absent is success.
func unpin(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove pin: %w", err)
	}
	return nil
}
