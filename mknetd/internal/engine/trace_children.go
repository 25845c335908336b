package engine

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"mknet/mknetd/internal/ipt"
	"mknet/spec/api"
	"mknet/spec/endpoint"
)

// countBudget bounds the reading of the counters of a child's chains at a trace's
// end.
const countBudget = 10 * time.Second

// watchChildren reads what has been counted of the children among the ends of a
// flow: drops of the pump are counted, not told, and so are rules where iptables is
// not followed.
func (e *Engine) watchChildren(ctx context.Context, count bool, sender, receiver *endpoint.Endpoint) ([]watched, error) {
	var out []watched
	for i, ep := range []*endpoint.Endpoint{sender, receiver} {
		if ep == nil || ep.Mode == endpoint.Veth {
			continue
		}
		w := watched{ep: *ep, sends: i == 0, counted: count, drops: e.pumpDrops(ep.Generation)}
		if count {
			var err error
			if w.rules, err = e.firewall.Counts(ctx, *ep); err != nil {
				return nil, err
			}
		}
		out = append(out, w)
	}
	return out, nil
}

// pumpDrops is what the endpoint's shims have reported.
func (e *Engine) pumpDrops(gen endpoint.Generation) []api.Drops {
	e.figures.mu.Lock()
	defer e.figures.mu.Unlock()
	return slices.Clone(e.figures.of[gen].Counters.Drops)
}

// remark is a note of a trace.
type remark struct{ about, text string }

// stopped says what rules and pumps of the children have counted since; stops is
// the first thing that one of them has not let through, empty where there is none.
func (e *Engine) stopped(children []watched) (notes []remark, stops string) {
	// Also where the trace was broken off.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), countBudget)
	defer cancel()
	for _, c := range children {
		var rules []ipt.Count
		if c.counted {
			var err error
			if rules, err = e.firewall.Counts(ctx, c.ep); err != nil {
				notes = append(notes, remark{"iptables", fmt.Sprintf("%s: %v", c.ep.Address, err)})
			}
		}
		n, s := counted(c, rules, e.pumpDrops(c.ep.Generation))
		if notes = append(notes, n...); stops == "" {
			stops = s
		}
	}
	return notes, stops
}

// counted compares what was counted of a child before and after.
func counted(c watched, rules []ipt.Count, drops []api.Drops) (notes []remark, stops string) {
	type place struct {
		table, chain, rule string
		number             int
	}
	before := map[place]uint64{}
	for _, r := range c.rules {
		before[place{r.Table, r.Chain, r.Rule, r.Number}] = r.Packets
	}
	for _, r := range rules {
		was, ok := before[place{r.Table, r.Chain, r.Rule, r.Number}]
		if !ok || r.Packets <= was {
			continue
		}
		text := fmt.Sprintf("%s %s %d: %s: %d packets of all flows of %s meanwhile", r.Table, r.Chain, r.Number, r.Rule, r.Packets-was, c.ep.Address)
		notes = append(notes, remark{"iptables", text})
		if refuses(r.Rule) && stops == "" {
			stops = "iptables " + text
		}
	}
	for _, d := range drops {
		was := uint64(0)
		for _, b := range c.drops {
			if b.Reason == d.Reason {
				was = b.Packets
			}
		}
		if d.Packets <= was {
			continue
		}
		text := fmt.Sprintf("of what the child %s sent, %d packets were dropped: %s", c.ep.Address, d.Packets-was, d.Reason)
		notes = append(notes, remark{"pump", text})
		if c.sends && stops == "" {
			stops = "pump: " + text
		}
	}
	return notes, stops
}

// refuses reports whether a rule drops or rejects what it matches.
func refuses(rule string) bool {
	w := strings.Fields(rule)
	i := slices.Index(w, "-j")
	return i >= 0 && i+1 < len(w) && (w[i+1] == "DROP" || w[i+1] == "REJECT")
}
