package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"mknet/tests/bench/link"
	"mknet/tests/bench/report"
	"mknet/tests/bench/side"
)

// goal is a bound on a measure of a link: on the ratio to another link's, or where
// there is none on the measure itself.
type goal struct {
	link, measure, against string
	report.Goal
}

var pumpGoals = []goal{
	{side.Full, "tcp", naive, report.Goal{Bound: 8.5}},
	{side.Full, "cpu", naive, report.Goal{AtMost: true, Bound: 0.09}},
	{side.Full, "udp", naive, report.Goal{Bound: 1.8}},
	{side.Full, "rtt", naive, report.Goal{AtMost: true, Bound: 0.9}},
	{side.Full, "load-rtt", side.Single, report.Goal{AtMost: true, Bound: 0.03}},
	{side.Full, "load-rtt-p99", "", report.Goal{AtMost: true, Bound: 5000}},
	{side.Full, "load-loss", "", report.Goal{AtMost: true, Bound: 0}},
	{link.Urgent, "load-rtt", side.Single, report.Goal{AtMost: true, Bound: 0.03}},
	{link.Urgent, "load-rtt-p99", "", report.Goal{AtMost: true, Bound: 5000}},
	{link.Urgent, "load-loss", "", report.Goal{AtMost: true, Bound: 0}},
	{side.Sealed, "tcp", side.Full, report.Goal{Bound: 0.75}},
	{side.Full, "tcp", "wireguard-go", report.Goal{Bound: 7}},
	{side.Full, "tcp", "gvisor-tap-vsock", report.Goal{Bound: 13}},
	{side.Full, "tcp", "slirp4netns", report.Goal{Bound: 11}},
	{side.Full, "tcp", "socat", report.Goal{Bound: 20}},
}

// name is that of the figure.
func (g goal) name() string {
	if g.against == "" {
		return g.link + "." + g.measure
	}
	return g.link + "." + g.measure + "/" + g.against
}

// value is a measure of a link over all rounds. The loss is a mean, for a median
// would hide it.
func value(rounds []round, k, measure string) (float64, bool) {
	var v []float64
	for _, r := range rounds {
		if x, ok := r[k][measure]; ok {
			v = append(v, x)
		}
	}
	if len(v) == 0 {
		return 0, false
	}
	if measure == "load-loss" {
		sum := 0.0
		for _, x := range v {
			sum += x
		}
		return sum / float64(len(v)), true
	}
	return report.Median(v), true
}

// ratio is the median of the ratios within the rounds.
func ratio(rounds []round, k, measure, against string) (float64, bool) {
	var v []float64
	for _, r := range rounds {
		x, ok := r[k][measure]
		base, has := r[against][measure]
		if ok && has && base > 0 {
			v = append(v, x/base)
		}
	}
	if len(v) == 0 {
		return 0, false
	}
	return report.Median(v), true
}

// compared are the measures whose ratio to the naive pump means something.
var compared = []string{"tcp", "cpu", "udp", "rtt"}

// pumpFigures are all measures, all ratios, and the goals that could be judged.
func pumpFigures(links []link.Link, rounds []round) (figures []report.Figure) {
	goals := map[string]goal{}
	for _, g := range pumpGoals {
		goals[g.name()] = g
	}
	add := func(f report.Figure) {
		if g, ok := goals[f.Name]; ok {
			f = f.Judge(g.Goal)
			delete(goals, f.Name)
		}
		figures = append(figures, f)
	}
	for _, k := range links {
		for _, m := range link.Measures {
			if v, ok := value(rounds, k.Name, m.Name); ok {
				add(report.Figure{Name: k.Name + "." + m.Name, Value: v, Unit: m.Unit})
			}
		}
		for _, m := range compared {
			if v, ok := ratio(rounds, k.Name, m, naive); ok && k.Name != naive {
				add(report.Figure{Name: goal{link: k.Name, measure: m, against: naive}.name(), Value: v, Unit: "x"})
			}
		}
	}
	for _, g := range pumpGoals {
		if _, open := goals[g.name()]; !open || g.against == "" {
			continue
		}
		if v, ok := ratio(rounds, g.link, g.measure, g.against); ok {
			add(report.Figure{Name: g.name(), Value: v, Unit: "x"})
		}
	}
	return figures
}

// columns of the table: a measure, its head and the format of its value.
var columns = []struct{ measure, head, format string }{
	{"tcp-out", "out", "%.2f"},
	{"tcp-in", "in", "%.2f"},
	{"tcp-out-4", "out 4", "%.2f"},
	{"tcp-in-4", "in 4", "%.2f"},
	{"tcp", "tcp Gbit/s", "%.2f"},
	{"cpu", "cpu s/Gbit", "%.3f"},
	{"udp", "udp pps", "%.0f"},
	{"rtt", "rtt us", "%.0f"},
	{"load-rtt", "loaded", "%.0f"},
	{"load-rtt-p99", "p99", "%.0f"},
	{"load-loss", "loss %", "%.2f"},
	{"memory", "MiB", "%.1f"},
}

// pumpTable prints medians, ratios to the naive pump in brackets, and the goals.
func pumpTable(out io.Writer, o pumpOptions, rounds []round, figures []report.Figure, failed map[string]error) error {
	fmt.Fprintf(out, "\nPacket pump: MTU %d, medians of %d rounds, each measure %s. In brackets: times naive.\n\n",
		side.MTUBytes, len(rounds), o.window)
	by := map[string]report.Figure{}
	for _, f := range figures {
		by[f.Name] = f
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "link\t")
	for _, c := range columns {
		fmt.Fprint(w, c.head, "\t")
	}
	fmt.Fprintln(w)
	for _, k := range o.links {
		fmt.Fprint(w, k.Name, "\t")
		for _, c := range columns {
			f, ok := by[k.Name+"."+c.measure]
			switch r, has := by[k.Name+"."+c.measure+"/"+naive]; {
			case !ok:
				fmt.Fprint(w, "-\t")
			case has:
				fmt.Fprintf(w, c.format+" (%.3g)\t", f.Value, r.Value)
			default:
				fmt.Fprintf(w, c.format+"\t", f.Value)
			}
		}
		fmt.Fprintln(w)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	w = tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "\ngoal\tmeasured\tbound\t\n")
	for _, g := range pumpGoals {
		f, ok := by[g.name()]
		if !ok {
			fmt.Fprintf(w, "%s\t-\t%s\tnot measured\n", g.name(), g.Goal)
			continue
		}
		verdict := "not met"
		if *f.Met {
			verdict = "met"
		}
		fmt.Fprintf(w, "%s\t%.3g %s\t%s\t%s\n", f.Name, f.Value, f.Unit, f.Goal, verdict)
	}
	for _, name := range []string{"mk-agent.size", machine + "." + load} {
		if f, ok := by[name]; ok {
			fmt.Fprintf(w, "%s\t%.1f %s\t\t\n", f.Name, f.Value, f.Unit)
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, k := range o.links {
		if err := failed[k.Name]; err != nil {
			fmt.Fprintf(out, "not measured in full: %s\n", strings.TrimSpace(err.Error()))
		}
	}
	return nil
}
