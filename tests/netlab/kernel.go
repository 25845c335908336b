package netlab

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// What the kernel holds is asked by netlink: every test does so several times, and a
// program for each question was the larger part of what many tests cost.

// dump repeats a listing that a change at the same time has cut short.
func dump[T any](list func() ([]T, error)) ([]T, error) {
	for range 20 {
		all, err := list()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return nil, netlink.ErrDumpInterrupted
}

// LinksIn lists the names of the links in the namespace of a path, in the kernel's order.
func LinksIn(path string) (names []string, err error) {
	err = enter(path, func() (err error) {
		names, err = links()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("links of %s: %w", path, err)
	}
	return names, nil
}

func links() ([]string, error) {
	all, err := dump(netlink.LinkList)
	var names []string
	for _, l := range all { // MAC addresses and flags change by themselves
		names = append(names, l.Attrs().Name)
	}
	return names, err
}

// linkNames are the links' names by index.
func linkNames() (map[int]string, error) {
	all, err := dump(netlink.LinkList)
	names := map[int]string{}
	for _, l := range all {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	return names, err
}

func addresses() ([]string, error) {
	names, err := linkNames()
	if err != nil {
		return nil, err
	}
	all, err := dump(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_V4) })
	var lines []string
	for _, a := range all {
		lines = append(lines, fmt.Sprintf("%s %s peer %v scope %d flags %#x label %q", names[a.LinkIndex], a.IPNet, a.Peer, a.Scope, a.Flags, a.Label))
	}
	return lines, err
}

func routes() ([]string, error) {
	names, err := linkNames()
	if err != nil {
		return nil, err
	}
	all, err := dump(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	var lines []string
	for _, r := range all {
		lines = append(lines, routeLine(r, names))
	}
	return lines, err
}

// routeLine has "dead" and "linkdown", which come and go by themselves, at its end.
func routeLine(r netlink.Route, names map[int]string) string {
	flags := r.Flags
	line := fmt.Sprintf("%v type %d via %v dev %s table %d scope %d proto %d src %v metric %d tos %d mtu %d advmss %d flags %#x",
		r.Dst, r.Type, r.Gw, names[r.LinkIndex], r.Table, r.Scope, r.Protocol, r.Src, r.Priority, r.Tos, r.MTU, r.AdvMSS,
		flags&^(unix.RTNH_F_DEAD|unix.RTNH_F_LINKDOWN))
	for _, hop := range r.MultiPath {
		line += fmt.Sprintf(" nexthop via %v dev %s weight %d", hop.Gw, names[hop.LinkIndex], hop.Hops+1)
	}
	if flags&unix.RTNH_F_DEAD != 0 {
		line += " dead"
	}
	if flags&unix.RTNH_F_LINKDOWN != 0 {
		line += " linkdown"
	}
	return line
}

func rules() ([]string, error) {
	all, err := dump(func() ([]netlink.Rule, error) { return netlink.RuleList(netlink.FAMILY_V4) })
	var lines []string
	for _, r := range all {
		lines = append(lines, ruleLine(r))
	}
	return lines, err
}

// ruleLine is a rule with its priority in front, in words that ip-rule(8) takes.
func ruleLine(r netlink.Rule) string {
	not := ""
	if r.Invert {
		not = "not "
	}
	line := fmt.Sprintf("%d: %sfrom %s", r.Priority, not, prefix(r.Src))
	if r.Dst != nil {
		line += " to " + r.Dst.String()
	}
	if r.Mark != 0 || r.Mask != nil && *r.Mask != 0 {
		line += fmt.Sprintf(" fwmark %#x", r.Mark)
		if r.Mask != nil {
			line += fmt.Sprintf("/%#x", *r.Mask)
		}
	}
	if r.IifName != "" {
		line += " iif " + r.IifName
	}
	if r.OifName != "" {
		line += " oif " + r.OifName
	}
	return line + fmt.Sprintf(" lookup %d", r.Table)
}

func prefix(p *net.IPNet) string {
	if p == nil {
		return "all"
	}
	return p.String()
}

// SavedRules is what one of iptables' flavours holds on the private host, as its save
// program ("iptables-nft-save") prints it. That is run only where the kernel does not
// say by itself that there is nothing, or nothing new.
func SavedRules(save string) (string, error) {
	if save == "iptables-legacy-save" {
		names, err := os.ReadFile("/proc/thread-self/net/ip_tables_names")
		if err == nil && strings.TrimSpace(string(names)) == "" || errors.Is(err, os.ErrNotExist) {
			return "", nil
		}
		return Try(save)
	}
	generation, err := nftGeneration()
	if err != nil {
		return Try(save)
	}
	nftSaved.Lock()
	defer nftSaved.Unlock()
	if nftSaved.known && nftSaved.generation == generation {
		return nftSaved.text, nil
	}
	text, err := Try(save)
	if err != nil {
		return "", err
	}
	// What was changed meanwhile has a later generation and is read again.
	nftSaved.text, nftSaved.generation, nftSaved.known = text, generation, true
	return text, nil
}

// nftSaved is what iptables-nft-save printed last, of the private host.
var nftSaved struct {
	sync.Mutex
	known      bool
	generation uint32
	text       string
}

// nftGeneration is the number of nftables' rule set in this namespace, which every
// change raises (nft_gen_info of net/netfilter/nf_tables_api.c).
func nftGeneration() (uint32, error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	answers, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return 0, fmt.Errorf("ask for the generation of nftables: %w", err)
	}
	const generationID = 1 // NFTA_GEN_ID
	for _, m := range answers {
		if len(m) < nl.SizeofNfgenmsg {
			continue
		}
		attrs, err := nl.ParseRouteAttr(m[nl.SizeofNfgenmsg:])
		if err != nil {
			return 0, err
		}
		for _, a := range attrs {
			if a.Attr.Type == generationID && len(a.Value) == 4 {
				return nl.Swap32(nl.NativeEndian().Uint32(a.Value)), nil
			}
		}
	}
	return 0, errors.New("nftables says no generation")
}

// traceTables are the tables of nftables with a name of ours, which a running trace has.
// Those of iptables stay once somebody has looked.
func traceTables() ([]string, error) {
	answers, err := dump(func() ([][]byte, error) {
		req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETTABLE, unix.NLM_F_DUMP)
		req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
		return req.Execute(unix.NETLINK_NETFILTER, 0)
	})
	if err != nil {
		return nil, fmt.Errorf("list the tables of nftables: %w", err)
	}
	var names []string
	for _, m := range answers {
		if len(m) < nl.SizeofNfgenmsg {
			continue
		}
		attrs, err := nl.ParseRouteAttr(m[nl.SizeofNfgenmsg:])
		if err != nil {
			return nil, err
		}
		for _, a := range attrs {
			if name := unix.ByteSliceToString(a.Value); a.Attr.Type == unix.NFTA_TABLE_NAME && strings.HasPrefix(name, "mknet") {
				names = append(names, name)
			}
		}
	}
	return names, nil
}
