package ipt

import (
	"fmt"
	"slices"
	"strings"

	"mknet/spec/endpoint"
)

// compare names every difference between the rules that a chain should have and
// those it has: what is missing, what is foreign, and a different order.
func compare(table, name string, want, have []rule) []endpoint.Fault {
	var faults []endpoint.Fault
	add := func(format string, args ...any) {
		faults = append(faults, fault(table, name, fmt.Sprintf(format, args...)))
	}
	left := map[string][]int{} // places in have of each normal form
	for i, r := range have {
		k := r.key()
		left[k] = append(left[k], i)
	}
	var found []int // places of the wanted rules that are there, in wanted order
	taken := make([]bool, len(have))
	for i, r := range want {
		k := r.key()
		if len(left[k]) == 0 {
			add("rule %d is missing: %s", i+1, placed{name, r})
			continue
		}
		at := left[k][0]
		left[k] = left[k][1:]
		found, taken[at] = append(found, at), true
	}
	for i, r := range have {
		if !taken[i] {
			add("rule %d is foreign: %s", i+1, placed{name, r})
		}
	}
	for i := 1; i < len(found); i++ {
		if found[i] < found[i-1] {
			add("rule %d is out of order: %s", found[i]+1, placed{name, have[found[i]]})
		}
	}
	return faults
}

// same reports whether a chain is exactly as wanted.
func same(want, have []rule) bool {
	return slices.EqualFunc(want, have, func(a, b rule) bool { return a.key() == b.key() })
}

func fault(table, object, problem string) endpoint.Fault {
	return endpoint.Fault{
		Kind: "iptables", Object: table + " " + object, Where: endpoint.InHost,
		Problem: strings.ReplaceAll(problem, "\n", `\n`), Inspect: fmt.Sprintf("iptables -t %s -S %s", table, object),
	}
}
