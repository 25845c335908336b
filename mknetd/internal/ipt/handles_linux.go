package ipt

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// ruleHandle is NFTA_RULE_HANDLE.
const ruleHandle = 3

// Handled is one rule of a chain of iptables-nft by the name that nf_tables has for
// it.
type Handled struct {
	Handle uint64
	Number int    // from 1
	Rule   string // as iptables -S prints it, without "-A chain"
}

// handleAttempts bounds how often a chain is read again because somebody changed it
// meanwhile.
const handleAttempts = 3

// Handles reads one chain of a table of iptables-nft, whoever's it is.
func (f *Firewall) Handles(ctx context.Context, table, chain string) ([]Handled, error) {
	if !slices.Contains(everyTable, table) {
		return nil, fmt.Errorf("table ip %s: iptables does not keep it", table)
	}
	t := f.tools
	if f.flavour != NFT {
		var err error
		if t, err = findTools(ctx, NFT); err != nil {
			return nil, err
		}
	}
	for attempt := 1; ; attempt++ {
		before, err := chainHandles(table, chain)
		if err != nil {
			return nil, err
		}
		out, err := f.run(ctx, "", t.iptables, "-w", f.waitSeconds(), "-t", table, "-S", chain)
		if err != nil {
			return nil, fmt.Errorf("read chain %s %s: %w", table, chain, err)
		}
		after, err := chainHandles(table, chain)
		if err != nil {
			return nil, err
		}
		all, ok := handled(chain, out, after)
		if ok && slices.Equal(before, after) {
			return all, nil
		}
		if attempt == handleAttempts {
			return nil, fmt.Errorf("read chain %s %s: nf_tables has %d rules and iptables prints %d", table, chain, len(after), len(all))
		}
	}
}

// handled puts what iptables -S printed beside the handles, both in the chain's
// order; false where they are not as many.
func handled(chain, out string, handles []uint64) ([]Handled, bool) {
	var all []Handled
	for line := range linesOf(out) {
		w := split(line)
		if len(w) < 2 || w[0] != "-A" || w[1] != chain {
			continue
		}
		h := Handled{Number: len(all) + 1, Rule: rule(w[2:]).String()}
		if len(all) < len(handles) {
			h.Handle = handles[len(all)]
		}
		all = append(all, h)
	}
	return all, len(all) == len(handles)
}

// chainHandles are the handles of a chain's rules, in order. The kernel lists one
// chain at the cost of one (nf_tables_dump_rules).
func chainHandles(table, chain string) ([]uint64, error) {
	var all []uint64
	err := dumpNFT(unix.NFT_MSG_GETRULE, func(family byte, a attributes) {
		if family == unix.AF_INET && text(a[ruleTable]) == table && text(a[ruleChain]) == chain && len(a[ruleHandle]) == 8 {
			all = append(all, binary.BigEndian.Uint64(a[ruleHandle]))
		}
	}, nl.NewRtAttr(ruleTable, nl.ZeroTerminated(table)), nl.NewRtAttr(ruleChain, nl.ZeroTerminated(chain)))
	return all, err
}
