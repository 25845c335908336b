package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"
	"time"

	"mknet/tests/bench/pods"
	"mknet/tests/bench/report"
)

// policyMeasures are what a packet costs: of a request and its response, of a
// datagram, both of flows that are known, and of a datagram that begins a flow.
var policyMeasures = []struct{ name, head string }{{"rr-cpu", "request us"}, {"udp-cpu", "datagram us"}, {"new-cpu", "new flow us"}}

// The bounds of policy: largest over smallest number of rules, ours against plain
// kernel routing (of known flows: routing remembers none), and against the others at
// the same number of rules.
var (
	rulesGoal  = report.Goal{AtMost: true, Bound: 1.15}
	policyGoal = report.Goal{AtMost: true, Bound: 1.1}
	rivalGoal  = report.Goal{AtMost: true, Bound: 1}
)

func policyBench(args []string) int {
	fs := flag.NewFlagSet("bench policy", flag.ContinueOnError)
	rounds := fs.Int("rounds", 7, "interleaved rounds")
	seconds := fs.Float64("seconds", 0.4, "length of each measure")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	o := podsOptions{rounds: *rounds, window: time.Duration(*seconds * float64(time.Second)), asked: "rr,udp,new", named: true}
	for _, k := range pods.PolicyKinds {
		o.kinds = append(o.kinds, k.Name)
	}
	err := o.validate()
	if err == nil {
		err = runPolicy(o, os.Stdout, os.Stderr)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench policy:", err)
		return 2
	}
	return 0
}

func runPolicy(o podsOptions, out, notes io.Writer) error {
	bin, err := preparePods()
	if err != nil {
		return err
	}
	rounds, err := podRound(o, 0, bin, notes)
	if err != nil {
		return err
	}
	figures := policyFigures(o, rounds)
	if err := report.Add("policy", figures); err != nil {
		return err
	}
	return policyTable(out, o, figures)
}

// relative is the median of the ratios within a round.
func (r podRounds) relative(kind, against, measure string) float64 {
	v, base := column(r[kind], measure), column(r[against], measure)
	for i := range v {
		v[i] /= base[i]
	}
	return report.Median(v)
}

// policyFigures are medians, ratios within a round, and the goals.
func policyFigures(o podsOptions, r podRounds) (figures []report.Figure) {
	add := func(f report.Figure) { figures = append(figures, f) }
	for _, kind := range o.kinds {
		for _, m := range policyMeasures {
			add(report.Figure{Name: "live." + kind + "." + m.name, Value: report.Median(column(r[kind], m.name)), Unit: "us"})
			if kind == pods.Kernel {
				continue
			}
			f := report.Figure{Name: "live." + kind + "." + m.name + "/" + pods.Kernel, Value: r.relative(kind, pods.Kernel, m.name), Unit: "x"}
			if isOurs(kind) && m.name != "new-cpu" {
				f = f.Judge(policyGoal)
			}
			add(f)
		}
	}
	for _, m := range policyMeasures {
		for _, rival := range pods.Policers()[1:] {
			for _, rules := range pods.RuleCounts {
				ours, theirs := pods.Policed(pods.Ours, rules), pods.Policed(rival, rules)
				add(report.Figure{Name: "live." + ours + "." + m.name + "/" + theirs, Value: r.relative(ours, theirs, m.name), Unit: "x"}.Judge(rivalGoal))
			}
		}
		for _, policer := range pods.Policers() {
			var costs []float64
			for _, rules := range pods.RuleCounts {
				costs = append(costs, r.relative(pods.Policed(policer, rules), pods.Kernel, m.name))
			}
			f := report.Figure{Name: "live." + policer + "." + m.name + ".largest/smallest", Value: slices.Max(costs) / slices.Min(costs), Unit: "x"}
			if policer == pods.Ours {
				f = f.Judge(rulesGoal)
			}
			add(f)
		}
	}
	return figures
}

// isOurs reports whether the kind is ours, with or without rules.
func isOurs(kind string) bool {
	return kind == pods.Ours || slices.ContainsFunc(pods.RuleCounts, func(n int) bool { return kind == pods.Policed(pods.Ours, n) })
}

// policyTable prints medians, the ratios to plain kernel routing in brackets, and
// the goals.
func policyTable(out io.Writer, o podsOptions, figures []report.Figure) error {
	by := map[string]report.Figure{}
	for _, f := range figures {
		by[f.Name] = f
	}
	fmt.Fprintf(out, "\nPods of one node under rules: processor time, medians of %d rounds, each measure %s. In brackets: times plain kernel routing.\n\n", o.rounds, o.window)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "\t")
	for _, m := range policyMeasures {
		fmt.Fprint(w, m.head, "\t")
	}
	fmt.Fprintln(w)
	for _, kind := range o.kinds {
		fmt.Fprint(w, kind, "\t")
		for _, m := range policyMeasures {
			name := "live." + kind + "." + m.name
			fmt.Fprintf(w, "%.2f", by[name].Value)
			if f, ok := by[name+"/"+pods.Kernel]; ok {
				fmt.Fprintf(w, " (%.2f)", f.Value)
			}
			fmt.Fprint(w, "\t")
		}
		fmt.Fprintln(w)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return goalTable(out, figures)
}
