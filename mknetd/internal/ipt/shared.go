package ipt

import (
	"fmt"
	"net/netip"
	"strings"

	"mknet/spec/endpoint"
)

// Names and marks of the shared parts.
const (
	sharedPrefix = "MKNET-"
	sharedMark   = "mknet shared"
	genMark      = "mknet " // + 32 hexadecimal digits

	preRoot  = sharedPrefix + "PRE"  // raw PREROUTING, by -i
	fwdRoot  = sharedPrefix + "FWD"  // FORWARD, by -i: what an endpoint sends
	outRoot  = sharedPrefix + "OUT"  // FORWARD, by -o: what an endpoint gets
	inRoot   = sharedPrefix + "IN"   // INPUT, by -i: what an endpoint sends to the primary
	postRoot = sharedPrefix + "POST" // nat POSTROUTING, by source
)

const hexDigits = "0123456789abcdef"

// The tables, in the order in which ADD commits them. The guard's table is
// decided by Open.
const (
	tableRaw      = "raw"
	tableSecurity = "security"
	tableMangle   = "mangle"
	tableNAT      = "nat"
	tableFilter   = "filter"
)

// leafBits is the length of the prefix that one leaf of the source tree covers:
// 64 endpoints, the same as a leaf of the interface trees at 16,384 endpoints.
const leafBits = 24

// tree is one dispatch tree: from a built-in chain over a root and up to two
// or three levels of 16 to the leaves, where each endpoint has one rule. All
// steps below the root are gotos, so that a packet that nobody claims returns
// straight to the built-in chain.
type tree struct {
	table string
	base  string // built-in chain
	root  string
	flag  string       // "-i" or "-o"; "-s" dispatches on pool
	pool  netip.Prefix // of a "-s" tree
}

// jump is the rule in the built-in chain. It is kept first there.
func (t tree) jump() placed {
	match := endpoint.HostLinkPrefix + "+"
	if t.flag == "-s" {
		match = t.pool.String()
	}
	return placed{t.base, words("%s %s -j %s", t.flag, match, t.root).marked(sharedMark)}
}

// chains are the tree's own chains, root first.
func (t tree) chains() []string {
	names := []string{t.root}
	for _, p := range t.rules() {
		names = append(names, p.rule.target())
	}
	return names
}

// rules are the gotos of the root and of the levels below it.
func (t tree) rules() []placed {
	var all []placed
	if t.flag == "-s" {
		level := []netip.Prefix{t.pool}
		for bits := t.nextBits(t.pool.Bits()); bits != 0; bits = t.nextBits(bits) {
			var below []netip.Prefix
			for _, from := range level {
				for to := range subnets(from, bits) {
					all = append(all, t.step(from, to))
					below = append(below, to)
				}
			}
			level = below
		}
		return all
	}
	for _, a := range hexDigits {
		all = append(all, t.digit("", string(a)))
	}
	for _, a := range hexDigits {
		for _, b := range hexDigits {
			all = append(all, t.digit(string(a), string(a)+string(b)))
		}
	}
	return all
}

// path are the rules that lead a packet of the endpoint to its leaf, the jump
// first, and the leaf's name. It fails for an address outside the pool.
func (t tree) path(ep endpoint.Endpoint) ([]placed, string, error) {
	steps := []placed{t.jump()}
	if t.flag != "-s" {
		d := ep.Generation.String()
		steps = append(steps, t.digit("", d[:1]), t.digit(d[:1], d[:2]))
		return steps, t.digitChain(d[:2]), nil
	}
	if !t.pool.Contains(ep.Address) {
		return nil, "", fmt.Errorf("endpoint %s: address %s is not in the child pool %s", ep.Generation.Short(), ep.Address, t.pool)
	}
	from := t.pool
	for bits := t.nextBits(from.Bits()); bits != 0; bits = t.nextBits(bits) {
		to := netip.PrefixFrom(ep.Address, bits).Masked()
		steps = append(steps, t.step(from, to))
		from = to
	}
	return steps, t.prefixChain(from), nil
}

// digit is the goto from the chain of one digit string to that of a longer one.
func (t tree) digit(from, to string) placed {
	return placed{t.digitChain(from), words("%s %s%s+ -g %s", t.flag, endpoint.HostLinkPrefix, to, t.digitChain(to)).marked(sharedMark)}
}

func (t tree) digitChain(digits string) string {
	if digits == "" {
		return t.root
	}
	return t.root + "-" + digits
}

// step is the goto from one prefix to a longer one.
func (t tree) step(from, to netip.Prefix) placed {
	return placed{t.prefixChain(from), words("-s %s -g %s", to, t.prefixChain(to)).marked(sharedMark)}
}

// prefixChain is at most 27 bytes for a private pool ("MKNET-POST-192.168.255.0/24");
// a chain's name may have 28.
func (t tree) prefixChain(p netip.Prefix) string {
	if p == t.pool {
		return t.root
	}
	return t.root + "-" + p.String()
}

// nextBits is the prefix length of the level below, 0 below a leaf. Levels end
// on whole steps of 4 bits counted back from leafBits.
func (t tree) nextBits(bits int) int {
	if bits >= leafBits {
		return 0
	}
	return leafBits - (leafBits-bits-1)/4*4
}

// subnets yields the prefixes of the given length inside p.
func subnets(p netip.Prefix, bits int) func(yield func(netip.Prefix) bool) {
	return func(yield func(netip.Prefix) bool) {
		a := p.Masked().Addr().As4()
		base := uint32(a[0])<<24 | uint32(a[1])<<16 | uint32(a[2])<<8 | uint32(a[3])
		for i := range uint32(1) << (bits - p.Bits()) {
			n := base + i<<(32-bits)
			addr := netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
			if !yield(netip.PrefixFrom(addr, bits)) {
				return
			}
		}
	}
}

// trees are the dispatch trees of one table, in the order of their jumps. What
// goes towards an endpoint is judged before what comes from one, so that a
// packet between two endpoints meets the receiver's rules even where the
// sender's would accept it.
func (l layout) trees(table string) []tree {
	switch table {
	case tableRaw:
		return []tree{{table: table, base: "PREROUTING", root: preRoot, flag: "-i"}}
	case tableNAT:
		return []tree{{table: table, base: "POSTROUTING", root: postRoot, flag: "-s", pool: l.pool}}
	case tableFilter, l.guard:
		return []tree{
			{table: table, base: "FORWARD", root: outRoot, flag: "-o"},
			{table: table, base: "FORWARD", root: fwdRoot, flag: "-i"},
			{table: table, base: "INPUT", root: inRoot, flag: "-i"},
		}
	}
	return nil
}

// isShared reports whether a chain's name is one of the shared parts.
func isShared(name string) bool { return strings.HasPrefix(name, sharedPrefix) }
