package guest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Spec is what goes into an initramfs besides what every guest has: process 1,
// bash, busybox and its applets. Tools of the same name go before those.
type Spec struct {
	Init     string   // the program inguest
	Modules  []string // kernel modules, loaded in this order, with what they need before them
	Tools    []string // dynamic programs of this machine, by name, with their libraries
	Programs []string // static programs, for /mknet
	XTables  bool     // iptables of both flavours, with their plugins
}

// Modules of each kind of guest. Tun, vsock and the netfilter modules that mknet
// needs are in neither kernel image; what an iptables rule needs is loaded before,
// because nothing in the guest loads modules on demand.
var (
	VsockModules    = []string{"virtio_pci", "vmw_vsock_virtio_transport", "af_packet", "tun"}
	LoopbackModules = []string{"vsock_loopback"}
	PrimaryModules  = []string{
		"veth", "nf_conntrack", "nf_conntrack_netlink", "nf_tables", "nft_compat", "nft_chain_nat", "nft_masq", "nft_ct", "nft_nat",
		"nft_limit", "nft_log", "nft_reject_ipv4", "ip_tables", "iptable_nat", "iptable_filter", "iptable_mangle", "iptable_raw", "iptable_security",
		"ipt_REJECT", "xt_MASQUERADE", "xt_conntrack", "xt_connlimit", "xt_mark", "xt_connmark", "xt_tcpudp", "xt_TCPMSS", "xt_comment",
		"xt_state", "xt_addrtype", "xt_nat", "xt_REDIRECT", "xt_CT", "xt_LOG", "xt_limit", "xt_multiport", "xt_devgroup", "ipt_rpfilter", "sch_ingress", "sch_tbf", "cls_bpf",
		"act_bpf", "vsock_diag",
	}
)

// busybox is Debian's busybox-static.
const busybox = "/usr/bin/busybox"

// pluginDir is where Debian's libxtables looks for its plugins.
const pluginDir = "/usr/lib/x86_64-linux-gnu/xtables"

// WriteImage writes an initramfs for the kernel.
func WriteImage(ctx context.Context, path string, k Kernel, s Spec) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	a := NewArchive(f)
	for _, dir := range []string{"/proc", "/sys", "/dev", "/run", "/tmp", "/etc", "/var", "/log", "/mnt", "/root"} {
		a.Dir(dir)
	}
	a.Link("/var/run", "/run")
	a.Bytes("/etc/hosts", 0o644, []byte("127.0.0.1 localhost\n"))
	a.Bytes("/etc/resolv.conf", 0o644, nil)
	a.File("/init", s.Init)
	if err := addBusybox(ctx, a); err != nil {
		return err
	}
	if err := addModules(a, k, s.Modules); err != nil {
		return err
	}
	if err := addTools(a, s); err != nil {
		return err
	}
	for _, p := range s.Programs {
		a.File("/mknet/"+filepath.Base(p), p)
	}
	if err := a.Close(); err != nil {
		return err
	}
	return f.Close()
}

func addBusybox(ctx context.Context, a *Archive) error {
	list, err := exec.CommandContext(ctx, busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("%s --list: %w (install busybox-static)", busybox, err)
	}
	a.File("/bin/busybox", busybox)
	for _, applet := range strings.Fields(string(list)) {
		if applet != "busybox" {
			a.Link("/bin/"+applet, "busybox")
		}
	}
	return nil
}

func addModules(a *Archive, k Kernel, names []string) error {
	files, err := moduleOrder(k.Modules, names)
	if err != nil {
		return err
	}
	var order strings.Builder
	for _, f := range files {
		a.File("/modules/"+filepath.Base(f), f)
		fmt.Fprintln(&order, filepath.Base(f))
	}
	a.Bytes("/modules/order", 0o644, []byte(order.String()))
	return nil
}

// addTools adds programs of this machine with their libraries, each at its own
// path.
func addTools(a *Archive, s Spec) error {
	var files []string
	// bash: the shell of busybox would run its own applets before any program.
	for _, name := range append([]string{"bash"}, s.Tools...) {
		path, err := exec.LookPath(name)
		if err != nil {
			return fmt.Errorf("tool for the guest: %w", err)
		}
		real, err := filepath.EvalSymlinks(path)
		if err != nil {
			return err
		}
		a.File("/usr/sbin/"+name, real)
		files = append(files, real)
	}
	if s.XTables {
		plugins, err := filepath.Glob(pluginDir + "/*.so")
		if err != nil || len(plugins) == 0 {
			return fmt.Errorf("no iptables plugins in %s (install iptables)", pluginDir)
		}
		for _, p := range plugins {
			a.File(p, p)
		}
		files = append(files, plugins...)
		for _, flavour := range []string{"nft", "legacy"} {
			multi := "/usr/sbin/xtables-" + flavour + "-multi"
			a.File(multi, multi)
			files = append(files, multi)
			for _, suffix := range []string{"", "-save", "-restore"} {
				a.Link("/usr/sbin/iptables-"+flavour+suffix, filepath.Base(multi))
				if flavour == "nft" {
					a.Link("/usr/sbin/iptables"+suffix, filepath.Base(multi))
				}
			}
		}
	}
	libs, err := libraries(files...)
	if err != nil {
		return err
	}
	for _, l := range libs {
		a.File(l, l)
	}
	return nil
}
