package ipt

import (
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// More attributes of linux/netfilter/nf_tables.h.
const (
	verdictChain, metaKey                              = 2, 2
	lookupDestination, metaSource, ctSource, payloadTo = 3, 3, 4, 5
)

// effect is what one rule of nftables may do with a packet that reaches it.
type effect struct {
	all   bool   // it matches every packet
	drops bool   // it drops or rejects those
	ends  bool   // it ends the chain for those, or nobody knows whether
	stops bool   // it drops, rejects, queues or changes those, or does what is not known here
	to    string // the chain that it calls
}

// effectOf reads a rule's expressions; what it does not know may do anything.
func effectOf(list []byte) effect {
	e := effect{all: true}
	anything := effect{ends: true, stops: true}
	attrs, err := nl.ParseRouteAttr(list)
	if err != nil {
		return anything
	}
	for _, item := range attrs {
		a := attributesOf(item.Value)
		data := attributesOf(a[exprData])
		has := func(attribute uint16) bool { _, is := data[attribute]; return is }
		switch name := text(a[exprName]); name {
		case "counter", "log", "last":
		case "cmp", "bitwise", "byteorder", "range", "fib", "rt", "socket", "hash", "numgen", "osf", "connlimit", "limit", "quota", "exthdr", "match":
			e.all = false // exthdr can write too: the options of TCP alone
		case "meta", "ct", "payload":
			if name == "meta" && has(metaSource) && be32(data[metaKey]) == unix.NFT_META_NFTRACE {
				continue // what becomes of the packet is told, not changed
			}
			if has(map[string]uint16{"meta": metaSource, "ct": ctSource, "payload": payloadTo}[name]) {
				return anything // it writes
			}
			e.all = false
		case "lookup":
			if has(lookupDestination) && be32(data[lookupDestination]) == unix.NFT_REG_VERDICT {
				return anything
			}
			e.all = false
		case "reject":
			e.drops, e.ends, e.stops = true, true, true
		case "immediate":
			verdict := attributesOf(attributesOf(data[immediateData])[dataVerdict])
			code, is := verdict[verdictCode]
			if !is {
				continue // data for a register
			}
			switch int32(be32(code)) {
			case unix.NFT_CONTINUE:
			case nfAccept, unix.NFT_RETURN:
				e.ends = true
			case unix.NFT_JUMP, unix.NFT_GOTO:
				e.ends, e.to = true, text(verdict[verdictChain])
			case nfDrop:
				e.drops, e.ends, e.stops = true, true, true
			default:
				return anything
			}
		default:
			return anything
		}
	}
	return e
}

// Verdicts of linux/netfilter.h.
const nfDrop, nfAccept = 0, 1

// chainKey names any chain of nftables.
type chainKey struct{ family, table, name string }

// judge says what the rules of a base chain, and those of chains that they call, may
// do.
func (c *BaseChain) judge(all map[chainKey][]effect) {
	own := chainKey{c.Family, c.Table, c.Name}
	c.Rules = len(all[own])
	passing := true
	for _, e := range all[own] {
		if e.all && e.drops {
			c.TakesRest = true
			c.TakesAll = c.TakesAll || passing
		}
		passing = passing && (!e.ends || e.drops)
	}
	seen := map[chainKey]bool{}
	var visit func(k chainKey)
	visit = func(k chainKey) {
		if seen[k] || c.MayStop {
			return
		}
		seen[k] = true
		for _, e := range all[k] {
			if c.MayStop = c.MayStop || e.stops; e.to != "" {
				visit(chainKey{k.family, k.table, e.to})
			}
		}
	}
	visit(own)
}
