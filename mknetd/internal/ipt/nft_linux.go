package ipt

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

// BaseChain is one chain of nftables that the kernel enters by itself.
type BaseChain struct {
	Family, Table, Name, Hook string
	Drops                     bool // its policy
	TakesAll                  bool // it has a rule without a match that drops or rejects
	Rules                     int
}

// IPTables reports whether iptables-nft keeps the chain.
func (c BaseChain) IPTables() bool { return c.Family == "ip" && slices.Contains(everyTable, c.Table) }

// String is the chain as nft(8) names it.
func (c BaseChain) String() string { return c.Family + " " + c.Table + " " + c.Name }

// BaseChains lists every base chain of nftables in this namespace.
func BaseChains() ([]BaseChain, error) {
	var all []BaseChain
	err := dumpNFT(unix.NFT_MSG_GETCHAIN, func(family byte, a attributes) {
		hook := attributesOf(a[chainHook])
		number := int(be32(hook[hookNumber]))
		if len(hook) == 0 || number >= len(hooks) || families[family] == "netdev" {
			return
		}
		c := BaseChain{Family: families[family], Table: text(a[chainTable]), Name: text(a[chainName]), Hook: hooks[number]}
		c.Drops = len(a[chainPolicy]) == 4 && be32(a[chainPolicy]) == 0 // NF_DROP
		all = append(all, c)
	})
	if err != nil || len(all) == 0 {
		return nil, err
	}
	err = dumpNFT(unix.NFT_MSG_GETRULE, func(family byte, a attributes) {
		for i := range all {
			if c := &all[i]; c.Family == families[family] && c.Table == text(a[ruleTable]) && c.Name == text(a[ruleChain]) {
				c.Rules++
				c.TakesAll = c.TakesAll || nothingPasses(a[ruleExpressions])
			}
		}
	})
	return all, err
}

// nothingPasses reports whether a rule's expressions match nothing and end the packet.
func nothingPasses(list []byte) bool {
	attrs, err := nl.ParseRouteAttr(list)
	if err != nil {
		return false
	}
	ends := false
	for _, item := range attrs {
		e := attributesOf(item.Value)
		switch text(e[exprName]) {
		case "counter", "log":
		case "reject":
			ends = true
		case "immediate":
			verdict := attributesOf(attributesOf(attributesOf(e[exprData])[immediateData])[dataVerdict])
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
			visit(m[0], attributesOf(m[nl.SizeofNfgenmsg:]))
		}
	}
	return nil
}
