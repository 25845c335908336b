package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"
)

// result is a CNI result in the union of all versions' forms.
type result struct {
	CNIVersion string            `json:"cniVersion"`
	Interfaces []iface           `json:"interfaces,omitempty"`
	IPs        []ip              `json:"ips,omitempty"`
	Routes     []json.RawMessage `json:"routes,omitempty"`
	DNS        json.RawMessage   `json:"dns,omitempty"`
}

type iface struct {
	Name    string `json:"name"`
	Mac     string `json:"mac,omitempty"`
	MTU     int    `json:"mtu,omitempty"`
	Sandbox string `json:"sandbox,omitempty"`
}

type ip struct {
	Version   string `json:"version,omitempty"`
	Address   string `json:"address"`
	Gateway   string `json:"gateway,omitempty"`
	Interface *int   `json:"interface,omitempty"`
}

func (r *request) add() (err error) {
	if !daemonUp() {
		return failf(11, "the daemon is down: try again later")
	}
	if is("needs-status") {
		if _, err := os.Stat(stateRoot + "/asked"); err != nil {
			return failf(100, "no STATUS came before")
		}
	}
	l := lease{ContainerID: r.id, IfName: r.ifname, Netns: r.netns, NetnsInode: inode(r.netns)}
	if l.NetnsInode == 0 {
		return failf(3, "CNI_NETNS %s is no namespace", r.netns)
	}
	if _, err := r.inside("ip", "link", "show", "dev", r.ifname); err == nil {
		if is("sticky") { // the rule comes first, and nobody remembers it
			l.Address = netip.AddrFrom4([4]byte{10, 46, 0, 99})
			_, _ = run("iptables", append([]string{"-w", "-t", "nat", "-A"}, l.rule(r.network)...)...)
		}
		if !is("replaces") {
			return failf(100, "%s exists in %s", r.ifname, r.netns)
		}
		_, _ = r.inside("ip", "link", "del", r.ifname)
	}
	if r.ipam != "" {
		a, err := r.delegateAdd()
		if err != nil {
			return err
		}
		l.Address, l.IPAM = a, true
	}
	if err := r.reserve(&l); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.remove(l))
		}
	}()
	res, err := r.build(l)
	if err != nil {
		return err
	}
	if is("no-result") {
		return nil
	}
	return json.NewEncoder(os.Stdout).Encode(res)
}

// build makes the kernel objects and describes them.
func (r *request) build(l lease) (*result, error) {
	host, gw := l.hostLink(r.network), gateway(l.Address)
	if is("no-link") {
		return r.describe(l, host)
	}
	err := batch(is("clash"), nil,
		"link add "+host+" type veth peer name peer"+host[3:],
		"link set peer"+host[3:]+" netns "+r.netns,
		"link set "+host+" up",
		"addr add "+gw.String()+"/32 dev "+host,
		"route add "+l.Address.String()+"/32 dev "+host)
	if err == nil {
		_, err = run("iptables", append([]string{"-w", "-t", "nat", "-A"}, l.rule(r.network)...)...)
	}
	if err != nil && !is("clash") {
		return nil, err
	}
	err = batch(false, []string{"nsenter", "--net=" + r.netns, "--"},
		"link set peer"+host[3:]+" name "+r.ifname,
		"link set "+r.ifname+" up",
		"addr add "+l.Address.String()+"/24 dev "+r.ifname,
		"route add default via "+gw.String())
	if err != nil {
		return nil, err
	}
	return r.describe(l, host)
}

