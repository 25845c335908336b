package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"
)

type unixStat = syscall.Stat_t

// older reports whether the kernel is older than major.minor. A release that does
// not begin with numbers is taken for new.
func (n *Node) older(major, minor int) bool {
	first, rest, _ := strings.Cut(n.release(), ".")
	second := rest
	if i := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' }); i >= 0 {
		second = rest[:i]
	}
	a, err1 := strconv.Atoi(first)
	b, err2 := strconv.Atoi(second)
	return err1 == nil && err2 == nil && (a < major || a == major && b < minor)
}

func checkKernel(_ context.Context, n *Node) []Finding {
	if n.older(5, 15) {
		return []Finding{{
			Severity: Error, What: "the kernel is " + n.release(), Why: "mknetd needs 5.15: conntrack deletion by filter, pidfd, netns cookies",
			Do: "boot a newer kernel",
		}}
	}
	if n.older(6, 2) {
		return []Finding{{
			Severity: Note, What: "the kernel is " + n.release() + ": its TUN has no UDP segmentation (6.2)", Why: "large UDP sends of children cost more",
			Do: "nothing, or boot a newer kernel",
		}}
	}
	return nil
}

// needed are the capabilities that mknetd uses (linux/capability.h).
var needed = map[string]uint{"CAP_NET_ADMIN": unix.CAP_NET_ADMIN, "CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN, "CAP_NET_RAW": unix.CAP_NET_RAW}

func checkPrivileges(_ context.Context, n *Node) []Finding {
	text, err := os.ReadFile(n.proc() + "/self/status")
	if err != nil {
		return unlooked("privileges", err)
	}
	for line := range strings.Lines(string(text)) {
		digits, is := strings.CutPrefix(line, "CapEff:")
		if !is {
			continue
		}
		have, err := strconv.ParseUint(strings.TrimSpace(digits), 16, 64)
		if err != nil {
			return unlooked("privileges", err)
		}
		var lacks []string
		for _, name := range []string{"CAP_NET_ADMIN", "CAP_SYS_ADMIN", "CAP_NET_RAW"} {
			if have&(1<<needed[name]) == 0 {
				lacks = append(lacks, name)
			}
		}
		if len(lacks) > 0 {
			return []Finding{{
				Severity: Warning, What: "this process lacks " + strings.Join(lacks, ", "), Why: "mknetd needs them, and the doctor cannot look at everything without them",
				Do: "run it as root, outside of a container",
			}}
		}
	}
	return nil
}

func checkTUN(_ context.Context, n *Node) []Finding {
	device := n.dev() + "/net/tun"
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return []Finding{{
			Severity: Error, What: fmt.Sprintf("open %s: %v", device, err), Why: "no endpoint of a child can be made: its link is a TUN",
			Do: "modprobe tun; in a container pass the device in",
		}}
	}
	defer unix.Close(fd)
	have, err := unix.IoctlGetInt(fd, unix.TUNGETFEATURES)
	if err != nil {
		return []Finding{{Severity: Error, What: fmt.Sprintf("%s: ask for its features: %v", device, err), Why: "it is no TUN device", Do: "rm " + device + "; modprobe tun"}}
	}
	var found []Finding
	for _, want := range []struct {
		bit  int
		name string
	}{{unix.IFF_VNET_HDR, "virtio-net headers (IFF_VNET_HDR)"}, {unix.IFF_MULTI_QUEUE, "several queues (IFF_MULTI_QUEUE)"}} {
		if have&want.bit == 0 {
			found = append(found, Finding{Severity: Error, What: "the kernel's TUN has no " + want.name, Why: "mknetd makes every TUN with it", Do: "boot a newer kernel"})
		}
	}
	return found
}

func checkBPF(_ context.Context, n *Node) []Finding {
	if !n.servesPods() {
		return nil
	}
	var found []Finding
	warn := func(what, why, do string) {
		found = append(found, Finding{Severity: Warning, What: what, Why: why, Do: do})
	}
	var st unix.Statfs_t
	if err := unix.Statfs(n.bpf(), &st); err != nil || st.Type != unix.BPF_FS_MAGIC {
		warn("no bpffs is mounted on "+n.bpf(), "programs of pods do not outlive mknetd unless it can mount one", "mount -t bpf bpf "+n.bpf())
	}
	err := features.HaveProgramHelper(ebpf.SchedCLS, asm.FnRedirectPeer)
	switch {
	case err == nil:
	case errors.Is(err, ebpf.ErrNotSupported):
		found = append(found, Finding{Severity: Note, What: "the kernel has no bpf_redirect_peer (5.10)", Why: "packets between pods take a longer way", Do: "nothing, or boot a newer kernel"})
	default:
		warn(fmt.Sprintf("BPF programs cannot be loaded: %v", err), "pods are forwarded by the host stack, without the checks of the data path", "sysctl kernel.unprivileged_bpf_disabled and lockdown do not matter to root; a container needs CAP_BPF and CAP_SYS_ADMIN")
	}
	if n.older(6, 6) {
		found = append(found, Finding{Severity: Note, What: "the kernel is " + n.release() + ": it has no TCX (6.6)", Why: "programs hang on cls_bpf filters, which other programs can remove", Do: "nothing, or boot a newer kernel"})
	}
	return found
}

// earliest is before every release of mknet: a clock that is behind it was never set.
var earliest = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)

func checkClock(_ context.Context, n *Node) []Finding {
	if n.now().Before(earliest) {
		return []Finding{{
			Severity: Warning, What: "the clock says " + n.now().UTC().Format(time.RFC3339), Why: "certificates of the TCP listener look as if they were of the future, and logs cannot be compared",
			Do: "set it: timedatectl, chronyc",
		}}
	}
	adjtimex := n.Adjtimex
	if adjtimex == nil {
		adjtimex = unix.Adjtimex
	}
	var tx unix.Timex // modes 0: only reads
	state, err := adjtimex(&tx)
	if err != nil {
		return unlooked("clock", err)
	}
	if state == unix.TIME_ERROR || tx.Status&unix.STA_UNSYNC != 0 {
		return []Finding{{
			Severity: Note, What: "nothing keeps the wall clock (the kernel says that it is not synchronised)",
			Why: "logs of several hosts cannot be compared; mknetd's own times (quarantine, leases) go by the boot clock and do not care", Do: "start chrony or systemd-timesyncd",
		}}
	}
	return nil
}
