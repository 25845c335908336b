package ipt

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"mknet/spec/endpoint"
)

// Count is how many packets one rule of an endpoint's chains has matched.
type Count struct {
	Table, Chain string
	Number       int    // from 1
	Rule         string // as iptables -S prints it, without "-A chain"
	Packets      uint64
}

// Counts reads the counters of the endpoint's own chains in filter and guard. A
// chain that is not there has none.
func (f *Firewall) Counts(ctx context.Context, ep endpoint.Endpoint) ([]Count, error) {
	var all []Count
	for _, table := range []string{tableFilter, f.guard} {
		for _, suffix := range []string{"", inSuffix, outSuffix} {
			name := ep.Generation.Chain() + suffix
			out, err := f.run(ctx, "", f.tools.iptables, "-w", f.waitSeconds(), "-t", table, "-v", "-S", name)
			var absent *CommandError
			if errors.As(err, &absent) && !errors.Is(err, ErrBusy) {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("read the counters of chain %s: %w", name, err)
			}
			all = append(all, parseCounts(table, name, out)...)
		}
	}
	return all, nil
}

func parseCounts(table, chain, out string) []Count {
	var list []Count
	for line := range linesOf(out) {
		w := split(line)
		if len(w) < 3 || w[0] != "-A" || w[1] != chain {
			continue
		}
		c := Count{Table: table, Chain: chain, Number: len(list) + 1}
		var rest rule
		for i := 2; i < len(w); i++ {
			if w[i] == "-c" && i+2 < len(w) {
				c.Packets, _ = strconv.ParseUint(w[i+1], 10, 64) // 0 where it is no number: then nothing has changed either
				i += 2
				continue
			}
			rest = append(rest, w[i])
		}
		c.Rule = rest.String()
		list = append(list, c)
	}
	return list
}
