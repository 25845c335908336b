// Command twokernel runs mknet's programs on two real kernels: mknetd, mk-cni (by
// cnitool) and mk-shim on a primary, mk-agent in a child, real AF_VSOCK between
// them. QEMU runs the kernels without KVM, and a switch of our own (vsockswitch)
// is their vsock, so that it works on any machine.
//
// usage: go run ./tests/twokernel [-parts LIST] [-v] [-keep]
//
//	pair      two guests: the primary dials vsock://42:1023
//	hvsock    the primary is a private host on this machine, the child a guest:
//	          hvsock:///SOCKET:1023
//	loopback  one guest, the child is a namespace in it: vsock://1:1023
//
// Each part plays the same scenario: ADD, CHECK, BIND, traffic, an agent that is
// killed, a child that is killed and boots again as another, DEL, nothing left.
//
// exit:  0 every step held, 1 one did not
//
// It needs root, the packages of packages.txt, and at its first run Debian's
// mirror for the kernel, which it keeps in ~/.cache/mknet/twokernel.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"mknet/tests/netlab"
)

// dirEnv tells the re-executed process, inside the private host, what the one
// outside has built.
const dirEnv = "MKNET_TWOKERNEL_DIR"

// parts in the order in which they run.
var parts = []struct {
	name string
	play func(*stage) error
}{{"pair", playPair}, {"hvsock", playHybrid}, {"loopback", playLoopback}}

func main() {
	var names []string
	for _, p := range parts {
		names = append(names, p.name)
	}
	list := flag.String("parts", strings.Join(names, ","), "what to run")
	verbose := flag.Bool("v", false, "print every command and its output")
	keep := flag.Bool("keep", false, "keep images, consoles and logs")
	flag.Parse()
	chosen := strings.Split(*list, ",")
	for _, name := range chosen {
		if !slices.Contains(names, name) {
			fmt.Fprintf(os.Stderr, "twokernel: no part %q, there are %s\n", name, strings.Join(names, ", "))
			os.Exit(2)
		}
	}
	if !netlab.Inside() {
		if err := prepare(); err != nil {
			fmt.Fprintln(os.Stderr, "twokernel:", err)
			os.Exit(1)
		}
	}
	netlab.Private(func() int { return run(chosen, *verbose, *keep) })
}

// prepare builds what the guests hold, where there is a network to fetch it.
func prepare() error {
	dir, err := os.MkdirTemp("", "twokernel-")
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	begin := time.Now()
	if err := build(ctx, dir); err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	fmt.Printf("programs, kernel and images: %.0f s\n", time.Since(begin).Seconds())
	return os.Setenv(dirEnv, dir)
}

func run(chosen []string, verbose, keep bool) int {
	dir := os.Getenv(dirEnv)
	if keep {
		defer fmt.Println("kept:", dir)
	} else {
		defer os.RemoveAll(dir)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s := &show{out: os.Stdout, verbose: verbose}
	for _, p := range parts {
		if !slices.Contains(chosen, p.name) {
			continue
		}
		begin := time.Now()
		s.chapter(p.name)
		st := &stage{show: s, ctx: ctx, built: builtIn(dir), dir: dir, name: p.name}
		if err := p.play(st); err != nil {
			s.fault(fmt.Sprintf("the part goes on no further: %v", err))
		}
		st.close()
		fmt.Printf("%s took %.0f s\n", p.name, time.Since(begin).Seconds())
	}
	fmt.Printf("\n%d passed, %d failed\n", s.passed, s.failed)
	if s.failed > 0 {
		return 1
	}
	return 0
}
