package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"mknet/shim/internal/binding"
	"mknet/shim/internal/carrier"
	"mknet/shim/internal/process"
	"mknet/shim/internal/stats"
	data "mknet/shim/pump"
	"mknet/shim/transport"
	"mknet/spec/api"
	"mknet/spec/client"
	"mknet/spec/endpoint"
	"mknet/spec/pump"
)

var (
	errTokenFile = errors.New("token file is not usable")
	errDaemon    = errors.New("mknetd cannot be used")
)

// options are the flags of run.
type options struct {
	socket, endpoint, network, containerID, ifName, netns string
	sandbox                                               endpoint.Sandbox
	agent, token, nonceFile, childLink                    string
	bound, sealed, parentDeath                            bool
	lanes, priority, runtimePID                           int
	keepalive, connectTimeout, reconnectTimeout           time.Duration
	statsDir, logLevel                                    string
}

func runCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use: "run", Short: "join an endpoint to its child and carry packets", Long: "run joins an endpoint to its child and carries packets until it is told to end.\n\n" + exitHelp,
		Args: cobra.NoArgs, RunE: action(func(*cobra.Command, []string) error { return run(o) }),
	}
	f := cmd.Flags()
	f.StringVar(&o.socket, "socket", api.DefaultSocket, "mknetd's socket")
	f.StringVar(&o.endpoint, "endpoint", "", "endpoint generation, 32 hexadecimal digits")
	f.StringVar(&o.network, "network", "", "CNI network name, with --container-id and --ifname in place of --endpoint")
	f.StringVar(&o.containerID, "container-id", "", "CNI container ID")
	f.StringVar(&o.ifName, "ifname", "", "CNI interface name")
	f.StringVar(&o.netns, "netns", "", "path of the CNI network namespace, in place of --endpoint")
	f.StringVar(&o.sandbox.ID, "sandbox-id", "", "sandbox ID (required)")
	f.StringVar(&o.sandbox.Generation, "sandbox-generation", "", "sandbox generation: another one for every boot of the child (required)")
	f.StringVar(&o.agent, "agent", "", "where the child's mk-agent listens: vsock://CID:PORT[?transport=multikernel], hvsock:///PATH:PORT or unix:///PATH (required)")
	f.StringVar(&o.token, "token", "", "token file: mode 0400 or 0600, owned by root, 32 bytes or 64 hexadecimal digits (required); see mk-shim token")
	f.BoolVar(&o.bound, "bound", false, "the runtime has made the BIND and makes the UNBIND; needs --endpoint and --nonce-file")
	f.StringVar(&o.nonceFile, "nonce-file", "", "file with the nonce of the runtime's BIND")
	f.BoolVar(&o.sealed, "sealed", false, "encrypt the packets too; without it only the handshake is (see spec/pump-protocol.md)")
	f.IntVar(&o.lanes, "lanes", pump.MaxLanes, "1, or 2 for a lane of its own for everything but bulk traffic; transport=multikernel has 1")
	f.IntVar(&o.priority, "priority", 0, "nice value, -20 to 19; below 0 shortens latency under load and can cost throughput")
	f.DurationVar(&o.keepalive, "keepalive", data.DefaultDeadAfter, "silence after which the child counts as dead")
	f.DurationVar(&o.connectTimeout, "connect-timeout", time.Minute, "give up when the agent was never reached for so long; 0: never")
	f.DurationVar(&o.reconnectTimeout, "reconnect-timeout", 0, "give up when the agent was lost for so long; 0: never, the binding decides")
	f.StringVar(&o.childLink, "child-link", endpoint.ChildLink+"0", "name of the interface in the child; another one for every attachment")
	f.BoolVar(&o.parentDeath, "parent-death", false, "end when the process that started mk-shim does")
	f.IntVar(&o.runtimePID, "runtime-pid", 0, "end when this process does")
	f.StringVar(&o.statsDir, "stats-dir", stats.DefaultDir, "where mk-shim stats finds this shim")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
	for _, name := range []string{"sandbox-id", "sandbox-generation", "agent", "token"} {
		_ = cmd.MarkFlagRequired(name) // fails for an unknown name only
	}
	return cmd
}

