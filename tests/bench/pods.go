package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"mknet/tests/bench/pods"
	"mknet/tests/bench/report"
	"mknet/tests/conformance/suite"
)

// podsOptions are the command line of the benchmark of pods.
type podsOptions struct {
	rounds int
	window time.Duration // of each measure
	others []int         // pods beside the measured two
	kinds  []string
	named  bool   // the kinds, on the command line
	asked  string // the measures, comma-separated
}

func parsePods(args []string) (o podsOptions, err error) {
	fs := flag.NewFlagSet("bench pods", flag.ContinueOnError)
	rounds := fs.Int("rounds", 5, "interleaved rounds")
	seconds := fs.Float64("seconds", 0.5, "length of each measure")
	others := fs.String("others", "1,100,1000", "how many other pods, comma-separated")
	only := fs.String("only", "", "only these kinds, comma-separated (the reference plugins are measured up to "+strconv.Itoa(fewOthers)+" others unless named): "+strings.Join(kindNames(), " "))
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	o = podsOptions{rounds: *rounds, window: time.Duration(*seconds * float64(time.Second)), kinds: kindNames(), asked: "rr,udp,tcp"}
	for _, s := range strings.Split(*others, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 0 || n > 10000 {
			return o, fmt.Errorf("-others %q: must be numbers from 0 to 10000", *others)
		}
		o.others = append(o.others, n)
	}
	if *only != "" {
		o.named, o.kinds = true, strings.Split(*only, ",")
		for _, k := range o.kinds {
			if !slices.Contains(kindNames(), k) {
				return o, fmt.Errorf("kind %q: must be of %s", k, strings.Join(kindNames(), ", "))
			}
		}
	}
	return o, o.validate()
}

// fewOthers is up to how many other pods the reference plugins are measured where
// nobody names them: each of their ADDs takes longer than the one before, a thousand
// a quarter of an hour (measured, ptp with portmap on iptables).
const fewOthers = 100

// measured are the kinds that are measured beside so many other pods.
func (o podsOptions) measured(others int) []string {
	if o.named || others <= fewOthers {
		return o.kinds
	}
	return []string{pods.Direct, pods.Kernel, pods.Ours}
}

func (o podsOptions) validate() error {
	if o.rounds < 1 || o.window < 50*time.Millisecond {
		return fmt.Errorf("%d rounds of %s: must be at least 1 of 50ms", o.rounds, o.window)
	}
	return nil
}

func kindNames() (names []string) {
	for _, k := range pods.Kinds {
		names = append(names, k.Name)
	}
	return names
}

func podsBench(args []string) int {
	o, err := parsePods(args)
	if err == nil {
		var figures []report.Figure
		if figures, err = runPods(o, os.Stdout, os.Stderr); err == nil {
			err = report.Write("pods", figures)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench pods:", err)
		return 2
	}
	return 0
}

// runPods measures with one number of other pods after the other: all nodes of all
// numbers at once would be thousands of pods.
func runPods(o podsOptions, out, notes io.Writer) (figures []report.Figure, err error) {
	bin, err := preparePods()
	if err != nil {
		return nil, err
	}
	all := map[int]podRounds{}
	for _, others := range o.others {
		if all[others], err = podRound(o, others, bin, notes); err != nil {
			return nil, err
		}
		figures = append(figures, podFigures(o, others, all[others])...)
	}
	figures = append(figures, flatness(o, all)...)
	return figures, podTable(out, o, figures)
}

// preparePods builds the programs and the reference plugins into one folder, which
// is the nodes' CNI_PATH.
func preparePods() (string, error) {
	root, err := suite.Root()
	if err != nil {
		return "", err
	}
	cache, err := suite.CacheDir()
	if err != nil {
		return "", err
	}
	bin := filepath.Join(cache, "bench", "pods")
	return bin, errors.Join(
		suite.Build(root, bin, "./mk-cni", "./mknetd"),
		suite.Build(filepath.Join(root, "tests", "callers", "reference"), bin, "tool"))
}

// podRounds are the samples of each kind, a round each.
type podRounds map[string][]pods.Sample

// podRound starts a node of each kind and measures them in turn.
func podRound(o podsOptions, others int, bin string, notes io.Writer) (podRounds, error) {
	got := podRounds{}
	var nodes []*podNode
	defer func() {
		for _, n := range nodes {
			n.close()
		}
	}()
	for _, kind := range o.measured(others) {
		fmt.Fprintf(notes, "%s: %d other pods\n", kind, others)
		n, setup, err := startNode(kind, others, bin)
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, n)
		got[kind] = append(got[kind], setup)
	}
	for r := range o.rounds {
		fmt.Fprintf(notes, "%d other pods: round %d of %d\n", others, r+1, o.rounds)
		rand.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
		for _, n := range nodes {
			s, err := n.ask(o.window.String() + " " + o.asked)
			if err != nil {
				return nil, err
			}
			got[n.kind] = append(got[n.kind], s)
		}
	}
	return got, nil
}

// podNode is a node's process.
type podNode struct {
	kind  string
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Reader
}

func startNode(kind string, others int, bin string) (*podNode, pods.Sample, error) {
	n := &podNode{kind: kind, cmd: exec.Command("/proc/self/exe", pods.Command, "-kind", kind, "-others", strconv.Itoa(others), "-bin", bin)}
	n.cmd.Stderr = os.Stderr
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var err error
	if n.in, err = n.cmd.StdinPipe(); err != nil {
		return nil, nil, err
	}
	out, err := n.cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	n.lines = bufio.NewReader(out)
	if err := n.cmd.Start(); err != nil {
		return nil, nil, err
	}
	setup, err := n.read()
	if err != nil {
		n.close()
	}
	return n, setup, err
}

