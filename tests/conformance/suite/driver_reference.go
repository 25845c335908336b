package suite

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"mknet/tests/netlab"
)

// reference drives ptp and bridge of containernetworking/plugins, with
// host-local addresses and masquerading.
type reference struct {
	base
	third int // third octet of the subnet
}

// NewReference drives the reference plugin of that name ("ptp" or "bridge").
func NewReference(name, plugin string) (Driver, error) {
	switch name {
	case "ptp":
		return &reference{base{name: name, plugin: plugin, conf: Conf{"type": "ptp", "ipMasq": true, "ipam": hostLocal("10.44.1.0/24")}}, 1}, nil
	case "bridge":
		return &reference{base{name: name, plugin: plugin, conf: Conf{"type": "bridge", "bridge": "cniref0", "isGateway": true, "ipMasq": true, "ipam": hostLocal("10.44.2.0/24")}}, 2}, nil
	}
	return nil, fmt.Errorf("the suite knows mk-cni, ptp and bridge by name, not %q: give its configuration with -config FILE", name)
}

func hostLocal(subnet string) map[string]any {
	return map[string]any{"type": "host-local", "subnet": subnet, "routes": []any{map[string]any{"dst": "0.0.0.0/0"}}}
}

// The bridges of the bridge plugin: one takes one gateway address for good, so
// that each configuration has its own.
var bridges = map[string]string{"cniref0": "10.44.2.1/24", "cniref1": "10.44.102.1/30", "cniref2": "10.45.0.1/24"}

func (r *reference) Start() error {
	for name, addr := range bridges {
		if r.name != "bridge" {
			break
		}
		if _, err := netlab.Try("ip", "link", "show", "dev", name); err == nil {
			continue // a reset
		}
		for _, args := range [][]string{{"link", "add", name, "type", "bridge"}, {"addr", "add", addr, "dev", name}, {"link", "set", name, "up"}} {
			if _, err := netlab.Try("ip", args...); err != nil {
				return err
			}
		}
	}
	return prime(r)
}

func (r *reference) Reset() error { return r.Start() }

func (r *reference) Small() (Conf, func() error, error) {
	conf := r.conf.with(Conf{"ipam": hostLocal(fmt.Sprintf("10.44.%d.0/30", r.third+100))}) // .1 is the gateway, .2 is left
	if r.name == "bridge" {
		conf["bridge"] = "cniref1"
	}
	return conf, func() error { return nil }, nil
}

func (r *reference) Delegating(ipam string) (Conf, error) {
	conf := r.conf.with(Conf{"ipam": map[string]any{"type": ipam}})
	if r.name == "bridge" {
		conf["bridge"] = "cniref2"
	}
	return conf, nil
}

func (r *reference) LoseReservation(network, containerID string) error {
	found := false
	files, _ := filepath.Glob(filepath.Join("/var/lib/cni/networks", network, "*"))
	for _, f := range files {
		if raw, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(raw), containerID) {
			found = true
			if err := os.Remove(f); err != nil {
				return err
			}
		}
	}
	if !found {
		return fmt.Errorf("host-local has no lease of %s in %s", containerID, network)
	}
	return nil
}

func (r *reference) Degrade(existing *Attachment) (func() error, error) {
	return nil, meaningless("has no notion of an egress")
}

func (r *reference) Jam(Attachment) (func() error, error) {
	return nil, meaningless("removes nothing in GC by itself")
}

// double drives the suite's own plugin double, see tests/conformance/double.
type double struct{ base }

// daemonFile is the double's "daemon", see tests/conformance/double.
const daemonFile = "/run/double-daemon"

// NewDouble drives the plugin double; its file name says which defect it has.
func NewDouble(plugin string) Driver {
	return &double{base{name: filepath.Base(plugin), plugin: plugin, conf: Conf{"type": "double"}}}
}

func (d *double) Start() error {
	if err := os.WriteFile(daemonFile, nil, 0o644); err != nil {
		return err
	}
	_, err := netlab.Try("iptables", "-w", "-t", "nat", "-S") // makes the base chains
	return err
}
func (d *double) Stop() error { return os.RemoveAll(daemonFile) }

func (d *double) Reset() error {
	_ = os.Remove("/var/lib/cni/double/asked")
	return d.Start()
}

func (d *double) Small() (Conf, func() error, error) {
	return d.conf.with(Conf{"pool": 1}), func() error { return nil }, nil
}

func (d *double) Delegating(ipam string) (Conf, error) {
	return d.conf.with(Conf{"ipam": map[string]any{"type": ipam}}), nil
}

func (d *double) StopDaemon() (func() error, error) { return d.Start, d.Stop() }

func (d *double) LoseReservation(network, containerID string) error {
	return os.Remove(d.lease(network, containerID))
}

func (d *double) lease(network, containerID string) string {
	return filepath.Join("/var/lib/cni/double", network, containerID+"+eth0.json")
}

func (d *double) Degrade(*Attachment) (func() error, error) {
	if _, err := netlab.Try("ip", "route", "del", "default"); err != nil {
		return nil, err
	}
	return func() error {
		_, err := netlab.Try("ip", "route", "add", "default", "via", netlab.InternetAddr, "dev", netlab.UplinkName)
		return err
	}, nil
}

func (d *double) Jam(a Attachment) (func() error, error) {
	files, _ := filepath.Glob("/var/lib/cni/double/*/" + a.ID + "+eth0.json")
	if len(files) != 1 {
		return nil, fmt.Errorf("the double has %d leases of %s", len(files), a.ID)
	}
	jam := files[0] + ".jam"
	return func() error { return os.Remove(jam) }, os.WriteFile(jam, nil, 0o644)
}

func (d *double) Unsupported() (Conf, map[string]any, string, string, error) {
	return d.conf, map[string]any{"mac": "02:00:00:00:00:05"}, "mac", "02:00:00:00:00:05", nil
}
