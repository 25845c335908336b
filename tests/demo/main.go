// Command demo shows mknet's main job on real parts: a CNI caller asks, two
// children get a network, an operator looks at it, DEL leaves nothing. The second act
// adds two ordinary pods, which outlive the daemon; the third says who may talk to whom.
//
// It makes a private host (network and mount namespaces of its own), an internet
// behind that host's egress, mknetd, and two children, each with network, mount
// and UTS namespaces and its own mk-agent. Then it runs one command after the
// other, as an operator would type it, and says whether it showed what it must.
//
// usage: demo -bin DIR -cnitool FILE [-keep-logs DIR]
// exit:  0 every step held, 1 one did not
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"mknet/tests/netlab"
)

func main() {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "internet":
			os.Exit(serveUntilStopped(serveInternet))
		case "hello":
			os.Exit(serveUntilStopped(func(ctx context.Context) error { return serveHello(ctx, os.Args[2], os.Args[3]) }))
		}
	}
	bin := flag.String("bin", "bin", "folder with mk-cni, mknetd, mk-shim and mk-agent")
	cnitool := flag.String("cnitool", "bin/tools/cnitool", "the CNI caller")
	flag.Parse()
	netlab.Private(func() int { return run(*bin, *cnitool) })
}

// serveUntilStopped runs one of the demo's own servers until SIGTERM.
func serveUntilStopped(f func(context.Context) error) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := f(ctx); err != nil && !errors.Is(err, context.Canceled) {
		slog.Error("demo server", "err", err)
		return 1
	}
	return 0
}

func run(bin, cnitool string) int {
	dir, err := os.MkdirTemp("/run", "demo-")
	if err != nil {
		slog.Error("demo", "err", err)
		return 1
	}
	defer os.RemoveAll(dir)
	d := &demo{show: &show{out: os.Stdout, logDir: dir}, dir: dir}
	for _, p := range []struct {
		dst *string
		src string
	}{{&d.bin, bin}, {&d.cnitool, cnitool}, {&d.self, "/proc/self/exe"}} {
		if *p.dst, err = filepath.EvalSymlinks(p.src); err == nil {
			*p.dst, err = filepath.Abs(*p.dst)
		}
		if err != nil {
			slog.Error("demo: build first (make demo does)", "err", err)
			return 1
		}
	}
	defer d.stopAll()
	if err := d.play(); err != nil {
		fmt.Fprintln(d.out, "\ndemo stopped:", err)
		d.failed++
	}
	fmt.Fprintf(d.out, "\n%d passed, %d failed\n", d.passed, d.failed)
	if d.failed > 0 {
		d.printLogs()
		return 1
	}
	return 0
}

// printLogs shows what the background programs said, for the one who has to
// find out why a step failed.
func (d *demo) printLogs() {
	logs, _ := filepath.Glob(d.logDir + "/*.log")
	for _, name := range logs {
		text, _ := os.ReadFile(name)
		fmt.Fprintf(d.out, "\n== %s\n%s", filepath.Base(name), text)
	}
}