// run is the life of a shim from its flags to its end.
func run(o options) error {
	cfg, err := o.carrierConfig()
	if err != nil {
		return err
	}
	if o.priority != 0 {
		if err := process.SetNice(o.priority); err != nil {
			return err
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	ctx, release, err := o.follow(ctx)
	if err != nil {
		return err
	}
	defer release()

	c := carrier.New(cfg)
	defer dumpOnSignal(c, cfg.Log)()
	stopStats := func() {}
	defer func() { stopStats() }()
	err = c.Run(ctx, func(ep endpoint.Endpoint) {
		// Only now, since an earlier shim of the endpoint has ended by now.
		s, err := stats.Serve(ctx, o.statsDir, ep.Generation, func() any { return c.Status() })
		if err != nil {
			cfg.Log.Warn("no live figures", "err", err)
			return
		}
		stopStats = s
	})
	dump(c, cfg.Log)
	if cause := context.Cause(ctx); errors.Is(cause, process.ErrEnded) {
		cfg.Log.Info("ended with the runtime", "err", cause)
	}
	return err
}

// follow ties ctx to the processes that the flags name.
func (o options) follow(ctx context.Context) (context.Context, func(), error) {
	releases := []func(){}
	release := func() {
		for _, r := range releases {
			r()
		}
	}
	if o.parentDeath {
		next, r, err := process.UntilParent(ctx)
		if err != nil {
			return nil, nil, err
		}
		ctx, releases = next, append(releases, r)
	}
	if o.runtimePID != 0 {
		next, r, err := process.Until(ctx, o.runtimePID)
		if err != nil {
			release()
			return nil, nil, err
		}
		ctx, releases = next, append(releases, r)
	}
	return ctx, release, nil
}

// carrierConfig checks the flags and reads the files that they name.
func (o options) carrierConfig() (carrier.Config, error) {
	var none carrier.Config
	bad := func(format string, args ...any) (carrier.Config, error) {
		return none, &usageError{fmt.Errorf(format, args...)}
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.logLevel)); err != nil {
		return bad("--log-level %q: must be debug, info, warn or error", o.logLevel)
	}
	sel, err := o.selector()
	if err != nil {
		return bad("%w", err)
	}
	if err := o.sandbox.Validate(); err != nil {
		return bad("%w", err)
	}
	agent, err := transport.Parse(o.agent)
	if err != nil {
		return none, err
	}
	switch {
	case o.lanes < 1 || o.lanes > pump.MaxLanes:
		return bad("--lanes %d: must be 1 or %d", o.lanes, pump.MaxLanes)
	case o.keepalive < pump.MinKeepalive || o.keepalive > pump.MaxKeepalive || o.keepalive%time.Millisecond != 0:
		return bad("--keepalive %s: must be whole milliseconds from %s to %s", o.keepalive, pump.MinKeepalive, pump.MaxKeepalive)
	case o.priority < -20 || o.priority > 19:
		return bad("--priority %d: must be -20 to 19", o.priority)
	case o.bound != (o.nonceFile != "") || o.bound && o.endpoint == "":
		return bad("--bound needs --nonce-file and --endpoint, and --nonce-file needs --bound")
	case o.connectTimeout < 0 || o.reconnectTimeout < 0 || o.runtimePID < 0:
		return bad("times and process IDs must not be negative")
	}
	req := binding.Request{Select: sel, Sandbox: o.sandbox, Queues: transport.Lanes(o.lanes, agent.Multikernel())}
	if o.bound {
		if req.Nonce, err = readNonce(o.nonceFile); err != nil {
			return none, err
		}
	}
	tokens, err := carrier.LoadTokens(o.token)
	if err != nil {
		return none, fmt.Errorf("%w: %w", errTokenFile, err)
	}
	daemon, err := client.New(o.socket)
	if err != nil {
		return bad("--socket: %w", err)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	return carrier.Config{
		Daemon: daemon, Figures: daemon, Request: req, KeepBound: o.bound, Agent: agent, Dial: transport.Dial, Tokens: tokens, ChildLink: o.childLink,
		Sealed: o.sealed, Keepalive: o.keepalive, ConnectTimeout: o.connectTimeout, ReconnectTimeout: o.reconnectTimeout, Log: log,
	}, nil
}

// selector names the endpoint in one of the three ways.
func (o options) selector() (api.Selector, error) {
	sel := api.Selector{Attachment: endpoint.Attachment{Network: o.network, ContainerID: o.containerID, IfName: o.ifName}, NetnsPath: o.netns}
	byAttachment := sel.Attachment != endpoint.Attachment{}
	if n := btoi(o.endpoint != "") + btoi(byAttachment) + btoi(o.netns != ""); n != 1 {
		return sel, errors.New("name the endpoint by --endpoint, or by --network, --container-id and --ifname, or by --netns")
	}
	if o.endpoint != "" {
		var err error
		sel.Generation, err = endpoint.ParseGeneration(o.endpoint)
		return sel, err
	}
	if byAttachment {
		return sel, sel.Attachment.Validate()
	}
	return sel, nil
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// readNonce reads the 32 hexadecimal digits of a BIND's nonce.
func readNonce(path string) (string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("nonce file: %w", err)
	}
	defer func() { _ = f.Close() }() // read only
	b, err := io.ReadAll(io.LimitReader(f, 64))
	if err != nil {
		return "", fmt.Errorf("nonce file: %w", err)
	}
	nonce := strings.TrimSpace(string(b))
	if _, err := strconv.ParseUint(nonce[:min(len(nonce), 16)], 16, 64); err != nil || len(nonce) != 32 {
		return "", fmt.Errorf("%w: nonce file %s: must hold the 32 hexadecimal digits that BIND returned", errDaemon, path)
	}
	return nonce, nil
}

// dump logs the figures of a shim.
func dump(c *carrier.Carrier, log *slog.Logger) {
	s := c.Status()
	log.Info("figures", "endpoint", s.Generation.Short(), "state", s.State, "since", s.Since.Format(time.RFC3339), "lanes", s.Lanes,
		"offloads", s.Offloads, "counters", fmt.Sprintf("%+v", s.Counters))
}

// dumpOnSignal logs the figures at every SIGUSR1 until the returned function is
// called, which waits for the goroutine.
func dumpOnSignal(c *carrier.Carrier, log *slog.Logger) func() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGUSR1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range signals {
			dump(c, log)
		}
	}()
	return func() {
		signal.Stop(signals)
		close(signals)
		<-done
	}
}
