package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"mknet/mk-cni/internal/cache"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// check compares what the runtime believes (prevResult), what mknetd recorded and
// what the kernel has. It reports every fault, not only the first.
func (c *call) check() error {
	if err := c.checkIdentity(); err != nil {
		return err
	}
	prev, err := parsePrevResult(c.conf.PrevResult, c.att.IfName)
	if err != nil {
		return err
	}
	ns, err := openNetns(c.netnsPath, c.netnsOverride)
	if err != nil {
		return err
	}
	defer ns.close()
	entry, err := c.checkedEntry()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(c.ctx, CheckBudget)
	defer cancel()
	reply, err := c.daemon.CheckEndpoint(ctx, entry.Generation, api.Selector{Attachment: c.att})
	if err != nil {
		return err
	}
	faults := c.compare(prev, ns, reply.Endpoint)
	for _, f := range reply.Faults {
		line := f.String()
		if f.Inspect != "" {
			line += " (see: " + f.Inspect + ")"
		}
		faults = append(faults, line)
	}
	if err := c.askIPAM("CHECK"); err != nil {
		faults = append(faults, err.Error())
	}
	c.replay()
	if len(faults) > 0 {
		return types.NewError(CodeCheckFailed, fmt.Sprintf("endpoint %s of %s: %d faults: %s", entry.Generation.Short(), c.att, len(faults), faults[0]), strings.Join(faults, "; "))
	}
	return nil
}

// checkedEntry is the cache entry that CHECK needs: without a generation it could
// only guess which endpoint is meant.
func (c *call) checkedEntry() (cache.Entry, error) {
	entry, err := c.readCache()
	var corrupt *cache.CorruptError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return entry, types.NewError(types.ErrUnknownContainer, fmt.Sprintf("%s is not attached: %s has no entry of it; delete and add it again", c.att, c.conf.CacheDir), "")
	case errors.As(err, &corrupt):
		return entry, types.NewError(types.ErrDecodingFailure, fmt.Sprintf("%s: which endpoint it has is not known: %v; delete and add it again", c.att, err), "")
	case err != nil:
		return entry, err
	case entry.Generation.IsZero():
		return entry, types.NewError(types.ErrUnknownContainer, fmt.Sprintf("%s is not attached: its ADD did not end; delete and add it again", c.att), "")
	}
	return entry, nil
}

// compare finds where mknetd's record is not the endpoint that the runtime means.
func (c *call) compare(prev prevResult, ns *netns, ep endpoint.Endpoint) []string {
	var m mismatch
	m.want(ep.Attachment == c.att, "mknetd's record is that of %s", ep.Attachment)
	m.want(ep.State == endpoint.Ready, "state is %s, must be %s", ep.State, endpoint.Ready)
	m.want(ep.Namespace.Device == ns.dev && ep.Namespace.Inode == ns.ino && ep.Namespace.BootID == c.bootID,
		"CNI_NETNS %s is not the namespace that the endpoint was made in", c.netnsPath)
	m.want(prev.sandbox == c.netnsPath || sameFile(prev.sandbox, ns), "prevResult has %s in sandbox %s, CNI_NETNS is %s", c.att.IfName, prev.sandbox, c.netnsPath)
	if ep.Mode == endpoint.Veth {
		comparePod(&m, prev, ep)
	}
	found := false
	for _, ip := range prev.ips {
		found = found || ip.address == netip.PrefixFrom(ep.Address, ep.Subnet.Bits()) && ip.gateway == ep.Gateway
	}
	m.want(found, "prevResult does not have address %s/%d with gateway %s on %s", ep.Address, ep.Subnet.Bits(), ep.Gateway, c.att.IfName)
	for _, d := range ep.Degraded {
		m = append(m, "degraded: "+d)
	}
	return m
}

// comparePod holds what of a pod's result is ours to the record: the host's end of
// the veth, the hardware address and the routes. What later plugins added is theirs.
func comparePod(m *mismatch, prev prevResult, ep endpoint.Endpoint) {
	host, listed := prev.others[ep.HostLink]
	m.want(listed, "prevResult does not list host link %s", ep.HostLink)
	mac := endpoint.MAC(ep.Generation.HostMAC())
	m.want(!listed || host == "" || host == mac.String(), "prevResult has %s for the MAC address of %s, must be %s", host, ep.HostLink, mac)
	m.want(prev.mac == "" || prev.mac == ep.PodMAC().String(), "prevResult has %s for the MAC address of %s, must be %s", prev.mac, ep.IfName, ep.PodMAC())
	m.want(slices.Contains(prev.routes, prevRoute{netip.PrefixFrom(ep.Gateway, 32), netip.Addr{}}), "prevResult does not have the route to gateway %s", ep.Gateway)
	for _, dst := range ep.PodRoutes() {
		m.want(slices.Contains(prev.routes, prevRoute{dst, ep.Gateway}), "prevResult does not have the route to %s by %s", dst, ep.Gateway)
	}
}

