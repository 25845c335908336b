package main

import (
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"mknet/tests/bench/link"
	"mknet/tests/bench/report"
	"mknet/tests/bench/side"
	"mknet/tests/conformance/suite"
	"mknet/tests/netlab"
)

// pumpOptions are the command line of the benchmark of the pump.
type pumpOptions struct {
	rounds  int
	window  time.Duration // of each measure
	limit   time.Duration // no round begins that would likely end later
	links   []link.Link
	profile string
}

func parsePump(args []string) (o pumpOptions, err error) {
	fs := flag.NewFlagSet("bench pump", flag.ContinueOnError)
	quick := fs.Bool("quick", false, "two short rounds of our own variants: a look, no measurement")
	rounds := fs.Int("rounds", 5, "interleaved rounds")
	seconds := fs.Float64("seconds", 0.5, "length of each measure")
	limit := fs.Duration("limit", 9*time.Minute+30*time.Second, "begin no round that would end later")
	only := fs.String("only", "", "only these links, comma-separated: "+strings.Join(names(link.Links), " "))
	profile := fs.String("profile", "", "write CPU profiles of our pumps to this folder")
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	o = pumpOptions{rounds: *rounds, window: time.Duration(*seconds * float64(time.Second)), limit: *limit}
	o.links = slices.Clone(link.Links)
	if *quick {
		o.rounds, o.window, o.limit = 2, 250*time.Millisecond, 80*time.Second
		o.links = slices.DeleteFunc(o.links, func(k link.Link) bool { return k.Peer })
	}
	if *only != "" {
		if o.links, err = pick(strings.Split(*only, ",")); err != nil {
			return o, err
		}
	}
	if *profile != "" {
		if o.profile, err = filepath.Abs(*profile); err != nil {
			return o, err
		}
	}
	if o.rounds < 1 || o.window < 50*time.Millisecond {
		return o, fmt.Errorf("%d rounds of %s: must be at least 1 of 50ms", o.rounds, o.window)
	}
	return o, nil
}

func names(links []link.Link) (n []string) {
	for _, k := range links {
		n = append(n, k.Name)
	}
	return n
}

// pick returns the links of these names, in their own order.
func pick(wanted []string) ([]link.Link, error) {
	for _, n := range wanted {
		if !slices.Contains(names(link.Links), n) {
			return nil, fmt.Errorf("link %q: must be of %s", n, strings.Join(names(link.Links), ", "))
		}
	}
	return slices.DeleteFunc(slices.Clone(link.Links), func(k link.Link) bool { return !slices.Contains(wanted, k.Name) }), nil
}

func pumpBench(args []string) int {
	o, err := parsePump(args)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench pump:", err)
		return 2
	}
	if !netlab.Inside() {
		if err := prepare(o, os.Stderr); err != nil {
			fmt.Fprintln(os.Stderr, "bench pump:", err)
			return 2
		}
	}
	status := 2
	netlab.Private(func() int {
		if status, err = runPump(o, os.Stdout, os.Stderr); err != nil {
			fmt.Fprintln(os.Stderr, "bench pump:", err)
		}
		return status
	})
	return status
}

// binaries is the folder of what prepare builds.
func binaries() (string, error) {
	cache, err := suite.CacheDir()
	return filepath.Join(cache, "bench"), err
}

// prepare builds, outside of the private host, the agent, whose size is a figure, and
// the peers. A peer that cannot be built is reported later as not measured.
func prepare(o pumpOptions, notes io.Writer) error {
	root, err := suite.Root()
	if err != nil {
		return err
	}
	out, err := binaries()
	if err != nil {
		return err
	}
	if err := suite.Build(root, out, "-ldflags", "-s -w", "./mk-agent"); err != nil {
		return err
	}
	if slices.ContainsFunc(o.links, func(k link.Link) bool { return k.Peer }) {
		if err := suite.Build(filepath.Join(root, "tests", "bench", "peers"), out, "-ldflags", "-s -w", "tool"); err != nil {
			fmt.Fprintln(notes, "peers:", err)
		}
	}
	if o.profile != "" {
		return os.MkdirAll(o.profile, 0o755)
	}
	return nil
}

// runPump measures, prints the table and writes the figures. The status is that of
// the program.
func runPump(o pumpOptions, out, notes io.Writer) (status int, err error) {
	bin, err := binaries()
	if err != nil {
		return 2, err
	}
	rounds, failed, err := measure(o, bin, notes)
	if err != nil {
		return 2, err
	}
	figures := pumpFigures(o.links, rounds)
	if v, ok := value(rounds, machine, load); ok {
		figures = append(figures, report.Figure{Name: machine + "." + load, Value: v, Unit: "processes"})
	}
	if info, err := os.Stat(filepath.Join(bin, "mk-agent")); err == nil {
		figures = append(figures, report.Figure{Name: "mk-agent.size", Value: float64(info.Size()) / (1 << 20), Unit: "MiB"})
	}
	if err := pumpTable(out, o, rounds, figures, failed); err != nil {
		return 2, err
	}
	if err := report.Write("pump", figures); err != nil {
		return 2, err
	}
	for _, k := range o.links {
		if !k.Peer && failed[k.Name] != nil {
			status = 1
		}
	}
	return status, nil
}

// round is what one round gave, by the name of the link.
type round map[string]link.Sample

// measure runs the rounds, each in an order of its own. A link that fails is not
// tried again.
func measure(o pumpOptions, bin string, notes io.Writer) (rounds []round, failed map[string]error, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	begin := time.Now()
	failed = map[string]error{}
	for r := range o.rounds {
		if past := time.Since(begin); r > 0 && past+past/time.Duration(r) > o.limit {
			fmt.Fprintf(notes, "stopped after %d of %d rounds: the next would end later than %s\n", r, o.rounds, o.limit)
			break
		}
		fmt.Fprintf(notes, "round %d of %d\n", r+1, o.rounds)
		links := slices.Clone(o.links)
		rand.Shuffle(len(links), func(i, j int) { links[i], links[j] = links[j], links[i] })
		// With others at work the round trips are those of the scheduler.
		got := round{machine: link.Sample{load: loadAverage()}}
		for _, k := range links {
			if failed[k.Name] != nil {
				continue
			}
			s, err := once(k, link.Options{Self: self, Peers: bin, Profile: o.profile, Window: o.window})
			if err != nil {
				failed[k.Name] = err
				fmt.Fprintln(notes, err)
			}
			got[k.Name] = s
		}
		rounds = append(rounds, got)
	}
	return rounds, failed, nil
}

// The figure that says how far to trust the others.
const (
	machine = "machine"
	load    = "load"
)

// loadAverage is that of the last minute, proc(5); 0 where there is none.
func loadAverage() (v float64) {
	raw, _ := os.ReadFile("/proc/loadavg")
	_, _ = fmt.Sscan(string(raw), &v)
	return v
}

// once measures a link in a folder of its own.
func once(k link.Link, o link.Options) (link.Sample, error) {
	dir, err := os.MkdirTemp("", "mknet-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	o.Dir = dir
	return link.Measure(k, o)
}

// naive is what everything is compared with.
const naive = side.Naive
