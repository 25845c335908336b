// Command conformance holds CNI plugins against the 59 items of CNI 1.1.0 and
// prints a table, item by plugin, with the outcome in each version.
//
//	usage: go run ./tests/conformance [-plugin PATH [-config FILE]] [-compare veth,ptp,bridge]
//	                                  [-item N,N...] [-o text|reasons|markdown|json]
//
// Without -plugin it builds mk-cni and mknetd and tries those. It runs in network
// and mount namespaces of its own and needs root, ip and iptables; the first run
// downloads and builds the reference plugins.
//
//	exit: 0 the plugin under test, and veth, failed no item, 1 it did, 2 the suite could not run
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"mknet/tests/conformance/suite"
	"mknet/tests/netlab"
)

func main() {
	opts := registerFlags(flag.CommandLine)
	items := flag.String("item", "", "only these items, by number, comma-separated")
	format := flag.String("o", "text", "text (table), reasons (table and why), markdown (for the README) or json")
	flag.Parse()
	if !netlab.Inside() {
		if err := opts.prepare(); err != nil {
			fmt.Fprintln(os.Stderr, "conformance:", err)
			os.Exit(2)
		}
	}
	netlab.Private(func() int {
		status, err := run(opts, *items, *format)
		if err != nil {
			fmt.Fprintln(os.Stderr, "conformance:", err)
			return 2
		}
		return status
	})
}

func run(opts *options, items, format string) (int, error) {
	var wanted []int
	for s := range strings.SplitSeq(items, ",") {
		if s == "" {
			continue
		}
		n, err := strconv.Atoi(s)
		if err != nil {
			return 0, fmt.Errorf("-item %s: %w", items, err)
		}
		wanted = append(wanted, n)
	}
	if err := suite.SetUpHost(); err != nil {
		return 0, err
	}
	drivers, err := opts.drivers()
	if err != nil {
		return 0, err
	}
	var report suite.Report
	for _, d := range drivers {
		report.Plugins = append(report.Plugins, d.Name())
		if err := d.Start(); err != nil {
			return 0, fmt.Errorf("start %s: %w", d.Name(), err)
		}
		for _, c := range suite.Checks() {
			if len(wanted) > 0 && !slices.Contains(wanted, c.Item) {
				continue
			}
			for _, v := range suite.Versions {
				cell := suite.Run(d, c, v)
				report.Cells = append(report.Cells, cell)
				fmt.Fprintf(os.Stderr, "%s %s %s: %s\n", d.Name(), c.Title(), v, cell.Outcome)
			}
		}
		if err := d.Stop(); err != nil {
			return 0, fmt.Errorf("stop %s: %w", d.Name(), err)
		}
	}
	switch format {
	case "json":
		err = report.JSON(os.Stdout)
	case "markdown":
		err = report.Markdown(os.Stdout)
	case "reasons":
		if err = report.Table(os.Stdout); err == nil {
			report.Reasons(os.Stdout)
		}
	default:
		err = report.Table(os.Stdout)
	}
	failed := report.Failed(drivers[0].Name())
	if slices.Contains(strings.Split(opts.compare, ","), "veth") {
		failed += report.Failed(suite.NewMkPods("", "").Name())
	}
	if err == nil && failed > 0 {
		return 1, nil
	}
	return 0, err
}
