package link

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"mknet/spec/endpoint"
	"mknet/spec/pump"
	"mknet/tests/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

func testConfig() pump.LinkConfig {
	return pump.LinkConfig{
		Link: "mkn0", Address: netip.MustParsePrefix("172.30.0.2/30"), Gateway: netip.MustParseAddr("172.30.0.1"), MTUBytes: 1400,
		VnetHdr: true, Lanes: 1, Windows: []pump.Window{pump.BulkWindow}, Keepalive: pump.Milliseconds(5 * time.Second),
	}
}

// device opens a device inside ns.
func device(t *testing.T, ns *netlab.Namespace, name string) *Device {
	t.Helper()
	var d *Device
	var err error
	ns.Do(t, func() { d, err = Open(name, slog.New(slog.DiscardHandler)) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func configure(t *testing.T, ns *netlab.Namespace, d *Device, cfg pump.LinkConfig) []string {
	t.Helper()
	var changes []string
	var err error
	ns.Do(t, func() { changes, err = d.Configure(cfg) })
	if err != nil {
		t.Fatal(err)
	}
	return changes
}

// expect checks the namespace as an operator sees it.
func expect(t *testing.T, ns *netlab.Namespace, command string, want ...string) string {
	t.Helper()
	words := strings.Fields(command)
	out := ns.Run(t, words[0], words[1:]...)
	for _, w := range want {
		if !strings.Contains(out, w) {
			t.Errorf("%s: %q is missing in\n%s", command, w, out)
		}
	}
	return out
}

func ifindex(t *testing.T, ns *netlab.Namespace) string {
	t.Helper()
	index, _, _ := strings.Cut(ns.Run(t, "ip", "-o", "link", "show", "mkn0"), ":")
	return index
}

func TestConfigure(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	d := device(t, ns, "mkn0")
	if d.Lanes != len(d.Queues) || !d.VnetHdr || d.Offloads == 0 {
		t.Errorf("device: %d lanes, %d queues, header %t, offloads %s", d.Lanes, len(d.Queues), d.VnetHdr, d.Offloads)
	}
	if got := configure(t, ns, d, testConfig()); len(got) < 4 {
		t.Errorf("first configuration changed only %q", got)
	}
	out := expect(t, ns, "ip -d addr show mkn0", "mtu 1400", "UP", "inet 172.30.0.2/30", "tun type tun", "persist on", "vnet_hdr on")
	if strings.Contains(out, "inet6") {
		t.Errorf("the device has an IPv6 address:\n%s", out)
	}
	expect(t, ns, "ip route show default", "default via 172.30.0.1 dev mkn0")
	expect(t, ns, "cat /proc/sys/net/ipv6/conf/mkn0/disable_ipv6", "1")
	if got := configure(t, ns, d, testConfig()); len(got) != 0 {
		t.Errorf("the same configuration again changed %q", got)
	}
}

func TestConfigureAppliesTheDifference(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	d := device(t, ns, "mkn0")
	configure(t, ns, d, testConfig())
	index := ifindex(t, ns)
	for _, tt := range []struct {
		name          string
		edit          func(*pump.LinkConfig)
		change        string
		addr, route   string
		mustNotRemain string
	}{
		{"mtu", func(c *pump.LinkConfig) { c.MTUBytes = 9000 }, "mtu 9000", "mtu 9000", "172.30.0.1", "mtu 1400"},
		{"other subnet", func(c *pump.LinkConfig) {
			c.Address, c.Gateway = netip.MustParsePrefix("10.9.0.2/30"), netip.MustParseAddr("10.9.0.1")
		}, "address 10.9.0.2/30", "inet 10.9.0.2/30", "default via 10.9.0.1 dev mkn0", "172.30.0"},
		{"same subnet", func(c *pump.LinkConfig) {
			c.Address, c.Gateway = netip.MustParsePrefix("10.9.0.1/30"), netip.MustParseAddr("10.9.0.2")
		}, "address 10.9.0.1/30", "inet 10.9.0.1/30", "default via 10.9.0.2 dev mkn0", "inet 10.9.0.2"},
		{"other prefix length", func(c *pump.LinkConfig) {
			c.Address, c.Gateway = netip.MustParsePrefix("10.9.0.1/24"), netip.MustParseAddr("10.9.0.2")
		}, "address 10.9.0.1/24", "inet 10.9.0.1/24", "default via 10.9.0.2 dev mkn0", "/30"},
		{"back", func(*pump.LinkConfig) {}, "address 172.30.0.2/30", "inet 172.30.0.2/30", "default via 172.30.0.1 dev mkn0", "10.9"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := testConfig()
			tt.edit(&cfg)
			if got := strings.Join(configure(t, ns, d, cfg), "; "); !strings.Contains(got, tt.change) {
				t.Errorf("changes %q, want %q", got, tt.change)
			}
			out := expect(t, ns, "ip addr show mkn0", tt.addr) + expect(t, ns, "ip route show default", tt.route)
			if strings.Contains(out, tt.mustNotRemain) {
				t.Errorf("%q remains in\n%s", tt.mustNotRemain, out)
			}
			if n := strings.Count(out, "inet "); n != 1 {
				t.Errorf("%d addresses:\n%s", n, out)
			}
		})
	}
	if got := ifindex(t, ns); got != index {
		t.Errorf("the device was made again: index %s, was %s", got, index)
	}
}

// What an administrator or another program did to our device is put right; what
// belongs to others stays.
func TestConfigureLeavesOthersAlone(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	ns.Run(t, "ip", "link", "add", "other0", "type", "veth", "peer", "name", "other1")
	ns.Run(t, "ip", "link", "set", "other1", "up")
	ns.Run(t, "ip", "addr", "add", "192.0.2.1/24", "dev", "other0")
	ns.Run(t, "ip", "link", "set", "other0", "up")
	ns.Run(t, "ip", "route", "add", "default", "via", "192.0.2.254", "dev", "other0", "metric", "50")
	d := device(t, ns, "mkn0")
	configure(t, ns, d, testConfig())
	ns.Run(t, "ip", "addr", "add", "10.1.1.1/24", "dev", "mkn0")
	ns.Run(t, "ip", "link", "set", "mkn0", "mtu", "1200")
	ns.Run(t, "ip", "route", "add", "default", "via", "10.1.1.2", "dev", "mkn0", "metric", "9")
	configure(t, ns, d, testConfig())
	out := expect(t, ns, "ip addr show", "inet 172.30.0.2/30", "mtu 1400", "inet 192.0.2.1/24 scope global other0")
	out += expect(t, ns, "ip route show", "default via 172.30.0.1 dev mkn0", "default via 192.0.2.254 dev other0 metric 50")
	if strings.Contains(out, "10.1.1") {
		t.Errorf("what was put on our device remains:\n%s", out)
	}
}

func TestConfigureNamesAForeignDefaultRoute(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	ns.Run(t, "ip", "link", "add", "other0", "type", "veth", "peer", "name", "other1")
	ns.Run(t, "ip", "link", "set", "other1", "up")
	ns.Run(t, "ip", "addr", "add", "192.0.2.1/24", "dev", "other0")
	ns.Run(t, "ip", "link", "set", "other0", "up")
	ns.Run(t, "ip", "route", "add", "default", "via", "192.0.2.254")
	d := device(t, ns, "mkn0")
	var err error
	ns.Do(t, func() { _, err = d.Configure(testConfig()) })
	if err == nil || !strings.Contains(err.Error(), "other0 has the default route") {
		t.Errorf("got %v, want an error that names other0", err)
	}
	expect(t, ns, "ip route show default", "default via 192.0.2.254 dev other0")
}

func TestTwoAttachments(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	configure(t, ns, device(t, ns, "mkn0"), testConfig())
	second := testConfig()
	second.Link, second.Address, second.Gateway = "mkn1", netip.MustParsePrefix("172.30.0.6/30"), netip.MustParseAddr("172.30.0.5")
	configure(t, ns, device(t, ns, "mkn1"), second)
	expect(t, ns, "ip route show default", "default via 172.30.0.1 dev mkn0", "default via 172.30.0.5 dev mkn1 metric 101")
}

func TestDeviceOutlivesItsHolder(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	d := device(t, ns, "mkn0")
	configure(t, ns, d, testConfig())
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	expect(t, ns, "ip addr show mkn0", "inet 172.30.0.2/30")
	if got := configure(t, ns, device(t, ns, "mkn0"), testConfig()); len(got) != 0 {
		t.Errorf("a restarted agent changed %q", got)
	}
}

func TestOpenRefusesAForeignLink(t *testing.T) {
	netlab.Clean(t)
	ns := netlab.New(t)
	ns.Run(t, "ip", "link", "add", "mkn0", "type", "veth", "peer", "name", "other1")
	var err error
	ns.Do(t, func() { _, err = Open("mkn0", slog.New(slog.DiscardHandler)) })
	if err == nil || !strings.Contains(err.Error(), "veth of that name") {
		t.Errorf("got %v, want an error that names the veth", err)
	}
	expect(t, ns, "ip -d link show mkn0", "veth")
}

func TestResolvConf(t *testing.T) {
	dns := endpoint.DNS{Nameservers: []string{"169.254.169.254", "9.9.9.9"}, Domain: "example.org", Search: []string{"a.example.org", "example.org"}, Options: []string{"ndots:2", "edns0"}}
	want := "# written by mk-agent\ndomain example.org\nsearch a.example.org example.org\nnameserver 169.254.169.254\nnameserver 9.9.9.9\noptions ndots:2 edns0\n"
	path := filepath.Join(t.TempDir(), "etc", "resolv.conf")
	ensure := func(d endpoint.DNS, changed bool, text string) {
		t.Helper()
		got, err := EnsureResolvConf(path, d)
		b, readErr := os.ReadFile(path)
		if err != nil || readErr != nil || got != changed || string(b) != text {
			t.Errorf("changed %t, %v, text %q, %v; want %t and %q", got, err, b, readErr, changed, text)
		}
	}
	ensure(dns, true, want)
	ensure(dns, false, want)
	ensure(endpoint.DNS{}, false, want)
	ensure(endpoint.DNS{Nameservers: []string{"1.1.1.1"}}, true, "# written by mk-agent\nnameserver 1.1.1.1\n")
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o644 {
		t.Errorf("mode %v, %v; want 0644", info.Mode(), err)
	}
	if names, err := os.ReadDir(filepath.Dir(path)); err != nil || len(names) != 1 {
		t.Errorf("left beside it: %v, %v", names, err)
	}
}

func TestResolvConfReplacesALink(t *testing.T) {
	dir := t.TempDir()
	target, path := filepath.Join(dir, "stub"), filepath.Join(dir, "resolv.conf")
	if err := os.WriteFile(target, []byte("stub"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
	if _, err := EnsureResolvConf(path, endpoint.DNS{Nameservers: []string{"1.1.1.1"}}); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(target); err != nil || string(b) != "stub" {
		t.Errorf("the link's target is %q, %v", b, err)
	}
}

// A container runtime mounts a file of its own over /etc/resolv.conf.
func TestResolvConfIsAMount(t *testing.T) {
	dir := t.TempDir()
	source, path := filepath.Join(dir, "source"), filepath.Join(dir, "resolv.conf")
	for _, p := range []string{source, path} {
		if err := os.WriteFile(p, []byte(strings.Repeat("# an older and longer text\n", 20)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount(source, path, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(path, 0); err != nil {
			t.Error(err)
		}
	}()
	dns := endpoint.DNS{Nameservers: []string{"1.1.1.1"}}
	if changed, err := EnsureResolvConf(path, dns); err != nil || !changed {
		t.Fatalf("changed %t, %v", changed, err)
	}
	if b, err := os.ReadFile(source); err != nil || string(b) != string(ResolvConf(dns)) {
		t.Errorf("the mounted file is %q, %v", b, err)
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 2 {
		t.Errorf("left beside it: %v, %v", names, err)
	}
}
