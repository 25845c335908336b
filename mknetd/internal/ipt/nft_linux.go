package ipt

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"mknet/mknetd/internal/netns"
	"mknet/spec/endpoint"
)

// Attributes of nftables' netlink messages (linux/netfilter/nf_tables.h); x/sys
// has the messages, not all of the attributes.
const (
	chainTable, chainName, chainHook, chainPolicy, chainUse, chainType = 1, 3, 4, 5, 6, 7
	hookNumber, hookPriority                                           = 1, 2
	ruleTable, ruleChain, ruleExpressions                              = 1, 2, 4
	exprName, exprData                                                 = 1, 2
	immediateData, dataVerdict, verdictCode                            = 2, 2, 1
)

// hooks are the names of NF_INET_... of linux/netfilter.h.
var hooks = []string{"prerouting", "input", "forward", "output", "postrouting"}

var families = map[byte]string{unix.AF_INET: "ip", 1: "inet", unix.AF_INET6: "ip6", 3: "arp", 5: "netdev", unix.AF_BRIDGE: "bridge"}

// BaseChain is one chain of nftables that the kernel enters by itself.
type BaseChain struct {
	Family, Table, Name, Hook string
	Type                      string // filter, nat (asked for the first packet of a flow alone), route
	Priority                  int    // in its hook, the lowest first
	Drops                     bool   // its policy
	TakesAll                  bool   // a rule drops or rejects every packet, and none before it lets one pass
	TakesRest                 bool   // a rule drops or rejects every packet that reaches it
	// MayStop says that a rule of it, or of a chain that it calls, drops, rejects or
	// changes some packets, or does what is not known here.
	MayStop bool
	Rules   int
}

// IPTables reports whether iptables-nft keeps the chain.
func (c BaseChain) IPTables() bool { return c.Family == "ip" && slices.Contains(everyTable, c.Table) }

// String is the chain as nft(8) names it.
func (c BaseChain) String() string { return c.Family + " " + c.Table + " " + c.Name }

// BaseChains lists every base chain of nftables in this namespace, but for those of
// traces (package nftrace).
func BaseChains() ([]BaseChain, error) {
	var all []BaseChain
	err := dumpNFT(unix.NFT_MSG_GETCHAIN, func(family byte, a attributes) {
		hook := attributesOf(a[chainHook])
		number := int(be32(hook[hookNumber]))
		if len(hook) == 0 || number >= len(hooks) || families[family] == "netdev" {
			return
		}
		c := BaseChain{Family: families[family], Table: text(a[chainTable]), Name: text(a[chainName]), Hook: hooks[number], Type: text(a[chainType]), Priority: int(int32(be32(hook[hookPriority])))}
		c.Drops = len(a[chainPolicy]) == 4 && be32(a[chainPolicy]) == 0 // NF_DROP
		all = append(all, c)
	})
	if err != nil || len(all) == 0 {
		return nil, err
	}
	rules := map[chainKey][]effect{}
	err = dumpNFT(unix.NFT_MSG_GETRULE, func(family byte, a attributes) {
		k := chainKey{families[family], text(a[ruleTable]), text(a[ruleChain])}
		rules[k] = append(rules[k], effectOf(a[ruleExpressions]))
	})
	for i := range all {
		all[i].judge(rules)
	}
	return slices.DeleteFunc(all, BaseChain.traces), err
}

// traces reports whether a chain is of a running trace of ours: by its name, and by
// doing nothing.
func (c BaseChain) traces() bool {
	return c.Family == "ip" && strings.HasPrefix(c.Table, endpoint.TraceTablePrefix) && !c.Drops && !c.MayStop
}

// nftHoldsRules reports whether a table of iptables-nft has any rule. A chain counts
// the rules that it holds and those that lead to it.
func nftHoldsRules() (holds bool, err error) {
	err = dumpNFT(unix.NFT_MSG_GETCHAIN, func(family byte, a attributes) {
		c := BaseChain{Family: families[family], Table: text(a[chainTable])}
		holds = holds || c.IPTables() && len(a[chainUse]) == 4 && be32(a[chainUse]) > 0
	})
	return holds, err
}

// nftHasChain reports whether a table of iptables-nft has the chain. A kernel without
// nftables has none.
func nftHasChain(table, chain string) (bool, error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETCHAIN, 0)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(chainTable, nl.ZeroTerminated(table)))
	req.AddData(nl.NewRtAttr(chainName, nl.ZeroTerminated(chain)))
	_, err := askNFT(req)
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EINVAL):
		return false, nil
	}
	return false, fmt.Errorf("look for chain ip %s %s: %w", table, chain, err)
}

// nftHoldsChains reports whether a table of iptables-nft has a chain of such a name.
func nftHoldsChains(table string, named func(chain string) bool) (holds bool, err error) {
	err = dumpNFT(unix.NFT_MSG_GETCHAIN, func(family byte, a attributes) {
		holds = holds || family == unix.AF_INET && text(a[chainTable]) == table && named(text(a[chainName]))
	})
	return holds, err
}

// attributes are those of one message or nest, by type.
type attributes map[uint16][]byte

func attributesOf(b []byte) attributes {
	list, err := nl.ParseRouteAttr(b)
	if err != nil {
		return nil
	}
	out := attributes{}
	for _, a := range list {
		out[a.Attr.Type&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER)] = a.Value
	}
	return out
}

func be32(b []byte) uint32 {
	if len(b) < 4 {
		return ^uint32(0)
	}
	return binary.BigEndian.Uint32(b)
}

func text(b []byte) string { return unix.ByteSliceToString(b) }

// askNFT sends a request; tests have it fail.
var askNFT = func(req *nl.NetlinkRequest) ([][]byte, error) { return req.Execute(unix.NETLINK_NETFILTER, 0) }

// dumpNFT visits every object of one kind, or those that the kernel finds by a filter,
// which a kernel may pay no heed to. A kernel without nftables has none: it refuses the
// protocol, or the unknown subsystem (net/netfilter/nfnetlink.c: nfnetlink_rcv_msg).
func dumpNFT(message int, visit func(family byte, a attributes), filter ...*nl.RtAttr) error {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|message, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	for _, a := range filter {
		req.AddData(a)
	}
	answers, err := netns.Dump(func() ([][]byte, error) { return askNFT(req) })
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list nftables: %w", err)
	}
	for _, m := range answers {
		if len(m) >= nl.SizeofNfgenmsg {
			visit(m[0], attributesOf(m[nl.SizeofNfgenmsg:]))
		}
	}
	return nil
}
