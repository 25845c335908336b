// Command callers puts every real CNI caller in front of this project's plugin
// and prints, caller by caller and verb by verb, which version was negotiated,
// what came of it and what was left behind.
//
//	usage: go run ./tests/callers [-plugin mk|ptp|bridge] [-mode MODE] [-only NAME,...] [-bin FOLDER] [-v]
//
// It needs root, the packages of packages.txt beside it, and on the first run the
// way to a Go module proxy; what it builds is kept in ~/.cache/mknet. It runs in
// network and mount namespaces of its own. Containers get cgroups of the machine
// (/mknet-callers, /libpod_parent), which go with them.
//
//	exit: 0 every caller that can run here worked, 1 one did not (with CI=true or
//	MKNET_REQUIRE set: or could not run), 2 the matrix itself could not run
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"

	"mknet/tests/netlab"
)

func main() {
	plugin := flag.String("plugin", "mk", "the plugin in front: mk (ours), ptp or bridge")
	mode := flag.String("mode", "", "only this mode of ours: multikernel or veth")
	only := flag.String("only", "", "only these callers, comma-separated")
	bin := flag.String("bin", "", "folder with mk-cni and mknetd; default: built now")
	verbose := flag.Bool("v", false, "show every step and the callers' output")
	flag.Parse()
	if !netlab.Inside() {
		if err := prepare(*plugin, *bin); err != nil {
			fmt.Fprintln(os.Stderr, "callers:", err)
			os.Exit(2)
		}
	}
	netlab.Private(func() int {
		status, err := run(*plugin, *bin, *mode, *only, *verbose)
		if err != nil {
			fmt.Fprintln(os.Stderr, "callers:", err)
			return 2
		}
		return status
	})
}

func run(plugin, bin, mode, only string, verbose bool) (status int, err error) {
	h, err := newHost(plugin, bin, verbose)
	if err != nil {
		return 0, err
	}
	defer func() {
		if closed := h.close(); closed != nil && err == nil {
			err = closed
		}
	}()
	var reports []report
	for _, h.network = range h.networks() {
		if mode != "" && mode != h.mode {
			continue
		}
		if err := h.prime(); err != nil {
			return 0, fmt.Errorf("%s: %w", h.mode, err)
		}
		for _, c := range callers {
			if only == "" || slices.Contains(strings.Split(only, ","), c.name) {
				reports = append(reports, h.try(c))
			}
		}
	}
	if err := table(os.Stdout, reports); err != nil {
		return 0, err
	}
	strict := os.Getenv("CI") == "true" || os.Getenv("MKNET_REQUIRE") != ""
	for _, r := range reports {
		if r.failed() || strict && r.notRun != "" {
			status = 1
		}
	}
	return status, nil
}