func sameFile(path string, ns *netns) bool {
	other, err := os.Stat(path)
	if err != nil {
		return false
	}
	own, err := ns.file.Stat()
	return err == nil && os.SameFile(other, own)
}

// prevResult is what CHECK uses of the chain's final result: our interface's
// sandbox and its addresses. What later plugins added or changed is theirs.
type prevResult struct {
	sandbox string
	mac     string
	ips     []prevIP
	routes  []prevRoute
	others  map[string]string // MAC address of each interface without a sandbox, by name
}

type prevRoute struct {
	dst netip.Prefix
	gw  netip.Addr
}

type prevIP struct {
	address netip.Prefix
	gateway netip.Addr
}

// parsePrevResult reads a prevResult of version 0.3.0 or later. It does not use
// the library's conversion, which a null in a list makes panic. Everything that
// is malformed is code 7.
func parsePrevResult(raw json.RawMessage, ifName string) (prevResult, error) {
	bad := func(format string, args ...any) (prevResult, error) {
		return prevResult{}, types.NewError(types.ErrInvalidNetworkConfig, "prevResult: "+fmt.Sprintf(format, args...), "")
	}
	if raw == nil {
		return bad("is missing; CHECK needs the result of the ADD")
	}
	var in struct {
		Interfaces []*struct {
			Name    string `json:"name"`
			Mac     string `json:"mac"`
			Sandbox string `json:"sandbox"`
		} `json:"interfaces"`
		IPs []*struct {
			Interface *int   `json:"interface"`
			Address   string `json:"address"`
			Gateway   string `json:"gateway"`
		} `json:"ips"`
		Routes []*struct {
			Dst string `json:"dst"`
			GW  string `json:"gw"`
		} `json:"routes"`
	}
	if err := json.Unmarshal(raw, &in); err != nil {
		return bad("%v", err)
	}
	out := prevResult{others: map[string]string{}}
	ours := -1
	for i, inf := range in.Interfaces {
		if inf != nil && inf.Sandbox == "" {
			out.others[inf.Name] = strings.ToLower(inf.Mac)
		}
		switch {
		case inf == nil || inf.Name == "":
			return bad("interfaces[%d] has no name", i)
		case inf.Name != ifName || inf.Sandbox == "" && ours >= 0:
		case ours >= 0 && out.sandbox != "":
			return bad("lists interface %s twice", ifName)
		default:
			ours, out.sandbox, out.mac = i, inf.Sandbox, strings.ToLower(inf.Mac)
		}
	}
	switch {
	case ours < 0:
		return bad("does not list interface %s", ifName)
	case out.sandbox == "":
		return bad("lists interface %s without a sandbox", ifName)
	}
	for i, ip := range in.IPs {
		if ip == nil {
			return bad("ips[%d] is null", i)
		}
		address, err := netip.ParsePrefix(ip.Address)
		if err != nil {
			return bad("ips[%d].address %q is no address with a prefix length", i, ip.Address)
		}
		var gateway netip.Addr
		if ip.Gateway != "" {
			if gateway, err = netip.ParseAddr(ip.Gateway); err != nil {
				return bad("ips[%d].gateway %q is no address", i, ip.Gateway)
			}
		}
		if ip.Interface == nil {
			continue
		}
		if *ip.Interface < 0 || *ip.Interface >= len(in.Interfaces) {
			return bad("ips[%d].interface is %d, but there are %d interfaces", i, *ip.Interface, len(in.Interfaces))
		}
		if *ip.Interface == ours {
			out.ips = append(out.ips, prevIP{address, gateway})
		}
	}
	for i, r := range in.Routes {
		if r == nil {
			return bad("routes[%d] is null", i)
		}
		dst, err := netip.ParsePrefix(r.Dst)
		if err != nil {
			return bad("routes[%d].dst %q is no prefix", i, r.Dst)
		}
		gw, err := netip.ParseAddr(r.GW)
		if err != nil && r.GW != "" {
			return bad("routes[%d].gw %q is no address", i, r.GW)
		}
		out.routes = append(out.routes, prevRoute{dst, gw})
	}
	return out, nil
}
