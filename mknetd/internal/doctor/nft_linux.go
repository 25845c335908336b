package doctor

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Attributes of nftables' netlink messages (linux/netfilter/nf_tables.h); x/sys
// has the messages, not all of the attributes.
const (
	chainTable, chainName, chainHook, chainPolicy = 1, 3, 4, 5
	hookNumber                                    = 1
	ruleTable, ruleChain, ruleExpressions         = 1, 2, 4
	exprName, exprData                            = 1, 2
	immediateData, dataVerdict, verdictCode       = 2, 2, 1
)

// hooks are the names of NF_INET_... of linux/netfilter.h.
var hooks = []string{"prerouting", "input", "forward", "output", "postrouting"}

var families = map[byte]string{unix.AF_INET: "ip", 1: "inet", unix.AF_INET6: "ip6", 3: "arp", 5: "netdev", unix.AF_BRIDGE: "bridge"}

// baseChain is one chain that the kernel enters by itself.
type baseChain struct {
	family, table, name, hook string
	drops                     bool // its policy
	takesAll                  bool // it has a rule without a match that drops or rejects
}

// iptables reports whether iptables-nft keeps the chain.
func (c baseChain) iptables() bool {
	return c.family == "ip" && slices.Contains([]string{"raw", "mangle", "nat", "filter", "security"}, c.table)
}

// baseChains lists every base chain of nftables in this namespace.
func baseChains() ([]baseChain, error) {
	var all []baseChain
	err := dumpNFT(unix.NFT_MSG_GETCHAIN, func(family byte, a attributes) {
		hook := parse(a[chainHook])
		number := int(be32(hook[hookNumber]))
		if len(hook) == 0 || number >= len(hooks) || families[family] == "netdev" {
			return
		}
		c := baseChain{family: families[family], table: text(a[chainTable]), name: text(a[chainName]), hook: hooks[number]}
		c.drops = len(a[chainPolicy]) == 4 && be32(a[chainPolicy]) == 0 // NF_DROP
		all = append(all, c)
	})
	if err != nil || len(all) == 0 {
		return nil, err
	}
	err = dumpNFT(unix.NFT_MSG_GETRULE, func(family byte, a attributes) {
		for i := range all {
			if c := &all[i]; c.family == families[family] && c.table == text(a[ruleTable]) && c.name == text(a[ruleChain]) {
				c.takesAll = c.takesAll || takesAll(a[ruleExpressions])
			}
		}
	})
	return all, err
}

// takesAll reports whether a rule's expressions match nothing and end the packet.
func takesAll(list []byte) bool {
	attrs, err := nl.ParseRouteAttr(list)
	if err != nil {
		return false
	}
	ends := false
	for _, item := range attrs {
		e := parse(item.Value)
		switch text(e[exprName]) {
		case "counter", "log":
		case "reject":
			ends = true
		case "immediate":
			verdict := parse(parse(parse(e[exprData])[immediateData])[dataVerdict])
			code, is := verdict[verdictCode]
			if !is || len(code) != 4 || be32(code) != 0 {
				return false
			}
			ends = true
		default:
			return false // a match, or what we do not know
		}
	}
	return ends
}

// attributes are those of one message or nest, by type.
type attributes map[uint16][]byte

func parse(b []byte) attributes {
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

// dumpNFT visits every object of one kind. A kernel without nftables has none.
func dumpNFT(message int, visit func(family byte, a attributes)) error {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|message, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	answers, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return fmt.Errorf("list nftables: %w", err)
	}
	for _, m := range answers {
		if len(m) >= nl.SizeofNfgenmsg {
			visit(m[0], parse(m[nl.SizeofNfgenmsg:]))
		}
	}
	return nil
}
