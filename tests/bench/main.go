// Command bench measures this project beside what else could do its work, on the
// machine it runs on. Figures are medians over interleaved rounds and ratios within a
// round, because a busy machine moves all variants together.
//
//	usage: go run ./tests/bench pump [-rounds N] [-seconds S] [-only NAME,...]
//	                                 [-quick] [-profile FOLDER]
//	       go run ./tests/bench pods [-rounds N] [-seconds S] [-only NAME,...]
//	                                 [-others N,...]
//	       go run ./tests/bench policy [-rounds N] [-seconds S]
//
// pump measures the packet pump between two network namespaces beside a veth, the
// naive pump and other programs that carry packets in user space. -profile writes a
// CPU profile of each of our pumps, one for each end.
//
// pods measures the way between two ordinary pods of one node, beside plain kernel
// routing and the reference plugins, with few and with many other pods there.
//
// policy measures the same way under rules, 16 to 1,024 of them in each direction: ours
// beside plain kernel routing, iptables and nft's verdict maps.
//
// It needs root, the packages of packages.txt, and on the first run the way to a Go
// module proxy; what it builds is kept in ~/.cache/mknet. With BENCH_OUT=FOLDER the
// figures are also written there, as pump.json, pods.json or policy.json; the last
// keeps what BenchmarkPolicy of mknetd/internal/datapath has written there.
//
//	exit: 0 measured, whether or not the goals are met; 1 one of ours could not be
//	measured; 2 the benchmark itself could not run
package main

import (
	"fmt"
	"os"

	"mknet/tests/bench/pods"
	"mknet/tests/bench/side"
)

// commands are the benchmarks by name. Each gets its arguments and returns the exit
// status.
var commands = map[string]func(args []string) int{
	"pump":   pumpBench,
	"pods":   podsBench,
	"policy": policyBench,
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == side.Command {
		os.Exit(side.Main(os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == pods.Command {
		os.Exit(pods.Main(os.Args[2:]))
	}
	if len(os.Args) > 1 {
		if run, ok := commands[os.Args[1]]; ok {
			os.Exit(run(os.Args[2:]))
		}
	}
	fmt.Fprintln(os.Stderr, "usage: bench pump [-rounds N] [-seconds S] [-only NAME,...] [-quick] [-profile FOLDER]\n"+
		"       bench pods [-rounds N] [-seconds S] [-only NAME,...] [-others N,...]\n"+
		"       bench policy [-rounds N] [-seconds S]")
	os.Exit(2)
}