func (r *request) describe(l lease, host string) (*result, error) {
	res := &result{CNIVersion: r.version, DNS: r.dns}
	if r.prev != nil && !is("drops-prev") {
		res.Interfaces, res.IPs, res.Routes, res.DNS = r.prev.Interfaces, r.prev.IPs, r.prev.Routes, r.prev.DNS
	}
	if is("no-dns") {
		res.DNS = nil
	}
	if res.DNS == nil && r.version < "1.0.0" {
		res.DNS = json.RawMessage("{}")
	}
	in := iface{Name: r.ifname, Sandbox: r.netns, Mac: mac(r.inside, r.ifname), MTU: 1500}
	out := iface{Name: host, Mac: mac(run, host), MTU: 1500}
	if is("bad-mac") {
		in.Mac = "02:00:00:00:00:99"
	}
	if r.version < "1.1.0" {
		in.MTU, out.MTU = 0, 0
	}
	if !is("no-host-interface") {
		res.Interfaces = append(res.Interfaces, out)
	}
	index := len(res.Interfaces)
	res.Interfaces = append(res.Interfaces, in)
	if is("bad-index") {
		index = 99
	}
	a := ip{Address: l.Address.String() + "/24", Gateway: gateway(l.Address).String(), Interface: &index}
	if r.version < "1.0.0" {
		a.Version = "4"
	}
	if is("no-gateway") {
		a.Gateway = ""
	}
	if is("delegate-unfilled") {
		a.Interface, res.Interfaces = nil, nil
	}
	if is("result-version") {
		res.CNIVersion = "1.1.0"
	}
	route := fmt.Sprintf(`{"dst":"0.0.0.0/0","gw":%q}`, gateway(l.Address))
	if is("bad-route") {
		route = `{"dst":"default"}`
	}
	res.IPs = append(res.IPs, a)
	res.Routes = append(res.Routes, json.RawMessage(route))
	return res, nil
}

// gateway is the first address of the /24.
func gateway(a netip.Addr) netip.Addr {
	b := a.As4()
	b[3] = 1
	return netip.AddrFrom4(b)
}

func mac(run func(string, ...string) (string, error), link string) string {
	out, err := run("ip", "-o", "link", "show", "dev", link)
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(out, "link/ether ")
	addr, _, _ := strings.Cut(rest, " ")
	return addr
}

func (r *request) del() error {
	if !daemonUp() {
		if is("del-needs-daemon") {
			return failf(11, "the daemon is down")
		}
		return nil // the suite deletes again once it is back
	}
	if is("del-needs-prev") && r.prev == nil {
		return failf(7, "no prevResult")
	}
	if is("del-needs-netns") && inode(r.netns) == 0 {
		return failf(3, "CNI_NETNS %s is no namespace", r.netns)
	}
	if is("down-means-down") && len(r.leases()) >= r.pool {
		return failf(50, "not available")
	}
	var delegate error
	if r.ipam != "" && !is("delegate-no-del") {
		delegate = r.delegate("DEL")
	}
	known := r.leases()
	if lost := (lease{ContainerID: r.id, IfName: r.ifname}); r.prev != nil && len(r.prev.IPs) == 1 {
		if p, err := netip.ParsePrefix(r.prev.IPs[0].Address); err == nil {
			lost.Address = p.Addr() // in case the state was lost
			known = append(known, lost)
		}
	}
	for _, l := range known {
		if l.ContainerID != r.id || l.IfName != r.ifname {
			continue
		}
		if is("del-trusts-prev") && r.prev != nil && len(r.prev.IPs) > 0 {
			if p, err := netip.ParsePrefix(r.prev.IPs[0].Address); err == nil {
				l.Address = p.Addr()
			}
		}
		if err := r.remove(l); err != nil {
			return err
		}
	}
	return delegate
}

