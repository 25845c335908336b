// Command mk-agent is mknet in a child kernel. It waits for the child's mk-shim,
// makes sure of who that is, gives the child its interface mkn0 with address,
// route, MTU and resolver, and carries its packets.
//
// Usage:
//
//	mk-agent run [flags]
//	mk-agent version
//
// Signals: SIGTERM and SIGINT end it in order (the device stays, with its
// address); SIGUSR1 logs its figures.
//
// Exit codes:
//
//	0  ended in order
//	1  it failed while running
//	2  wrong usage
//	3  no usable identity or token
//	4  cannot listen: no vsock, or the address is taken
//
// Files: the identity (--identity, else the kernel command line), the token
// (--token), tokens that replace one of the command line (--state-dir, 0700),
// the resolver configuration (--resolv-conf), /dev/net/tun.
//
// It needs CAP_NET_ADMIN, and CAP_NET_BIND_SERVICE for a vsock port below 1024.
// It needs no other program, no /sys, and /proc only for what only /proc has: the
// kernel command line, and to turn IPv6 off.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"mknet/mk-agent/internal/agent"
	"mknet/mk-agent/internal/identity"
	"mknet/shim/session"
	"mknet/shim/transport"
	"mknet/spec/version"
)

// Exit codes.
const (
	exitFailed   = 1
	exitUsage    = 2
	exitIdentity = 3
	exitListen   = 4
)

// coded is an error with the exit code that goes with it.
type coded struct {
	code int
	err  error
}

func (e *coded) Error() string { return e.err.Error() }
func (e *coded) Unwrap() error { return e.err }

func main() {
	cmd := command()
	err := cmd.Execute()
	if err == nil {
		return
	}
	code := exitUsage // cobra's own errors are about the command line
	var c *coded
	if errors.As(err, &c) {
		code = c.code
	}
	fmt.Fprintln(os.Stderr, "mk-agent:", err)
	os.Exit(code)
}

// options are the flags of run.
type options struct {
	listen, identity, token, cmdline, stateDir, resolvConf string
	allowCIDs                                              []uint
	logLevel                                               string
}

func command() *cobra.Command {
	root := &cobra.Command{Use: "mk-agent", Short: "mknet in a child kernel", SilenceErrors: true, SilenceUsage: true}
	var o options
	run := &cobra.Command{
		Use: "run", Short: "wait for mk-shim, configure mkn0 and carry packets", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return run(o) },
	}
	f := run.Flags()
	f.StringVar(&o.listen, "listen", "", fmt.Sprintf("where the shim dials: vsock://any:PORT or unix:///PATH (default from the kernel command line, else vsock://any:%d)", transport.DefaultPort))
	f.UintSliceVar(&o.allowCIDs, "allow-cid", nil, "vsock peers that may be the shim: 2 host, 0 multikernel, 1 this kernel itself (default 2; with transport=multikernel 0)")
	f.StringVar(&o.identity, "identity", "", "identity file, JSON with sandboxID, sandboxGeneration and optionally endpointGeneration; read again for every peer (default: the kernel command line)")
	f.StringVar(&o.token, "token", "/etc/mknet/token", "token file, beside an identity file: mode 0400 or 0600, owned by root, 32 bytes or 64 hexadecimal digits")
	f.StringVar(&o.cmdline, "cmdline", "/proc/cmdline", "kernel command line, read without an identity file: mknet.sandbox, mknet.generation, mknet.token, optionally mknet.endpoint and mknet.listen")
	f.StringVar(&o.stateDir, "state-dir", "/run/mk-agent", "where tokens are kept that replace one of the command line; must not outlive the boot")
	f.StringVar(&o.resolvConf, "resolv-conf", "/etc/resolv.conf", "resolver configuration to keep, or \"none\"")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
	root.AddCommand(run, &cobra.Command{
		Use: "version", Short: "print the version", Args: cobra.NoArgs,
		Run: func(c *cobra.Command, _ []string) { c.Println(version.Version) },
	})
	root.SetOut(os.Stdout)
	root.CompletionOptions.DisableDefaultCmd = true
	return root
}

func run(o options) error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.logLevel)); err != nil {
		return &coded{exitUsage, fmt.Errorf("--log-level %q: must be debug, info, warn or error", o.logLevel)}
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))

	server := &session.Server{Log: log}
	listen, err := identify(server, o)
	if err != nil {
		return &coded{exitIdentity, err}
	}
	address, err := transport.Parse(listen)
	if err != nil {
		return &coded{exitUsage, err}
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	l, err := listenWhenPossible(ctx, address, o, log)
	if err != nil {
		return &coded{exitListen, err}
	}
	if l == nil {
		return nil // told to end before it could listen
	}
	resolvConf := o.resolvConf
	if resolvConf == "none" {
		resolvConf = ""
	}
	a := agent.New(resolvConf, address.Multikernel(), log)
	server.Handler = a
	defer dumpOnSignal(a)()
	log.Info("listening", "address", address.String(), "version", version.Version)
	if err := errors.Join(server.Serve(ctx, l), a.Close()); err != nil {
		return &coded{exitFailed, err}
	}
	return nil
}

// identify tells the server who it is, once to find out whether that works, and
// returns where to listen.
func identify(s *session.Server, o options) (listen string, err error) {
	listen = o.listen
	if o.identity != "" {
		s.Credentials = identity.FromFiles(o.identity, o.token)
	} else {
		c, err := identity.ReadCmdline(o.cmdline, o.stateDir)
		if err != nil {
			return "", err
		}
		s.Credentials, s.KeepToken = c.Credentials, c.Keep
		if listen == "" {
			listen = c.Listen
		}
	}
	if listen == "" {
		listen = fmt.Sprintf("vsock://any:%d", transport.DefaultPort)
	}
	_, err = s.Credentials()
	return listen, err
}

// bootPatience is how long the transport's driver may take to appear while the
// child boots.
const bootPatience = 30 * time.Second

// listenWhenPossible listens, and waits for a driver that is not there yet. It
// returns nothing when ctx ends first.
func listenWhenPossible(ctx context.Context, a transport.Address, o options, log *slog.Logger) (net.Listener, error) {
	opts := transport.Options{Rejected: func(peer net.Addr, reason string) { log.Warn("peer rejected", "peer", peer.String(), "err", reason) }}
	for _, cid := range o.allowCIDs {
		opts.AllowedCIDs = append(opts.AllowedCIDs, uint32(cid))
	}
	for begin := time.Now(); ; {
		l, err := transport.Listen(ctx, a, opts)
		missing := errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.ENODEV) || errors.Is(err, fs.ErrNotExist)
		switch {
		case err == nil:
			return l, nil
		case ctx.Err() != nil:
			return nil, nil
		case !missing || time.Since(begin) > bootPatience:
			return nil, err
		}
		log.Info("waiting for the transport", "err", err)
		select {
		case <-ctx.Done():
			return nil, nil
		case <-time.After(250 * time.Millisecond):
		}
	}
}

// dumpOnSignal logs the figures at every SIGUSR1 until the returned function is
// called, which waits for the goroutine.
func dumpOnSignal(a *agent.Agent) func() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGUSR1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range signals {
			a.Dump()
		}
	}()
	return func() {
		signal.Stop(signals)
		close(signals)
		<-done
	}
}