func (n *podNode) ask(line string) (pods.Sample, error) {
	if _, err := io.WriteString(n.in, line+"\n"); err != nil {
		return nil, fmt.Errorf("%s: %w", n.kind, err)
	}
	return n.read()
}

func (n *podNode) read() (pods.Sample, error) {
	line, err := n.lines.ReadBytes('\n')
	if err != nil {
		return nil, fmt.Errorf("%s: the node has ended: %w", n.kind, err)
	}
	var a struct {
		Sample pods.Sample
		Error  string
	}
	if err := json.Unmarshal(line, &a); err != nil {
		return nil, fmt.Errorf("%s: %w", n.kind, err)
	}
	if a.Error != "" {
		return nil, errors.New(a.Error)
	}
	return a.Sample, nil
}

// close ends the node, and with it everything in its private host.
func (n *podNode) close() {
	_ = n.in.Close()
	_ = n.cmd.Wait() // a failed one has said so
}

// podGoals are the bounds: of ours to the plain kernel, and of the largest number of
// other pods to the smallest.
var (
	rrGoal   = report.Goal{AtMost: true, Bound: 0.9}
	flatGoal = report.Goal{AtMost: true, Bound: 1.1}
)

// podFigures are medians and, for the costs, medians of the ratios to the plain
// kernel within a round.
func podFigures(o podsOptions, others int, rounds podRounds) (figures []report.Figure) {
	for _, kind := range o.measured(others) {
		for _, m := range pods.Measures {
			name := fmt.Sprintf("%s.%d.%s", kind, others, m.Name)
			v := column(rounds[kind], m.Name)
			if len(v) == 0 || m.Name == "others" {
				continue
			}
			figures = append(figures, report.Figure{Name: name, Value: report.Median(v), Unit: m.Unit})
			base := column(rounds[pods.Kernel], m.Name)
			if !strings.HasSuffix(m.Name, "-cpu") || kind == pods.Kernel || len(base) != len(v) {
				continue
			}
			ratios := make([]float64, len(v))
			for i := range v {
				ratios[i] = v[i] / base[i]
			}
			f := report.Figure{Name: name + "/" + pods.Kernel, Value: report.Median(ratios), Unit: "x"}
			if kind == pods.Ours && m.Name == "rr-cpu" {
				f = f.Judge(rrGoal)
			}
			figures = append(figures, f)
		}
	}
	return figures
}

// column is one measure over the rounds.
func column(samples []pods.Sample, measure string) (v []float64) {
	for _, s := range samples {
		if x, ok := s[measure]; ok {
			v = append(v, x)
		}
	}
	return v
}

// flatness is how the costs grow from the smallest number of other pods to the
// largest, as a ratio of the ratios to the plain kernel: the rounds of two numbers are
// not interleaved.
func flatness(o podsOptions, all map[int]podRounds) (figures []report.Figure) {
	least, most := slices.Min(o.others), slices.Max(o.others)
	if least == most || !slices.Contains(o.kinds, pods.Kernel) {
		return nil
	}
	relative := func(others int, kind, measure string) float64 {
		return report.Median(column(all[others][kind], measure)) / report.Median(column(all[others][pods.Kernel], measure))
	}
	for _, kind := range o.measured(most) {
		if kind == pods.Kernel {
			continue
		}
		for _, measure := range []string{"rr-cpu", "udp-cpu"} {
			f := report.Figure{Name: fmt.Sprintf("%s.%s.%d/%d", kind, measure, most, least), Value: relative(most, kind, measure) / relative(least, kind, measure), Unit: "x"}
			if kind == pods.Ours {
				f = f.Judge(flatGoal)
			}
			figures = append(figures, f)
		}
	}
	return figures
}

// podTable prints medians, the ratios to the plain kernel in brackets, and the goals.
func podTable(out io.Writer, o podsOptions, figures []report.Figure) error {
	by := map[string]report.Figure{}
	for _, f := range figures {
		by[f.Name] = f
	}
	fmt.Fprintf(out, "\nPods of one node: medians of %d rounds, each measure %s. In brackets: times plain kernel routing.\n", o.rounds, o.window)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, others := range o.others {
		fmt.Fprintf(w, "\n%d others\trr cpu us\trr/s\tudp cpu us\tudp pps\ttcp cpu s/Gbit\tGbit/s\tADD ms\t\n", others)
		for _, kind := range o.measured(others) {
			fmt.Fprint(w, kind, "\t")
			for _, c := range []struct{ measure, format string }{
				{"rr-cpu", "%.2f"}, {"rr", "%.0f"}, {"udp-cpu", "%.2f"}, {"udp", "%.0f"}, {"tcp-cpu", "%.4f"}, {"tcp", "%.1f"}, {"add", "%.0f"},
			} {
				name := fmt.Sprintf("%s.%d.%s", kind, others, c.measure)
				fmt.Fprintf(w, c.format, by[name].Value)
				if r, ok := by[name+"/"+pods.Kernel]; ok {
					fmt.Fprintf(w, " (%.2f)", r.Value)
				}
				fmt.Fprint(w, "\t")
			}
			fmt.Fprintln(w)
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return goalTable(out, figures)
}

// goalTable prints the figures that have a goal.
func goalTable(out io.Writer, figures []report.Figure) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "\ngoal\tmeasured\tbound\t\n")
	for _, f := range figures {
		if f.Met == nil {
			continue
		}
		verdict := "not met"
		if *f.Met {
			verdict = "met"
		}
		fmt.Fprintf(w, "%s\t%.3g %s\t%s\t%s\n", f.Name, f.Value, f.Unit, f.Goal, verdict)
	}
	return w.Flush()
}
