package doctor

import (
	"context"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/config"
	"mknet/spec/api"
	"mknet/spec/client"
)

// Node is what is looked at. The zero value of a path is the usual one.
type Node struct {
	Version   string
	Config    config.Config // as the file says; the defaults where it cannot be read
	ConfigErr error
	ConfigAt  string // the file

	CNIConfDir string   // /etc/cni/net.d
	CNIBinDirs []string // /opt/cni/bin, /usr/lib/cni, /usr/libexec/cni

	// What a private host cannot change, for tests.
	Proc, Dev, BPF string
	Now            func() time.Time
	Adjtimex       func(*unix.Timex) (int, error)
	Release        string // of the kernel

	client    *client.Client
	daemonErr error // why there is no answer
	health    api.Health
	inForce   api.DaemonConfig
}

func or(value, usual string) string {
	if value == "" {
		return usual
	}
	return value
}

func (n *Node) confDir() string { return or(n.CNIConfDir, "/etc/cni/net.d") }
func (n *Node) proc() string    { return or(n.Proc, "/proc") }
func (n *Node) dev() string     { return or(n.Dev, "/dev") }
func (n *Node) bpf() string     { return or(n.BPF, "/sys/fs/bpf") }

func (n *Node) binDirs() []string {
	if n.CNIBinDirs == nil {
		return []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"}
	}
	return n.CNIBinDirs
}

func (n *Node) now() time.Time {
	if n.Now == nil {
		return time.Now()
	}
	return n.Now()
}

func (n *Node) release() string {
	if n.Release != "" {
		return n.Release
	}
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

// daemonTime bounds each question to the daemon.
const daemonTime = 10 * time.Second

// look asks the daemon who it is.
func (n *Node) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, daemonTime)
	defer cancel()
	if n.client, n.daemonErr = client.New("unix://" + n.Config.Socket); n.daemonErr != nil {
		return
	}
	if n.health, n.daemonErr = n.client.Health(ctx); n.daemonErr == nil {
		n.inForce, n.daemonErr = n.client.Config(ctx)
	}
}

// Close ends the connection to the daemon.
func (n *Node) Close() {
	if n.client != nil {
		n.client.Close()
	}
}

// sysctl reads a value below /proc/sys; empty where there is none.
func (n *Node) sysctl(path string) string {
	b, err := os.ReadFile(n.proc() + "/sys/" + path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// servesPods reports whether the node is to have ordinary pods.
func (n *Node) servesPods() bool { return len(n.Config.PodPools) > 0 }