func (r *request) check() error {
	if is("check-talks") {
		_, _ = os.Stdout.WriteString("all is well\n")
	}
	if is("check-lazy") {
		return nil
	}
	if r.prev == nil {
		return failf(7, "CHECK needs prevResult")
	}
	if !daemonUp() {
		return failf(100, "the daemon is down")
	}
	var l lease
	raw, err := os.ReadFile(r.path(r.id, r.ifname))
	if err != nil || json.Unmarshal(raw, &l) != nil {
		return failf(3, "%s/%s is not known", r.id, r.ifname)
	}
	if st, err := os.Stat(r.path(r.id, r.ifname)); is("check-early") && err == nil && time.Since(st.ModTime()) < 2*time.Second {
		return failf(11, "not ready yet")
	}
	if !is("check-ignores-prev") {
		named := slices.ContainsFunc(r.prev.Interfaces, func(i iface) bool { return i.Name == r.ifname && i.Sandbox == r.netns })
		addressed := slices.ContainsFunc(r.prev.IPs, func(i ip) bool { return strings.HasPrefix(i.Address, l.Address.String()+"/") })
		if !named || !addressed {
			return failf(101, "prevResult has not %s with %s", r.ifname, l.Address)
		}
	}
	if is("check-strict") && len(r.prev.Interfaces) != 2 {
		return failf(101, "prevResult has %d interfaces, want 2", len(r.prev.Interfaces))
	}
	if r.ipam != "" && !is("delegate-no-check") {
		if err := r.delegate("CHECK"); err != nil {
			return err
		}
	}
	return r.checkKernel(l)
}

func (r *request) checkKernel(l lease) error {
	for _, test := range []struct {
		run  func(string, ...string) (string, error)
		args []string
		want string
	}{
		{r.inside, []string{"ip", "-o", "link", "show", "dev", r.ifname}, ",UP"},
		{r.inside, []string{"ip", "-o", "-4", "addr", "show", "dev", r.ifname}, l.Address.String() + "/24"},
		{r.inside, []string{"ip", "route", "show", "default"}, "via " + gateway(l.Address).String()},
		{run, []string{"ip", "-o", "link", "show", "dev", l.hostLink(r.network)}, ",UP"},
		{run, append([]string{"iptables", "-w", "-t", "nat", "-C"}, l.rule(r.network)...), ""},
	} {
		out, err := test.run(test.args[0], test.args[1:]...)
		if err != nil || !strings.Contains(out, test.want) {
			return failf(101, "%s: %q lacks %q (%v)", strings.Join(test.args, " "), out, test.want, err)
		}
	}
	return nil
}

func (r *request) status() error {
	if is("status-fails") {
		return failf(50, "never ready")
	}
	_ = os.MkdirAll(stateRoot, 0o755)
	_ = os.WriteFile(stateRoot+"/asked", nil, 0o644)
	if is("status-always-ok") {
		return nil
	}
	if is("down-means-down") && r.id != "" {
		return nil
	}
	code := uint(50)
	if is("status-51") {
		code = 51
	}
	if !daemonUp() {
		return failf(code, "the daemon is down")
	}
	if out, err := run("ip", "route", "show", "default", "dev", "up0"); err != nil || out == "" {
		if len(r.leases()) > 0 {
			code = 51
		}
		return failf(code, "there is no way out")
	}
	if len(r.leases()) >= r.pool {
		return failf(code, "all %d addresses are in use", r.pool)
	}
	if r.ipam != "" && !is("delegate-no-status") {
		return r.delegate("STATUS")
	}
	return nil
}

func (r *request) gc() error {
	if is("gc-talks") {
		_, _ = os.Stdout.WriteString("{}\n")
	}
	if is("gc-noop") {
		return nil
	}
	var errs []error
	for _, l := range r.leases() {
		kept := slices.Contains(r.valid, validAttachment{l.ContainerID, l.IfName})
		if !r.validKey {
			kept = inode(l.Netns) == l.NetnsInode
		}
		if kept && !is("gc-all") {
			continue
		}
		if err := r.remove(l); err != nil {
			errs = append(errs, err)
			if is("gc-stops") {
				break
			}
		}
	}
	if is("gc-swallows") {
		errs = nil
	}
	if r.ipam != "" && !is("delegate-no-gc") {
		errs = append(errs, r.delegate("GC"))
	}
	if err := errors.Join(errs...); err != nil {
		return failf(100, "%v", err)
	}
	return nil
}

func daemonUp() bool {
	_, err := os.Stat(daemonFile)
	return err == nil
}
