package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

const stateRoot = "/var/lib/cni/double"

// lease is what the plugin remembers of one attachment.
type lease struct {
	ContainerID, IfName, Netns string
	NetnsInode                 uint64
	Address                    netip.Addr
	IPAM                       bool // the address is the delegate's
}

// hostLink is the veth's end on the host.
func (l lease) hostLink(network string) string {
	sum := sha256.Sum256([]byte(network + "/" + l.ContainerID + "/" + l.IfName))
	return fmt.Sprintf("dbl%x", sum[:5])
}

// rule is the masquerade rule, as iptables takes it after -A POSTROUTING.
func (l lease) rule(network string) []string {
	return []string{
		"POSTROUTING", "-s", l.Address.String() + "/32", "-o", "up0", "-m", "comment", "--comment",
		"double " + network + " " + l.ContainerID + " " + l.IfName, "-j", "MASQUERADE",
	}
}

func (r *request) dir() string { return filepath.Join(stateRoot, r.network) }

func (r *request) path(id, ifname string) string {
	return filepath.Join(r.dir(), id+"+"+strings.ReplaceAll(ifname, "/", "_")+".json")
}

// leases reads the whole network's state.
func (r *request) leases() []lease {
	files, _ := filepath.Glob(filepath.Join(r.dir(), "*.json"))
	var out []lease
	for _, f := range files {
		var l lease
		if raw, err := os.ReadFile(f); err == nil && json.Unmarshal(raw, &l) == nil {
			out = append(out, l)
		}
	}
	return out
}

// reserve takes the first free address of the network and writes the lease.
func (r *request) reserve(l *lease) error {
	if err := os.MkdirAll(r.dir(), 0o700); err != nil {
		return failf(5, "%v", err)
	}
	lock, err := os.Create(filepath.Join(r.dir(), "lock"))
	if err != nil {
		return failf(5, "%v", err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return failf(5, "%v", err)
	}
	if !l.IPAM {
		taken := r.leases()
		if len(taken) >= r.pool {
			return failf(100, "network %s: all %d addresses are in use", r.network, r.pool)
		}
		sum := sha256.Sum256([]byte(r.network))
		a := netip.AddrFrom4([4]byte{10, 46, sum[0], 2})
		for !is("clash") && slices.ContainsFunc(taken, func(l lease) bool { return l.Address == a }) {
			a = a.Next()
		}
		l.Address = a
	}
	raw, err := json.Marshal(l)
	if err != nil {
		return err
	}
	return os.WriteFile(r.path(l.ContainerID, l.IfName), raw, 0o600)
}

// remove undoes one attachment; what is missing is fine.
func (r *request) remove(l lease) error {
	if _, err := os.Stat(r.path(l.ContainerID, l.IfName) + ".jam"); err == nil {
		return failf(100, "%s/%s: jammed", l.ContainerID, l.IfName)
	}
	_, _ = run("ip", "link", "del", l.hostLink(r.network))
	if !is("keeps-rules") && l.Address.IsValid() {
		for {
			if _, err := run("iptables", append([]string{"-w", "-t", "nat", "-D"}, l.rule(r.network)...)...); err != nil {
				break
			}
		}
	}
	_ = os.Remove(r.path(l.ContainerID, l.IfName))
	return nil
}

// run runs a command; the error has its output.
func run(name string, args ...string) (string, error) {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// batch runs the lines as commands of one ip(8), behind the words of front. With force
// it goes on past those that fail and reports none.
func batch(force bool, front []string, lines ...string) error {
	argv := append(front, "ip")
	if force {
		argv = append(argv, "-force")
	}
	argv = append(argv, "-batch", "-")
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	if out, err := cmd.CombinedOutput(); err != nil && !force {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(lines, "; "), err, out)
	}
	return nil
}

// inside runs a command in the container's namespace.
func (r *request) inside(name string, args ...string) (string, error) {
	return run("nsenter", append([]string{"--net=" + r.netns, "--", name}, args...)...)
}

// inode identifies a namespace file well enough for a double; 0 when it is gone
// or none.
func inode(path string) uint64 {
	var st syscall.Stat_t
	var fs syscall.Statfs_t
	const nsfs = 0x6e736673 // linux/magic.h NSFS_MAGIC
	if syscall.Stat(path, &st) != nil || syscall.Statfs(path, &fs) != nil || fs.Type != nsfs {
		return 0
	}
	return st.Ino
}
