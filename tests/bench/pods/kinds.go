package pods

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"mknet/tests/bench/side"
	"mknet/tests/netlab"
)

// Kind is one way to give pods a network.
type Kind struct {
	Name string
	// list is the CNI configuration; nil is none, only routes.
	list func() map[string]any
	// start makes what the configuration needs on the node; after is for once the pods
	// are there.
	start, after func(n *node) error
}

// Names of the kinds that goals are about.
const (
	Kernel = "kernel" // veths and routes, no firewall at all
	Ours   = "mknet"
	// Direct is one veth from pod to pod: no node between them, so that no node can be
	// cheaper. What others take more is all that there is to save.
	Direct = "direct"
)

// Kinds are all there are.
var Kinds = []Kind{
	{Name: Direct, after: join},
	{Name: Kernel},
	{Name: Ours, list: ours, start: startDaemon},
	{Name: "ptp-iptables", list: reference(map[string]any{"type": "ptp"}, "iptables")},
	{Name: "ptp-nftables", list: reference(map[string]any{"type": "ptp"}, "nftables")},
	{Name: "bridge-iptables", list: reference(bridge(), "iptables")},
	{Name: "bridge-nftables", list: reference(bridge(), "nftables")},
}

// prefix is what all pods have their addresses of.
const prefix = "10.88.0.0/16"

// socket of mknetd, on the private host's own /run.
const socket = "/run/mknetd.sock"

func ours() map[string]any {
	return conflist(map[string]any{"type": "mk-cni", "mode": "veth", "ipMasq": true, "socket": socket})
}

func bridge() map[string]any {
	return map[string]any{"type": "bridge", "bridge": "cni0", "isGateway": true}
}

// reference is a main plugin of containernetworking/plugins with the meta plugins
// that container engines chain to it. The firewall plugin knows iptables only.
func reference(main map[string]any, backend string) func() map[string]any {
	return func() map[string]any {
		main["ipMasq"], main["ipMasqBackend"] = true, backend
		main["ipam"] = map[string]any{"type": "host-local", "subnet": prefix, "routes": []any{map[string]any{"dst": "0.0.0.0/0"}}}
		plugins := []any{main}
		if backend == "iptables" {
			plugins = append(plugins, map[string]any{"type": "firewall"})
		}
		return conflist(append(plugins, map[string]any{"type": "portmap", "backend": backend, "capabilities": map[string]any{"portMappings": true}})...)
	}
}

func conflist(plugins ...any) map[string]any {
	return map[string]any{"cniVersion": "1.0.0", "name": "bench", "plugins": plugins}
}

// startDaemon starts mknetd and waits until it serves.
func startDaemon(n *node) error {
	config := filepath.Join(n.dir, "config.yaml")
	text := fmt.Sprintf("socket: %s\nstateDir: %s\npools:\n- name: pods\n  prefix: %s\n", socket, filepath.Join(n.dir, "state"), prefix)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(n.dir, "mknetd.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(n.bin, "mknetd"), "serve", "--config", config)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	for deadline := time.Now().Add(side.Patience); ; time.Sleep(20 * time.Millisecond) {
		_, err := netlab.Try(filepath.Join(n.bin, "mknetd"), "endpoints", "--config", config)
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			said, _ := os.ReadFile(log.Name())
			return fmt.Errorf("mknetd does not serve: %w\n%s", err, said)
		}
	}
}

// add makes pod number i in a namespace of its own and returns its address.
func (n *node) add(i int) (netip.Addr, error) {
	name := fmt.Sprintf("p%d", i)
	if _, err := netlab.Try("ip", "netns", "add", name); err != nil {
		return netip.Addr{}, err
	}
	if n.kind.list == nil {
		return n.addRouted(i, name)
	}
	raw, err := json.Marshal(n.kind.list())
	if err != nil {
		return netip.Addr{}, err
	}
	list, err := libcni.ConfListFromBytes(raw)
	if err != nil {
		return netip.Addr{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*side.Patience)
	defer cancel()
	r, err := n.cni.AddNetworkList(ctx, list, &libcni.RuntimeConf{ContainerID: name, NetNS: "/run/netns/" + name, IfName: "eth0"})
	if err != nil {
		return netip.Addr{}, fmt.Errorf("ADD of pod %d: %w", i, err)
	}
	result, err := types100.GetResult(r)
	if err != nil {
		return netip.Addr{}, err
	}
	if len(result.IPs) == 0 {
		return netip.Addr{}, fmt.Errorf("ADD of pod %d gave no address", i)
	}
	addr, ok := netip.AddrFromSlice(result.IPs[0].Address.IP)
	if !ok {
		return netip.Addr{}, fmt.Errorf("ADD of pod %d gave the address %s", i, result.IPs[0].Address.IP)
	}
	return addr.Unmap(), nil
}

// addRouted is a pod by hand: a veth, an address, a route each way.
func (n *node) addRouted(i int, name string) (netip.Addr, error) {
	base := netip.MustParsePrefix(prefix).Addr().As4()
	number := i + 2 // .1 is the gateway
	addr := netip.AddrFrom4([4]byte{base[0], base[1], byte(number >> 8), byte(number)})
	gateway := netip.MustParsePrefix(prefix).Addr().Next().String()
	host := "h" + name
	for _, args := range [][]string{
		{"link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", name},
		{"addr", "add", gateway + "/32", "dev", host},
		{"link", "set", host, "up"},
		{"route", "add", addr.String() + "/32", "dev", host},
		{"-n", name, "addr", "add", addr.String() + "/32", "dev", "eth0"},
		{"-n", name, "link", "set", "eth0", "up"},
		{"-n", name, "route", "add", gateway, "dev", "eth0"},
		{"-n", name, "route", "add", "default", "via", gateway},
	} {
		if _, err := netlab.Try("ip", args...); err != nil {
			return addr, err
		}
	}
	return addr, nil
}

// join makes a veth from the first pod to the second, which each takes to the other.
func join(n *node) error {
	if _, err := netlab.Try("ip", "link", "add", "direct", "netns", "p0", "type", "veth", "peer", "name", "direct", "netns", "p1"); err != nil {
		return err
	}
	var errs []error
	for i, name := range []string{"p0", "p1"} {
		for _, args := range [][]string{
			{"-n", name, "link", "set", "direct", "up"},
			{"-n", name, "route", "add", n.addresses[1-i].String() + "/32", "dev", "direct"},
		} {
			_, err := netlab.Try("ip", args...)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// surroundings are what every node has: an egress with a default route.
func surroundings() error {
	var errs []error
	for _, args := range [][]string{
		{"netns", "add", "internet"},
		{"link", "add", netlab.UplinkName, "type", "veth", "peer", "name", "inet0", "netns", "internet"},
		{"addr", "add", netlab.HostAddr + "/24", "dev", netlab.UplinkName},
		{"link", "set", netlab.UplinkName, "up"},
		{"-n", "internet", "addr", "add", netlab.InternetAddr + "/24", "dev", "inet0"},
		{"-n", "internet", "link", "set", "inet0", "up"},
		{"route", "add", "default", "via", netlab.InternetAddr},
	} {
		_, err := netlab.Try("ip", args...)
		errs = append(errs, err)
	}
	errs = append(errs, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644))
	return errors.Join(errs...)
}
